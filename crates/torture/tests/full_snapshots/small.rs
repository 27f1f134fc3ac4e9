//! A small volume with subvolumes that is filled, and what is in use on it.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, InodeId, NewInode, Volume, VolumeOptions,
};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_torture::cleanups::wait_for_cleanups;
use cairn_torture::files::NEW_FILE;
use std::sync::Arc;
use std::time::Duration;

pub const VOLUME_BYTES: u64 = 24 << 20;

/// Looks at what is done in the background, with a pause before each; only a volume that never
/// gets there needs all.
const LOOKS_MAX: u32 = 5000;

pub const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..NEW_FILE };

pub fn open(device: &Arc<SimulatedDevice>, background: bool) -> Volume {
    let options = VolumeOptions {
        background,
        commit_interval: Duration::from_millis(20),
        dirty_data_bytes_max: 4 << 20,
        ..VolumeOptions::default()
    };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).expect("it opens")
}

/// Blocks in use, and inodes, once nothing is under way.
pub fn used(volume: &Volume, device: &SimulatedDevice) -> (u64, u64) {
    wait_for_cleanups(volume, device).unwrap_or_else(|error| panic!("{error}"));
    volume.sync().expect("it can be synced");
    volume.commit().expect("it can be committed");
    let space = volume.space();
    (space.total_blocks - space.free_blocks, space.inodes)
}

/// As much is in use as `before`, once what was removed is gone.
pub fn expect_used(volume: &Volume, device: &SimulatedDevice, before: (u64, u64), when: &str) {
    for _ in 0..LOOKS_MAX {
        if used(volume, device) == before {
            return;
        }
        clock::sleep(Duration::from_millis(1));
    }
    assert_eq!(used(volume, device), before, "{when}");
}

/// The regular files in a directory.
pub fn files_in(volume: &Volume, directory: InodeId) -> Vec<(Vec<u8>, InodeId)> {
    let mut found = Vec::new();
    let mut take = |item: cairn_engine::DirectoryItem<'_>| {
        if item.file_type == FileType::Regular {
            found.push((item.name.to_vec(), item.inode));
        }
        true
    };
    volume.read_directory(directory, 0, &mut take).expect("it is a directory");
    found
}

/// Changes or removes some of the files; a full volume may refuse any of that.
pub fn change_some(volume: &Volume, directories: &[InodeId], random: &mut Seeded) {
    let small = |result: Result<(), Error>| match result {
        Ok(()) | Err(Error::NoSpace) => {}
        Err(error) => panic!("changing a file: {error}"),
    };
    for directory in directories {
        for (name, inode) in files_in(volume, *directory) {
            let at = 4096 * random.below(40);
            small(match random.below(12) {
                0 => volume.unlink(*directory, &name),
                1 => volume.write(inode, at, &vec![9; 1 + random.below(40_000) as usize]),
                2 => {
                    let change =
                        AttributeChange { size: Some(at + 100), ..AttributeChange::default() };
                    volume.set_attributes(inode, &change).map(drop)
                }
                3 => volume.allocate(inode, at, 30_000, AllocateMode::PunchHole),
                4 => {
                    let mode = AllocateMode::Allocate { keep_size: random.chance(1, 2) };
                    volume.allocate(inode, at, 50_000, mode)
                }
                _ => Ok(()),
            });
        }
    }
}

/// Removes all files; whether that was possible.
pub fn remove_files(volume: &Volume, directories: &[InodeId]) -> Result<(), Error> {
    for directory in directories {
        for (name, _) in files_in(volume, *directory) {
            volume.unlink(*directory, &name)?;
        }
    }
    Ok(())
}
