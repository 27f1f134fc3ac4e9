//! One of the two file systems: its scene's directory, descriptors and mappings, and how a call is
//! made there.
//!
//! The thread of a client makes each call first on one side, then on the other. As root it confines
//! itself to the scene's directory by chroot(2) before: so `..`, absolute paths and symbolic links
//! lead to the same places on both sides, and never out of them. The thread shares neither current
//! directory and umask nor descriptors with the others of its process.
use super::call::{At, Call, LockKind, MAPS, SLOTS, SyncKind, Target, USERS};
use super::system::{self, Done, HERE, How, Map, Of};
use cairn_environment::random::Seeded;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::path::Path;

/// Alignment of buffers, as direct I/O needs it.
const ALIGNMENT: usize = 4096;
/// Longest read and write.
pub const TRANSFER_BYTES_MAX: usize = 160 << 10;
/// Longest part of a content that is looked at in one call.
pub const CONTENT_BYTES_MAX: usize = 256 << 10;
/// Room for the names of a directory in one call, with little and with much room.
const LIST_BYTES: [usize; 2] = [600, 32 << 10];
/// Instead of an errno: a directory was listed wrongly.
pub const LISTED_WRONGLY: i32 = 10_000;

/// What stat(2) reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    pub inode: u64,
    pub mode: u32,
    pub links: u64,
    pub uid: u32,
    pub gid: u32,
    pub size: i64,
    pub device: u64,
    pub blocks: i64,
    /// Of access, of modification, of change: seconds and nanoseconds.
    pub times: [(i64, i64); 3],
}

impl Facts {
    fn of(stat: &libc::stat) -> Self {
        Self {
            inode: stat.st_ino,
            mode: stat.st_mode,
            links: stat.st_nlink,
            uid: stat.st_uid,
            gid: stat.st_gid,
            size: stat.st_size,
            device: stat.st_rdev,
            blocks: stat.st_blocks,
            times: [
                (stat.st_atime, stat.st_atime_nsec),
                (stat.st_mtime, stat.st_mtime_nsec),
                (stat.st_ctime, stat.st_ctime_nsec),
            ],
        }
    }

    pub fn is(&self, kind: u32) -> bool {
        self.mode & libc::S_IFMT == kind
    }
}

/// What a call returned.
#[derive(Clone, PartialEq, Eq)]
pub struct Outcome {
    /// 0 instead of a number of a descriptor.
    pub value: Done,
    /// What it read.
    pub data: Vec<u8>,
}

impl From<Done> for Outcome {
    fn from(value: Done) -> Self {
        Self { value, data: Vec::new() }
    }
}

impl From<(Done, Vec<u8>)> for Outcome {
    fn from((value, data): (Done, Vec<u8>)) -> Self {
        Self { value, data }
    }
}

/// One side.
pub struct Side {
    root: c_int,
    confined: bool,
    slots: [c_int; SLOTS],
    maps: [Option<Map>; MAPS],
    buffer: Vec<u8>,
}

/// `length` bytes that belong to `tag`; none of them is zero.
pub fn fill(tag: u64, bytes: &mut [u8]) {
    let mut random = Seeded::new(tag);
    for part in bytes.chunks_mut(8) {
        let word = (random.next_u64() | 0x0101_0101_0101_0101).to_le_bytes();
        part.copy_from_slice(&word[..part.len()]);
    }
}

impl Side {
    /// In the directory `folder`. With `confined`, which only root may ask for, paths do not lead
    /// out of it.
    ///
    /// # Errors
    /// When the directory cannot be opened.
    pub fn new(folder: &Path, confined: bool) -> Result<Self, String> {
        let text = folder.to_string_lossy();
        let root = system::open(HERE, &text, libc::O_RDONLY | libc::O_DIRECTORY, 0);
        let root = root.map_err(|errno| format!("{text}: {}", name_of_errno(errno)))? as c_int;
        let buffer = vec![0; CONTENT_BYTES_MAX + 2 * ALIGNMENT];
        Ok(Self { root, confined, slots: [-1; SLOTS], maps: Default::default(), buffer })
    }

