//! The health of the members of a composed device, for statistics and for display.

/// A composed device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceHealth {
    /// "mirror" or "concat".
    pub kind: &'static str,
    /// The composed device's identity.
    pub pool: String,
    /// Whether a member is lost, stale or incomplete.
    pub degraded: bool,
    /// Whether it was not closed cleanly, and its copies have not been compared since.
    pub copies_may_differ: bool,
    /// Blocks of 4 KiB that were rewritten from another copy.
    pub repaired_blocks: u64,
    /// Blocks whose copies differed after an unclean shutdown.
    pub resynchronised_blocks: u64,
    /// The members, in order.
    pub members: Vec<MemberHealth>,
}

/// One member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberHealth {
    /// The name that it was opened by.
    pub name: String,
    /// "in sync", or why it is not used.
    pub state: String,
    /// Reads that failed.
    pub bad_reads: u64,
    /// Writes and flushes that failed.
    pub write_errors: u64,
    /// Blocks whose checksum showed that they did not hold what was written there.
    pub checksum_errors: u64,
    /// Blocks that differed from the good copy, also those that differed after an unclean shutdown.
    pub bad_blocks: u64,
    /// The bad blocks that were rewritten.
    pub rewritten_blocks: u64,
    /// The average time of a flush, in nanoseconds.
    pub flush_time_ns: u64,
}
