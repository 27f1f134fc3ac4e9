//! Makes the volumes that the fuzzer begins with: `cargo run -p cairn-torture --example
//! make_hostile_images DIR [NAME]...`.
//!
//! Identity and times are new each time, so the inputs of the corpus mean something else
//! afterwards.
#[path = "../../fsck/tests/golden/sparse_image.rs"]
mod sparse_image;

use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    AllocateMode, AttributeChange, FileType, FsyncKind, InodeId, NewInode, RenameMode, Volume,
    VolumeOptions, XattrMode,
};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_format::TREE_SUBVOLUMES;
use cairn_fsck::{CheckOptions, check, dump};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

type Done = Result<(), Box<dyn Error>>;
/// Makes a part of a volume's content.
type Part = fn(&Volume) -> Done;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

fn new(file_type: FileType) -> NewInode<'static> {
    NewInode { file_type, mode: 0o755, ..FILE }
}

fn start(bytes: u64, background: bool) -> Result<(Arc<SimulatedDevice>, Volume), Box<dyn Error>> {
    let device = Arc::new(SimulatedDevice::new(bytes));
    mkfs(
        &*device,
        &MkfsOptions {
            log_bytes: Some(1 << 20),
            label: "hostile".into(),
            ..MkfsOptions::default()
        },
    )?;
    let options = VolumeOptions { background, ..VolumeOptions::default() };
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, options)?;
    Ok((device, volume))
}

/// A file with `blocks` blocks that differ in a few bytes.
fn file(
    volume: &Volume,
    parent: InodeId,
    name: &str,
    blocks: u64,
) -> Result<InodeId, cairn_engine::Error> {
    let inode = volume.create(parent, name.as_bytes(), &FILE)?.inode;
    for block in 0..blocks {
        let mut bytes = [0; 4096];
        bytes[..8].copy_from_slice(&(inode.0 * 1000 + block).to_le_bytes());
        volume.write(inode, block * 4096, &bytes)?;
    }
    volume.forget(inode, 1);
    Ok(inode)
}

fn everything(volume: &Volume) -> Done {
    let root = volume.root();
    let mail = volume.create(root, b"mail", &new(FileType::Directory))?.inode;
    let inner = volume.create(mail, b"inner", &new(FileType::Directory))?.inode;
    for index in 0..70 {
        file(
            volume,
            if index % 3 == 0 { inner } else { mail },
            &format!("message-{index}"),
            index % 4,
        )?;
    }
    volume.commit()?;
    let large = file(volume, root, "large", 300)?;
    volume.set_xattr(large, b"user.small", b"0123456789", XattrMode::Any)?;
    volume.set_xattr(large, b"user.large", &[0; 10_000], XattrMode::Any)?;
    volume.forget(volume.link(large, mail, b"other name")?.inode, 1);
    volume.forget(
        volume
            .create(
                root,
                b"link",
                &NewInode { target: Some(b"mail/inner"), ..new(FileType::Symlink) },
            )?
            .inode,
        1,
    );
    volume.forget(
        volume
            .create(
                root,
                b"long link",
                &NewInode { target: Some(&[b'x'; 3900]), ..new(FileType::Symlink) },
            )?
            .inode,
        1,
    );
    for (name, file_type) in
        [("fifo", FileType::Fifo), ("device", FileType::BlockDevice), ("socket", FileType::Socket)]
    {
        let device = if file_type == FileType::BlockDevice { 0x801 } else { 0 };
        volume.forget(
            volume.create(root, name.as_bytes(), &NewInode { device, ..new(file_type) })?.inode,
            1,
        );
    }
    let sparse = file(volume, root, "sparse", 1)?;
    volume.write(sparse, 1 << 40, &[1; 100])?;
    volume.allocate(sparse, 1 << 20, 1 << 20, AllocateMode::Allocate { keep_size: true })?;
    volume.allocate(large, 40_960, 81_920, AllocateMode::PunchHole)?;
    volume.sync()?;
    volume.commit()?;
    volume.forget(mail, 1);
    volume.forget(inner, 1);
    Ok(())
}

