//! What programs expect of single calls, on a real mount.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/file_handle.rs"]
mod file_handle;
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use cairn_environment::random::Seeded;
use file_handle::FileHandle;
use mounted::Mounted;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_groups, set_thread_uid};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

/// Has the kernel forget all unused inodes. (Not sync(2), which waits for every file system of the
/// machine.)
fn drop_inodes(mount: &Path) {
    rustix::fs::syncfs(File::open(mount).unwrap()).unwrap();
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}

#[track_caller]
fn expect_content(handle: FileHandle, mount: &Path, content: &str) -> File {
    let mut file =
        handle.open(&File::open(mount).unwrap()).unwrap_or_else(|error| panic!("{error}"));
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, content);
    file
}

#[track_caller]
fn expect_stale(handle: FileHandle, mount: &Path) {
    let opened = handle.open(&File::open(mount).unwrap());
    assert_eq!(
        opened.map(drop).map_err(|error| error.raw_os_error()),
        Err(Some(Errno::STALE.raw_os_error()))
    );
}

fn path_of(file: &File) -> std::path::PathBuf {
    fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file))).unwrap()
}

/// They hold when the kernel has forgotten the inode, over the end of the server, and not a moment
/// longer than the file.
#[test]
fn a_file_handle_holds_as_long_as_its_file() {
    let Some(mounted) = Mounted::new() else { return };
    if !is_root() {
        eprintln!("left out: opening by a handle takes root");
        return;
    }
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    let dir = mounted.path("dir").canonicalize().unwrap();
    fs::create_dir_all(dir.join("a/b")).unwrap();
    fs::write(dir.join("a/b/letter"), "Dear Ada").unwrap();
    fs::write(dir.join("a/gone"), "Dear Bob").unwrap();
    let letter = FileHandle::of(&dir.join("a/b/letter")).unwrap();
    let gone = FileHandle::of(&dir.join("a/gone")).unwrap();
    let inner = FileHandle::of(&dir.join("a/b")).unwrap();
    let root = FileHandle::of(&dir).unwrap();
    for round in ["the same server", "a new server", "a new server after a crash"] {
        drop_inodes(&dir);
        expect_content(letter, &dir, "Dear Ada");
        drop_inodes(&dir);
        // A directory is found again in its parents.
        let directory = inner.open(&File::open(&dir).unwrap()).unwrap();
        assert_eq!(path_of(&directory), dir.join("a/b"), "{round}");
        drop(directory);
        drop_inodes(&dir);
        let opened = root.open(&File::open(&dir).unwrap()).unwrap();
        assert_eq!(path_of(&opened), dir, "{round}");
        drop(opened);
        expect_content(gone, &dir, "Dear Bob");
        // The name and the handle lead to one inode.
        let file = expect_content(letter, &dir, "Dear Ada");
        assert_eq!(
            file.metadata().unwrap().ino(),
            fs::metadata(dir.join("a/b/letter")).unwrap().ino()
        );
        drop(file);
        if round == "the same server" {
            mounted.succeeds(&["umount", "dir"]);
        } else {
            mounted.succeeds(&["shutdown", "dir"]);
            mounted.succeeds(&["umount", "dir"]);
        }
        mounted.succeeds(&["mount", "image", "dir"]);
    }
    fs::rename(dir.join("a/b/letter"), dir.join("moved")).unwrap();
    drop_inodes(&dir);
    expect_content(letter, &dir, "Dear Ada");
    fs::remove_file(dir.join("a/gone")).unwrap();
    expect_stale(gone, &dir);
    drop_inodes(&dir);
    expect_stale(gone, &dir);
    fs::write(dir.join("a/gone"), "Dear Eve").unwrap();
    expect_stale(gone, &dir);
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    expect_stale(gone, &dir);
    expect_content(letter, &dir, "Dear Ada");
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
}

/// A file of a random history.
struct Known {
    handle: FileHandle,
    /// No other file has it.
    content: String,
    path: std::path::PathBuf,
    /// It must be found, it must not, or that is open: what a killed server did not sync may have
    /// happened or not.
    is_there: Option<bool>,
}

