//! What one run is: everything follows from a seed.
use crate::generator::{Generator, Profile};
use crate::model::{Layout, Model};
use crate::operation::Operation;
use cairn_engine::{FlushPolicy, FsyncWait, VolumeOptions};
use cairn_environment::random::Seeded;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// How a run ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// All clients do what they wanted, and the volume is closed.
    Orderly,
    /// The power goes after `after_us` microseconds.
    PowerCut {
        /// Since the clients began.
        after_us: u64,
    },
    /// The n-th write of metadata, or flush, fails; once or from then on.
    Fault {
        /// Counted from zero.
        request: u64,
        /// All that follow fail, too.
        lasting: bool,
        /// Flushes fail, and not writes.
        flush: bool,
    },
}

/// One run's circumstances.
#[derive(Clone, Debug)]
pub struct Scene {
    /// Size of the volume.
    pub volume_bytes: u64,
    /// Size of its log.
    pub log_bytes: u64,
    /// How the volume is opened.
    pub options: VolumeOptions,
    /// How long a read takes.
    pub read_us: u64,
    /// How long a write takes.
    pub write_us: u64,
    /// How long a flush takes.
    pub flush_us: u64,
    /// How much longer writes and flushes may take, before they do what they do and after: see
    /// [`crate::uneven`].
    pub uneven_us: u64,
    /// How long a request may take now and then, reads as well; 0 for a device without such spikes.
    pub spike_ms_max: u64,
    /// How long a client pauses before an operation, at most.
    pub pause_us: u64,
    /// How it ends.
    pub ending: Ending,
    /// What each client does.
    pub scripts: Vec<Vec<Operation>>,
}

fn one_of(random: &mut Seeded, values: &[u64]) -> u64 {
    values[random.below(values.len() as u64) as usize]
}

fn options(random: &mut Seeded, full_log: bool) -> VolumeOptions {
    // Hours: then nothing heals what should have happened at once.
    let commit_interval_us = one_of(random, &[2_000, 20_000, 1_000_000, 36_000_000_000]);
    // None; so small that blocks leave it all the time; or ample.
    let data_cache_bytes = match commit_interval_us {
        2_000 => 0,
        20_000 => 16 << 10,
        1_000_000 => 128 << 10,
        _ => 64 * MIB,
    };
    VolumeOptions {
        commit_interval: Duration::from_micros(commit_interval_us),
        data_cache_bytes,
        discard: random.chance(1, 2),
        fsync_wait: if random.chance(1, 4) { FsyncWait::Complete } else { FsyncWait::Super },
        node_cache_bytes: if full_log || random.chance(1, 2) { 64 * MIB } else { 256 << 10 },
        inode_cache_entries: one_of(random, &[64, 128 * 1024]) as usize,
        ..VolumeOptions::default()
    }
}

fn ending(random: &mut Seeded, expected_us: u64) -> Ending {
    match random.below(5) {
        0 => Ending::PowerCut { after_us: random.below(expected_us + 1) },
        1..3 => Ending::Fault {
            request: random.below(40),
            lasting: random.chance(1, 2),
            flush: random.chance(2, 3),
        },
        _ => Ending::Orderly,
    }
}

fn script(client: u8, seed: u64, profile: Profile, count: u64) -> Vec<Operation> {
    let mut generator = Generator::new(seed, profile);
    let mut model = Model::new(Layout::Among(client));
    let next = |index| {
        let operation = generator.next(&model, index as usize);
        let _ = model.apply(&operation);
        operation
    };
    (0..count).map(next).collect()
}

impl Scene {
    /// The scene of a seed.
    pub fn of_seed(seed: u64) -> Scene {
        let random = &mut Seeded::new(seed);
        let full_log = random.chance(1, 4);
        let even = if full_log { Profile::CRASH_FULL_LOG } else { Profile::CRASH };
        let profile = if random.chance(1, 2) { even.swarm(random) } else { even };
        // What takes much space, or several transactions, is for few.
        let clients = if profile.is_large() { 2 + random.below(7) } else { 8 + random.below(25) };
        let operations_each = one_of(random, &[6, 15, 40]);
        let flush_us = one_of(random, &[0, 100, 500, 2500, 15_000]);
        let write_us = one_of(random, &[0, 30, 200]);
        let pause_us = one_of(random, &[0, 0, 3_000, 20_000_000]);
        let scripts = (0..clients as u8)
            .map(|client| script(client, random.next_u64(), profile, operations_each))
            .collect();
        let ending =
            ending(random, operations_each * (flush_us + 2 * write_us + pause_us / 2 + 50));
        let mut options = options(random, full_log);
        let mut uneven_us = one_of(random, &[0, 100, 1000, 5000]);
        if matches!(ending, Ending::Fault { flush: true, .. })
            && pause_us < 1_000_000
            && random.chance(3, 4)
        {
            // Log and commits flush at the same time, and the thread of a failed flush learns it
            // late.
            options.commit_interval = Duration::from_millis(2);
            uneven_us = one_of(random, &[1000, 5000]);
        }
        let log_bytes = if full_log { MIB } else { MIB << random.below(3) };
        let read_us = one_of(random, &[0, 80]);
        // Drawn last, so that seeds keep what else they mean.
        options.flush = if random.chance(1, 2) { FlushPolicy::Overlap } else { FlushPolicy::Auto };
        let spike_ms_max = one_of(random, &[0, 0, 1_000, 5_000]);
        Scene {
            volume_bytes: 192 * MIB,
            log_bytes,
            options,
            read_us,
            write_us,
            flush_us,
            uneven_us,
            spike_ms_max,
            pause_us,
            ending,
            scripts,
        }
    }
}

