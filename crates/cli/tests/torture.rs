//! `cairn torture` as its user meets it: wrong usage, reports, and, on real mounts, one round,
//! Ctrl-C, and a finding.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
mod mounting;

use cairn_environment::clock;
use cairn_environment::lock::MutexGuard;
use cairn_harness::mounts;
use cairn_torture::systematic::Sequences;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

struct Torture {
    folder: tempfile::TempDir,
}

/// What a run printed.
struct Told {
    code: Option<i32>,
    output: String,
    errors: String,
}

impl From<Output> for Told {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            code: output.status.code(),
            output: text(&output.stdout),
            errors: text(&output.stderr),
        }
    }
}

impl Told {
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.output)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", self.output, self.errors))
    }
}

impl Torture {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// `None` where mounts are not possible.
    fn mounting() -> Option<(Self, MutexGuard<'static, ()>)> {
        mounting::alone().map(|alone| (Self::new(), alone))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        command.arg("torture").args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Told {
        self.command(arguments).output().unwrap().into()
    }

    fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    #[track_caller]
    fn refuses(&self, arguments: &[&str], part: &str) {
        let told = self.run(arguments);
        assert_eq!(told.code, Some(2), "{arguments:?}: {}{}", told.output, told.errors);
        assert!(told.errors.contains(part), "{arguments:?}: {part} is not in {}", told.errors);
        assert!(
            fs::read_dir(self.folder.path()).unwrap().next().is_none(),
            "{arguments:?} leaves something behind"
        );
    }

    /// Folders of runs.
    fn left(&self) -> Vec<PathBuf> {
        fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Waits until the workers of `run` are there.
    #[track_caller]
    fn wait_for_load(&self, run: &mut Child) {
        let is_loaded = || self.left().iter().any(|folder| folder.join("mount/tree-2").is_dir());
        while !is_loaded() {
            if run.try_wait().unwrap().is_some() {
                let mut told = String::new();
                run.stdout.take().unwrap().read_to_string(&mut told).unwrap();
                run.stderr.take().unwrap().read_to_string(&mut told).unwrap();
                panic!("the run has ended: {told}");
            }
            clock::sleep(Duration::from_millis(5));
        }
    }

    fn assert_clean(&self) {
        assert!(!mounts::is_mounted_below(self.folder.path()), "something is mounted");
        assert_eq!(self.left(), Vec::<PathBuf>::new());
    }
}

#[test]
fn wrong_usage_is_told() {
    let torture = Torture::new();
    torture.refuses(&["kill9", "--rounds", "0"], "--rounds");
    torture.refuses(&["kill9", "--minutes", "1"], "--minutes");
    torture.refuses(&["shutdown", "--rounds", "many"], "many");
    torture.refuses(&["soak"], "--hours");
    torture.refuses(&["soak", "--hours", "0"], "above 0");
    torture.refuses(&["soak", "--hours", "-1"], "above 0");
    torture.refuses(&["differ", "--calls", "0"], "--calls");
    torture.refuses(&["vm"], "--kernel");
    torture.refuses(
        &["vm", "--kernel", "k", "--initramfs", "i", "--qemu", "no-such-emulator"],
        "no-such-emulator is not installed",
    );
    torture
        .refuses(&["vm", "--kernel", "k", "--initramfs", "i", "--qemu", "sh"], "k: No such file");
    torture.refuses(&["fuzz", "--seconds", "0"], "above 0");
    torture.refuses(&["fuzz", "--input", "0g"], "hexadecimal");
    torture.refuses(&["fuzz", "--input", "00", "--seconds", "3"], "--seconds");
    torture.refuses(
        &["fuzz", "--save", "/dev/null/inputs"],
        "cannot make the folder /dev/null/inputs",
    );
    torture.refuses(
        &["systematic", "--length", "1", "--keep", "/dev/null/images"],
        "cannot make the folder /dev/null/images",
    );
    torture.refuses(
        &["systematic", "--length", "1", "--first", "sing"],
        "no operation has \"sing\" in its name; there are:\n  create d/c\n",
    );
    torture.refuses(
        &["crash", "--keep", "/dev/null/images"],
        "cannot make the folder /dev/null/images",
    );
    let long = "00".repeat(241);
    torture.refuses(&["fuzz", "--input", &long], "at most 240 bytes, but these are 241");
    torture.refuses(&["fuzz", "--input", "00", "--seed", "3"], "--seed");
    torture.refuses(&["crash", "--threads", "100000", "--states", "10"], "--threads");
    torture.refuses(&["ace", "missing"], "missing: No such file");
}

#[test]
fn a_run_that_would_test_nothing_is_refused() {
    let torture = Torture::new();
    torture.refuses(&["crash", "--states", "0"], "--states");
    torture.refuses(&["crash", "--seconds", "0.000000001"], "nothing was tested");
    torture.refuses(&["systematic", "--length", "1", "--sample", "0"], "--sample");
    let steps = Sequences::all(1).count();
    torture.refuses(
        &["systematic", "--length", "1", "--from", &steps.to_string()],
        &format!("there is no workload {steps}; there are {steps}"),
    );
    torture.refuses(
        &["systematic", "--length", "1", "--seconds", "0.000000001"],
        "nothing was tested",
    );
}

/// None of these would end by itself soon.
#[test]
fn an_interrupted_run_in_memory_says_so() {
    let torture = Torture::new();
    let fuzz: &[&str] = &["fuzz", "--seconds", "100000"];
    for (arguments, figure) in [
        (&["systematic", "--length", "3"][..], ", interrupted after "),
        (&["crash", "--states", "1000000000"], ", interrupted after "),
        (fuzz, ", interrupted after "),
    ] {
        for json in [false, true] {
            let format: &[&str] = if json { &["--json"] } else { &[] };
            let mut run = torture.start(&[arguments, format].concat());
            let mut errors = BufReader::new(run.stderr.take().unwrap());
            let (mut seed, mut rest) = (String::new(), String::new());
            errors.read_line(&mut seed).unwrap();
            assert!(seed.starts_with("seed "), "{arguments:?}: {seed}");
            kill_process(Pid::from_child(&run), Signal::INT).unwrap();
            errors.read_to_string(&mut rest).unwrap();
            assert!(
                rest.contains("the same signal again ends it at once"),
                "{arguments:?}: {rest}"
            );
            let told = Told::from(run.wait_with_output().unwrap());
            assert_eq!(told.code, Some(0), "{arguments:?}: {}", told.output);
            if json {
                assert_eq!(
                    told.json()["interrupted"].as_bool(),
                    Some(true),
                    "{arguments:?}: {}",
                    told.output
                );
            } else {
                assert!(
                    told.output.lines().next().is_some_and(|line| line.contains(figure)),
                    "{arguments:?}: {}",
                    told.output
                );
            }
        }
    }
}

#[test]
fn fuzzing_repeats_an_input_and_tells_what_was_tried() {
    let torture = Torture::new();
    let report = torture.run(&["fuzz", "--input", "0007", "--json"]).json();
    assert!(report["passed"].as_bool() == Some(true) && report["seed"].is_null(), "{report}");
    assert_eq!(report["volumes"].as_u64(), Some(1), "{report}");
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(0), "{report}");
    let told = torture.run(&["fuzz", "--input", &"00".repeat(240)]);
    assert_eq!((told.code, told.errors.as_str()), (Some(0), ""));
    assert!(
        told.output.contains("hostile volumes") && !told.output.contains("seed"),
        "{}",
        told.output
    );
}

#[test]
fn a_round_on_a_real_mount_reports_and_leaves_nothing() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    for (name, figure) in
        [("kill9", "acknowledgements"), ("shutdown", "acknowledgements"), ("sync", "files")]
    {
        let told = torture.run(&[name, "--rounds", "1", "--seed", "7", "--json", "--work", "."]);
        let report = told.json();
        assert_eq!(told.code, Some(0), "{report}\n{}", told.errors);
        assert_eq!(
            (report["passed"].as_bool(), report["rounds"].as_u64(), report["seed"].as_u64()),
            (Some(true), Some(1), Some(7))
        );
        // On a busy machine a round may end before anything was acknowledged.
        assert!(report[figure].is_u64() && report["finding"].is_null(), "{report}");
        for figure in ["snapshots", "forks", "deletions", "judged", "same_hash", "scheduled"] {
            assert_eq!(report[figure].is_u64(), name != "sync", "{figure}: {report}");
        }
        assert!(told.errors.contains("round 1: "), "{}", told.errors);
        torture.assert_clean();
    }
    torture.refuses(&["kill9", "--work", "missing"], "missing: No such file");
}