/// Also where inode numbers are used again, because the server was killed before it synced the
/// inodes that had them.
#[test]
fn a_file_handle_never_leads_to_another_file() {
    let Some(mounted) = Mounted::new() else { return };
    if !is_root() {
        eprintln!("left out: opening by a handle takes root");
        return;
    }
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    mounted.succeeds(&["umount", "dir"]);
    let dir = mounted.path("dir").canonicalize().unwrap();
    let mut random = Seeded::new(14);
    let mut known: Vec<Known> = Vec::new();
    let (mut inodes, mut used_again) = (HashSet::new(), 0);
    for round in 0..6 {
        let mut server = mounted.serve(&["image", "dir"]);
        for file in known.iter_mut().filter(|file| file.is_there.is_none()) {
            file.is_there = fs::read_to_string(&file.path)
                .is_ok_and(|found| found == file.content)
                .then_some(true);
        }
        for step in 0..40 {
            let there: Vec<usize> =
                (0..known.len()).filter(|index| known[*index].is_there == Some(true)).collect();
            let chosen =
                (!there.is_empty()).then(|| there[random.below(there.len() as u64) as usize]);
            match (random.below(8), chosen) {
                (0, _) => rustix::fs::syncfs(File::open(&dir).unwrap()).unwrap(),
                (1, Some(index)) => {
                    fs::remove_file(&known[index].path).unwrap();
                    known[index].is_there = Some(false);
                }
                (2, Some(index)) => {
                    let path = dir.join(format!("moved in {round} {step}"));
                    fs::rename(&known[index].path, &path).unwrap();
                    known[index].path = path;
                }
                _ => {
                    let (content, path) =
                        (format!("{round} {step}"), dir.join(format!("{round} {step}")));
                    fs::write(&path, &content).unwrap();
                    used_again += usize::from(!inodes.insert(fs::metadata(&path).unwrap().ino()));
                    known.push(Known {
                        handle: FileHandle::of(&path).unwrap(),
                        content,
                        path,
                        is_there: Some(true),
                    });
                }
            }
        }
        let mount = File::open(&dir).unwrap();
        for Known { handle, content, is_there, .. } in &known {
            let opened = handle.open(&mount).map(|mut file| {
                let mut text = String::new();
                file.read_to_string(&mut text).map(|_| text).unwrap()
            });
            match opened {
                Ok(text) if *is_there == Some(true) => assert_eq!(text, *content, "round {round}"),
                // Its data may be lost.
                Ok(text) => assert!(
                    is_there.is_none() && (text.is_empty() || text == *content),
                    "round {round}: {content} is {text}"
                ),
                Err(error) => assert!(*is_there != Some(true), "round {round}: {content}: {error}"),
            }
        }
        drop(mount);
        if round % 2 == 0 {
            server.kill().unwrap();
            known.iter_mut().for_each(|file| file.is_there = None);
            let _tells_of_the_killed_server = mounted.run(&["umount", "dir"]);
        } else {
            mounted.succeeds(&["umount", "dir"]);
        }
        server.wait().unwrap();
    }
    assert!(used_again > 0, "no number was used twice");
    mounted.succeeds(&["fsck", "--data", "image"]);
}

/// Without waiting for a commit.
#[test]
fn what_is_written_into_preallocated_blocks_is_counted_once() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "256M", "-o", "commit=600"]);
    let file = File::create(mounted.path("dir/file")).unwrap();
    let mebibytes = || (file.metadata().unwrap().blocks() * 512) >> 20;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 100 << 20).unwrap();
    assert_eq!(mebibytes(), 100);
    let data = vec![7; 1 << 20];
    for at in 0..50 {
        file.write_all_at(&data, at << 20).unwrap();
        assert_eq!(mebibytes(), 100, "after {at} MiB");
    }
    // Behind the preallocated range, and over what is there.
    file.write_all_at(&data, 120 << 20).unwrap();
    assert_eq!(mebibytes(), 101);
    file.sync_all().unwrap();
    assert_eq!(mebibytes(), 101);
    file.write_all_at(&data, 120 << 20).unwrap();
    file.write_all_at(&data, 10 << 20).unwrap();
    assert_eq!(mebibytes(), 101);
    file.sync_all().unwrap();
    assert_eq!(mebibytes(), 101);
    drop(file);
    mounted.succeeds(&["umount", "dir"]);
}

/// A user that changes a file.
struct Changer {
    user: u32,
    group: u32,
    further_group: u32,
}

