//! B-tree node: a slotted page of 16 KiB.
//!
//! ```text
//! 0        48           64                      free_end                     16384
//! | header | node header | slots, 24 bytes each → |  free  | ← values, any order |
//! ```
//! Slots are sorted by key. A leaf (level 0) holds items. An inner node holds, per child, the
//! smallest key that the child may contain and a [`ChildPointer`] as value. The first child's key
//! is not compared: that child takes all keys below the second.
//!
//! Invariants: keys strictly ascend; values don't overlap, and lie between `values_start` and the
//! page's end; `garbage` is the number of bytes between `values_start` and the end to which no slot
//! refers.
use crate::header::{HEADER_BYTES, Header};
use crate::units::{BlockNumber, Generation, NODE_BLOCKS, NODE_SIZE, TreeId, VolumeId};
use crate::{FormatError, Key, Structure};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most levels of a tree.
pub const LEVELS_MAX: u8 = 12;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = size_of::<RawSlot>();
/// Bytes that slots and values share.
pub const NODE_CAPACITY: usize = NODE_SIZE - SLOTS_AT;
/// Largest value of an item. Four of them fit into a node, so a split always makes room.
pub const VALUE_BYTES_MAX: usize = 3800;

const MAGIC: [u8; 4] = *b"CRNN";
/// An empty value is at the end of the node, which stays within the values after any removal.
const EMPTY_VALUE_AT: usize = NODE_SIZE;
const SLOTS_AT: usize = HEADER_BYTES + size_of::<RawNodeHeader>();

/// The part of a node after the common header.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawNodeHeader {
    /// The node's tree.
    pub tree: U64,
    /// Number of items or children.
    pub count: U16,
    /// First byte of the values.
    pub values_start: U16,
    /// Bytes among the values to which no slot refers.
    pub garbage: U16,
    /// Height above the leaves.
    pub level: u8,
    /// Zero; reserved.
    pub reserved: u8,
}

/// One slot.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawSlot {
    /// Key: inode.
    pub inode: U64,
    /// Key: offset.
    pub offset: U64,
    /// Offset of the value in the page.
    pub value_start: U16,
    /// Its length.
    pub value_length: U16,
    /// Key: kind.
    pub kind: u8,
    /// Zero; reserved.
    pub reserved: [u8; 3],
}

impl RawSlot {
    fn key(&self) -> Key {
        Key { inode: self.inode.get(), kind: self.kind, offset: self.offset.get() }
    }
    fn value(&self) -> std::ops::Range<usize> {
        let start = self.value_start.get() as usize;
        start..start + self.value_length.get() as usize
    }
}

/// Value of an inner node's slot: the child's address and the transaction that wrote it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChildPointer {
    /// First block of the child.
    pub block: BlockNumber,
    /// Transaction that wrote the child. A child with another generation is a lost write.
    pub generation: Generation,
}

impl ChildPointer {
    /// Bytes on disk.
    pub const BYTES: usize = 16;
    /// The bytes of a slot's value.
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.block.0.to_le_bytes());
        bytes[8..].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes
    }
    fn decode(bytes: &[u8]) -> Self {
        let word =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("length validated"));
        Self { block: BlockNumber(word(0)), generation: Generation(word(8)) }
    }
}

/// A node in memory: the page as it is on the device, without a valid checksum until
/// [`Node::seal`].
#[derive(Clone)]
pub struct Node {
    page: Box<[u8; NODE_SIZE]>,
}

/// The node has no room for an item of this size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeFull;

impl Node {
    /// An empty node.
    pub fn new(
        volume: VolumeId,
        tree: TreeId,
        level: u8,
        address: BlockNumber,
        generation: Generation,
    ) -> Self {
        let mut page: Box<[u8; NODE_SIZE]> =
            vec![0; NODE_SIZE].into_boxed_slice().try_into().expect("size matches");
        page[..HEADER_BYTES]
            .copy_from_slice(Header::new(MAGIC, NODE_SIZE, volume, address, generation).as_bytes());
        let raw = RawNodeHeader {
            tree: U64::new(tree.0),
            count: U16::ZERO,
            values_start: U16::new(NODE_SIZE as u16),
            garbage: U16::ZERO,
            level,
            reserved: 0,
        };
        page[HEADER_BYTES..SLOTS_AT].copy_from_slice(raw.as_bytes());
        Self { page }
    }

