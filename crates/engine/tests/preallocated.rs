//! Where data goes that is written into preallocated blocks: to its own blocks in order, next to
//! other files' data when it is small and comes in any order and there is plenty of space; and it
//! never lacks space. And what truncation and holes free behind the end; and whose times count.
use cairn_blockdev::SimulatedDevice;
use cairn_blockdev::simulated::Fate;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, Volume,
    VolumeOptions, WritePlace, WriteTimes, mkfs,
};
use cairn_format::BLOCK_SIZE;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const FILE_BLOCKS: u64 = 256;
const BLOCK: u64 = BLOCK_SIZE as u64;

fn open(device: Arc<SimulatedDevice>) -> Volume {
    let options =
        VolumeOptions { background: false, data_cache_bytes: 0, ..VolumeOptions::default() };
    Volume::open(device, options).unwrap()
}

fn new_volume() -> (Arc<SimulatedDevice>, Volume) {
    let device = Arc::new(SimulatedDevice::new(128 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(device.clone());
    (device, volume)
}

fn preallocated(volume: &Volume, index: usize) -> Result<InodeId, Error> {
    let file = volume.create(volume.root(), format!("file {index}").as_bytes(), &FILE)?.inode;
    volume.allocate(file, 0, FILE_BLOCKS * BLOCK, AllocateMode::Allocate { keep_size: false })?;
    Ok(file)
}

fn write(volume: &Volume, file: InodeId, block: u64, fill: u8) {
    volume.write(file, block * BLOCK, &[fill; BLOCK_SIZE]).unwrap();
}

/// After a power failure that loses all that no flush covered.
fn crashed(device: &SimulatedDevice) -> Volume {
    open(Arc::new(device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()])))
}

#[track_caller]
fn expect(volume: &Volume, index: usize, written: &[(u64, u8)]) {
    let file = volume.lookup(volume.root(), format!("file {index}").as_bytes()).unwrap().inode;
    let mut content = Vec::new();
    volume.read(file, 0, (FILE_BLOCKS * BLOCK) as u32 as usize, &mut content).unwrap();
    let mut expected = vec![0; (FILE_BLOCKS * BLOCK) as usize];
    for (block, fill) in written {
        expected[(block * BLOCK) as usize..][..BLOCK_SIZE].fill(*fill);
    }
    assert!(content == expected, "file {index}");
    assert_eq!(
        volume.attributes(file).unwrap().blocks_512,
        FILE_BLOCKS * BLOCK / 512,
        "file {index}"
    );
}

#[test]
fn small_writes_into_the_middle_of_many_files_are_one() {
    const FILES: usize = 40;
    let (device, volume) = new_volume();
    let files: Vec<_> = (0..FILES).map(|index| preallocated(&volume, index).unwrap()).collect();
    volume.commit().unwrap();
    let block = |index: usize| 1 + (index as u64 * 37) % (FILE_BLOCKS - 1);
    for (index, file) in files.iter().enumerate() {
        write(&volume, *file, block(index), index as u8 + 1);
    }
    let before = device.counters().writes;
    volume.sync().unwrap();
    let writes = device.counters().writes - before;
    assert!(writes < FILES as u64 / 2, "{writes} writes for {FILES} files");
    for volume in [crashed(&device), volume] {
        (0..FILES).for_each(|index| expect(&volume, index, &[(block(index), index as u8 + 1)]));
        volume.close().unwrap();
    }
}

#[test]
fn what_is_written_in_order_stays_in_one_piece() {
    let (device, volume) = new_volume();
    let files = [0, 1].map(|index| preallocated(&volume, index).unwrap());
    let written: Vec<(u64, u8)> = (0..48).map(|block| (block, block as u8 + 1)).collect();
    for (block, fill) in &written {
        for file in files {
            write(&volume, file, *block, *fill);
            volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        }
    }
    volume.commit().unwrap();
    volume.close().unwrap();
    let volume = open(device.clone());
    let before = device.counters().reads;
    let mut content = Vec::new();
    volume.read(files[0], 0, 48 * BLOCK_SIZE, &mut content).unwrap();
    let reads = device.counters().reads - before;
    assert!(reads < 10, "{reads} reads, nodes included");
    [0, 1].into_iter().for_each(|index| expect(&volume, index, &written));
    volume.close().unwrap();
}

