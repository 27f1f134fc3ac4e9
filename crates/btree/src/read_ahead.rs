//! Nodes that a reader of many keys is going to want, read at the same time.
//!
//! Lock discipline: one node's shared lock, while its children are found. Nothing may change the
//! tree meanwhile: it is that of a snapshot, or of a volume that is only read.
use crate::error::TreeError;
use crate::expected::Expected;
use crate::fetch_many::fetch_many;
use crate::tree::Tree;
use cairn_format::Key;
use std::ops::RangeInclusive;

/// Most nodes of a level: they must stay in memory until they are wanted.
const NODES_MAX: usize = 256;

impl Tree {
    /// Reads the nodes that lead to these keys, which ascend, or the first of those nodes. The tree
    /// may not change meanwhile.
    ///
    /// # Errors
    /// When a node can't be read.
    pub fn read_ahead(&self, keys: &[RangeInclusive<Key>]) -> Result<(), TreeError> {
        let mut nodes = vec![self.expected_root(self.root())];
        while !nodes.is_empty() {
            let mut below = Vec::new();
            for (expected, node) in nodes.iter().zip(fetch_many(&self.cache, &nodes)) {
                let node = node?;
                if expected.level == 0 {
                    continue;
                }
                let node = node.read(&self.cache.waits);
                expected.check_keys(&node)?;
                let child = |index| Expected::child(self.owner(), &node, expected.bounds, index);
                below.extend((0..node.count()).map(child).filter(|child| is_wanted(child, keys)));
            }
            below.truncate(NODES_MAX);
            nodes = below;
        }
        Ok(())
    }
}

fn is_wanted(node: &Expected, keys: &[RangeInclusive<Key>]) -> bool {
    let first = keys.partition_point(|keys| *keys.end() < node.bounds.lower);
    let ends_before =
        |keys: &RangeInclusive<Key>| node.bounds.upper.is_some_and(|upper| upper <= *keys.start());
    keys.get(first).is_some_and(|keys| !ends_before(keys))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::NODES_MAX;
    use crate::test_support::{TestVolume, key, value};

    #[test]
    fn what_was_read_ahead_is_in_memory() {
        let volume = TestVolume::new(256 << 20, 16 << 20);
        let tree = volume.create();
        for index in 0..20_000 {
            volume.insert(&tree, key(index), &value(index, 0, 2000));
        }
        let nodes = volume.cache.take_dirty(volume.running);
        volume.cache.write(&nodes).unwrap();
        let tree = volume.open_apart(tree.root());
        let ranges = [key(5)..=key(5), key(700)..=key(800), key(19_990)..=key(19_999)];
        tree.read_ahead(&ranges).unwrap();
        let read = tree.cache.statistics().misses;
        assert!((10..60).contains(&read), "{read} nodes");
        for index in [5, 700, 745, 800, 19_990, 19_999] {
            assert!(tree.get(&key(index)).unwrap().is_some());
        }
        assert_eq!(tree.cache.statistics().misses, read);
        // Nothing, and more than is sensible.
        tree.read_ahead(&[]).unwrap();
        assert_eq!(tree.cache.statistics().misses, read);
        tree.read_ahead(&[key(0)..=key(19_999)]).unwrap();
        let all = tree.cache.statistics().misses;
        assert!((NODES_MAX as u64..2 * NODES_MAX as u64).contains(&all), "{all} nodes");
    }
}