    /// Takes a page that was read from `address`, after checking everything: checksum, slots in
    /// order, values inside the page and without overlap.
    ///
    /// # Errors
    /// The first problem found.
    pub fn decode(
        page: Box<[u8; NODE_SIZE]>,
        volume: VolumeId,
        address: BlockNumber,
    ) -> Result<Self, FormatError> {
        let header = Header::verify(&page[..], MAGIC, Structure::Node, Some(volume), address)?;
        let fail = |problem: String| Err(FormatError::new(Structure::Node, address, problem));
        if header.length.get() as usize != NODE_SIZE {
            return fail(format!("length {} instead of {NODE_SIZE}", header.length));
        }
        let node = Self { page };
        let (count, values_start) = (node.count(), node.values_start());
        if node.level() >= LEVELS_MAX {
            return fail(format!("level {}", node.level()));
        }
        if SLOTS_AT + count * SLOT_BYTES > values_start || values_start > NODE_SIZE {
            return fail(format!("{count} slots reach into the values at {values_start}"));
        }
        let mut used = 0;
        for index in 0..count {
            let slot = node.slot(index);
            let value = slot.value();
            if value.start < values_start || value.end > NODE_SIZE {
                return fail(format!(
                    "value {value:?} of slot {index} lies outside {values_start}..{NODE_SIZE}"
                ));
            }
            if node.level() > 0 && value.len() != ChildPointer::BYTES {
                return fail(format!("child pointer {index} has {} bytes", value.len()));
            }
            if index > 0 && node.key(index - 1) >= slot.key() {
                return fail(format!(
                    "keys {:?} and {:?} are out of order",
                    node.key(index - 1),
                    slot.key()
                ));
            }
            used += value.len();
        }
        if used + node.garbage() != NODE_SIZE - values_start {
            return fail(format!(
                "values and garbage don't add up: {used} + {} in {}",
                node.garbage(),
                NODE_SIZE - values_start
            ));
        }
        if let Some(index) = node.overlapping_value() {
            return fail(format!(
                "value {:?} of slot {index} overlaps that of a slot before it",
                node.slot(index).value()
            ));
        }
        if node.level() > 0 && count == 0 {
            return fail("inner node without children".into());
        }
        Ok(node)
    }

    /// The first slot whose value, inside the page, shares a byte with that of an earlier slot.
    fn overlapping_value(&self) -> Option<usize> {
        // A bit for each byte of the page, since values are in any order.
        let mut taken = [0u64; NODE_SIZE / 64];
        self.slots().iter().position(|slot| {
            let value = slot.value();
            (value.start / 64..value.end.div_ceil(64)).any(|word| {
                let (first, end) =
                    (value.start.max(word * 64) % 64, value.end.min(word * 64 + 64) - word * 64);
                let bits = (u64::MAX << first) & (u64::MAX >> (64 - end));
                let shared = taken[word] & bits != 0;
                taken[word] |= bits;
                shared
            })
        })
    }

    /// Sets the checksum and returns the page.
    pub fn seal(&mut self) -> &[u8; NODE_SIZE] {
        Header::seal(&mut self.page[..]);
        &self.page
    }
    /// The page, with whatever checksum it has.
    pub fn page(&self) -> &[u8; NODE_SIZE] {
        &self.page
    }

    fn raw(&self) -> &RawNodeHeader {
        RawNodeHeader::ref_from_bytes(&self.page[HEADER_BYTES..SLOTS_AT]).expect("size matches")
    }
    fn raw_mut(&mut self) -> &mut RawNodeHeader {
        RawNodeHeader::mut_from_bytes(&mut self.page[HEADER_BYTES..SLOTS_AT]).expect("size matches")
    }
    fn header(&self) -> &Header {
        Header::ref_from_bytes(&self.page[..HEADER_BYTES]).expect("size matches")
    }
    fn slot(&self, index: usize) -> &RawSlot {
        let at = SLOTS_AT + index * SLOT_BYTES;
        RawSlot::ref_from_bytes(&self.page[at..at + SLOT_BYTES]).expect("size matches")
    }
    fn slots(&self) -> &[RawSlot] {
        <[RawSlot]>::ref_from_bytes(&self.page[SLOTS_AT..SLOTS_AT + self.count() * SLOT_BYTES])
            .expect("size matches")
    }
    fn slot_mut(&mut self, index: usize) -> &mut RawSlot {
        let at = SLOTS_AT + index * SLOT_BYTES;
        RawSlot::mut_from_bytes(&mut self.page[at..at + SLOT_BYTES]).expect("size matches")
    }

