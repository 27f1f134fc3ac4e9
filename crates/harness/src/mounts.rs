//! What is mounted, as the kernel reports it in `/proc/self/mountinfo`; and how a mount is taken
//! out of the tree. In the table a blank, a tab, a line feed and a backslash in a name are three
//! octal digits behind a backslash. For tests: whether they can mount.
use crate::console;
use crate::process::output_of;
use anyhow::bail;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Whether tests that mount something must run: `CAIRN_MOUNT_TESTS=required`.
pub fn tests_must_mount() -> bool {
    mode_of_tests() == "required"
}

/// Whether tests that mount something run: where `/dev/fuse` can be opened, unless
/// `CAIRN_MOUNT_TESTS=off` leaves them out. A line says so if not.
///
/// # Panics
/// If they must run and can't.
pub fn tests_can_mount() -> bool {
    let usable = OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    assert!(usable || !tests_must_mount(), "/dev/fuse cannot be opened");
    let runs = usable && mode_of_tests() != "off";
    if !runs {
        console::tell(&format_args!("left out: no mount without /dev/fuse"));
    }
    runs
}

/// The transports over which tests mount, as mount options name them: `dev`, and `uring` where root
/// has enabled it. `CAIRN_TEST_TRANSPORT` leaves one. A line says what is left out.
pub fn transports_of_tests() -> Vec<&'static str> {
    let switch = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let has_rings = switch.is_ok_and(|switch| switch.trim() == "Y");
    let only = std::env::var("CAIRN_TEST_TRANSPORT").ok();
    let mut transports = vec!["dev", "uring"];
    transports.retain(|transport| only.as_ref().is_none_or(|only| only == transport));
    if transports.contains(&"uring") && !(has_rings && rustix::process::geteuid().is_root()) {
        console::tell(&format_args!("left out: no io_uring for FUSE"));
        transports.retain(|transport| *transport != "uring");
    }
    transports
}

fn mode_of_tests() -> String {
    std::env::var("CAIRN_MOUNT_TESTS").unwrap_or_default()
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where it shows.
    pub point: PathBuf,
    /// Which kind of file system.
    pub kind: String,
    /// Of what.
    pub source: String,
}

/// All mounts that this process sees.
pub fn all() -> Vec<Mount> {
    in_table(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// The mounts of a table, in its order; lines that make no sense are left out.
fn in_table(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(mount_in).collect()
}

fn mount_in(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = fields.nth(4)?;
    // Optional fields come before the dash.
    fields.find(|field| *field == b"-")?;
    let text = |field| String::from_utf8_lossy(&decoded(field)).into_owned();
    Some(Mount {
        point: OsString::from_vec(decoded(point)).into(),
        kind: text(fields.next()?),
        source: text(fields.next()?),
    })
}

fn decoded(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        match escaped(rest) {
            Some(byte) => {
                bytes.push(byte);
                rest = &rest[4..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// The byte whose escape `text` begins with.
fn escaped(text: &[u8]) -> Option<u8> {
    let [b'\\', digits @ ..] = text.get(..4)? else { return None };
    let octal = digits.iter().all(|digit| (b'0'..=b'7').contains(digit));
    let value =
        digits.iter().fold(0_u32, |value, digit| value * 8 + u32::from(digit.wrapping_sub(b'0')));
    octal.then(|| u8::try_from(value).ok()).flatten()
}

/// The mount that `path` lies on: the last one at the longest prefix.
pub fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    above.max_by_key(|mount| mount.point.components().count())
}

/// Whether anything is mounted at `path` or below.
pub fn is_mounted_below(path: &Path) -> bool {
    any_below(&all(), path)
}

/// Takes the mount at `mountpoint` out of the tree, whatever state its server is in; the server
/// ends with the last user.
///
/// # Errors
/// What the last of the programs said that can do so.
pub fn detach(mountpoint: &Path) -> anyhow::Result<()> {
    let mut said = String::new();
    for program in [&["umount", "-l"][..], &["fusermount3", "-u", "-z"][..]] {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(mountpoint).process_group(0).stdin(Stdio::null());
        match output_of(&mut command) {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => said = String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => said = format!("{}: {error}", program[0]),
        }
    }
    bail!("{said}")
}

/// Takes all mounts below `folder` out of the tree.
pub fn detach_all_below(folder: &Path) {
    for mount in all().iter().rev().filter(|mount| mount.point.starts_with(folder)) {
        // One that stays shows in the table.
        let _ = detach(&mount.point);
    }
}

fn any_below(mounts: &[Mount], path: &Path) -> bool {
    mounts.iter().any(|mount| mount.point.starts_with(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"1 0 8:1 / / rw - ext4 /dev/sda rw\n\
        2 1 8:2 / /var rw,relatime shared:1 master:2 - xfs /dev/sdb rw\n\
        3 1 8:3 / /variety rw - btrfs /dev/sdc rw\n\
        4 1 0:9 / /var/a\\040b/tab\\011line\\012back\\134slash/mnt rw - fuse.cairn /an\\040image \
        rw\n\
        5 1 0:9 / /var/no\xff/mnt rw - tmpfs none rw\n\
        nonsense\n";

    #[test]
    fn a_table_is_understood() {
        let mounts = in_table(TABLE);
        assert_eq!(mounts.len(), 5);
        let source_of = |path: &str| {
            mount_of(&mounts, Path::new(path))
                .map(|mount| (mount.kind.as_str(), mount.source.as_str()))
        };
        assert_eq!(source_of("/var/tmp"), Some(("xfs", "/dev/sdb")));
        assert_eq!(source_of("/home"), Some(("ext4", "/dev/sda")));
        assert_eq!(
            source_of("/var/a b/tab\tline\nback\\slash/mnt/file"),
            Some(("fuse.cairn", "/an image"))
        );
        assert_eq!(mount_of(&[], Path::new("/")), None);
    }

    #[test]
    fn names_with_blanks_are_found_below_a_folder() {
        let mounts = in_table(TABLE);
        let below = |path: &str| any_below(&mounts, Path::new(path));
        assert!(
            below("/var/a b") && below("/var/a b/tab\tline\nback\\slash/mnt") && below("/variety")
        );
        assert!(!below("/var/a") && !below("/var/a\\040b") && !below("/vari"));
        assert!(any_below(&mounts, &PathBuf::from(OsString::from_vec(b"/var/no\xff".to_vec()))));
    }

    #[test]
    fn what_is_no_escape_stays() {
        for (field, bytes) in [
            ("a\\", "a\\"),
            ("\\04", "\\04"),
            ("\\089", "\\089"),
            ("\\777", "\\777"),
            ("\\1340", "\\0"),
        ] {
            assert_eq!(decoded(field.as_bytes()), bytes.as_bytes(), "{field}");
        }
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(
            is_mounted_below(Path::new("/")) && !is_mounted_below(Path::new("/no such folder"))
        );
    }
}
