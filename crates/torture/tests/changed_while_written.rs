//! Files are changed, extended and fsynced while other threads write them back: a thread that syncs
//! all the time, and writers that write out what others wrote. The device answers late, so most
//! changes and most fsyncs meet pages that are on their way.
//!
//! Required after a power failure at any point: each block is as in the version that was
//! acknowledged last or in a later one; the length is that of such a version or ends with a block
//! between them; and what a write made longer holds that write's data up to its end. `CAIRN_SEED`
//! repeats what the clients do, not how they interleave.
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, format, read_named};
use cairn_torture::seed_from_environment;
use cairn_torture::watchdog::Watchdog;
use std::sync::Arc;
use std::time::Duration;

const ROUNDS: u64 = 14;
/// Of each round: right after acknowledgements, and at any moment.
const STATES: [u64; 2] = [40, 40];
/// fsck, which reads all data, looks at one of so many.
const CHECKED: u64 = 10;
const CLIENTS: u8 = 4;
const STEPS: u32 = 60;
const BLOCK: usize = 4096;
/// Much more than what the log writes for fsyncs, so that threads write data themselves.
const LARGE_BYTES: u64 = 400 << 10;
const SMALL_BYTES: u64 = 6000;
const PAUSE_US: u64 = 3000;
const LATE_US: u64 = 4000;
/// What may be dirty: with little, writers write out what others wrote.
const DIRTY_BYTES: [u64; 3] = [256 << 20, 1 << 20, 300 << 10];

/// A file's content from some moment of the device on.
struct Version {
    begun: usize,
    bytes: Arc<Vec<u8>>,
}

/// One client's file: it never becomes shorter.
struct File {
    name: Vec<u8>,
    versions: Vec<Version>,
    /// Moments, and the version that was acknowledged then.
    acknowledged: Vec<(usize, usize)>,
}

fn open(device: &Arc<SimulatedDevice>, read_only: bool, dirty_data_bytes_max: u64) -> Volume {
    let background = false;
    let options =
        VolumeOptions { background, read_only, dirty_data_bytes_max, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn pause(random: &mut Seeded) {
    if random.chance(1, 2) {
        clock::sleep(Duration::from_micros(random.below(PAUSE_US)));
    }
}

/// Whether the file is durable. A mount asks first whether an fsync has anything to do; a client
/// may ask that again and again, and at last have it done, or not.
fn is_durable(volume: &Volume, inode: InodeId, random: &mut Seeded) -> bool {
    let kind = if random.chance(2, 3) { FsyncKind::DataOnly } else { FsyncKind::Full };
    for _ in 0..random.below(4) {
        if volume.is_durable(inode, kind) {
            return true;
        }
        pause(random);
    }
    let fsyncs = random.chance(1, 6);
    if fsyncs {
        volume.fsync_blocking(inode, kind).expect("it is healthy");
    }
    fsyncs
}

fn client(volume: &Volume, device: &SimulatedDevice, number: u8, random: &mut Seeded) -> File {
    let name = format!("file {number}").into_bytes();
    let first =
        pattern(Tag { client: number, operation: 0 }, 0, LARGE_BYTES + random.below(LARGE_BYTES));
    let inode = create(volume, &name, &first).expect("space");
    volume.fsync_blocking(inode, FsyncKind::Full).expect("it is healthy");
    let versions = vec![Version { begun: 0, bytes: Arc::new(first) }];
    let mut file = File { name, versions, acknowledged: vec![(device.history_len(), 0)] };
    for operation in 1..=STEPS {
        pause(random);
        let last = file.versions.len() - 1;
        let mut bytes = file.versions[last].bytes.to_vec();
        let (from, to) = match random.below(8) {
            // In place, up to the end or not.
            0..3 => {
                let from = random.below(bytes.len() as u64 / 3) as usize;
                let length = random.below((bytes.len() - from) as u64) as usize;
                (from, if random.chance(2, 3) { bytes.len() } else { from + 1 + length })
            }
            3..6 => (bytes.len(), bytes.len() + 1 + random.below(SMALL_BYTES) as usize),
            // Over the end.
            _ => (random.below(bytes.len() as u64) as usize, bytes.len() + 1),
        };
        let data = pattern(Tag { client: number, operation }, from as u64, (to - from) as u64);
        let kept = bytes.len().min(to) - from;
        bytes[from..from + kept].copy_from_slice(&data[..kept]);
        bytes.extend_from_slice(&data[kept..]);
        file.versions.push(Version { begun: device.history_len(), bytes: Arc::new(bytes) });
        volume.write(inode, from as u64, &data).expect("space");
        pause(random);
        if is_durable(volume, inode, random) {
            file.acknowledged.push((device.history_len(), last + 1));
        }
    }
    volume.forget(inode, 1);
    file
}

impl File {
    /// What is on a volume after a power failure at `position`.
    fn judge(&self, volume: &Volume, position: usize) -> Result<(), String> {
        let acknowledged =
            self.acknowledged.iter().filter(|(at, _)| *at <= position).map(|(_, version)| *version);
        let Some(oldest) = acknowledged.max() else { return Ok(()) };
        let begun = self.versions.iter().filter(|version| version.begun < position).count();
        let possible = &self.versions[oldest..begun.max(oldest + 1)];
        let found = read_named(volume, &self.name).map_err(|error| error.to_string())?;
        let (least, most) = (possible[0].bytes.len(), possible[possible.len() - 1].bytes.len());
        let is_whole = found.len().is_multiple_of(BLOCK) && (least..=most).contains(&found.len());
        if !is_whole && !possible.iter().any(|version| version.bytes.len() == found.len()) {
            return Err(format!("it has {} bytes, {least} to {most} are possible", found.len()));
        }
        for (index, block) in found.chunks(BLOCK).enumerate() {
            let range = index * BLOCK..index * BLOCK + block.len();
            if !possible.iter().any(|version| version.bytes.get(range.clone()) == Some(block)) {
                return Err(format!(
                    "of {} bytes block {index} is that of no version from {oldest} to {begun}",
                    found.len()
                ));
            }
        }
        Ok(())
    }
}

/// The clients' work beside a thread that syncs.
fn work(volume: &Volume, device: &Arc<SimulatedDevice>, random: &mut Seeded) -> Vec<File> {
    let done = Arc::new(AtomicBool::new(false));
    let syncing = {
        let (volume, done) = (volume.clone(), Arc::clone(&done));
        thread::spawn("syncing", move || {
            while !done.load(Ordering::Acquire) {
                volume.sync().expect("it is healthy");
                clock::sleep(Duration::from_micros(100));
            }
        })
    };
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (volume, device) = (volume.clone(), Arc::clone(device));
            let mut random = Seeded::new(random.next_u64());
            thread::spawn("client", move || client(&volume, &device, number, &mut random))
        })
        .collect();
    let files =
        clients.into_iter().map(|client| client.join().expect("no thread panics")).collect();
    done.store(true, Ordering::Release);
    syncing.join().expect("no thread panics");
    files
}

