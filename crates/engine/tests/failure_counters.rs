//! What fails on a device is counted, with the file that it belongs to.
use cairn_blockdev::composed::{Access, Candidate, ComposedKind, Concat, Mirror, make};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{
    Failure, Failures, FileType, FsyncKind, InodeId, NewInode, Statistics, Volume, VolumeOptions,
    mkfs,
};
use cairn_format::BLOCK_SIZE;
use std::sync::Arc;

const BLOCKS: usize = 768;

type Disk = Arc<SimulatedDevice>;

fn new(file_type: FileType) -> NewInode<'static> {
    NewInode { file_type, mode: 0o755, uid: 0, gid: 0, device: 0, target: None }
}

fn options() -> VolumeOptions {
    // Without a cache of data: what is read is what the device has.
    VolumeOptions { background: false, data_cache_bytes: 0, ..VolumeOptions::default() }
}

/// Each block is another one.
fn content() -> Vec<u8> {
    (0..BLOCKS)
        .flat_map(|block| [(block as u32).to_le_bytes(), *b"mine"].concat().repeat(BLOCK_SIZE / 8))
        .collect()
}

/// A volume with the file /folder/file of [`BLOCKS`] blocks, closed; its inode.
fn make_volume(device: &Arc<dyn BlockDevice>) -> InodeId {
    mkfs::mkfs(&**device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device.clone(), options()).unwrap();
    let folder = volume.create(volume.root(), b"folder", &new(FileType::Directory)).unwrap().inode;
    let file = volume.create(folder, b"file", &new(FileType::Regular)).unwrap().inode;
    volume.write(file, 0, &content()).unwrap();
    volume.close().unwrap();
    file
}

/// Where each block of the file lies on `disk`.
fn places_of(disk: &SimulatedDevice) -> Vec<u64> {
    let (content, mut block) = (content(), vec![0; BLOCK_SIZE]);
    let mut places = vec![0; BLOCKS];
    for at in (0..disk.length_bytes()).step_by(BLOCK_SIZE) {
        disk.read(at, &mut block).unwrap();
        let number = u32::from_le_bytes(block[..4].try_into().unwrap()) as usize;
        if number < BLOCKS && block == content[number * BLOCK_SIZE..][..BLOCK_SIZE] {
            places[number] = at;
        }
    }
    assert!(places.iter().all(|&at| at > 0), "all blocks are on the disk");
    places
}

fn read(volume: &Volume, file: InodeId) -> Result<Vec<u8>, cairn_engine::Error> {
    let mut bytes = Vec::new();
    volume.read(file, 0, BLOCKS * BLOCK_SIZE, &mut bytes).map(|()| bytes)
}

fn counts(failures: &Failures) -> [u64; 4] {
    [
        failures.read_errors,
        failures.checksum_errors,
        failures.write_errors,
        failures.repaired_blocks,
    ]
}

#[track_caller]
fn expect(failure: &Option<Failure>, kind: &str, file: InodeId, path: &str) -> Failure {
    let failure = failure.clone().expect("there was a failure");
    assert_eq!(
        (&*failure.kind, failure.inode, failure.path.as_deref()),
        (kind, Some(file.0), Some(path)),
        "{failure:?}"
    );
    assert!(failure.time.ends_with('Z') && failure.time.len() == 20, "{failure:?}");
    failure
}

#[test]
fn a_checksum_error_is_counted_and_named() {
    let disk: Disk = Arc::new(SimulatedDevice::new(64 << 20));
    let device: Arc<dyn BlockDevice> = disk.clone();
    let file = make_volume(&device);
    let volume = Volume::open(device.clone(), options()).unwrap();
    assert_eq!(volume.statistics().failures, Failures::default());
    let all = places_of(&disk);
    let places = [all[5], all[700]];
    places.into_iter().for_each(|place| disk.corrupt(place + 100, 8, 0xFF));
    // Nobody has looked its name up.
    let mut bytes = Vec::new();
    assert!(volume.read(file, 5 * BLOCK_SIZE as u64, BLOCK_SIZE, &mut bytes).is_err());
    assert!(volume.read(file, 700 * BLOCK_SIZE as u64, BLOCK_SIZE, &mut bytes).is_err());
    let statistics = volume.statistics();
    assert_eq!((counts(&statistics.failures), statistics.failure), ([0, 2, 0, 0], None));
    let first = expect(&statistics.failures.first, "checksum error", file, "/folder/file");
    assert_eq!((first.block, first.file_block), (Some(places[0] / BLOCK_SIZE as u64), Some(5)));
    let last = expect(&statistics.failures.last, "checksum error", file, "/folder/file");
    assert_eq!((last.block, last.file_block), (Some(places[1] / BLOCK_SIZE as u64), Some(700)));
}

