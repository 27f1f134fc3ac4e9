//! READDIR and READDIRPLUS. Cookies 1 and 2 continue after "." and "..", the greatest one after
//! ".snapshots", which comes third if it is listed; the volume's begin at 3.
use super::{Answer, VolumeHandler, fail, snapshot_directories};
use crate::protocol::directory_list::ListedName;
use crate::protocol::wire::EntryOut;
use crate::protocol::{DirectoryList, DirectoryPlusList};
use crate::transport::{Delivery, Reply};
use cairn_engine::{DirectoryItem, FileType, InodeId};

const COOKIE_AFTER_DOT: u64 = 1;
const COOKIE_AFTER_DOT_DOT: u64 = 2;
const COOKIE_AFTER_SNAPSHOTS: u64 = i64::MAX as u64;

fn listed<'a>(item: &DirectoryItem<'a>) -> ListedName<'a> {
    ListedName {
        name: item.name,
        inode: item.inode.0,
        file_type: item.file_type as u8,
        cookie: item.cookie,
    }
}

impl VolumeHandler {
    /// Calls `push` for those of ".", ".." and ".snapshots" that are listed after `cookie`. Returns
    /// false if `push` had no room.
    fn list_first(
        &self,
        node: InodeId,
        cookie: u64,
        push: &mut dyn FnMut(&ListedName<'_>) -> bool,
    ) -> Answer<bool> {
        let mut push = |name: &[u8], inode: InodeId, cookie: u64| {
            push(&ListedName { name, inode: inode.0, file_type: FileType::Directory as u8, cookie })
        };
        if cookie < COOKIE_AFTER_DOT && !push(b".", node, COOKIE_AFTER_DOT) {
            return Ok(false);
        }
        if cookie < COOKIE_AFTER_DOT_DOT {
            let parent = match self.shown_in(node)? {
                Some(parent) => parent,
                None => self.volume.parent(node)?,
            };
            if !push(b"..", parent, COOKIE_AFTER_DOT_DOT) {
                return Ok(false);
            }
        }
        let name = snapshot_directories::NAME;
        if cookie <= COOKIE_AFTER_DOT_DOT && self.shows_snapshots && self.is_snapshots(node, name) {
            let inode = self.snapshots.node(InodeId::ROOT);
            return Ok(push(name, inode, COOKIE_AFTER_SNAPSHOTS));
        }
        Ok(true)
    }

    pub(super) fn read_directory(
        &self,
        node: InodeId,
        cookie: u64,
        length_bytes: u32,
    ) -> Answer<Vec<u8>> {
        let mut list = DirectoryList::new(length_bytes);
        if self.list_first(node, cookie, &mut |name| list.push(name))? {
            self.volume.read_directory(node, volume_cookie(cookie), &mut |item| {
                list.push(&listed(&item))
            })?;
        }
        Ok(list.into_bytes())
    }

    pub(super) fn read_directory_plus(
        &self,
        node: InodeId,
        cookie: u64,
        length_bytes: u32,
        reply: Reply,
    ) {
        let mut list = DirectoryPlusList::new(length_bytes);
        let listed = self.list_directory_plus(node, cookie, &mut list);
        let lost = match listed {
            Ok(()) => reply.bytes(list.as_bytes()) == Delivery::Lost,
            Err(failure) => {
                fail(reply, &failure);
                true
            }
        };
        if lost {
            list.nodes().iter().for_each(|&node| self.forget(node, 1));
        }
    }

    fn list_directory_plus(
        &self,
        node: InodeId,
        cookie: u64,
        list: &mut DirectoryPlusList,
    ) -> Answer<()> {
        // These get no node, so the kernel counts no reference for them.
        if self.list_first(node, cookie, &mut |name| list.push(name, &EntryOut::default()))? {
            self.volume.read_directory_plus(
                node,
                volume_cookie(cookie),
                &mut |item, attributes| list.push(&listed(&item), &self.entry(attributes)),
            )?;
        }
        Ok(())
    }
}

fn volume_cookie(cookie: u64) -> u64 {
    match cookie {
        ..=COOKIE_AFTER_DOT_DOT | COOKIE_AFTER_SNAPSHOTS => 0,
        cookie => cookie,
    }
}
