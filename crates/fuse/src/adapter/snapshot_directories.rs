//! `.snapshots` of a mount: directories that are on no device and lead to snapshots.
//!
//! Each stands for a *live* directory: the root, the root directory of a subvolume with snapshots,
//! or one on the way there. It holds the snapshots of that subvolume, and the directories that
//! stand for those below. No snapshot gets the name of such a directory; if one has it, because the
//! directory came later, the snapshot wins.
//!
//! Mode, owner and group are those of the live directory at the time of the request, and the kernel
//! keeps neither attributes nor names. So it refuses here what it refuses there. A number stands
//! for the same live directory as long as the mount lives, wherever that is moved, so a permission
//! that was checked is one for the directory whose snapshots are answered.
//!
//! The kernel keeps a listing as long as the directory's time of change stays. A listing is made of
//! what [`Volume::moves`] counts the changes of, and of the names in the live directory, which has
//! a time of change of its own. It may lack what could not be read, which is counted, too.
//!
//! Invariant: a directory's time of change is a later one whenever one of these is another than
//! at the last request. So it never goes back, and no two listings have the same, also when the
//! clock was set back.
//!
//! Lock: the table of numbers, for a moment; nothing is called under it.
use super::attributes::{attr_out, statx_out};
use super::snapshot_ways::{KeptWays, Ways};
use super::{Answer, VolumeHandler, answer, answer_bytes, answer_status, fail};
use crate::directory_requests::{self, Request};
use crate::kernel;
use crate::protocol::directory_list::ListedName;
use crate::protocol::wire::{AttrOut, EntryOut, StatxOut};
use crate::protocol::{DirectoryList, DirectoryPlusList, Operation, RequestHeader};
use crate::transport::Reply;
use cairn_engine::{Attributes, Error, FileType, InodeId, SnapshotInfo, Timestamp, Volume};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, clock};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The name in the root directory that leads here, unless that has an entry of this name.
pub(super) const NAME: &[u8] = b".snapshots";
/// Cookies up to this one continue after "." and "..".
const COOKIE_OF_DOTS: u64 = 2;

/// The directories that the kernel may know.
pub(super) struct SnapshotDirectories {
    table: Mutex<Table>,
    ways: KeptWays,
}

struct Table {
    /// By number.
    shown: Vec<Shown>,
    numbers: HashMap<InodeId, u64>,
}

struct Shown {
    live: InodeId,
    /// What its listing was made of at the last request.
    listing: Option<Listing>,
    /// Its time of change.
    changed: Timestamp,
}

/// What a listing is made of: with the same, it is the same.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Listing {
    moves: u64,
    /// How often not all ways could be read.
    failures: u64,
    /// When the live directory changed.
    changed: Timestamp,
}

impl Shown {
    fn new(live: InodeId) -> Self {
        Self { live, listing: None, changed: Timestamp::default() }
    }

    /// Its time of change with this listing.
    fn changed_by(&mut self, listing: Listing) -> Timestamp {
        if self.listing != Some(listing) {
            let (seconds, nanoseconds) = clock::now_wall();
            let next = match self.changed.nanoseconds {
                999_999_999 => Timestamp { seconds: self.changed.seconds + 1, nanoseconds: 0 },
                before => Timestamp { nanoseconds: before + 1, ..self.changed },
            };
            self.changed = next.max(Timestamp { seconds, nanoseconds });
            self.listing = Some(listing);
        }
        self.changed
    }
}

impl Default for SnapshotDirectories {
    fn default() -> Self {
        let numbers = HashMap::from([(InodeId::ROOT, 0)]);
        let table = Table { shown: vec![Shown::new(InodeId::ROOT)], numbers };
        Self { table: Mutex::new(Rank::LEAF, table), ways: KeptWays::default() }
    }
}

impl SnapshotDirectories {
    /// The node that stands for a live directory.
    pub(super) fn node(&self, live: InodeId) -> InodeId {
        let mut table = self.table.lock();
        let number = match table.numbers.get(&live) {
            Some(number) => *number,
            None => {
                let number = table.shown.len() as u64;
                table.shown.push(Shown::new(live));
                table.numbers.insert(live, number);
                number
            }
        };
        InodeId::made_up(number)
    }

    /// The node that stands for a live directory, if the kernel may know it.
    pub(super) fn known_node(&self, live: InodeId) -> Option<InodeId> {
        self.table.lock().numbers.get(&live).copied().map(InodeId::made_up)
    }

