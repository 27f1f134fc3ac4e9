//! What is measured of each mechanism: loads that need it, and where it could be in the way.
//!
//! A measurement has a device of its own unless the user names one; its settings hold what differs
//! from a load's defaults.
use super::figures::{Quantile, RESOURCES, Source, Wanted};
use super::mechanism::{LockedDescents, Mechanism};
use super::{AbSettings, baselines};
use crate::engine_settings::EngineSettings;
use crate::report::Report;
use crate::spec::{DeviceSpec, TargetSpec};
use crate::workloads::{Settings, SyncMethod, Workload, attribute_changes, tight_volume};
use std::time::Duration;

const VOLUME_BYTES: u64 = 4 << 30;
/// Room for the files of 200 clients of dbench, 24 MB each.
const DBENCH_VOLUME_BYTES: u64 = 8 << 30;
/// From this many clients on, dbench first writes a while before anything competes for the tree.
const DBENCH_CLIENTS_MANY: usize = 100;
/// Its fifth, the warm-up, is for that.
const DBENCH_DURATION_MIN: Duration = Duration::from_secs(30);
/// Full after some ten thousands of empty files.
const TIGHT_VOLUME_BYTES: u64 = 32 << 20;
/// Runs full several times in a second under dbench, so that fsyncs become commits.
const QUICK_FILES: u64 = 500;

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// A load of `cairn bench run`.
    Known(Workload),
    /// Empty files on a volume of whose space one part in `free_share` is free.
    TightVolume { free_share: u64 },
    /// The same few items logged again and again.
    AttributeChanges,
}

impl Load {
    pub(super) fn name(self) -> &'static str {
        match self {
            Load::Known(workload) => workload.name(),
            Load::TightVolume { .. } => tight_volume::NAME,
            Load::AttributeChanges => attribute_changes::NAME,
        }
    }

    pub(super) fn run(self, target: &TargetSpec, settings: &Settings) -> anyhow::Result<Report> {
        match self {
            Load::Known(workload) => workload.run(target, settings),
            Load::TightVolume { free_share } => tight_volume::run(target, settings, free_share),
            Load::AttributeChanges => attribute_changes::run(target, settings),
        }
    }
}

/// One thing that is measured on both sides.
#[derive(Clone, Debug)]
pub(super) struct Measurement {
    pub name: String,
    pub load: Load,
    pub device: DeviceSpec,
    /// Whether the device's size is part of what is measured.
    pub own_size: bool,
    pub settings: Settings,
    pub locked_descents: LockedDescents,
    pub wanted: Vec<Wanted>,
}

fn memory() -> DeviceSpec {
    DeviceSpec::Memory { size_bytes: VOLUME_BYTES }
}

fn simulated(flush_us: u64) -> DeviceSpec {
    DeviceSpec::Simulated {
        size_bytes: VOLUME_BYTES,
        flush_time: Duration::from_micros(flush_us),
        discard_time: Duration::ZERO,
    }
}

/// Where blocks can't be freed for nothing: a discard takes as long as a fast device needs for the
/// command.
fn discarding() -> DeviceSpec {
    DeviceSpec::Simulated {
        size_bytes: VOLUME_BYTES,
        flush_time: Duration::from_millis(2),
        discard_time: Duration::from_micros(20),
    }
}

/// A simple disk, as those on which the coordination of flushes was published. A flush takes as
/// long as twenty reads, so that with about five reads to an fsync a flush for each costs 80 % of
/// the disk's time, the published loss where every fsync had a flush to itself. (Sharing flushes
/// without waiting then costs 30 %, which was published as well.)
fn disk(flush_us: u64) -> DeviceSpec {
    let flush_time = Duration::from_micros(flush_us);
    DeviceSpec::Disk { size_bytes: VOLUME_BYTES, read_time: flush_time / 20, flush_time }
}

/// The settings that all measurements share.
fn settings_of(ab: &AbSettings, clients: usize) -> Settings {
    Settings {
        clients: ab.clients.unwrap_or(clients),
        duration: ab.duration,
        loadfile: ab.loadfile.clone(),
        interrupt: ab.interrupt.clone(),
        ..Settings::default()
    }
}

