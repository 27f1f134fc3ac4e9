//! The five mechanisms: their names, what was published about them, and how a load does without
//! one.
use super::baselines;
use crate::workloads::Settings;
use anyhow::ensure;
use cairn_engine::{FlushPolicy, FsyncWait};
use std::str::FromStr;

/// A mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mechanism {
    EarlyWakeUp,
    TreeLocks,
    FlushCoordination,
    Tickets,
    CommittedItemList,
}

/// On which sides descents through a tree lock their way down, as before there were routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockedDescents {
    Neither,
    /// Without the mechanism.
    Off,
    Both,
}

impl Mechanism {
    /// All of them.
    pub const ALL: [Mechanism; 5] = [
        Mechanism::EarlyWakeUp,
        Mechanism::TreeLocks,
        Mechanism::FlushCoordination,
        Mechanism::Tickets,
        Mechanism::CommittedItemList,
    ];

    /// Its number.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::EarlyWakeUp => "M1",
            Mechanism::TreeLocks => "M2",
            Mechanism::FlushCoordination => "M3",
            Mechanism::Tickets => "M4",
            Mechanism::CommittedItemList => "M5",
        }
    }

    /// What it is.
    pub fn title(self) -> &'static str {
        match self {
            Mechanism::EarlyWakeUp => "early wake-up of concurrent fsyncs",
            Mechanism::TreeLocks => "sleeping, fair locks of tree nodes",
            Mechanism::FlushCoordination => "coordinated flushes",
            Mechanism::Tickets => "ticketed space reservations",
            Mechanism::CommittedItemList => "committed item list",
        }
    }

    /// What the side without it does instead.
    pub fn predecessor(self) -> &'static str {
        match self {
            Mechanism::EarlyWakeUp => {
                "an fsync that became a commit waits until the freed blocks are unpinned"
            }
            Mechanism::TreeLocks => {
                "node locks spin, block, and wake all waiters; \"lock alone\": descents lock their way down on both sides, so that \
                 nothing else differs; \"lock and descents\": only without the mechanism, against the product, which has routes"
            }
            Mechanism::FlushCoordination => "each fsync has a flush of its own",
            Mechanism::Tickets => {
                "a thread that finds no space waits for the flusher, together with all others, and tries again"
            }
            Mechanism::CommittedItemList => {
                "items enter the list in two passes, with two allocations each"
            }
        }
    }

    /// What was published about it, and on what.
    pub fn published(self) -> &'static str {
        match self {
            Mechanism::EarlyWakeUp => {
                "btrfs, 12 cores, NVMe: dbench 32 clients +4.1 % throughput, -39.6 % maximum latency; 64 clients +6.8 %, -18.1 % \
                 (but the mean latency of Flush rose from 5.95 to 7.49 ms)"
            }
            Mechanism::TreeLocks => {
                "btrfs, 80 CPUs: dbench 200 clients 213.6 to 699.0 MB/s, +227 %; fio 64 KiB + fsync: 64 threads -9.9 %, 100 threads 0 %, \
                 160 threads +2.95 %; fs_mark 197 to 223 s, -11.65 %; 2 to 3 times fewer context switches; \
                 there descents lock their way down with both locks: compare with \"lock alone\""
            }
            Mechanism::FlushCoordination => {
                "ext4: cost of flushes on fsync-happy loads about 80 % without, then 25-30 %, then 5-14 % with coordination"
            }
            Mechanism::Tickets => {
                "btrfs, fs_mark, all metadata: 212,897 to 238,613 files/s, p99 189,682 to 216,291; maximum latency of a creation, µs: \
                 p50 264,665 to 206,772, p90 456,347 to 355,431, p99 659,490 to 469,635, max 1,001,413 to 512,389"
            }
            Mechanism::CommittedItemList => {
                "XFS, 8-way, 4 SSDs: create +11.9 % files/s, unlink -6.8 % time (with checksums +11.4 %, -7.3 %)"
            }
        }
    }

    /// Fails when this program has no side without the mechanism.
    pub(super) fn check_built(self) -> anyhow::Result<()> {
        ensure!(
            self == Mechanism::FlushCoordination || baselines::ARE_BUILT,
            "{}: this program was built without the predecessor of the mechanism; build it with \
             \"cargo build --release -p cairn --features baselines\" (M3 can be measured without)",
            self.name()
        );
        Ok(())
    }

    /// The settings of both sides: without the mechanism, and with it.
    pub(super) fn sides(
        self,
        settings: &Settings,
        locked_descents: LockedDescents,
    ) -> [Settings; 2] {
        let (mut off, mut on) = (settings.clone(), settings.clone());
        self.turn_off(&mut off);
        match locked_descents {
            LockedDescents::Neither => {}
            LockedDescents::Off => baselines::lock_descents(&mut off.engine),
            LockedDescents::Both => {
                [&mut off.engine, &mut on.engine].into_iter().for_each(baselines::lock_descents)
            }
        }
        [off, on]
    }

    /// Makes a load run without the mechanism.
    fn turn_off(self, settings: &mut Settings) {
        match self {
            Mechanism::FlushCoordination => settings.policy = FlushPolicy::Each,
            Mechanism::EarlyWakeUp => settings.engine.fsync_wait = FsyncWait::Complete,
            _ => baselines::turn_off(self, &mut settings.engine),
        }
    }
}

impl FromStr for Mechanism {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Mechanism::ALL
            .into_iter()
            .find(|mechanism| mechanism.name().eq_ignore_ascii_case(text));
        known.ok_or_else(|| format!("unknown mechanism \"{text}\"; write M1 to M5"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood() {
        assert_eq!("m4".parse(), Ok(Mechanism::Tickets));
        assert!("M6".parse::<Mechanism>().unwrap_err().contains("M1 to M5"));
    }

    #[test]
    fn without_its_predecessor_a_mechanism_cannot_be_measured() {
        for mechanism in Mechanism::ALL {
            match mechanism.check_built() {
                Ok(()) => {
                    assert!(baselines::ARE_BUILT || mechanism == Mechanism::FlushCoordination)
                }
                Err(error) => assert!(
                    error
                        .to_string()
                        .contains("cargo build --release -p cairn --features baselines"),
                    "{error}"
                ),
            }
        }
    }

    #[test]
    fn without_coordination_each_fsync_has_its_flush_and_nothing_else_differs() {
        let usual = Settings::default();
        let [off, on] = Mechanism::FlushCoordination.sides(&usual, LockedDescents::Neither);
        assert_eq!((off.policy, on.policy), (FlushPolicy::Each, FlushPolicy::Auto));
        assert!(off.engine == usual.engine && on.engine == usual.engine);
    }
}
