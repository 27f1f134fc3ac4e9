//! Makes the volumes that the fuzzer begins with: `cargo run -p cairn-torture --example
//! make_hostile_images DIR`.
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
use std::error::Error;
use std::sync::Arc;

type Done = Result<(), Box<dyn Error>>;
/// Makes a part of a volume's content.
type Part = fn(&Volume) -> Done;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

fn new(file_type: FileType) -> NewInode<'static> {
    NewInode { file_type, mode: 0o755, ..FILE }
}

fn start(bytes: u64) -> Result<(Arc<SimulatedDevice>, Volume), Box<dyn Error>> {
    let device = Arc::new(SimulatedDevice::new(bytes));
    mkfs(
        &*device,
        &MkfsOptions {
            log_bytes: Some(1 << 20),
            label: "hostile".into(),
            ..MkfsOptions::default()
        },
    )?;
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
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

fn main() -> Done {
    let folder = std::env::args().nth(1).ok_or("usage: make_hostile_images DIR")?;
    let save = |name: &str, device: &SimulatedDevice| -> Done {
        let sparse = sparse_image::save(device)?;
        println!("{name}: {} bytes", sparse.len());
        Ok(std::fs::write(format!("{folder}/{name}.sparse"), sparse)?)
    };
    let makers: [(&str, u64, &[Part], bool); 5] = [
        ("everything", 16, &[everything], true),
        ("logged", 16, &[everything, logged], false),
        ("orphans", 16, &[orphans], false),
        ("wrapped", 16, &[wrapped], false),
        ("deep", 24, &[deep], true),
    ];
    for (name, mib, parts, close) in makers {
        let (device, volume) = start(mib << 20)?;
        parts.iter().try_for_each(|part| part(&volume))?;
        if close {
            volume.close()?;
        }
        save(name, &device)?;
    }
    Ok(())
}