#[test]
fn a_comparison_with_another_file_system_reports_and_leaves_nothing() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    let told = torture.run(&["differ", "--run", "0", "--seed", "8", "--json", "--work", "."]);
    let report = told.json();
    assert_eq!(told.code, Some(0), "{report}\n{}", told.errors);
    assert_eq!((report["runs"].as_u64(), report["finding"].is_null()), (Some(1), true));
    for figure in ["calls", "whole_trees", "kills", "unmounts", "write", "rename", "ENOENT"] {
        assert!(report[figure].as_u64() > Some(0), "{figure}: {report}");
    }
    torture.assert_clean();
    let told = torture.run(&["differ", "--reference", "missing", "--work", "."]);
    assert_eq!(told.code, Some(2), "{}{}", told.output, told.errors);
    assert!(told.errors.contains("missing: No such file"), "{}", told.errors);
    torture.assert_clean();
}

#[test]
fn recorded_runs_need_a_mount_and_leave_none() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    let folder = torture.folder.path();
    let run = |temporary: &Path| -> Told {
        let mut command = torture.command(&["recorded", "--states", "60", "--seed", "7", "--json"]);
        command.env("TMPDIR", temporary).output().unwrap().into()
    };
    let told = run(folder);
    let report = told.json();
    assert_eq!(told.code, Some(0), "{report}\n{}", told.errors);
    assert_eq!((&report["command"], &report["passed"]), (&"recorded".into(), &true.into()));
    assert!(report["states"].as_u64() >= Some(60), "{report}");
    torture.assert_clean();
    let told = run(&folder.join("missing"));
    assert_eq!(told.code, Some(2), "{}{}", told.output, told.errors);
    assert!(told.errors.contains("cannot make the folder"), "{}", told.errors);
}

