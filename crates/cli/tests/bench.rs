//! `cairn bench` as a user meets it: figures, refusals, and nothing left behind after failures and
//! interruptions.
use cairn_environment::clock;
use cairn_harness::mounts;
use rustix::process::{Pid, Signal};
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::Duration;

fn cairn(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
    command.args(arguments).current_dir(folder);
    command
}

fn told(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn all_told(output: &Output, parts: &[&str]) -> bool {
    parts.iter().all(|part| told(output).contains(part))
}

#[track_caller]
fn exits_with(code: i32, folder: &Path, arguments: &[&str]) -> String {
    let output = cairn(folder, arguments).output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(code),
        "cairn {}: {}",
        arguments.join(" "),
        told(&output)
    );
    told(&output)
}

/// The names of the files in a folder.
fn left_in(folder: &Path) -> Vec<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

fn can_make_loop_devices() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
        && Path::new("/dev/loop-control").exists()
        && Path::new("/dev/fuse").exists()
}

#[test]
fn a_load_prints_figures_as_text_and_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let run = ["bench", "run", "fsync-write", "--clients", "2", "--seconds", "0.2", "--target"];
    let text = exits_with(0, folder.path(), &[&run[..], &["."]].concat());
    assert!(text.contains("p99.9") && text.contains("fsyncs/s"), "{text}");
    let json =
        exits_with(0, folder.path(), &[&run[..], &["engine:image:size=64M", "--json"]].concat());
    let report: serde_json::Value =
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!(
        (report["clients"].as_u64(), report["workload"].as_str()),
        (Some(2), Some("fsync-write"))
    );
    assert_eq!(
        (report["origin"]["command"][0].as_str(), report["target"].as_str()),
        (Some("cairn"), Some("engine on image")),
        "{json}"
    );
    assert!(report["statistics"]["log_flushes"].as_u64() > Some(0), "{json}");
    assert!(left_in(folder.path()).is_empty(), "an image that a run makes goes away with it");
    exits_with(0, folder.path(), &["mkfs", "image", "--size", "64M"]);
    exits_with(0, folder.path(), &[&run[..], &["engine:image"]].concat());
    assert_eq!(left_in(folder.path()), ["image"]);
    exits_with(0, folder.path(), &["fsck", "--data", "image"]);
}

#[test]
fn mistakes_get_clear_messages() {
    let folder = tempfile::tempdir().unwrap();
    let told = exits_with(1, folder.path(), &["bench", "run", "fs_mark", "--target", "missing"]);
    assert!(told.contains("missing") && told.contains("directory"), "{told}");
    let told = exits_with(2, folder.path(), &["bench", "run", "fs-mark", "--target", "."]);
    assert!(told.contains("fs_mark") && told.contains("dbench"), "{told}");
    let told =
        exits_with(1, folder.path(), &["bench", "run", "fs_mark", "--target", ".", "-S", "9"]);
    assert!(told.contains("0 to 6"), "{told}");
    if !cfg!(feature = "baselines") {
        let told = exits_with(1, folder.path(), &["bench", "ab", "M5"]);
        assert!(told.contains("cargo build --release -p cairn --features baselines"), "{told}");
    }
    let told = exits_with(1, folder.path(), &["bench", "peers", "--fs", "zfs"]);
    assert!(told.contains("btrfs"), "{told}");
    let told = exits_with(2, folder.path(), &["bench", "peers", "--workload", "tool:bonnie"]);
    assert!(told.contains("tool:pgbench") && told.contains("fsync-write"), "{told}");
    let told = exits_with(2, folder.path(), &["bench", "peers", "--workload", "dbench@none"]);
    assert!(told.contains("dbench@16"), "{told}");
    let told = exits_with(1, folder.path(), &["bench", "peers", "--quick", "--direct-io", "both"]);
    assert!(told.contains("--repeat 2 --seconds 2 instead of --quick"), "{told}");
    let told = exits_with(
        1,
        folder.path(),
        &["bench", "run", "device-limit", "--target", "engine:memory:size=1M"],
    );
    assert!(told.contains("too small") && told.contains("size=64M"), "{told}");
    let told = exits_with(2, folder.path(), &["bench", "peers", "--direct-io", "perhaps"]);
    assert!(told.contains("both"), "{told}");
    if can_make_loop_devices() {
        let peers = ["bench", "peers", "--fs", "cairn", "--size"];
        let told = exits_with(1, folder.path(), &[&peers[..], &["900T", "--dir", "."]].concat());
        assert!(told.contains("MiB free") && told.contains("--dir"), "{told}");
        let told =
            exits_with(1, folder.path(), &[&peers[..], &["64M", "--dir", "missing"]].concat());
        assert!(told.contains("missing is not a folder"), "{told}");
        let arguments =
            [&peers[..], &["64M", "--dir", ".", "--workload", "tool:dbench,tool:pgbench"]].concat();
        let output = cairn(folder.path(), &arguments).env("PATH", "/nonexistent").output().unwrap();
        assert!(
            all_told(
                &output,
                &["not installed", "dbench (package dbench)", "leave out what needs them"]
            ),
            "{}",
            crate::told(&output)
        );
    }
    assert!(left_in(folder.path()).is_empty());
}