    /// Number of items or children.
    pub fn count(&self) -> usize {
        self.raw().count.get() as usize
    }
    /// Height above the leaves; 0 is a leaf.
    pub fn level(&self) -> u8 {
        self.raw().level
    }
    /// The node's tree.
    pub fn tree(&self) -> TreeId {
        TreeId(self.raw().tree.get())
    }
    /// First block of the node.
    pub fn address(&self) -> BlockNumber {
        BlockNumber(self.header().address.get())
    }
    /// Transaction in which the node was made.
    pub fn generation(&self) -> Generation {
        Generation(self.header().generation.get())
    }
    /// Gives the node a new address and generation: the heart of copy-on-write.
    pub fn relocate(&mut self, address: BlockNumber, generation: Generation) {
        let header = Header::mut_from_bytes(&mut self.page[..HEADER_BYTES]).expect("size matches");
        header.address = U64::new(address.0);
        header.generation = U64::new(generation.0);
    }
    /// Gives a copy of an inherited node to the tree that copied it.
    pub fn set_tree(&mut self, tree: TreeId) {
        self.raw_mut().tree = U64::new(tree.0);
    }
    fn values_start(&self) -> usize {
        self.raw().values_start.get() as usize
    }
    fn garbage(&self) -> usize {
        self.raw().garbage.get() as usize
    }

    /// Bytes that an item with a value of `value_bytes` takes.
    pub fn item_bytes(value_bytes: usize) -> usize {
        SLOT_BYTES + value_bytes
    }
    /// Bytes free for new items after compaction.
    pub fn free_bytes(&self) -> usize {
        self.values_start() - SLOTS_AT - self.count() * SLOT_BYTES + self.garbage()
    }
    /// Bytes taken by items.
    pub fn used_bytes(&self) -> usize {
        NODE_CAPACITY - self.free_bytes()
    }

    /// Key of item `index`.
    pub fn key(&self, index: usize) -> Key {
        self.slot(index).key()
    }
    /// Value of item `index`.
    pub fn value(&self, index: usize) -> &[u8] {
        &self.page[self.slot(index).value()]
    }
    /// Child `index` of an inner node.
    pub fn child(&self, index: usize) -> ChildPointer {
        debug_assert!(self.level() > 0);
        ChildPointer::decode(self.value(index))
    }
    /// Items in key order.
    pub fn items(&self) -> impl Iterator<Item = (Key, &[u8])> {
        (0..self.count()).map(|index| (self.key(index), self.value(index)))
    }

    /// `Ok(index)` of the item with `key`, or `Err(index)` of its insertion point.
    pub fn search(&self, key: &Key) -> Result<usize, usize> {
        self.slots().binary_search_by(|slot| slot.key().cmp(key))
    }
    /// Index of the child for `key`.
    pub fn child_index(&self, key: &Key) -> usize {
        match self.search(key) {
            Ok(index) => index,
            Err(index) => index.saturating_sub(1),
        }
    }

    /// Inserts an item at `index`, which [`Node::search`] returned.
    ///
    /// # Errors
    /// [`NodeFull`]; the node is unchanged.
    pub fn insert(&mut self, index: usize, key: Key, value: &[u8]) -> Result<(), NodeFull> {
        if Self::item_bytes(value.len()) > self.free_bytes() {
            return Err(NodeFull);
        }
        let count = self.count();
        if SLOTS_AT + (count + 1) * SLOT_BYTES + value.len() > self.values_start() {
            self.compact();
        }
        let values_start = self.values_start() - value.len();
        let start = if value.is_empty() { EMPTY_VALUE_AT } else { values_start };
        self.page[start..start + value.len()].copy_from_slice(value);
        let at = SLOTS_AT + index * SLOT_BYTES;
        self.page.copy_within(at..SLOTS_AT + count * SLOT_BYTES, at + SLOT_BYTES);
        let slot = RawSlot {
            inode: U64::new(key.inode),
            offset: U64::new(key.offset),
            value_start: U16::new(start as u16),
            value_length: U16::new(value.len() as u16),
            kind: key.kind,
            reserved: [0; 3],
        };
        self.page[at..at + SLOT_BYTES].copy_from_slice(slot.as_bytes());
        let raw = self.raw_mut();
        raw.count = U16::new(count as u16 + 1);
        raw.values_start = U16::new(values_start as u16);
        Ok(())
    }

