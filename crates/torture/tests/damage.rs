//! Damaged blocks, and reads that fail: an error that says where, never wrong bytes, never a panic;
//! and fsck finds what the engine stumbles over.
use cairn_blockdev::{BlockDevice, DeviceError, Operation, SimulatedDevice};
use cairn_engine::{AttributeChange, Error, FsyncKind, Volume, VolumeOptions, XattrMode};
use cairn_environment::random::Seeded;
use cairn_format::{BlockNumber, Geometry};
use cairn_fsck::{CheckOptions, Report, Severity, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::files::{NEW_FILE, create, format, read_all};
use cairn_torture::seed_from_environment;
use cairn_torture::snapshot::{FullPath, of_volume, show};
use std::collections::BTreeMap;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 24 << 20;
const LOG_BYTES: u64 = 1 << 20;

fn options() -> VolumeOptions {
    VolumeOptions { background: false, ..VolumeOptions::default() }
}

fn open(device: &Arc<SimulatedDevice>) -> Result<Volume, Error> {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options())
}

/// A closed volume with a tree of two levels and some of everything.
fn populated(random: &mut Seeded) -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device).expect("it opens");
    for operation in 0..120 {
        let data = pattern(Tag { client: 0, operation }, 0, random.below(40_000));
        let file = create(&volume, format!("file {operation}").as_bytes(), &data).expect("space");
        if operation % 5 == 0 {
            let value = pattern(Tag { client: 1, operation }, 0, random.below(9000));
            volume.set_xattr(file, b"user.test", &value, XattrMode::Any).expect("space");
        }
        volume.forget(file, 1);
        if operation % 50 == 0 {
            volume.commit().expect("it is healthy");
        }
    }
    volume.close().expect("it closes");
    device
}

/// What a walk through everything finds: per name, what it is and its contents.
#[derive(PartialEq, Eq)]
struct Everything {
    digest: u64,
    contents: BTreeMap<FullPath, Vec<u8>>,
}

/// Reads everything that can be read; errors on the way, by name.
fn walk(volume: &Volume) -> Result<(Everything, Vec<(FullPath, Error)>), Error> {
    let names = of_volume(volume, 9)?;
    let (mut contents, mut errors) = (BTreeMap::new(), Vec::new());
    for (path, (facts, inode)) in &names.names {
        if facts.file_type == cairn_engine::FileType::Regular as u8 {
            match read_all(volume, *inode) {
                Ok(bytes) => drop(contents.insert(path.clone(), bytes)),
                Err(error) => errors.push((path.clone(), error)),
            }
        }
    }
    Ok((Everything { digest: names.digest, contents }, errors))
}

fn fsck(device: &SimulatedDevice) -> Option<Report> {
    check(device, &CheckOptions { data: true, repair: false }, &mut |_| {}).ok()
}

/// Uses a volume that may be damaged; whether anything went wrong. Wrong bytes are never all right.
fn stumbles(device: &Arc<SimulatedDevice>, expected: &Everything, what: &str) -> bool {
    let volume = match open(device) {
        Ok(volume) => volume,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return true;
        }
    };
    let stumbled = match walk(&volume) {
        Err(_) => true,
        Ok((found, errors)) => {
            assert!(found.digest == expected.digest, "{what}: the namespace changed silently");
            for (path, bytes) in &found.contents {
                assert!(
                    *bytes == expected.contents[path],
                    "{what}: {} has other contents",
                    show(path)
                );
            }
            for (path, error) in &errors {
                assert!(
                    names_a_place(error),
                    "{what}: {}: the error does not say where: {error}",
                    show(path)
                );
            }
            !errors.is_empty()
        }
    };
    // Changes may fail, but nothing may panic.
    let changed = volume.create(volume.root(), b"new", &NEW_FILE).and_then(|new| {
        volume.write(new.inode, 0, &[1; 5000])?;
        volume.fsync_blocking(new.inode, FsyncKind::Full)?;
        volume.unlink(volume.root(), b"file 7")
    });
    let closed = volume.close();
    stumbled || changed.is_err() || closed.is_err()
}

fn names_a_place(error: &Error) -> bool {
    match error {
        Error::DataChecksum { .. } | Error::Device(DeviceError { .. }) => {
            error.to_string().chars().any(|c| c.is_ascii_digit())
        }
        Error::Damaged(problem) => problem.to_string().chars().any(|c| c.is_ascii_digit()),
        _ => false,
    }
}

fn everything_of(device: &SimulatedDevice) -> Everything {
    let volume = open(&Arc::new(device.snapshot())).expect("it is healthy");
    let (everything, errors) = walk(&volume).expect("it is healthy");
    assert!(errors.is_empty() && everything.contents.len() == 120);
    everything
}