#[test]
fn results_become_a_page_and_tables() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| fs::write(folder.path().join(name), content).unwrap();
    let load = ["--clients", "2", "--seconds", "0.2", "--json"];
    let target = ["bench", "run", "fsync-write", "--target", "engine:memory:size=64M"];
    file("run.json", &exits_with(0, folder.path(), &[&target[..], &load].concat()));
    let quick = [
        "bench",
        "ab",
        "M3",
        "--device",
        "simulated:flush_ms=1,size=64M",
        "--clients",
        "2",
        "--quick",
        "--json",
    ];
    let compared = cairn(folder.path(), &quick).output().unwrap();
    assert!(compared.status.success(), "{}", told(&compared));
    file("ab.json", &String::from_utf8_lossy(&compared.stdout));
    let printed = exits_with(
        0,
        folder.path(),
        &["bench", "report", "run.json", "ab.json", "-o", "page.html", "--markdown"],
    );
    assert!(printed.contains("| M3 | off | on | change | published |"), "{printed}");
    let page = fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(
        page.contains("fsync-write") && page.contains("<svg") && page.ends_with("</html>\n"),
        "{page}"
    );

    file("empty.json", "");
    let told = exits_with(
        1,
        folder.path(),
        &["bench", "report", "run.json", "empty.json", "-o", "other.html"],
    );
    assert!(told.contains("empty.json") && told.contains("--json"), "{told}");
    assert!(!folder.path().join("other.html").exists());
    let told = exits_with(2, folder.path(), &["bench", "report", "run.json"]);
    assert!(told.contains("--output"), "{told}");
    let told =
        exits_with(1, folder.path(), &["bench", "report", "run.json", "-o", "missing/page.html"]);
    assert!(told.contains("cannot write missing/page.html"), "{told}");
}

/// Waits until the command has written `text` to standard error; what is returned has the rest.
fn wait_for(child: &mut Child, text: &str) -> Lines<BufReader<ChildStderr>> {
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(
        lines.by_ref().map_while(Result::ok).any(|line| line.contains(text)),
        "\"{text}\" was not told"
    );
    lines
}

fn send(child: &Child, signal: Signal) {
    rustix::process::kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn an_interrupted_load_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = cairn(
        folder.path(),
        &["bench", "run", "create-walk-unlink", "--files", "100000000", "--target", "."],
    );
    let mut child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    while left_in(folder.path()).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::yield_now();
    }
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(left_in(folder.path()).is_empty());
}

#[test]
fn an_interrupted_load_on_the_engine_leaves_no_image() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = cairn(
        folder.path(),
        &["bench", "run", "fsync-write", "--seconds", "3600", "--target", "engine:image:size=64M"],
    );
    let mut child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let open_files = format!("/proc/{}/fd", child.id());
    let has_image = || {
        let links = fs::read_dir(&open_files)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|file| fs::read_link(file.path()).ok());
        links.into_iter().any(|file| file.to_string_lossy().contains("/image"))
    };
    while !has_image() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::yield_now();
    }
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(left_in(folder.path()).is_empty(), "{:?}", left_in(folder.path()));
}