/// Operations that stay in the log.
fn logged(volume: &Volume) -> Done {
    let root = volume.root();
    let mail = volume.lookup(root, b"mail")?.inode;
    for index in 0..6 {
        let new = file(volume, root, &format!("logged-{index}"), 2 + index)?;
        volume.fsync_blocking(new, FsyncKind::Full)?;
        volume.unlink(mail, format!("message-{}", 1 + index * 3).as_bytes())?;
    }
    let large = volume.lookup(root, b"large")?.inode;
    volume.write(large, 20_000, &[5; 30_000])?;
    volume.set_attributes(
        large,
        &AttributeChange { size: Some(400_000), ..AttributeChange::default() },
    )?;
    volume.set_xattr(large, b"user.large", &[1; 7000], XattrMode::Any)?;
    volume.fsync_blocking(large, FsyncKind::Full)?;
    volume.rename(root, b"logged-1", mail, b"message-2", RenameMode::Replace)?;
    volume.rename(root, b"logged-2", root, b"link", RenameMode::Exchange)?;
    let last = file(volume, mail, "last", 3)?;
    volume.fsync_blocking(last, FsyncKind::DataOnly)?;
    volume.forget(large, 1);
    volume.forget(mail, 1);
    Ok(())
}

/// Files in use whose names are gone, some of that only in the log.
fn orphans(volume: &Volume) -> Done {
    let root = volume.root();
    for index in 0..6 {
        let inode = volume.create(root, b"orphan", &FILE)?.inode;
        volume.write(inode, 0, &[index; 9000])?;
        volume.fsync_blocking(inode, FsyncKind::Full)?;
        volume.unlink(root, b"orphan")?;
        if index == 3 {
            volume.sync()?;
            volume.commit()?;
        }
    }
    Ok(volume.sync()?)
}

/// The chain goes round the end of the ring.
fn wrapped(volume: &Volume) -> Done {
    let root = volume.root();
    let inode = file(volume, root, "again and again", 1)?;
    loop {
        volume.write(inode, 0, b"once more")?;
        volume.fsync_blocking(inode, FsyncKind::Full)?;
        volume.commit()?;
        if volume.statistics().log.blocks_written % volume.superblock().geometry.log_blocks > 215 {
            break;
        }
    }
    for index in 0..70 {
        volume.set_xattr(inode, format!("user.{index}").as_bytes(), &[3; 3000], XattrMode::Any)?;
        volume.fsync_blocking(inode, FsyncKind::Full)?;
    }
    Ok(())
}

fn deep(volume: &Volume) -> Done {
    let root = volume.root();
    for index in 0..900 {
        let inode = file(volume, root, &format!("{index}"), 0)?;
        volume.set_xattr(inode, b"user.x", &[0; 3000], XattrMode::Any)?;
        if index % 100 == 99 {
            volume.sync()?;
            volume.commit()?;
        }
    }
    Ok(())
}

/// Twelve files and some more, and a directory, in a directory.
fn fill(volume: &Volume, root: InodeId, files: u64) -> Result<InodeId, Box<dyn Error>> {
    let directory = volume.create(root, b"directory", &new(FileType::Directory))?.inode;
    for index in 0..files {
        let parent = if index % 2 == 0 { root } else { directory };
        let inode = file(volume, parent, &format!("file-{index}"), index % 5)?;
        if index % 4 == 0 {
            volume.set_xattr(inode, b"user.x", &[index as u8; 900], XattrMode::Any)?;
        }
    }
    let allocated = file(volume, root, "allocated", 1)?;
    volume.allocate(allocated, 0, 40_000, AllocateMode::Allocate { keep_size: false })?;
    Ok(directory)
}

/// Changes a few of the files of [`fill`], so that blocks are given up.
fn change(volume: &Volume, root: InodeId, turn: u64, durable: bool) -> Done {
    for index in [2 + 2 * turn, 8 + 2 * turn] {
        let name = format!("file-{index}");
        let inode = volume.lookup(root, name.as_bytes())?.inode;
        volume.write(inode, 4096 * (turn % 3), &[turn as u8; 5000])?;
        if durable {
            volume.fsync_blocking(inode, FsyncKind::Full)?;
        }
        volume.forget(inode, 1);
    }
    let allocated = volume.lookup(root, b"allocated")?.inode;
    volume.write(allocated, 8192 + 4096 * turn, &[turn as u8 + 1; 4096])?;
    if durable {
        volume.fsync_blocking(allocated, FsyncKind::Full)?;
    }
    volume.forget(allocated, 1);
    volume.unlink(root, format!("file-{}", 18 + 2 * turn).as_bytes())?;
    let made = file(volume, root, &format!("new-{turn}"), 2)?;
    if durable {
        volume.fsync_blocking(made, FsyncKind::Full)?;
    }
    Ok(())
}