    /// Replaces the value of item `index`.
    ///
    /// # Errors
    /// [`NodeFull`]; the node is unchanged.
    pub fn replace(&mut self, index: usize, value: &[u8]) -> Result<(), NodeFull> {
        let old = self.slot(index).value();
        if old.len() == value.len() {
            self.page[old].copy_from_slice(value);
            return Ok(());
        }
        if value.len() > self.free_bytes() + old.len() {
            return Err(NodeFull);
        }
        let key = self.key(index);
        self.remove(index);
        self.insert(index, key, value)
    }

    /// Removes item `index`.
    pub fn remove(&mut self, index: usize) {
        let count = self.count();
        let value = self.slot(index).value();
        let at = SLOTS_AT + index * SLOT_BYTES;
        self.page.copy_within(at + SLOT_BYTES..SLOTS_AT + count * SLOT_BYTES, at);
        self.page[SLOTS_AT + (count - 1) * SLOT_BYTES..SLOTS_AT + count * SLOT_BYTES].fill(0);
        let values_start = self.values_start();
        let raw = self.raw_mut();
        raw.count = U16::new(count as u16 - 1);
        if value.start == values_start {
            raw.values_start = U16::new(value.end as u16);
        } else {
            raw.garbage = U16::new(raw.garbage.get() + value.len() as u16);
        }
        if count == 1 {
            raw.values_start = U16::new(NODE_SIZE as u16);
            raw.garbage = U16::ZERO;
        }
    }

    /// Sets the key of item `index`. The order must not change.
    pub fn set_key(&mut self, index: usize, key: Key) {
        let slot = self.slot_mut(index);
        slot.inode = U64::new(key.inode);
        slot.offset = U64::new(key.offset);
        slot.kind = key.kind;
    }

    /// Moves the items from `index` on into the empty node `right`.
    pub fn split_off(&mut self, index: usize, right: &mut Node) {
        debug_assert_eq!(right.count(), 0);
        for from in index..self.count() {
            right
                .insert(from - index, self.key(from), self.value(from))
                .expect("an empty node has room for a part of another");
        }
        self.keep(index);
    }

    /// Appends all items of `right`, whose keys are all larger.
    ///
    /// # Errors
    /// [`NodeFull`]; nothing was changed.
    pub fn append(&mut self, right: &Node) -> Result<(), NodeFull> {
        if right.used_bytes() > self.free_bytes() {
            return Err(NodeFull);
        }
        for (key, value) in right.items() {
            self.insert(self.count(), key, value)?;
        }
        Ok(())
    }

    /// The split index that makes the two halves as equal as possible in bytes, with at least one
    /// item on each side.
    pub fn split_index(&self) -> usize {
        let half = self.used_bytes() / 2;
        let mut sum = 0;
        for index in 0..self.count() {
            sum += Self::item_bytes(self.value(index).len());
            if sum >= half {
                return (index + 1).min(self.count() - 1).max(1);
            }
        }
        self.count() / 2
    }

    fn keep(&mut self, count: usize) {
        let old = self.count();
        let removed: usize = (count..old).map(|index| self.value(index).len()).sum();
        self.page[SLOTS_AT + count * SLOT_BYTES..SLOTS_AT + old * SLOT_BYTES].fill(0);
        let raw = self.raw_mut();
        raw.count = U16::new(count as u16);
        raw.garbage = U16::new(raw.garbage.get() + removed as u16);
        self.compact();
    }

    fn compact(&mut self) {
        let old = self.page.clone();
        let mut end = NODE_SIZE;
        for index in 0..self.count() {
            let value = self.slot(index).value();
            if value.is_empty() {
                self.slot_mut(index).value_start = U16::new(EMPTY_VALUE_AT as u16);
                continue;
            }
            let start = end - value.len();
            self.page[start..end].copy_from_slice(&old[value]);
            self.slot_mut(index).value_start = U16::new(start as u16);
            end = start;
        }
        let raw = self.raw_mut();
        raw.values_start = U16::new(end as u16);
        raw.garbage = U16::ZERO;
    }
}

const _: () = assert!(
    NODE_CAPACITY >= 4 * (SLOT_BYTES + VALUE_BYTES_MAX) && SLOT_BYTES == 24 && NODE_BLOCKS == 4
);
