//! Commits every second, for a mount whose server gets no request for sync(2) and umount(2). A
//! failed write may succeed later, so it continues after a failure until the volume has stopped.
//!
//! Locks: `stopped` is held to check and wait, never while the volume commits.
use super::VolumeHandler;
use cairn_engine::Error;
use cairn_environment::Rank;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::thread::{self, JoinHandle};
use std::sync::Arc;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_secs(1);

struct StopSignal {
    stopped: Mutex<bool>,
    change: Condvar,
}

/// A thread that commits a volume every second if there were changes. Dropping it ends the thread.
pub struct PeriodicCommit {
    stop: Arc<StopSignal>,
    thread: Option<JoinHandle<()>>,
}

impl PeriodicCommit {
    /// Starts the thread.
    pub fn start(handler: Arc<VolumeHandler>) -> Self {
        Self::start_every(handler, INTERVAL)
    }

    fn start_every(handler: Arc<VolumeHandler>, interval: Duration) -> Self {
        let stop =
            Arc::new(StopSignal { stopped: Mutex::new(Rank::LEAF, false), change: Condvar::new() });
        let seen = Arc::clone(&stop);
        let thread = thread::spawn("cairn-periodic", move || {
            let mut failed_before = false;
            while !seen.wait(interval) {
                let Err(error) = handler.sync_if_changed() else {
                    failed_before = false;
                    continue;
                };
                if !std::mem::replace(&mut failed_before, true) {
                    tracing::error!("the periodic commit failed: {error}");
                }
                if matches!(error, Error::Aborted(_) | Error::Closed) {
                    return;
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl StopSignal {
    /// Waits for the next commit. Returns whether to stop.
    fn wait(&self, interval: Duration) -> bool {
        let mut stopped = self.stopped.lock();
        if !*stopped {
            self.change.wait_for(&mut stopped, interval);
        }
        *stopped
    }
}

impl Drop for PeriodicCommit {
    fn drop(&mut self) {
        *self.stop.stopped.lock() = true;
        self.stop.change.notify_all();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for PeriodicCommit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PeriodicCommit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::{Operation, SimulatedDevice};
    use cairn_engine::{FileType, NewInode, Volume, VolumeOptions, mkfs};
    use cairn_environment::clock;
    use std::sync::atomic::Ordering;

    const FILE: NewInode<'static> = NewInode {
        file_type: FileType::Regular,
        mode: 0o644,
        uid: 0,
        gid: 0,
        device: 0,
        target: None,
    };

    /// The content of the file after a power failure now.
    fn durable(device: &SimulatedDevice) -> Vec<u8> {
        let state = Arc::new(device.crash_state_with(|unflushed| {
            vec![cairn_blockdev::simulated::Fate::Lost; unflushed.len()]
        }));
        let volume =
            Volume::open(state, VolumeOptions { read_only: true, ..VolumeOptions::default() })
                .unwrap();
        let Ok(found) = volume.lookup(volume.root(), b"file") else { return Vec::new() };
        let mut content = Vec::new();
        volume.read(found.inode, 0, 100, &mut content).unwrap();
        content
    }

    #[test]
    fn a_failure_that_passes_does_not_end_the_commits() {
        let device = Arc::new(SimulatedDevice::new(32 << 20));
        mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
        let volume = Volume::open(
            device.clone(),
            VolumeOptions { background: false, ..VolumeOptions::default() },
        )
        .unwrap();
        let handler = Arc::new(VolumeHandler::new(volume.clone(), false));
        let file = volume.create(volume.root(), b"file", &FILE).unwrap().inode;
        volume.write(file, 0, b"content").unwrap();
        let data = volume.superblock().geometry.allocatable();
        let bytes = data.start.offset_bytes()..data.end().offset_bytes();
        let mut left = 2;
        device.fail_when(move |request| {
            let fails =
                left > 0 && request.operation == Operation::Write && request.touches(&bytes);
            left -= u32::from(fails);
            fails
        });
        handler.changed.store(true, Ordering::Release);
        let _periodic = PeriodicCommit::start_every(handler, Duration::from_millis(1));
        for _ in 0..5000 {
            if durable(&device) == b"content" {
                return;
            }
            clock::sleep(Duration::from_millis(1));
        }
        panic!("it is never committed");
    }
}
