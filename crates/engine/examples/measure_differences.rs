//! Measures how long it takes to say what differs between two snapshots, and to apply a fork.
//!
//!     cargo run --release -p cairn-engine --example measure_differences -- IMAGE [FILES [CHANGES]]
//!
//! It makes the file IMAGE, with a volume of FILES empty files in directories of 1,000, and a
//! snapshot; changes some; and makes another one. Then it opens the volume again, compares both
//! snapshots, again, and in the other order, and at last the second one with the subvolume, which
//! is the same.
//!
//! There are two kinds of changes: *content* writes into files, whose names have to be found;
//! *names* makes, removes and renames files. Each file is in the directory that was made last
//! (*near*), or in any one, all of which were made before it (*far*).
//!
//! At last, ten times CHANGES files are written in a fork, which is applied; before that, the
//! commit of one change is measured. This happens [`ROUNDS`] times, and as often with the volume
//! opened again after the writing.
use cairn_blockdev::{FileDevice, OpenMode};
use cairn_engine::{
    Apply, FileType, InodeId, NewInode, RenameMode, Result, Volume, VolumeOptions, Winner, mkfs,
};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use std::path::Path;
use std::sync::Arc;

/// Per file: its items, and what copies of nodes take meanwhile.
const BYTES_PER_FILE: u64 = 2048;
const FILES_PER_DIRECTORY: u64 = 1000;
/// Forks that are applied, one after the other.
const ROUNDS: u64 = 9;
/// What is kept for each file that is written in a fork: nodes of both trees, and data.
const BYTES_PER_CHANGE: u64 = 128 << 10;
/// The subvolume that a volume begins with.
const FIRST: u64 = 256;

const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
const FILE: NewInode<'_> = NewInode { file_type: FileType::Regular, mode: 0o644, ..DIRECTORY };

fn name(number: u64) -> Vec<u8> {
    format!("file-{number:07}").into_bytes()
}

/// Makes the files; returns the directories.
fn fill(volume: &Volume, files: u64, far: bool) -> Result<Vec<InodeId>> {
    let make =
        |index: u64| volume.create(volume.root(), format!("d{index:04}").as_bytes(), &DIRECTORY);
    let mut directories = Vec::new();
    let count = files.div_ceil(FILES_PER_DIRECTORY);
    if far {
        for index in 0..count {
            directories.push(make(index)?.inode);
        }
    }
    let mut random = Seeded::new(1);
    for file in 0..files {
        if !far && file % FILES_PER_DIRECTORY == 0 {
            directories.push(make(file / FILES_PER_DIRECTORY)?.inode);
        }
        let at = if far { random.below(count) } else { file / FILES_PER_DIRECTORY };
        let made = volume.create(directories[at as usize], &name(file), &FILE)?;
        volume.forget(made.inode, 1);
    }
    Ok(directories)
}

fn change(
    volume: &Volume,
    directories: &[InodeId],
    kind: &str,
    changes: u64,
    seed: u64,
) -> Result<()> {
    let mut random = Seeded::new(seed);
    let mut left = changes;
    while left > 0 {
        let directory = directories[random.below(directories.len() as u64) as usize];
        let skip = random.below(FILES_PER_DIRECTORY / 2);
        let (mut seen, mut chosen) = (0, Vec::new());
        volume.read_directory(directory, 0, &mut |item| {
            seen += 1;
            chosen = item.name.to_vec();
            seen <= skip
        })?;
        if chosen.is_empty() {
            continue;
        }
        left -= 1;
        match (kind, left % 3) {
            ("content", _) => {
                let file = volume.lookup(directory, &chosen)?.inode;
                volume.write(file, 0, b"changed")?;
                volume.forget(file, 1);
            }
            (_, 0) => volume.unlink(directory, &chosen)?,
            (_, 1) => {
                let new = [&chosen[..], b"-moved"].concat();
                volume.rename(directory, &chosen, directory, &new, RenameMode::Replace)?;
            }
            _ => {
                let new = [&chosen[..], b"-new"].concat();
                volume.forget(volume.create(directory, &new, &FILE)?.inode, 1);
            }
        }
    }
    Ok(())
}

fn open(image: &Path) -> Result<Volume> {
    let device = Arc::new(FileDevice::open(image, OpenMode::ReadWrite)?);
    Volume::open(device, VolumeOptions::default())
}

