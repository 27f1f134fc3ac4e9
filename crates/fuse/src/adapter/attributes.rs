//! GETATTR, STATX, SETATTR, and the attributes in every other answer.
use super::set_id::{clears_bits, is_in_group};
use super::{Answer, VolumeHandler};
use crate::protocol::wire::{
    Attr, AttrOut, EntryOut, STATX_MASK, SetattrIn, Statx, StatxOut, StatxTime,
    setattr_flag as flag,
};
use crate::protocol::{ROOT_NODE, RequestHeader};
use cairn_engine::{AttributeChange, Attributes, FileType, InodeId, TimeChange, Timestamp};
use rustix::io::Errno;

/// Seconds for which names and attributes are valid: for ever, whether the kernel reads the number
/// as signed or not.
const VALID_SECONDS: u64 = i64::MAX as u64;
const BLOCK_BYTES: u32 = 4096;

pub fn attr(attributes: &Attributes) -> Attr {
    Attr {
        inode: attributes.inode.0,
        size: attributes.size_bytes,
        blocks: attributes.blocks_512,
        atime: attributes.accessed.seconds as u64,
        mtime: attributes.modified.seconds as u64,
        ctime: attributes.changed.seconds as u64,
        atime_ns: attributes.accessed.nanoseconds,
        mtime_ns: attributes.modified.nanoseconds,
        ctime_ns: attributes.changed.nanoseconds,
        mode: attributes.mode,
        links: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        device: attributes.device as u32,
        block_size: BLOCK_BYTES,
        flags: 0,
    }
}

pub fn attr_out(attributes: &Attributes) -> AttrOut {
    AttrOut {
        attr_valid_seconds: VALID_SECONDS,
        attr_valid_ns: 0,
        padding: 0,
        attr: attr(attributes),
    }
}

