//! A full volume, for tests: somebody holds what there is.
use cairn_space::{Request, Reservation, Space, Urgency};
use std::sync::Arc;

/// Holds all nodes that a request of `urgency` may have.
pub(crate) fn hold_all(space: &Arc<Space>, urgency: Urgency) -> Vec<Reservation> {
    let mut held = Vec::new();
    let mut nodes = 1 << 20;
    while nodes > 0 {
        match space.try_reserve(Request { data_blocks: 0, nodes }, urgency) {
            Ok(reservation) => held.push(reservation),
            Err(_) => nodes /= 2,
        }
    }
    held
}
