//! A volume on a mirror: the power fails on both members, each losing what it likes; members rot,
//! and are lost.
//!
//! Everything acknowledged must be there after any of it, from both members and from each of them
//! alone. `CAIRN_SEED` repeats a run.
use cairn_blockdev::composed::{Access, Candidate, ComposedKind, Mirror, make};
use cairn_blockdev::simulated::{Fate, WriteInfo, random_fates};
use cairn_blockdev::{BlockDevice, DeviceError, Operation, SimulatedDevice, forward_to_device};
use cairn_engine::{FileType, FsyncKind, NewInode, Volume, VolumeOptions, mkfs};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_format::{Geometry, Superblock};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::files::mkfs_options;
use cairn_torture::found::Found;
use cairn_torture::second_reader;
use cairn_torture::survivors::{ALL_SETS_UP_TO, sets};
use cairn_torture::{number_from_environment, seed_from_environment};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };
const MEMBER_BYTES: u64 = 25 << 20;
const DATA_START_BYTES: u64 = 1 << 20;

type Disk = Arc<SimulatedDevice>;
/// Name of a file → the oldest version that it may have, and its length in blocks.
type Acknowledged = BTreeMap<String, (u8, usize)>;

/// How long each member's record is, and what was acknowledged then.
type Moment = ([usize; 2], Acknowledged);

/// What both members may look like after a power failure, and what must be there then.
struct CrashState {
    disks: [Disk; 2],
    acknowledged: Acknowledged,
}

/// Takes crash states of both members between any two requests of either.
struct Recorder {
    disks: [Disk; 2],
    acknowledged: Mutex<Acknowledged>,
    random: Mutex<Seeded>,
    states: Mutex<Vec<CrashState>>,
    /// Instead of states, all moments between any two requests.
    moments: Option<Mutex<Vec<Moment>>>,
}

impl Recorder {
    fn new(disks: [Disk; 2], seed: u64) -> Arc<Self> {
        Arc::new(Self {
            disks,
            acknowledged: Mutex::new(Rank::LEAF, BTreeMap::new()),
            random: Mutex::new(Rank::LEAF, Seeded::new(seed)),
            states: Mutex::new(Rank::LEAF, Vec::new()),
            moments: None,
        })
    }

    /// Notes where the members' records are, from now on.
    fn of_moments(disks: [Disk; 2]) -> Arc<Self> {
        disks.iter().for_each(|disk| disk.start_recording());
        let mut recorder = Self::new(disks, 0);
        Arc::get_mut(&mut recorder).expect("nobody else has it").moments =
            Some(Mutex::new(Rank::LEAF, Vec::new()));
        recorder
    }

    fn perhaps_crash(&self) {
        if let Some(moments) = &self.moments {
            let acknowledged = self.acknowledged.lock().clone();
            let at = [0, 1].map(|disk: usize| self.disks[disk].history_len());
            return moments.lock().push((at, acknowledged));
        }
        let mut random = self.random.lock().clone();
        let wanted = random.chance(1, 6);
        // What was acknowledged is taken first: the members may only get more durable meanwhile.
        let acknowledged = if wanted { self.acknowledged.lock().clone() } else { BTreeMap::new() };
        let disks =
            wanted.then(|| [0, 1].map(|disk| Arc::new(self.disks[disk].crash_state(&mut random))));
        *self.random.lock() = Seeded::new(random.next_u64());
        if let Some(disks) = disks {
            self.states.lock().push(CrashState { disks, acknowledged });
        }
    }
}

/// A member that reports each request to the recorder.
struct Tap {
    disk: Disk,
    recorder: Arc<Recorder>,
}

impl BlockDevice for Tap {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        self.recorder.perhaps_crash();
        self.disk.write(offset_bytes, buffers)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        self.recorder.perhaps_crash();
        self.disk.flush()?;
        self.recorder.perhaps_crash();
        Ok(())
    }

    forward_to_device!(self => self.disk; read, discard, length_bytes, flush_time);
}

fn disks() -> [Disk; 2] {
    [0, 1].map(|_| Arc::new(SimulatedDevice::new(MEMBER_BYTES)))
}