/// A volume whose preallocated files have taken all space.
fn full_volume() -> (Arc<SimulatedDevice>, Volume, Vec<InodeId>) {
    let (device, volume) = new_volume();
    let mut files = Vec::new();
    loop {
        match preallocated(&volume, files.len()) {
            Ok(file) => files.push(file),
            Err(Error::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let last = volume.lookup(volume.root(), format!("file {}", files.len()).as_bytes());
    last.map(|_| volume.unlink(volume.root(), format!("file {}", files.len()).as_bytes()).unwrap())
        .unwrap();
    // What is left goes to a file of its own.
    let rest = volume.create(volume.root(), b"rest", &FILE).unwrap().inode;
    let mut at = 0;
    while volume.allocate(rest, at, BLOCK, AllocateMode::Allocate { keep_size: false }).is_ok() {
        at += BLOCK;
    }
    (device, volume, files)
}

#[test]
fn on_a_full_volume_they_find_their_own_blocks() {
    let (device, volume, files) = full_volume();
    let mut written = vec![Vec::new(); files.len()];
    for step in 0..600_u64 {
        let index = step as usize % files.len();
        let (block, fill) = ((step * 41 + 5) % FILE_BLOCKS, step as u8 | 1);
        write(&volume, files[index], block, fill);
        volume.fsync_blocking(files[index], FsyncKind::DataOnly).unwrap();
        written[index].push((block, fill));
    }
    for volume in [crashed(&device), volume] {
        written.iter().enumerate().for_each(|(index, written)| expect(&volume, index, written));
        volume.close().unwrap();
    }
}

/// Reclaim has nothing to free here: a write that asked it would cost a commit, which writes the
/// block, and the next write to the same block would find no room.
#[test]
fn on_a_full_volume_they_are_filled_byte_by_byte_without_a_commit() {
    let (device, volume, files) = full_volume();
    let commits = volume.statistics().commits;
    let length_bytes = 64 << 10;
    let content: Vec<u8> = (0..length_bytes).map(|index| (index / 7) as u8).collect();
    for file in &files[..4] {
        for (index, piece) in content.chunks(700).enumerate() {
            volume.write(*file, index as u64 * 700, piece).unwrap();
        }
    }
    assert_eq!(volume.statistics().commits, commits);
    volume.sync().unwrap();
    for index in 0..4 {
        let state = crashed(&device);
        let file = state.lookup(state.root(), format!("file {index}").as_bytes()).unwrap().inode;
        let mut found = Vec::new();
        state.read(file, 0, length_bytes, &mut found).unwrap();
        assert!(found == content, "file {index}");
        state.close().unwrap();
    }
    volume.close().unwrap();
}

#[test]
fn blocks_behind_the_end_go_when_the_length_is_set_again() {
    let (_device, volume) = new_volume();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    let blocks = || volume.attributes(file).unwrap().blocks_512 * 512 / BLOCK;
    let allocate = |offset, length| {
        volume.allocate(file, offset, length, AllocateMode::Allocate { keep_size: true }).unwrap()
    };
    allocate(0, 9 * BLOCK);
    assert_eq!((blocks(), volume.attributes(file).unwrap().size_bytes), (9, 0));
    let set_size = |size| {
        let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
        volume.set_attributes(file, &change).unwrap()
    };
    set_size(0);
    assert_eq!(blocks(), 0);
    // The last block stays, with its content.
    volume.write(file, 0, &[7; 5000]).unwrap();
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    allocate(0, 9 * BLOCK);
    assert_eq!(blocks(), 9);
    set_size(5000);
    assert_eq!(blocks(), 2);
    let mut content = Vec::new();
    volume.read(file, 0, 6000, &mut content).unwrap();
    assert_eq!(content, [7; 5000]);
}

#[test]
fn a_hole_up_to_the_end_frees_the_block_that_holds_it() {
    for synced in [false, true] {
        let (_device, volume) = new_volume();
        let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
        volume.write(file, 0, &[7; 3 * BLOCK_SIZE + 100]).unwrap();
        if synced {
            volume.fsync_blocking(file, FsyncKind::Full).unwrap();
        }
        let punch = |offset, length| {
            volume.allocate(file, offset, length, AllocateMode::PunchHole).unwrap();
            volume.attributes(file).unwrap().blocks_512 * 512 / BLOCK
        };
        // Up to one byte before the end, up to the end, and further, from a block before.
        assert_eq!(punch(3 * BLOCK, 99), 4);
        assert_eq!(punch(3 * BLOCK, 100), 3);
        volume.write(file, 3 * BLOCK, &[8; 100]).unwrap();
        assert_eq!(punch(2 * BLOCK - 1, BLOCK + 300), 2);
        let mut content = Vec::new();
        volume.read(file, 0, 4 * BLOCK_SIZE, &mut content).unwrap();
        let mut expected = vec![0; 3 * BLOCK_SIZE + 100];
        expected[..2 * BLOCK_SIZE - 1].fill(7);
        assert!(content == expected, "synced: {synced}");
    }
}

#[test]
fn times_stay_where_the_caller_keeps_them() {
    let (_device, volume) = new_volume();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    let other = volume.create(volume.root(), b"other", &FILE).unwrap().inode;
    volume.write(other, 0, &[9; 3 * BLOCK_SIZE]).unwrap();
    let times = || {
        let attributes = volume.attributes(file).unwrap();
        (attributes.modified, attributes.changed)
    };
    let keep = WriteTimes::Keep;
    let before = times();
    volume.write_with(file, WritePlace::At(0), &[7; 5000], keep).unwrap();
    volume.allocate_with(file, 0, BLOCK, AllocateMode::PunchHole, keep).unwrap();
    let allocate = AllocateMode::Allocate { keep_size: false };
    volume.allocate_with(file, 0, 9 * BLOCK, allocate, keep).unwrap();
    volume.copy_range_with((other, 0), (file, 0), BLOCK, keep).unwrap();
    volume.copy_cached((other, 0), (file, BLOCK), BLOCK, keep).unwrap().unwrap();
    let change = AttributeChange { size: Some(4500), times: Some(keep), ..Default::default() };
    volume.set_attributes(file, &change).unwrap();
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    assert_eq!(times(), before);
    let mut content = Vec::new();
    volume.read(file, 0, 5000, &mut content).unwrap();
    assert_eq!(content, [9; 4500]);
    volume.write(file, 0, b"now").unwrap();
    assert!(times().0 > before.0 && times().1 > before.1);
}
