//! The options behind `-o`: one table that parses them, documents them, and names them when one is
//! unknown.
//!
//! Invariant: every option of Cairn's own stands in [`OPTIONS`] exactly once;
//! [`MountSettings::parse`] knows no others but those of mount(8) (`system_options`).
use crate::system_options::{self, Outcome};
use cairn_engine::FsyncWait;
use cairn_fuse::{KernelOptions, MountOptions, Transport};
use cairn_harness::Size;
use std::time::Duration;

/// When the device is flushed for an fsync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// Decided from the measured flush time.
    Auto,
    /// Waits for others to share a flush.
    Coordinate,
    /// The next group is written while the one before is flushed.
    Overlap,
    /// One flush for each fsync.
    Each,
}

/// Everything that `-o` can set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountSettings {
    /// Longest time between two commits; `None` for the default.
    pub commit_interval: Option<Duration>,
    /// Flush policy.
    pub flush: Flush,
    /// What an fsync that became a commit waits for.
    pub fsync_wait: FsyncWait,
    /// Whether the kernel collects writes in its page cache.
    pub writeback: bool,
    /// How requests travel.
    pub transport: Transport,
    /// Mount read-only.
    pub read_only: bool,
    /// Memory for clean file data; `None` for the default.
    pub data_cache: Option<Size>,
    /// Let other users use the mount (a mount by root always does).
    pub allow_other: bool,
    /// Discard freed blocks with each commit.
    pub discard: bool,
    /// Mount a mirror without its lost members.
    pub degraded: bool,
    /// Mount without a block device.
    pub plain: bool,
    /// Threads that serve requests; `None` for the default.
    pub threads: Option<usize>,
    /// What the kernel does for any file system.
    pub kernel: KernelOptions,
}

impl Default for MountSettings {
    fn default() -> Self {
        Self {
            commit_interval: None,
            flush: Flush::Auto,
            fsync_wait: FsyncWait::Super,
            writeback: false,
            transport: Transport::Auto,
            read_only: false,
            data_cache: None,
            allow_other: false,
            discard: false,
            degraded: false,
            plain: false,
            threads: None,
            kernel: KernelOptions::default(),
        }
    }
}

struct MountOption {
    name: &'static str,
    /// What may follow `=`; empty for an option without a value.
    values: &'static str,
    help: &'static str,
    set: fn(&mut MountSettings, &str) -> Option<()>,
}

const COMMIT_SECONDS_MAX: u64 = 3600;
const THREADS_MAX: usize = 1024;

