//! What shows that a predecessor is in use.
use crate::log::Log;

impl Log {
    /// Items in the list that were inserted in two passes.
    pub fn two_pass_items(&self) -> usize {
        self.core.list.lock().current().boxed.vectors.len()
    }
}
