//! The options behind `-o`: one table that parses them, documents them, and names them when one is
//! unknown.
//!
//! Invariant: every option of Cairn's own stands in [`OPTIONS`] exactly once;
//! [`MountSettings::parse`] knows no others but those of mount(8) (`system_options`).
use crate::system_options::{self, Outcome};
use cairn_engine::{FlushPolicy, FsyncWait, VolumeOptions};
use cairn_fuse::{MountOptions, Transport};
use cairn_harness::Size;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// Everything that `-o` can set.
#[derive(Clone, Debug, Default)]
pub struct MountSettings {
    /// How the volume is opened; whether for reading alone, `mount` says.
    pub volume: VolumeOptions,
    /// How it is mounted.
    pub mount: MountOptions,
    /// Memory for clean file data; `None` for the default.
    pub data_cache: Option<Size>,
    /// Mount a mirror without its lost members.
    pub degraded: bool,
}

struct MountOption {
    /// Its name; of one with a value also `=` and what may follow.
    usage: &'static str,
    help: &'static str,
    /// `None` when the value can't be.
    set: fn(&mut MountSettings, &str) -> Option<()>,
}

const OPTIONS: &[MountOption] = &[
    MountOption {
        usage: "commit=SECONDS",
        help: "longest time between two commits, 1 to 3600 (default 5)",
        set: |settings, value| {
            let interval = number(value, 1..=3600).map(Duration::from_secs);
            set(&mut settings.volume.commit_interval, interval)
        },
    },
    MountOption {
        usage: "flush=auto|coordinate|overlap|each",
        help: "how fsyncs share device flushes (default auto)",
        set: |settings, value| {
            let policies = [
                ("auto", FlushPolicy::Auto),
                ("coordinate", FlushPolicy::Coordinate),
                ("overlap", FlushPolicy::Overlap),
                ("each", FlushPolicy::Each),
            ];
            set(&mut settings.volume.flush, one_of(value, &policies))
        },
    },
    MountOption {
        usage: "fsync_wait=super|complete",
        help: "what an fsync that became a commit waits for: the superblock, or also the freed blocks (default super)",
        set: |settings, value| {
            let ends = [("super", FsyncWait::Super), ("complete", FsyncWait::Complete)];
            set(&mut settings.volume.fsync_wait, one_of(value, &ends))
        },
    },
    MountOption {
        usage: "writeback=on|off",
        help: "collect small writes in the kernel's page cache: small writes are faster, fsync is slower (default off)",
        set: |settings, value| {
            set(&mut settings.mount.writeback, one_of(value, &[("on", true), ("off", false)]))
        },
    },
    MountOption {
        usage: "transport=auto|uring|dev",
        help: "how requests arrive: over io_uring or /dev/fuse (default auto: io_uring if it is switched on)",
        set: |settings, value| {
            let choices =
                [("auto", Transport::Auto), ("uring", Transport::Ring), ("dev", Transport::Device)];
            set(&mut settings.mount.transport, one_of(value, &choices))
        },
    },
    MountOption {
        usage: "data_cache=SIZE",
        help: "memory for recently used file data, 0 for none (default: 1/32 of the memory of the machine or its control group, at most 512M)",
        set: |settings, value| set(&mut settings.data_cache, value.parse().ok().map(Some)),
    },
    MountOption {
        usage: "threads=N",
        help: "threads that serve requests, 1 to 1024",
        set: |settings, value| set(&mut settings.mount.threads, number(value, 1..=1024)),
    },
    MountOption {
        usage: "ro",
        help: "mount read-only",
        set: |settings, _| set(&mut settings.mount.read_only, Some(true)),
    },
    MountOption {
        usage: "subvolume=ID",
        help: "show the subvolume with this id at the root (default: what `cairn subvolume set-default` has set)",
        set: |settings, value| {
            set(&mut settings.volume.subvolume, number(value, 256..=u64::MAX).map(Some))
        },
    },
    MountOption {
        usage: "show_snapshots",
        help: "list .snapshots in the root directory; without, it is there for those who name it",
        set: |settings, _| set(&mut settings.mount.show_snapshots, Some(true)),
    },
    MountOption {
        usage: "rw",
        help: "mount read-write (default)",
        set: |settings, _| set(&mut settings.mount.read_only, Some(false)),
    },
    MountOption {
        usage: "allow_other",
        help: "let other users use the mount; a mount by root always does",
        set: |settings, _| set(&mut settings.mount.allow_other, Some(true)),
    },
    MountOption {
        usage: "discard",
        help: "discard freed blocks with each commit",
        set: |settings, _| set(&mut settings.volume.discard, Some(true)),
    },
    MountOption {
        usage: "plain",
        help: "mount by root without a block device: sync(2) and umount(8) do not reach the server, so the volume commits every second (mounts by other users are always plain)",
        set: |settings, _| set(&mut settings.mount.plain, Some(true)),
    },
    MountOption {
        usage: "degraded",
        help: "mount a mirror without its lost members",
        set: |settings, _| set(&mut settings.degraded, Some(true)),
    },
];

/// Puts `value` into its place, if there is one.
fn set<T>(place: &mut T, value: Option<T>) -> Option<()> {
    *place = value?;
    Some(())
}

fn number<T: FromStr + PartialOrd>(text: &str, range: RangeInclusive<T>) -> Option<T> {
    text.parse().ok().filter(|number| range.contains(number))
}

