//! The file systems: how each is made and mounted. Default options, but without a discard, which would take the image
//! file's blocks away again, and without work that ext4 leaves for after the mount.
use super::process::command;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

/// A file system, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// ext4 on a loop device.
    Ext4,
    /// XFS on a loop device.
    Xfs,
    /// btrfs on a loop device.
    Btrfs,
    /// Cairn on a loop device.
    CairnLoop,
    /// Cairn on its image file.
    CairnImage,
}

impl System {
    const ALL: [System; 5] = [System::Ext4, System::Xfs, System::Btrfs, System::CairnLoop, System::CairnImage];

    /// Its name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            System::Ext4 => "ext4",
            System::Xfs => "xfs",
            System::Btrfs => "btrfs",
            System::CairnLoop => "cairn-loop",
            System::CairnImage => "cairn-image",
        }
    }

    /// The systems of a list such as `ext4,xfs,cairn`; `cairn` stands for both of Cairn's rows.
    ///
    /// # Errors
    /// A text for the user, which names what is possible.
    pub fn parse_list(text: &str) -> Result<Vec<System>, String> {
        let mut systems = Vec::new();
        for name in text.split(',').filter(|name| !name.is_empty()) {
            let named = if name == "cairn" { vec![System::CairnLoop, System::CairnImage] } else { vec![name.parse()?] };
            systems.extend(named.into_iter().filter(|system| !systems.contains(system)).collect::<Vec<_>>());
        }
        Ok(systems)
    }

    /// The smallest volume that its mkfs makes.
    pub fn size_bytes_min(self) -> u64 {
        match self {
            System::Xfs => 300 << 20,
            System::Btrfs => 128 << 20,
            System::Ext4 | System::CairnLoop | System::CairnImage => 16 << 20,
        }
    }

    /// Whether it is one of Cairn's rows.
    pub fn is_cairn(self) -> bool {
        matches!(self, System::CairnLoop | System::CairnImage)
    }

    /// Whether it gets a loop device.
    pub fn needs_loop(self) -> bool {
        self != System::CairnImage
    }

    /// The commands that it needs, each with its package.
    pub fn commands(self) -> Vec<(&'static str, &'static str)> {
        let loops = [("losetup", "mount"), ("mount", "mount"), ("umount", "mount")];
        match self {
            System::Ext4 => [("mkfs.ext4", "e2fsprogs")].into_iter().chain(loops).collect(),
            System::Xfs => [("mkfs.xfs", "xfsprogs")].into_iter().chain(loops).collect(),
            System::Btrfs => [("mkfs.btrfs", "btrfs-progs")].into_iter().chain(loops).collect(),
            System::CairnLoop => loops.into(),
            System::CairnImage => vec![("umount", "mount")],
        }
    }

    /// Makes an empty one.
    pub fn make(self, device: &Path, program: &Path) -> Command {
        let mut command = match self {
            System::Ext4 => command("mkfs.ext4", &["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"]),
            System::Xfs => command("mkfs.xfs", &["-q", "-f", "-K"]),
            System::Btrfs => command("mkfs.btrfs", &["-q", "-f", "-K"]),
            System::CairnLoop | System::CairnImage => command(program, &["mkfs", "--force"]),
        };
        command.arg(device);
        command
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
            other => Err(format!("\"{other}\": there are true, false, and both for a row of each")),
        }
    }
}

/// What the label of a row has behind it whose loop device goes through the host's page cache, where there is one of each.
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
        let plain = |system: System, direct_io| Self { system, direct_io, label: system.name().into() };
        let mut all: Vec<Self> = systems.iter().map(|&system| plain(system, direct_io != DirectIo::No)).collect();
        if direct_io == DirectIo::Both {
            let looped = systems.iter().filter(|system| system.needs_loop());
            all.extend(looped.map(|&system| Self { label: format!("{}{BUFFERED}", system.name()), ..plain(system, false) }));
        }
        all
    }
}

impl FromStr for System {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = System::ALL.into_iter().find(|system| system.name() == text);
        known.ok_or_else(|| {
            format!(
                "unknown file system \"{text}\"; there are: {}, and cairn for both of the last",
                System::ALL.map(System::name).join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_understood() {
        use System::*;
        assert_eq!(System::parse_list("ext4,xfs,btrfs,cairn"), Ok(vec![Ext4, Xfs, Btrfs, CairnLoop, CairnImage]));
        assert_eq!(System::parse_list("cairn-image,cairn"), Ok(vec![CairnImage, CairnLoop]));
        let labels = |direct_io| -> Vec<String> {
            Candidate::all(&[Ext4, CairnImage], direct_io).into_iter().map(|candidate| candidate.label).collect()
        };
        assert_eq!(labels(DirectIo::No), ["ext4", "cairn-image"]);
        assert_eq!(labels(DirectIo::Both), ["ext4", "cairn-image", "ext4-buffered"]);
        assert!("maybe".parse::<DirectIo>().unwrap_err().contains("both"));
        assert!(System::parse_list("ext4,zfs").unwrap_err().contains("btrfs"));
    }
}
