//! `cairn bench` as a user meets it: figures, refusals, and nothing left behind after failures and interruptions.
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

fn cairn(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
    command.args(arguments).current_dir(folder);
    command
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
fn exits_with(code: i32, folder: &Path, arguments: &[&str]) -> String {
    let output = cairn(folder, arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "cairn {}: {}", arguments.join(" "), told(&output));
    told(&output)
}

/// Files in a folder, at most so many as one expects to be none.
fn left_in(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

fn can_make_loop_devices() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) && Path::new("/dev/loop-control").exists() && Path::new("/dev/fuse").exists()
}

#[test]
fn a_load_prints_figures_as_text_and_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let run = ["bench", "run", "fsync-write", "--clients", "2", "--seconds", "0.2", "--target"];
    let text = exits_with(0, folder.path(), &[&run[..], &["."]].concat());
    assert!(text.contains("p99.9") && text.contains("fsyncs/s"), "{text}");
    let json = exits_with(0, folder.path(), &[&run[..], &["engine:image:size=64M", "--json"]].concat());
    let report: serde_json::Value = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"));
    assert_eq!((report["clients"].as_u64(), report["workload"].as_str()), (Some(2), Some("fsync-write")));
    assert!(report["statistics"]["log_flushes"].as_u64() > Some(0), "{json}");
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
    let told = exits_with(1, folder.path(), &["bench", "run", "fs_mark", "--target", ".", "-S", "9"]);
    assert!(told.contains("0 to 6"), "{told}");
    if !cfg!(feature = "baselines") {
        let told = exits_with(1, folder.path(), &["bench", "ab", "M5"]);
        assert!(told.contains("cargo build --release -p cairn --features baselines"), "{told}");
    }
    let told = exits_with(1, folder.path(), &["bench", "peers", "--fs", "zfs"]);
    assert!(told.contains("btrfs"), "{told}");
    if can_make_loop_devices() {
        let told = exits_with(1, folder.path(), &["bench", "peers", "--fs", "cairn", "--size", "900T", "--dir", "."]);
        assert!(told.contains("MiB free"), "{told}");
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
    let quick = ["bench", "ab", "M3", "--device", "simulated:flush_ms=1,size=64M", "--clients", "2", "--quick", "--json"];
    let compared = cairn(folder.path(), &quick).output().unwrap();
    assert!(compared.status.success(), "{}", told(&compared));
    file("ab.json", &String::from_utf8_lossy(&compared.stdout));
    let printed = exits_with(0, folder.path(), &["bench", "report", "run.json", "ab.json", "-o", "page.html", "--markdown"]);
    assert!(printed.contains("| M3 | off | on | change | published |"), "{printed}");
    let page = fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("fsync-write") && page.contains("<svg") && page.ends_with("</html>\n"), "{page}");

    file("empty.json", "");
    let told = exits_with(1, folder.path(), &["bench", "report", "run.json", "empty.json", "-o", "other.html"]);
    assert!(told.contains("empty.json") && told.contains("--json"), "{told}");
    assert!(!folder.path().join("other.html").exists());
    let told = exits_with(2, folder.path(), &["bench", "report", "run.json"]);
    assert!(told.contains("--output"), "{told}");
    let told = exits_with(1, folder.path(), &["bench", "report", "run.json", "-o", "missing/page.html"]);
    assert!(told.contains("cannot write missing/page.html"), "{told}");
}

/// Waits until the command has written `text` to standard error; what is returned has the rest.
fn wait_for(child: &mut Child, text: &str) -> Lines<BufReader<ChildStderr>> {
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains(text)), "\"{text}\" was not told");
    lines
}

#[test]
fn an_interrupted_load_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = cairn(folder.path(), &["bench", "run", "create-walk-unlink", "--files", "100000000", "--target", "."]);
    let mut child = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    while left_in(folder.path()).is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert!(left_in(folder.path()).is_empty());
}

#[test]
fn peers_run_and_an_interruption_leaves_nothing_mounted() {
    if !can_make_loop_devices() {
        eprintln!("skipped: this test needs root, loop devices and FUSE");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let peers = ["bench", "peers", "--fs", "cairn", "--size", "64M", "--clients", "2", "--dir", ".", "--workload", "fsync-write"];
    let json = cairn(folder.path(), &[&peers[..], &["--seconds", "0.2", "--repeat", "1", "--json"]].concat()).output().unwrap();
    assert!(json.status.success(), "{}", told(&json));
    let summary: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let systems: Vec<&str> = summary["rows"].as_array().unwrap().iter().filter_map(|row| row["system"].as_str()).collect();
    assert_eq!(systems, ["cairn-loop", "cairn-image"]);
    assert!(left_in(folder.path()).is_empty());

    let mut command = cairn(folder.path(), &[&peers[..], &["--seconds", "3600"]].concat());
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let rest = wait_for(&mut child, "round 1");
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let rest: Vec<String> = rest.map_while(Result::ok).collect();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("interrupted")), "{rest:?}");
    assert!(left_in(folder.path()).is_empty());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&folder.path().display().to_string()), "{mounts}");
}