/// A run on a file system in memory of its own; both end with this.
struct Filled<'t> {
    run: Option<Child>,
    work: &'t Path,
}

impl Drop for Filled<'_> {
    fn drop(&mut self) {
        if let Some(mut run) = self.run.take() {
            // It may have ended.
            let _ = run.kill();
            let _ = run.wait();
        }
        let _ = Command::new("umount").arg("-l").arg(self.work).status();
    }
}

/// A file system in memory whose size shrinks under the run to what it has taken: it takes root to
/// make one.
#[test]
fn a_work_folder_that_runs_full_is_no_finding() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    let (folder, work) = (torture.folder.path(), torture.folder.path().join("work"));
    fs::create_dir(&work).unwrap();
    let mount = |options: &str| {
        Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs", "work"])
            .current_dir(folder)
            .status()
    };
    if !rustix::process::geteuid().is_root() || !mount("size=1G").unwrap().success() {
        return eprintln!("left out: no file system can be mounted");
    }
    let mut filled = Filled { run: None, work: &work };
    let run = filled.run.insert(torture.start(&[
        "kill9",
        "--rounds",
        "3",
        "--load-ms-max",
        "4000000",
        "--seed",
        "5",
        "--work",
        "work",
    ]));
    let is_loaded = || {
        fs::read_dir(&work)
            .unwrap()
            .any(|entry| entry.unwrap().path().join("mount/tree-2").is_dir())
    };
    while !is_loaded() {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
        clock::sleep(Duration::from_millis(5));
    }
    // Under load it takes more from one moment to the next, and then the smaller size is refused.
    let full = || {
        let space = rustix::fs::statvfs(&work).unwrap();
        let used_bytes = (space.f_blocks - space.f_bfree) * space.f_frsize;
        mount(&format!("remount,size={}", used_bytes + (64 << 10))).unwrap().success()
    };
    while !full() {
        assert!(run.try_wait().unwrap().is_none(), "the run has ended");
    }
    let told = Told::from(filled.run.take().expect("it runs").wait_with_output().unwrap());
    let left: Vec<_> = fs::read_dir(&work).unwrap().collect();
    assert_eq!(told.code, Some(2), "{}{}", told.output, told.errors);
    assert!(told.errors.contains("the work folder's file system ran full"), "{}", told.errors);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn an_interrupted_run_reports_and_cleans_up() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    let mut child = torture.start(&[
        "kill9",
        "--rounds",
        "1000",
        "--load-ms-max",
        "4000000",
        "--json",
        "--work",
        ".",
    ]);
    torture.wait_for_load(&mut child);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let told = Told::from(child.wait_with_output().unwrap());
    let report = told.json();
    assert_eq!(
        (told.code, report["interrupted"].as_bool(), report["rounds"].as_u64()),
        (Some(0), Some(true), Some(1)),
        "{report}"
    );
    torture.assert_clean();
}

