//! Damage to two structures of a volume at once: every pair of nodes, bitmaps and superblocks; and
//! to each of them together with all bitmaps, so that nothing shows which versions are in use.
//!
//! Required of a repair: what stands in undamaged blocks is there again, or the report says that
//! something is lost; if it calls nothing lost, everything is there and nothing that had been
//! removed came back.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{AttributeChange, Error, FileType, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_format::Geometry;
use cairn_fsck::{CheckOptions, Losses, Report, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{create, format, read_all};
use cairn_torture::seed_from_environment;
use cairn_torture::snapshot::{FullPath, of_volume, show};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const GEOMETRY: Geometry =
    Geometry { total_blocks: VOLUME_BYTES / BLOCK, log_blocks: LOG_BYTES / BLOCK };

type Contents = BTreeMap<FullPath, Vec<u8>>;

fn open(device: &Arc<SimulatedDevice>) -> Result<Volume, Error> {
    Volume::open(
        device.clone() as Arc<dyn BlockDevice>,
        VolumeOptions { background: false, ..VolumeOptions::default() },
    )
}

/// A power failure before the superblock of a commit is durable: its nodes stay in free blocks, and
/// a later transaction takes its number.
fn unfinished_transaction(device: &Arc<SimulatedDevice>, random: &mut Seeded) {
    let before = device.snapshot();
    let volume = open(device).expect("it opens");
    for operation in 40..200 {
        if random.chance(1, 3) {
            let name = format!("file {operation}").into_bytes();
            volume.unlink(volume.root(), &name).expect("it exists");
        }
    }
    volume.commit().expect("it is healthy");
    drop(volume);
    for block in Geometry::SUPERBLOCKS.into_iter().chain([GEOMETRY.superblock_copy()]) {
        let mut superblock = vec![0; BLOCK as usize];
        before.read(block.0 * BLOCK, &mut superblock).expect("it is healthy");
        device.write(block.0 * BLOCK, &[&superblock]).expect("it is healthy");
    }
}

/// A volume with a tree of two levels, and older versions of its nodes in free blocks, that was
/// unmounted.
fn volume_with_a_past(random: &mut Seeded) -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device).expect("it opens");
    let name = |operation: u32| format!("file {operation}").into_bytes();
    for operation in 0..260 {
        let data = pattern(Tag { client: 0, operation }, 0, random.below(6000));
        let file = create(&volume, &name(operation), &data).expect("space");
        volume.forget(file, 1);
        if operation % 40 == 0 {
            volume.sync().expect("it is healthy");
            volume.commit().expect("it is healthy");
        }
    }
    volume.commit().expect("it is healthy");
    // The last inodes among them: their leaves go out of use.
    for operation in (0..40).chain(200..260) {
        volume.unlink(volume.root(), &name(operation)).expect("it exists");
    }
    for operation in (40..200).step_by(37) {
        change(&volume, operation);
    }
    volume.close().expect("it closes");
    device
}

/// Changes one file, in a transaction of its own.
fn change(volume: &Volume, operation: u32) {
    let name = format!("file {operation}").into_bytes();
    let file = volume.lookup(volume.root(), &name).expect("it exists").inode;
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    volume.set_attributes(file, &mode).expect("space");
    volume.forget(file, 1);
    volume.commit().expect("it is healthy");
}

fn walk(device: &Arc<SimulatedDevice>, what: &str) -> Contents {
    let volume =
        open(device).unwrap_or_else(|error| panic!("{what}: it can't be mounted: {error}"));
    let mut contents = Contents::new();
    for (path, (facts, inode)) in
        &of_volume(&volume, 9).unwrap_or_else(|error| panic!("{what}: {error}")).names
    {
        if facts.file_type == FileType::Regular as u8 {
            let bytes = read_all(&volume, *inode)
                .unwrap_or_else(|error| panic!("{what}: {}: {error}", show(path)));
            contents.insert(path.clone(), bytes);
        }
    }
    volume.close().unwrap_or_else(|error| panic!("{what}: {error}"));
    contents
}

fn fsck(device: &SimulatedDevice, repair: bool) -> Report {
    check(device, &CheckOptions { data: true, repair }, &mut |_| {}).expect("a superblock is left")
}

fn damage(device: &SimulatedDevice, block: u64, random: &mut Seeded) {
    let bytes: Vec<u8> = (0..BLOCK).map(|_| random.below(256) as u8).collect();
    device.write(block * BLOCK, &[&bytes]).expect("it is healthy");
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Superblock,
    Bitmap,
    /// The node that leads to the trees.
    Root,
    /// A node of a tree that leads to others.
    Inner,
    Leaf,
}

/// The blocks in use that hold the volume together; of a node one of its four.
fn structures(device: &SimulatedDevice) -> Vec<(u64, Kind)> {
    let superblocks = Geometry::SUPERBLOCKS
        .into_iter()
        .chain([GEOMETRY.superblock_copy()])
        .map(|block| (block.0, Kind::Superblock));
    let bitmaps = (0..2).map(|slot| (GEOMETRY.bitmap_block(0, slot).0, Kind::Bitmap));
    let nodes =
        (GEOMETRY.data_start().0..GEOMETRY.superblock_copy().0).step_by(4).filter_map(|block| {
            let mut node = vec![0; BLOCK as usize];
            device.read(block * BLOCK, &mut node).expect("it is healthy");
            if !node.starts_with(b"CRNN") {
                return None;
            }
            let copy = device.snapshot();
            copy.corrupt(block * BLOCK + 300, 1, 1);
            let kind = match (node[48], node[62]) {
                (1, _) => Kind::Root,
                (_, 0) => Kind::Leaf,
                _ => Kind::Inner,
            };
            (fsck(&copy, false).errors > 0).then_some((block + u64::from(kind != Kind::Leaf), kind))
        });
    superblocks.chain(bitmaps).chain(nodes).collect()
}

