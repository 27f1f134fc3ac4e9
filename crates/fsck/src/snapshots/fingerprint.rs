//! Fingerprints of sets of references: to compare those of a snapshot with those that are kept for
//! it, without holding either in memory.
use super::balance::Balance;
use cairn_format::{BlockRange, Generation, Key, Node};

/// The sum over all blocks of a number made of block and birth. Equal sets have equal sums, however
/// their blocks are cut into runs; others almost never have.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Fingerprint {
    pub(crate) blocks: u64,
    sum: u64,
}

impl Fingerprint {
    /// That of one reference.
    pub(crate) fn of(range: BlockRange, birth: Generation) -> Self {
        let birth = mixed(!birth.0);
        let add = |sum: u64, block: u64| sum.wrapping_add(mixed(block ^ birth));
        Self { blocks: range.blocks, sum: range.range().fold(0, add) }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.blocks = self.blocks.wrapping_add(other.blocks);
        self.sum = self.sum.wrapping_add(other.sum);
    }

    pub(crate) fn remove(&mut self, other: Self) {
        self.blocks = self.blocks.wrapping_sub(other.blocks);
        self.sum = self.sum.wrapping_sub(other.sum);
    }
}

/// A permutation of the numbers in which each bit depends on all: the last step of SplitMix64
/// (Steele, Lea, Flood: *Fast splittable pseudorandom number generators*).
pub(crate) fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// What is known of a node and all nodes below it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subtree {
    /// All references: the one to the node itself, to those below it, and to extents.
    pub(crate) references: Fingerprint,
    /// The smallest and the greatest key that is compared.
    pub(crate) keys: Option<(Key, Key)>,
    /// Names and counters of what is below, if somebody asks for them.
    pub(crate) names: Balance,
    /// Whether everything could be read.
    pub(crate) is_whole: bool,
}

impl Subtree {
    pub(crate) const NOTHING: Self = Self {
        references: Fingerprint { blocks: 0, sum: 0 },
        keys: None,
        names: Balance::NOTHING,
        is_whole: true,
    };
    /// One that cannot be used.
    pub(crate) const LOST: Self = Self { is_whole: false, ..Self::NOTHING };

    /// A node without what is below it. The first key of an inner node is not compared.
    pub(crate) fn of_node(node: &Node) -> Self {
        let first = usize::from(node.level() > 0);
        let keys = (first < node.count()).then(|| (node.key(first), node.key(node.count() - 1)));
        let references = Fingerprint::of(BlockRange::node(node.address()), node.generation());
        Self { references, keys, ..Self::NOTHING }
    }

    /// Adds what follows in key order.
    pub(crate) fn add(&mut self, other: Self) {
        self.references.add(other.references);
        self.names.add(other.names);
        self.is_whole &= other.is_whole;
        self.keys = match (self.keys, other.keys) {
            (Some(own), Some(others)) => Some((own.0.min(others.0), own.1.max(others.1))),
            (own, others) => own.or(others),
        };
    }
}
