//! A fork is applied to a subvolume that others change, and on a volume that is nearly full.
mod small_volume;

use cairn_engine::{Apply, Error, FsyncKind, InodeId, RenameMode, Volume, VolumeOptions, Winner};
use cairn_environment::thread;
use small_volume::{DIRECTORY, FILE, device, get, open, open_with, put, used};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const ROUNDS: u8 = 25;

/// Names of one file, which has one at a time.
const LOG_NAMES: [&[u8]; 2] = [b"log", b"moved"];

/// The file has a name, which may be changing.
fn find_log(volume: &Volume, directory: InodeId) -> InodeId {
    loop {
        let mut found = LOG_NAMES.iter().map(|name| volume.lookup(directory, name));
        if let Some(log) = found.find_map(Result::ok) {
            return log.inode;
        }
    }
}

fn text(round: u8) -> Vec<u8> {
    vec![round; 7_000]
}

#[test]
fn others_go_on_meanwhile() {
    let device = device();
    let volume = Arc::new(open_with(&device, VolumeOptions::default()));
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let shared = put(&volume, origin, b"shared", &text(0));
    let log = put(&volume, origin, LOG_NAMES[0], b"");
    let (ends, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let spawn = |work: fn(&Volume, InodeId, u64)| {
        let (volume, ends, written) =
            (Arc::clone(&volume), Arc::clone(&ends), Arc::clone(&written));
        thread::spawn("other", move || {
            let mut at = 0;
            while !ends.load(Ordering::Acquire) {
                work(&volume, origin, at);
                at += 1;
                written.fetch_add(1, Ordering::AcqRel);
            }
            at
        })
    };
    let appender = spawn(|volume, origin, at| {
        let log = find_log(volume, origin);
        volume.write(log, at * 8, &at.to_le_bytes()).unwrap();
        volume.fsync_blocking(log, FsyncKind::Full).unwrap();
        volume.forget(log, 1);
    });
    let maker = spawn(|volume, origin, at| {
        let name = format!("made-{}", at % 5);
        let made = put(volume, origin, name.as_bytes(), b"made");
        volume.forget(made, 1);
        volume.unlink(origin, name.as_bytes()).unwrap();
    });
    let reader = spawn(|volume, origin, _| {
        let content = get(volume, origin, b"shared").unwrap();
        assert_eq!(content, text(content[0]));
    });
    for round in 1..=ROUNDS {
        let fork = volume.fork(origin, root, b"fork").unwrap().inode;
        let forked = volume.lookup(fork, b"shared").unwrap().inode;
        volume.write(forked, 0, &text(round)).unwrap();
        let new = put(&volume, fork, format!("new-{round}").as_bytes(), &text(round));
        volume.forget(new, 1);
        // What others write meanwhile is moved.
        let [to, from] = if round % 2 == 0 { LOG_NAMES } else { [LOG_NAMES[1], LOG_NAMES[0]] };
        volume.rename(fork, from, fork, to, RenameMode::NoReplace).unwrap();
        if round > 1 {
            volume.unlink(fork, format!("new-{}", round - 1).as_bytes()).unwrap();
        }
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        assert!(matches!(applied, Apply::Done(_)), "{round}: {applied:?}");
        let mut content = Vec::new();
        volume.read(shared, 0, 10_000, &mut content).unwrap();
        assert_eq!(content, text(round));
        volume.forget(forked, 1);
        volume.forget(fork, 1);
        volume.remove_subvolume(root, b"fork").unwrap();
    }
    ends.store(true, Ordering::Release);
    let appended = appender.join().unwrap();
    maker.join().unwrap();
    reader.join().unwrap();
    assert!(written.load(Ordering::Acquire) > u64::from(ROUNDS));
    let check = |volume: &Volume| {
        let origin = volume.lookup(volume.root(), b"origin").unwrap().inode;
        let log = get(volume, origin, LOG_NAMES[usize::from(ROUNDS % 2)]).unwrap();
        let expected: Vec<u8> = (0..appended).flat_map(u64::to_le_bytes).collect();
        assert!(log == expected);
        assert_eq!(get(volume, origin, b"shared").unwrap(), text(ROUNDS));
        let last = format!("new-{ROUNDS}").into_bytes();
        assert_eq!(get(volume, origin, &last).unwrap(), text(ROUNDS));
        let gone = format!("new-{}", ROUNDS - 1).into_bytes();
        assert!(matches!(get(volume, origin, &gone), Err(Error::NotFound)));
    };
    volume.forget(log, 1);
    check(&volume);
    // A crash right after it: the log's last fsync and the last application count.
    drop(volume);
    check(&open(&device, None));
}

#[test]
fn what_is_only_in_memory_counts_as_changed() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    let file = put(&volume, origin, b"file", &[1; 9_000]);
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    let forked = volume.lookup(fork, b"file").unwrap().inode;
    volume.write(forked, 0, &[2; 9_000]).unwrap();
    volume.write(file, 5_000, &[3; 10]).unwrap();
    let applied = volume.apply(fork, Winner::Neither).unwrap();
    assert!(matches!(&applied, Apply::Conflicts(conflicts) if conflicts.len() == 1), "{applied:?}");
    assert_eq!(
        get(&volume, origin, b"file").unwrap()[4_999..5_011],
        [vec![1], vec![3; 10], vec![1]].concat()
    );
}

#[test]
fn without_room_nothing_is_applied_and_nothing_lost() {
    let device = device();
    let volume = open(&device, None);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    put(&volume, origin, b"file", &[1; 9_000]);
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    let large = volume.create(fork, b"large", &FILE).unwrap().inode;
    for megabyte in 0..20 {
        volume.write(large, megabyte << 20, &vec![megabyte as u8; 1 << 20]).unwrap();
    }
    volume.sync().unwrap();
    // Less is left than the fork has.
    let filler = volume.create(root, b"filler", &FILE).unwrap().inode;
    let mut at = 0;
    while volume.space().available_blocks > 3_000 {
        volume.write(filler, at, &vec![7; 1 << 20]).unwrap();
        volume.fsync_blocking(filler, FsyncKind::Full).unwrap();
        at += 1 << 20;
    }
    let before = used(&volume);
    for _ in 0..3 {
        assert!(matches!(volume.apply(fork, Winner::Neither), Err(Error::NoSpace)));
    }
    assert!(matches!(get(&volume, origin, b"large"), Err(Error::NotFound)));
    assert_eq!(used(&volume), before);
    // With room it works.
    volume.forget(filler, 1);
    volume.unlink(root, b"filler").unwrap();
    volume.sync().unwrap();
    let applied = volume.apply(fork, Winner::Neither).unwrap();
    assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
    let applied = volume.lookup(origin, b"large").unwrap().inode;
    let mut content = Vec::new();
    volume.read(applied, 19 << 20, 1 << 20, &mut content).unwrap();
    assert_eq!(content, vec![19; 1 << 20]);
}
