//! Where a request is read to.
use super::TRANSFER_BYTES_MAX;
use crate::protocol::wire::{InHeader, WriteIn};
use std::fmt;

const PAGE_BYTES: usize = 4096;
/// What stands before the data of a WRITE.
const WRITE_HEAD_BYTES: usize = size_of::<InHeader>() + size_of::<WriteIn>();
/// The longest request: a WRITE of [`TRANSFER_BYTES_MAX`], and a page more for what a later kernel may append.
const REQUEST_BYTES_MAX: usize = WRITE_HEAD_BYTES + TRANSFER_BYTES_MAX + PAGE_BYTES;

/// Memory for one request, placed such that the data of a WRITE begins at a page boundary.
pub struct RequestBuffer {
    memory: Vec<u8>,
    start: usize,
}

impl RequestBuffer {
    /// Memory for the longest request.
    pub fn new() -> Self {
        let memory = vec![0; REQUEST_BYTES_MAX + 2 * PAGE_BYTES];
        let page = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr();
        Self { memory, start: page + PAGE_BYTES - WRITE_HEAD_BYTES }
    }
    /// The whole room for a request.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + REQUEST_BYTES_MAX]
    }
    /// The first `length_bytes` of it.
    pub fn filled(&self, length_bytes: usize) -> &[u8] {
        &self.memory[self.start..self.start + length_bytes]
    }
}

impl Default for RequestBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RequestBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RequestBuffer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_a_write_begins_at_a_page() {
        let mut buffer = RequestBuffer::new();
        assert_eq!(buffer.room()[WRITE_HEAD_BYTES..].as_ptr().addr() % PAGE_BYTES, 0);
        assert!(buffer.room().len() >= WRITE_HEAD_BYTES + TRANSFER_BYTES_MAX);
        assert_eq!(buffer.filled(10).len(), 10);
    }
}
