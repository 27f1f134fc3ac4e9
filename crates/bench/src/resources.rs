//! CPU time and context switches: of a process with all its threads, and of the whole machine.
//!
//! The machine's figures hold what kernel threads do for a file system, and everything that runs
//! beside the benchmark.
use cairn_harness::proc::{MachineTimes, ProcessTimes, Status, ticks_per_second};
use std::ops::{Add, Sub};

/// What was used up to a moment, or between two.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Resources {
    /// In user and kernel mode.
    pub cpu_seconds: f64,
    /// In kernel mode.
    pub system_cpu_seconds: f64,
    /// Voluntary and involuntary ones.
    pub context_switches: u64,
}

impl Add for Resources {
    type Output = Resources;

    fn add(self, other: Resources) -> Resources {
        Resources {
            cpu_seconds: self.cpu_seconds + other.cpu_seconds,
            system_cpu_seconds: self.system_cpu_seconds + other.system_cpu_seconds,
            context_switches: self.context_switches + other.context_switches,
        }
    }
}

impl Sub for Resources {
    type Output = Resources;

    fn sub(self, earlier: Resources) -> Resources {
        Resources {
            cpu_seconds: (self.cpu_seconds - earlier.cpu_seconds).max(0.0),
            system_cpu_seconds: (self.system_cpu_seconds - earlier.system_cpu_seconds).max(0.0),
            context_switches: self.context_switches.saturating_sub(earlier.context_switches),
        }
    }
}

/// Context switches of the calling thread: its process no longer knows them when it has ended.
pub fn switches_of_this_thread() -> u64 {
    Status::of("thread-self").map_or(0, |status| status.context_switches())
}

impl Resources {
    fn of_ticks(user: u64, system: u64, context_switches: u64) -> Self {
        Self {
            cpu_seconds: (user + system) as f64 / ticks_per_second(),
            system_cpu_seconds: system as f64 / ticks_per_second(),
            context_switches,
        }
    }

    /// Of a process: CPU time of all threads, context switches of those that live. Zero when there
    /// is none.
    pub fn of_process(process: &str) -> Self {
        let times = ProcessTimes::of(process).unwrap_or_default();
        let context_switches =
            Status::of_threads(process).map(|status| status.context_switches()).sum();
        Self::of_ticks(times.user_ticks, times.system_ticks, context_switches)
    }

    /// CPU time of the programs that this one has run, and waited for, with all that they ran.
    pub fn of_ended_children() -> Self {
        let times = ProcessTimes::of("self").unwrap_or_default();
        Self::of_ticks(times.children_user_ticks, times.children_system_ticks, 0)
    }

    /// Of the whole machine.
    pub fn of_machine() -> Self {
        let times = MachineTimes::now();
        Self::of_ticks(times.user_ticks, times.system_ticks, times.context_switches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::clock;
    use std::time::Duration;

    #[test]
    fn this_process_and_machine_have_figures() {
        clock::sleep(Duration::from_millis(2));
        assert!(Resources::of_process("self").context_switches > 0);
        assert!(Resources::of_machine().cpu_seconds > 0.0);
        assert!(switches_of_this_thread() > 0);
        assert_eq!(Resources::of_process("no-such-process"), Resources::default());
    }
}
