//! What a read that waits for nobody must not take for the file's, in states that last only for a
//! moment.
use crate::file::planned_read::ReadAtOnce;
use crate::mkfs::{MkfsOptions, mkfs};
use crate::{FileType, NewInode, Volume, VolumeOptions};
use cairn_blockdev::{AlignedBuffer, FileDevice};
use cairn_format::{BLOCK_SIZE, FileBlock};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };

/// A truncation frees a large file's blocks in several steps, and others may write behind the new
/// end meanwhile: what is not freed yet is the hole between.
#[test]
fn what_a_truncation_has_yet_to_free_is_not_read() {
    // /tmp may have no direct I/O, and then nothing is planned.
    let directory =
        tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    let device = Arc::new(FileDevice::create(&directory.path().join("image"), 64 << 20).unwrap());
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    if !device.is_direct() {
        return eprintln!("left out: there is no direct I/O here");
    }
    let options =
        VolumeOptions { background: false, data_cache_bytes: 0, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
    volume.write(file, 0, &[7; 8 * BLOCK_SIZE]).unwrap();
    volume.sync().unwrap();
    let (store, files) = (volume.store(), volume.files());
    let mut buffer = AlignedBuffer::zeroed(8 * BLOCK_SIZE);
    let plans = |offset: usize, blocks: usize, buffer: &mut [u8]| {
        let read = volume.read_at_once(
            file,
            (offset * BLOCK_SIZE) as u64,
            &mut buffer[..blocks * BLOCK_SIZE],
        );
        matches!(read, Some(ReadAtOnce::Planned(_)))
    };
    let Some(ReadAtOnce::Planned(planned)) = volume.read_at_once(file, 0, &mut buffer) else {
        panic!("the file is simple")
    };
    store.device.read(planned.device_offset_bytes(), &mut buffer).unwrap();
    let inode = files.inodes.get(file);
    for gone in 0..8 {
        files.write_inode(&inode).unwrap().truncated_from = Some(FileBlock(gone as u64));
        assert_eq!(volume.finish_read(&planned, &buffer), None);
        for offset in 0..8 {
            for blocks in 1..=8 - offset {
                assert_eq!(
                    plans(offset, blocks, &mut buffer.clone()),
                    offset + blocks <= gone,
                    "{blocks} from {offset}, {gone} are left"
                );
            }
        }
    }
    files.write_inode(&inode).unwrap().truncated_from = None;
    assert_eq!(volume.finish_read(&planned, &buffer), Some(8 * BLOCK_SIZE));
    drop(inode);
    volume.close().unwrap();
}
