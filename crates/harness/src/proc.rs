//! What the kernel counts for a process and for the machine, as `/proc` shows it.
//!
//! A process is named as in `/proc`: by its number, or `self`. Times are in the kernel's ticks.
use std::fs;
use std::io;

/// Ticks in a second.
pub fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// CPU time of a process with all its threads, from its `stat`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessTimes {
    /// The process's number.
    pub number: u32,
    /// The name of its program, cut to 15 bytes.
    pub name: String,
    /// In user mode.
    pub user_ticks: u64,
    /// In kernel mode.
    pub system_ticks: u64,
    /// In user mode, of the children that have ended and were waited for, with theirs.
    pub children_user_ticks: u64,
    /// The same in kernel mode.
    pub children_system_ticks: u64,
}

impl ProcessTimes {
    /// Those of a process that runs.
    pub fn of(process: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    /// Those of all processes that this one sees.
    pub fn of_all() -> impl Iterator<Item = Self> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|process| {
            Self::parse(&fs::read_to_string(process.path().join("stat")).ok()?)
        })
    }

    /// The name, in parentheses, may hold anything.
    fn parse(stat: &str) -> Option<Self> {
        let (number, rest) = stat.split_once(" (")?;
        let (name, fields) = rest.rsplit_once(')')?;
        let mut ticks = fields.split_whitespace().skip(11).map(|field| field.parse().ok());
        Some(Self {
            number: number.parse().ok()?,
            name: name.to_owned(),
            user_ticks: ticks.next()??,
            system_ticks: ticks.next()??,
            children_user_ticks: ticks.next()??,
            children_system_ticks: ticks.next()??,
        })
    }

    /// In both modes, in seconds; children not counted.
    pub fn seconds(&self) -> f64 {
        (self.user_ticks + self.system_ticks) as f64 / ticks_per_second()
    }
}

/// The `status` of a process or a thread: a line for each of many figures.
pub struct Status(String);

impl Status {
    /// That of a process.
    ///
    /// # Errors
    /// When there is none.
    pub fn of(process: &str) -> io::Result<Self> {
        fs::read_to_string(format!("/proc/{process}/status")).map(Self)
    }

    /// Those of all threads of a process; none when there is no process.
    pub fn of_threads(process: &str) -> impl Iterator<Item = Self> {
        let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok().map(Self))
    }

    /// The number behind `name:`, without its unit.
    pub fn number(&self, name: &str) -> Option<u64> {
        let lines = self.0.lines();
        let value = lines.filter_map(|line| line.split_once(':')).find(|(key, _)| *key == name)?.1;
        value.split_whitespace().next()?.parse().ok()
    }

    /// The amount of memory behind `name:`, which the kernel reports in KiB.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.number(name).map(|kib| kib << 10)
    }

    /// Context switches, voluntary and involuntary ones.
    pub fn context_switches(&self) -> u64 {
        ["voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"]
            .iter()
            .filter_map(|name| self.number(name))
            .sum()
    }
}

/// How many files a process has open.
///
/// # Errors
/// When there is no such process, or it is another user's.
pub fn open_files(process: &str) -> io::Result<u64> {
    Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count() as u64)
}

/// What the whole machine did since it was started, from `/proc/stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineTimes {
    /// In user mode; what guests took is in it.
    pub user_ticks: u64,
    /// In kernel mode, interrupts with it.
    pub system_ticks: u64,
    /// What a hypervisor gave to other machines.
    pub stolen_ticks: u64,
    /// All of them, idle ones with them.
    pub all_ticks: u64,
    /// Of all processors.
    pub context_switches: u64,
}

impl MachineTimes {
    /// Until now; zeros where the kernel doesn't report them.
    pub fn now() -> Self {
        Self::parse(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// Of the first line: user, nice, system, idle, iowait, irq, softirq, steal.
    fn parse(stat: &str) -> Self {
        let values = |name: &str| -> Vec<u64> {
            let line = stat.lines().find(|line| line.split_whitespace().next() == Some(name));
            let values = line.unwrap_or_default().split_whitespace().skip(1).take(8);
            values.map_while(|value| value.parse().ok()).collect()
        };
        let ticks = values("cpu");
        let at = |index: usize| ticks.get(index).copied().unwrap_or(0);
        Self {
            user_ticks: at(0) + at(1),
            system_ticks: at(2) + at(5) + at(6),
            stolen_ticks: at(7),
            all_ticks: ticks.iter().sum(),
            context_switches: values("ctxt").first().copied().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_proc_are_understood() {
        let status = Status(
            "Name:\tx\nVmRSS:\t   2048 kB\n\
             voluntary_ctxt_switches:\t12\n\
             nonvoluntary_ctxt_switches:\t30\n"
                .into(),
        );
        assert_eq!((status.context_switches(), status.bytes("VmRSS")), (42, Some(2 << 20)));
        assert_eq!((status.number("Name"), status.number("Rss")), (None, None));
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 30 9 20 0 1 0 100 200 300";
        let times = ProcessTimes {
            number: 7,
            name: "a ) b".into(),
            user_ticks: 150,
            system_ticks: 50,
            children_user_ticks: 30,
            children_system_ticks: 9,
        };
        assert_eq!(ProcessTimes::parse(stat), Some(times));
        assert_eq!(ProcessTimes::parse("nonsense"), None);
        let machine =
            MachineTimes::parse("cpu  100 50 30 800 10 5 5 20 7 7\ncpu0 1 1 1 1\nctxt 77\n");
        let expected = MachineTimes {
            user_ticks: 150,
            system_ticks: 40,
            stolen_ticks: 20,
            all_ticks: 1020,
            context_switches: 77,
        };
        assert_eq!(machine, expected);
    }

    #[test]
    fn this_process_and_machine_have_figures() {
        let own = ProcessTimes::of("self").unwrap();
        assert_eq!(own.number, std::process::id());
        assert!(ProcessTimes::of_all().any(|other| other.number == own.number));
        assert!(Status::of("self").unwrap().number("Threads").unwrap() > 0);
        assert!(Status::of_threads("self").count() > 0 && open_files("self").unwrap() > 2);
        assert!(MachineTimes::now().all_ticks > 0);
        assert_eq!(ProcessTimes::of("no-such-process"), None);
        assert!(open_files("no-such-process").is_err());
    }
}