    /// Makes this side the one whose paths the thread uses.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn enter(&self) -> Done {
        system::fchdir(self.root)?;
        if self.confined { system::chroot(".") } else { Ok(0) }
    }

    /// Has the kernel send what it caches of an open file.
    ///
    /// # Errors
    /// Its errno.
    pub fn send(&self, slot: usize) -> Done {
        system::fdatasync(self.slot(slot))
    }

    /// Has the kernel send all that it caches of this file system.
    ///
    /// # Errors
    /// Its errno.
    pub fn send_all(&self) -> Done {
        system::syncfs(self.root)
    }

    fn slot(&self, slot: usize) -> c_int {
        self.slots[slot]
    }

    fn set_slot(&mut self, slot: usize, opened: Done) -> Outcome {
        if let Ok(fd) = opened {
            self.close_slot(slot).ok();
            self.slots[slot] = fd as c_int;
        }
        opened.map(|_| 0).into()
    }

    fn close_slot(&mut self, slot: usize) -> Done {
        let fd = std::mem::replace(&mut self.slots[slot], -1);
        system::close(fd)
    }

    fn directory(&self, at: &At) -> c_int {
        at.directory.map_or(HERE, |slot| self.slot(slot))
    }

    fn of<'a>(&self, target: &'a Target) -> Of<'a> {
        match target {
            Target::Path(at, follow) => Of::Path { path: &at.path, follow: *follow },
            Target::Slot(slot) => Of::Open(self.slot(*slot)),
        }
    }

    /// What stat(2) reports of a target.
    ///
    /// # Errors
    /// Its errno.
    pub fn facts(&self, target: &Target) -> Done<Facts> {
        let stat = match target {
            Target::Path(at, follow) => {
                let flags = if *follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
                system::stat(self.directory(at), &at.path, flags)
            }
            Target::Slot(slot) => system::stat(self.slot(*slot), "", libc::AT_EMPTY_PATH),
        };
        stat.map(|stat| Facts::of(&stat))
    }

    /// Memory at an address that suits direct I/O.
    fn aligned(&mut self, length: usize) -> &mut [u8] {
        let from = self.buffer.as_ptr().align_offset(ALIGNMENT);
        &mut self.buffer[from..from + length]
    }

    /// `length` bytes of a target from `offset`, read by root, if it is a regular file that can be
    /// read.
    pub fn content(&mut self, target: &Target, offset: i64, length: usize) -> Option<Vec<u8>> {
        let (fd, close) = match target {
            Target::Slot(slot) => (self.slot(*slot), false),
            Target::Path(at, follow) => {
                let no_follow = if *follow { 0 } else { libc::O_NOFOLLOW };
                let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | no_follow;
                (system::open(self.directory(at), &at.path, flags, 0).ok()? as c_int, true)
            }
        };
        // Whole blocks, as a descriptor for direct I/O needs them.
        let before = offset as usize % ALIGNMENT;
        let bytes = self.aligned((before + length).next_multiple_of(ALIGNMENT));
        let got = system::read(fd, How::At(offset - before as i64), bytes);
        let bytes = got.map(|got| {
            let end = (got as usize).min(before + length);
            bytes[before.min(end)..end].to_vec()
        });
        if close {
            let _ = system::close(fd);
        }
        bytes.ok()
    }

    /// Makes a call as the user that the thread is now.
    pub fn perform(&mut self, call: &Call) -> Outcome {
        match call {
            Call::Open { slot, at, flags, mode } => {
                let flags = flags.0 as c_int | libc::O_NONBLOCK | libc::O_NOCTTY;
                let opened = system::open(self.directory(at), &at.path, flags, mode.0);
                self.set_slot(*slot, opened)
            }
            Call::Close { slot } => self.close_slot(*slot).into(),
            Call::Duplicate { slot, to } => {
                let opened = system::dup(self.slot(*slot));
                self.set_slot(*to, opened)
            }
            Call::Read { slot, how, length } => {
                let fd = self.slot(*slot);
                let buffer = self.aligned(*length);
                let got = system::read(fd, *how, buffer);
                (got, buffer[..got.unwrap_or(0) as usize].to_vec()).into()
            }
            Call::Write { slot, how, length, tag } => {
                let fd = self.slot(*slot);
                let buffer = self.aligned(*length);
                fill(*tag, buffer);
                system::write(fd, *how, buffer).into()
            }
            Call::Seek { slot, offset, whence } => {
                system::seek(self.slot(*slot), *offset, *whence).into()
            }
            Call::Truncate { path, length } => system::truncate(path, *length).into(),
            Call::TruncateOpen { slot, length } => {
                system::ftruncate(self.slot(*slot), *length).into()
            }
            Call::Allocate { slot, mode, offset, length } => {
                system::fallocate(self.slot(*slot), *mode, *offset, *length).into()
            }
            Call::Copy { from, to, offsets, length } => {
                system::copy(self.slot(*from), self.slot(*to), *offsets, *length).into()
            }
            Call::FileSystem { slot } => self.file_system(*slot),
            Call::Sync { slot, kind } => match kind {
                SyncKind::Full => system::fsync(self.slot(*slot)).into(),
                SyncKind::Data => system::fdatasync(self.slot(*slot)).into(),
                SyncKind::FileSystem => system::syncfs(self.slot(*slot)).into(),
                SyncKind::Range(offset, length) => {
                    system::sync_file_range(self.slot(*slot), *offset, *length).into()
                }
            },
            Call::Lock { slot, kind } => match kind {
                LockKind::Whole(operation) => {
                    system::flock(self.slot(*slot), operation | libc::LOCK_NB).into()
                }
                LockKind::Bytes(kind, from, length) => {
                    system::lock_bytes(self.slot(*slot), *kind, *from, *length).into()
                }
            },
            Call::Umask { mask } => system::umask(mask.0).map(|_| 0).into(),
            Call::List { at, remove } => self.list(at, remove.as_deref()),
            Call::ListAgain { slot } => list_again(self.slot(*slot)),
            Call::Map { .. }
            | Call::Unmap { .. }
            | Call::Store { .. }
            | Call::Load { .. }
            | Call::SyncMap { .. } => self.perform_mapped(call),
            Call::Link { .. }
            | Call::LinkOpen { .. }
            | Call::Symlink { .. }
            | Call::ReadLink { .. }
            | Call::Rename { .. }
            | Call::Unlink { .. }
            | Call::RemoveDirectory { .. }
            | Call::MakeDirectory { .. }
            | Call::MakeNode { .. } => self.perform_named(call),
            Call::Mode { .. }
            | Call::Owner { .. }
            | Call::Times { .. }
            | Call::Access { .. }
            | Call::Stat { .. }
            | Call::SetXattr { .. }
            | Call::GetXattr { .. }
            | Call::ListXattrs { .. }
            | Call::RemoveXattr { .. } => self.perform_attributed(call),
        }
    }

    fn perform_mapped(&mut self, call: &Call) -> Outcome {
        let none = || Outcome::from(Err(libc::EBADF));
        match call {
            Call::Map { map, slot, offset, length, for_writing } => {
                self.maps[*map] = None;
                match Map::new(self.slot(*slot), *offset, *length, *for_writing) {
                    Ok(made) => self.maps[*map] = Some(made),
                    Err(errno) => return Err(errno).into(),
                }
                Ok(0).into()
            }
            Call::Unmap { map } => self.maps[*map].take().map_or_else(none, |_| Ok(0).into()),
            Call::Store { map, at, length, tag } => {
                let defined =
                    |map: &&mut Map| at + length <= map.length() && !map.is_undefined(*at, *length);
                let mut data = vec![0; *length];
                fill(*tag, &mut data);
                let map = self.maps[*map].as_mut().filter(defined);
                map.map_or_else(none, |map| map.store(*at, &data).into())
            }
            Call::Load { map, at, length } => {
                let defined =
                    |map: &&Map| at + length <= map.length() && !map.is_undefined(*at, *length);
                let map = self.maps[*map].as_ref().filter(defined);
                map.map_or_else(none, |map| map.load(*at, *length).into())
            }
            Call::SyncMap { map } => {
                self.maps[*map].as_ref().map_or_else(none, |map| map.sync().into())
            }
            _ => none(),
        }
    }

    fn perform_named(&mut self, call: &Call) -> Outcome {
        match call {
            Call::Link { from, to, follow } => {
                let flags = if *follow { libc::AT_SYMLINK_FOLLOW } else { 0 };
                let (from_at, to_at) = (self.directory(from), self.directory(to));
                system::link(from_at, &from.path, to_at, &to.path, flags).into()
            }
            Call::LinkOpen { slot, to } => {
                let at = self.directory(to);
                system::link(self.slot(*slot), "", at, &to.path, libc::AT_EMPTY_PATH).into()
            }
            Call::Symlink { target, at } => {
                system::symlink(target, self.directory(at), &at.path).into()
            }
            Call::ReadLink { at, room } => {
                system::read_link(self.directory(at), &at.path, *room).into()
            }
            Call::Rename { from, to, flags } => {
                let (from_at, to_at) = (self.directory(from), self.directory(to));
                system::rename(from_at, &from.path, to_at, &to.path, *flags).into()
            }
            Call::Unlink { at } => system::unlink(self.directory(at), &at.path, 0).into(),
            Call::RemoveDirectory { at } => {
                system::unlink(self.directory(at), &at.path, libc::AT_REMOVEDIR).into()
            }
            Call::MakeDirectory { at, mode } => {
                system::mkdir(self.directory(at), &at.path, mode.0).into()
            }
            Call::MakeNode { at, mode, device } => {
                system::mknod(self.directory(at), &at.path, mode.0, *device).into()
            }
            _ => Err(libc::ENOSYS).into(),
        }
    }

    fn perform_attributed(&mut self, call: &Call) -> Outcome {
        let no_follow = |follow: bool| if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
        match call {
            Call::Mode { target: Target::Path(at, _), mode } => {
                system::chmod(self.directory(at), &at.path, mode.0).into()
            }
            Call::Mode { target: Target::Slot(slot), mode } => {
                system::fchmod(self.slot(*slot), mode.0).into()
            }
            Call::Owner { target: Target::Path(at, follow), uid, gid } => {
                let flags = no_follow(*follow);
                system::chown(self.directory(at), &at.path, *uid, *gid, flags).into()
            }
            Call::Owner { target: Target::Slot(slot), uid, gid } => {
                system::fchown(self.slot(*slot), *uid, *gid).into()
            }
            Call::Times { target: Target::Path(at, follow), times } => {
                let flags = no_follow(*follow);
                system::set_times(self.directory(at), Some(&at.path), *times, flags).into()
            }
            Call::Times { target: Target::Slot(slot), times } => {
                system::set_times(self.slot(*slot), None, *times, 0).into()
            }
            Call::Access { at, mode, effective } => {
                let flags = if *effective { libc::AT_EACCESS } else { 0 };
                system::access(self.directory(at), &at.path, *mode, flags).into()
            }
            Call::Stat { target } => self.facts(target).map(|_| 0).into(),
            Call::SetXattr { target, name, length, tag, flags } => {
                let mut value = vec![0; *length];
                fill(*tag, &mut value);
                system::set_attribute(self.of(target), name, &value, *flags).into()
            }
            Call::GetXattr { target, name, room } => {
                system::attribute(self.of(target), name, *room).into()
            }
            Call::ListXattrs { target, room } => {
                let (got, names) = system::attributes(self.of(target), *room);
                let mut names: Vec<&[u8]> = names.split_inclusive(|byte| *byte == 0).collect();
                names.sort_unstable();
                (got, names.concat()).into()
            }
            Call::RemoveXattr { target, name } => {
                system::remove_attribute(self.of(target), name).into()
            }
            _ => Err(libc::ENOSYS).into(),
        }
    }

    /// Only what holds everywhere.
    fn file_system(&self, slot: usize) -> Outcome {
        let is_sane = |found: libc::statfs| {
            let sane = found.f_namelen == 255
                && found.f_bfree <= found.f_blocks
                && found.f_bavail <= found.f_bfree
                && found.f_ffree <= found.f_files
                && found.f_bsize == 4096;
            i64::from(sane)
        };
        system::statfs(self.slot(slot)).map(is_sane).into()
    }

    fn list(&self, at: &At, remove: Option<&str>) -> Outcome {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
        let opened = system::open(self.directory(at), &at.path, flags, 0);
        let Ok(fd) = opened else { return opened.into() };
        let fd = fd as c_int;
        let mut removed = None;
        let listed = entries(fd, LIST_BYTES[usize::from(remove.is_none())], || {
            if removed.is_none() {
                removed = remove.map(|name| system::unlink(fd, name, 0));
            }
        });
        let _ = system::close(fd);
        match listed {
            Err(errno) => Err(errno).into(),
            Ok(found) => {
                let gone = remove.filter(|_| removed == Some(Ok(0)));
                let kept = found.into_iter().filter(|entry| gone != Some(entry.shown.as_str()));
                let mut data = format!("{removed:?}").into_bytes();
                let names: BTreeSet<String> = kept.map(|entry| entry.typed()).collect();
                names.iter().for_each(|name| data.extend_from_slice(name.as_bytes()));
                (Ok(names.len() as i64), data).into()
            }
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        self.maps = Default::default();
        for fd in self.slots.into_iter().chain([self.root]).filter(|fd| *fd >= 0) {
            let _ = system::close(fd);
        }
    }
}

