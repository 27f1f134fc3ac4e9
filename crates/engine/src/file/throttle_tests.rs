//! Places are handed over, one for each, and dirty data stays within its limit with many writers.
use super::{DirtyThrottle, PLACES};
use crate::{FileType, NewInode, Volume, VolumeOptions, mkfs};
use cairn_blockdev::{MemoryDevice, Operation, SimulatedDevice};
use cairn_environment::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn no_more_work_at_once_than_there_are_places() {
    let throttle = Arc::new(DirtyThrottle::new());
    let (at_work, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let threads: Vec<_> = (0..4 * PLACES)
        .map(|_| {
            let (throttle, at_work, most) =
                (Arc::clone(&throttle), Arc::clone(&at_work), Arc::clone(&most));
            thread::spawn("writer", move || {
                for _ in 0..200 {
                    let place = throttle.enter();
                    most.fetch_max(at_work.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::yield_now();
                    at_work.fetch_sub(1, Ordering::SeqCst);
                    drop(place);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert!(most.load(Ordering::SeqCst) <= PLACES);
    let places = throttle.places.lock();
    assert_eq!((places.free, places.waiting, places.handed), (PLACES, 0, 0));
}

#[test]
fn a_writer_that_waits_gets_the_next_place() {
    let throttle = Arc::new(DirtyThrottle::new());
    let mut held: Vec<_> = (0..PLACES).map(|_| throttle.enter()).collect();
    let waiting = Arc::clone(&throttle);
    let waiter = thread::spawn("waiter", move || drop(waiting.enter()));
    while throttle.places.lock().waiting == 0 {
        thread::yield_now();
    }
    held.pop();
    waiter.join().expect("no panic");
    drop(held);
    assert_eq!(throttle.places.lock().free, PLACES);
}

#[test]
fn many_writers_keep_to_the_limit() {
    const LIMIT_BYTES: u64 = 1 << 20;
    const WRITERS: u64 = 32;
    const WRITE_BYTES: u64 = 64 << 10;
    let device = Arc::new(MemoryDevice::new(128 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).expect("large enough");
    let options = VolumeOptions {
        background: false,
        dirty_data_bytes_max: LIMIT_BYTES,
        ..VolumeOptions::default()
    };
    let volume = Volume::open(device, options).expect("it opens");
    let threads: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let volume = volume.clone();
            thread::spawn("writer", move || {
                let new = NewInode {
                    file_type: FileType::Regular,
                    mode: 0o644,
                    uid: 0,
                    gid: 0,
                    device: 0,
                    target: None,
                };
                let file = volume
                    .create(volume.root(), format!("{writer}").as_bytes(), &new)
                    .expect("room")
                    .inode;
                let mut most = 0;
                for step in 0..24 {
                    volume
                        .write(file, step * WRITE_BYTES, &[writer as u8 + 1; WRITE_BYTES as usize])
                        .expect("room");
                    most = most.max(volume.statistics().dirty_data_bytes);
                }
                volume.forget(file, 1);
                most
            })
        })
        .collect();
    let most =
        threads.into_iter().map(|thread| thread.join().expect("no panic")).max().unwrap_or(0);
    // Each may be between looking and writing once.
    assert!(most <= LIMIT_BYTES + WRITERS * WRITE_BYTES, "{most} bytes were dirty");
    assert!(most > LIMIT_BYTES, "the limit was never reached");
    volume.close().expect("it closes");
}

/// The device takes the log and no data, as an image file without room on its host; the files are
/// new ones each time.
#[test]
fn writers_are_told_when_nothing_can_be_written() {
    const LIMIT_BYTES: u64 = 1 << 20;
    const WRITE_BYTES: u64 = 64 << 10;
    let device = Arc::new(SimulatedDevice::new(128 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).expect("large enough");
    let options = VolumeOptions {
        background: false,
        dirty_data_bytes_max: LIMIT_BYTES,
        ..VolumeOptions::default()
    };
    let volume = Volume::open(device.clone(), options).expect("it opens");
    let data = volume.superblock().geometry.allocatable();
    let bytes = data.start.offset_bytes()..data.end().offset_bytes();
    device.fail_for_lack_of_space_when(move |request| {
        request.operation == Operation::Write && request.touches(&bytes)
    });
    let new = NewInode {
        file_type: FileType::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };
    let write = |number: u64| {
        let file = volume.create(volume.root(), format!("{number}").as_bytes(), &new)?.inode;
        volume.write(file, 0, &[7; WRITE_BYTES as usize])
    };
    let refused = (0..5 * LIMIT_BYTES / WRITE_BYTES).find(|&number| write(number).is_err());
    let dirty = volume.statistics().dirty_data_bytes;
    assert!(
        refused.is_some() && dirty <= 2 * LIMIT_BYTES + WRITE_BYTES,
        "{dirty} bytes are dirty, refused: {refused:?}"
    );
    device.clear_failures();
    write(1000).expect("the device has room again");
    volume.close().expect("everything can be written");
}