/// Blocks of the volume that hold anything, the log left out.
fn used_blocks(device: &SimulatedDevice) -> Vec<u64> {
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    let holds_something = |block: &u64| {
        let mut bytes = vec![0; 4096];
        device.read(block * 4096, &mut bytes).expect("it is healthy");
        bytes.iter().any(|&byte| byte != 0)
    };
    (0..geometry.total_blocks)
        .filter(|block| !geometry.log().range().contains(block))
        .filter(holds_something)
        .collect()
}

#[test]
fn one_damaged_byte_in_any_block() {
    let mut random = Seeded::new(seed_from_environment());
    let device = populated(&mut random);
    let expected = everything_of(&device);
    let (mut stumbled, mut found) = (0, 0);
    let blocks = used_blocks(&device);
    for block in &blocks {
        if random.chance(1, 2) {
            continue;
        }
        let within = if random.chance(1, 2) { 64 } else { 4096 };
        let offset = block * 4096 + random.below(within);
        let pattern = 1 << random.below(8);
        let what = format!("byte {} of block {block} changed by {pattern:#x}", offset % 4096);
        let damaged = Arc::new(device.snapshot());
        damaged.corrupt(offset, 1, pattern);
        let report = fsck(&damaged);
        let errors = report.as_ref().is_none_or(|report| {
            report.findings.iter().any(|finding| finding.severity == Severity::Error)
        });
        let stumbles = stumbles(&damaged, &expected, &what);
        assert!(!stumbles || errors, "{what}: the engine fails, fsck is content");
        stumbled += u32::from(stumbles);
        found += u32::from(errors);
    }
    eprintln!(
        "{} blocks in use; the engine failed {stumbled} times, fsck found errors {found} times",
        blocks.len()
    );
    assert!(stumbled > 100, "only {stumbled} damaged blocks were noticed");
}

#[test]
fn each_superblock_alone_is_enough() {
    let mut random = Seeded::new(seed_from_environment());
    let device = populated(&mut random);
    let expected = everything_of(&device);
    let last = BlockNumber(VOLUME_BYTES / 4096 - 1);
    let places = [Geometry::SUPERBLOCKS[0], Geometry::SUPERBLOCKS[1], last];
    for damaged_place in places {
        let state = Arc::new(device.snapshot());
        state.corrupt(damaged_place.offset_bytes(), 512, 0x5A);
        let report = fsck(&state).expect("two superblocks are left");
        assert!(
            report.findings.iter().any(|finding| finding.block == Some(damaged_place.0)),
            "fsck overlooks {damaged_place}"
        );
        let what = format!("superblock {damaged_place} damaged");
        assert!(!stumbles(&state, &expected, &what), "{what}: the others should do");
    }
    let state = Arc::new(device.snapshot());
    places.iter().for_each(|place| state.corrupt(place.offset_bytes(), 512, 0x5A));
    assert!(matches!(open(&state), Err(Error::NotAVolume(_))));
}

/// The older bitmap of a group calls free what was used since: writing with it would overwrite
/// files.
#[test]
fn an_old_bitmap_does_not_stand_in_for_a_damaged_one() {
    let device = populated(&mut Seeded::new(seed_from_environment()));
    let expected = everything_of(&device);
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    let mut refused = 0;
    for slot in 0..2 {
        let block = geometry.bitmap_block(0, slot);
        let state = Arc::new(device.snapshot());
        state.corrupt(block.offset_bytes() + 200, 1, 0x10);
        let Err(error) = open(&state) else { continue };
        refused += 1;
        assert!(
            matches!(error, Error::Damaged(_)) && error.to_string().contains(&block.to_string()),
            "{error}"
        );
        let reader = Volume::open(
            state.clone() as Arc<dyn BlockDevice>,
            VolumeOptions { read_only: true, ..options() },
        );
        let (found, errors) =
            walk(&reader.expect("nothing is allocated by a reader")).expect("the trees are whole");
        assert!(found == expected && errors.is_empty());
        let repaired = check(&*state, &CheckOptions { data: true, repair: true }, &mut |_| {})
            .expect("it can be read");
        assert_eq!(repaired.errors, 0);
        assert!(!stumbles(&state, &expected, "a repaired bitmap"));
    }
    assert_eq!(refused, 1, "one of the two is in use");
}