    /// The live directory for which a node stands; a handle may be of an earlier mount.
    fn live(&self, node: InodeId) -> Answer<InodeId> {
        let number = node.made_up_number().ok_or(Errno::STALE)?;
        let table = self.table.lock();
        Ok(table.shown.get(number as usize).ok_or(Errno::STALE)?.live)
    }

    /// The time of change of a node with this listing.
    fn changed(&self, node: InodeId, listing: Listing) -> Answer<Timestamp> {
        let number = node.made_up_number().ok_or(Errno::STALE)?;
        let mut table = self.table.lock();
        let shown = table.shown.get_mut(number as usize).ok_or(Errno::STALE)?;
        Ok(shown.changed_by(listing))
    }

    /// The nodes that stand for a live directory and those above it, as far as the kernel may know
    /// them.
    pub(super) fn known_up_to_root(&self, volume: &Volume, live: InodeId) -> Vec<InodeId> {
        let (mut nodes, mut at, mut seen) = (Vec::new(), live, BTreeSet::new());
        loop {
            nodes.extend(self.known_node(at));
            match volume.parent(at) {
                Ok(above) if at != InodeId::ROOT && seen.insert(at) => at = above,
                _ => return nodes,
            }
        }
    }

    /// Whether a snapshot with this name, of the subvolume with the root directory `live`, would
    /// hide others. What can't be read is not shown, so it can't be hidden.
    pub(super) fn would_hide(&self, volume: &Volume, live: InodeId, name: &[u8]) -> bool {
        let Ok(below) = volume.lookup(live, name) else { return false };
        volume.forget(below.inode, 1);
        below.file_type == FileType::Directory
            && self.ways.of(volume).is_ok_and(|ways| ways.lead_to(below.inode))
    }
}

/// What a name in one of these directories is.
enum Found {
    /// The one that stands for this live directory.
    Directory(InodeId),
    /// The root directory of a snapshot, or that of the mount, with a reference.
    Inode(Attributes),
}

/// An entry of one of these directories.
struct Listed {
    /// The place in the list.
    id: InodeId,
    node: InodeId,
    name: Vec<u8>,
}

impl Listed {
    /// Ids of inodes are positive numbers with room for more.
    fn cookie(&self) -> u64 {
        self.id.0 + COOKIE_OF_DOTS + 1
    }
}

