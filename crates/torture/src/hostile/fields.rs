//! Every field of a volume's structures: the tables of `docs/format.md` say which fields there are,
//! so a new one is changed as soon as it stands there. A change sets one field of one structure, or
//! exchanges it with that of a neighbour, and makes the checksum right again.
use super::images::BaseImage;
use super::overlay::OverlayDevice;
use crate::items::checkpoints;
use cairn_environment::random::Seeded;
use cairn_format::{
    BLOCK_SIZE, BlockNumber, CHECKPOINT_HEADER_BYTES, ENTRY_HEADER_BYTES, Geometry, HEADER_BYTES,
    Header, ItemKind, Key, NODE_BLOCKS, TREE_ROOTS, TreeId,
};
use std::collections::BTreeMap;
use std::fmt;

const FORMAT: &str = include_str!("../../../../docs/format.md");
/// A field without an end is changed at its beginning and at its end, in pieces of this length.
const REST_BYTES: usize = 4;

/// A field of a structure.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Field {
    /// The structure's name.
    pub structure: &'static str,
    /// Its own name.
    pub name: &'static str,
    offset: usize,
    /// Its length; `None` if it goes up to the end.
    bytes: Option<usize>,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.structure, self.name)
    }
}

/// The fields in the tables of the format, without checksums of structures and without the headers
/// as a whole.
pub fn fields() -> Vec<Field> {
    let rows = FORMAT.lines().filter_map(|line| {
        let cells: Vec<&'static str> = line.split('|').map(str::trim).collect();
        let [_, structure, offset, bytes, name, _, _, ..] = cells[..] else { return None };
        let offset = offset.parse().ok()?;
        Some(Field { structure, name, offset, bytes: bytes.parse().ok() })
    });
    rows.filter(|field| {
        !matches!((field.structure, field.name), ("Header", "checksum") | (_, "header"))
    })
    .collect()
}

/// A field in a volume.
#[derive(Clone, Debug)]
pub struct Place {
    /// The blocks of the structure with the checksum.
    blocks: Vec<u64>,
    /// Structures that are to stay the same as this one but for their headers.
    twins: Vec<u64>,
    at: usize,
    bytes: usize,
    /// The level of the node, of what stands in one.
    pub level: Option<u8>,
    /// The item, of what stands in one.
    pub key: Option<Key>,
}

/// All places of each field in a volume.
pub struct Places {
    /// In the order in which they stand in the volume.
    pub by_field: BTreeMap<Field, Vec<Place>>,
    fields: Vec<Field>,
}

/// What is done to a field.
#[derive(Clone, Debug)]
pub enum Change {
    /// It gets this value.
    Set(u64),
    /// It is exchanged with that of another place.
    Swap(Place),
}

impl Places {
    /// Those of a volume.
    pub fn of(base: &BaseImage) -> Self {
        let mut places = Self { by_field: BTreeMap::new(), fields: fields() };
        let device = base.device();
        let geometry = base.superblock.geometry;
        let newest = (base.superblock.generation.0 % 2) as usize;
        let superblocks = [
            Geometry::SUPERBLOCKS[newest],
            Geometry::SUPERBLOCKS[1 - newest],
            geometry.superblock_copy(),
        ];
        let twins: Vec<u64> = superblocks[1..].iter().map(|block| block.0).collect();
        let superblock = Place::structure(vec![superblocks[0].0], twins);
        places.add("Superblock", &superblock, 0, BLOCK_SIZE);
        for block in superblocks {
            places.add("Header", &Place::structure(vec![block.0], Vec::new()), 0, HEADER_BYTES);
        }
        for group in 0..geometry.groups() {
            // The one that counts: the newest that the superblock knows.
            let slots = [0, 1].map(|slot| geometry.bitmap_block(group, slot).0);
            let generation = |block: &u64| number(&device.block(*block)[40..48]);
            let known =
                slots.into_iter().filter(|slot| generation(slot) <= base.superblock.generation.0);
            let block = known.max_by_key(generation).expect("a bitmap that counts");
            let bitmap = Place::structure(vec![block], Vec::new());
            places.add("Header", &bitmap, 0, HEADER_BYTES);
            places.add("Bitmap", &bitmap, 0, number(&device.block(block)[12..16]) as usize);
        }
        base.nodes.iter().for_each(|node| places.add_node(&device, *node));
        places.add_log(&device, base);
        places
    }

