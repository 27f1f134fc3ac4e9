//! A power failure at any point while a fork is applied: before, or all of it, and fsck finds
//! nothing wrong.
mod crashes;
mod history;

use cairn_engine::{Apply, Error, FsyncKind, InodeId, RenameMode, Volume, Winner};
use cairn_environment::random::Seeded;
use crashes::Recorded;
use history::{DIRECTORY, FILE, device, open, seed};

/// States at each point.
const STATES: usize = 3;
const FILES: u8 = 12;

fn name(number: u8) -> Vec<u8> {
    format!("file-{number}").into_bytes()
}

fn put(volume: &Volume, directory: InodeId, name: &[u8], text: &[u8]) -> InodeId {
    let inode = volume.create(directory, name, &FILE).unwrap().inode;
    volume.write(inode, 0, text).unwrap();
    inode
}

/// First bytes and length of what has this path.
fn text(volume: &Volume, directory: InodeId, path: &[&[u8]]) -> Option<(Vec<u8>, u64)> {
    let find = |at, name: &&[u8]| volume.lookup(at, name).map(|found| found.inode);
    match path.iter().try_fold(directory, find) {
        Ok(file) => {
            let mut text = Vec::new();
            volume.read(file, 0, 4, &mut text).unwrap();
            Some((text, volume.attributes(file).unwrap().size_bytes))
        }
        Err(Error::NotFound) => None,
        Err(error) => panic!("{error}"),
    }
}

/// What a volume shows of it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Shown {
    files: Vec<Option<(Vec<u8>, u64)>>,
    entries: usize,
}

fn shown(volume: &Volume) -> Shown {
    let origin = volume.lookup(volume.root(), b"origin").unwrap().inode;
    let numbered: Vec<Vec<u8>> = (0..FILES).map(name).collect();
    let mut paths: Vec<Vec<&[u8]>> = numbered.iter().map(|name| vec![&name[..]]).collect();
    paths.extend([
        vec![&b"new"[..], b"inner"],
        vec![b"moved", b"below"],
        vec![b"old", b"below"],
        vec![b"own"],
    ]);
    let files = paths.iter().map(|path| text(volume, origin, path)).collect();
    let mut entries = 0;
    let mut count = |_: cairn_engine::DirectoryItem<'_>| {
        entries += 1;
        true
    };
    volume.read_directory(origin, 0, &mut count).unwrap();
    Shown { files, entries }
}

#[test]
fn a_crash_leaves_all_of_it_or_nothing() {
    let mut random = Seeded::new(seed());
    let device = device();
    let volume = open(&device, false);
    let root = volume.root();
    let origin = volume.create_subvolume(root, b"origin", &DIRECTORY).unwrap().inode;
    for number in 0..FILES {
        put(&volume, origin, &name(number), &[number; 20_000]);
    }
    let old = volume.create(origin, b"old", &DIRECTORY).unwrap().inode;
    put(&volume, old, b"below", b"below");
    let fork = volume.fork(origin, root, b"fork").unwrap().inode;
    let find = |at, name: &[u8]| volume.lookup(at, name).unwrap().inode;
    for number in 0..FILES / 2 {
        let file = find(fork, &name(number));
        volume.write(file, random.below(5_000), &[100 + number; 9_000]).unwrap();
        volume.write(file, 0, b"fork").unwrap();
    }
    for number in FILES / 2..FILES - 2 {
        volume.unlink(fork, &name(number)).unwrap();
    }
    let new = volume.create(fork, b"new", &DIRECTORY).unwrap().inode;
    put(&volume, new, b"inner", b"inner");
    volume.rename(fork, b"old", fork, b"moved", RenameMode::Replace).unwrap();
    // Of the origin's own changes none is lost.
    let kept = find(origin, &name(FILES - 1));
    volume.write(kept, 0, b"kept").unwrap();
    put(&volume, origin, b"own", b"own");
    volume.sync().unwrap();
    let before = shown(&volume);

    device.start_recording();
    // An fsync of something else meanwhile makes the log follow.
    volume.write(kept, 0, b"kept").unwrap();
    volume.fsync_blocking(kept, FsyncKind::Full).unwrap();
    let applied = volume.apply(fork, Winner::Neither).unwrap();
    assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
    let ended = device.explorer().history_len();
    let after = shown(&volume);
    let file = find(origin, &name(0));
    volume.write(file, 0, b"late").unwrap();
    volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    let written = device.explorer().history_len();
    let late = shown(&volume);
    assert!(before != after && after != late, "{before:?} {after:?} {late:?}");

    let (ended, outcomes) = ([ended, written], [before, after.clone(), late]);
    let recorded = Recorded { device, random, ended, outcomes };
    recorded.crash_everywhere(
        STATES,
        |device| open(device, false),
        shown,
        |volume, which, context| {
            // Once more: what was applied is no conflict.
            let fork = volume.lookup(volume.root(), b"fork").unwrap().inode;
            if which < 2 {
                let again = volume.apply(fork, Winner::Neither).unwrap();
                assert!(matches!(again, Apply::Done(_)), "{context}: {again:?}");
                assert_eq!(shown(volume), after, "{context}");
            }
            volume.remove_subvolume(volume.root(), b"fork").unwrap();
        },
    );
}