#[test]
fn two_damaged_structures() {
    let mut random = Seeded::new(seed_from_environment());
    let device = volume_with_a_past(&mut random);
    let expected = walk(&Arc::new(device.snapshot()), "undamaged");
    assert_eq!(expected.len(), 160);
    let structures = structures(&device);
    let count = |kind| structures.iter().filter(|(_, of)| *of == kind).count();
    let inner = count(Kind::Root) + count(Kind::Inner);
    assert!(inner >= 2 && count(Kind::Leaf) >= 3, "{structures:?}");
    // What is left with one of the structures damaged is left, too, of both, if the other one
    // leaves it.
    let contents_of = |found: &Contents| {
        found.values().filter(|bytes| bytes.len() > 64).cloned().collect::<BTreeSet<_>>()
    };
    let alone: BTreeMap<u64, BTreeSet<Vec<u8>>> = structures
        .iter()
        .map(|&(block, kind)| {
            let state = Arc::new(device.snapshot());
            damage(&state, block, &mut random);
            fsck(&state, true);
            (block, contents_of(&walk(&state, &format!("{kind:?} at {block}"))))
        })
        .collect();
    let (mut lost, mut whole) = (0, 0);
    for (index, &(one, of_one)) in structures.iter().enumerate() {
        for &(other, of_other) in &structures[index..] {
            let what = format!("{of_one:?} at {one} and {of_other:?} at {other}");
            let state = Arc::new(device.snapshot());
            damage(&state, one, &mut random);
            damage(&state, other, &mut random);
            let report = fsck(&state, true);
            assert_eq!(report.errors, 0, "{what}: {report}");
            let found = walk(&state, &what);
            let missing: Vec<&FullPath> = expected
                .iter()
                .filter(|(path, bytes)| found.get(*path) != Some(bytes))
                .map(|(path, _)| path)
                .collect();
            let told = report.losses != Losses::default();
            assert!(
                missing.is_empty() || told,
                "{what}: {} is gone, and nobody says so: {report}",
                show(missing[0])
            );
            let back: Vec<&FullPath> =
                found.keys().filter(|path| !expected.contains_key(*path)).collect();
            assert!(
                back.is_empty() || told,
                "{what}: {} is back, or has lost its name: {report}",
                show(back[0])
            );
            assert!(found.len() <= expected.len(), "{what}: {} files: {report}", found.len());
            // Two superblocks must be left to show which one is the newest.
            let superblocks =
                of_one == Kind::Superblock && of_other == Kind::Superblock && one != other;
            if superblocks {
                // A crash leaves the copy or the newest slot: without the copy, the slot that is
                // damaged may have been the newest.
                let copy = GEOMETRY.superblock_copy().0;
                let may_be_older = one == copy || other == copy;
                assert_eq!(told, may_be_older, "{what}: {report}");
                assert!(told || found == expected, "{what}: {report}");
            } else if of_one != Kind::Leaf && of_other != Kind::Leaf {
                assert!(!told, "{what}: all leaves are whole: {report}");
            }
            let (contents, left) = (contents_of(&found), &alone[&one] & &alone[&other]);
            assert!(
                superblocks || left.is_subset(&contents),
                "{what}: less is left than of each alone: {report}"
            );
            let after = fsck(&state, false);
            assert_eq!(after.errors, 0, "{what}: repaired, but: {after}");
            *if told { &mut lost } else { &mut whole } += 1;
        }
    }
    eprintln!("{structures:?}");
    eprintln!("{whole} pairs without a loss, {lost} with one that was told");
    assert!(lost > 10 && whole > 10);
}

/// Of an unfinished transaction, leaves are left that look newer than those in use.
#[test]
fn a_damaged_structure_and_no_bitmap() {
    let mut random = Seeded::new(seed_from_environment());
    let device = volume_with_a_past(&mut random);
    unfinished_transaction(&device, &mut random);
    let volume = open(&device).expect("it opens");
    change(&volume, 41);
    volume.close().expect("it closes");
    let expected = walk(&Arc::new(device.snapshot()), "undamaged");
    assert_eq!(expected.len(), 160);
    for (block, kind) in structures(&device) {
        let what = format!("{kind:?} at {block}, and all bitmaps");
        let state = Arc::new(device.snapshot());
        for slot in 0..2 {
            damage(&state, GEOMETRY.bitmap_block(0, slot).0, &mut random);
        }
        damage(&state, block, &mut random);
        let report = fsck(&state, true);
        assert_eq!(report.errors, 0, "{what}: {report}");
        let found = walk(&state, &what);
        let told = report.losses != Losses::default();
        assert!(told || found == expected, "{what}: nobody says what is gone: {report}");
        // Where the tree is whole, the superblock's count of used blocks shows which one it is.
        let is_whole = !matches!(kind, Kind::Inner | Kind::Leaf);
        assert!(!is_whole || !told, "{what}: the tree is whole: {report}");
        let after = fsck(&state, false);
        assert_eq!(after.errors, 0, "{what}: repaired, but: {after}");
    }
}
