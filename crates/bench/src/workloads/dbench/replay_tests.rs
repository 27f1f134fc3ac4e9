//! A replay does for each line what dbench does, as many calls of the same kind, and each line once
//! per pass.
use super::*;
use crate::client::{self, Limit, Measured, Plan};
use crate::posix_target::PosixTarget;
use crate::target::{Entry, Status};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_harness::Interrupt;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A target that writes down what it is asked for, and passes it on to a directory.
struct Witness {
    calls: Arc<Mutex<Vec<&'static str>>>,
    directory: PosixTarget,
}

impl Witness {
    fn new(directory: &Path) -> Self {
        Self {
            calls: Arc::new(Mutex::new(Rank::LEAF, Vec::new())),
            directory: PosixTarget::new(directory).unwrap(),
        }
    }

    fn heard(&self, call: &'static str) -> &PosixTarget {
        self.calls.lock().push(call);
        &self.directory
    }
}

impl Target for Witness {
    fn make_directory(&self, path: &str) -> io::Result<()> {
        self.heard("mkdir").make_directory(path)
    }
    fn remove_directory(&self, path: &str) -> io::Result<()> {
        self.heard("rmdir").remove_directory(path)
    }
    fn unlink(&self, path: &str) -> io::Result<()> {
        self.heard("unlink").unlink(path)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.heard("rename").rename(from, to)
    }
    fn open(&self, path: &str, how: Open) -> io::Result<Box<dyn TargetFile>> {
        let file = self.heard("open").open(path, how)?;
        Ok(Box::new(WitnessFile { calls: self.calls.clone(), file }))
    }
    fn status(&self, path: &str) -> io::Result<Status> {
        self.heard("stat").status(path)
    }
    fn ask(&self, _path: &str) -> io::Result<()> {
        unreachable!("dbench asks for no attributes")
    }
    fn set_times(
        &self,
        path: &str,
        accessed_seconds: i64,
        modified_seconds: i64,
    ) -> io::Result<()> {
        self.heard("utime").set_times(path, accessed_seconds, modified_seconds)
    }
    fn list(&self, path: &str, take: &mut dyn FnMut(Entry<'_>) -> bool) -> io::Result<()> {
        self.heard("readdir").list(path, take)
    }
    fn space_bytes(&self) -> io::Result<u64> {
        self.heard("statvfs").space_bytes()
    }
    fn sync_all(&self) -> io::Result<()> {
        self.heard("syncfs").sync_all()
    }
    fn statistics(&self) -> Option<serde_json::Value> {
        None
    }
    fn close(&self) -> io::Result<()> {
        Ok(())
    }
}

struct WitnessFile {
    calls: Arc<Mutex<Vec<&'static str>>>,
    file: Box<dyn TargetFile>,
}

impl WitnessFile {
    fn heard(&self, call: &'static str) -> &dyn TargetFile {
        self.calls.lock().push(call);
        &*self.file
    }
}

impl TargetFile for WitnessFile {
    fn write_at(&self, data: &[u8], offset_bytes: u64) -> io::Result<()> {
        self.heard("pwrite").write_at(data, offset_bytes)
    }
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.heard("pread").read_at(buffer, offset_bytes)
    }
    fn sync(&self) -> io::Result<()> {
        self.heard("fsync").sync()
    }
    fn status(&self) -> io::Result<Status> {
        self.heard("fstat").status()
    }
    fn set_lock(&self, locked: bool) -> io::Result<()> {
        self.heard("fcntl").set_lock(locked)
    }
}

impl Drop for WitnessFile {
    fn drop(&mut self) {
        self.calls.lock().push("close");
    }
}

/// One pass of a load by one client.
fn replay_once(target: Arc<dyn Target>, text: String) -> anyhow::Result<Measured> {
    let load = Arc::new(LoadFile::parse(text)?);
    let limit = Limit::Operations(load.lines().count() as u64);
    let plan = Plan {
        task: "test".into(),
        clients: 1,
        warmup: Duration::ZERO,
        limit,
        interrupt: Interrupt::default(),
    };
    client::run(&plan, move |client, recorder| {
        Replay::new(&*target, ".", &load, client.index).run_once(client, recorder)
    })
}

