//! The file systems: how each is made and mounted. Default options, but without a discard, which
//! would take the image file's blocks away again, and without work that ext4 leaves for after the
//! mount. Cairn may be mounted in several ways, each a file system of its own in the comparison.
use super::process::command;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

/// How requests reach Cairn's server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// As a mount without an option has it: over io_uring where that is switched on.
    #[default]
    Default,
    /// Over `/dev/fuse`.
    Device,
    /// Over io_uring.
    Ring,
}

/// How Cairn is mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mounting {
    /// How requests travel.
    pub transport: Transport,
    /// Whether the kernel collects writes in its page cache.
    pub writeback: bool,
}

impl Mounting {
    /// What stands behind the file system's name.
    fn suffix(self) -> String {
        let transport = match self.transport {
            Transport::Default => "",
            Transport::Device => "-dev",
            Transport::Ring => "-uring",
        };
        format!("{transport}{}", if self.writeback { "-writeback" } else { "" })
    }

    /// The mounting that such a suffix names.
    fn of_suffix(suffix: &str) -> Option<Self> {
        let all = [Transport::Default, Transport::Device, Transport::Ring].into_iter();
        let all =
            all.flat_map(|transport| [false, true].map(|writeback| Self { transport, writeback }));
        all.into_iter().find(|mounting| mounting.suffix() == suffix)
    }

    /// Behind `-o`; empty where there is nothing to say.
    pub fn options(self) -> String {
        let transport = match self.transport {
            Transport::Default => None,
            Transport::Device => Some("transport=dev"),
            Transport::Ring => Some("transport=uring"),
        };
        transport
            .into_iter()
            .chain(self.writeback.then_some("writeback=on"))
            .collect::<Vec<_>>()
            .join(",")
    }
}

/// A file system, where it lies, and how it is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// ext4 on a loop device.
    Ext4,
    /// XFS on a loop device.
    Xfs,
    /// btrfs on a loop device.
    Btrfs,
    /// Cairn on a loop device.
    CairnLoop(Mounting),
    /// Cairn on its image file.
    CairnImage(Mounting),
    /// A file system in memory over Cairn's transport: what the transport alone can do.
    Memory(Mounting),
}

/// The kernel says there whether FUSE over io_uring is switched on; root's mounts switch it on,
/// where the kernel has it.
const RING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether mounts get FUSE over io_uring without asking for it.
pub fn ring_is_switched_on() -> bool {
    std::fs::read_to_string(RING_SWITCH).is_ok_and(|switch| switch.trim() == "Y")
}