#[test]
fn a_name_is_found_where_it_has_moved() {
    let disk: Disk = Arc::new(SimulatedDevice::new(64 << 20));
    let device: Arc<dyn BlockDevice> = disk.clone();
    let file = make_volume(&device);
    let volume = Volume::open(device, options()).unwrap();
    let folder = volume.lookup(volume.root(), b"folder").unwrap().inode;
    volume.lookup(folder, b"file").unwrap();
    volume
        .rename(folder, b"file", volume.root(), b"moved", cairn_engine::RenameMode::Replace)
        .unwrap();
    disk.corrupt(places_of(&disk)[0], 1, 0xFF);
    read(&volume, file).unwrap_err();
    expect(&volume.statistics().failures.first, "checksum error", file, "/moved");
    // A file that has lost its name has none.
    let unnamed = volume.create(folder, b"gone", &new(FileType::Regular)).unwrap().inode;
    volume.write(unnamed, 0, &[1; 4 * BLOCK_SIZE]).unwrap();
    volume.unlink(folder, b"gone").unwrap();
    disk.fail_when(|request| request.operation == Operation::Write);
    volume.fsync_blocking(unnamed, FsyncKind::Full).unwrap_err();
    let last = volume.statistics().failures.last.unwrap();
    assert_eq!((&*last.kind, last.path), ("write error", None));
}

#[test]
fn failing_requests_are_counted_and_named() {
    let disk: Disk = Arc::new(SimulatedDevice::new(64 << 20));
    let device: Arc<dyn BlockDevice> = disk.clone();
    let file = make_volume(&device);
    let volume = Volume::open(device.clone(), options()).unwrap();
    let place = places_of(&disk)[7];
    disk.fail_range(Operation::Read, place..place + BLOCK_SIZE as u64);
    read(&volume, file).unwrap_err();
    let failures = volume.statistics().failures;
    assert_eq!(counts(&failures), [1, 0, 0, 0]);
    let problem = expect(&failures.first, "read error", file, "/folder/file").problem;
    assert!(problem.is_some_and(|problem| problem.contains("read of")));
    disk.clear_failures();

    // Data that goes with the group, and data that its own thread writes.
    let data = volume.superblock().geometry.allocatable();
    let data = data.start.offset_bytes()..data.end().offset_bytes();
    let mut before = 0;
    for blocks in [2, 200] {
        let range = data.clone();
        disk.fail_for_lack_of_space_when(move |request| {
            request.operation == Operation::Write && request.touches(&range)
        });
        let other = volume
            .create(volume.root(), format!("{blocks} blocks").as_bytes(), &new(FileType::Regular))
            .unwrap()
            .inode;
        volume.write(other, 0, &vec![1; blocks * BLOCK_SIZE]).unwrap();
        volume.fsync_blocking(other, FsyncKind::Full).unwrap_err();
        let statistics = volume.statistics();
        assert_eq!(statistics.failure, None, "the volume goes on");
        assert!(statistics.failures.write_errors > before, "{:?}", statistics.failures);
        before = statistics.failures.write_errors;
        expect(&statistics.failures.last, "write error", other, &format!("/{blocks} blocks"));
        disk.clear_failures();
        volume.fsync_blocking(other, FsyncKind::Full).unwrap();
        assert_eq!(volume.statistics().failures.write_errors, before);
    }
    expect(&volume.statistics().failures.first, "read error", file, "/folder/file");
    disk.fail_when(|request| request.operation == Operation::Flush);
    volume.write(file, 0, b"x").unwrap();
    volume.fsync_blocking(file, FsyncKind::Full).unwrap_err();
    let statistics = volume.statistics();
    assert!(
        statistics.failures.write_errors > before && statistics.failure.is_some(),
        "{statistics:?}"
    );
}

fn candidates(disks: &[Disk; 2]) -> Vec<Candidate> {
    let candidate =
        |(name, disk): (&str, &Disk)| Candidate { name: name.into(), device: Some(disk.clone()) };
    ["one", "two"].into_iter().zip(disks).map(candidate).collect()
}

fn disks(kind: ComposedKind) -> [Disk; 2] {
    let disks: [Disk; 2] = std::array::from_fn(|_| Arc::new(SimulatedDevice::new(64 << 20)));
    let named: Vec<(String, Arc<dyn BlockDevice>)> =
        disks.iter().map(|disk| ("disk".to_owned(), disk.clone() as _)).collect();
    make(kind, &named).unwrap();
    disks
}

