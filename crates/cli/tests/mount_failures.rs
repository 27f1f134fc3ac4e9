//! What fails below a real mount is counted, reported to the system's log, and found by `cairn stats --check`.
mod mounting;

use cairn_environment::lock::MutexGuard;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const BLOCK: usize = 4096;
const BLOCKS: usize = 768;

/// A folder with a mount point, and a listener in place of the system's log.
struct Host {
    folder: tempfile::TempDir,
    log: UnixDatagram,
    _alone: MutexGuard<'static, ()>,
}

impl Host {
    /// `None` where mounts are not possible.
    fn new() -> Option<Self> {
        let alone = mounting::alone()?;
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("dir")).unwrap();
        let log = UnixDatagram::bind(folder.path().join("log")).unwrap();
        log.set_nonblocking(true).unwrap();
        Some(Self { folder, log, _alone: alone })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command.output().unwrap()
    }

    #[track_caller]
    fn exits_with(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "cairn {}: {told}", arguments.join(" "));
        told
    }

    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        self.exits_with(0, arguments)
    }

    fn mount(&self, image: &str) {
        self.succeeds(&["mount", image, "dir", "--log-socket", "log"]);
    }

    /// Unmounts; then the server has ended, and so it has said everything. Returns that.
    fn unmount(&self) -> Vec<String> {
        self.succeeds(&["umount", "dir"]);
        self.messages()
    }

    fn messages(&self) -> Vec<String> {
        let mut messages = Vec::new();
        let mut bytes = [0; 8192];
        loop {
            match self.log.recv(&mut bytes) {
                Ok(length) => messages.push(String::from_utf8_lossy(&bytes[..length]).into_owned()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return messages,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Makes the blocks of `content` bad wherever they stand in the image; returns how many there were.
    fn rot(&self, image: &str, content: &[u8]) -> usize {
        let wanted: std::collections::HashSet<&[u8]> = content.chunks(BLOCK).collect();
        let bytes = fs::read(self.path(image)).unwrap();
        let file = fs::OpenOptions::new().write(true).open(self.path(image)).unwrap();
        let places = (0..bytes.len()).step_by(BLOCK).filter(|&at| wanted.contains(&bytes[at..(at + BLOCK).min(bytes.len())]));
        places.map(|at| file.write_all_at(&[0xA5; 512], at as u64).unwrap()).count()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let directory = self.path("dir");
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        if table.contains(&*directory.to_string_lossy()) {
            let _ = self.run(&["umount", "dir"]);
            let _ = Command::new("umount").arg("-l").arg(&directory).stderr(Stdio::null()).status();
            let _ = Command::new("fusermount3").args(["-u", "-z"]).arg(&directory).stderr(Stdio::null()).status();
        }
    }
}

/// Each block is another one.
fn content() -> Vec<u8> {
    (0..BLOCKS).flat_map(|block| [(block as u32).to_le_bytes(), *b"mine"].concat().repeat(BLOCK / 8)).collect()
}

/// The numbers in front of `what` in all messages, added up, and how many messages have one.
fn sum_of(messages: &[String], what: &str) -> (usize, usize) {
    let number =
        |message: &String| message.split(what).next().filter(|before| before.len() < message.len())?.split(' ').next_back()?.parse().ok();
    let numbers: Vec<usize> = messages.iter().filter_map(number).collect();
    (numbers.iter().sum(), numbers.len())
}

#[test]
fn a_rotten_region_of_a_mirror_is_healed_with_few_words_and_found_by_a_check() {
    let Some(host) = Host::new() else { return };
    host.succeeds(&["mkfs", "mirror:a,b", "--size", "64M"]);
    host.mount("mirror:a,b");
    fs::create_dir(host.path("dir/folder")).unwrap();
    fs::write(host.path("dir/folder/film"), content()).unwrap();
    assert_eq!(host.succeeds(&["stats", "dir", "--check"]), "no failures\n");
    assert!(host.succeeds(&["stats", "dir"]).starts_with("no failures\n\nvolume: "));
    let messages = host.unmount();
    assert!(messages.iter().any(|message| message.contains("]: mounted ")), "{messages:?}");
    assert_eq!(host.rot("a", &content()), BLOCKS);

    host.mount("mirror:a,b");
    assert!(fs::read(host.path("dir/folder/film")).unwrap() == content());
    let told = host.exits_with(4, &["stats", "dir", "--check"]);
    assert!(
        told.starts_with(&format!("failures: 0 read errors, {BLOCKS} checksum errors, 0 write errors; {BLOCKS} blocks repaired\n")),
        "{told}"
    );
    assert!(told.contains("checksum error, /folder/film (inode "), "{told}");
    let of_a = format!("/a: in sync; 0 read errors, {BLOCKS} checksum errors, 0 write errors; {BLOCKS} blocks repaired");
    assert!(told.contains(&of_a) && told.contains("/b: in sync; 0 read errors, 0 checksum errors"), "{told}");
    let json = host.exits_with(4, &["stats", "dir", "--check", "--json"]);
    assert!(json.starts_with("{\"failures\":{\"read_errors\":0,\"checksum_errors\":768,"), "{json}");
    host.succeeds(&["stats", "dir"]);
    let messages = host.unmount();
    let (blocks, lines) = sum_of(&messages, " bad blocks written again from another copy");
    assert_eq!(blocks, BLOCKS, "{messages:?}");
    assert!(lines < 10 && messages.len() < 20, "{messages:?}");
    assert!(messages.iter().any(|message| message.contains("/folder/film (inode ") && message.contains("member ")), "{messages:?}");
    host.succeeds(&["fsck", "mirror:a,b", "--data"]);
}

#[test]
fn a_checksum_error_of_a_single_image_names_the_file() {
    let Some(host) = Host::new() else { return };
    host.succeeds(&["mkfs", "image", "--size", "64M"]);
    host.mount("image");
    fs::write(host.path("dir/film"), content()).unwrap();
    host.unmount();
    assert_eq!(host.rot("image", &content()[17 * BLOCK..18 * BLOCK]), 1);
    // To the file instead.
    host.succeeds(&["mount", "image", "dir", "--log", "messages", "--log-socket", "log"]);
    fs::read(host.path("dir/film")).unwrap_err();
    let told = host.exits_with(4, &["stats", "dir", "--check"]);
    assert!(told.contains("checksum error, /film (inode ") && told.contains("file block 17, block "), "{told}");
    assert!(host.succeeds(&["stats", "dir"]).starts_with("failures: 0 read errors, "));
    assert_eq!(host.unmount(), Vec::<String>::new());
    let messages = fs::read_to_string(host.path("messages")).unwrap();
    let line = messages.lines().find(|line| line.contains("/film (inode ")).unwrap_or_else(|| panic!("{messages}"));
    assert!(line.contains("ERROR") && line.contains("file block 17") && line.contains("restore the file from a backup"), "{line}");
}

#[test]
fn a_log_that_nobody_reads_harms_no_mount() {
    let Some(host) = Host::new() else { return };
    host.succeeds(&["mkfs", "image", "--size", "64M"]);
    host.succeeds(&["mount", "image", "dir", "--log-socket", "missing"]);
    fs::write(host.path("dir/file"), "text").unwrap();
    host.succeeds(&["umount", "dir"]);
    host.succeeds(&["fsck", "image"]);
}

#[test]
fn writes_that_fail_are_counted_and_named() {
    let Some(host) = Host::new() else { return };
    if !rustix::process::geteuid().is_root() {
        return eprintln!("left out: only root can make a small file system for the host");
    }
    fs::create_dir(host.path("host")).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=24m", "cairn-test"]).arg(host.path("host")).output().unwrap();
    if !mounted.status.success() {
        return eprintln!("left out: no tmpfs: {}", String::from_utf8_lossy(&mounted.stderr));
    }
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        host.succeeds(&["mkfs", "host/image", "--size", "200M"]);
        host.mount("host/image");
        fs::write(host.path("dir/before"), "text").unwrap();
        host.succeeds(&["sync", "dir"]);
        assert_eq!(host.succeeds(&["stats", "dir", "--check"]), "no failures\n");
        let file = fs::File::create(host.path("dir/large")).unwrap();
        let failed = (0..64).any(|part| file.write_all_at(&vec![7; 1 << 20], part << 20).is_err()) || file.sync_all().is_err();
        assert!(failed, "there is room for everything");
        drop(file);
        let told = host.exits_with(4, &["stats", "dir", "--check"]);
        assert!(told.contains("write error, ") && told.contains("/large (inode "), "{told}");
        assert!(!told.contains(" 0 write errors"), "{told}");
        let _ = fs::remove_file(host.path("dir/large"));
        let _ = host.run(&["umount", "dir"]);
        let messages = host.messages();
        let is_told = |message: &String| message.contains("/large (inode ") && message.contains(" writes failed");
        assert!(messages.iter().any(is_told), "{messages:?}");
    }));
    let _ = host.run(&["umount", "dir"]);
    let _ = Command::new("umount").arg("-l").arg(host.path("dir")).stderr(Stdio::null()).status();
    let unmounted = Command::new("umount").arg("-l").arg(host.path("host")).status();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    assert!(unmounted.is_ok_and(|status| status.success()));
}

#[test]
fn a_volume_that_was_stopped_is_found_by_a_check() {
    let Some(host) = Host::new() else { return };
    host.succeeds(&["mkfs", "image", "--size", "64M"]);
    host.mount("image");
    host.succeeds(&["shutdown", "dir"]);
    let told = host.exits_with(4, &["stats", "dir", "--check"]);
    assert!(told.starts_with("read-only since a failure: it was shut down on request\n"), "{told}");
}
