//! The end of a tree: its nodes are given back.
//!
//! Nobody else uses the tree, so its nodes are locked one at a time.
use crate::copy_on_write::Change;
use crate::error::TreeError;
use crate::expected::{Bounds, Expected};
use crate::handle::NodeHandle;
use crate::node_lock::Class;
use crate::tree::Tree;
use cairn_format::NodePointer;

impl Tree {
    /// Gives the nodes of a tree without items back. Its caller alone uses the tree, for the last
    /// time.
    ///
    /// # Errors
    /// [`TreeError::Damaged`] if it has an item; then nothing is given back.
    pub fn end(&self, change: &Change<'_>) -> Result<(), TreeError> {
        let mut nodes = Vec::new();
        self.gather(&self.expected_root(self.root()), &mut nodes)?;
        self.write_root().set(NodePointer::default());
        for node in nodes {
            self.release(change, node.write(Class::First, &self.cache.waits))?;
        }
        Ok(())
    }

    /// The node and all below it. None has an item.
    fn gather(&self, expected: &Expected, nodes: &mut Vec<NodeHandle>) -> Result<(), TreeError> {
        let node = self.cache.fetch(expected)?;
        nodes.push(node.clone());
        let children: Vec<Expected> = {
            let node = node.read(&self.cache.waits);
            if node.level() == 0 && node.count() > 0 {
                return Err(expected.damaged("a tree that is to end has items".into()));
            }
            let children = if node.level() == 0 { 0 } else { node.count() };
            (0..children).map(|at| Expected::child(self.owner(), &node, Bounds::ALL, at)).collect()
        };
        children.iter().try_for_each(|child| self.gather(child, nodes))
    }
}