/// Subvolumes, one inside of another, with snapshots: named, held, deleted.
fn snapshots(volume: &Volume) -> Done {
    let root = volume.root();
    file(volume, root, "top", 3)?;
    let home = volume.create_subvolume(root, b"home", &new(FileType::Directory))?.inode;
    let directory = fill(volume, home, 40)?;
    let inner = volume.create_subvolume(directory, b"inner", &new(FileType::Directory))?.inode;
    file(volume, inner, "nested", 3)?;
    let (id, _) = volume.subvolume_of(home)?;
    for (turn, name) in ["one", "two", "three", "four"].into_iter().enumerate() {
        volume.create_snapshot(home, name.as_bytes())?;
        change(volume, home, turn as u64, false)?;
        volume.sync()?;
        volume.commit()?;
    }
    volume.hold_snapshot(id, b"two", true)?;
    volume.create_snapshot(inner, b"of the nested one")?;
    volume.create_snapshot(root, b"of the root")?;
    file(volume, inner, "later", 2)?;
    file(volume, root, "top-later", 2)?;
    volume.sync()?;
    volume.commit()?;
    volume.delete_snapshot(id, b"one")?;
    volume.delete_snapshot(id, b"three")?;
    [home, directory, inner].into_iter().for_each(|inode| volume.forget(inode, 1));
    Ok(())
}

/// Forks of a live subvolume, of a snapshot and of a fork; one whose origin has lost its name; a
/// subvolume that was rolled back. Each has changed, some of that only in the log.
fn forks(volume: &Volume) -> Done {
    let root = volume.root();
    let made = |name: &str| -> Result<InodeId, Box<dyn Error>> {
        let made = volume.create_subvolume(root, name.as_bytes(), &new(FileType::Directory))?;
        let directory = fill(volume, made.inode, 30)?;
        volume.forget(directory, 1);
        Ok(made.inode)
    };
    let base = made("base")?;
    let snapshot = volume.create_snapshot(base, b"first")?;
    change(volume, base, 0, false)?;
    volume.sync()?;
    let of_snapshot = volume.fork(snapshot.root, root, b"of-snapshot")?.inode;
    change(volume, of_snapshot, 1, false)?;
    let of_live = volume.fork(base, root, b"of-live")?.inode;
    change(volume, of_live, 2, false)?;
    volume.create_snapshot(of_snapshot, b"of the fork")?;
    change(volume, of_snapshot, 2, false)?;
    let of_fork = volume.fork(of_snapshot, root, b"of-fork")?.inode;
    change(volume, of_fork, 3, false)?;
    volume.sync()?;

    let gone = made("gone")?;
    let left = volume.fork(gone, root, b"left")?.inode;
    change(volume, gone, 0, false)?;
    change(volume, left, 1, false)?;
    volume.forget(gone, 1);
    volume.remove_subvolume(root, b"gone")?;

    let work = made("work")?;
    let then = volume.create_snapshot(work, b"then")?;
    change(volume, work, 0, false)?;
    let rolled_back = volume.rollback(root, b"work", then.root)?.root;
    change(volume, rolled_back, 1, false)?;
    volume.create_snapshot(rolled_back, b"since")?;
    volume.sync()?;
    volume.commit()?;

    for (turn, tree) in
        [base, of_snapshot, of_live, of_fork, left, work, rolled_back].into_iter().enumerate()
    {
        let inode = file(volume, tree, &format!("logged-{turn}"), 2)?;
        volume.fsync_blocking(inode, FsyncKind::Full)?;
    }
    change(volume, base, 4, true)?;
    change(volume, of_fork, 4, true)?;
    change(volume, left, 4, true)?;
    Ok(())
}

