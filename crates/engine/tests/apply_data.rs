//! The data that an application copies: of many files at a time, of large ones and of pieces,
//! from memory and from the device, and damaged.
mod small_volume;

use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Apply, AttributeChange, Error, InodeId, TimeChange, Timestamp, Volume, Winner};
use cairn_environment::random::Seeded;
use cairn_format::{BlockNumber, Extent, ItemKind, Key, NODE_SIZE, Node, Superblock};
use small_volume::{DIRECTORY, device, open, put, used};
use std::collections::BTreeMap;

const BLOCK: usize = 4096;
const SMALL_FILES: u64 = 300;
const LARGE_BYTES: usize = 6 << 20;
/// Every second block of a file is written, so none of its extents meets the next one.
const PIECES: u64 = 150;

fn bytes(random: &mut Seeded, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for word in bytes.chunks_mut(8) {
        let random = random.below(u64::MAX).to_le_bytes();
        word.copy_from_slice(&random[..word.len()]);
    }
    bytes
}

fn name(index: u64) -> Vec<u8> {
    format!("small-{index}").into_bytes()
}

fn find(volume: &Volume, directory: InodeId, name: &[u8]) -> InodeId {
    let inode = volume.lookup(directory, name).unwrap().inode;
    volume.forget(inode, 1);
    inode
}

/// Origin and fork.
fn roots(volume: &Volume) -> [InodeId; 2] {
    [&b"origin"[..], b"fork"].map(|name| find(volume, volume.root(), name))
}

/// What all files of a directory hold.
fn content(volume: &Volume, directory: InodeId) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = Vec::new();
    let mut take = |item: cairn_engine::DirectoryItem<'_>| {
        names.push((item.name.to_vec(), item.inode));
        true
    };
    volume.read_directory(directory, 0, &mut take).unwrap();
    let read = |(name, inode)| {
        let mut content = Vec::new();
        volume.read(inode, 0, 2 * LARGE_BYTES, &mut content).unwrap();
        (name, content)
    };
    names.into_iter().map(read).collect()
}

/// Changes all files in a random order, so that neighbours on the device are of different files.
fn change(volume: &Volume, directory: InodeId, random: &mut Seeded) {
    for _ in 0..2 * SMALL_FILES {
        let small = find(volume, directory, &name(random.below(SMALL_FILES)));
        let (at, length) = (random.below(5_000), 1 + random.below(9_000) as usize);
        volume.write(small, at, &bytes(random, length)).unwrap();
    }
    let large = find(volume, directory, b"large");
    for part in 0..2 {
        let at = part * LARGE_BYTES as u64 / 2 + random.below(100_000);
        volume.write(large, at, &bytes(random, LARGE_BYTES / 3)).unwrap();
        volume.sync().unwrap();
    }
    let pieces = find(volume, directory, b"pieces");
    for _ in 0..PIECES {
        let at = 2 * random.below(PIECES) * BLOCK as u64;
        volume.write(pieces, at, &bytes(random, BLOCK)).unwrap();
    }
    put(volume, directory, b"new", &bytes(random, 100_000));
}

#[test]
fn data_of_any_shape_arrives() {
    let seed = cairn_environment::random::u64();
    let seed = std::env::var("CAIRN_SEED").map_or(seed, |seed| seed.parse().unwrap());
    eprintln!("CAIRN_SEED={seed}");
    for is_in_memory in [true, false] {
        let mut random = Seeded::new(seed);
        let device = device();
        let mut volume = open(&device, None);
        let origin = volume.create_subvolume(volume.root(), b"origin", &DIRECTORY).unwrap().inode;
        for index in 0..SMALL_FILES {
            put(&volume, origin, &name(index), &bytes(&mut random, 3_000));
        }
        put(&volume, origin, b"large", &bytes(&mut random, LARGE_BYTES));
        put(&volume, origin, b"pieces", b"");
        let fork = volume.fork(origin, volume.root(), b"fork").unwrap().inode;
        change(&volume, fork, &mut random);
        let expected = content(&volume, fork);
        if !is_in_memory {
            volume.close().unwrap();
            volume = open(&device, None);
        }
        let [origin, fork] = roots(&volume);
        assert!(content(&volume, origin) != expected);
        if !is_in_memory {
            // Nor is it what was read just now.
            volume.close().unwrap();
            volume = open(&device, None);
        }
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
        assert!(content(&volume, origin) == expected);
        // Neither changes with the other.
        volume.write(find(&volume, origin, b"large"), 0, b"of the origin").unwrap();
        drop(volume);
        let volume = open(&device, None);
        let [origin, fork] = roots(&volume);
        assert!(content(&volume, origin) == expected);
        assert!(content(&volume, fork) == expected);
    }
}

/// Both sides wrote the same into holes of some terabytes, or not: nobody reads the holes.
#[test]
fn changes_in_a_huge_sparse_file_are_compared_without_its_holes() {
    const FAR: u64 = 1 << 52;
    for (their, last) in [(7, 8), (9, 8), (7, 9)] {
        let device = device();
        let volume = open(&device, None);
        let origin = volume.create_subvolume(volume.root(), b"origin", &DIRECTORY).unwrap().inode;
        put(&volume, origin, b"sparse", b"begin");
        let fork = volume.fork(origin, volume.root(), b"fork").unwrap().inode;
        for (side, [far, end]) in [(fork, [7, 8]), (origin, [their, last])] {
            let file = find(&volume, side, b"sparse");
            volume.write(file, FAR, &[far; BLOCK]).unwrap();
            volume.write(file, 2 * FAR - 1, &[end]).unwrap();
            let modified = Some(TimeChange::At(Timestamp::default()));
            let change = AttributeChange { modified, ..AttributeChange::default() };
            volume.set_attributes(file, &change).unwrap();
        }
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        let same = (their, last) == (7, 8);
        assert_eq!(matches!(applied, Apply::Done(_)), same, "{applied:?}");
    }
}