impl Changer {
    /// Runs `change` as this user, on a thread of its own.
    fn change(&self, change: impl FnOnce() -> io::Result<()> + Send) {
        std::thread::scope(|scope| {
            let changed = scope.spawn(|| {
                set_thread_groups(&[Gid::from_raw(self.further_group)]).unwrap();
                set_thread_gid(Gid::from_raw(self.group)).unwrap();
                set_thread_uid(Uid::from_raw(self.user)).unwrap();
                change().unwrap();
            });
            changed.join().unwrap();
        });
    }
}

type Change = fn(&File) -> io::Result<()>;

/// Set-group-id without the right to execute for the group stays for the group's members, as on
/// ext4 and XFS.
#[test]
fn set_id_bits_go_as_on_other_file_systems() {
    let Some(mounted) = Mounted::new() else { return };
    if !is_root() {
        eprintln!("left out: changing the user takes root");
        return;
    }
    let changes: [(&str, Change); 4] = [
        ("write", |file| file.write_all_at(b"more", 10)),
        ("truncate", |file| file.set_len(5)),
        ("fallocate", |file| Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), 0, 100_000)?)),
        ("copy_file_range", |file| {
            Ok(rustix::fs::copy_file_range(file, Some(&mut 0), file, Some(&mut 100), 10)
                .map(drop)?)
        }),
    ];
    let owner_changes: [(&str, Change); 1] =
        [("chgrp", |file| std::os::unix::fs::fchown(file, None, Some(8)))];
    let root = Changer { user: 0, group: 0, further_group: 0 };
    let stranger = Changer { user: 1000, group: 8, further_group: 8 };
    let member = Changer { user: 1000, group: 7, further_group: 8 };
    let further_member = Changer { user: 1000, group: 8, further_group: 7 };
    for options in [&[][..], &["-o", "writeback=on"]] {
        mounted.succeeds(&[&["mount", "image", "dir", "--create", "64M"], options].concat());
        let path = mounted.path("dir/file");
        let file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let check = |changer: &Changer,
                     name: &str,
                     change: Change,
                     user: u32,
                     before: u32,
                     after: u32| {
            file.set_len(8192).unwrap();
            std::os::unix::fs::fchown(&file, Some(user), Some(7)).unwrap();
            file.set_permissions(fs::Permissions::from_mode(before)).unwrap();
            changer.change(|| change(&file));
            let found = file.metadata().unwrap().mode() & 0o7777;
            let (user, group, further) = (changer.user, changer.group, changer.further_group);
            assert_eq!(
                found, after,
                "{options:?}: {name} of a file of {before:o} by {user}:{group},{further}: {found:o}"
            );
        };
        for (name, change) in changes {
            for (before, by_stranger, by_member) in [
                (0o2666, 0o666, 0o2666),
                (0o6666, 0o666, 0o2666),
                (0o2676, 0o676, 0o676),
                (0o6777, 0o777, 0o777),
                (0o666, 0o666, 0o666),
            ] {
                check(&stranger, name, change, 0, before, by_stranger);
                check(&member, name, change, 0, before, by_member);
                check(&root, name, change, 0, before, before);
            }
            check(&further_member, name, change, 0, 0o2666, 0o2666);
        }
        for (name, change) in owner_changes {
            check(&member, name, change, 1000, 0o2666, 0o2666);
            check(&member, name, change, 1000, 0o6777, 0o777);
            check(&stranger, name, change, 1000, 0o2666, 0o666);
            check(&root, name, change, 1000, 0o6666, 0o2666);
        }
        drop(file);
        mounted.succeeds(&["umount", "dir"]);
        fs::remove_file(mounted.path("image")).unwrap();
    }
}

/// `df -i`.
#[test]
fn inodes_are_counted() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    let used = || {
        let numbers = rustix::fs::statvfs(mounted.path("dir")).unwrap();
        assert!(
            numbers.f_ffree > 50_000 && numbers.f_favail == numbers.f_ffree,
            "{} of {}",
            numbers.f_ffree,
            numbers.f_files
        );
        numbers.f_files - numbers.f_ffree
    };
    assert_eq!(used(), 1, "the root");
    (0..20).for_each(|number| drop(File::create(mounted.path(&format!("dir/{number}"))).unwrap()));
    assert_eq!(used(), 21);
    mounted.succeeds(&["umount", "dir"]);
    let told = mounted.succeeds(&["fsck", "--data", "image"]);
    assert!(!told.contains("inodes, but there are"), "{told}");
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(used(), 21);
    mounted.succeeds(&["umount", "dir"]);
}