#[test]
fn each_operation_makes_the_calls_that_dbench_makes() {
    let lines: &[(&str, &[&str])] = &[
        (r#"Deltree "\clients\client1" NT_STATUS_OK"#, &["readdir"]),
        (r#"Mkdir "\clients" NT_STATUS_OK"#, &["stat", "readdir", "mkdir"]),
        (
            r#"NTCreateX "\clients\client1" 0x1 0x2 1 NT_STATUS_OK"#,
            &["stat", "readdir", "mkdir", "open", "fstat"],
        ),
        (r#"Close 1 NT_STATUS_OK"#, &["close"]),
        (
            r#"NTCreateX "\clients\client1\A" 0x40 0x1 2 NT_STATUS_OBJECT_NAME_NOT_FOUND"#,
            &["stat", "readdir", "open"],
        ),
        (
            r#"NTCreateX "\clients\client1\A" 0x40 0x2 2 NT_STATUS_OK"#,
            &["stat", "readdir", "open", "fstat"],
        ),
        (r#"WriteX 2 0 100 100 NT_STATUS_OK"#, &["pwrite"]),
        (r#"ReadX 2 0 100 100 NT_STATUS_OK"#, &["pread"]),
        (r#"Flush 2 NT_STATUS_OK"#, &["fsync"]),
        (r#"LockX 2 2147483538 1 NT_STATUS_OK"#, &["fcntl"]),
        (r#"UnlockX 2 2147483538 1 NT_STATUS_OK"#, &["fcntl"]),
        (r#"QUERY_FILE_INFORMATION 2 258 NT_STATUS_OK"#, &["fstat"]),
        (r#"SET_FILE_INFORMATION 2 1004 NT_STATUS_OK"#, &["fstat", "utime"]),
        (r#"QUERY_FS_INFORMATION 1 NT_STATUS_OK"#, &["statvfs"]),
        (r#"QUERY_PATH_INFORMATION "\clients\client1\A" 1004 NT_STATUS_OK"#, &["stat"]),
        (
            r#"QUERY_PATH_INFORMATION "\clients\client1\B" 1004 NT_STATUS_OBJECT_NAME_NOT_FOUND"#,
            &["stat", "readdir"],
        ),
        (r#"FIND_FIRST "\clients\client1\A" 260 1366 1 NT_STATUS_OK"#, &["stat"]),
        (
            r#"FIND_FIRST "\clients\client1\*" 260 1366 1 NT_STATUS_OK"#,
            &["stat", "readdir", "readdir"],
        ),
        (r#"Close 2 NT_STATUS_OK"#, &["close"]),
        (
            r#"Rename "\clients\client1\A" "\clients\client1\B" NT_STATUS_OK"#,
            &["stat", "stat", "readdir", "rename"],
        ),
        (r#"Unlink "\clients\client1\B" 0x6 NT_STATUS_OK"#, &["stat", "unlink"]),
        (
            r#"NTCreateX "\clients\client1\C" 0x40 0x5 3 0x00000000"#,
            &["stat", "readdir", "open", "fstat"],
        ),
        (r#"Close 3 NT_STATUS_OK"#, &["close"]),
        (r#"Deltree "\clients\client1" NT_STATUS_OK"#, &["readdir", "stat", "unlink"]),
        (r#"Rmdir "\clients\client1" NT_STATUS_OK"#, &["stat", "rmdir"]),
    ];
    let folder = tempfile::tempdir().unwrap();
    let witness = Arc::new(Witness::new(folder.path()));
    let text: Vec<&str> = lines.iter().map(|(line, _)| *line).collect();
    replay_once(witness.clone(), text.join("\n")).unwrap();
    let mut heard = witness.calls.lock().clone().into_iter();
    for (line, calls) in lines {
        let heard: Vec<&str> = heard.by_ref().take(calls.len()).collect();
        assert_eq!(heard, *calls, "{line}");
    }
    assert_eq!(heard.next(), None);
}

/// The names of dbench's table for the words of a load file, where they differ.
const TABLE_NAMES: &[(&str, &str)] = &[
    ("FIND_FIRST", "Find"),
    ("QUERY_PATH_INFORMATION", "Qpathinfo"),
    ("QUERY_FILE_INFORMATION", "Qfileinfo"),
    ("QUERY_FS_INFORMATION", "Qfsinfo"),
    ("SET_FILE_INFORMATION", "Sfileinfo"),
];

#[test]
fn a_pass_has_the_mix_of_its_load_file() {
    let mut loads = vec![super::super::super::workload_tests::LOAD.to_owned()];
    if let Ok(installed) = std::fs::read_to_string(super::super::LOADFILE_DEFAULT) {
        // A part is enough: the whole has the same lines twenty times over.
        loads.push(installed.lines().take(23_000).collect::<Vec<_>>().join("\n"));
    }
    for text in loads {
        let mut expected: BTreeMap<&str, u64> = BTreeMap::new();
        for word in text.lines().filter_map(|line| line.split(' ').next()) {
            let name = TABLE_NAMES
                .iter()
                .find(|(recorded, _)| *recorded == word)
                .map_or(word, |(_, shown)| shown);
            *expected.entry(name).or_default() += 1;
        }
        let folder = tempfile::tempdir().unwrap();
        let measured =
            replay_once(Arc::new(PosixTarget::new(folder.path()).unwrap()), text.clone()).unwrap();
        let summaries = measured.recorder.summaries();
        let counted: BTreeMap<&str, u64> =
            summaries.iter().map(|operation| (operation.name.as_str(), operation.count)).collect();
        assert_eq!(counted, expected);
        assert_eq!(measured.completed, expected.values().sum::<u64>());
    }
}