fn one_of<T: Copy>(value: &str, choices: &[(&str, T)]) -> Option<T> {
    choices.iter().find(|(name, _)| *name == value).map(|&(_, choice)| choice)
}

impl MountSettings {
    /// The settings that the comma-separated lists in `lists` ask for; a later option wins.
    ///
    /// # Errors
    /// A text for the user, which names the option and what it may be.
    pub fn parse(lists: &[String]) -> Result<Self, String> {
        let mut settings = Self::default();
        for option in lists.iter().flat_map(|list| system_options::split(list)) {
            if !settings.apply(option)? {
                return Err(format!(
                    "unknown mount option \"{option}\"; the options are:\n{}",
                    Self::help()
                ));
            }
        }
        Ok(settings)
    }

    /// Takes one option into account; false when it is unknown.
    fn apply(&mut self, option: &str) -> Result<bool, String> {
        let (name, value) =
            option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        let Some(known) = OPTIONS.iter().find(|known| known.name() == name) else {
            return match system_options::apply(&mut self.mount.kernel, name, value) {
                Outcome::Taken => Ok(true),
                Outcome::Unknown => Ok(false),
                Outcome::Refused(why) => {
                    Err(format!("mount option \"{option}\" cannot be used here: {why}"))
                }
            };
        };
        if known.usage.contains('=') != value.is_some()
            || (known.set)(self, value.unwrap_or_default()).is_none()
        {
            return Err(format!(
                "mount option \"{option}\" is not valid; write {}: {}",
                known.usage, known.help
            ));
        }
        Ok(true)
    }

    /// `list` without the options that are unknown.
    pub fn without_unknown(list: &str) -> String {
        let known = |option: &&str| !matches!(Self::default().apply(option), Ok(false));
        system_options::split(list).filter(known).collect::<Vec<_>>().join(",")
    }

    /// One line for each option.
    pub fn help() -> String {
        let own = OPTIONS
            .iter()
            .map(|option| format!("  {:<30} {}", option.usage, option.help))
            .collect::<Vec<_>>()
            .join("\n");
        format!("{own}\n{}", system_options::help())
    }
}

impl MountOption {
    fn name(&self) -> &str {
        self.usage.split('=').next().unwrap_or_default()
    }
}

/// A list of options as it was given. What is wrong with it is wrong usage of the command.
pub fn checked(list: &str) -> Result<String, String> {
    MountSettings::parse(&[list.to_owned()]).map(|_| list.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> Result<MountSettings, String> {
        MountSettings::parse(&[list.to_owned()])
    }

    #[test]
    fn every_option_is_understood() {
        let list = "commit=7,flush=each,fsync_wait=complete,writeback=on,transport=dev,ro,allow_other,discard,degraded,plain,threads=3,\
                    data_cache=3M";
        let expected = MountSettings {
            volume: VolumeOptions {
                commit_interval: Duration::from_secs(7),
                flush: FlushPolicy::Each,
                fsync_wait: FsyncWait::Complete,
                discard: true,
                ..VolumeOptions::default()
            },
            mount: MountOptions {
                writeback: true,
                transport: Transport::Device,
                read_only: true,
                allow_other: true,
                plain: true,
                threads: 3,
                ..MountOptions::default()
            },
            data_cache: Some(Size { bytes: 3 << 20 }),
            degraded: true,
        };
        for (list, expected) in [(list, expected), ("", MountSettings::default())] {
            assert_eq!(format!("{:?}", parse(list).unwrap()), format!("{expected:?}"));
        }
    }

    #[test]
    fn the_last_one_wins_across_lists() {
        let settings = MountSettings::parse(&["ro,commit=1".into(), "rw,commit=2".into()]).unwrap();
        assert!(!settings.mount.read_only);
        assert_eq!(settings.volume.commit_interval, Duration::from_secs(2));
    }

    #[test]
    fn a_line_of_fstab_is_understood_and_a_sloppy_one_is_tidied() {
        let settings =
            parse("rw,noatime,_netdev,nofail,x-systemd.requires=a.mount,user,exec,ro,commit=9")
                .unwrap();
        let mut kernel = cairn_fuse::KernelOptions::default();
        assert!(["noatime", "nosuid", "nodev"].iter().all(|name| kernel.apply(name)));
        assert_eq!((settings.mount.kernel, settings.mount.read_only), (kernel, true));
        assert!(parse("uid=5").unwrap_err().contains("\"uid=5\""));
        assert_eq!(
            MountSettings::without_unknown("ro,barrier=1,nosuid,commit=0,x-a"),
            "ro,nosuid,commit=0,x-a"
        );
    }

    #[test]
    fn an_unknown_option_lists_the_known_ones() {
        let error = parse("ro,comit=5").unwrap_err();
        assert!(error.contains("\"comit=5\""), "{error}");
        for option in OPTIONS {
            assert!(error.contains(option.usage), "{error}");
        }
    }

    #[test]
    fn a_bad_value_says_what_is_possible() {
        for option in [
            "commit=0",
            "commit=x",
            "commit",
            "flush=never",
            "writeback=1",
            "threads=0",
            "ro=1",
            "transport=tcp",
            "commit=-1",
            "data_cache=x",
        ] {
            let error = parse(option).unwrap_err();
            assert!(error.contains(option) && error.contains("write "), "{error}");
        }
    }
}
