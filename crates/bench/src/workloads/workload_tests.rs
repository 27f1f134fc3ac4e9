//! Every load on every kind of target: it does what it says, counts it, and leaves nothing behind.
use super::*;
use crate::spec::DeviceSpec;
use cairn_blockdev::FileDevice;
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

pub const LOAD: &str = r#"Deltree "\clients\client1" NT_STATUS_OK
Mkdir "\clients" NT_STATUS_OK
NTCreateX "\clients\client1" 0x1 0x2 1 NT_STATUS_OK
Close 1 NT_STATUS_OK
NTCreateX "\clients\client1\A.DOC" 0x40 0x1 2 NT_STATUS_OBJECT_NAME_NOT_FOUND
NTCreateX "\clients\client1\A.DOC" 0x40 0x2 3 NT_STATUS_OK
WriteX 3 0 65536 65536 NT_STATUS_OK
LockX 3 2147483538 1 NT_STATUS_OK
QUERY_FILE_INFORMATION 3 258 NT_STATUS_OK
SET_FILE_INFORMATION 3 1004 NT_STATUS_OK
ReadX 3 61440 8192 4096 NT_STATUS_OK
UnlockX 3 2147483538 1 NT_STATUS_OK
Flush 3 NT_STATUS_OK
Close 3 NT_STATUS_OK
NTCreateX "\clients\client1" 0x40 0x1 4 NT_STATUS_OK
Close 4 NT_STATUS_OK
QUERY_FS_INFORMATION 1 NT_STATUS_OK
QUERY_PATH_INFORMATION "\clients\client1\a.doc" 1004 NT_STATUS_OK
FIND_FIRST "\clients\client1\*" 260 1366 1 NT_STATUS_OK
Rename "\clients\client1\A.DOC" "\clients\client1\B.DOC" NT_STATUS_OK
NTCreateX "\clients\client1\B.DOC" 0x40 0x5 5 NT_STATUS_OK
ReadX 5 0 10 0 NT_STATUS_OK
Close 5 NT_STATUS_OK
Unlink "\clients\client1\B.DOC" 0x6 NT_STATUS_OK
Rmdir "\clients\client1" NT_STATUS_OK
"#;

/// No directory of another file system can run these.
const NEED_SNAPSHOTS: [Workload; 5] = [
    Workload::Snapshots,
    Workload::SnapshotsBesideDbench,
    Workload::SnapshotDeletion,
    Workload::Forks,
    Workload::ManySnapshots,
];

fn settings(folder: &Path) -> Settings {
    let loadfile = folder.join("load.txt");
    fs::write(&loadfile, LOAD).unwrap();
    Settings {
        clients: 2,
        duration: Duration::from_millis(60),
        files: Some(20),
        file_bytes: 20_000,
        directories: 3,
        loadfile: Some(loadfile),
        ..Settings::default()
    }
}

fn count(report: &Report, name: &str) -> u64 {
    report
        .operations
        .iter()
        .find(|operation| operation.name == name)
        .map_or(0, |operation| operation.count)
}

fn targets(folder: &Path) -> Vec<TargetSpec> {
    let directory = folder.join("directory");
    fs::create_dir(&directory).unwrap();
    let image = DeviceSpec::Image { path: folder.join("image"), size_bytes: 128 << 20 };
    let simulated = DeviceSpec::Simulated {
        size_bytes: 128 << 20,
        flush_time: Duration::from_micros(200),
        discard_time: Duration::ZERO,
    };
    vec![TargetSpec::Directory(directory), TargetSpec::Engine(image), TargetSpec::Engine(simulated)]
}

/// The names in a volume.
fn left_in(spec: &TargetSpec) -> Vec<String> {
    let target = spec.open(FlushPolicy::Auto, FlushMode::Real, &EngineSettings::default()).unwrap();
    let mut left = Vec::new();
    let mut take = |entry: crate::target::Entry<'_>| {
        left.push(String::from_utf8_lossy(entry.name).into_owned());
        true
    };
    target.list("", &mut take).unwrap();
    target.close().unwrap();
    left
}

