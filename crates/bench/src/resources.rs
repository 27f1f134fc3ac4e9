//! CPU time and context switches, as `/proc` counts them: of a process with all its threads, and of
//! the whole machine.
//!
//! The machine's figures hold what kernel threads do for a file system, and everything that runs
//! beside the benchmark.
use std::fs;
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

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// The sum of both kinds of context switches in a `status` file of `/proc`.
fn switches_in(status: &str) -> u64 {
    let lines = status.lines().filter(|line| line.contains("voluntary_ctxt_switches"));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

/// User and system ticks in a `stat` file of `/proc`; the command's name, in parentheses, may hold
/// anything.
fn ticks_in(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let user = fields.nth(11)?.parse().ok()?;
    Some((user, fields.next()?.parse().ok()?))
}

/// The same of the children that have ended and were waited for, with theirs.
fn ticks_of_children_in(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let user = fields.nth(13)?.parse().ok()?;
    Some((user, fields.next()?.parse().ok()?))
}

/// Context switches of the calling thread: its process no longer knows them when it has ended.
pub fn switches_of_this_thread() -> u64 {
    fs::read_to_string("/proc/thread-self/status").map_or(0, |status| switches_in(&status))
}

impl Resources {
    /// Of a process: CPU time of all threads, context switches of those that live. Zero when there
    /// is none.
    pub fn of_process(process: &str) -> Self {
        let (user, system) = fs::read_to_string(format!("/proc/{process}/stat"))
            .ok()
            .and_then(|stat| ticks_in(&stat))
            .unwrap_or_default();
        let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let statuses =
            threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
        Self {
            cpu_seconds: (user + system) as f64 / ticks_per_second(),
            system_cpu_seconds: system as f64 / ticks_per_second(),
            context_switches: statuses.map(|status| switches_in(&status)).sum(),
        }
    }

    /// CPU time of the programs that this one has run, and waited for, with all that they ran.
    pub fn of_ended_children() -> Self {
        let (user, system) = fs::read_to_string("/proc/self/stat")
            .ok()
            .and_then(|stat| ticks_of_children_in(&stat))
            .unwrap_or_default();
        let seconds = |ticks: u64| ticks as f64 / ticks_per_second();
        Self {
            cpu_seconds: seconds(user + system),
            system_cpu_seconds: seconds(system),
            context_switches: 0,
        }
    }

    /// Of the whole machine.
    pub fn of_machine() -> Self {
        Self::in_machine_stat(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    fn in_machine_stat(stat: &str) -> Self {
        let values = |name: &str| -> Vec<u64> {
            let line = stat
                .lines()
                .find(|line| line.split_whitespace().next() == Some(name))
                .unwrap_or_default();
            line.split_whitespace().skip(1).map_while(|value| value.parse().ok()).collect()
        };
        // user, nice, system, idle, iowait, irq, softirq
        let cpu = values("cpu");
        let at = |index: usize| cpu.get(index).copied().unwrap_or(0);
        let (user, system) = (at(0) + at(1), at(2) + at(5) + at(6));
        Self {
            cpu_seconds: (user + system) as f64 / ticks_per_second(),
            system_cpu_seconds: system as f64 / ticks_per_second(),
            context_switches: values("ctxt").first().copied().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::clock;
    use std::time::Duration;

    #[test]
    fn the_files_of_proc_are_understood() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t30\n";
        assert_eq!(switches_in(status), 42);
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 30 9 20 0 1 0 100 200 300";
        assert_eq!((ticks_in(stat), ticks_of_children_in(stat)), (Some((150, 50)), Some((30, 9))));
        assert_eq!(ticks_in("nonsense"), None);
        let machine =
            Resources::in_machine_stat("cpu  100 100 50 999 999 25 25 0\ncpu0 1 1 1\nctxt 77\n");
        assert_eq!(machine.cpu_seconds, 300.0 / ticks_per_second());
        assert_eq!(machine.system_cpu_seconds, 100.0 / ticks_per_second());
        assert_eq!(machine.context_switches, 77);
    }

    #[test]
    fn this_process_and_machine_have_figures() {
        clock::sleep(Duration::from_millis(2));
        assert!(Resources::of_process("self").context_switches > 0);
        assert!(Resources::of_machine().cpu_seconds > 0.0);
        assert!(switches_of_this_thread() > 0);
        assert_eq!(Resources::of_process("no-such-process"), Resources::default());
    }
}
