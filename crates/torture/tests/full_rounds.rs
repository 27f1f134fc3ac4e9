//! Fill to the last block, empty, and again: what `df` promised can be written, what `write`
//! accepted can be stored, every deletion works, and no thread hangs.
//!
//! A small form runs always. `CAIRN_FULL_ROUNDS` (default 3) and `CAIRN_FULL_BYTES` (default 192
//! MiB) set a larger one: `CAIRN_FULL_ROUNDS=100 CAIRN_FULL_BYTES=1073741824 cargo test --profile
//! checked -p cairn-torture --test full_rounds`.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::{Error, FsyncKind, SpaceInfo, Statistics, Volume, VolumeOptions};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_environment::thread;
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, format};
use cairn_torture::watchdog::Watchdog;
use cairn_torture::{number_from_environment, seed_from_environment};
use std::sync::Arc;
use std::time::Duration;

const THREADS: u64 = 16;
const LARGE_BYTES: usize = 1 << 20;
const SMALL_BYTES: usize = 4096;
const BLOCK_BYTES: u64 = 4096;

/// Files of one client.
#[derive(Default)]
struct Client {
    names: Vec<Vec<u8>>,
    bytes: u64,
    next: u64,
}

/// Which files a round writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mix {
    Both,
    Large,
    Small,
}

/// Writes files until not even a small one fits.
fn fill(volume: &Volume, client: u64, mix: Mix, random: &mut Seeded, state: &mut Client) {
    let data = vec![client as u8 + 1; LARGE_BYTES];
    let mut large_fits = mix != Mix::Small;
    loop {
        let large = large_fits && (mix == Mix::Large || random.chance(1, 2));
        let bytes = if large { LARGE_BYTES } else { SMALL_BYTES };
        let name = format!("{client}-{}", state.next).into_bytes();
        state.next += 1;
        match create(volume, &name, &data[..bytes]) {
            Ok(inode) => {
                if random.chance(1, 64) {
                    volume
                        .fsync_blocking(inode, FsyncKind::Full)
                        .expect("fsync stores what write accepted");
                }
                volume.forget(inode, 1);
                state.names.push(name);
                state.bytes += bytes as u64;
            }
            Err(Error::NoSpace) => {
                match volume.unlink(volume.root(), &name) {
                    Ok(()) | Err(Error::NotFound) => {}
                    Err(error) => panic!("deleting on a full volume: {error}"),
                }
                if !large {
                    return;
                }
                large_fits = false;
            }
            Err(error) => panic!("filling: {error}"),
        }
    }
}

fn empty(volume: &Volume, random: &mut Seeded, state: &mut Client, keep: (u64, u64)) {
    let mut kept = Vec::new();
    for name in state.names.drain(..) {
        if random.chance(keep.0, keep.1) {
            kept.push(name);
        } else {
            volume.unlink(volume.root(), &name).expect("deleting works on a full volume");
        }
    }
    state.names = kept;
}

fn on_all_clients(
    volume: &Volume,
    clients: &mut Vec<Client>,
    seed: u64,
    work: impl Fn(&Volume, u64, &mut Seeded, &mut Client) + Send + Sync + 'static,
) {
    let work = Arc::new(work);
    let handles: Vec<_> = std::mem::take(clients)
        .into_iter()
        .zip(0..)
        .map(|(mut state, client)| {
            let (volume, work) = (volume.clone(), work.clone());
            thread::spawn("client", move || {
                work(&volume, client, &mut Seeded::new(seed ^ (client << 32)), &mut state);
                state
            })
        })
        .collect();
    clients.extend(handles.into_iter().map(|handle| handle.join().expect("no client panics")));
}

