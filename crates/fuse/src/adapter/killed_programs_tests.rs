//! Programs on a real mount are killed at random moments, in the middle of their requests. The
//! kernel withdraws a request that the server has not read; it waits for the answer to any other,
//! although the program is dying, and its references count. So the server's count agrees with the
//! kernel's: when everything is removed, no inode is referenced, and all space is free again.
use super::volume_tests::MountedImage;
use crate::session_tests::can_mount;
use crate::tiny_file_system::options_of_tests;
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ROUNDS: u64 = 150;
const PROGRAMS: u64 = 4;
/// A program is killed within this time; most need longer.
const LIFE_US: u64 = 12_000;
/// Each works in a directory of its own that others clear.
const SCRIPTS: [&str; 6] = [
    "for i in 1 2 3 4; do mkdir d$i; echo x >d$i/f; ln d$i/f d$i/g; mv d$i/g d$i/h; ls -l d$i; done",
    "for i in 1 2 3 4; do cp -r d$i copy$i; mv copy$i other$i; done",
    "rm -rf d1 copy2 other3 d4; rm -f big link",
    "dd if=/dev/zero of=big bs=64k count=8 conv=fsync; truncate -s 100 big; cat big; rm big",
    "find . -type f; cat d*/f; tar -cf /dev/null .",
    "ln -s target link; readlink link; mkfifo pipe; rm link pipe; sync d1",
];

fn seed() -> u64 {
    std::env::var("CAIRN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Starts a script, in a process group of its own.
fn start(mount: &MountedImage, random: &mut Seeded) -> Child {
    let directory = mount.path(&format!("dir{}", random.below(3)));
    fs::create_dir_all(&directory).unwrap();
    Command::new("sh")
        .args(["-c", SCRIPTS[random.below(SCRIPTS.len() as u64) as usize]])
        .current_dir(directory)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn referenced(mount: &MountedImage) -> u64 {
    let statistics = crate::statistics(&mount.root()).unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&statistics).unwrap();
    statistics["inodes_referenced"].as_u64().unwrap()
}

fn remove_all(mount: &MountedImage) -> std::io::Result<()> {
    fs::read_dir(mount.root())?.try_for_each(|entry| fs::remove_dir_all(entry?.path()))
}

fn free_blocks(mount: &MountedImage) -> u64 {
    rustix::fs::statvfs(mount.root()).unwrap().f_bfree
}

#[test]
fn programs_killed_at_any_moment_leave_no_reference() {
    if !can_mount() {
        return;
    }
    let (seed, mut killed) = (seed(), 0);
    let mut random = Seeded::new(seed);
    let mount = MountedImage::new(&options_of_tests());
    let free_before = free_blocks(&mount);
    for _ in 0..ROUNDS {
        let mut programs: Vec<Child> = (0..PROGRAMS).map(|_| start(&mount, &mut random)).collect();
        clock::sleep(Duration::from_micros(random.below(LIFE_US)));
        for program in &mut programs {
            if program.try_wait().unwrap().is_none() {
                killed += 1;
                kill_process_group(Pid::from_child(program), Signal::KILL).unwrap();
                program.wait().unwrap();
            }
        }
    }
    assert!(killed >= ROUNDS, "seed {seed}: only {killed} programs lived long enough");
    let removed_at = clock::now_monotonic();
    while let Err(error) = remove_all(&mount) {
        // What a shell has started ends after it, with a request of its own.
        let is_left = error.kind() == ErrorKind::DirectoryNotEmpty;
        assert!(is_left && removed_at.elapsed() < Duration::from_secs(60), "seed {seed}: {error}");
    }
    // The kernel sends FORGET when it likes.
    let mut left = referenced(&mount);
    while left > 0 && removed_at.elapsed() < Duration::from_secs(60) {
        clock::sleep(Duration::from_millis(5));
        left = referenced(&mount);
    }
    assert_eq!(left, 0, "seed {seed}: inodes are referenced although everything is removed");
    // What is removed is freed when the mount ends, at the latest.
    let mount = mount.remount(&options_of_tests());
    assert_eq!(free_blocks(&mount), free_before, "seed {seed}");
    mount.unmount();
}