fn measure(volume: &Volume, what: &str, old: InodeId, new: InodeId) -> Result<()> {
    let begun = clock::now_monotonic();
    let found = volume.differences(old, new)?.len();
    let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
    println!("  {what:<24} {milliseconds:8.1} ms, {found} differences");
    Ok(())
}

/// Writes into so many files of a new fork.
fn change_fork(volume: &Volume, name: &str, changes: u64, seed: u64) -> Result<()> {
    let fork = volume.fork(volume.root(), volume.root(), name.as_bytes())?.inode;
    let mut directories = Vec::new();
    volume.read_directory(fork, 0, &mut |item| {
        if item.file_type == FileType::Directory {
            directories.push(item.inode);
        }
        true
    })?;
    change(volume, &directories, "content", changes, seed)?;
    volume.sync()
}

/// Applies a fork. Returns milliseconds of that, and of the commit of one change before.
fn apply(volume: &Volume, name: &str, changes: u64) -> Result<[f64; 2]> {
    let begun = clock::now_monotonic();
    volume.create(volume.root(), format!("beside-{name}").as_bytes(), &FILE)?;
    volume.commit()?;
    let commit = begun.elapsed();
    let fork = volume.lookup(volume.root(), name.as_bytes())?.inode;
    let begun = clock::now_monotonic();
    let applied = volume.apply(fork, Winner::Neither)?;
    let times = [begun.elapsed(), commit];
    let Apply::Done(applied) = applied else { panic!("{applied:?}") };
    assert!(applied.inodes.len() as u64 > changes / 2);
    Ok(times.map(|time| time.as_secs_f64() * 1e3))
}

fn measure_apply(image: &Path, changes: u64) -> Result<()> {
    for (seed, what) in [(10, "apply"), (20, "after opening")] {
        let mut rounds = Vec::new();
        let mut volume = open(image)?;
        for round in 0..ROUNDS {
            let name = format!("fork-{}", seed + round);
            change_fork(&volume, &name, changes, seed + round)?;
            if what == "after opening" {
                volume.close()?;
                drop(volume);
                volume = open(image)?;
            }
            rounds.push(apply(&volume, &name, changes)?);
        }
        volume.close()?;
        for (at, what) in [what, "  a commit before"].into_iter().enumerate() {
            let mut times: Vec<f64> = rounds.iter().map(|round| round[at]).collect();
            times.sort_by(f64::total_cmp);
            let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
            println!("  {what:<24} {median:8.1} ms, {:.1} to {last:.1} ms", times[0]);
        }
    }
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, numbers @ ..] = arguments.as_slice() else {
        return Err("usage: measure_differences IMAGE [FILES [CHANGES]]".into());
    };
    let number = |at: usize, default| numbers.get(at).map_or(Ok(default), |text| text.parse());
    let (image, files, changes) = (Path::new(image), number(0, 1_000_000)?, number(1, 100)?);
    for place in ["near", "far"] {
        let changed = changes * 10 * 2 * ROUNDS;
        let bytes = files * BYTES_PER_FILE + changed * BYTES_PER_CHANGE + (256 << 20);
        let bytes = bytes.next_multiple_of(1 << 20);
        mkfs::mkfs(&FileDevice::create(image, bytes)?, &mkfs::MkfsOptions::default())?;
        let volume = open(image)?;
        let directories = fill(&volume, files, place == "far")?;
        for kind in ["content", "names"] {
            let before = format!("before-{kind}").into_bytes();
            let after = format!("after-{kind}").into_bytes();
            volume.create_snapshot(volume.root(), &before)?;
            change(&volume, &directories, kind, changes, 2)?;
            volume.create_snapshot(volume.root(), &after)?;
        }
        volume.close()?;
        drop(volume);
        for kind in ["content", "names"] {
            println!("{files} files, {changes} changes of {kind}, {place}:");
            let volume = open(image)?;
            let snapshot =
                |name: &str| volume.snapshot_named(FIRST, format!("{name}-{kind}").as_bytes());
            let (old, new) = (snapshot("before")?.root, snapshot("after")?.root);
            measure(&volume, "nothing in memory", old, new)?;
            measure(&volume, "again", old, new)?;
            measure(&volume, "backwards", new, old)?;
            if kind == "names" {
                measure(&volume, "with the subvolume", new, volume.root())?;
            }
            volume.close()?;
        }
        println!("{files} files, {} changes of content in a fork, {place}:", changes * 10);
        measure_apply(image, changes * 10)?;
        std::fs::remove_file(image)?;
    }
    Ok(())
}