#[test]
fn peers_run_and_leave_nothing_behind() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let peers = [
        "bench",
        "peers",
        "--fs",
        "cairn",
        "--size",
        "64M",
        "--clients",
        "2",
        "--dir",
        ".",
        "--workload",
        "fsync-write",
    ];
    let json = cairn(
        folder.path(),
        &[&peers[..], &["--seconds", "0.2", "--repeat", "1", "--json"]].concat(),
    )
    .output()
    .unwrap();
    assert!(json.status.success(), "{}", told(&json));
    let summary: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let systems: Vec<&str> = summary["rows"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|row| row["system"].as_str())
        .collect();
    // Throughput, and three figures of the fsyncs.
    assert_eq!(systems, ["cairn-loop", "cairn-image"].repeat(4));
    assert!(left_in(folder.path()).is_empty());

    let markdown = cairn(
        folder.path(),
        &[&peers[..], &["--seconds", "0.2", "--repeat", "1", "--markdown"]].concat(),
    )
    .output()
    .unwrap();
    assert!(
        String::from_utf8_lossy(&markdown.stdout)
            .starts_with("| workload | cairn-loop | cairn-image |"),
        "{}",
        told(&markdown)
    );
}

#[test]
fn a_comparison_says_what_it_was_made_on() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The kernel's table of mounts writes the blank otherwise.
    fs::create_dir(folder.path().join("a b")).unwrap();
    let arguments = [
        "bench",
        "peers",
        "--fs",
        "cairn",
        "--size",
        "64M",
        "--dir",
        "a b",
        "--workload",
        "fsync-write@1,small-durable-files@3",
    ];
    let output = cairn(
        folder.path(),
        &[&arguments[..], &["--seconds", "0.2", "--repeat", "1", "--json"]].concat(),
    )
    .output()
    .unwrap();
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(traces_of(&folder.path().join("a b")), [""; 0]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        !text.contains(&*folder.path().to_string_lossy()) && !text.contains("cairn-bench-"),
        "a name of this machine: {text}"
    );
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        summary["machine"]["memory_bytes"].as_u64() > Some(0)
            && summary["date"].as_str().unwrap().ends_with('Z'),
        "{summary}"
    );
    assert_eq!(
        (&summary["command"][0], &summary["command"][2]),
        (&"cairn".into(), &"peers".into())
    );
    let samples = summary["samples"].as_array().unwrap();
    let loads: Vec<_> = samples
        .iter()
        .filter_map(|sample| Some((sample["workload"].as_str()?, sample["clients"].as_u64()?)))
        .collect();
    assert_eq!(loads, [("fsync-write@1", 1), ("small-durable-files@3", 3)].repeat(2));
    for sample in samples {
        assert!(!sample["latencies"].as_array().unwrap().is_empty(), "{sample}");
        assert!(
            sample["statistics_before"].is_object() && sample["statistics_after"].is_object(),
            "{sample}"
        );
    }
    let rows = summary["rows"].as_array().unwrap();
    let tail = rows.iter().find(|row| row["figure"] == "fsync p99").unwrap();
    assert_eq!((tail["less_is_better"].as_bool(), tail["unit"].as_str()), (Some(true), Some("ms")));
}

#[test]
fn loads_of_every_day_run_and_leave_nothing_behind() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let installed = |program: &str| Path::new("/usr/bin").join(program).exists();
    let of_programs = [
        ("git", "git"),
        ("sqlite3", "sqlite"),
        ("sqlite3", "sqlite-load"),
        ("fio", "seq-write"),
        ("fio", "rand-read@2"),
    ];
    let others = of_programs
        .into_iter()
        .chain([("fio", "one-file-fdatasync@2"), ("fio", "own-files-fdatasync@2")]);
    let others = others.filter(|(program, _)| installed(program)).map(|(_, load)| load);
    let loads: Vec<&str> = ["untar", "sync", "grep", "cp", "find", "rm", "npm-like"]
        .into_iter()
        .chain(others)
        .collect();
    let peers = [
        "bench",
        "peers",
        "--fs",
        "cairn-loop",
        "--size",
        "96M",
        "--dir",
        ".",
        "--seconds",
        "0.2",
        "--repeat",
        "1",
        "--json",
    ];
    let output = cairn(folder.path(), &[&peers[..], &["--workload", &loads.join(",")]].concat())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(traces_of(folder.path()), [""; 0]);
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = summary["rows"].as_array().unwrap();
    for load in loads {
        let row = rows.iter().find(|row| row["workload"] == load && row["figure"] == "throughput");
        let row = row.unwrap_or_else(|| panic!("{load} has no row: {summary}"));
        assert!(
            row["median"].as_f64() > Some(0.0) && row["seconds"]["wall"].as_f64() > Some(0.0),
            "{row}"
        );
        assert_eq!(row["less_is_better"].as_bool(), Some(row["unit"] == "s"), "{row}");
    }
}

