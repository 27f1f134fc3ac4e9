//! A visit of nodes, for what concerns them and not only the items.
//!
//! Lock discipline: one node's shared lock at a time; the walk to it is in `walk.rs`.
use crate::error::TreeError;
use crate::tree::Tree;
use crate::walk::unseen;
use cairn_format::{Generation, Key, Node};

impl Tree {
    /// Shows `visit` the nodes that were made after the transaction `oldest`, each before those
    /// below it, until it returns false. The others are not read, except on the way: what is below
    /// a node is as old as that or older. `visit` runs under a node's shared lock, so it must not
    /// use a tree.
    ///
    /// For the tree of a snapshot: what others change meanwhile is missed or shown twice.
    ///
    /// # Errors
    /// When a node can't be read.
    pub fn visit_younger(
        &self,
        oldest: Generation,
        visit: &mut dyn FnMut(&Node) -> bool,
    ) -> Result<(), TreeError> {
        let root = self.root();
        let mut ahead = Vec::new();
        if root.generation > oldest {
            ahead.push((root.level, Key::MIN));
        }
        while let Some((level, key)) = ahead.pop() {
            let (node, bounds) = self.with_retries(|policy| {
                self.walk(&key, level, policy, &mut unseen)?.read(&mut unseen)
            })?;
            if !visit(&node) {
                break;
            }
            let Some(below) = level.checked_sub(1) else { continue };
            // The first key of an inner node may be smaller than what leads to it.
            let key_of = |index| if index == 0 { bounds.lower } else { node.key(index) };
            let younger = (0..node.count()).rev().filter(|at| node.child(*at).generation > oldest);
            ahead.extend(younger.map(|index| (below, key_of(index))));
        }
        Ok(())
    }
}