fn options(read_only: bool) -> VolumeOptions {
    VolumeOptions { background: false, read_only, ..VolumeOptions::default() }
}

fn mirror(members: [Option<Arc<dyn BlockDevice>>; 2], access: Access) -> Mirror {
    let candidates = ["a", "b"]
        .into_iter()
        .zip(members)
        .map(|(name, device)| Candidate { name: name.to_owned(), device })
        .collect();
    Mirror::open(candidates, access, true).unwrap()
}

fn both(disks: &[Disk; 2]) -> [Option<Arc<dyn BlockDevice>>; 2] {
    [Some(disks[0].clone()), Some(disks[1].clone())]
}

fn new_volume(disks: &[Disk; 2]) -> Superblock {
    let named: Vec<(String, Arc<dyn BlockDevice>)> =
        disks.iter().map(|disk| ("disk".to_owned(), disk.clone() as _)).collect();
    make(ComposedKind::Mirror, &named).unwrap();
    let log_bytes = Some(1 << 20);
    mkfs::mkfs(
        &mirror(both(disks), Access::ReadWrite),
        &mkfs::MkfsOptions { log_bytes, ..mkfs::MkfsOptions::default() },
    )
    .unwrap()
}

fn content(name: &str, version: u8, blocks: usize) -> Vec<u8> {
    let first = name.bytes().fold(version, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
    (0..blocks * 4096)
        .map(|at| if at % 4096 == 0 { version } else { first.wrapping_add((at / 4096) as u8) })
        .collect()
}

/// Files that are written once, and small ones that are written again and again.
fn work(volume: &Volume, recorder: &Recorder, random: &mut Seeded, operations: usize) {
    let mut versions: BTreeMap<String, u8> = BTreeMap::new();
    for operation in 0..operations {
        let rewritten = random.chance(1, 2);
        let name = if rewritten {
            format!("rewritten {}", random.below(5))
        } else {
            format!("file {operation}")
        };
        let blocks = if rewritten { 1 } else { 1 + random.below(6) as usize };
        let version = versions.entry(name.clone()).and_modify(|version| *version += 1).or_insert(1);
        let found = volume.lookup(volume.root(), name.as_bytes());
        let inode =
            found.or_else(|_| volume.create(volume.root(), name.as_bytes(), &FILE)).unwrap().inode;
        volume.write(inode, 0, &content(&name, *version, blocks)).unwrap();
        match random.below(4) {
            0 => continue,
            1 => volume.commit().unwrap(),
            _ => {}
        }
        volume.fsync_blocking(inode, FsyncKind::Full).unwrap();
        recorder.acknowledged.lock().insert(name, (*version, blocks));
    }
}

/// All acknowledged files are there, with their version or a later one, whole.
#[track_caller]
fn expect_files(volume: &Volume, acknowledged: &Acknowledged, when: &str) {
    for (name, (oldest, blocks)) in acknowledged {
        let found = volume
            .lookup(volume.root(), name.as_bytes())
            .unwrap_or_else(|error| panic!("{when}: {name}: {error}"));
        let mut bytes = Vec::new();
        volume
            .read(found.inode, 0, blocks * 4096, &mut bytes)
            .unwrap_or_else(|error| panic!("{when}: {name}: {error}"));
        let version = bytes[0];
        assert!(
            version >= *oldest && bytes == content(name, version, *blocks),
            "{when}: {name} has version {version}, not {oldest}"
        );
    }
}

#[track_caller]
fn expect_clean(device: &dyn BlockDevice, when: &str) {
    let report = check(device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert_eq!(report.errors, 0, "{when}: {report}");
}

/// Recovers from both, with the power failing in between and afterwards, and looks at each member
/// alone.
fn examine(state: &CrashState, random: &mut Seeded, when: &str) {
    let recorder = Recorder::new(state.disks.clone(), random.next_u64());
    recorder.acknowledged.lock().clone_from(&state.acknowledged);
    {
        let device = Arc::new(mirror(tapped(&recorder), Access::ReadWrite));
        expect_clean(&*device, &format!("{when}, before recovery"));
        let volume =
            Volume::open(device, options(false)).unwrap_or_else(|error| panic!("{when}: {error}"));
        expect_files(&volume, &state.acknowledged, when);
        recorder.perhaps_crash();
        volume.close().unwrap();
    }
    examine_alone(&state.disks, &state.acknowledged, when);
    let during: Vec<CrashState> = std::mem::take(&mut *recorder.states.lock());
    for (number, state) in during.iter().enumerate() {
        examine_alone(
            &state.disks,
            &state.acknowledged,
            &format!("{when}, state {number} of its recovery"),
        );
    }
}

fn examine_alone(disks: &[Disk; 2], acknowledged: &Acknowledged, when: &str) {
    for alone in 0..2 {
        let when = format!("{when}, {} alone", ["a", "b"][alone]);
        let mut members = [None, None];
        members[alone] = Some(Arc::new(disks[alone].snapshot()) as Arc<dyn BlockDevice>);
        let device = Arc::new(mirror(members, Access::ReadWrite));
        expect_clean(&*device, &when);
        let volume =
            Volume::open(device, options(false)).unwrap_or_else(|error| panic!("{when}: {error}"));
        expect_files(&volume, acknowledged, &when);
    }
}

fn tapped(recorder: &Arc<Recorder>) -> [Option<Arc<dyn BlockDevice>>; 2] {
    let tap = |disk: &Disk| -> Option<Arc<dyn BlockDevice>> {
        Some(Arc::new(Tap { disk: disk.clone(), recorder: recorder.clone() }))
    };
    [tap(&recorder.disks[0]), tap(&recorder.disks[1])]
}

#[test]
fn every_crash_of_both_members_keeps_what_was_acknowledged_on_each() {
    let seed = seed_from_environment();
    let mut random = Seeded::new(seed);
    let wanted = number_from_environment("CAIRN_CRASH_STATES").unwrap_or(1000) / 5;
    let mut examined = 0;
    while examined < wanted {
        let disks = disks();
        new_volume(&disks);
        let recorder = Recorder::new(disks.clone(), random.next_u64());
        let device = Arc::new(mirror(tapped(&recorder), Access::ReadWrite));
        let volume = Volume::open(device, options(false)).unwrap();
        work(&volume, &recorder, &mut random, 30);
        drop(volume);
        let states = std::mem::take(&mut *recorder.states.lock());
        for (number, state) in states.iter().enumerate() {
            if random.chance(2, 3) {
                continue;
            }
            examine(
                state,
                &mut random,
                &format!("CAIRN_SEED={seed}: state {number} after {examined}"),
            );
            examined += 1;
        }
    }
}

/// States with random fates, torn writes among them, at each moment.
const RANDOM_STATES: usize = 8;

/// Calls `visit` with what the unflushed writes of both members may have met.
fn fates_of_both(
    unflushed: [Vec<WriteInfo>; 2],
    random: &mut Seeded,
    visit: &mut dyn FnMut([Vec<Fate>; 2]),
) {
    let (first, count) = (unflushed[0].len(), unflushed[0].len() + unflushed[1].len());
    if count <= ALL_SETS_UP_TO {
        let all: Result<(), ()> = sets(count, random, &mut |fates| {
            visit([fates[..first].to_vec(), fates[first..].to_vec()]);
            Ok(())
        });
        assert!(all.is_ok());
    }
    for _ in 0..if count == 0 { 0 } else { RANDOM_STATES } {
        visit([0, 1].map(|disk: usize| random_fates(&unflushed[disk], random)));
    }
}

/// The power fails between any two requests of a short run, and each member keeps any of what it
/// had not flushed.
#[test]
fn all_sets_of_survivors_on_both_members_keep_what_was_acknowledged() {
    let disks = disks();
    new_volume(&disks);
    let recorder = Recorder::of_moments(disks.clone());
    let volume =
        Volume::open(Arc::new(mirror(tapped(&recorder), Access::ReadWrite)), options(false))
            .unwrap();
    work(&volume, &recorder, &mut Seeded::new(5), 16);
    recorder.perhaps_crash();
    drop(volume);
    // Of equal moments the last: most is acknowledged then.
    let moments: BTreeMap<[usize; 2], Acknowledged> =
        recorder.moments.iter().flat_map(|moments| moments.lock().clone()).collect();
    let (mut seen, mut random, mut whole) = (BTreeSet::new(), Seeded::new(6), 0);
    for (at, acknowledged) in &moments {
        let explorers = [0, 1].map(|disk: usize| {
            let mut explorer = disks[disk].explorer();
            explorer.advance_to(at[disk]);
            explorer
        });
        let unflushed = [0, 1].map(|disk: usize| explorers[disk].unflushed());
        whole += usize::from(unflushed[0].len() + unflushed[1].len() <= ALL_SETS_UP_TO);
        let versions: u32 = acknowledged.values().map(|(version, _)| u32::from(*version)).sum();
        fates_of_both(unflushed, &mut random, &mut |fates| {
            let disks = [0, 1]
                .map(|disk: usize| Arc::new(explorers[disk].state_with(|_| fates[disk].clone())));
            let content = [0, 1].map(|disk: usize| explorers[disk].fingerprint(&disks[disk]));
            if seen.insert((content, versions)) {
                examine_both(&disks, acknowledged, &format!("after {at:?} events, {fates:?}"));
            }
        });
    }
    eprintln!("{} states at {} moments, {whole} of them searched whole", seen.len(), moments.len());
    assert!(whole * 2 > moments.len() && seen.len() > 100);
}

/// Recovers from both, and looks at each member alone.
fn examine_both(disks: &[Disk; 2], acknowledged: &Acknowledged, when: &str) {
    {
        let device = Arc::new(mirror(both(disks), Access::ReadWrite));
        expect_clean(&*device, &format!("{when}, before recovery"));
        let volume =
            Volume::open(device, options(false)).unwrap_or_else(|error| panic!("{when}: {error}"));
        expect_files(&volume, acknowledged, when);
        volume.close().unwrap();
    }
    examine_alone(disks, acknowledged, when);
}

#[test]
fn a_member_that_fails_in_use_is_left_behind_and_the_volume_goes_on() {
    let mut random = Seeded::new(seed_from_environment());
    for round in 0..6 {
        let disks = disks();
        new_volume(&disks);
        let recorder = Recorder::new(disks.clone(), 1);
        let volume =
            Volume::open(Arc::new(mirror(both(&disks), Access::ReadWrite)), options(false))
                .unwrap();
        work(&volume, &recorder, &mut random, 10);
        let lost = round % 2;
        let operation = [Operation::Write, Operation::Flush, Operation::Write][round / 2];
        disks[lost].fail_when(move |request| request.operation == operation);
        work(&volume, &recorder, &mut random, 10);
        let device = volume.statistics().device.unwrap();
        assert!(device.degraded && device.members[lost].state.contains("failed"), "{device:?}");
        // The power fails, and the lost member works again.
        let crashed = [0, 1].map(|disk| Arc::new(disks[disk].crash_state(&mut random)));
        let acknowledged = recorder.acknowledged.lock().clone();
        let device = Arc::new(mirror(both(&crashed), Access::ReadWrite));
        assert_eq!(device.copies(), 1, "the stale member is not used");
        expect_clean(&*device, "degraded");
        expect_files(&Volume::open(device, options(false)).unwrap(), &acknowledged, "degraded");
    }
}

/// A volume with files, closed or crashed, and what must be in it.
fn used_volume(close: bool) -> ([Disk; 2], Superblock, Acknowledged) {
    let disks = disks();
    let superblock = new_volume(&disks);
    let recorder = Recorder::new(disks.clone(), 1);
    let volume =
        Volume::open(Arc::new(mirror(both(&disks), Access::ReadWrite)), options(false)).unwrap();
    work(&volume, &recorder, &mut Seeded::new(4), 60);
    let acknowledged = recorder.acknowledged.lock().clone();
    if close {
        volume.close().unwrap();
        drop(volume);
        return (disks, superblock, acknowledged);
    }
    let crashed = [0, 1].map(|disk| Arc::new(disks[disk].crash_state(&mut Seeded::new(9))));
    (crashed, superblock, acknowledged)
}

/// Reads everything with all copies there, then again after a repair by fsck from the member that
/// was damaged alone.
fn expect_mended(disks: &[Disk; 2], damaged: usize, acknowledged: &Acknowledged, what: &str) {
    {
        let reader = Arc::new(mirror(both(disks), Access::ReadOnly));
        expect_clean(&*reader, &format!("{what}, read-only"));
        expect_files(
            &Volume::open(reader, options(true)).unwrap(),
            acknowledged,
            &format!("{what}, read-only"),
        );
    }
    let device = Arc::new(mirror(both(disks), Access::ReadWrite));
    let volume = Volume::open(device.clone(), options(false))
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    expect_files(&volume, acknowledged, what);
    volume.close().unwrap();
    let report = check(&*device, &CheckOptions { data: true, repair: true }, &mut |_| {}).unwrap();
    assert_eq!(report.errors, 0, "{what}: {report}");
    let health = device.health().unwrap();
    assert!(health.repaired_blocks > 0 || damaged == 1, "{what}: {health:?}");
    assert!(!health.degraded, "{what}: damage is no reason to leave a member behind");
    drop((volume, device));
    if damaged == 0 {
        let alone = mirror([Some(disks[0].clone()), None], Access::ReadOnly);
        expect_clean(&alone, &format!("{what}, mended, alone"));
        expect_files(
            &Volume::open(Arc::new(alone), options(true)).unwrap(),
            acknowledged,
            &format!("{what}, mended, alone"),
        );
    }
}

fn rot(disk: &Disk, blocks: Range<u64>) {
    disk.corrupt(DATA_START_BYTES + blocks.start * 4096, (blocks.end - blocks.start) * 4096, 0x5a);
}

#[test]
fn a_rotten_structure_of_each_kind_is_read_around_and_mended() {
    let (closed, superblock, in_closed) = used_volume(true);
    let (crashed, _, in_crashed) = used_volume(false);
    let geometry = superblock.geometry;
    let (data, copy) = (geometry.data_start().0, geometry.superblock_copy().0);
    let slots = Geometry::SUPERBLOCKS.map(|slot| slot.0);
    let kinds: Vec<(&str, Range<u64>)> = vec![
        ("superblock slot 0", slots[0]..slots[0] + 1),
        ("superblock slot 1", slots[1]..slots[1] + 1),
        ("superblock copy", copy..copy + 1),
        ("bitmaps", geometry.bitmap_table().start.0..geometry.bitmap_table().end().0),
        ("log", geometry.log().start.0..geometry.log().end().0),
        ("nodes and data", data..copy),
        ("everything", 0..copy + 1),
    ];
    for (what, range) in kinds {
        for damaged in 0..2 {
            for (state, disks, acknowledged) in
                [("closed", &closed, &in_closed), ("crashed", &crashed, &in_crashed)]
            {
                if (what, state) == ("log", "closed") {
                    continue; // Nothing reads it.
                }
                let disks = [0, 1].map(|disk| Arc::new(disks[disk].snapshot()));
                rot(&disks[damaged], range.clone());
                expect_mended(
                    &disks,
                    damaged,
                    acknowledged,
                    &format!("{what} of a {state} volume, member {damaged}"),
                );
            }
        }
    }
}

#[test]
fn damage_on_both_members_is_no_harm_while_one_copy_of_each_structure_is_good() {
    let (disks, superblock, acknowledged) = used_volume(true);
    let mut random = Seeded::new(seed_from_environment());
    for _ in 0..3 {
        let disks = [0, 1].map(|disk| Arc::new(disks[disk].snapshot()));
        // The smallest place of a structure is a cluster of four blocks, the unit of nodes.
        for cluster in 0..superblock.geometry.total_blocks / 4 {
            let damaged = random.below(2) as usize;
            rot(&disks[damaged], cluster * 4..cluster * 4 + 4);
        }
        let device = Arc::new(mirror(both(&disks), Access::ReadWrite));
        let volume = Volume::open(device.clone(), options(false)).unwrap();
        expect_files(&volume, &acknowledged, "damage on both");
        volume.close().unwrap();
        expect_clean(&*device, "damage on both");
    }
}

/// The log ring is read around, too, when what a crash left in it is the only place of what was
/// acknowledged.
#[test]
fn single_bits_that_rot_lose_nothing() {
    let (crashed, _, acknowledged) = used_volume(false);
    let mut random = Seeded::new(seed_from_environment());
    let mut mended = 0;
    for _ in 0..60 {
        let disks = [0, 1].map(|disk| Arc::new(crashed[disk].snapshot()));
        for _ in 0..20 {
            let block = random.below((MEMBER_BYTES - DATA_START_BYTES) / 4096 / 8);
            disks[0].corrupt(
                DATA_START_BYTES + block * 4096 + random.below(4096),
                1,
                1 << random.below(8),
            );
        }
        let device = Arc::new(mirror(both(&disks), Access::ReadWrite));
        let volume = Volume::open(device.clone(), options(false)).unwrap();
        expect_files(&volume, &acknowledged, "single bits");
        mended += device.health().unwrap().members[0].rewritten_blocks;
    }
    assert!(mended > 0, "no bit mattered");
}

/// Two copies, of which the first one is read unless another one is asked for; a repair does
/// nothing, as where a mirror is opened for reading.
struct TwoCopies([Disk; 2]);

impl BlockDevice for TwoCopies {
    fn copies(&self) -> usize {
        2
    }
    fn read_copy(&self, copy: usize, offset: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        self.0[copy].read(offset, buffer)
    }
    forward_to_device!(self => self.0[0]; read, write, write_set, flush, discard, length_bytes, flush_time);
}

/// The newest checkpoint is in one copy only; where it stands the other one has a valid checkpoint
/// of an earlier round through the ring.
#[test]
fn a_checkpoint_of_an_earlier_round_does_not_hide_the_newest() {
    let device = Arc::new(SimulatedDevice::new(MEMBER_BYTES));
    mkfs::mkfs(&*device, &mkfs_options(1 << 20)).expect("a new volume");
    let options = || VolumeOptions { background: false, ..VolumeOptions::default() };
    let open = |device: Arc<dyn BlockDevice>, read_only| {
        Volume::open(device, VolumeOptions { read_only, ..options() }).expect("it opens")
    };
    let volume = open(device.clone(), false);
    let file = volume.create(volume.root(), b"file", &FILE).expect("space").inode;
    let generation = |device: &Disk| {
        let (slot, mut bytes) = (Geometry::SUPERBLOCKS, vec![0; 4096]);
        slot.map(|slot| {
            device.read(slot.offset_bytes(), &mut bytes).expect("it is healthy");
            Superblock::decode(&bytes, slot).map_or(0, |superblock| superblock.generation.0)
        })
    };
    let mut tried = 0;
    for round in 0..600_u32 {
        let before = Arc::new(device.snapshot());
        volume.write(file, 0, &round.to_le_bytes()).expect("space");
        volume.fsync_blocking(file, FsyncKind::Full).expect("it is healthy");
        let after = Arc::new(device.snapshot());
        // The ring has 256 blocks, and an fsync takes one; commits come in between.
        if round < 300 || round % 10 != 0 || generation(&before) != generation(&after) {
            continue;
        }
        tried += 1;
        let copies = Arc::new(TwoCopies([before, after]));
        let report = check(&*copies, &CheckOptions { data: true, repair: false }, &mut |_| {});
        let report = report.expect("it can be checked");
        assert_eq!(report.errors, 0, "{report}");
        let seen = open(copies.clone(), true);
        let mut bytes = Vec::new();
        seen.read(file, 0, 4, &mut bytes).expect("it is healthy");
        assert_eq!(bytes, round.to_le_bytes(), "the newest checkpoint does not count");
        let found = Found::read(&seen).expect("it is healthy");
        second_reader::compare(&*copies, &seen, &found).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(tried > 10, "only {tried} rounds without a commit");
    volume.close().expect("it closes");
}