/// A number that differs from that of any other number.
fn mixed(number: u64) -> u64 {
    let product = (0x9e37_79b9_7f4a_7c15 ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (product ^ product >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53).rotate_left(29)
}

/// The live directory may be gone.
fn or_stale(error: Error) -> Error {
    if matches!(error, Error::NotFound) { Error::Stale } else { error }
}

impl VolumeHandler {
    /// Answers a request to one of these directories, as a read-only file system would. Returns the
    /// reply if it is of a kind that concerns no directory.
    pub(super) fn serve_snapshot_directory(
        &self,
        header: &RequestHeader,
        operation: &Operation<'_>,
        reply: Reply,
    ) -> Option<Reply> {
        use Operation as Op;
        let node = InodeId(header.node);
        match *operation {
            Op::Lookup { name } => self.look_up_snapshot(node, name, reply),
            Op::GetAttributes { .. } => answer(reply, self.snapshot_directory_attributes(node)),
            Op::Statx { .. } => answer(reply, self.snapshot_directory_statx(node)),
            Op::ReadDirectory { cookie, length_bytes } => {
                let mut list = DirectoryList::new(length_bytes);
                let listed = self.list_snapshots(node, cookie, &mut |name| list.push(name));
                answer_bytes(reply, listed.map(|()| list.into_bytes()));
            }
            Op::ReadDirectoryPlus { cookie, length_bytes } => {
                let mut list = DirectoryPlusList::new(length_bytes);
                // Names only: the kernel looks each up when it is used.
                let mut push = |name: &ListedName<'_>| list.push(name, &EntryOut::default());
                let listed = self.list_snapshots(node, cookie, &mut push);
                answer_bytes(reply, listed.map(|()| list.as_bytes()));
            }
            Op::SetAttributes(_)
            | Op::Symlink { .. }
            | Op::MakeNode { .. }
            | Op::MakeDirectory { .. }
            | Op::Link { .. }
            | Op::TemporaryFile { .. }
            | Op::Unlink { .. }
            | Op::RemoveDirectory { .. }
            | Op::Rename { .. }
            | Op::SetXattr { .. }
            | Op::RemoveXattr { .. } => reply.error(Errno::ROFS),
            Op::GetXattr { .. } => reply.error(Errno::NODATA),
            Op::ListXattrs { length_bytes } => {
                super::extended::answer_no_names(reply, length_bytes)
            }
            Op::Read { .. } | Op::Write { .. } | Op::CopyFileRange { .. } => {
                reply.error(Errno::ISDIR);
            }
            Op::ReadLink | Op::Seek { .. } | Op::Fallocate { .. } => reply.error(Errno::INVAL),
            Op::Fsync { .. } | Op::FsyncDirectory { .. } => {
                answer_status(reply, Ok::<_, Errno>(()))
            }
            Op::Ioctl { command: kernel::IOCTL_SUBVOLUMES, input, .. } => {
                reply.error(match directory_requests::decode(input) {
                    Some(Request::Create { .. } | Request::Fork { .. }) => Errno::ROFS,
                    _ => Errno::INVAL,
                });
            }
            _ => return Some(reply),
        }
        None
    }

    /// Answers with the directory that `.snapshots` names.
    pub(super) fn answer_snapshots(&self, reply: Reply) {
        self.answer_found(reply, Ok(Found::Directory(InodeId::ROOT)));
    }

    /// Whether a name in the root directory leads to snapshots.
    pub(super) fn is_snapshots(&self, parent: InodeId, name: &[u8]) -> bool {
        parent == InodeId::ROOT
            && name == NAME
            && match self.volume.lookup(parent, name) {
                Ok(real) => {
                    self.volume.forget(real.inode, 1);
                    false
                }
                Err(error) => matches!(error, Error::NotFound),
            }
    }

    /// Of the root directory of a snapshot, the node of the directory in which it is shown.
    pub(super) fn shown_in(&self, directory: InodeId) -> Answer<Option<InodeId>> {
        Ok(self.live_of_snapshot(directory)?.map(|live| self.snapshots.node(live)))
    }

    /// Answers LOOKUP of `..` in the root directory of a snapshot; gives the reply back for others.
    pub(super) fn look_up_above_snapshot(&self, directory: InodeId, reply: Reply) -> Option<Reply> {
        match self.live_of_snapshot(directory) {
            Ok(None) => return Some(reply),
            found => self.answer_found(
                reply,
                found.map(|live| Found::Directory(live.unwrap_or(InodeId::ROOT))),
            ),
        }
        None
    }

    /// Of the root directory of a snapshot, that of its subvolume.
    fn live_of_snapshot(&self, directory: InodeId) -> Answer<Option<InodeId>> {
        if directory == InodeId::ROOT || directory.number() != InodeId::ROOT.number() {
            return Ok(None);
        }
        match self.volume.subvolume_of(directory)? {
            (_, true) => Ok(None),
            (id, false) => Ok(Some(self.volume.root_of_subvolume(id).unwrap_or(InodeId::ROOT))),
        }
    }

    fn look_up_snapshot(&self, node: InodeId, name: &[u8], reply: Reply) {
        let found = self.snapshots.live(node).and_then(|live| self.find_snapshot(live, name));
        self.answer_found(reply, found);
    }

    fn answer_found(&self, reply: Reply, found: Answer<Found>) {
        let answered = found.and_then(|found| match found {
            Found::Inode(attributes) => Ok((attributes, true)),
            Found::Directory(live) => Ok((self.attributes_as(live)?, false)),
        });
        match answered {
            Err(failure) => fail(reply, &failure),
            // The kernel looks the name up again each time.
            Ok((attributes, true)) => {
                let entry = EntryOut { entry_valid_seconds: 0, ..self.entry(&attributes) };
                self.deliver_reference(reply, attributes.inode.0, &entry);
            }
            Ok((attributes, false)) => {
                let entry = EntryOut {
                    // The same for the same live directory.
                    generation: mixed(self.live_number(attributes.inode)) >> 32,
                    entry_valid_seconds: 0,
                    attr_valid_seconds: 0,
                    ..self.entry(&attributes)
                };
                let _delivery = reply.structure(&entry);
            }
        }
    }

    fn ways(&self) -> Answer<Arc<Ways>> {
        self.snapshots.ways.of(&self.volume)
    }

    fn live_number(&self, node: InodeId) -> u64 {
        self.snapshots.live(node).map_or(0, |live| live.0)
    }

    fn find_snapshot(&self, live: InodeId, name: &[u8]) -> Answer<Found> {
        let volume = &self.volume;
        match name {
            b"." => return Ok(Found::Directory(live)),
            b".." if live == InodeId::ROOT => {
                return Ok(Found::Inode(volume.lookup_inode(InodeId::ROOT)?));
            }
            b".." => return Ok(Found::Directory(volume.parent(live).map_err(or_stale)?)),
            _ => {}
        }
        if let (id, true) = volume.subvolume_of(live).map_err(or_stale)? {
            match volume.snapshot_named(id, name) {
                Ok(snapshot) if snapshot.is_temporary() => {}
                Ok(snapshot) => return Ok(Found::Inode(volume.lookup_inode(snapshot.root)?)),
                Err(Error::NotFound) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let below = volume.lookup(live, name)?.inode;
        volume.forget(below, 1);
        if self.ways()?.lead_to(below) {
            Ok(Found::Directory(below))
        } else {
            Err(Errno::NOENT.into())
        }
    }

    /// The attributes of the directory that stands for `live`.
    fn attributes_as(&self, live: InodeId) -> Answer<Attributes> {
        // First: what changes meanwhile makes another listing of it.
        let moves = self.volume.moves();
        let attributes = self.volume.attributes(live).map_err(or_stale)?;
        let node = self.snapshots.node(live);
        let failures = self.snapshots.ways.failures();
        let listing = Listing { moves, failures, changed: attributes.changed };
        let changed = self.snapshots.changed(node, listing)?;
        Ok(Attributes {
            inode: node,
            // The number of directories in it is not said.
            links: 1,
            size_bytes: 0,
            blocks_512: 0,
            accessed: changed,
            modified: changed,
            changed,
            ..attributes
        })
    }

    fn current_attributes(&self, node: InodeId) -> Answer<Attributes> {
        let live = self.snapshots.live(node)?;
        self.attributes_as(live)
    }

    fn snapshot_directory_attributes(&self, node: InodeId) -> Answer<AttrOut> {
        let attributes = self.current_attributes(node)?;
        Ok(AttrOut { attr_valid_seconds: 0, ..attr_out(&attributes) })
    }

    fn snapshot_directory_statx(&self, node: InodeId) -> Answer<StatxOut> {
        let attributes = self.current_attributes(node)?;
        Ok(StatxOut { attr_valid_seconds: 0, ..statx_out(&attributes) })
    }

    fn list_snapshots(
        &self,
        node: InodeId,
        cookie: u64,
        push: &mut dyn FnMut(&ListedName<'_>) -> bool,
    ) -> Answer<()> {
        let live = self.snapshots.live(node)?;
        let file_type = FileType::Directory as u8;
        let above = match live {
            InodeId::ROOT => InodeId::ROOT,
            live => self.snapshots.node(self.volume.parent(live).map_err(or_stale)?),
        };
        for (name, inode, own) in [(&b"."[..], node, 1), (b"..", above, COOKIE_OF_DOTS)] {
            let listed = ListedName { name, inode: inode.0, file_type, cookie: own };
            if cookie < own && !push(&listed) {
                return Ok(());
            }
        }
        for entry in self.entries(live)?.iter().filter(|entry| entry.cookie() > cookie) {
            let listed = ListedName {
                name: &entry.name,
                inode: entry.node.0,
                file_type,
                cookie: entry.cookie(),
            };
            if !push(&listed) {
                break;
            }
        }
        Ok(())
    }

    /// What is in the directory that stands for `live`, in the order of cookies.
    fn entries(&self, live: InodeId) -> Answer<Vec<Listed>> {
        let mut snapshots = match self.volume.subvolume_of(live).map_err(or_stale)? {
            (id, true) => self.volume.snapshots(id)?,
            (_, false) => Vec::new(),
        };
        // The kernel, which keeps listings, is not told of these.
        snapshots.retain(|snapshot| !snapshot.is_temporary());
        let names: BTreeSet<&[u8]> = snapshots.iter().map(|one| &one.name[..]).collect();
        let mut entries = Vec::new();
        if let Some(below) = self.ways()?.below.get(&live) {
            let mut left = below.len();
            self.volume.read_directory(live, 0, &mut |item| {
                if below.contains(&item.inode) {
                    left -= 1;
                    if !names.contains(item.name) {
                        let name = item.name.to_vec();
                        entries.push(Listed { id: item.inode, node: item.inode, name });
                    }
                }
                left > 0
            })?;
            entries.iter_mut().for_each(|entry| entry.node = self.snapshots.node(entry.id));
        }
        let shown = |SnapshotInfo { root, name, .. }| Listed { id: root, node: root, name };
        entries.extend(snapshots.into_iter().map(shown));
        entries.sort_unstable_by_key(|entry| entry.id);
        Ok(entries)
    }
}

#[cfg(test)]
#[path = "snapshot_directories_tests.rs"]
mod tests;
