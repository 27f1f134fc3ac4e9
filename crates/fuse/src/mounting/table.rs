//! The kernel's list of mounts.
use crate::error::MountError;
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Major device number of loop devices.
const LOOP_MAJOR: u32 = 7;

/// A mount in the kernel's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// The mount point, without symbolic links.
    pub mountpoint: PathBuf,
    /// The volume; for a loop device, the file behind it.
    pub source: PathBuf,
    /// The source in the kernel's list.
    pub device: PathBuf,
    /// `fuseblk.cairn` or `fuse.cairn` for Cairn; `fuseblk` for an earlier version.
    pub file_system_type: String,
    /// Device number, as `major` and `minor`.
    pub device_number: (u32, u32),
    /// Whether it is read-only.
    pub read_only: bool,
    /// The user that mounted it, if it is a FUSE mount.
    pub user: Option<u32>,
    /// The only user and group with access, unless all users have it.
    pub only_for: Option<(u32, u32)>,
}

impl MountInfo {
    /// Whether sync(2), syncfs(2) and umount(2) reach the server.
    pub fn forwards_sync(&self) -> bool {
        self.file_system_type.split('.').next() == Some("fuseblk")
    }
    /// Whether Cairn mounts with this type. Other programs use `fuseblk` too.
    pub fn may_be_cairn(&self) -> bool {
        matches!(self.file_system_type.as_str(), "fuseblk.cairn" | "fuseblk" | "fuse.cairn")
    }
}

/// The mount with the root `mountpoint`; the topmost, if there are several. Also finds mounts whose
/// server is dead.
///
/// ```
/// let root = cairn_fuse::find_mount(std::path::Path::new("/proc"))?.expect("proc is mounted");
/// assert_eq!(root.file_system_type, "proc");
/// # Ok::<(), cairn_fuse::MountError>(())
/// ```
///
/// # Errors
/// If the list of mounts cannot be read.
pub fn find_mount(mountpoint: &Path) -> Result<Option<MountInfo>, MountError> {
    let wanted = real_path(mountpoint);
    Ok(mounts()?.into_iter().rfind(|mount| mount.mountpoint == wanted))
}

/// The mount point of a mount that this process sees and that shows the volume in `image`, a file
/// or a block device.
pub fn mount_point_of(image: &Path) -> Option<PathBuf> {
    let wanted = identity(image)?;
    let shows = |mount: &MountInfo| {
        members(&mount.source).iter().any(|member| identity(member) == Some(wanted))
    };
    let found = mounts().ok()?.into_iter().find(|mount| mount.may_be_cairn() && shows(mount));
    found.map(|mount| mount.mountpoint)
}

/// Where other file systems are mounted below a directory, as this process sees it.
///
/// # Errors
/// If the list of mounts cannot be read.
pub fn mount_points_below(directory: &Path) -> Result<Vec<PathBuf>, MountError> {
    let directory = directory.canonicalize().unwrap_or_else(|_| real_path(directory));
    let points = mounts()?.into_iter().map(|mount| mount.mountpoint);
    Ok(points.filter(|point| *point != directory && point.starts_with(&directory)).collect())
}

/// Identifies a file or a block device. A loop device counts as the file behind it.
fn identity(path: &Path) -> Option<(bool, u64, u64)> {
    let mut stat = rustix::fs::stat(path).ok()?;
    let mut is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    if is_device
        && let Some(backing) =
            backing_file_of(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))
    {
        stat = rustix::fs::stat(&backing).ok()?;
        is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    }
    Some(if is_device { (true, stat.st_rdev, 0) } else { (false, stat.st_dev, stat.st_ino) })
}

/// The files or devices of a source; of `mirror:/a,/b` both.
fn members(source: &Path) -> Vec<PathBuf> {
    let bytes = source.as_os_str().as_bytes();
    match bytes.strip_prefix(b"mirror:").or_else(|| bytes.strip_prefix(b"concat:")) {
        Some(list) => list
            .split(|&byte| byte == b',')
            .map(|name| PathBuf::from(OsStr::from_bytes(name)))
            .collect(),
        None => vec![source.to_owned()],
    }
}

/// The last mount of the file system with this device number, at any path.
pub fn find_mount_of_device(device_number: (u32, u32)) -> Option<MountInfo> {
    mounts().ok()?.into_iter().rfind(|mount| mount.device_number == device_number)
}

/// All mounts that this process sees.
fn mounts() -> Result<Vec<MountInfo>, MountError> {
    let table = std::fs::read("/proc/self/mountinfo")
        .map_err(|error| MountError::MountTable(error.to_string()))?;
    let with_backing = |mount: MountInfo| {
        let (major, minor) = mount.device_number;
        MountInfo { source: backing_file_of(major, minor).unwrap_or(mount.source), ..mount }
    };
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse_line).map(with_backing).collect())
}

/// The sources of all mounts, as the kernel lists them.
pub(super) fn sources() -> Result<Vec<PathBuf>, MountError> {
    Ok(mounts()?.into_iter().map(|mount| mount.device).collect())
}

