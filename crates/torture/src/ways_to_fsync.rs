//! The ways to ask for an fsync, and what each must report: also if its thread is made to panic.
use cairn_engine::{Error, FsyncKind, InodeId, Volume};
use cairn_environment::holds_a_lock;
use cairn_environment::random::Seeded;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// With what a test has a thread panic.
pub struct Injected;

/// Does `work`; `None` if it panicked because it was made to.
pub fn attempt<T>(work: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Some(value),
        Err(panic) if panic.is::<Injected>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// How an fsync is asked for: what it acknowledges, and what it reports, must not depend on that.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// The caller waits.
    Blocking,
    /// A function is called.
    Callback,
    /// By a thread that others wait for; it may have time to flush.
    Brief {
        /// Whether it has.
        flush: bool,
    },
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 4] =
        [Way::Blocking, Way::Callback, Way::Brief { flush: true }, Way::Brief { flush: false }];

    /// One of them.
    pub fn random(random: &mut Seeded) -> Self {
        Self::ALL[random.below(Self::ALL.len() as u64) as usize]
    }

    /// What the fsync reports, and whether the thread that asked for it panicked. One that blocks
    /// does not report anything then; a completion is called all the same, and never with a lock
    /// held.
    ///
    /// # Errors
    /// A completion was not, or not like that, in words.
    pub fn fsync(
        self,
        volume: &Volume,
        inode: InodeId,
    ) -> Result<(Option<Result<(), Error>>, bool), String> {
        let (sender, told) = std::sync::mpsc::channel();
        let completion = Box::new(move |result| {
            let _ = sender.send((result, holds_a_lock()));
        });
        let asked = attempt(|| {
            match self {
                Way::Blocking => return Some(volume.fsync_blocking(inode, FsyncKind::Full)),
                Way::Callback => volume.fsync(inode, FsyncKind::Full, completion),
                Way::Brief { flush } => {
                    volume.fsync_briefly(inode, FsyncKind::Full, flush, completion);
                }
            }
            None
        });
        let panicked = asked.is_none();
        if matches!(self, Way::Blocking) {
            return Ok((asked.flatten(), panicked));
        }
        match told.recv() {
            Ok((result, false)) => Ok((Some(result), panicked)),
            Ok((_, true)) => Err("the completion of an fsync is called under a lock".into()),
            Err(_) => Err("the completion of an fsync is never called".into()),
        }
    }
}
