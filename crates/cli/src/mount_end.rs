//! How SIGTERM and SIGINT end a mount.
//!
//! States: *served* → (signal) *wanted* → *ended*, by unmounting or by stopping the volume.
//! - *wanted*: the mount is unmounted as soon as nothing uses it, and served until then. What the
//!   kernel and the volume have in memory is written early, so that the end does not take long.
//! - After [`STOP_AFTER`], or with another signal, everything is made durable, the volume stops,
//!   and the process ends. The mount stays in place and answers with errors: a busy mount that
//!   vanished would let its users go on, without an error, in the directory underneath.
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::{clock, thread};
use cairn_fuse::MountEnder;
use cairn_harness::EXIT_INTERRUPTED;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// How long a mount in use is served after a signal: containers are given 10 s to end, and the last
/// flush takes a while.
pub const STOP_AFTER: Duration = Duration::from_secs(7);
/// Between two attempts to unmount.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Waits for signals as long as the process lives.
pub struct EndOnSignal {
    signals: Signals,
    ender: MountEnder,
    directory: PathBuf,
    /// Set by SIGINT: the process that waits for a command must learn that Ctrl-C ended it.
    interrupted: Arc<AtomicBool>,
}

/// Whether SIGINT has ended the mount.
pub struct Interrupted(Arc<AtomicBool>);

impl Interrupted {
    /// What the server exits with after an orderly end.
    pub fn exit_code(&self) -> ExitCode {
        if self.0.load(Ordering::Acquire) {
            ExitCode::from(EXIT_INTERRUPTED)
        } else {
            ExitCode::SUCCESS
        }
    }
}

impl EndOnSignal {
    /// Ends the mount at `directory` when one of `signals` comes.
    pub fn start(signals: Signals, ender: MountEnder, directory: PathBuf) -> Interrupted {
        let interrupted = Arc::new(AtomicBool::new(false));
        let mut this = Self { signals, ender, directory, interrupted: Arc::clone(&interrupted) };
        let _ = thread::spawn("signals", move || this.run());
        Interrupted(interrupted)
    }

    fn run(&mut self) {
        let first: Vec<i32> = self.signals.wait().collect();
        self.note(&first);
        tracing::info!("unmounting");
        if let Err(error) = self.ender.unmount() {
            let seconds = STOP_AFTER.as_secs();
            tracing::warn!(
                "{error}; the server serves the mount until it is no longer in use. After {seconds} s, or at another signal, it makes \
                 everything durable and stops the volume"
            );
            self.write_early();
        }
        self.unmount_until_deadline(first.len());
        self.stop()
    }

    fn note(&self, signals: &[i32]) {
        self.interrupted.fetch_or(signals.contains(&SIGINT), Ordering::AcqRel);
    }

    /// In a thread of its own: the server must take another signal meanwhile.
    fn write_early(&self) {
        let ender = self.ender.clone();
        let _ = thread::spawn("cairn-sync", move || {
            if let Err(error) = ender.sync() {
                tracing::error!("{error}");
            }
        });
    }

    /// `signals` is the number that came so far; a second one ends the wait. The process ends by
    /// itself when the mount is gone; a copy of the mount (bound elsewhere, or in another
    /// namespace) keeps it alive, and something that covers the mount may go away.
    fn unmount_until_deadline(&mut self, mut signals: usize) {
        let begin = clock::now_monotonic();
        while signals < 2 && begin.elapsed() < STOP_AFTER {
            clock::sleep(RETRY_INTERVAL);
            // Its error has been reported.
            let _ = self.ender.unmount();
            let more: Vec<i32> = self.signals.pending().collect();
            self.note(&more);
            signals += more.len();
        }
    }

    fn stop(&self) -> ! {
        let stopped = self.ender.stop();
        let directory = self.directory.display();
        match &stopped {
            Ok(()) => tracing::warn!(
                "everything is durable and the volume is stopped; programs that still use {directory}, or a copy of its mount, get errors \
                 until `cairn umount` removes it"
            ),
            Err(error) => {
                tracing::error!("the volume is stopped, but not everything is durable: {error}")
            }
        }
        let orderly = if self.interrupted.load(Ordering::Acquire) { EXIT_INTERRUPTED } else { 0 };
        std::process::exit(if stopped.is_ok() { orderly.into() } else { 1 });
    }
}