/// `path` without symbolic links. Never touches the mount there: its server may be dead.
pub(super) fn real_path(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            let in_real_parent =
                parent.canonicalize().unwrap_or_else(|_| parent.to_owned()).join(name);
            match std::fs::read_link(&in_real_parent) {
                Ok(_) => in_real_parent.canonicalize().unwrap_or(in_real_parent),
                Err(_) => in_real_parent,
            }
        }
        // The root directory, or a path that ends in "..".
        _ => absolute.canonicalize().unwrap_or(absolute),
    }
}

/// One line of mountinfo: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root
/// rw,errors=continue`.
fn parse_line(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|&byte| byte == b' ');
    let device_number = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = device_number.split_once(':')?;
    let mountpoint = unescape(fields.nth(1)?);
    let options = fields.next()?;
    let mut after = fields.skip_while(|field| *field != b"-").skip(1);
    let file_system_type = String::from_utf8_lossy(after.next()?).into_owned();
    let device = PathBuf::from(unescape(after.next()?));
    let of_connection = String::from_utf8_lossy(after.next().unwrap_or_default()).into_owned();
    let user = number_of("user_id=", &of_connection);
    Some(MountInfo {
        mountpoint: mountpoint.into(),
        source: device.clone(),
        device,
        file_system_type,
        device_number: (major.parse().ok()?, minor.parse().ok()?),
        read_only: options.split(|&byte| byte == b',').any(|option| option == b"ro"),
        user,
        only_for: only_for(&of_connection),
    })
}

/// A number from the options of a FUSE connection: `rw,user_id=1000,group_id=1000,allow_other`.
fn number_of(name: &str, options: &str) -> Option<u32> {
    options.split(',').find_map(|option| option.strip_prefix(name)?.parse().ok())
}

fn only_for(options: &str) -> Option<(u32, u32)> {
    let owner = (number_of("user_id=", options)?, number_of("group_id=", options)?);
    (owner.0 != 0 && !options.split(',').any(|option| option == "allow_other")).then_some(owner)
}

/// The kernel writes blanks and the like as a backslash and three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = if byte == b'\\' { tail.get(..3) } else { None };
        match octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok())
        {
            Some(value) => {
                bytes.push(value);
                rest = &tail[3..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes)
}

/// The file behind the loop device with this number.
pub(super) fn backing_file_of(major: u32, minor: u32) -> Option<PathBuf> {
    if major != LOOP_MAJOR {
        return None;
    }
    let shown = std::fs::read(format!("/sys/dev/block/{major}:{minor}/loop/backing_file")).ok()?;
    let shown = shown.strip_suffix(b"\n").unwrap_or(&shown);
    Some(PathBuf::from(OsStr::from_bytes(shown)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_parsed_with_blanks_and_optional_fields() {
        let line = concat!(
            r"36 35 7:3 / /a\040b/c rw,noatime shared:1 master:2 - ",
            "fuseblk /dev/loop3 rw,user_id=0"
        );
        let mount = parse_line(line.as_bytes()).unwrap();
        assert_eq!(mount.mountpoint, Path::new("/a b/c"));
        assert_eq!(mount.device, Path::new("/dev/loop3"));
        assert_eq!(
            (mount.file_system_type.as_str(), mount.device_number, mount.read_only),
            ("fuseblk", (7, 3), false)
        );
        assert_eq!(mount.user, Some(0));
        assert!(mount.forwards_sync() && mount.may_be_cairn() && mount.only_for.is_none());
        let typed = parse_line(br"36 35 7:3 / /b rw - fuseblk.cairn /run/cairn/a rw").unwrap();
        assert!(typed.forwards_sync() && typed.may_be_cairn());
        let plain = parse_line(br"40 1 0:44 / /m ro - fuse.cairn /x/back\134slash ro").unwrap();
        assert_eq!(plain.source, Path::new(r"/x/back\slash"));
        assert!(
            plain.user.is_none()
                && plain.read_only
                && !plain.forwards_sync()
                && plain.may_be_cairn()
        );
    }

    #[test]
    fn a_mount_of_one_user_is_distinguished_from_one_for_all() {
        let of = |options: &str| {
            parse_line(format!("40 1 0:44 / /m rw - fuse.cairn /x {options}").as_bytes())
                .unwrap()
                .only_for
        };
        assert_eq!(of("rw,user_id=1000,group_id=100,max_read=4096"), Some((1000, 100)));
        assert_eq!(of("rw,user_id=1000,group_id=100,allow_other"), None);
        assert_eq!(of("rw,user_id=0,group_id=0"), None);
    }

    #[test]
    fn a_damaged_line_is_skipped() {
        for line in [&b""[..], b"36", b"36 35 x / /m rw - ext4 a rw", b"36 35 1:2 / /m rw ext4"] {
            assert_eq!(parse_line(line), None);
        }
        assert_eq!(unescape(br"a\04"), r"a\04");
        assert_eq!(unescape(br"a\999"), r"a\999");
    }

    #[test]
    fn mounts_are_found_by_their_root_only() {
        let proc = find_mount(Path::new("/proc/")).unwrap().expect("proc is mounted");
        assert_eq!(proc.file_system_type, "proc");
        assert!(!proc.may_be_cairn());
        assert_eq!(find_mount(Path::new("/proc/self")).unwrap(), None);
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        assert_eq!(
            find_mount(&link).unwrap().map(|mount| mount.mountpoint),
            Some(PathBuf::from("/proc"))
        );
    }
}
