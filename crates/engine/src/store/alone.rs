//! An operation of any size, in a transaction that nobody else has joined any more, and its commit.
//!
//! 1. Space for it is reserved.
//! 2. As for a commit, new joins wait, and the joined operations leave. Nothing changes a tree now.
//! 3. The operation looks whether it may go on, and changes the tree. It may not fail once it has
//!    begun to change: the volume would stop.
//! 4. The commit follows at once. Until its superblock is durable, nothing that is logged later
//!    reaches the log. *A crash before that: nothing of the operation has happened. After it: all
//!    of it has.*
//!
//! Everybody who wants to change the volume waits for steps 2 to 4 up to the cut.
//!
//! Lock discipline: the caller holds no lock. The operation may lock inodes as any other does; the
//! extents mutex of a file it may only try to lock, since a holder may be waiting to join.
use super::Store;
use super::commit::Kind;
use super::operation::{Effort, Operation};
use crate::{InodeId, Result};
use cairn_btree::Tree;
use cairn_format::NODE_BLOCKS;
use cairn_space::Request;

impl Store {
    /// Has `work` change up to `items` items in the tree of `inode`, alone, and commits. Nothing is
    /// committed if it fails or returns `None`; it has changed nothing then.
    pub(crate) fn alone<T>(
        &self,
        inode: InodeId,
        items: u64,
        work: impl Fn(&mut Operation<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        self.check_writable()?;
        let subvolume = self.trees.subvolume(inode)?;
        subvolume.check_writable()?;
        let nodes_now = || {
            let nodes = self.worst_case_alone(subvolume.tree(), items);
            nodes + self.nodes_for_cut(items + nodes)
        };
        let mut more = 0;
        loop {
            let nodes = nodes_now() + more;
            let keeps = subvolume.tree().boundary().shared_until().0 > 0;
            let request = Request { data_blocks: 0, nodes };
            let reservation = self.reserve_where(request, Effort::Ordinary, keeps)?;
            let running = self.transactions.generation();
            let Some(mut commit) = self.transactions.begin_commit(running)? else { continue };
            subvolume.check_alive()?;
            if nodes_now() > nodes {
                // The volume grew meanwhile, and may grow again.
                more = 2 * more + nodes_now() - nodes;
                continue;
            }
            let done = {
                let handle = commit.join_alone();
                let mut operation = Operation::new(self, subvolume, reservation, handle);
                work(&mut operation)?
            };
            if done.is_some() {
                self.finish_commit(&mut commit, Kind::Ordinary)?;
            }
            return Ok(done);
        }
    }

    /// Nodes that so many changes of `tree` by one operation take at most. Many of them copy each
    /// node that there is once, and otherwise only split some: a change one leaf, and fewer above.
    fn worst_case_alone(&self, tree: &Tree, items: u64) -> u64 {
        let used = self.space.report().used;
        let copies_and_splits = used / NODE_BLOCKS + 2 * items + 64;
        tree.worst_case_joined(items).min(copies_and_splits)
    }
}