/// An entry of a directory.
struct Entry {
    shown: String,
    kind: u8,
    /// Of the next one.
    cookie: i64,
}

impl Entry {
    fn typed(&self) -> String {
        format!("{}/{}\0", self.shown, self.kind)
    }
}

/// All entries of an open directory from where it stands, read with room for `room` bytes at a
/// time; `between` runs after each read.
fn entries(fd: c_int, room: usize, mut between: impl FnMut()) -> Done<Vec<Entry>> {
    let (mut all, mut names) = (Vec::new(), BTreeSet::new());
    let mut buffer = vec![0; room];
    loop {
        let length = system::directory_entries(fd, &mut buffer)? as usize;
        if length == 0 {
            return Ok(all);
        }
        let mut rest = &buffer[..length];
        while let Some(record) = rest.get(16..18).map(|two| u16::from_le_bytes([two[0], two[1]])) {
            let record = usize::from(record).clamp(19, rest.len());
            let name = rest[19..record].split(|byte| *byte == 0).next().unwrap_or_default();
            let shown = String::from_utf8_lossy(name).into_owned();
            let cookie = i64::from_le_bytes(rest[8..16].try_into().unwrap_or_default());
            if !names.insert(shown.clone()) {
                return Err(LISTED_WRONGLY);
            }
            all.push(Entry { shown, kind: rest[18], cookie });
            rest = &rest[record..];
        }
        between();
    }
}

