//! What came before tickets, under the whole engine: a full volume, filled and emptied by many
//! threads.
#![cfg(feature = "baselines")]
use cairn_blockdev::MemoryDevice;
use cairn_engine::{Baselines, Error, FileType, FsyncKind, NewInode, Volume, VolumeOptions, mkfs};
use cairn_environment::thread;
use std::sync::Arc;
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

fn open(device: &Arc<MemoryDevice>) -> Volume {
    let options = VolumeOptions {
        commit_interval: Duration::from_millis(50),
        dirty_data_bytes_max: 4 << 20,
        baselines: Baselines { shared_flusher: true, ..Baselines::default() },
        ..VolumeOptions::default()
    };
    Volume::open(device.clone(), options).unwrap()
}

/// Writes files until there is no space; how many were written whole.
fn fill(volume: &Volume, client: u64, data: &[u8]) -> u64 {
    for number in 0.. {
        let name = format!("{client}-{number}");
        let created = volume.create(volume.root(), name.as_bytes(), &FILE);
        let written = created.and_then(|file| {
            let written = volume
                .write(file.inode, 0, data)
                .and_then(|()| volume.fsync_blocking(file.inode, FsyncKind::Full));
            volume.forget(file.inode, 1);
            written
        });
        match written {
            Ok(()) => {}
            Err(Error::NoSpace) => return number,
            Err(error) => panic!("filling: {error}"),
        }
    }
    0
}

#[test]
fn threads_that_fill_and_delete_at_once_are_never_stuck() {
    let device = Arc::new(MemoryDevice::new(48 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(&device);
    let clients: Vec<_> = (0..8)
        .map(|client| {
            let volume = volume.clone();
            thread::spawn("client", move || {
                for _ in 0..3 {
                    let files = fill(&volume, client, &vec![client as u8; 50_000]);
                    for number in 0..=files {
                        match volume.unlink(volume.root(), format!("{client}-{number}").as_bytes())
                        {
                            Ok(()) | Err(Error::NotFound) => {}
                            Err(error) => panic!("deleting on a full volume: {error}"),
                        }
                    }
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    let statistics = volume.statistics();
    assert!(statistics.tickets_waited > 0 && statistics.failure.is_none(), "{statistics:?}");
    volume.close().unwrap();
    open(&device).close().unwrap();
}