/// The part of a file handle beside the inode number; the kernel keeps 32 bits of it. It is the
/// same as long as the inode exists. Inode numbers are reused only after a crash, for files that
/// were never durable; those were made at another time. Those of a deleted snapshot are, too: there
/// the transaction that made the snapshot counts. The kernel's own root has 0.
pub fn handle_generation(attributes: &Attributes, snapshot: Option<u64>) -> u64 {
    if attributes.inode.0 == ROOT_NODE {
        return 0;
    }
    let created = attributes.created;
    let mixed = (created.seconds as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(u64::from(created.nanoseconds));
    // An odd factor keeps different numbers different.
    let snapshot = snapshot.unwrap_or(0).wrapping_mul(0x9e37_79b1);
    (mixed ^ mixed >> 32 ^ attributes.generation.0 ^ snapshot) & u64::from(u32::MAX)
}

/// `snapshot` is the transaction that made the snapshot of which it is.
fn entry_out(attributes: &Attributes, snapshot: Option<u64>) -> EntryOut {
    EntryOut {
        node: attributes.inode.0,
        generation: handle_generation(attributes, snapshot),
        entry_valid_seconds: VALID_SECONDS,
        attr_valid_seconds: VALID_SECONDS,
        entry_valid_ns: 0,
        attr_valid_ns: 0,
        attr: attr(attributes),
    }
}

/// The cacheable answer for a name that does not exist.
pub fn negative_entry() -> EntryOut {
    EntryOut { entry_valid_seconds: VALID_SECONDS, ..EntryOut::default() }
}

fn statx_time(time: Timestamp) -> StatxTime {
    StatxTime { seconds: time.seconds, nanoseconds: time.nanoseconds, padding: 0 }
}

fn statx(attributes: &Attributes) -> Statx {
    let (major, minor) =
        (rustix::fs::major(attributes.device), rustix::fs::minor(attributes.device));
    Statx {
        mask: STATX_MASK,
        block_size: BLOCK_BYTES,
        links: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        mode: attributes.mode as u16,
        inode: attributes.inode.0,
        size: attributes.size_bytes,
        blocks: attributes.blocks_512,
        atime: statx_time(attributes.accessed),
        btime: statx_time(attributes.created),
        ctime: statx_time(attributes.changed),
        mtime: statx_time(attributes.modified),
        rdev_major: major,
        rdev_minor: minor,
        ..Statx::default()
    }
}

pub fn statx_out(attributes: &Attributes) -> StatxOut {
    StatxOut { attr_valid_seconds: VALID_SECONDS, stat: statx(attributes), ..StatxOut::default() }
}

fn time_change(
    valid: u32,
    set: u32,
    now: u32,
    seconds: u64,
    nanoseconds: u32,
) -> Option<TimeChange> {
    match valid {
        valid if valid & now != 0 => Some(TimeChange::Now),
        valid if valid & set != 0 => Some(TimeChange::At(Timestamp {
            seconds: seconds as i64,
            nanoseconds: nanoseconds.min(999_999_999),
        })),
        _ => None,
    }
}

/// Of chown(2) without an owner and without a group no more is left than a change of nothing.
fn is_chown_of_nothing(valid: u32) -> bool {
    let others = flag::MODE | flag::UID | flag::GID | flag::SIZE | flag::ATIME | flag::MTIME;
    valid & others == 0
}

/// The server clears set-id bits: a change of owner clears those of everything but directories.
fn attribute_change(set: &SetattrIn, is_directory: bool, in_group: bool) -> AttributeChange {
    let valid = set.valid;
    let given = |bit: u32, value: u32| (valid & bit != 0).then_some(value);
    let is_chown = valid & (flag::UID | flag::GID) != 0 || is_chown_of_nothing(valid);
    let changes_owner = is_chown && valid & flag::MODE == 0;
    AttributeChange {
        mode: given(flag::MODE, set.mode & 0o7777),
        uid: given(flag::UID, set.uid),
        gid: given(flag::GID, set.gid),
        size: (valid & flag::SIZE != 0).then_some(set.size),
        times: None,
        accessed: time_change(valid, flag::ATIME, flag::ATIME_NOW, set.atime, set.atime_ns),
        modified: time_change(valid, flag::MTIME, flag::MTIME_NOW, set.mtime, set.mtime_ns),
        changed: time_change(valid, flag::CTIME, 0, set.ctime, set.ctime_ns),
        clear_set_id: !is_directory && (changes_owner || valid & flag::KILL_SUIDGID != 0),
        not_in_group: !in_group,
    }
}

impl VolumeHandler {
    pub(super) fn entry(&self, attributes: &Attributes) -> EntryOut {
        entry_out(attributes, self.volume.snapshot_with(attributes.inode))
    }

    pub(super) fn get_attributes(&self, node: InodeId) -> Answer<AttrOut> {
        Ok(attr_out(&self.volume.attributes(node)?))
    }

    pub(super) fn statx(&self, node: InodeId) -> Answer<StatxOut> {
        Ok(statx_out(&self.volume.attributes(node)?))
    }

    pub(super) fn set_attributes(
        &self,
        header: &RequestHeader,
        set: &SetattrIn,
    ) -> Answer<AttrOut> {
        let node = InodeId(header.node);
        let keeps_set_id = flag::MODE | flag::SIZE | flag::ATIME | flag::MTIME;
        let concerns_set_id = set.valid & (flag::UID | flag::GID | flag::KILL_SUIDGID) != 0
            || set.valid & keeps_set_id == 0;
        let (is_directory, in_group) = if concerns_set_id {
            let before = self.volume.attributes(node)?;
            let is_directory = before.file_type == FileType::Directory;
            let in_group = header.uid == 0 || is_in_group(header, &before);
            let is_stranger = header.uid != 0 && header.uid != before.uid;
            // The kernel has checked everything else. Without attributes it is either a chown(2) of
            // nothing, which only the owner may do if it clears bits, or what comes before a write
            // or FALLOCATE, which clear the bits themselves.
            if is_stranger
                && is_chown_of_nothing(set.valid)
                && !is_directory
                && clears_bits(before.mode, in_group)
            {
                // With the writeback cache the kernel owns the time of change, and sends it with a
                // chown. Without it both look the same.
                let is_chown = set.valid & flag::CTIME != 0;
                return if is_chown { Err(Errno::PERM.into()) } else { Ok(attr_out(&before)) };
            }
            (is_directory, in_group)
        } else {
            (false, true)
        };
        let change = AttributeChange {
            times: Some(self.write_times()),
            ..attribute_change(set, is_directory, in_group)
        };
        let attributes = self.volume.set_attributes(node, &change)?;
        self.settle_change(node)?;
        if set.valid & flag::SIZE != 0 {
            self.overdrawn.forgive(node.0);
        }
        Ok(attr_out(&attributes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::MemoryDevice;
    use cairn_engine::{NewInode, Volume, VolumeOptions, mkfs};
    use std::sync::Arc;

    #[test]
    fn a_chown_of_nothing_clears_set_id_bits() {
        let clears = |valid: u32, is_directory: bool| {
            let set = SetattrIn { valid, ..SetattrIn::default() };
            attribute_change(&set, is_directory, true).clear_set_id
        };
        assert!(clears(0, false) && clears(flag::CTIME, false) && clears(flag::UID, false));
        assert!(!clears(0, true) && !clears(flag::MODE, false) && !clears(flag::SIZE, false));
        assert!(!clears(flag::MTIME | flag::CTIME, false));
    }

    /// A handler, and a file of user 7 with this mode.
    fn handler_with_file(writeback: bool, mode: u32) -> (VolumeHandler, InodeId) {
        let device = Arc::new(MemoryDevice::new(32 << 20));
        mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
        let volume = Volume::open(device, VolumeOptions::default()).unwrap();
        let file_type = FileType::Regular;
        let new = NewInode { file_type, mode, uid: 7, gid: 70, device: 0, target: None };
        let file = volume.create(volume.root(), b"file", &new).unwrap().inode;
        (VolumeHandler::new(volume, writeback), file)
    }

    fn header(node: InodeId, uid: u32) -> RequestHeader {
        RequestHeader { unique: 1, opcode: 4, node: node.0, uid, gid: 70, pid: 0 }
    }

    #[test]
    fn a_stranger_clears_no_set_id_bits() {
        let (handler, file) = handler_with_file(true, 0o6755);
        let set = |uid: u32, valid: u32| {
            let header = header(file, uid);
            let answer =
                handler.set_attributes(&header, &SetattrIn { valid, ..SetattrIn::default() });
            answer.map(|out| out.attr.mode & 0o7777).map_err(|failure| failure.errno())
        };
        let before = handler.volume.attributes(file).unwrap().changed;
        // A chown of nothing, and what comes before a write.
        assert_eq!(set(8, flag::CTIME), Err(Errno::PERM));
        assert_eq!(set(8, 0), Ok(0o6755));
        assert_eq!(handler.volume.attributes(file).unwrap().changed, before);
        assert_eq!(set(7, 0), Ok(0o755));
        assert_eq!(set(8, flag::CTIME), Ok(0o755));
    }

    #[test]
    fn the_kernel_that_caches_writes_owns_the_times() {
        for writeback in [false, true] {
            let (handler, file) = handler_with_file(writeback, 0o6755);
            let changed = || handler.volume.attributes(file).unwrap().changed;
            let before = changed();
            let header = header(file, 7);
            handler.set_attributes(&header, &SetattrIn::default()).unwrap();
            assert_eq!(changed() == before, writeback);
        }
    }

    #[test]
    fn times_are_set_to_now_or_to_a_point_before_1970() {
        let set = SetattrIn {
            valid: flag::ATIME | flag::ATIME_NOW | flag::MTIME | flag::CTIME,
            atime: 5,
            mtime: (-7_i64) as u64,
            mtime_ns: 8,
            ctime_ns: u32::MAX,
            ..SetattrIn::default()
        };
        let change = attribute_change(&set, false, true);
        assert_eq!(change.accessed, Some(TimeChange::Now));
        assert_eq!(
            change.modified,
            Some(TimeChange::At(Timestamp { seconds: -7, nanoseconds: 8 }))
        );
        assert_eq!(
            change.changed,
            Some(TimeChange::At(Timestamp { seconds: 0, nanoseconds: 999_999_999 }))
        );
        assert_eq!(
            (change.mode, change.uid, change.size, change.clear_set_id),
            (None, None, None, false)
        );
    }

    #[test]
    fn a_new_owner_clears_set_id_bits_but_not_of_directories() {
        let chown = SetattrIn { valid: flag::UID, uid: 3, ..SetattrIn::default() };
        assert!(attribute_change(&chown, false, true).clear_set_id);
        assert!(!attribute_change(&chown, true, true).clear_set_id);
        assert!(attribute_change(&chown, false, false).not_in_group);
        let both =
            SetattrIn { valid: flag::UID | flag::MODE, mode: 0o104_755, ..SetattrIn::default() };
        assert!(!attribute_change(&both, false, true).clear_set_id);
        assert_eq!(attribute_change(&both, false, true).mode, Some(0o4755));
        let truncate =
            SetattrIn { valid: flag::SIZE | flag::KILL_SUIDGID, size: 9, ..SetattrIn::default() };
        let change = attribute_change(&truncate, false, true);
        assert_eq!((change.size, change.clear_set_id), (Some(9), true));
    }
}
