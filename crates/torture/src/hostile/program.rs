//! What an input means: a list of changes to a volume, nearly all of them followed by a correct
//! checksum, so that what lies behind the checksums is reached.
//!
//! An input is bytes: the number of the volume, then operations, each a byte that says what and
//! bytes that say where and with which value. Every sequence of bytes is a valid program; numbers
//! are taken modulo what there is.
use super::images::{BaseImage, chosen, read_checkpoint, read_node};
use super::overlay::OverlayDevice;
use cairn_format::{
    BITMAP_BYTES, BLOCK_SIZE, BlockNumber, CHECKPOINT_HEADER_BYTES, COUNTER_WRITABLE_MAX,
    Checkpoint, CheckpointBuilder, CheckpointEntry, DirectoryEntry, ENTRY_HEADER_BYTES, EntryFlags,
    Geometry, HEADER_BYTES, Header, ItemKind, Key, NODE_BLOCKS, NODE_SIZE, Node, TREE_FILES,
    node::VALUE_BYTES_MAX,
};

/// Operations beyond this number are not looked at.
const OPERATIONS_MAX: usize = 24;
/// Entries of a checkpoint that is made up; each takes less than a block.
const ENTRIES_MAX: usize = 6;

/// Begins an operation that exchanges two names. The operations that it was taken from keep their
/// other numbers, so that older inputs mean what they meant.
pub const EXCHANGE_NAMES: [u8; 2] = [15, 0xd7];

/// Offset and width of the fields of a header that matter.
const HEADER_FIELDS: [(usize, usize); 6] = [(8, 2), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8)];
const SUPERBLOCK_FIELDS: [(usize, usize); 22] = [
    (48, 8),
    (56, 8),
    (64, 8),
    (72, 4),
    (76, 4),
    (80, 4),
    (84, 4),
    (88, 8),
    (96, 8),
    (104, 8),
    (112, 8),
    (120, 8),
    (128, 8),
    (136, 8),
    (144, 8),
    (152, 8),
    (160, 8),
    (168, 8),
    (176, 8),
    (184, 8),
    (192, 8),
    (256, 4),
];
const NODE_FIELDS: [(usize, usize); 5] = [(48, 8), (56, 2), (58, 2), (60, 2), (62, 1)];
const SLOTS_AT: usize = 64;
const SLOT_FIELDS: [(usize, usize); 5] = [(0, 8), (8, 8), (16, 2), (18, 2), (20, 1)];
const CHECKPOINT_FIELDS: [(usize, usize); 6] =
    [(48, 8), (56, 8), (64, 8), (72, 8), (80, 8), (88, 4)];
const ENTRY_FIELDS: [(usize, usize); 5] = [(0, 8), (8, 8), (16, 8), (24, 2), (26, 2)];
/// Where fields begin within the values of items, of any kind.
#[rustfmt::skip]
const VALUE_FIELDS: [(usize, usize); 24] = [
    (0, 4), (4, 4), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8),
    (48, 8), (56, 8), (64, 8), (72, 8), (96, 4), (100, 4), (112, 4), (0, 8),
    (8, 8), (16, 4), (20, 1), (21, 1), (8, 1), (9, 1), (4, 2), (16, 1),
];

/// Reads an input; behind its end there are zeros.
pub(super) struct Input<'i> {
    bytes: &'i [u8],
    at: usize,
}

impl Input<'_> {
    fn is_empty(&self) -> bool {
        self.at >= self.bytes.len()
    }
    pub(super) fn byte(&mut self) -> u8 {
        self.at += 1;
        self.bytes.get(self.at - 1).copied().unwrap_or(0)
    }
    fn word(&mut self, bytes: usize) -> u64 {
        (0..bytes).fold(0, |word, index| word | u64::from(self.byte()) << (8 * index))
    }
    /// A number below `bound`, which is not zero.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        let bytes = if bound > 256 { 2 } else { 1 };
        self.word(bytes) as usize % bound
    }
    pub(super) fn one_of<T: Copy>(&mut self, choices: &[T]) -> Option<T> {
        if choices.is_empty() { None } else { Some(choices[self.below(choices.len())]) }
    }
}

