//! Power failures inside mkfs and inside a repair: between every two device operations, with all sets of surviving writes.
use cairn_blockdev::simulated::{CrashExplorer, Fate};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{Error, Volume, VolumeOptions};
use cairn_environment::random::Seeded;
use cairn_format::{BlockNumber, Geometry};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, format};
use cairn_torture::found::Found;
use cairn_torture::survivors::{describe, sets, tears};
use std::collections::BTreeSet;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, Error> {
    let options = VolumeOptions { background: false, read_only, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options)
}

/// A closed volume with some files.
fn used() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device, false).expect("it opens");
    for number in 0..8 {
        let file = create(&volume, format!("file {number}").as_bytes(), &vec![number; 9000]).expect("space");
        volume.forget(file, 1);
    }
    volume.sync().expect("it is healthy");
    volume.close().expect("it closes");
    Arc::new(device.snapshot())
}

/// What a volume holds, in a form that can be compared.
fn holds(device: &Arc<SimulatedDevice>) -> Result<String, Error> {
    let volume = open(device, true)?;
    let found = Found::read(&volume).unwrap_or_else(|error| panic!("{error}"));
    Ok(format!("{:?} {:?}", found.names.names, found.objects.values().map(|object| &object.bytes).collect::<Vec<_>>()))
}

/// Repairs; the exit code of fsck.
fn repair(device: &SimulatedDevice) -> Result<u8, String> {
    let report = check(device, &CheckOptions { data: true, repair: true }, &mut |_| {}).map_err(|error| error.to_string())?;
    device.flush().map_err(|error| error.to_string())?;
    Ok(report.exit_code())
}

/// Calls `visit` with every state that a power failure may leave; how many there are.
fn every_state(device: &SimulatedDevice, visit: &mut dyn FnMut(Arc<SimulatedDevice>) -> Result<(), String>) -> u64 {
    let mut explorer = device.explorer();
    let mut random = Seeded::new(3);
    let (mut seen, mut states) = (BTreeSet::new(), 0);
    loop {
        let unflushed = explorer.unflushed();
        let mut state = |explorer: &CrashExplorer, fates: &[Fate]| {
            let state = explorer.state_with(|_| fates.to_vec());
            states += 1;
            if !seen.insert(explorer.fingerprint(&state)) {
                return Ok(());
            }
            visit(Arc::new(state)).map_err(|error| format!("after {} events;{}\n{error}", explorer.position(), describe(&unflushed, fates)))
        };
        let mut result = sets(unflushed.len(), &mut random, &mut |fates| state(&explorer, fates));
        for torn in 0..unflushed.len() {
            result = result.and_then(|()| tears(&unflushed, torn, &mut Seeded::new(4), &mut |fates| state(&explorer, fates)));
        }
        result.unwrap_or_else(|error: String| panic!("{error}"));
        if !explorer.advance() {
            return states;
        }
    }
}

/// After an interrupted mkfs there is no volume, the old one with all its files, or the new one: never half of one.
#[test]
fn an_interrupted_mkfs_leaves_no_volume_or_a_whole_one() {
    let device = used();
    let old = holds(&device).expect("it is healthy");
    device.start_recording();
    format(&*device, LOG_BYTES).expect("a new volume");
    let new = holds(&device).expect("it is healthy");
    let (mut none, mut olds, mut news) = (0, 0, 0);
    let states = every_state(&device, &mut |state| {
        match holds(&state) {
            Err(Error::NotAVolume(_)) => none += 1,
            Err(error) => return Err(format!("neither a volume nor none: {error}")),
            Ok(found) => {
                // Superblocks that mkfs has cleared, or not written yet, are made anew from the one that counts.
                if repair(&state)? > 1 {
                    return Err("a repair leaves errors".into());
                }
                expect_clean(&*state)?;
                match () {
                    () if found == old => olds += 1,
                    () if found == new => news += 1,
                    () => return Err(format!("a volume that is neither the old nor the new one: {found}")),
                }
            }
        }
        Ok(())
    });
    eprintln!("{states} states: {none} times no volume, {olds} times the old one, {news} times the new one");
    assert!(none > 0 && olds > 0 && news > 0);
}

/// Whatever an interrupted repair leaves, the next one mends, and no file is worse.
#[test]
fn an_interrupted_repair_is_repaired_by_the_next() {
    let device = used();
    let before = holds(&device).expect("it is healthy");
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    let mut damaged: Vec<BlockNumber> = (0..2).map(|slot| geometry.bitmap_block(0, slot)).collect();
    damaged.extend([Geometry::SUPERBLOCKS[0], geometry.superblock_copy()]);
    let device = Arc::new(device.snapshot());
    for block in damaged {
        device.corrupt(block.offset_bytes() + 100, 40, 0x5A);
    }
    let device = Arc::new(device.snapshot());
    device.start_recording();
    assert_eq!(repair(&device), Ok(1), "there was something to repair");
    let states = every_state(&device, &mut |state| {
        let code = repair(&state)?;
        if code > 1 {
            return Err(format!("the second repair ends with {code}"));
        }
        expect_clean(&*state)?;
        let found = holds(&state).map_err(|error| error.to_string())?;
        if found == before { Ok(()) } else { Err(format!("the files differ: {found}")) }
    });
    assert!(states > 10, "{states} states");
}