impl System {
    const OTHERS: [(&'static str, System); 3] =
        [("ext4", System::Ext4), ("xfs", System::Xfs), ("btrfs", System::Btrfs)];

    /// Its name in tables and on the command line.
    pub fn name(self) -> String {
        match self {
            System::Ext4 => "ext4".into(),
            System::Xfs => "xfs".into(),
            System::Btrfs => "btrfs".into(),
            System::CairnLoop(mounting) => format!("cairn-loop{}", mounting.suffix()),
            System::CairnImage(mounting) => format!("cairn-image{}", mounting.suffix()),
            System::Memory(mounting) => format!("cairn-memory{}", mounting.suffix()),
        }
    }

    /// The systems of a list such as `ext4,xfs,cairn`; `cairn` stands for Cairn on a loop device
    /// and on its image.
    ///
    /// # Errors
    /// A text for the user, which names what is possible.
    pub fn parse_list(text: &str) -> Result<Vec<System>, String> {
        let mut systems = Vec::new();
        for name in text.split(',').filter(|name| !name.is_empty()) {
            let default = Mounting::default();
            let named = if name == "cairn" {
                vec![System::CairnLoop(default), System::CairnImage(default)]
            } else {
                vec![name.parse()?]
            };
            systems.extend(
                named.into_iter().filter(|system| !systems.contains(system)).collect::<Vec<_>>(),
            );
        }
        Ok(systems)
    }

    /// The smallest volume that its mkfs makes.
    pub fn size_bytes_min(self) -> u64 {
        match self {
            System::Xfs => 300 << 20,
            System::Btrfs => 128 << 20,
            System::Ext4 | System::CairnLoop(_) | System::CairnImage(_) | System::Memory(_) => {
                16 << 20
            }
        }
    }

    /// How it is mounted, where it is one of Cairn's rows.
    pub fn mounting(self) -> Option<Mounting> {
        match self {
            System::CairnLoop(mounting)
            | System::CairnImage(mounting)
            | System::Memory(mounting) => Some(mounting),
            System::Ext4 | System::Xfs | System::Btrfs => None,
        }
    }

    /// Whether it is one of Cairn's rows.
    pub fn is_cairn(self) -> bool {
        self.mounting().is_some()
    }

    /// Whether it gets a loop device.
    pub fn needs_loop(self) -> bool {
        !matches!(self, System::CairnImage(_) | System::Memory(_))
    }

    /// Whether it is a volume of Cairn's, which counts what it does.
    pub fn is_volume(self) -> bool {
        self.is_cairn() && !matches!(self, System::Memory(_))
    }

    /// The size of its image, of the size that is asked for: what lies in memory needs one for its
    /// name only.
    pub fn image_bytes(self, size_bytes: u64) -> u64 {
        if matches!(self, System::Memory(_)) { size_bytes.min(1 << 20) } else { size_bytes }
    }

    /// Why it can't be mounted here, as far as that shows beforehand.
    pub fn is_impossible_because(self) -> Option<String> {
        let needs_ring =
            self.mounting().is_some_and(|mounting| mounting.transport == Transport::Ring);
        let lacks_ring = needs_ring && !Path::new(RING_SWITCH).exists();
        lacks_ring.then(|| {
            format!(
                "{} needs FUSE over io_uring, which this kernel does not have ({RING_SWITCH} is missing)",
                self.name()
            )
        })
    }

    /// The commands that it needs, each with its package.
    pub fn commands(self) -> Vec<(&'static str, &'static str)> {
        let loops = [("losetup", "mount"), ("mount", "mount"), ("umount", "mount")];
        match self {
            System::Ext4 => [("mkfs.ext4", "e2fsprogs")].into_iter().chain(loops).collect(),
            System::Xfs => [("mkfs.xfs", "xfsprogs")].into_iter().chain(loops).collect(),
            System::Btrfs => [("mkfs.btrfs", "btrfs-progs")].into_iter().chain(loops).collect(),
            System::CairnLoop(_) => loops.into(),
            System::CairnImage(_) | System::Memory(_) => vec![("umount", "mount")],
        }
    }

    /// Makes an empty one, where that takes a program.
    pub fn make(self, device: &Path, program: &Path) -> Option<Command> {
        let mut command = match self {
            System::Ext4 => command(
                "mkfs.ext4",
                &["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"],
            ),
            System::Xfs => command("mkfs.xfs", &["-q", "-f", "-K"]),
            System::Btrfs => command("mkfs.btrfs", &["-q", "-f", "-K"]),
            System::CairnLoop(_) | System::CairnImage(_) => command(program, &["mkfs", "--force"]),
            System::Memory(_) => return None,
        };
        command.arg(device);
        Some(command)
    }

    /// The server that shows what is on `device`; `None` where the kernel does that.
    pub fn server(self, device: &Path, mount_point: &Path, program: &Path) -> Option<Command> {
        let options = self.mounting()?.options();
        let arguments: &[&str] =
            if self.is_volume() { &["mount", "--foreground"] } else { &["bench", "serve-memory"] };
        let mut server = command(program, arguments);
        if !options.is_empty() {
            server.arg("-o").arg(options);
        }
        server.arg(device).arg(mount_point);
        Some(server)
    }
}

/// Whether loop devices bypass the host's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectIo {
    /// They do.
    Yes,
    /// They don't.
    No,
    /// A row for each.
    Both,
}

impl FromStr for DirectIo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "true" => Ok(DirectIo::Yes),
            "false" => Ok(DirectIo::No),
            "both" => Ok(DirectIo::Both),
            other => Err(format!(
                "\"{other}\" is not possible; write true, false, or both for a row of each"
            )),
        }
    }
}

/// What the label of a row has behind it whose loop device goes through the host's page cache,
/// where there is one of each.
const BUFFERED: &str = "-buffered";

/// A row of the comparison: a file system on a kind of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The file system.
    pub system: System,
    /// Whether its loop device bypasses the host's page cache.
    pub direct_io: bool,
    /// Its name in tables.
    pub label: String,
}

impl Candidate {
    /// Each system, for both kinds of loop device when that is asked for.
    pub fn all(systems: &[System], direct_io: DirectIo) -> Vec<Self> {
        let plain = |system: System, direct_io| Self { system, direct_io, label: system.name() };
        let mut all: Vec<Self> =
            systems.iter().map(|&system| plain(system, direct_io != DirectIo::No)).collect();
        if direct_io == DirectIo::Both {
            let looped = systems.iter().filter(|system| system.needs_loop());
            all.extend(looped.map(|&system| Self {
                label: format!("{}{BUFFERED}", system.name()),
                ..plain(system, false)
            }));
        }
        all
    }
}

impl FromStr for System {
    type Err = String;