    /// Adds the fields of a structure of `length` bytes that begins at `start`.
    fn add(&mut self, structure: &str, place: &Place, start: usize, length: usize) {
        for field in self.fields.iter().filter(|field| field.structure == structure) {
            let mut add = |at: usize, bytes: usize| {
                if at + bytes <= length && bytes > 0 {
                    let place = Place { at: start + at, bytes, ..place.clone() };
                    self.by_field.entry(field.clone()).or_default().push(place);
                }
            };
            let end = field.bytes.map_or(length, |bytes| field.offset + bytes);
            match end.saturating_sub(field.offset) {
                bytes @ 0..=8 => add(field.offset, bytes),
                _ => {
                    add(field.offset, REST_BYTES);
                    add((field.offset + end) / 2, REST_BYTES);
                    add(end - REST_BYTES, REST_BYTES);
                }
            }
        }
    }

    fn add_node(&mut self, device: &OverlayDevice, node: BlockNumber) {
        let place = Place::structure((node.0..node.0 + NODE_BLOCKS).collect(), Vec::new());
        let page = place.read(device);
        let place = Place { level: Some(page[62]), ..place };
        self.add("Header", &place, 0, HEADER_BYTES);
        self.add("NodeHeader", &place, HEADER_BYTES, 16);
        let tree = TreeId(number(&page[48..56]));
        for slot in (64..).step_by(24).take(number(&page[56..58]) as usize) {
            let key = key(&page[slot..], 20);
            let (start, length) =
                (number(&page[slot + 16..][..2]), number(&page[slot + 18..][..2]));
            let place = Place { key: Some(key), ..place.clone() };
            self.add("Slot", &place, slot, 24);
            let structure = match (page[62], tree) {
                (1.., _) => "ChildPointer",
                (0, TREE_ROOTS) => "Root",
                _ => value_structure(key),
            };
            self.add(structure, &place, start as usize, length as usize);
        }
    }

    fn add_log(&mut self, device: &OverlayDevice, base: &BaseImage) {
        let ring = base.superblock.geometry.log();
        for (range, checkpoint) in checkpoints(device, &base.superblock) {
            let blocks = range.range().map(|block| ring.start.0 + block % ring.blocks).collect();
            let place = Place::structure(blocks, Vec::new());
            self.add("Header", &place, 0, HEADER_BYTES);
            self.add("Checkpoint", &place, HEADER_BYTES, CHECKPOINT_HEADER_BYTES - HEADER_BYTES);
            let mut at = CHECKPOINT_HEADER_BYTES;
            for entry in checkpoint.entries() {
                let place = Place { key: Some(entry.key), ..place.clone() };
                self.add("Entry", &place, at, ENTRY_HEADER_BYTES);
                at += ENTRY_HEADER_BYTES;
                self.add(value_structure(entry.key), &place, at, entry.value.len());
                at += entry.value.len();
            }
        }
    }

    /// The changes to try of one place: the values beside its own, those where ranges end, those of
    /// its neighbours, and exchanges with them.
    pub fn changes(&self, field: &Field, index: usize, device: &OverlayDevice) -> Vec<Change> {
        let places = &self.by_field[field];
        let place = &places[index];
        let current = place.value(device);
        let mask = u64::MAX >> (64 - 8 * place.bytes);
        let block = BLOCK_SIZE as u64;
        let steps = [1, NODE_BLOCKS, block - 1, block, 2 * block, 3 * block, 8 * block];
        let beside = steps.iter().flat_map(|step| {
            [current.wrapping_add(*step), current.wrapping_sub(*step)].map(|value| value & mask)
        });
        let parts = [current / 2, current / 2 + 1, current / 5, current.wrapping_mul(2) & mask];
        let ends = [0, 1, mask, mask >> 1, (mask >> 1) + 1, mask >> 2];
        let bits = (0..8 * place.bytes).step_by(9).map(|bit| current ^ 1 << bit);
        let neighbours = [index.wrapping_sub(1), index + 1, places.len() - 1 - index];
        let neighbours =
            neighbours.iter().filter_map(|&index| places.get(index)).filter(|neighbour| {
                neighbour.bytes == place.bytes && neighbour.value(device) != current
            });
        let values = neighbours.clone().map(|neighbour| neighbour.value(device));
        let mut values: Vec<u64> =
            beside.chain(parts).chain(ends).chain(bits).chain(values).collect();
        values.sort_unstable();
        values.dedup();
        let sets = values.into_iter().filter(|value| *value != current).map(Change::Set);
        sets.chain(neighbours.cloned().map(Change::Swap)).collect()
    }

    /// A place of the field, and one of its changes.
    pub fn choose(
        &self,
        field: &Field,
        device: &OverlayDevice,
        random: &mut Seeded,
    ) -> (usize, Change) {
        let index = random.below(self.by_field[field].len() as u64) as usize;
        let mut changes = self.changes(field, index, device);
        let chosen = random.below(changes.len() as u64) as usize;
        (index, changes.swap_remove(chosen))
    }
}

