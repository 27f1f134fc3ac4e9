//! Injected errors.
//!
//! Lock discipline: no lock of its own. The faults are part of the device's state, so a predicate
//! runs under the device's lock and must not use the device.

use crate::error::Operation;
use rustix::io::Errno;
use std::ops::Range;

/// A request as a predicate sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestInfo {
    /// Read, write, flush or discard.
    pub operation: Operation,
    /// The offset; for a flush the beginning of the part that is flushed.
    pub offset_bytes: u64,
    /// The length; zero for a flush.
    pub length_bytes: u64,
}

impl RequestInfo {
    /// Whether the request touches a byte of `range_bytes`.
    pub fn touches(&self, range_bytes: &Range<u64>) -> bool {
        self.offset_bytes < range_bytes.end
            && range_bytes.start < self.offset_bytes + self.length_bytes
    }
}

type Predicate = Box<dyn FnMut(&RequestInfo) -> bool + Send>;

#[derive(Default)]
pub(super) struct InjectedFaults {
    predicates: Vec<(Predicate, Errno)>,
}

impl InjectedFaults {
    pub(super) fn add(&mut self, predicate: Predicate, error: Errno) {
        self.predicates.push((predicate, error));
    }

    pub(super) fn clear(&mut self) {
        self.predicates.clear();
    }

    /// The error of the request, if it fails.
    pub(super) fn fails(&mut self, request: &RequestInfo) -> Option<Errno> {
        self.predicates
            .iter_mut()
            .find_map(|(predicate, error)| predicate(request).then_some(*error))
    }
}
