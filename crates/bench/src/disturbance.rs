//! What else the machine did while something was measured: figures from a busy machine are no facts
//! about a file system.
//!
//! The kernel's threads work for the load, so only user mode counts as foreign: that of the whole
//! machine, less this process with its children, less the servers of mounted volumes. The time that
//! a hypervisor gave to other machines counts as well.
use cairn_environment::clock::{self, Monotonic};
use cairn_harness::proc::{self, MachineTimes, ProcessTimes};
use serde::{Deserialize, Serialize};
use std::fs;

/// From this share of the machine's CPU time on, what others do changes figures more than rounds
/// differ.
const BUSY_SHARE: f64 = 0.05;
/// The name of a server's process.
const SERVER: &str = "cairn";

/// What others did during a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// Runnable and waiting threads of the machine, the average of the minute before.
    pub load_average: f64,
    /// The part of all CPU time that other programs took, from 0 to 1.
    pub cpu_share: f64,
    /// The part of all CPU time that a hypervisor gave to other machines.
    pub stolen_share: f64,
}

impl Disturbance {
    /// Whether figures from that time are doubtful.
    pub fn is_busy(&self) -> bool {
        self.cpu_share + self.stolen_share >= BUSY_SHARE
    }

    /// What the machine's state was, in a line.
    pub fn line(&self) -> String {
        self.warning().unwrap_or_else(|| {
            let (share, load) = ((self.cpu_share + self.stolen_share) * 100.0, self.load_average);
            format!(
                "The machine was quiet: others took {share:.1} % of its CPU time; its load \
                average was {load:.1} before."
            )
        })
    }

    /// What to say of a busy machine; `None` of a quiet one.
    pub fn warning(&self) -> Option<String> {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let others = format!("other programs took {} of its CPU time", percent(self.cpu_share));
        let stolen = if self.stolen_share >= 0.01 {
            format!(", other machines on its host {}", percent(self.stolen_share))
        } else {
            String::new()
        };
        self.is_busy().then(|| {
            format!(
                "The machine was busy: {others}{stolen}; its load average was {:.1} before. These figures are not reliable; measure again \
                 when nothing else runs.",
                self.load_average
            )
        })
    }
}

/// Seconds of CPU time up to a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reading {
    machine_user: f64,
    machine_all: f64,
    stolen: f64,
    own_user: f64,
    servers_user: f64,
}

impl Reading {
    fn now() -> Self {
        let seconds = |ticks: u64| ticks as f64 / proc::ticks_per_second();
        let machine = MachineTimes::now();
        let own = ProcessTimes::of("self").unwrap_or_default();
        let servers_user: u64 = ProcessTimes::of_all()
            .filter(|process| process.name == SERVER && process.number != own.number)
            .map(|process| user_ticks(&process))
            .sum();
        Self {
            machine_user: seconds(machine.user_ticks),
            machine_all: seconds(machine.all_ticks),
            stolen: seconds(machine.stolen_ticks),
            own_user: seconds(user_ticks(&own)),
            servers_user: seconds(servers_user),
        }
    }

    /// The shares of others from an earlier moment until this one.
    fn since(&self, earlier: &Self) -> (f64, f64) {
        let all = self.machine_all - earlier.machine_all;
        if all <= 0.0 {
            return (0.0, 0.0);
        }
        // A server that ended meanwhile takes what it had done with it.
        let known =
            self.own_user - earlier.own_user + (self.servers_user - earlier.servers_user).max(0.0);
        let foreign = self.machine_user - earlier.machine_user - known;
        ((foreign / all).clamp(0.0, 1.0), ((self.stolen - earlier.stolen) / all).clamp(0.0, 1.0))
    }
}

/// Of a process and of its children that have ended and were waited for.
fn user_ticks(process: &ProcessTimes) -> u64 {
    process.user_ticks + process.children_user_ticks
}

/// A measurement that has begun.
pub struct Observation {
    load_average: f64,
    begin: Reading,
    at: Monotonic,
}

impl Observation {
    /// From now on.
    pub fn begin() -> Self {
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load_average =
            load.split(' ').next().and_then(|value| value.parse().ok()).unwrap_or(0.0);
        Self { load_average, begin: Reading::now(), at: clock::now_monotonic() }
    }

    /// Until now; `None` when that was too short for the kernel's ticks.
    pub fn end(&self) -> Option<Disturbance> {
        let (cpu_share, stolen_share) = Reading::now().since(&self.begin);
        let long_enough = self.at.elapsed().as_millis() >= 200;
        long_enough.then_some(Disturbance {
            load_average: self.load_average,
            cpu_share,
            stolen_share,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ones_own_is_foreign() {
        let earlier = Reading {
            machine_user: 10.0,
            machine_all: 100.0,
            stolen: 1.0,
            own_user: 5.0,
            servers_user: 2.0,
        };
        let now = Reading {
            machine_user: 50.0,
            machine_all: 200.0,
            stolen: 3.0,
            own_user: 10.0,
            servers_user: 7.0,
        };
        assert_eq!(now.since(&earlier), (0.3, 0.02));
        // Its own work alone, and a server that has gone.
        let alone = Reading { machine_user: 15.0, own_user: 10.0, servers_user: 0.0, ..now };
        assert_eq!(alone.since(&earlier).0, 0.0);
        assert_eq!(now.since(&now), (0.0, 0.0));
    }

    #[test]
    fn a_busy_machine_is_told() {
        let quiet = Disturbance { load_average: 15.0, cpu_share: 0.01, stolen_share: 0.0 };
        assert_eq!(quiet.warning(), None);
        assert_eq!(
            quiet.line(),
            "The machine was quiet: others took 1.0 % of its CPU time; its load average was 15.0 \
             before."
        );
        let busy = Disturbance { cpu_share: 0.37, ..quiet };
        let told = busy.warning().unwrap();
        assert!(
            told.contains("other programs took 37 %")
                && told.contains("load average was 15.0")
                && !told.contains("host"),
            "{told}"
        );
        assert_eq!(busy.line(), told);
        let stolen = Disturbance { stolen_share: 0.2, ..quiet }.warning().unwrap();
        assert!(stolen.contains("other machines on its host 20 %"), "{stolen}");
    }

    #[test]
    fn an_observation_sees_this_machine() {
        let observation = Observation::begin();
        while observation.at.elapsed().as_millis() < 250 {
            std::hint::black_box(0);
        }
        let seen = observation.end().unwrap();
        assert!(
            (0.0..=1.0).contains(&seen.cpu_share) && (0.0..=1.0).contains(&seen.stolen_share),
            "{seen:?}"
        );
    }
}
