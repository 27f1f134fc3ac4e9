//! The disk that holds an image file: when it is full, and what an image gives back to it.
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
mod mounting;

use cairn_environment::clock;
use cairn_environment::lock::MutexGuard;
use cairn_environment::random::Seeded;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// A disk of its own for an image, in a folder with a mount point; all is unmounted after it.
struct Host {
    folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    /// A disk of `mebibytes` with ext4. `None` where there can be none.
    fn new(mebibytes: usize) -> Option<Host> {
        let alone = mounting::alone()?;
        let folder = tempfile::tempdir().unwrap();
        let host = Host { folder, _alone: alone };
        for name in ["host", "dir"] {
            fs::create_dir(host.path(name)).unwrap();
        }
        File::create(host.path("disk")).unwrap().set_len((mebibytes * MIB) as u64).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            let output =
                Command::new(program).args(arguments).current_dir(host.folder.path()).output();
            output.is_ok_and(|output| output.status.success())
        };
        if run("mkfs.ext4", &["-q", "-m", "0", "disk"])
            && run("mount", &["-o", "loop", "disk", "host"])
        {
            return Some(host);
        }
        eprintln!("left out: it takes root, a loop device and mkfs.ext4");
        None
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_cairn"))
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// The output of the command, which succeeds.
    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let told = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(output.status.success(), "cairn {}: {told}", arguments.join(" "));
        told
    }

    /// Takes all the room that the disk has.
    fn fill(&self, name: &str) {
        let mut file = File::create(self.path("host").join(name)).unwrap();
        for step in [MIB, 4096] {
            while file.write_all(&vec![1; step]).is_ok() {}
        }
        file.sync_all().unwrap();
    }

    fn kill_server(&self) {
        let mut number = [0; 16];
        let length =
            rustix::fs::getxattr(self.path("dir"), "user.cairn.server", &mut number).unwrap();
        let number = std::str::from_utf8(&number[..length]).unwrap().parse().unwrap();
        let server = rustix::process::Pid::from_raw(number).unwrap();
        rustix::process::kill_process(server, rustix::process::Signal::KILL).unwrap();
        let _tells_of_the_killed_server = self.run(&["umount", "dir"]);
    }

    fn is_read_only(&self) -> bool {
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        let directory = self.path("dir");
        let line = table
            .lines()
            .find(|line| line.contains(&*directory.to_string_lossy()))
            .expect("it is mounted");
        line.split(' ').nth(3).unwrap().split(',').any(|option| option == "ro")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for name in ["dir", "host"] {
            if table.contains(&*self.path(name).to_string_lossy()) {
                let _ = Command::new("umount").arg(self.path(name)).stderr(Stdio::null()).status();
                let _ = Command::new("umount")
                    .arg("-l")
                    .arg(self.path(name))
                    .stderr(Stdio::null())
                    .status();
            }
        }
    }
}

fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Seeded::new(seed);
    (0..length / 8).flat_map(|_| random.next_u64().to_le_bytes()).collect()
}

/// Makes a file durable.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Files of 1 MiB until one can't be made durable; how many could.
fn write_until_full(directory: &Path, name: &str) -> u64 {
    for count in 0.. {
        if let Err(error) =
            write(&directory.join(format!("{name} {count}")), &random_bytes(count, MIB))
        {
            assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
            return count;
        }
        assert!(count < 200, "the disk is full, and nobody is told");
    }
    unreachable!("the numbers end later")
}

/// A trim waits until what was removed is free. But the kernel says when a removed file is used no
/// more, and may say so after the trim has begun: then the next one does it.
fn repeat_until(what: &str, mut is_done: impl FnMut() -> bool) {
    for _ in 0..600 {
        if is_done() {
            return;
        }
        clock::sleep(Duration::from_millis(100));
    }
    panic!("{what}: not after 600 trims");
}

