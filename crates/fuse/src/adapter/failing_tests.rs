//! A device that can't write some blocks: every caller that syncs them gets the error, on every
//! path of the request.
use super::volume_tests::MountedImage;
use crate::session_tests::can_mount;
use crate::tiny_file_system::options_of_tests;
use cairn_blockdev::{BlockDevice, DeviceError, FileDevice, Operation, forward_to_device};
use cairn_environment::atomic::{AtomicBool, Ordering};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const BLOCK: usize = 4096;
/// A content that no other write has.
const BAD: u8 = 0xb5;

/// Refuses blocks full of [`BAD`] while its flag is set.
struct RefusingDevice {
    device: FileDevice,
    refuses: Arc<AtomicBool>,
}

impl BlockDevice for RefusingDevice {
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        let is_bad = |block: &[u8]| block.iter().all(|byte| *byte == BAD);
        if self.refuses.load(Ordering::SeqCst)
            && buffers.iter().flat_map(|buffer| buffer.chunks(BLOCK)).any(is_bad)
        {
            let name = Arc::from("refusing device");
            return Err(DeviceError::new(
                Operation::Write,
                offset_bytes,
                1,
                &name,
                std::io::ErrorKind::Other.into(),
            ));
        }
        self.device.write(offset_bytes, buffers)
    }
    forward_to_device!(self => self.device; read, flush, discard, length_bytes, flush_time);
}

#[test]
fn an_fsync_whose_data_cannot_be_written_says_so() {
    if !can_mount() {
        return;
    }
    let refuses = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&refuses);
    let wrap =
        |device| Arc::new(RefusingDevice { device, refuses: switch }) as Arc<dyn BlockDevice>;
    let mounted = MountedImage::new(&options_of_tests()).remount_through(wrap, &options_of_tests());
    type Sync = fn(&File) -> std::io::Result<()>;
    let syncs: [Sync; 2] = [File::sync_all, File::sync_data];
    let error = |result: std::io::Result<()>| result.err().and_then(|error| error.raw_os_error());
    for (number, sync) in syncs.into_iter().enumerate() {
        // Sizes for the queue's thread, for a worker, and for a write without a group.
        for blocks in [1, 16, 200] {
            let name = format!("{number} {blocks}");
            let bad = File::create_new(mounted.path(&name)).unwrap();
            let good = File::create_new(mounted.path("good")).unwrap();
            bad.sync_all().unwrap();
            refuses.store(true, Ordering::SeqCst);
            bad.write_all_at(&vec![BAD; blocks * BLOCK], 0).unwrap();
            good.write_all_at(&[1; BLOCK], 0).unwrap();
            assert_eq!(error(sync(&bad)), Some(Errno::IO.raw_os_error()), "{name}");
            sync(&good).unwrap();
            assert_eq!(error(sync(&bad)), Some(Errno::IO.raw_os_error()), "{name}, once more");
            refuses.store(false, Ordering::SeqCst);
            sync(&bad).unwrap();
            drop(good);
            fs::remove_file(mounted.path("good")).unwrap();
        }
    }
    let mounted = mounted.remount(&options_of_tests());
    for (number, blocks) in [(0, 1), (0, 16), (0, 200), (1, 1), (1, 16), (1, 200)] {
        assert!(
            fs::read(mounted.path(&format!("{number} {blocks}"))).unwrap()
                == vec![BAD; blocks * BLOCK]
        );
    }
    mounted.unmount();
}