/// Names one run: its scene, how threads interleave, and which operations are left.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// Of the scene.
    pub seed: u64,
    /// Of the schedule and of the crash states.
    pub schedule: u64,
    /// Of each client, the operations that it does; all of them when `None`.
    pub kept: Option<Vec<Vec<usize>>>,
}

impl Case {
    /// The whole run of a seed.
    pub fn of_seed(seed: u64) -> Case {
        Case { seed, schedule: seed.rotate_left(32) ^ 0x5ced, kept: None }
    }

    /// Its scene, with the operations that are left.
    pub fn scene(&self) -> Scene {
        let mut scene = Scene::of_seed(self.seed);
        if let Some(kept) = &self.kept {
            for (client, script) in scene.scripts.iter_mut().enumerate() {
                let indices = kept.get(client).map_or(&[][..], Vec::as_slice);
                *script = indices.iter().filter_map(|index| script.get(*index).cloned()).collect();
            }
        }
        scene
    }
}

/// `3-5,9`, for the numbers 3, 4, 5 and 9.
fn show_numbers(numbers: &[usize]) -> String {
    let mut parts: Vec<String> = Vec::new();
    for run in numbers.chunk_by(|left, right| left + 1 == *right) {
        parts.push(match run {
            [single] => single.to_string(),
            [first, .., last] => format!("{first}-{last}"),
            [] => continue,
        });
    }
    parts.join(",")
}

fn parse_numbers(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.split(',') {
        match part.split_once('-') {
            None => numbers.push(part.parse().ok()?),
            Some((first, last)) => {
                let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
                // A script has few operations: more would be a slip of the keyboard.
                numbers.extend((last < 100_000).then_some(first..=last)?);
            }
        }
    }
    Some(numbers)
}

impl fmt::Display for Case {
    /// `SEED`, or `SEED/SCHEDULE/CLIENT:OPERATIONS;…`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Case::of_seed(self.seed) {
            return write!(formatter, "{}", self.seed);
        }
        write!(formatter, "{}/{}", self.seed, self.schedule)?;
        let Some(kept) = &self.kept else { return Ok(()) };
        let clients = kept.iter().enumerate().filter(|(_, operations)| !operations.is_empty());
        let parts: Vec<String> = clients
            .map(|(client, operations)| format!("{client}:{}", show_numbers(operations)))
            .collect();
        write!(formatter, "/{}", parts.join(";"))
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let wrong = || {
            format!(
                "\"{text}\" is not a case; write SEED, or SEED/SCHEDULE/CLIENT:OPERATIONS;… as it was printed"
            )
        };
        let mut parts = text.split('/');
        let seed = parts.next().and_then(|seed| seed.parse().ok()).ok_or_else(wrong)?;
        let mut case = Case::of_seed(seed);
        if let Some(schedule) = parts.next() {
            case.schedule = schedule.parse().map_err(|_| wrong())?;
        }
        if let Some(clients) = parts.next() {
            let mut kept = vec![Vec::new(); 256];
            for client in clients.split(';').filter(|client| !client.is_empty()) {
                let (number, operations) = client.split_once(':').ok_or_else(wrong)?;
                let number: u8 = number.parse().map_err(|_| wrong())?;
                kept[usize::from(number)] = parse_numbers(operations).ok_or_else(wrong)?;
            }
            let used = kept
                .iter()
                .rposition(|operations| !operations.is_empty())
                .map_or(0, |last| last + 1);
            kept.truncate(used);
            case.kept = Some(kept);
        }
        if parts.next().is_some() { Err(wrong()) } else { Ok(case) }
    }
}