fn open(device: &Arc<MemoryDevice>) -> Volume {
    let options = VolumeOptions {
        commit_interval: Duration::from_millis(200),
        dirty_data_bytes_max: 16 << 20,
        ..VolumeOptions::default()
    };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

/// What one round measured, in blocks.
struct Round {
    before: SpaceInfo,
    after: SpaceInfo,
    data_blocks: u64,
    files: usize,
    fill_time: Duration,
}

impl Round {
    fn taken_blocks(&self) -> u64 {
        self.before.free_blocks - self.after.free_blocks
    }

    fn report(&self, round: u64, mix: Mix, statistics: &Statistics) -> String {
        let percent = |blocks: u64| blocks as f64 * 100.0 / self.before.available_blocks as f64;
        format!(
            "{round} {mix:?}: promised {} blocks, data {:.2} %, taken {:.2} %, left {}; {} files in {:.2?}; tickets waited {}, granted {}, \
             failed {}, at most {:.2?}; reclaim: {} writes, {} commits, {} preemptive",
            self.before.available_blocks,
            percent(self.data_blocks),
            percent(self.taken_blocks()),
            self.after.available_blocks,
            self.files,
            self.fill_time,
            statistics.tickets_waited,
            statistics.tickets_granted,
            statistics.tickets_failed,
            Duration::from_nanos(statistics.ticket_wait_max_ns),
            statistics.reclaim_writes,
            statistics.reclaim_commits,
            statistics.reclaim_preemptive_runs,
        )
    }

    /// At least 97 % of what was promised was written, and the promise was right to 1 % of the
    /// volume.
    fn expect_promise_kept(&self, mix: Mix, report: &str) {
        let written = if mix == Mix::Small { self.taken_blocks() } else { self.data_blocks };
        assert!(written * 100 >= self.before.available_blocks * 97, "{report}");
        let wrong = self.taken_blocks().abs_diff(self.before.available_blocks);
        assert!(wrong * 100 <= self.before.total_blocks, "{wrong} blocks wrong: {report}");
        assert!(self.after.available_blocks * 100 <= self.after.total_blocks, "not full: {report}");
    }
}

fn fill_round(volume: &Volume, clients: &mut Vec<Client>, mix: Mix, seed: u64) -> Round {
    let before = volume.space();
    let begin = clock::now_monotonic();
    clients.iter_mut().for_each(|client| client.bytes = 0);
    on_all_clients(volume, clients, seed, move |volume, client, random, state| {
        fill(volume, client, mix, random, state)
    });
    let fill_time = begin.elapsed();
    volume.sync().expect("what write accepted has its space");
    Round {
        before,
        after: volume.space(),
        data_blocks: clients.iter().map(|client| client.bytes).sum::<u64>() / BLOCK_BYTES,
        files: clients.iter().map(|client| client.names.len()).sum(),
        fill_time,
    }
}

#[test]
fn sixteen_clients_get_what_df_promised_in_every_round() {
    let rounds = number_from_environment("CAIRN_FULL_ROUNDS").unwrap_or(3);
    let bytes = number_from_environment("CAIRN_FULL_BYTES").unwrap_or(192 << 20);
    let device = Arc::new(MemoryDevice::new(bytes));
    format(&*device, 4 << 20).expect("a new volume");
    let seed = seed_from_environment();
    let mut volume = open(&device);
    let mut clients: Vec<Client> = (0..THREADS).map(|_| Client::default()).collect();
    for round in 0..rounds {
        let mix = [Mix::Both, Mix::Large, Mix::Small][(round % 3) as usize];
        let _watchdog = Watchdog::new(format!("round {round} ({mix:?})"), Duration::from_secs(300));
        let measured = fill_round(&volume, &mut clients, mix, seed ^ round);
        let report = measured.report(round, mix, &volume.statistics());
        println!("{report}");
        measured.expect_promise_kept(mix, &report);
        let keep = if round % 5 == 4 { (0, 1) } else { (1, 8) };
        on_all_clients(&volume, &mut clients, seed ^ round, move |volume, _, random, state| {
            empty(volume, random, state, keep)
        });
        if round % 10 == 9 || round + 1 == rounds {
            volume.close().expect("it closes");
            expect_clean(&*device).unwrap_or_else(|error| panic!("round {round}: {error}"));
            volume = open(&device);
        }
    }
    volume.close().expect("it closes");
}

/// At any level of filling, `df` says what will still fit; files of both sizes, in the order in
/// which they come.
#[test]
fn df_is_right_at_every_level() {
    let device = Arc::new(MemoryDevice::new(96 << 20));
    format(&*device, 4 << 20).expect("a new volume");
    let volume = open(&device);
    let mut random = Seeded::new(seed_from_environment());
    let data = vec![3; LARGE_BYTES];
    let (mut levels, mut written_blocks, mut number) = (Vec::new(), 0, 0);
    let mut bytes_max = LARGE_BYTES;
    while bytes_max >= SMALL_BYTES {
        let bytes = if random.chance(1, 3) { SMALL_BYTES } else { bytes_max };
        levels.push((written_blocks, volume.space()));
        match create(&volume, format!("{number}").as_bytes(), &data[..bytes]) {
            Ok(inode) => volume.forget(inode, 1),
            Err(Error::NoSpace) => {
                bytes_max /= 2;
                match volume.unlink(volume.root(), format!("{number}").as_bytes()) {
                    Ok(()) | Err(Error::NotFound) => continue,
                    Err(error) => panic!("deleting on a full volume: {error}"),
                }
            }
            Err(error) => panic!("filling: {error}"),
        }
        written_blocks += bytes as u64 / BLOCK_BYTES;
        number += 1;
    }
    volume.sync().expect("what write accepted has its space");
    let last = volume.space();
    for (written_before, space) in levels {
        let fitted = written_blocks - written_before;
        let wrong = fitted.abs_diff(space.available_blocks);
        assert!(wrong * 100 <= space.total_blocks, "{fitted} blocks fitted behind {space:?}");
    }
    assert!(last.available_blocks * 100 <= last.total_blocks, "{last:?}");
    volume.close().expect("it closes");
}

/// Holes of single blocks all over the volume are of use: the space of deleted small files can be
/// written again.
#[test]
fn what_scattered_small_files_gave_back_can_be_written() {
    let device = Arc::new(MemoryDevice::new(96 << 20));
    format(&*device, 4 << 20).expect("a new volume");
    let volume = open(&device);
    let mut random = Seeded::new(seed_from_environment());
    let mut state = Client::default();
    fill(&volume, 0, Mix::Small, &mut random, &mut state);
    for share in [20, 10, 5, 20, 20, 20, 20, 10] {
        let before = state.names.len();
        empty(&volume, &mut random, &mut state, (share - 1, share));
        let removed = before - state.names.len();
        fill(&volume, 0, Mix::Small, &mut random, &mut state);
        let again = state.names.len() + removed - before;
        assert!(
            again * 100 >= removed * 90,
            "{removed} of {before} files were removed, {again} fitted again; {:?}",
            volume.space()
        );
    }
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}