impl Place {
    fn structure(blocks: Vec<u64>, twins: Vec<u64>) -> Self {
        Self { blocks, twins, at: 0, bytes: 0, level: None, key: None }
    }

    fn read(&self, device: &OverlayDevice) -> Vec<u8> {
        self.blocks.iter().flat_map(|block| device.block(*block)).collect()
    }

    /// Whether it stands in a checkpoint of the log of this volume.
    pub fn is_in_log(&self, geometry: &Geometry) -> bool {
        geometry.log().range().contains(&self.blocks[0])
    }

    /// Whether it stands in a superblock.
    pub fn is_in_superblock(&self, geometry: &Geometry) -> bool {
        let blocks = Geometry::SUPERBLOCKS.into_iter().chain([geometry.superblock_copy()]);
        blocks.into_iter().any(|block| block.0 == self.blocks[0])
    }

    /// What stands there.
    pub fn value(&self, device: &OverlayDevice) -> u64 {
        number(&self.read(device)[self.at..self.at + self.bytes])
    }

    fn set(&self, device: &OverlayDevice, value: u64) {
        let structures = [&self.blocks[..]].into_iter().chain(self.twins.chunks(1));
        for blocks in structures {
            let mut bytes: Vec<u8> = blocks.iter().flat_map(|block| device.block(*block)).collect();
            bytes[self.at..self.at + self.bytes]
                .copy_from_slice(&value.to_le_bytes()[..self.bytes]);
            let length = number(&bytes[12..16]) as usize;
            if (HEADER_BYTES..=bytes.len()).contains(&length) {
                Header::seal(&mut bytes);
            }
            for (block, bytes) in blocks.iter().zip(bytes.chunks_exact(BLOCK_SIZE)) {
                device.set_block(*block, bytes);
            }
        }
    }

    /// Makes a change.
    pub fn apply(&self, device: &OverlayDevice, change: &Change) {
        match change {
            Change::Set(value) => self.set(device, *value),
            Change::Swap(other) => {
                let (mine, theirs) = (self.value(device), other.value(device));
                self.set(device, theirs);
                other.set(device, mine);
            }
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}, byte {}", self.blocks[0], self.at)?;
        match self.key {
            Some(key) => write!(f, ", {key:?}"),
            None => Ok(()),
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn key(slot: &[u8], kind_at: usize) -> Key {
    Key { inode: number(&slot[..8]), kind: slot[kind_at], offset: number(&slot[8..16]) }
}

/// The structure of the value of an item of the files' tree.
fn value_structure(key: Key) -> &'static str {
    match ItemKind::from_u8(key.kind) {
        Some(ItemKind::Root) => "Root",
        Some(ItemKind::Subvolume) => "Subvolume",
        Some(ItemKind::Inode) => "Inode",
        Some(ItemKind::DirectoryEntry) => "DirectoryEntry",
        Some(ItemKind::Xattr) => "Xattr",
        Some(ItemKind::Symlink) => "Symlink",
        Some(ItemKind::Extent) => "Extent",
        Some(ItemKind::Orphan) => "Orphan",
        Some(ItemKind::Snapshot) => "Snapshot",
        Some(ItemKind::DeadList) => "DeadList",
        Some(ItemKind::Cleanup) => "Cleanup",
        Some(ItemKind::DeadRuns) => "DeadRun",
        Some(ItemKind::XattrPart) | None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No field is left out: each has a place in one of the volumes.
    #[test]
    fn each_field_has_a_place() {
        let volumes: Vec<Places> = BaseImage::all().iter().map(Places::of).collect();
        let fields = fields();
        assert!(fields.len() > 80, "{} fields", fields.len());
        // No volume here is a member; a longer head is changed as one of an extent.
        let elsewhere = ["MemberLabel", "LongExtent"];
        for field in fields.iter().filter(|field| !elsewhere.contains(&field.structure)) {
            let found = volumes.iter().any(|places| places.by_field.contains_key(field));
            assert!(found, "{field} is nowhere");
        }
    }

    #[test]
    fn a_change_changes_one_field_and_keeps_the_checksum() {
        let base = &BaseImage::all()[0];
        let places = Places::of(base);
        let (field, of_field) = places
            .by_field
            .iter()
            .find(|(field, _)| (field.structure, field.name) == ("Inode", "size"))
            .expect("there are inodes");
        let device = base.device();
        let changes = places.changes(field, 3, &device);
        assert!(changes.len() > 20, "{changes:?}");
        for change in changes {
            let changed = device.copy();
            of_field[3].apply(&changed, &change);
            assert_ne!(of_field[3].value(&changed), of_field[3].value(&device), "{change:?}");
            let node = BlockNumber(of_field[3].blocks[0]);
            assert!(super::super::images::read_node(&changed, &base.superblock, node).is_some());
        }
    }
}
