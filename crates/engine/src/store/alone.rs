//! An operation of any size, in a transaction that nobody else has joined any more, and its commit.
//!
//! 1. Space for it is reserved, unless more would die than one cut can write.
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
#[cfg(doc)]
use crate::Error;
use crate::{InodeId, Result};
use cairn_btree::Tree;
use cairn_space::Request;

/// By so many nodes the tree may grow until the operation is alone.
const SPARE_NODES: u64 = 64;

/// What an operation changes at most.
#[derive(Clone, Copy)]
pub(crate) struct OperationSize {
    /// Items.
    pub(crate) items: u64,
    /// Of these, items that come, or may become longer.
    pub(crate) growing: u64,
}

impl Store {
    /// Has `work` change the tree of `inode`, alone, and commits. Nothing is committed if it fails
    /// or returns `None`; it has changed nothing then. `like` is a tree that does not change and
    /// has about as many nodes.
    ///
    /// # Errors
    /// [`Error::TooMuchAtOnce`] if what dies may be too much for one transaction.
    pub(crate) fn alone<T>(
        &self,
        inode: InodeId,
        like: &Tree,
        size: OperationSize,
        work: impl Fn(&mut Operation<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        self.check_writable()?;
        let subvolume = self.trees.subvolume(inode)?;
        subvolume.check_writable()?;
        let nodes_of = |tree: &Tree, existing: u64, dead: u64| {
            let joined = tree.worst_case_joined(size.items);
            let nodes = joined.min(Tree::worst_case_alone(existing, size.growing));
            self.cut_work.expect_few_dead_runs(dead + size.items + nodes)?;
            Result::Ok(nodes + self.nodes_for_cut(size.items + nodes))
        };
        let mut nodes = nodes_of(like, like.count_nodes()? + SPARE_NODES, 0)?;
        loop {
            let keeps = subvolume.tree().boundary().shared_until().0 > 0;
            let request = Request { data_blocks: 0, nodes };
            let reservation = self.reserve_where(request, Effort::Ordinary, keeps)?;
            let running = self.transactions.generation();
            let Some(mut commit) = self.transactions.begin_commit(running)? else { continue };
            subvolume.check_alive()?;
            let tree = subvolume.tree();
            let needed = nodes_of(tree, tree.count_nodes()?, self.space.count_dead().runs)?;
            if needed > nodes {
                // It grew meanwhile.
                nodes = needed;
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
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "alone_tests.rs"]
mod tests;