#[test]
fn every_load_runs_on_every_target_and_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(folder.path());
    // One that was there before: it stays, and nothing of a load stays in it.
    let image = FileDevice::create(&folder.path().join("image"), 128 << 20).unwrap();
    mkfs(&image, &MkfsOptions::default()).unwrap();
    drop(image);
    for spec in targets(folder.path()) {
        for workload in Workload::ALL {
            if NEED_SNAPSHOTS.contains(&workload) && matches!(spec, TargetSpec::Directory(_)) {
                let refused = format!("{:#}", workload.run(&spec, &settings).unwrap_err());
                assert!(refused.contains("Cairn") || refused.contains("engine:"), "{refused}");
                continue;
            }
            let run = |settings: &Settings| {
                workload.run(&spec, settings).unwrap_or_else(|error| {
                    panic!("{} on {}: {error:#}", workload.name(), spec.name())
                })
            };
            let mut report = run(&settings);
            // On a busy machine the first operation may take longer than a short run.
            if report.completed == 0 {
                report = run(&Settings { duration: Duration::from_secs(10), ..settings.clone() });
            }
            assert_eq!(report.workload, workload.name());
            assert!(report.completed > 0 && report.throughput.value > 0.0, "{report}");
            assert!(
                report.operations.iter().all(|operation| operation.count > 0
                    && operation.p50_us.unwrap() <= operation.max_us),
                "{report}"
            );
        }
        if let TargetSpec::Directory(directory) = &spec {
            assert_eq!(fs::read_dir(directory).unwrap().count(), 0);
        } else if let Ok(target) =
            spec.open(FlushPolicy::Auto, FlushMode::Real, &EngineSettings::default())
        {
            let mut left = 0;
            target
                .list("", &mut |_| {
                    left += 1;
                    true
                })
                .unwrap();
            target.close().unwrap();
            assert_eq!(left, 0, "{}", spec.name());
        }
    }
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["directory", "image", "load.txt"], "no scratch file is left");
}

#[test]
fn loads_count_what_they_do() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { duration: Duration::from_secs(60), ..settings(folder.path()) };
    let spec = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 128 << 20 });
    for (method, fsyncs, syncs) in
        [(0, 0, 0), (1, 40, 0), (2, 0, 2), (3, 40, 0), (4, 40, 2), (5, 40, 0), (6, 40, 2)]
    {
        let sync_method = SyncMethod::from_number(method).unwrap();
        let report =
            Workload::FsMark.run(&spec, &Settings { sync_method, ..settings.clone() }).unwrap();
        let counts = ["create", "write", "close", "fsync", "sync"].map(|name| count(&report, name));
        assert_eq!(counts, [40, 80, 40, fsyncs, syncs], "method {method}");
        assert_eq!(report.completed, 40);
    }
    let report = Workload::CreateWalkUnlink.run(&spec, &settings).unwrap();
    assert_eq!(
        ["create", "status", "unlink", "list"].map(|name| count(&report, name)),
        [40, 40, 40, 2]
    );
    assert_eq!(SyncMethod::from_number(7), None);
}

#[test]
fn a_replay_runs_each_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(folder.path());
    let directory = folder.path().join("directory");
    fs::create_dir(&directory).unwrap();
    let names = [
        "NTCreateX",
        "Close",
        "Rename",
        "Unlink",
        "Flush",
        "Find",
        "Qpathinfo",
        "Sfileinfo",
        "LockX",
        "Rmdir",
        "Deltree",
    ];
    for spec in [
        TargetSpec::Directory(directory),
        TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 128 << 20 }),
    ] {
        // A slow machine takes longer for one replay.
        loop {
            let report = Workload::Dbench.run(&spec, &settings).unwrap();
            let missing = names.iter().find(|name| count(&report, name) == 0);
            let Some(missing) = missing else { break };
            assert!(settings.duration < Duration::from_secs(60), "{missing}: {report}");
            settings.duration *= 4;
        }
    }
    fs::write(
        settings.loadfile.as_ref().unwrap(),
        "Deltree \"\\clients\" NT_STATUS_OK\nUnlink \"\\missing\" 0x6 NT_STATUS_OK\n",
    )
    .unwrap();
    let spec = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 64 << 20 });
    let error = format!("{:#}", Workload::Dbench.run(&spec, &settings).unwrap_err());
    assert!(error.contains("Unlink, line 2"), "{error}");
}

#[test]
fn an_interrupted_load_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(folder.path());
    settings.interrupt.flag().store(true, Ordering::Relaxed);
    let directory = folder.path().join("directory");
    fs::create_dir(&directory).unwrap();
    let path = folder.path().join("image");
    let image = FileDevice::create(&path, 64 << 20).unwrap();
    mkfs(&image, &MkfsOptions::default()).unwrap();
    drop(image);
    let image = TargetSpec::Engine(DeviceSpec::Image { path, size_bytes: 64 << 20 });
    for workload in Workload::ALL {
        let needs_snapshots = NEED_SNAPSHOTS.contains(&workload);
        let spec =
            if needs_snapshots { image.clone() } else { TargetSpec::Directory(directory.clone()) };
        let error = workload.run(&spec, &settings).unwrap_err();
        assert!(error.to_string().contains("interrupted"), "{}: {error:#}", workload.name());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "{}", workload.name());
        if needs_snapshots {
            assert_eq!(left_in(&image), Vec::<String>::new(), "{}", workload.name());
        }
    }
}