    /// A name alone, as `cairn-uring`, is Cairn on a loop device, which is what the others have.
    fn from_str(text: &str) -> Result<Self, String> {
        let other =
            || System::OTHERS.into_iter().find(|(name, _)| *name == text).map(|(_, system)| system);
        let image =
            || Some(System::CairnImage(Mounting::of_suffix(text.strip_prefix("cairn-image")?)?));
        let memory =
            || Some(System::Memory(Mounting::of_suffix(text.strip_prefix("cairn-memory")?)?));
        let looped = || {
            let suffix = text
                .strip_prefix("cairn-loop")
                .or_else(|| text.strip_prefix("cairn").filter(|suffix| !suffix.is_empty()));
            Some(System::CairnLoop(Mounting::of_suffix(suffix?)?))
        };
        other().or_else(image).or_else(memory).or_else(looped).ok_or_else(|| {
            format!(
                "unknown file system \"{text}\"; there are: ext4, xfs, btrfs, cairn-loop, cairn-image, and cairn for both of these. After \
                 cairn-loop, cairn-image, or cairn for the loop device, add -dev or -uring for the transport, then -writeback for the \
                 kernel's page cache; cairn-memory is the transport alone"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Mounting = Mounting { transport: Transport::Default, writeback: false };

    #[test]
    fn lists_are_understood() {
        use System::*;
        assert_eq!(
            System::parse_list("ext4,xfs,btrfs,cairn"),
            Ok(vec![Ext4, Xfs, Btrfs, CairnLoop(PLAIN), CairnImage(PLAIN)])
        );
        assert_eq!(
            System::parse_list("cairn-image,cairn"),
            Ok(vec![CairnImage(PLAIN), CairnLoop(PLAIN)])
        );
        let labels = |direct_io| -> Vec<String> {
            Candidate::all(&[Ext4, CairnImage(PLAIN)], direct_io)
                .into_iter()
                .map(|candidate| candidate.label)
                .collect()
        };
        assert_eq!(labels(DirectIo::No), ["ext4", "cairn-image"]);
        assert_eq!(labels(DirectIo::Both), ["ext4", "cairn-image", "ext4-buffered"]);
        assert!("maybe".parse::<DirectIo>().unwrap_err().contains("both"));
        assert!(System::parse_list("ext4,zfs").unwrap_err().contains("btrfs"));
    }

    #[test]
    fn cairn_is_mounted_in_several_ways() {
        let list = "cairn-dev,cairn-uring,cairn-writeback,cairn-image-uring-writeback,cairn-loop-dev-writeback";
        let systems = System::parse_list(list).unwrap();
        let shown: Vec<(String, String)> = systems
            .iter()
            .map(|system| (system.name(), system.mounting().unwrap().options()))
            .collect();
        let expected = [
            ("cairn-loop-dev", "transport=dev"),
            ("cairn-loop-uring", "transport=uring"),
            ("cairn-loop-writeback", "writeback=on"),
            ("cairn-image-uring-writeback", "transport=uring,writeback=on"),
            ("cairn-loop-dev-writeback", "transport=dev,writeback=on"),
        ];
        assert_eq!(shown, expected.map(|(name, options)| (name.to_owned(), options.to_owned())));
        assert!(
            systems.iter().all(|system| system.name().parse() == Ok(*system) && system.is_cairn())
        );
        assert_eq!(System::parse_list("cairn-uring,cairn-loop-uring").unwrap().len(), 1);
        assert_eq!((PLAIN.options().as_str(), System::Ext4.mounting()), ("", None));
        for unknown in ["cairn-writeback-uring", "cairn-loop-", "cairns", "ext4-uring"] {
            assert!(System::parse_list(unknown).unwrap_err().contains("-writeback"), "{unknown}");
        }
        let memory: System = "cairn-memory-dev".parse().unwrap();
        assert_eq!(
            (memory.name().as_str(), memory.is_cairn(), memory.is_volume()),
            ("cairn-memory-dev", true, false)
        );
        assert!(memory.make(Path::new("/x"), Path::new("/cairn")).is_none());
        let server =
            memory.server(Path::new("/x"), Path::new("/mnt"), Path::new("/cairn")).unwrap();
        assert_eq!(
            server.get_args().collect::<Vec<_>>(),
            ["bench", "serve-memory", "-o", "transport=dev", "/x", "/mnt"]
        );
        let server = System::CairnLoop(PLAIN)
            .server(Path::new("/x"), Path::new("/mnt"), Path::new("/cairn"))
            .unwrap();
        assert_eq!(server.get_args().collect::<Vec<_>>(), ["mount", "--foreground", "/x", "/mnt"]);
        let buffered = Candidate::all(&["cairn-uring".parse().unwrap()], DirectIo::Both);
        assert_eq!(buffered[1].label, "cairn-loop-uring-buffered");
    }
}
