//! Decides which set-id bits of a file stay when its content or its owner changes.
//!
//! Set-user-id is always cleared. Set-group-id is cleared if the group may execute. Without that
//! bit it once stood for mandatory locks, and stays for a caller in the file's group. That is the
//! kernel's rule for its own file systems (`setattr_should_drop_sgid`), which FUSE leaves to the
//! server.
//!
//! With the writeback cache, the kernel sends what such a caller writes to such a file at once, and
//! raises the file's length afterwards. If it also sends the file's last page meanwhile, since that
//! was dirty, Linux from 6.17 on zeroes that page past the old length: the data is lost. Before the
//! WRITE comes a SETATTR of nothing. So the server has the kernel send and forget the file's pages
//! before it answers that. Until its own answer the kernel keeps a new page to itself.
use super::{Answer, VolumeHandler, answer};
use crate::protocol::RequestHeader;
use crate::protocol::wire::{SetattrIn, setattr_flag};
use crate::transport::Reply;
use cairn_engine::{AttributeChange, Attributes, FileType, InodeId};
use cairn_environment::thread;
use std::fs;

const SET_ID_BITS: u32 = 0o6000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

/// Whether the caller is in the group of the file, where that matters for its set-group-id bit.
pub fn is_in_group(header: &RequestHeader, file: &Attributes) -> bool {
    let matters = file.mode & (SET_GROUP_ID | GROUP_EXECUTE) == SET_GROUP_ID;
    !matters || header.gid == file.gid || has_group(header.pid, file.gid)
}

/// Whether a chown by a caller who is, or is not, in the file's group clears bits of this mode.
pub fn clears_bits(mode: u32, in_group: bool) -> bool {
    let clears_group = mode & GROUP_EXECUTE != 0 || !in_group;
    mode & SET_ID_BITS & !SET_GROUP_ID != 0 || mode & SET_GROUP_ID != 0 && clears_group
}

/// Whether `group` is among the thread's supplementary groups. 0 is a caller outside this process
/// id namespace: it has none.
pub(super) fn has_group(thread: u32, group: u32) -> bool {
    thread != 0
        && fs::read_to_string(format!("/proc/{thread}/status"))
            .is_ok_and(|status| lists_group(&status, group))
}

fn lists_group(status: &str, group: u32) -> bool {
    let groups = status.lines().find_map(|line| line.strip_prefix("Groups:"));
    groups.is_some_and(|groups| groups.split_whitespace().any(|number| number.parse() == Ok(group)))
}

impl VolumeHandler {
    /// Answers a SETATTR.
    pub(super) fn answer_set_attributes(
        &self,
        header: &RequestHeader,
        set: &SetattrIn,
        reply: Reply,
    ) {
        let comes_before_data = self.writeback
            && set.valid & !setattr_flag::HANDLE == 0
            && self.volume.attributes(InodeId(header.node)).is_ok_and(|file| {
                file.file_type == FileType::Regular && file.mode & SET_ID_BITS != 0
            });
        let done = self.set_attributes(header, set);
        if comes_before_data && done.is_ok() {
            let node = header.node;
            // The kernel's WRITEs need request threads.
            thread::spawn("cairn-set-id", move || {
                reply.invalidate_data(node, &(0..i64::MAX as u64));
                answer(reply, done);
            });
        } else {
            answer(reply, done);
        }
    }

    /// Clears the set-id bits of `node` after a caller without the right to them changed its
    /// content. The kernel keeps attributes for ever, so it is notified before the answer.
    pub(super) fn clear_set_id(
        &self,
        header: &RequestHeader,
        node: InodeId,
        reply: &Reply,
    ) -> Answer<()> {
        let file = self.volume.attributes(node)?;
        if file.mode & SET_ID_BITS != 0 {
            let not_in_group = !is_in_group(header, &file);
            let times = Some(self.write_times());
            let change = AttributeChange {
                clear_set_id: true,
                not_in_group,
                times,
                ..AttributeChange::default()
            };
            self.volume.set_attributes(node, &change)?;
            reply.invalidate_attributes(node.0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chown_clears_what_the_kernel_would_clear() {
        for in_group in [false, true] {
            assert!(clears_bits(0o104_644, in_group) && clears_bits(0o102_755, in_group));
            assert!(!clears_bits(0o100_777, in_group));
            assert_eq!(clears_bits(0o102_644, in_group), !in_group);
        }
    }

    #[test]
    fn further_groups_are_read() {
        let status = "Name:\tx\nGid:\t7\t7\t7\t7\nGroups:\t4 24 1000 \nNStgid:\t1\n";
        assert!(lists_group(status, 4) && lists_group(status, 1000));
        assert!(
            !lists_group(status, 7) && !lists_group(status, 2) && !lists_group("Groups:\t\n", 0)
        );
        assert!(!has_group(0, 0) && !has_group(u32::MAX, 0));
    }
}