fn measurement(
    name: String,
    load: Workload,
    device: DeviceSpec,
    settings: Settings,
    wanted: &[Wanted],
) -> Measurement {
    let wanted = wanted.iter().chain(&RESOURCES).copied().collect();
    Measurement {
        name,
        load: Load::Known(load),
        device,
        own_size: false,
        settings,
        locked_descents: LockedDescents::Neither,
        wanted,
    }
}

fn clients_text(settings: &Settings) -> String {
    format!("{} {}", settings.clients, if settings.clients == 1 { "thread" } else { "threads" })
}

/// All measurements of a mechanism.
pub(super) fn of(mechanism: Mechanism, ab: &AbSettings) -> Vec<Measurement> {
    let mut all = match mechanism {
        Mechanism::EarlyWakeUp => early_wake_up(ab),
        Mechanism::TreeLocks => tree_locks(ab),
        Mechanism::FlushCoordination => flush_coordination(ab),
        Mechanism::Tickets => [8, 32, 128].map(|free_share| tickets(ab, free_share)).into(),
        Mechanism::CommittedItemList => committed_item_list(ab),
    };
    if let Some(device) = &ab.device {
        all.iter_mut().for_each(|measurement| use_device(measurement, device));
    }
    // Where only the device differed, nothing differs any more.
    all.dedup_by(|later, earlier| later.name == earlier.name);
    all
}

/// Puts the user's device in the place of the measurement's own.
fn use_device(measurement: &mut Measurement, device: &DeviceSpec) {
    let (own_bytes, mut device) = (measurement.device.size_bytes(), device.clone());
    match &mut device {
        DeviceSpec::Image { size_bytes, .. }
        | DeviceSpec::Memory { size_bytes }
        | DeviceSpec::Simulated { size_bytes, .. }
        | DeviceSpec::Disk { size_bytes, .. } => {
            if measurement.own_size {
                *size_bytes = own_bytes;
            }
        }
    }
    if let Some((before, _)) = measurement.name.split_once(", flush ") {
        measurement.name = before.to_owned();
    }
    measurement.device = device;
}

fn early_wake_up(ab: &AbSettings) -> Vec<Measurement> {
    const FLUSH: [Wanted; 4] = [
        Wanted::less("Flush, mean", "µs", Source::Latency("Flush", Quantile::Average)),
        Wanted::less("Flush, p99", "µs", Source::Latency("Flush", Quantile::P99)),
        Wanted::neutral("fsyncs", "", Source::Fsyncs),
        Wanted::neutral("fallbacks to a commit", "", Source::Fallbacks),
    ];
    let published = |clients: usize, commits_only: bool| match (clients, commits_only) {
        (32, true) => ["+4.1 %", "-39.6 %", "+25.8 %"],
        (64, true) => ["+6.8 %", "-18.1 %", ""],
        _ => ["", "", ""],
    };
    // Fallbacks are rare, even with the smallest log; without them the mechanism has nothing to do.
    let of = |commits_only: bool, clients: usize| {
        let [throughput, longest, mean] = published(clients, commits_only);
        let mut wanted = vec![
            Wanted::more("throughput", "MB/s", Source::Throughput).published(throughput),
            Wanted::less("maximum latency", "ms", Source::Longest).published(longest),
        ];
        wanted.extend(FLUSH);
        wanted[2] = wanted[2].published(mean);
        let mut engine = EngineSettings { discard: true, ..EngineSettings::default() };
        if commits_only {
            baselines::commit_for_each_fsync(&mut engine);
        }
        let settings = Settings { engine, ..settings_of(ab, clients) };
        let log = if commits_only { "every fsync a commit" } else { "with the log" };
        let name = format!("dbench, {} clients, discard, {log}", settings.clients);
        measurement(name, Workload::Dbench, discarding(), settings, &wanted)
    };
    [(true, 32), (true, 64), (false, 32), (false, 64)]
        .map(|(commits_only, clients)| of(commits_only, clients))
        .into()
}

/// Every load twice: the lock alone, in trees whose descents lock their way down on both sides, as
/// where the figures were published; then all of the predecessor against the product, whose routes
/// are part of what became of the mechanism.
fn tree_locks(ab: &AbSettings) -> Vec<Measurement> {
    let alone = tree_loads(ab).into_iter().map(|load| Measurement {
        name: format!("{}, lock alone", load.name),
        locked_descents: LockedDescents::Both,
        ..load
    });
    let all = tree_loads(ab).into_iter().map(|load| Measurement {
        name: format!("{}, lock and descents", load.name),
        locked_descents: LockedDescents::Off,
        // What was published is about the lock.
        wanted: load.wanted.iter().map(|wanted| wanted.published("")).collect(),
        ..load
    });
    alone.chain(all).collect()
}