#[test]
fn what_was_acknowledged_is_there_also_of_pages_on_their_way() {
    let seed = seed_from_environment();
    let _watchdog = Watchdog::new(format!("seed {seed}"), Duration::from_secs(300));
    let (mut random, mut states) = (Seeded::new(seed), 0);
    for round in 0..ROUNDS {
        let device = Arc::new(SimulatedDevice::new(64 << 20));
        format(&*device, 4 << 20).expect("a new volume");
        let dirty_data_bytes_max = DIRTY_BYTES[random.below(3) as usize];
        let volume = open(&device, false, dirty_data_bytes_max);
        device.start_recording();
        device.set_late_writes(Duration::from_micros(LATE_US));
        device.set_delay(Operation::Flush, Duration::from_micros(100));
        let files = work(&volume, &device, &mut random);
        volume.close().expect("it closes");
        let mut explorer = device.explorer();
        let all = explorer.history_len();
        let acknowledged: Vec<usize> =
            files.iter().flat_map(|file| &file.acknowledged).map(|(at, _)| *at).collect();
        let mut positions: Vec<usize> = (0..STATES[0] + STATES[1])
            .map(|number| match number < STATES[0] {
                true => acknowledged[random.below(acknowledged.len() as u64) as usize],
                false => random.below(all as u64 + 1) as usize,
            })
            .collect();
        positions.sort_unstable();
        positions.dedup();
        states += positions.len();
        for position in positions {
            explorer.advance_to(position);
            let state = Arc::new(explorer.state(&mut random));
            let when =
                format!("CAIRN_SEED={seed}, round {round}, after {position} of {all} events");
            if random.chance(1, CHECKED) {
                expect_clean(&*state).unwrap_or_else(|error| panic!("{when}: {error}"));
            }
            let volume = open(&state, true, dirty_data_bytes_max);
            for (number, file) in files.iter().enumerate() {
                file.judge(&volume, position)
                    .unwrap_or_else(|error| panic!("{when}, file {number}: {error}"));
            }
        }
    }
    eprintln!("counted: {states} states");
}