#[test]
fn a_second_signal_ends_a_run_at_once() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    let mut child = torture.start(&["soak", "--hours", "1", "--work", "."]);
    torture.wait_for_load(&mut child);
    let process = Pid::from_child(&child);
    kill_process(process, Signal::TERM).unwrap();
    // Signals of one kind may become one: hence another.
    kill_process(process, Signal::INT).unwrap();
    let told = Told::from(child.wait_with_output().unwrap());
    assert_eq!(told.code, Some(130), "{}{}", told.output, told.errors);
    torture.assert_clean();
}

/// The process that serves the mount of `run`.
fn server_of(run: &Child) -> Pid {
    let children =
        fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap_or_default();
    // Not all kernels list a process's children.
    let all = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let known: Vec<i32> = children.split_whitespace().filter_map(|id| id.parse().ok()).collect();
    let candidates: Vec<i32> = if known.is_empty() { all.collect() } else { known };
    let is_server = |id: &i32| {
        let process = Path::new("/proc").join(id.to_string());
        let parent = fs::read_to_string(process.join("stat")).unwrap_or_default();
        let parent = parent
            .rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().nth(1))
            .map(str::to_owned);
        let command = fs::read(process.join("cmdline")).unwrap_or_default();
        parent == Some(run.id().to_string())
            && command.split(|byte| *byte == 0).any(|word| word == b"--foreground")
    };
    candidates.into_iter().find(is_server).and_then(Pid::from_raw).expect("the run has a server")
}

#[test]
fn a_server_that_ends_by_itself_is_a_finding() {
    let Some((torture, _alone)) = Torture::mounting() else { return };
    let mut run = torture.start(&[
        "kill9",
        "--rounds",
        "3",
        "--load-ms-max",
        "4000000",
        "--seed",
        "5",
        "--json",
        "--work",
        ".",
    ]);
    torture.wait_for_load(&mut run);
    kill_process(server_of(&run), Signal::KILL).unwrap();
    let told = Told::from(run.wait_with_output().unwrap());
    let report = told.json();
    assert_eq!((told.code, report["passed"].as_bool()), (Some(1), Some(false)), "{report}");
    let kept: Vec<&str> =
        report["kept"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(
        kept.iter().any(|file| file.ends_with("/image") && Path::new(file).exists()),
        "{report}"
    );
    assert!(!mounts::is_mounted_below(torture.folder.path()), "something is mounted");
}