/// Lists an open directory from its beginning, and again from some of its cookies: what comes then
/// must be the rest. A mount may be wrong once: from a cookie on the kernel may report what it kept
/// of an older listing that nobody ended. The beginning of the next one ends that.
fn list_again(fd: c_int) -> Outcome {
    match list_from_cookies(fd).or_else(|_| list_from_cookies(fd)) {
        Ok(names) => (Ok(0), names).into(),
        Err(errno) => Err(errno).into(),
    }
}

fn list_from_cookies(fd: c_int) -> Done<Vec<u8>> {
    let typed =
        |entries: &[Entry]| -> BTreeSet<String> { entries.iter().map(Entry::typed).collect() };
    system::seek(fd, 0, libc::SEEK_SET)?;
    let all = entries(fd, LIST_BYTES[0], || ())?;
    for (index, entry) in all.iter().enumerate().step_by(1 + all.len() / 4) {
        system::seek(fd, entry.cookie, libc::SEEK_SET)?;
        let rest = entries(fd, LIST_BYTES[1], || ())?;
        if typed(&rest) != typed(&all[index + 1..]) {
            return Err(LISTED_WRONGLY);
        }
    }
    system::seek(fd, 0, libc::SEEK_SET)?;
    Ok(typed(&all).into_iter().collect::<String>().into_bytes())
}