#[test]
fn cairn_is_compared_over_both_transports_and_with_writeback() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let peers = [
        "bench",
        "peers",
        "--size",
        "64M",
        "--dir",
        ".",
        "--seconds",
        "0.2",
        "--repeat",
        "1",
        "--workload",
        "fsync-write@1",
    ];
    // Where it is not switched on, a mount would switch it on for the whole machine.
    let switch = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let ring = switch.as_ref().is_ok_and(|switch| switch.trim() == "Y");
    let ways = if ring {
        "cairn-dev,cairn-uring,cairn-image-writeback"
    } else {
        "cairn-dev,cairn-image-writeback"
    };
    let output =
        cairn(folder.path(), &[&peers[..], &["--json", "--fs", ways]].concat()).output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows =
        summary["rows"].as_array().unwrap().iter().filter(|row| row["figure"] == "throughput");
    let systems: Vec<&str> = rows.filter_map(|row| row["system"].as_str()).collect();
    let expected = ["cairn-loop-dev", "cairn-loop-uring", "cairn-image-writeback"];
    assert_eq!(
        systems,
        expected.into_iter().filter(|name| ring || !name.contains("uring")).collect::<Vec<_>>()
    );
    if switch.is_err() {
        let told = exits_with(1, folder.path(), &[&peers[..], &["--fs", "cairn-uring"]].concat());
        assert!(told.contains("needs FUSE over io_uring"), "{told}");
    }
    assert_eq!(traces_of(folder.path()), [""; 0]);
}

#[test]
fn the_transport_has_a_limit_that_a_volume_stays_below_or_not() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let loads = "round-trip@1,round-trip@2,untar,cp,rm,fs_mark@2,fsync-write@1,create-walk-unlink@2,small-durable-files@2";
    let arguments = [
        "bench",
        "transport",
        "--size",
        "64M",
        "--dir",
        ".",
        "--seconds",
        "0.2",
        "--repeat",
        "1",
        "--json",
        "--workload",
        loads,
    ];
    let output = cairn(folder.path(), &arguments).output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(traces_of(folder.path()), [""; 0]);
    let limits: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = limits["limits"].as_array().unwrap();
    for load in loads.split(',') {
        let row = rows.iter().find(|row| {
            row["workload"] == load && row["figure"] == "throughput" && row["transport"] == "dev"
        });
        let row = row.unwrap_or_else(|| panic!("{load} has no row: {limits}"));
        assert!(
            row["limit"]["median"].as_f64() > Some(0.0)
                && row["volume"]["median"].as_f64() > Some(0.0),
            "{row}"
        );
        assert!(row["share_of_limit"].as_f64() > Some(0.0), "{row}");
    }
    fs::write(folder.path().join("limits.json"), &output.stdout).unwrap();
    let printed = exits_with(0, folder.path(), &["bench", "report", "limits.json", "--markdown"]);
    assert!(printed.contains("| workload | cairn-memory-dev | cairn-image-dev |"), "{printed}");
    let told = exits_with(2, folder.path(), &["bench", "transport", "--transport", "tcp"]);
    assert!(told.contains("dev or uring"), "{told}");
}

#[test]
fn a_load_whose_program_is_missing_is_left_out() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let peers = [
        "bench",
        "peers",
        "--fs",
        "cairn-image",
        "--size",
        "64M",
        "--dir",
        ".",
        "--seconds",
        "0.2",
        "--repeat",
        "1",
        "--workload",
    ];
    // All that is installed there unmounts.
    let programs = tempfile::tempdir().unwrap();
    let umount = ["/usr/bin/umount", "/bin/umount"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .unwrap();
    std::os::unix::fs::symlink(umount, programs.path().join("umount")).unwrap();
    let run = |loads: &str| {
        cairn(folder.path(), &[&peers[..], &[loads]].concat())
            .env("PATH", programs.path())
            .output()
            .unwrap()
    };
    let output = run("untar,sqlite,fsync-write@1");
    assert!(output.status.success(), "{}", told(&output));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("untar is left out: tar (package tar) is not installed"), "{printed}");
    assert!(
        printed.contains("fsync-write@1, 1 client (fsyncs/s)")
            && !printed.contains("sqlite, 1 client"),
        "{printed}"
    );
    let output = run("untar");
    assert!(
        all_told(&output, &["nothing can be measured", "untar is left out"]),
        "{}",
        told(&output)
    );
    assert_eq!(traces_of(folder.path()), [""; 0]);
}