#[test]
fn a_failed_clean_up_is_told_beside_the_failed_load() {
    let folder = tempfile::tempdir().unwrap();
    let spec = TargetSpec::Directory(folder.path().into());
    let run = |load: &dyn Fn(&Place) -> anyhow::Result<Findings>| {
        let report =
            run_in_folder("fsync-write", &spec, &Settings::default(), FlushMode::Real, load);
        format!("{:#}", report.unwrap_err())
    };
    let error = run(&|place| {
        // A file in its place can't be removed as a tree.
        place.target.remove_directory(&place.folder)?;
        fs::write(folder.path().join(&place.folder), "")?;
        anyhow::bail!("the load failed")
    });
    assert!(
        error.starts_with("the load failed; also, cairn-bench-")
            && error.contains("is left behind"),
        "{error}"
    );
    assert_eq!(run(&|_| anyhow::bail!("the load failed")), "the load failed");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "only the file");
}

#[test]
fn mistakes_get_clear_messages() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(folder.path());
    let run = |target: &str, settings: &Settings| {
        let spec: TargetSpec = target.parse().unwrap();
        format!("{:#}", Workload::FsyncWrite.run(&spec, settings).unwrap_err())
    };
    let path = |name: &str| folder.path().join(name).display().to_string();
    assert!(run(&path("missing"), &settings).contains("name a directory"));
    assert!(run(&path("load.txt"), &settings).contains("name a directory"));
    assert!(run(&format!("engine:{}", path("load.txt")), &settings).contains("not a"));
    assert!(run("engine:memory:size=1M", &settings).contains("too small"));
    let small = "engine:memory:size=1M".parse().unwrap();
    let error = format!("{:#}", Workload::DeviceLimit.run(&small, &settings).unwrap_err());
    assert!(error.contains("1024 KiB are too small") && error.contains("size=64M"), "{error}");
    assert!(
        run("engine:memory", &Settings { clients: 0, ..settings.clone() }).contains("0 clients")
    );
    let tiny = format!("engine:{}:size=1M", path("tiny"));
    assert!(run(&tiny, &settings).contains("too small"));
    assert!(!folder.path().join("tiny").exists());
    assert!("fsync-wride".parse::<Workload>().unwrap_err().contains("fsync-write"));
    let missing = Settings { loadfile: Some(folder.path().join("none")), ..settings };
    let memory = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 64 << 20 });
    for workload in [Workload::Dbench, Workload::SnapshotsBesideDbench] {
        let error = format!("{:#}", workload.run(&memory, &missing).unwrap_err());
        assert!(error.contains("--loadfile"), "{error}");
    }
}

#[test]
fn a_load_runs_in_a_subvolume_with_snapshots_and_leaves_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let image = FileDevice::create(&path, 64 << 20).unwrap();
    mkfs(&image, &MkfsOptions::default()).unwrap();
    drop(image);
    let spec = TargetSpec::Engine(DeviceSpec::Image { path, size_bytes: 64 << 20 });
    let settings = Settings { snapshots: Some(70), ..settings(folder.path()) };
    let report = Workload::FsMark.run(&spec, &settings).unwrap();
    let figure = |name: &str| report.figures.iter().find(|figure| figure.name == name).unwrap();
    assert_eq!(figure("snapshots of the load's folder").value, 70.0);
    let [with, without] = ["with them", "without any"]
        .map(|runs| figure(&format!("throughput {runs}, median of 2 runs")).value);
    assert!(with > 0.0 && without > 0.0);
    assert_eq!(figure("ratio").value, with / without);
    let error = Workload::Isolation.run(&spec, &settings).unwrap_err().to_string();
    assert!(error.contains("--snapshots"), "{error}");
    assert_eq!(left_in(&spec), Vec::<String>::new());
}

#[test]
fn forks_that_come_at_once_share_commits() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { clients: 16, ..settings(folder.path()) };
    let spec = TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 256 << 20 });
    let report = Workload::Forks.run(&spec, &settings).unwrap();
    let figure = |name: &str| report.figures.iter().find(|figure| figure.name == name).unwrap();
    assert_eq!((report.completed, count(&report, "fork with all others")), (160, 160));
    assert!(figure("commits of a round").value >= 1.0 && figure("forks per commit").value >= 1.0);
    let report = Workload::ManySnapshots.run(&spec, &settings).unwrap();
    let figure = |name: &str| report.figures.iter().find(|figure| figure.name == name).unwrap();
    assert_eq!(figure("snapshots").value, 20.0);
    assert_eq!((count(&report, "open"), count(&report, "list again")), (5, 5));
}