/// Makes the thread one of [`USERS`], who was root before.
///
/// # Errors
/// When the system refuses.
pub fn become_user(user: usize) -> Done {
    let user = &USERS[user];
    system::set_groups(user.groups)?;
    system::set_group(user.group)?;
    system::set_user(user.id)
}

/// Makes the thread root again.
///
/// # Errors
/// When the system refuses.
pub fn become_root() -> Done {
    system::set_user(0)?;
    system::set_group(0)?;
    system::set_groups(&[])
}

macro_rules! errnos {
    ($($name:ident)*) => { &[$((libc::$name, stringify!($name)),)*] };
}

const ERRNOS: &[(i32, &str)] = errnos! {
    E2BIG EACCES EAGAIN EBADF EBUSY EDESTADDRREQ EEXIST EFAULT EFBIG EINTR EINVAL EIO EISDIR ELOOP
    EMFILE EMLINK ENAMETOOLONG ENODATA ENODEV ENOENT ENOMEM ENOSPC ENOSYS ENOTCONN ENOTDIR ENOTEMPTY
    ENOTTY ENXIO EOPNOTSUPP EOVERFLOW EPERM EPIPE ERANGE EROFS ESPIPE ESTALE ETXTBSY EUCLEAN EXDEV
};

/// ENOENT and so on.
pub fn name_of_errno(errno: i32) -> &'static str {
    if errno == LISTED_WRONGLY {
        return "LISTED_WRONGLY";
    }
    ERRNOS.iter().find(|(number, _)| *number == errno).map_or("another errno", |(_, name)| name)
}

/// What lstat(2) reports of a path.
///
/// # Errors
/// Its errno.
pub fn facts_of(path: &str) -> Done<Facts> {
    system::stat(HERE, path, libc::AT_SYMLINK_NOFOLLOW).map(|stat| Facts::of(&stat))
}