/// Both bitmaps of the group have equally many bits set: only their generations differ.
#[test]
fn an_old_bitmap_with_the_same_sum_is_noticed_too() {
    let device = populated(&mut Seeded::new(seed_from_environment()));
    let volume = open(&device).expect("it is whole");
    let mode = AttributeChange { mode: Some(0o750), ..AttributeChange::default() };
    // Each commit copies the same nodes: as many blocks come as go.
    for _ in 0..3 {
        volume.set_attributes(volume.root(), &mode).expect("there is space");
        volume.commit().expect("it is healthy");
    }
    drop(volume);
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    let bits_set = |slot: usize| {
        let mut block = vec![0; 4096];
        device
            .read(geometry.bitmap_block(0, slot).offset_bytes(), &mut block)
            .expect("it is healthy");
        block[64..64 + 2048].iter().map(|byte| byte.count_ones()).sum::<u32>()
    };
    assert_eq!(bits_set(0), bits_set(1));
    let refused = (0..2).filter(|&slot| {
        let state = Arc::new(device.snapshot());
        state.corrupt(geometry.bitmap_block(0, slot).offset_bytes() + 200, 1, 0x10);
        open(&state).is_err()
    });
    assert_eq!(refused.count(), 1, "one of the two is in use");
}

/// When all superblocks are put back, none of the bitmaps is old enough.
#[test]
fn an_old_superblock_before_new_bitmaps_is_refused_with_the_reason() {
    let device = populated(&mut Seeded::new(seed_from_environment()));
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    let superblocks = [16, 32, geometry.superblock_copy().0];
    let old = superblocks.map(|block| {
        let mut bytes = vec![0; 4096];
        device.read(block * 4096, &mut bytes).expect("it is healthy");
        bytes
    });
    let volume = open(&device).expect("it opens");
    for name in [&b"one"[..], b"two", b"three"] {
        volume.forget(create(&volume, name, &[1; 8192]).expect("space"), 1);
        volume.commit().expect("it is healthy");
    }
    drop(volume);
    for (block, bytes) in superblocks.into_iter().zip(&old) {
        device.write(block * 4096, &[bytes]).expect("it is healthy");
    }
    let Err(error) = open(&device) else { panic!("it opens without a bitmap") };
    assert!(error.to_string().contains("is newer than the superblock's"), "{error}");
    let report = fsck(&device).expect("it is a volume");
    assert!(report.errors > 0, "{report}");
}

#[test]
fn garbage_is_not_a_volume() {
    let mut random = Seeded::new(seed_from_environment());
    for size in [0, 4096, 1 << 20, 16 << 20] {
        let device = Arc::new(SimulatedDevice::new(size));
        for _ in 0..if size == 0 { 0 } else { 200 } {
            let block: Vec<u8> = (0..512).flat_map(|_| random.next_u64().to_le_bytes()).collect();
            device.write(random.below(size / 4096) * 4096, &[&block]).expect("it is healthy");
        }
        assert!(matches!(open(&device), Err(Error::NotAVolume(_))), "{size} bytes of garbage");
        assert!(fsck(&device).is_none());
    }
}

#[test]
fn a_truncated_image_is_refused() {
    let device = populated(&mut Seeded::new(3));
    let shorter = Arc::new(SimulatedDevice::new(VOLUME_BYTES - (4 << 20)));
    let mut bytes = vec![0; shorter.length_bytes() as usize];
    device.read(0, &mut bytes).expect("it is healthy");
    shorter.write(0, &[&bytes]).expect("it is healthy");
    let Err(error) = open(&shorter) else { panic!("a volume without its end opens") };
    assert!(error.to_string().contains("truncated"), "{error}");
}

#[test]
fn reads_that_fail_are_errors_and_go_away_with_their_cause() {
    let mut random = Seeded::new(seed_from_environment());
    let device = populated(&mut random);
    let expected = everything_of(&device);
    for round in 0..60 {
        let state = Arc::new(device.snapshot());
        let mut left = random.below(80);
        let (count, what) = (1 + random.below(30), format!("round {round}"));
        let mut failing = count;
        state.fail_when(move |request| {
            if request.operation != Operation::Read {
                return false;
            }
            left = left.saturating_sub(1);
            let fails = left == 0 && failing > 0;
            failing -= u64::from(fails);
            fails
        });
        // Nothing on the device is damaged: after the failures everything can be read.
        if let Ok(volume) = open(&state) {
            if let Ok((found, errors)) = walk(&volume) {
                assert!(found.digest == expected.digest, "{what}: the namespace changed silently");
                assert!(errors.iter().all(|(_, error)| names_a_place(error)), "{what}");
            }
            state.clear_failures();
            let (found, errors) =
                walk(&volume).unwrap_or_else(|error| panic!("{what}: the failure stays: {error}"));
            assert!(errors.is_empty() && found == expected, "{what}: the failure left traces");
            volume.close().unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        state.clear_failures();
        let volume = open(&state).unwrap_or_else(|error| panic!("{what}: {error}"));
        volume.close().unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}