/// Bad reads, checksum errors, write errors and rewritten blocks of each member.
fn members(statistics: &Statistics) -> Vec<[u64; 4]> {
    let members = &statistics.device.as_ref().unwrap().members;
    members
        .iter()
        .map(|member| {
            [member.bad_reads, member.checksum_errors, member.write_errors, member.rewritten_blocks]
        })
        .collect()
}

#[test]
fn what_a_mirror_reads_around_is_counted_by_member() {
    let disks = disks(ComposedKind::Mirror);
    let open = || {
        Arc::new(Mirror::open(candidates(&disks), Access::ReadWrite, false).unwrap())
            as Arc<dyn BlockDevice>
    };
    let file = make_volume(&open());
    let places = places_of(&disks[0]);
    places.iter().for_each(|&place| disks[0].corrupt(place, 4096, 0xA5));
    let volume = Volume::open(open(), options()).unwrap();
    assert_eq!(read(&volume, file).unwrap(), content());
    let statistics = volume.statistics();
    let rotten = BLOCKS as u64;
    assert_eq!(members(&statistics), [[0, rotten, 0, rotten], [0; 4]]);
    assert_eq!(counts(&statistics.failures), [0, rotten, 0, rotten]);
    let first = expect(&statistics.failures.first, "checksum error", file, "/folder/file");
    assert_eq!((first.member.as_deref(), first.file_block), (Some("one"), Some(0)));
    assert_eq!(read(&volume, file).unwrap(), content());
    assert_eq!(counts(&volume.statistics().failures), [0, rotten, 0, rotten], "it is mended");

    // Bad in both: nothing is repaired. A member that can't be written is left behind.
    disks.iter().for_each(|disk| disk.corrupt(places[3], 4096, 0x5A));
    read(&volume, file).unwrap_err();
    assert_eq!(members(&volume.statistics()), [[0, rotten + 1, 0, rotten], [0, 1, 0, 0]]);
    disks[1].fail_when(|request| request.operation == Operation::Write);
    volume.create(volume.root(), b"more", &new(FileType::Regular)).unwrap();
    volume.sync().unwrap();
    let statistics = volume.statistics();
    assert_eq!(members(&statistics)[1][2], 1);
    assert!(statistics.device.unwrap().degraded);
    assert_eq!(statistics.failures.last.unwrap().member.as_deref(), Some("two"));
}

#[test]
fn failures_of_a_concatenation_are_those_of_a_member() {
    let disks = disks(ComposedKind::Concat);
    let open = || {
        Arc::new(Concat::open(candidates(&disks), Access::ReadWrite).unwrap())
            as Arc<dyn BlockDevice>
    };
    let file = make_volume(&open());
    let place = places_of(&disks[0])[9];
    disks[0].corrupt(place, 1, 0xFF);
    let volume = Volume::open(open(), options()).unwrap();
    read(&volume, file).unwrap_err();
    disks[0].fail_range(Operation::Read, place..place + BLOCK_SIZE as u64);
    read(&volume, file).unwrap_err();
    let statistics = volume.statistics();
    assert_eq!(members(&statistics), [[1, 1, 0, 0], [0; 4]]);
    assert_eq!(counts(&statistics.failures), [1, 1, 0, 0]);
    let Failures { first, last, .. } = statistics.failures;
    let (first, last) = (
        expect(&first, "checksum error", file, "/folder/file"),
        expect(&last, "read error", file, "/folder/file"),
    );
    assert_eq!((first.member.as_deref(), first.file_block), (Some("one"), Some(9)));
    assert_eq!(last.member.as_deref(), Some("one"));
}

#[test]
fn a_damaged_node_is_counted() {
    let disk: Disk = Arc::new(SimulatedDevice::new(64 << 20));
    let device: Arc<dyn BlockDevice> = disk.clone();
    let volume = {
        make_volume(&device);
        let volume = Volume::open(device.clone(), options()).unwrap();
        for number in 0..3000 {
            volume
                .create(volume.root(), format!("name {number}").as_bytes(), &new(FileType::Regular))
                .unwrap();
        }
        volume.close().unwrap();
        Volume::open(device, VolumeOptions { read_only: true, ..options() }).unwrap()
    };
    let geometry = volume.superblock().geometry;
    // All that opening has not read.
    for block in geometry.allocatable().start.0..geometry.total_blocks - 1 {
        disk.corrupt(block * BLOCK_SIZE as u64, 4096, 0xFF);
    }
    let listed = volume.read_directory(volume.root(), 0, &mut |_| true);
    assert!(listed.is_err());
    let failures = volume.statistics().failures;
    assert!(
        failures.checksum_errors > 0 && failures.first.as_ref().unwrap().inode.is_none(),
        "{failures:?}"
    );
}