fn tree_loads(ab: &AbSettings) -> Vec<Measurement> {
    let dbench = |clients: usize| {
        let published = if clients == 200 { ["+227 %", "1/2 to 1/3"] } else { ["", ""] };
        let mut settings = settings_of(ab, clients);
        if settings.clients >= DBENCH_CLIENTS_MANY && !ab.quick {
            settings.duration = settings.duration.max(DBENCH_DURATION_MIN);
        }
        let wanted = [
            Wanted::more("throughput", "MB/s", Source::Throughput).published(published[0]),
            Wanted::less("maximum latency", "ms", Source::Longest),
            Wanted::neutral("lock waits", "", Source::LockWaits),
        ];
        let device = DeviceSpec::Memory { size_bytes: DBENCH_VOLUME_BYTES };
        let mut made = measurement(
            format!("dbench, {} clients", settings.clients),
            Workload::Dbench,
            device,
            settings,
            &wanted,
        );
        if let Some(switches) = made.wanted.last_mut() {
            *switches = switches.published(published[1]);
        }
        made
    };
    let fsync_write = |clients: usize| {
        let published = match clients {
            64 => "-9.9 %",
            160 => "+2.95 %",
            _ => "",
        };
        let settings = settings_of(ab, clients);
        let wanted = [
            Wanted::more("fsyncs", "1/s", Source::Throughput).published(published),
            Wanted::less("fsync, p50", "µs", Source::Latency("fsync", Quantile::P50)),
            Wanted::less("fsync, p99", "µs", Source::Latency("fsync", Quantile::P99)),
        ];
        measurement(
            format!("fsync-write, {}", clients_text(&settings)),
            Workload::FsyncWrite,
            memory(),
            settings,
            &wanted,
        )
    };
    let mut all: Vec<Measurement> = [200, 8].map(dbench).into();
    all.extend([1, 2, 8, 64, 160].map(fsync_write));
    all.push(empty_files(ab));
    all
}

fn empty_files(ab: &AbSettings) -> Measurement {
    let settings = Settings {
        file_bytes: 0,
        directories: 16,
        sync_method: SyncMethod::None,
        ..settings_of(ab, 16)
    };
    let wanted = [
        Wanted::more("files", "1/s", Source::Throughput).published("-11.65 %"),
        Wanted::less("create, p50", "µs", Source::Latency("create", Quantile::P50)),
        Wanted::less("create, p99", "µs", Source::Latency("create", Quantile::P99)),
        Wanted::less("create, max", "µs", Source::Latency("create", Quantile::Max)),
    ];
    measurement(
        format!("fs_mark, empty files, {}", clients_text(&settings)),
        Workload::FsMark,
        memory(),
        settings,
        &wanted,
    )
}

fn flush_coordination(ab: &AbSettings) -> Vec<Measurement> {
    const WANTED: [Wanted; 6] = [
        Wanted::more("reads and writes", "1/s", Source::Throughput),
        Wanted::less("loss to flushes", "%", Source::Percent).published("80 → 25-30 → 5-14 %"),
        Wanted::less("fsync, p50", "µs", Source::Latency("fsync", Quantile::P50)),
        Wanted::less("fsync, p99", "µs", Source::Latency("fsync", Quantile::P99)),
        Wanted::less("fsync, max", "µs", Source::Latency("fsync", Quantile::Max)),
        Wanted::neutral("fsyncs per log flush", "", Source::FsyncsPerFlush),
    ];
    let of = |(device, shown, clients): (DeviceSpec, &str, usize)| {
        let mut settings = settings_of(ab, clients);
        if let (DeviceSpec::Disk { flush_time, .. }, false) = (&device, ab.quick || clients == 1) {
            // Many clients in a circle need some time until it is round, the more the slower the
            // disk is.
            settings.duration = settings.duration.max(*flush_time * 500);
        }
        let name = format!("fsync-happy, {}, flush {shown}", clients_text(&settings));
        measurement(name, Workload::FsyncHappy, device, settings, &WANTED)
    };
    let single =
        [(simulated(200), "0.2 ms", 1), (disk(10_000), "10 ms", 1), (disk(30_000), "30 ms", 1)];
    let many = [64, 128]
        .map(|clients| [(disk(10_000), "10 ms", clients), (disk(30_000), "30 ms", clients)]);
    single
        .into_iter()
        .chain([(simulated(200), "0.2 ms", 64)])
        .chain(many.into_iter().flatten())
        .map(of)
        .collect()
}