/// What a comparison in `folder` has on this machine: mounts, loop devices, processes, files.
fn traces_of(folder: &Path) -> Vec<String> {
    let folder = fs::canonicalize(folder).unwrap().display().to_string();
    let mut traces = left_in(Path::new(&folder));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap().replace("\\040", " ");
    traces.extend(mounts.lines().filter(|line| line.contains(&folder)).map(str::to_owned));
    for device in fs::read_dir("/sys/block").unwrap().flatten() {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        traces
            .extend(file.contains(&folder).then(|| format!("{}: {file}", device.path().display())));
    }
    traces.extend(commands_with(&folder));
    traces
}

/// Command lines of running programs that contain a text.
fn commands_with(text: &str) -> Vec<String> {
    let commands = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    commands
        .map(|command| String::from_utf8_lossy(&command).replace('\0', " "))
        .filter(|command| command.contains(text))
        .collect()
}

/// Interrupts a comparison as soon as `is_moment` sees what it waits for, and expects nothing to be
/// left.
fn interrupt_when(workload: &str, signal: Signal, is_moment: impl Fn(&Path) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "bench",
        "peers",
        "--fs",
        "cairn",
        "--size",
        "256M",
        "--clients",
        "2",
        "--dir",
        ".",
        "--seconds",
        "3600",
        "--workload",
    ];
    let mut child = cairn(folder.path(), &[&arguments[..], &[workload]].concat())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let told = wait_for(&mut child, "writing the image");
    while !is_moment(&fs::canonicalize(folder.path()).unwrap()) {
        assert!(
            child.try_wait().unwrap().is_none(),
            "{workload} ended by itself: {:?}",
            told.map_while(Result::ok).collect::<Vec<_>>()
        );
        clock::sleep(Duration::from_millis(2));
    }
    send(&child, signal);
    let told: Vec<String> = told.map_while(Result::ok).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{told:?}");
    assert!(told.iter().any(|line| line.contains("interrupted")), "{told:?}");
    let traces = traces_of(folder.path());
    assert!(traces.is_empty(), "{traces:?}");
}

#[test]
fn an_interruption_at_any_moment_leaves_nothing_behind() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let has_mount = |folder: &Path| mounts::is_mounted_below(folder);
    let runs_with = |text: &str, folder: &Path| {
        commands_with(&folder.display().to_string()).iter().any(|command| command.contains(text))
    };
    interrupt_when("fsync-write", Signal::INT, |folder| !left_in(folder).is_empty());
    interrupt_when("fsync-write", Signal::TERM, |folder| runs_with("mount --foreground", folder));
    interrupt_when("fsync-write", Signal::INT, has_mount);
    interrupt_when("small-durable-files", Signal::HUP, |folder| runs_with("bench run", folder));
    if Path::new("/usr/bin/dbench").exists() {
        interrupt_when("tool:dbench", Signal::INT, |folder| runs_with("dbench -t", folder));
    }
    if Path::new("/usr/bin/fio").exists() {
        interrupt_when("tool:fio", Signal::INT, |folder| runs_with("fio --name", folder));
    }
}

#[test]
fn who_is_not_root_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = if fs::metadata("/proc/self").unwrap().uid() == 0 {
        // The program, where another user can reach it.
        let program = folder.path().join("cairn");
        fs::copy(env!("CARGO_BIN_EXE_cairn"), &program).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(program);
        command.uid(65_534).current_dir("/");
        command
    } else {
        Command::new(env!("CARGO_BIN_EXE_cairn"))
    };
    let output =
        command.args(["bench", "peers", "--fs", "cairn", "--dir", "/tmp"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    assert!(told(&output).contains("root") && told(&output).contains("sudo"), "{}", told(&output));
}