#[test]
fn on_a_full_disk_files_can_be_read_and_removed_and_with_room_all_goes_on() {
    let Some(host) = Host::new(64) else { return };
    let directory = host.path("dir");
    write(&host.path("host/filler"), &vec![1; 16 * MIB]).unwrap();
    host.succeeds(&["mount", "host/image", "dir", "--create", "512M", "--log", "log"]);
    let kept = random_bytes(1000, 2 * MIB);
    write(&directory.join("kept"), &kept).unwrap();
    let written = write_until_full(&directory, "file");
    let log = || fs::read_to_string(host.path("log")).unwrap();
    let told = |text: &str| log().matches(text).count();
    // Before the image refuses, it gives back what it does not use; the test takes that space. A
    // name is refused when it is asked for, not when it is synced.
    let refused = (0..200).find_map(|count| {
        host.fill(&format!("rest {count}"));
        write(&directory.join(format!("late {count}")), &kept[..100_000]).err()?;
        File::create(directory.join("later")).err()
    });
    assert_eq!(refused.expect("it is full").kind(), ErrorKind::StorageFull);
    assert!(told("is full: files can be read and removed") > 0, "{}", log());
    assert_eq!(told("the volume is read-only"), 0, "{}", log());
    assert_eq!(fs::read(directory.join("kept")).unwrap(), kept);
    // What could not be stored, and more, makes room.
    for count in 0..written.min(12) {
        fs::remove_file(directory.join(format!("file {count}"))).unwrap();
    }
    let _ = fs::remove_file(directory.join(format!("file {written}")));
    // It returns when what was removed is free, and its storage is the disk's.
    repeat_until("there is room", || {
        host.succeeds(&["trim", "dir"]);
        write(&directory.join("new"), &kept[..MIB]).is_ok()
    });
    assert!(told("has room again") > 0, "{}", log());

    // Full again. It unmounts, mounts, and frees files as before.
    write_until_full(&directory, "again");
    let _something_was_not_stored = host.run(&["umount", "dir"]);
    assert!(host.succeeds(&["fsck", "host/image"]).contains("is full"));
    host.succeeds(&["mount", "host/image", "dir", "--log", "log"]);
    assert!(!host.is_read_only(), "{}", log());
    assert_eq!(fs::read(directory.join("kept")).unwrap(), kept);
    assert_eq!(fs::read(directory.join("new")).unwrap(), &kept[..MIB]);
    fs::remove_file(directory.join("new")).unwrap();
    host.succeeds(&["sync", "dir"]);

    fs::remove_file(host.path("host/filler")).unwrap();
    // The data of what was refused may be missing, and is an error to read.
    for entry in fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap()) {
        if ["late", "again"]
            .iter()
            .any(|name| entry.file_name().to_string_lossy().starts_with(name))
        {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    write(&directory.join("last"), &kept).unwrap();
    host.succeeds(&["umount", "dir"]);
    host.succeeds(&["fsck", "--data", "host/image"]);
    host.succeeds(&["mount", "host/image", "dir"]);
    assert_eq!(fs::read(directory.join("kept")).unwrap(), kept);
    assert_eq!(fs::read(directory.join("last")).unwrap(), kept);
    assert!(!directory.join("new").exists());
    host.succeeds(&["umount", "dir"]);
}

/// Copies what is not zero: a file whose every free block is a hole.
fn copy_without_zeros(from: &Path, to: &Path) {
    let (mut source, mut target) = (File::open(from).unwrap(), File::create(to).unwrap());
    target.set_len(source.metadata().unwrap().len()).unwrap();
    let mut block = [0; 4096];
    for number in 0..source.metadata().unwrap().len() / 4096 {
        source.read_exact(&mut block).unwrap();
        if block != [0; 4096] {
            target.seek(SeekFrom::Start(number * 4096)).unwrap();
            target.write_all(&block).unwrap();
        }
    }
    target.sync_all().unwrap();
}

#[test]
fn without_any_room_it_is_mounted_for_reading() {
    let Some(host) = Host::new(32) else { return };
    let directory = host.path("dir");
    host.succeeds(&["mount", "image", "dir", "--create", "64M", "-o", "commit=3600"]);
    write(&directory.join("kept"), b"It can still be read.").unwrap();
    // Recovery has more to write than the volume's unused blocks could make room for.
    for count in 0..300 {
        let path = directory.join(format!("described {count}"));
        File::create(&path).unwrap();
        rustix::fs::setxattr(&path, "user.text", &[7; 3000], rustix::fs::XattrFlags::empty())
            .unwrap();
    }
    host.succeeds(&["sync", "dir"]);
    host.kill_server();
    copy_without_zeros(&host.path("image"), &host.path("host/image"));
    host.fill("filler");
    let told = host.succeeds(&["mount", "host/image", "dir"]);
    assert!(
        told.contains("mounted read-only") && told.contains("free space on that disk"),
        "{told}"
    );
    assert_eq!(told.matches("full").count(), 1, "{told}");
    assert!(host.is_read_only());
    assert_eq!(fs::read(directory.join("kept")).unwrap(), b"It can still be read.");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 301);
    let refused = fs::remove_file(directory.join("kept")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    host.succeeds(&["umount", "dir"]);
    fs::remove_file(host.path("host/filler")).unwrap();
    assert!(!host.succeeds(&["mount", "host/image", "dir"]).contains("full"));
    assert!(!host.is_read_only());
    fs::remove_file(directory.join("kept")).unwrap();
    host.succeeds(&["umount", "dir"]);
    host.succeeds(&["fsck", "--data", "host/image"]);
}

#[test]
fn what_was_removed_needs_no_storage_after_a_trim() {
    let Some(host) = Host::new(128) else { return };
    let directory = host.path("dir");
    host.succeeds(&["mount", "host/image", "dir", "--create", "256M"]);
    let stored_bytes = || fs::metadata(host.path("host/image")).unwrap().blocks() * 512;
    let kept = random_bytes(1, MIB);
    write(&directory.join("kept"), &kept).unwrap();
    let fstrim =
        |directory: &Path| Command::new("fstrim").arg(directory).stderr(Stdio::null()).status();
    for by_fstrim in [false, true] {
        write(&directory.join("large"), &random_bytes(2, 64 * MIB)).unwrap();
        let before = stored_bytes();
        assert!(before > 64 * MIB as u64);
        fs::remove_file(directory.join("large")).unwrap();
        if by_fstrim && !fstrim(&directory).is_ok_and(|status| status.success()) {
            eprintln!("left out: no fstrim");
            continue;
        }
        repeat_until("what was removed is the disk's", || {
            if by_fstrim {
                assert!(fstrim(&directory).unwrap().success());
            } else {
                assert!(host.succeeds(&["trim", "dir"]).contains("are free"));
            }
            stored_bytes() + 64 * MIB as u64 <= before
        });
    }
    assert_eq!(fs::read(directory.join("kept")).unwrap(), kept);
    host.succeeds(&["umount", "dir"]);
    host.succeeds(&["fsck", "--data", "host/image"]);
    host.succeeds(&["mount", "host/image", "dir", "-o", "ro"]);
    assert!(
        !host.run(&["trim", "dir"]).status.success(),
        "nothing is discarded under a mount for reading"
    );
    host.succeeds(&["umount", "dir"]);
}

/// Names take room in nodes, and so does removing them: many times what is kept for a commit.
#[test]
fn on_a_full_disk_names_are_refused_before_a_commit_fails_and_many_can_be_removed() {
    const FILES: usize = 40_000;
    let Some(host) = Host::new(160) else { return };
    host.succeeds(&["mkfs", "host/image", "--size", "1G"]);
    host.succeeds(&["mount", "host/image", "dir", "-o", "commit=600"]);
    let file = |number: usize| host.path("dir").join(format!("a-name-that-is-not-short-{number}"));
    for number in 0..FILES {
        File::create(file(number)).unwrap();
    }
    host.succeeds(&["sync", "dir"]);
    host.fill("filler");
    // Every node is changed.
    let remaining: Vec<usize> = (0..FILES).filter(|number| number % 5 != 0).collect();
    for number in (0..FILES).step_by(5) {
        fs::remove_file(file(number)).unwrap();
    }
    host.succeeds(&["umount", "dir"]);
    host.succeeds(&["mount", "host/image", "dir", "-o", "commit=600"]);
    assert!(!host.is_read_only());
    assert!(remaining.iter().all(|&number| file(number).exists()) && !file(0).exists());
    let refused = (FILES..).find_map(|number| File::create(file(number)).err()).unwrap();
    assert_eq!(refused.kind(), ErrorKind::StorageFull, "{refused}");
    for &number in &remaining {
        fs::remove_file(file(number)).unwrap();
    }
    host.succeeds(&["umount", "dir"]);
    host.succeeds(&["fsck", "--data", "host/image"]);
}