const OPTIONS: &[MountOption] = &[
    MountOption {
        name: "commit",
        values: "SECONDS",
        help: "longest time between two commits, 1 to 3600 (default 5)",
        set: |settings, value| {
            let seconds =
                value.parse().ok().filter(|seconds| (1..=COMMIT_SECONDS_MAX).contains(seconds))?;
            settings.commit_interval = Some(Duration::from_secs(seconds));
            Some(())
        },
    },
    MountOption {
        name: "flush",
        values: "auto|coordinate|overlap|each",
        help: "how fsyncs share device flushes (default auto)",
        set: |settings, value| {
            let policies = [
                ("auto", Flush::Auto),
                ("coordinate", Flush::Coordinate),
                ("overlap", Flush::Overlap),
                ("each", Flush::Each),
            ];
            settings.flush = one_of(value, &policies)?;
            Some(())
        },
    },
    MountOption {
        name: "fsync_wait",
        values: "super|complete",
        help: "what an fsync that became a commit waits for: the superblock, or also the freed blocks (default super)",
        set: |settings, value| {
            settings.fsync_wait =
                one_of(value, &[("super", FsyncWait::Super), ("complete", FsyncWait::Complete)])?;
            Some(())
        },
    },
    MountOption {
        name: "writeback",
        values: "on|off",
        help: "collect small writes in the kernel's page cache: small writes are faster, fsync is slower (default off)",
        set: |settings, value| {
            settings.writeback = one_of(value, &[("on", true), ("off", false)])?;
            Some(())
        },
    },
    MountOption {
        name: "transport",
        values: "auto|uring|dev",
        help: "how requests arrive: over io_uring or /dev/fuse (default auto: io_uring if it is switched on)",
        set: |settings, value| {
            let choices =
                [("auto", Transport::Auto), ("uring", Transport::Ring), ("dev", Transport::Device)];
            settings.transport = one_of(value, &choices)?;
            Some(())
        },
    },
    MountOption {
        name: "data_cache",
        values: "SIZE",
        help: "memory for recently used file data, 0 for none (default: 1/32 of the memory of the machine or its control group, at most 512M)",
        set: |settings, value| {
            settings.data_cache = Some(value.parse().ok()?);
            Some(())
        },
    },
    MountOption {
        name: "threads",
        values: "N",
        help: "threads that serve requests, 1 to 1024",
        set: |settings, value| {
            settings.threads =
                Some(value.parse().ok().filter(|threads| (1..=THREADS_MAX).contains(threads))?);
            Some(())
        },
    },
    MountOption {
        name: "ro",
        values: "",
        help: "mount read-only",
        set: |settings, _| {
            settings.read_only = true;
            Some(())
        },
    },
    MountOption {
        name: "rw",
        values: "",
        help: "mount read-write (default)",
        set: |settings, _| {
            settings.read_only = false;
            Some(())
        },
    },
    MountOption {
        name: "allow_other",
        values: "",
        help: "let other users use the mount; a mount by root always does",
        set: |settings, _| {
            settings.allow_other = true;
            Some(())
        },
    },
    MountOption {
        name: "discard",
        values: "",
        help: "discard freed blocks with each commit",
        set: |settings, _| {
            settings.discard = true;
            Some(())
        },
    },
    MountOption {
        name: "plain",
        values: "",
        help: "mount by root without a block device: sync(2) and umount(8) do not reach the server, so the volume commits every second (mounts by other users are always plain)",
        set: |settings, _| {
            settings.plain = true;
            Some(())
        },
    },
    MountOption {
        name: "degraded",
        values: "",
        help: "mount a mirror without its lost members",
        set: |settings, _| {
            settings.degraded = true;
            Some(())
        },
    },
];

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
        let Some(known) = OPTIONS.iter().find(|known| known.name == name) else {
            return match system_options::apply(&mut self.kernel, name, value) {
                Outcome::Taken => Ok(true),
                Outcome::Unknown => Ok(false),
                Outcome::Refused(why) => {
                    Err(format!("mount option \"{option}\" cannot be used here: {why}"))
                }
            };
        };
        let valid = if known.values.is_empty() { value.is_none() } else { value.is_some() };
        if !valid || (known.set)(self, value.unwrap_or_default()).is_none() {
            return Err(format!(
                "mount option \"{option}\" is not valid; write {}: {}",
                known.usage(),
                known.help
            ));
        }
        Ok(true)
    }

    /// `list` without the options that are unknown.
    pub fn without_unknown(list: &str) -> String {
        let known = |option: &&str| !matches!(Self::default().apply(option), Ok(false));
        system_options::split(list).filter(known).collect::<Vec<_>>().join(",")
    }

    /// Those of the mount itself.
    pub fn mount_options(&self) -> MountOptions {
        let defaults = MountOptions::default();
        MountOptions {
            threads: self.threads.unwrap_or(defaults.threads),
            writeback: self.writeback,
            allow_other: self.allow_other,
            read_only: self.read_only,
            transport: self.transport,
            plain: self.plain,
            kernel: self.kernel.clone(),
            ..defaults
        }
    }

    /// One line for each option.
    pub fn help() -> String {
        let own = OPTIONS
            .iter()
            .map(|option| format!("  {:<30} {}", option.usage(), option.help))
            .collect::<Vec<_>>()
            .join("\n");
        format!("{own}\n{}", system_options::help())
    }
}

impl MountOption {
    fn usage(&self) -> String {
        if self.values.is_empty() {
            self.name.to_owned()
        } else {
            format!("{}={}", self.name, self.values)
        }
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
            commit_interval: Some(Duration::from_secs(7)),
            flush: Flush::Each,
            fsync_wait: FsyncWait::Complete,
            writeback: true,
            transport: Transport::Device,
            read_only: true,
            data_cache: Some(Size { bytes: 3 << 20 }),
            allow_other: true,
            discard: true,
            degraded: true,
            plain: true,
            threads: Some(3),
            kernel: KernelOptions::default(),
        };
        assert_eq!(parse(list), Ok(expected));
        assert_eq!(parse(""), Ok(MountSettings::default()));
    }

    #[test]
    fn the_last_one_wins_across_lists() {
        let settings = MountSettings::parse(&["ro,commit=1".into(), "rw,commit=2".into()]).unwrap();
        assert!(!settings.read_only);
        assert_eq!(settings.commit_interval, Some(Duration::from_secs(2)));
    }

    #[test]
    fn a_line_of_fstab_is_understood_and_a_sloppy_one_is_tidied() {
        let settings =
            parse("rw,noatime,_netdev,nofail,x-systemd.requires=a.mount,user,exec,ro,commit=9")
                .unwrap();
        let mut kernel = KernelOptions::default();
        assert!(["noatime", "nosuid", "nodev"].iter().all(|name| kernel.apply(name)));
        assert_eq!((settings.kernel, settings.read_only), (kernel, true));
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
            assert!(error.contains(option.name), "{error}");
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
