//! Errors on demand.
//!
//! Lock discipline: none of its own; it is part of the device's state, so a predicate runs under the device's lock and
//! must not use the device.

use crate::error::Operation;
use std::ops::Range;

/// A request as a predicate sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Read, write, flush or discard.
    pub operation: Operation,
    /// Where; zero for a flush.
    pub offset_bytes: u64,
    /// How much; zero for a flush.
    pub length_bytes: u64,
}

impl Request {
    /// Whether the request touches a byte of `range_bytes`.
    pub fn touches(&self, range_bytes: &Range<u64>) -> bool {
        self.offset_bytes < range_bytes.end && range_bytes.start < self.offset_bytes + self.length_bytes
    }
}

type Predicate = Box<dyn FnMut(&Request) -> bool + Send>;

#[derive(Default)]
pub(super) struct Faults {
    predicates: Vec<Predicate>,
}

impl Faults {
    pub(super) fn add(&mut self, predicate: Predicate) {
        self.predicates.push(predicate);
    }

    pub(super) fn clear(&mut self) {
        self.predicates.clear();
    }

    pub(super) fn fails(&mut self, request: &Request) -> bool {
        self.predicates.iter_mut().any(|predicate| predicate(request))
    }
}