/// A fork of many files, which has changed all of them, and loses its name.
fn removed_fork(volume: &Volume) -> Done {
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &new(FileType::Directory))?.inode;
    for index in 0..700 {
        file(volume, base, &format!("file-{index}"), u64::from(index % 16 == 0))?;
    }
    let fork = volume.fork(base, root, b"fork")?.inode;
    for index in 0..700 {
        let inode = volume.lookup(fork, format!("file-{index}").as_bytes())?.inode;
        volume.set_xattr(inode, b"user.x", &[1; 10], XattrMode::Any)?;
        volume.forget(inode, 1);
    }
    volume.create_snapshot(base, b"since")?;
    file(volume, base, "last", 1)?;
    volume.sync()?;
    volume.commit()?;
    volume.forget(fork, 1);
    volume.remove_subvolume(root, b"fork")?;
    // The removal goes on until the volume is closed.
    Ok(())
}

/// A fork of a subvolume in which others are named.
fn fork_with_names(volume: &Volume) -> Done {
    let root = volume.root();
    let base = volume.create_subvolume(root, b"base", &new(FileType::Directory))?.inode;
    let directory = fill(volume, base, 16)?;
    for name in ["one", "two"] {
        let inner =
            volume.create_subvolume(directory, name.as_bytes(), &new(FileType::Directory))?.inode;
        file(volume, inner, "nested", 2)?;
        volume.forget(inner, 1);
    }
    volume.create_snapshot(base, b"first")?;
    volume.sync()?;
    volume.commit()?;
    volume.forget(volume.fork(base, root, b"fork")?.inode, 1);
    Ok(())
}

/// The last state that a power failure could have left, of which a dump of the tree of subvolumes
/// says all of this. It is whole.
fn last_state(device: &SimulatedDevice, says: &[&str]) -> Result<SimulatedDevice, Box<dyn Error>> {
    let mut positions = device.explorer().flush_positions();
    positions.reverse();
    let mut random = Seeded::new(1);
    for position in positions {
        let state = device.crash_state_at(position, &mut random);
        // The first states have no such tree.
        let said = dump::dump_tree(&state, TREE_SUBVOLUMES, None);
        let said = said.map(|dump| dump.to_string()).unwrap_or_default();
        let report = check(&state, &CheckOptions { data: true, repair: false }, &mut |_| {})?;
        if says.iter().all(|text| said.contains(text)) && report.errors == 0 {
            println!("{said}");
            return Ok(state);
        }
    }
    Err("no state".into())
}

fn main() -> Done {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: make_hostile_images DIR [NAME]...")?;
    let only: Vec<String> = arguments.collect();
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|wanted| wanted == name);
    let save = |name: &str, device: &SimulatedDevice| -> Done {
        let sparse = sparse_image::save(device)?;
        println!("{name}: {} bytes", sparse.len());
        Ok(std::fs::write(format!("{folder}/{name}.sparse"), sparse)?)
    };
    let makers: [(&str, u64, &[Part], bool); 6] = [
        ("everything", 16, &[everything], true),
        ("logged", 16, &[everything, logged], false),
        ("orphans", 16, &[orphans], false),
        ("wrapped", 16, &[wrapped], false),
        ("deep", 24, &[deep], true),
        ("forks", 16, &[forks], false),
    ];
    for (name, mib, parts, close) in makers.into_iter().filter(|maker| is_wanted(maker.0)) {
        let (device, volume) = start(mib << 20, false)?;
        parts.iter().try_for_each(|part| part(&volume))?;
        if close {
            volume.close()?;
        }
        save(name, &device)?;
    }
    let unfinished: [(&str, Part, &[&str]); 3] = [
        ("snapshots", snapshots, &["births above"]),
        ("removal", removed_fork, &["given up below"]),
        ("naming", fork_with_names, &["names others"]),
    ];
    for (name, part, says) in unfinished.into_iter().filter(|maker| is_wanted(maker.0)) {
        // What is closed at the right moment is not finished.
        let made = (0..200).find_map(|turn| {
            let made = start(16 << 20, true).and_then(|(device, volume)| {
                device.start_recording();
                part(&volume)?;
                clock::sleep(Duration::from_micros(100 * turn));
                volume.close()?;
                last_state(&device, says)
            });
            made.ok()
        });
        save(name, &made.ok_or_else(|| format!("no state says {says:?}"))?)?;
    }
    Ok(())
}
