//! A volume that is shut down: what stays, and that nothing is written any more.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    Error, FileType, FsyncKind, InodeId, NewInode, ShutdownLog, Volume, VolumeOptions, mkfs,
};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

fn new_volume() -> (Arc<MemoryDevice>, Volume) {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = Volume::open(device.clone(), VolumeOptions::default()).unwrap();
    (device, volume)
}

fn write(volume: &Volume, name: &[u8], data: &[u8]) -> InodeId {
    let inode = volume.create(volume.root(), name, &FILE).unwrap().inode;
    volume.write(inode, 0, data).unwrap();
    inode
}

fn content(volume: &Volume, name: &[u8]) -> Option<Vec<u8>> {
    let inode = volume.lookup(volume.root(), name).ok()?.inode;
    let mut content = Vec::new();
    volume.read(inode, 0, 1000, &mut content).unwrap();
    volume.forget(inode, 1);
    Some(content)
}

fn is_stopped<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Aborted(reason)) if reason.contains("shut down"))
}

#[test]
fn with_a_flush_everything_stays_and_without_what_was_fsynced() {
    for log in [ShutdownLog::Flush, ShutdownLog::Drop] {
        let (device, volume) = new_volume();
        let synced = write(&volume, b"synced", b"durable");
        volume.fsync_blocking(synced, FsyncKind::Full).unwrap();
        write(&volume, b"unsynced", b"volatile");
        volume.shut_down(log).unwrap();
        assert!(is_stopped(volume.create(volume.root(), b"late", &FILE)), "{log:?}");
        assert!(
            is_stopped(volume.fsync_blocking(synced, FsyncKind::Full)) || log == ShutdownLog::Flush,
            "{log:?}"
        );
        assert!(is_stopped(volume.sync()) && is_stopped(volume.commit()), "{log:?}");
        assert!(is_stopped(volume.shut_down(ShutdownLog::Drop)), "only the first one stops it");
        assert!(is_stopped(volume.close()), "{log:?}: it can't be marked clean");
        let volume = Volume::open(device, VolumeOptions::default()).unwrap();
        assert_eq!(content(&volume, b"synced").unwrap(), b"durable");
        let expected = (log == ShutdownLog::Flush).then(|| b"volatile".to_vec());
        assert_eq!(content(&volume, b"unsynced"), expected);
        assert_eq!(content(&volume, b"late"), None);
        volume.close().unwrap();
    }
}
