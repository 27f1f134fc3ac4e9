//! The one error of this crate.
use cairn_format::BlockRange;

/// Why space was not given, or not taken back.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpaceError {
    /// The volume has no room for the request, and reclaim, if the request could wait for it, found
    /// none.
    #[error("no space: {data_blocks} data blocks and {nodes} nodes were asked for")]
    NoSpace {
        /// Data blocks that were asked for.
        data_blocks: u64,
        /// Nodes that were asked for.
        nodes: u64,
    },
    /// The ticket waited when the volume stopped.
    #[error("the volume stopped while a request waited for space")]
    Stopped,
    /// The caller that made the request is gone.
    #[error("the request for space was called off: its caller is gone")]
    CalledOff,
    /// An allocation from a reservation that holds nothing of that kind: its worst case was
    /// estimated too low.
    #[error("the reservation holds no more {kind}")]
    ReservationExhausted {
        /// "data blocks" or "nodes".
        kind: &'static str,
    },
    /// The blocks are not in the state that the call needs: the bitmaps contradict the trees or the
    /// log.
    #[error("blocks {}..{} are not all {expected}", .range.start, .range.end())]
    Conflict {
        /// The blocks in question.
        range: BlockRange,
        /// The state that they should have.
        expected: &'static str,
    },
}
