//! What fails below a real mount is counted, reported to the system's log, and found by `cairn
//! stats --check`.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use std::fs;
use std::io::ErrorKind;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

const BLOCK: usize = 4096;
const BLOCKS: usize = 768;

/// A folder with a mount point, and a listener in place of the system's log.
struct Host {
    mounted: Mounted,
    log: UnixDatagram,
}

impl Deref for Host {
    type Target = Mounted;

    fn deref(&self) -> &Mounted {
        &self.mounted
    }
}

impl Host {
    /// `None` where mounts are not possible.
    fn new() -> Option<Self> {
        let mounted = Mounted::new()?;
        let log = UnixDatagram::bind(mounted.path("log")).unwrap();
        log.set_nonblocking(true).unwrap();
        Some(Self { mounted, log })
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

    /// Makes the blocks of `content` bad wherever they stand in the image; returns how many there
    /// were.
    fn rot(&self, image: &str, content: &[u8]) -> usize {
        let wanted: std::collections::HashSet<&[u8]> = content.chunks(BLOCK).collect();
        let bytes = fs::read(self.path(image)).unwrap();
        let file = fs::OpenOptions::new().write(true).open(self.path(image)).unwrap();
        let places = (0..bytes.len())
            .step_by(BLOCK)
            .filter(|&at| wanted.contains(&bytes[at..(at + BLOCK).min(bytes.len())]));
        places.map(|at| file.write_all_at(&[0xA5; 512], at as u64).unwrap()).count()
    }
}

/// Each block is another one.
fn content() -> Vec<u8> {
    (0..BLOCKS)
        .flat_map(|block| [(block as u32).to_le_bytes(), *b"mine"].concat().repeat(BLOCK / 8))
        .collect()
}

/// The numbers in front of `what` in all messages, added up, and how many messages have one.
fn sum_of(messages: &[String], what: &str) -> (usize, usize) {
    let number = |message: &String| {
        message
            .split(what)
            .next()
            .filter(|before| before.len() < message.len())?
            .split(' ')
            .next_back()?
            .parse()
            .ok()
    };
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
    let of_a = format!(
        "/a: in sync; 0 read errors, {BLOCKS} checksum errors, 0 write errors; {BLOCKS} blocks repaired"
    );
    assert!(
        told.contains(&of_a) && told.contains("/b: in sync; 0 read errors, 0 checksum errors"),
        "{told}"
    );
    let json = host.exits_with(4, &["stats", "dir", "--check", "--json"]);
    assert!(
        json.starts_with("{\"failures\":{\"read_errors\":0,\"checksum_errors\":768,"),
        "{json}"
    );
    host.succeeds(&["stats", "dir"]);
    let messages = host.unmount();
    let (blocks, lines) = sum_of(&messages, " bad blocks written again from another copy");
    assert_eq!(blocks, BLOCKS, "{messages:?}");
    assert!(lines < 10 && messages.len() < 20, "{messages:?}");
    assert!(
        messages
            .iter()
            .any(|message| message.contains("/folder/film (inode ") && message.contains("member ")),
        "{messages:?}"
    );
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
    assert!(
        told.contains("checksum error, /film (inode ") && told.contains("file block 17, block "),
        "{told}"
    );
    assert!(host.succeeds(&["stats", "dir"]).starts_with("failures: 0 read errors, "));
    assert_eq!(host.unmount(), Vec::<String>::new());
    let messages = fs::read_to_string(host.path("messages")).unwrap();
    let line = messages
        .lines()
        .find(|line| line.contains("/film (inode "))
        .unwrap_or_else(|| panic!("{messages}"));
    assert!(
        line.contains("ERROR")
            && line.contains("file block 17")
            && line.contains("restore the file from a backup"),
        "{line}"
    );
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
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=24m", "cairn-test"])
        .arg(host.path("host"))
        .output()
        .unwrap();
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
        let failed = (0..64).any(|part| file.write_all_at(&vec![7; 1 << 20], part << 20).is_err())
            || file.sync_all().is_err();
        assert!(failed, "there is room for everything");
        drop(file);
        let told = host.exits_with(4, &["stats", "dir", "--check"]);
        assert!(told.contains("write error, ") && told.contains("/large (inode "), "{told}");
        assert!(!told.contains(" 0 write errors"), "{told}");
        let _ = fs::remove_file(host.path("dir/large"));
        let _ = host.run(&["umount", "dir"]);
        let messages = host.messages();
        let is_told = |message: &String| {
            message.contains("/large (inode ") && message.contains(" writes failed")
        };
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

/// A volume of one file with a damaged block, not mounted; the mirror of such volumes is degraded
/// later.
fn damaged_image(host: &Host, image: &str, members: &[&str]) {
    host.succeeds(&["mkfs", image, "--size", "64M"]);
    host.mount(image);
    fs::create_dir(host.path("dir/my folder")).unwrap();
    fs::write(host.path("dir/my folder/film"), content()).unwrap();
    fs::write(host.path("dir/whole"), "text").unwrap();
    host.unmount();
    members
        .iter()
        .for_each(|member| assert_eq!(host.rot(member, &content()[17 * BLOCK..19 * BLOCK]), 2));
}

#[test]
fn damaged_data_comes_with_advice_and_can_be_given_up_and_taken_back() {
    let Some(host) = Host::new() else { return };
    damaged_image(&host, "image", &["image"]);
    let advice = [
        "/my folder/film: its data is damaged, and there is no good copy. Mount the volume (`cairn mount image DIR`) \
         and restore",
        "rm DIR'/my folder/film'",
        "cairn fsck image --repair --accept-loss '/my folder/film'",
    ];
    for arguments in [&["fsck", "image", "--data"][..], &["fsck", "image", "--data", "--repair"]] {
        let told = host.exits_with(4, arguments);
        assert!(advice.iter().all(|part| told.contains(part)), "{told}");
    }
    let other = host.exits_with(4, &["fsck", "image", "--repair", "--accept-loss", "/whole"]);
    assert!(other.contains("/whole: its data is not damaged"), "{other}");
    let before = fs::read(host.path("image")).unwrap();
    let told =
        host.exits_with(1, &["fsck", "image", "--repair", "--accept-loss", "/my folder/film"]);
    assert!(
        told.contains("(given up: these blocks are holes now)")
            && told.contains("lost: 2 blocks of files"),
        "{told}"
    );
    assert!(!told.contains("its data is damaged, and there is no good copy"), "{told}");
    host.succeeds(&["fsck", "image", "--data"]);
    let mut expected = content();
    expected[17 * BLOCK..19 * BLOCK].fill(0);
    host.mount("image");
    assert!(fs::read(host.path("dir/my folder/film")).unwrap() == expected);
    assert_eq!(fs::read_to_string(host.path("dir/whole")).unwrap(), "text");
    assert_eq!(host.succeeds(&["stats", "dir", "--check"]), "no failures\n");
    host.unmount();

    // Taken back where nothing was done since: on a copy of the image, which the same repair
    // changes again.
    fs::write(host.path("copy"), before).unwrap();
    let before = fs::read(host.path("copy")).unwrap();
    host.exits_with(
        1,
        &["fsck", "copy", "--repair", "--backup", "kept", "--accept-loss", "/my folder/film"],
    );
    host.succeeds(&["fsck", "copy", "--undo", "kept"]);
    assert!(fs::read(host.path("copy")).unwrap() == before);
    host.exits_with(4, &["fsck", "copy", "--data"]);
    host.exits_with(2, &["fsck", "copy", "--accept-loss", "/whole"]);
    let relative = host.exits_with(2, &["fsck", "copy", "--repair", "--accept-loss", "dir/whole"]);
    assert!(relative.contains("/dir/whole"), "{relative}");
}

#[test]
fn a_mirror_gives_up_what_is_bad_in_all_copies_only() {
    let Some(host) = Host::new() else { return };
    damaged_image(&host, "mirror:a,b", &["a", "b"]);
    assert_eq!(host.rot("a", &content()[100 * BLOCK..101 * BLOCK]), 1);
    let told =
        host.exits_with(1, &["fsck", "mirror:a,b", "--repair", "--accept-loss", "/my folder/film"]);
    assert!(told.contains("lost: 2 blocks of files"), "{told}");
    host.succeeds(&["fsck", "mirror:a,b", "--data"]);
    host.mount("mirror:a,b");
    let mut expected = content();
    expected[17 * BLOCK..19 * BLOCK].fill(0);
    assert!(fs::read(host.path("dir/my folder/film")).unwrap() == expected);
    host.unmount();
}

#[test]
fn checks_of_a_degraded_mirror_say_so_by_their_exit_code() {
    let Some(host) = Host::new() else { return };
    host.succeeds(&["mkfs", "mirror:a,b", "--size", "64M"]);
    host.succeeds(&["device", "status", "mirror:a,b"]);
    host.succeeds(&["fsck", "mirror:a,b"]);
    fs::remove_file(host.path("b")).unwrap();
    assert!(host.exits_with(4, &["device", "status", "mirror:a,b"]).contains("degraded"));
    assert!(host.exits_with(4, &["fsck", "mirror:a,b"]).contains("is used without"));
    host.succeeds(&["fsck", "mirror:a,b", "--degraded"]);
    host.succeeds(&["mount", "mirror:a,b", "dir", "-o", "degraded", "--log-socket", "log"]);
    let told = host.exits_with(4, &["stats", "dir", "--check"]);
    assert!(told.contains("/b: missing; "), "{told}");
    host.succeeds(&["stats", "dir"]);
    host.unmount();
    host.succeeds(&["device", "replace", "mirror:a,b", "b", "b"]);
    host.succeeds(&["device", "status", "mirror:a,b"]);
    // Without a mount no server counts failures.
    assert!(host.exits_with(1, &["stats", "mirror:a,b", "--check"]).contains("not mounted"));
    host.exits_with(1, &["stats", "dir", "--check"]);
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
