//! Turns of the threads that remove subvolumes: one works on a subvolume at a time.
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_format::TreeId;
use std::collections::BTreeMap;

/// The subvolumes that a thread works on, each with whether another one wanted to meanwhile: then
/// there may be more to do.
pub(super) struct Turns(Mutex<BTreeMap<u64, bool>>);

impl Turns {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Rank::LEAF, BTreeMap::new()))
    }

    /// Whether it is the caller's turn; otherwise the thread at work looks once more.
    pub(super) fn take(&self, id: TreeId) -> bool {
        let mut at_work = self.0.lock();
        let is_taken = at_work.insert(id.0, true).is_some();
        if !is_taken {
            at_work.insert(id.0, false);
        }
        !is_taken
    }

    /// Ends the caller's turn, unless another thread wanted one.
    pub(super) fn end(&self, id: TreeId) -> bool {
        let mut at_work = self.0.lock();
        match at_work.get_mut(&id.0) {
            Some(is_wanted) if *is_wanted => {
                *is_wanted = false;
                false
            }
            _ => {
                at_work.remove(&id.0);
                true
            }
        }
    }

    /// Ends the caller's turn, which an error or the end of the volume has cut short.
    pub(super) fn give_up(&self, id: TreeId) {
        self.0.lock().remove(&id.0);
    }
}