/// Runs mount(8) or umount(8).
#[track_caller]
fn run(program: &str, arguments: &[&str], folder: &Path) {
    let output = Command::new(program).args(arguments).current_dir(folder).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The kernel takes a FUSE mount as the upper layer only if it can leave whiteouts.
#[test]
fn an_overlay_can_have_its_upper_layer_here() {
    let Some(mounted) = Mounted::new() else { return };
    let known = fs::read_to_string("/proc/filesystems")
        .unwrap_or_default()
        .lines()
        .any(|line| line.ends_with("\toverlay"));
    if !known || !is_root() {
        eprintln!("left out: no overlay file system");
        return;
    }
    mounted.succeeds(&["mount", "image", "dir", "--create", "64M"]);
    for directory in ["dir/upper", "dir/work", "lower/both/inner", "merged"] {
        fs::create_dir_all(mounted.path(directory)).unwrap();
    }
    for file in ["lower/changed", "lower/removed", "lower/moved", "lower/both/inner/deep"] {
        fs::write(mounted.path(file), "below").unwrap();
    }
    let overlay = [
        "-t",
        "overlay",
        "overlay",
        "-o",
        "lowerdir=lower,upperdir=dir/upper,workdir=dir/work",
        "merged",
    ];
    run("mount", &overlay, mounted.folder.path());
    fs::write(mounted.path("merged/changed"), "above").unwrap();
    fs::remove_file(mounted.path("merged/removed")).unwrap();
    fs::rename(mounted.path("merged/moved"), mounted.path("merged/here")).unwrap();
    fs::remove_dir_all(mounted.path("merged/both")).unwrap();
    fs::create_dir(mounted.path("merged/both")).unwrap();
    let check = |mounted: &Mounted| {
        let mut names: Vec<_> = fs::read_dir(mounted.path("merged"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["both", "changed", "here"]);
        assert_eq!(fs::read_dir(mounted.path("merged/both")).unwrap().count(), 0);
        assert_eq!(fs::read_to_string(mounted.path("merged/changed")).unwrap(), "above");
        assert_eq!(fs::read_to_string(mounted.path("merged/here")).unwrap(), "below");
    };
    check(&mounted);
    run("umount", &["merged"], mounted.folder.path());
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    run("mount", &overlay, mounted.folder.path());
    check(&mounted);
    run("umount", &["merged"], mounted.folder.path());
    assert_eq!(fs::read_to_string(mounted.path("lower/removed")).unwrap(), "below");
    mounted.succeeds(&["umount", "dir"]);
}

/// What a stranger appends to a file with set-id bits stays, also when the kernel sends the dirty
/// last page meanwhile.
#[test]
fn an_append_to_a_set_id_file_stays_beside_a_sync() {
    const FILES: u64 = 500;
    const FIRST: [u8; 35] = [b'a'; 35];
    let Some(mounted) = Mounted::new() else { return };
    if !is_root() {
        eprintln!("left out: changing the user takes root");
        return;
    }
    mounted.succeeds(&["mount", "image", "dir", "--create", "256M", "-o", "writeback=on"]);
    let mut random = Seeded::new(cairn_environment::random::u64());
    let stranger = Changer { user: 1000, group: 8, further_group: 8 };
    let more = vec![b'b'; 400_000];
    let root = File::open(mounted.path("dir")).unwrap();
    for number in 0..FILES {
        let path = mounted.path(&format!("dir/{number}"));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o4777)).unwrap();
        file.write_all_at(&FIRST, 0).unwrap();
        let pause = random.below(15_000);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..pause).for_each(|_| std::hint::spin_loop());
                rustix::fs::syncfs(&root).unwrap();
            });
            stranger.change(|| file.write_all_at(&more, FIRST.len() as u64));
        });
        let found = fs::read(&path).unwrap();
        assert!(found.starts_with(&FIRST) && found[FIRST.len()..] == more, "file {number}");
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o777);
        fs::remove_file(&path).unwrap();
    }
    drop(root);
    mounted.succeeds(&["umount", "dir"]);
}