/// A volume that is being changed.
pub(super) struct Draft<'i> {
    pub(super) base: &'i BaseImage,
    pub(super) device: OverlayDevice,
    pub(super) input: Input<'i>,
}

/// The volume that the input means.
pub fn run(bases: &[BaseImage], bytes: &[u8]) -> OverlayDevice {
    let mut input = Input { bytes, at: 0 };
    let base = &bases[chosen(input.byte())];
    let mut draft = Draft { base, device: base.device(), input };
    for _ in 0..OPERATIONS_MAX {
        if draft.input.is_empty() {
            break;
        }
        draft.operation();
    }
    draft.device
}

impl Draft<'_> {
    fn operation(&mut self) {
        let choice = self.input.byte();
        if choice >= 128 && !self.base.records.is_empty() {
            return self.change_record(choice);
        }
        match choice % 16 {
            0 | 1 => self.superblock_field(),
            2 => self.node_field(),
            3 => self.slot_field(),
            4 | 5 => self.value_field(),
            6 => self.item(),
            7 => self.bitmap(),
            8 => self.checkpoint_field(),
            9 => self.entry_field(),
            10 | 11 => self.append_checkpoint(),
            12 => self.raw_byte(),
            13 => self.copy_block(),
            14 => self.node_elsewhere(),
            _ => self.whole_device(),
        }
    }

    /// A number that may be interesting; `current` is what stands in its place.
    pub(super) fn number(&mut self, current: u64) -> u64 {
        let superblock = &self.base.superblock;
        let choice = self.input.byte();
        match choice % 16 {
            // Where counters may end.
            4 if choice >= 128 => (COUNTER_WRITABLE_MAX << (choice / 16 % 2))
                .wrapping_add(self.input.word(1) % 8)
                .wrapping_sub(4),
            0 => self.input.word(1),
            1 => self.input.word(2),
            2 => self.input.word(4),
            3 => self.input.word(8),
            4 => u64::MAX - self.input.word(1) % 16,
            5 => 1u64 << (self.input.byte() % 64),
            6 => (1u64 << (self.input.byte() % 64)).wrapping_sub(1),
            7 => self.input.one_of(&self.base.nodes).map_or(0, |block| block.0),
            8 => superblock.generation.0.wrapping_add(self.input.word(1)).wrapping_sub(8),
            9 => {
                superblock.geometry.total_blocks.wrapping_add(self.input.word(1)).wrapping_sub(128)
            }
            10 => {
                superblock.geometry.data_start().0.wrapping_add(self.input.word(1)).wrapping_sub(8)
            }
            11 => superblock.next_inode.wrapping_add(self.input.word(1)).wrapping_sub(128),
            12 => self.input.one_of(&self.base.extents).map_or(0, |block| block.0),
            13 => i64::MAX as u64 - self.input.word(1) % 8192,
            14 if !self.base.facts.is_empty() => {
                self.input.one_of(&self.base.facts).unwrap_or(current)
            }
            _ => current.wrapping_add(self.input.word(1)).wrapping_sub(128),
        }
    }

    pub(super) fn read(&self, block: u64, blocks: u64) -> Vec<u8> {
        (block..block + blocks).flat_map(|block| self.device.block(block)).collect()
    }

    pub(super) fn write(&self, block: u64, bytes: &[u8]) {
        for (block, bytes) in (block..).zip(bytes.chunks_exact(BLOCK_SIZE)) {
            self.device.set_block(block, bytes);
        }
    }

    /// Makes the checksum right, if the length allows for one.
    pub(super) fn seal(bytes: &mut [u8]) {
        let length = u32::from_le_bytes(bytes[12..16].try_into().expect("four bytes")) as usize;
        if (HEADER_BYTES..=bytes.len()).contains(&length) {
            Header::seal(bytes);
        }
    }

    pub(super) fn set_field(&mut self, bytes: &mut [u8], (offset, width): (usize, usize)) {
        if offset + width > bytes.len() {
            return;
        }
        let mut word = [0; 8];
        word[..width].copy_from_slice(&bytes[offset..offset + width]);
        let value = self.number(u64::from_le_bytes(word));
        bytes[offset..offset + width].copy_from_slice(&value.to_le_bytes()[..width]);
    }

    /// The same field with the same value in one superblock or in all three.
    fn superblock_field(&mut self) {
        let geometry = self.base.superblock.geometry;
        let places =
            [Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1], geometry.superblock_copy()];
        let chosen = self.input.below(4);
        let fields = [&HEADER_FIELDS[..], &SUPERBLOCK_FIELDS[..], &SUPERBLOCK_FIELDS[..]].concat();
        let field = self.input.one_of(&fields).unwrap_or((48, 8));
        let start = self.input.at;
        for (_, address) in
            places.into_iter().enumerate().filter(|&(index, _)| chosen == 3 || chosen == index)
        {
            self.input.at = start;
            let mut bytes = self.read(address.0, 1);
            self.set_field(&mut bytes, field);
            Self::seal(&mut bytes);
            self.write(address.0, &bytes);
        }
    }

    fn change_node(&mut self, change: impl FnOnce(&mut Self, &mut [u8])) {
        let Some(address) = self.input.one_of(&self.base.nodes) else { return };
        let mut page = self.read(address.0, NODE_BLOCKS);
        change(self, &mut page);
        Self::seal(&mut page);
        self.write(address.0, &page);
    }

    fn node_field(&mut self) {
        let fields = [&HEADER_FIELDS[..], &NODE_FIELDS[..], &NODE_FIELDS[..]].concat();
        self.change_node(|draft, page| {
            let field = draft.input.one_of(&fields).unwrap_or((48, 8));
            draft.set_field(page, field);
        });
    }

    fn slot_field(&mut self) {
        self.change_node(|draft, page| {
            let slot = draft.slot(page);
            let (offset, width) = draft.input.one_of(&SLOT_FIELDS).unwrap_or((0, 8));
            draft.set_field(page, (slot + offset, width));
        });
    }

    /// Where one of the slots that are in use begins.
    fn slot(&mut self, page: &[u8]) -> usize {
        let count = usize::from(u16::from_le_bytes([page[56], page[57]]))
            .clamp(1, (NODE_SIZE - SLOTS_AT) / 24);
        SLOTS_AT + 24 * self.input.below(count)
    }

    fn value_field(&mut self) {
        self.change_node(|draft, page| {
            let slot = draft.slot(page);
            let start = usize::from(u16::from_le_bytes([page[slot + 16], page[slot + 17]]));
            let length = usize::from(u16::from_le_bytes([page[slot + 18], page[slot + 19]]));
            let end = (start + length).min(page.len());
            let (offset, width) = draft.field_of(length, &VALUE_FIELDS);
            if start + offset + width <= end {
                draft.set_field(page, (start + offset, width));
            }
        });
    }

    /// A known field that fits into `length` bytes, or any byte of them.
    fn field_of(&mut self, length: usize, fields: &[(usize, usize)]) -> (usize, usize) {
        if self.input.byte().is_multiple_of(8) {
            return (self.input.below(length.max(1)), 1);
        }
        let fitting: Vec<_> =
            fields.iter().copied().filter(|(offset, width)| offset + width <= length).collect();
        self.input.one_of(&fitting).unwrap_or((0, 1))
    }

    /// Removes an item, or puts one there: with the value of another, longer or shorter, under
    /// another key.
    fn item(&mut self) {
        let (Some(address), Some(source)) =
            (self.input.one_of(&self.base.nodes), self.input.one_of(&self.base.nodes))
        else {
            return;
        };
        let superblock = &self.base.superblock;
        let (Some(mut node), Some(source)) = (
            read_node(&self.device, superblock, address),
            read_node(&self.device, superblock, source),
        ) else {
            return;
        };
        let how = self.input.byte();
        if how.is_multiple_of(4) {
            let index = self.input.below(node.count().max(1));
            if index < node.count() {
                node.remove(index);
            }
        } else if source.count() > 0 {
            let index = self.input.below(source.count());
            let (key, value) = self.changed_item(source.key(index), source.value(index));
            put(&mut node, key, &value);
        }
        self.write(address.0, &node.seal()[..]);
    }

    pub(super) fn changed_item(&mut self, mut key: Key, value: &[u8]) -> (Key, Vec<u8>) {
        match self.input.byte() % 4 {
            0 => key.inode = self.number(key.inode),
            1 => key.offset = self.number(key.offset),
            2 => key.kind = self.number(u64::from(key.kind)) as u8,
            _ => {}
        }
        let mut value = value.to_vec();
        match self.input.byte() % 4 {
            0 => value.truncate(self.input.below(value.len().max(1))),
            1 => value.resize(
                (value.len() + self.input.below(300)).min(VALUE_BYTES_MAX),
                self.input.byte(),
            ),
            2 => {
                let field = self.field_of(value.len(), &VALUE_FIELDS);
                self.set_field(&mut value, field);
            }
            _ => {}
        }
        (key, value)
    }

    fn bitmap(&mut self) {
        let geometry = self.base.superblock.geometry;
        let address = geometry
            .bitmap_block(self.input.below(geometry.groups() as usize) as u64, self.input.below(2));
        let mut bytes = self.read(address.0, 1);
        match self.input.byte() % 4 {
            0 => {
                let field = self.input.one_of(&HEADER_FIELDS).unwrap_or((40, 8));
                self.set_field(&mut bytes, field);
            }
            1 => self.set_field(&mut bytes, (HEADER_BYTES, 8)),
            _ => {
                let bits = HEADER_BYTES + 16;
                let byte = bits + self.input.below(BITMAP_BYTES);
                bytes[byte] ^= self.input.byte();
            }
        }
        Self::seal(&mut bytes);
        self.write(address.0, &bytes);
    }

    fn change_checkpoint(&mut self, change: impl FnOnce(&mut Self, &mut [u8])) {
        let Some((ring_block, blocks)) = self.input.one_of(&self.base.checkpoints) else { return };
        let log = self.base.superblock.geometry.log();
        let places: Vec<u64> = (ring_block..ring_block + blocks)
            .map(|block| log.start.0 + block % log.blocks)
            .collect();
        let mut bytes: Vec<u8> =
            places.iter().flat_map(|&block| self.device.block(block)).collect();
        change(self, &mut bytes);
        Self::seal(&mut bytes);
        for (&block, bytes) in places.iter().zip(bytes.chunks_exact(BLOCK_SIZE)) {
            self.device.set_block(block, bytes);
        }
    }

    fn checkpoint_field(&mut self) {
        let fields = [&HEADER_FIELDS[..], &CHECKPOINT_FIELDS[..], &CHECKPOINT_FIELDS[..]].concat();
        self.change_checkpoint(|draft, bytes| {
            let field = draft.input.one_of(&fields).unwrap_or((48, 8));
            draft.set_field(bytes, field);
        });
    }

    fn entry_field(&mut self) {
        self.change_checkpoint(|draft, bytes| {
            let entries = draft.input.below(64);
            let mut at = CHECKPOINT_HEADER_BYTES;
            for _ in 0..entries {
                let Some(length) = bytes.get(at + 24..at + 26) else { return };
                let next = at
                    + ENTRY_HEADER_BYTES
                    + usize::from(u16::from_le_bytes([length[0], length[1]]));
                if next + ENTRY_HEADER_BYTES > bytes.len() {
                    break;
                }
                at = next;
            }
            if draft.input.byte().is_multiple_of(2) {
                let (offset, width) = draft.input.one_of(&ENTRY_FIELDS).unwrap_or((0, 8));
                draft.set_field(bytes, (at + offset, width));
            } else {
                let (offset, width) = draft.field_of(120, &VALUE_FIELDS);
                draft.set_field(bytes, (at + ENTRY_HEADER_BYTES + offset, width));
            }
        });
    }

    /// One more checkpoint behind the last, with items of the trees or of other checkpoints,
    /// changed.
    fn append_checkpoint(&mut self) {
        let superblock = &self.base.superblock;
        let log = superblock.geometry.log();
        let (mut block, mut sequence) = (superblock.log_tail.block, superblock.log_tail.sequence);
        let mut last: Option<Checkpoint> = None;
        while let Some(blocks) =
            Checkpoint::blocks_announced(&self.device.block(log.start.0 + block))
        {
            match read_checkpoint(&self.device, superblock, block, blocks) {
                Some(checkpoint)
                    if checkpoint.header.sequence == sequence && blocks < log.blocks =>
                {
                    block = (block + blocks) % log.blocks;
                    sequence += 1;
                    last = Some(checkpoint);
                }
                _ => break,
            }
        }
        let mut memory = vec![0; (1 + ENTRIES_MAX) * BLOCK_SIZE];
        let mut builder = CheckpointBuilder::new(&mut memory);
        for _ in 0..1 + self.input.below(ENTRIES_MAX) {
            let Some((key, value)) = self.any_item() else { continue };
            let flags = EntryFlags(self.input.byte() % 4);
            let value = if flags.contains(EntryFlags::DELETE) { Vec::new() } else { value };
            let choice = self.input.byte();
            let tree = match self.input.one_of(&self.base.subvolumes) {
                _ if choice == 255 => cairn_format::TreeId(self.number(256)),
                Some(subvolume) => cairn_format::TreeId(subvolume),
                None => TREE_FILES,
            };
            builder.push(CheckpointEntry { tree, key, flags, value: &value });
        }
        let choice = self.input.byte();
        // Now and then it relies on a superblock that is not there.
        let superblock_relied_on =
            if choice % 16 == 15 { superblock.generation.next() } else { superblock.generation };
        let generation = superblock_relied_on
            .next()
            .max(last.as_ref().map_or_else(Default::default, |last| last.header.generation));
        let header = cairn_format::CheckpointHeader {
            sequence,
            log_epoch: superblock.log_epoch,
            generation,
            flushed_sequence: if choice.is_multiple_of(2) {
                sequence - 1
            } else {
                self.number(sequence)
            },
            last_operation: cairn_format::LogSeq(
                last.as_ref().map_or(1, |last| last.header.last_operation.0.saturating_add(1)),
            ),
            next_inode: superblock.next_inode.saturating_add(64),
            superblock: superblock_relied_on,
        };
        let bytes = builder.finish(&header, superblock.volume, block);
        for (index, bytes) in bytes.chunks_exact(BLOCK_SIZE).enumerate() {
            self.device.set_block(log.start.0 + (block + index as u64) % log.blocks, bytes);
        }
    }

    fn any_item(&mut self) -> Option<(Key, Vec<u8>)> {
        let address = self.input.one_of(&self.base.nodes)?;
        let node = read_node(&self.device, &self.base.superblock, address)
            .filter(|node| node.level() == 0 && node.count() > 0)?;
        let index = self.input.below(node.count());
        Some(self.changed_item(node.key(index), node.value(index)))
    }

    /// One byte of anything, with whatever that does to its checksum.
    fn raw_byte(&mut self) {
        let block = self.any_block();
        let mut bytes = self.read(block, 1);
        let at = self.input.word(2) as usize % BLOCK_SIZE;
        bytes[at] ^= self.input.byte().max(1);
        self.write(block, &bytes);
    }

    fn any_block(&mut self) -> u64 {
        let blocks = self.base.superblock.geometry.total_blocks;
        match self.input.byte() % 4 {
            0 => self.input.word(2) % blocks,
            1 => self.input.one_of(&self.base.extents).map_or(0, |block| block.0),
            2 => self.input.one_of(&self.base.nodes).map_or(0, |block| block.0),
            _ => self.number(32) % blocks,
        }
    }

    /// The content of one block in another's place, zeros, or half of each.
    fn copy_block(&mut self) {
        let (from, to) = (self.any_block(), self.any_block());
        let mut bytes = self.read(to, 1);
        match self.input.byte() % 3 {
            0 => bytes = self.read(from, 1),
            1 => bytes.fill(0),
            _ => bytes[..2048].copy_from_slice(&self.read(from, 1)[..2048]),
        }
        self.write(to, &bytes);
    }

    /// A node with another node's content, and its own address.
    fn node_elsewhere(&mut self) {
        let Some(source) = self.input.one_of(&self.base.nodes) else { return };
        let Some(target) = self.input.one_of(&self.base.nodes) else { return };
        let mut page = self.read(source.0, NODE_BLOCKS);
        page[32..40].copy_from_slice(&target.0.to_le_bytes());
        if self.input.byte().is_multiple_of(2) {
            let generation = self.read(target.0, 1)[40..48].to_vec();
            page[40..48].copy_from_slice(&generation);
        }
        Self::seal(&mut page);
        self.write(target.0, &page);
    }

    /// Exchanges two entries of directories, of one leaf or of two: what their keys lead to, their
    /// names, or the inodes that they name.
    fn exchange_names(&mut self) {
        let (Some(one), Some(other)) = (self.entry_of_a_leaf(None), self.entry_of_a_leaf(None))
        else {
            return;
        };
        let how = self.input.byte();
        let other =
            if how < 192 { self.entry_of_a_leaf(Some(one.0)).unwrap_or(other) } else { other };
        let ((leaf, key, value), (other_leaf, other_key, other_value)) = (one, other);
        let (Ok(entry), Ok(other_entry)) =
            (DirectoryEntry::decode(&value), DirectoryEntry::decode(&other_value))
        else {
            return;
        };
        let with_target_of = |name: &DirectoryEntry, target: &DirectoryEntry| {
            DirectoryEntry { name: name.name.clone(), ..target.clone() }.encode()
        };
        let (new, other_new) = match how % 3 {
            0 => (other_value, value),
            1 => (with_target_of(&other_entry, &entry), with_target_of(&entry, &other_entry)),
            _ => (with_target_of(&entry, &other_entry), with_target_of(&other_entry, &entry)),
        };
        for (leaf, key, value) in [(leaf, key, new), (other_leaf, other_key, other_new)] {
            let Some(mut node) = read_node(&self.device, &self.base.superblock, leaf) else {
                return;
            };
            put(&mut node, key, &value);
            self.write(leaf.0, &node.seal()[..]);
        }
    }

    /// An entry of a directory, of this leaf or of any: its leaf, key and value.
    pub(super) fn entry_of_a_leaf(
        &mut self,
        leaf: Option<BlockNumber>,
    ) -> Option<(BlockNumber, Key, Vec<u8>)> {
        let superblock = &self.base.superblock;
        let entries = |leaf: BlockNumber| -> Vec<(BlockNumber, Key, Vec<u8>)> {
            let node = read_node(&self.device, superblock, leaf).filter(|node| node.level() == 0);
            let of_node = |node: Node| {
                let items = node.items();
                let entries = items.filter(|(key, _)| key.kind == ItemKind::DirectoryEntry as u8);
                entries.map(|(key, value)| (leaf, key, value.to_vec())).collect()
            };
            node.map(of_node).unwrap_or_default()
        };
        let leaves: Vec<BlockNumber> = match leaf {
            Some(leaf) => vec![leaf],
            None => {
                self.base.nodes.iter().copied().filter(|&leaf| !entries(leaf).is_empty()).collect()
            }
        };
        let leaf = self.input.one_of(&leaves)?;
        let mut of_leaf = entries(leaf);
        if of_leaf.is_empty() {
            return None;
        }
        let chosen = self.input.below(of_leaf.len());
        Some(of_leaf.swap_remove(chosen))
    }

    /// A shorter device, or one that has lost a block; or an exchange of names.
    fn whole_device(&mut self) {
        let blocks = self.base.superblock.geometry.total_blocks;
        let choice = self.input.byte();
        if choice == EXCHANGE_NAMES[1] {
            self.exchange_names();
        } else if choice.is_multiple_of(4) {
            let length = (self.number(blocks) % (blocks + 1)) * BLOCK_SIZE as u64;
            self.device = self.device.copy().cut(length);
        } else {
            let address = BlockNumber(self.any_block());
            self.write(address.0, &[0; BLOCK_SIZE]);
        }
    }
}

/// Puts an item where its key belongs, if the node has room.
pub(super) fn put(node: &mut Node, key: Key, value: &[u8]) {
    if node.level() > 0 && value.len() != cairn_format::ChildPointer::BYTES {
        return;
    }
    // A node without room stays as it is.
    let _ = match node.search(&key) {
        Ok(index) => node.replace(index, value),
        Err(index) => node.insert(index, key, value),
    };
}