/// Changes a byte of the block that holds nothing but `fill`.
fn damage(device: &MemoryDevice, fill: u8) {
    let mut block = vec![0; BLOCK];
    let mut found = 0;
    for at in (0..device.length_bytes()).step_by(BLOCK) {
        device.read(at, &mut block).unwrap();
        if block.iter().all(|byte| *byte == fill) {
            block[100] ^= 1;
            device.write(at, &[&block]).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1);
}

#[test]
fn damage_among_neighbours_is_an_error_of_its_file() {
    const FILES: u64 = 40;
    let device = device();
    let volume = open(&device, None);
    let origin = volume.create_subvolume(volume.root(), b"origin", &DIRECTORY).unwrap().inode;
    for index in 0..FILES {
        put(&volume, origin, &name(index), b"old");
    }
    let fork = volume.fork(origin, volume.root(), b"fork").unwrap().inode;
    for index in 0..FILES {
        let file = find(&volume, fork, &name(index));
        volume.write(file, 0, &[100 + index as u8; BLOCK]).unwrap();
    }
    volume.close().unwrap();
    damage(&device, 117);
    let volume = open(&device, None);
    let [origin, fork] = roots(&volume);
    let before = used(&volume);
    let damaged = find(&volume, fork, &name(17));
    match volume.apply(fork, Winner::Neither) {
        Err(Error::DataChecksum { inode, file_block, .. }) => {
            assert_eq!((inode.number(), file_block.0), (damaged.number(), 0));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(used(&volume), before);
    assert!(content(&volume, origin).values().all(|content| content == b"old"));
    // When it is whole again, the rest comes with it.
    volume.write(damaged, 0, &[17; BLOCK]).unwrap();
    assert!(matches!(volume.apply(fork, Winner::Neither), Ok(Apply::Done(_))));
    assert!(content(&volume, origin) == content(&volume, fork));
}

/// Changes the leaf that `is_wanted` finds among those that hold the volume's newest state of them.
fn change_leaf(
    device: &MemoryDevice,
    superblock: &Superblock,
    is_wanted: impl Fn(&Node) -> bool,
    change: impl FnOnce(&mut Node),
) {
    let mut newest: Option<(u64, Node)> = None;
    for at in (0..device.length_bytes()).step_by(NODE_SIZE) {
        let mut page: Box<[u8; NODE_SIZE]> =
            vec![0; NODE_SIZE].into_boxed_slice().try_into().unwrap();
        device.read(at, &mut page[..]).unwrap();
        let address = BlockNumber(at / BLOCK as u64);
        let Ok(node) = Node::decode(page, superblock.volume, address) else { continue };
        let is_newer =
            newest.as_ref().is_none_or(|(_, known)| known.generation() < node.generation());
        if is_newer && node.level() == 0 && is_wanted(&node) {
            newest = Some((at, node));
        }
    }
    let (at, mut node) = newest.unwrap();
    change(&mut node);
    node.seal();
    device.write(at, &[&node.page()[..]]).unwrap();
}

/// Of a damaged volume, in which a directory of the fork has an extent.
#[test]
fn an_extent_of_a_directory_costs_no_space() {
    const FILE_BLOCKS: usize = 100;
    let device = device();
    let volume = open(&device, None);
    let origin = volume.create_subvolume(volume.root(), b"origin", &DIRECTORY).unwrap().inode;
    let fork = volume.fork(origin, volume.root(), b"fork").unwrap().inode;
    let directory = volume.create(fork, b"directory", &DIRECTORY).unwrap().inode.number();
    let file = put(&volume, fork, b"file", &[7; FILE_BLOCKS * BLOCK]).number();
    volume.close().unwrap();
    let extent_of = |inode| Key::new(inode, ItemKind::Extent, 0);
    let is_wanted = |node: &Node| {
        node.search(&extent_of(file)).is_ok()
            && node.search(&Key::new(directory, ItemKind::Inode, 0)).is_ok()
    };
    change_leaf(&device, volume.superblock(), is_wanted, |leaf| {
        let index = leaf.search(&extent_of(file)).unwrap();
        let extent = leaf.value(index).to_vec();
        assert_eq!(Extent::decode(&extent).unwrap().blocks, FILE_BLOCKS as u64);
        let index = leaf.search(&extent_of(directory)).unwrap_err();
        leaf.insert(index, extent_of(directory), &extent).unwrap();
    });
    drop(volume);
    let volume = open(&device, None);
    let [origin, fork] = roots(&volume);
    assert!(matches!(volume.apply(fork, Winner::Neither), Ok(Apply::Done(_))));
    let copied = find(&volume, origin, b"file");
    let mut content = Vec::new();
    volume.read(copied, 0, FILE_BLOCKS * BLOCK, &mut content).unwrap();
    assert!(content == [7; FILE_BLOCKS * BLOCK]);
    let inode = volume.attributes(find(&volume, origin, b"directory")).unwrap();
    assert_eq!(inode.blocks_512, 0);
    // What is in flight would be free after a mount.
    let before = used(&volume);
    volume.close().unwrap();
    drop(volume);
    assert_eq!(used(&open(&device, None)), before);
}