fn tickets(ab: &AbSettings, free_share: u64) -> Measurement {
    let settings = settings_of(ab, 16);
    let longest = |name, figure, published| {
        Wanted::less(name, "µs", Source::Figure(figure)).published(published)
    };
    let mut wanted = vec![
        Wanted::more("files", "1/s", Source::Throughput).published("+12.1 % (212,897 → 238,613)"),
        Wanted::more("files, slow intervals", "1/s", Source::Figure(tight_volume::SLOW_INTERVALS))
            .published("+14.0 % (189,682 → 216,291)"),
        longest("longest create, p50", tight_volume::LONGEST_P50, "-21.9 % (264,665 → 206,772)"),
        longest("longest create, p90", tight_volume::LONGEST_P90, "-22.1 % (456,347 → 355,431)"),
        longest("longest create, p99", tight_volume::LONGEST_P99, "-28.8 % (659,490 → 469,635)"),
        longest("longest create, max", tight_volume::LONGEST_MAX, "-48.8 % (1,001,413 → 512,389)"),
        Wanted::less("create, p50", "µs", Source::Latency("create", Quantile::P50)),
        Wanted::less("create, p90", "µs", Source::Latency("create", Quantile::P90)),
        Wanted::less("create, p99", "µs", Source::Latency("create", Quantile::P99)),
        Wanted::less("creations refused", "", Source::Figure(tight_volume::REFUSED)),
        Wanted::less("removals refused", "", Source::Figure(tight_volume::NOT_REMOVED)),
        Wanted::neutral("intervals with creations", "", Source::Figure(tight_volume::INTERVALS)),
        Wanted::neutral("tickets waited", "", Source::TicketsWaited),
    ];
    wanted.extend(RESOURCES);
    let name = format!(
        "fs_mark, empty files, {}, 1/{free_share} of the space free",
        clients_text(&settings)
    );
    let device = DeviceSpec::Simulated {
        size_bytes: TIGHT_VOLUME_BYTES,
        flush_time: Duration::from_millis(1),
        discard_time: Duration::ZERO,
    };
    Measurement {
        name,
        load: Load::TightVolume { free_share },
        device,
        own_size: true,
        settings,
        locked_descents: LockedDescents::Neither,
        wanted,
    }
}

fn committed_item_list(ab: &AbSettings) -> Vec<Measurement> {
    let settings = Settings { files: ab.quick.then_some(QUICK_FILES), ..settings_of(ab, 8) };
    let wanted = [
        Wanted::more("create", "files/s", Source::Figure("create, rate"))
            .published("+11.9 % (with checksums +11.4 %)"),
        Wanted::less("unlink", "s", Source::Figure("unlink, time"))
            .published("-6.8 % (with checksums -7.3 %)"),
        Wanted::less("create, p99", "µs", Source::Latency("create", Quantile::P99)),
        Wanted::less("unlink, p99", "µs", Source::Latency("unlink", Quantile::P99)),
    ];
    let name = format!("create-walk-unlink, {}", clients_text(&settings));
    let mut all = vec![measurement(name, Workload::CreateWalkUnlink, memory(), settings, &wanted)];
    all.extend([1, 8, 64].map(|clients| attribute_changes(ab, clients)));
    all
}

/// The nearest that a file system's caller comes to the list alone.
fn attribute_changes(ab: &AbSettings, clients: usize) -> Measurement {
    let settings = settings_of(ab, clients);
    let mut wanted = vec![
        Wanted::more("changes logged", "1/s", Source::Throughput),
        Wanted::less("change, p50", "µs", Source::Latency("set times", Quantile::P50)),
        Wanted::less("change, p99", "µs", Source::Latency("set times", Quantile::P99)),
    ];
    wanted.extend(RESOURCES);
    let name = format!("items logged again, {}", clients_text(&settings));
    Measurement {
        name,
        load: Load::AttributeChanges,
        device: memory(),
        own_size: false,
        settings,
        locked_descents: LockedDescents::Neither,
        wanted,
    }
}
