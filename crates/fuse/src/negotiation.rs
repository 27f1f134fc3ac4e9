//! INIT: the agreement of kernel and server.
use crate::error::MountError;
use crate::protocol::wire::{InitIn, InitOut, init_flag};
use crate::protocol::{MAJOR_VERSION, MINOR_VERSION, MINOR_VERSION_MIN};
use crate::transport::TRANSFER_BYTES_MAX;

/// The most requests that the kernel has outstanding without a waiting caller (read-ahead,
/// writeback, asynchronous I/O).
const BACKGROUND_REQUESTS_MAX: u16 = 128;
/// From this number on the kernel treats the device as congested.
const CONGESTION_THRESHOLD: u16 = 96;
/// The longest read-ahead that the server accepts; the kernel takes the smaller of this and its
/// own.
const READAHEAD_BYTES_MAX: u32 = TRANSFER_BYTES_MAX as u32;
const PAGE_BYTES: usize = 4096;

/// The capabilities that the server requests. Omitted on purpose: AUTO_INVAL_DATA (with the
/// writeback cache every cached read would ask for attributes), ATOMIC_O_TRUNC (there are no opens
/// to carry it), POSIX_LOCKS and FLOCK_LOCKS (one kernel uses the volume, so its own locks
/// suffice), the SPLICE flags, POSIX_ACL. OVER_IO_URING is a promise, made only after the rings
/// exist.
///
/// ASYNC_DIO is omitted, too. With it the kernel completes a direct write of libaio or io_uring
/// after it has released the inode's lock, and keeps the pages that a reader cached meanwhile.
/// Those stay stale for ever, a store into one puts old data over durable data, and a truncation
/// can overtake the write. The server could invalidate the pages before it replies, but it cannot
/// see for which WRITEs: a buffered write through a descriptor with O_DIRECT looks the same and
/// keeps its page locked until the reply, so invalidating that page would never end. And with the
/// writeback cache the kernel ignores the server's size. Without the flag a direct write completes
/// under the inode's lock, with the pages dropped.
const WANTED: u64 = init_flag::ASYNC_READ
    | init_flag::EXPORT_SUPPORT
    | init_flag::BIG_WRITES
    | init_flag::DO_READDIRPLUS
    | init_flag::READDIRPLUS_AUTO
    | init_flag::NO_OPEN_SUPPORT
    | init_flag::PARALLEL_DIROPS
    | init_flag::ABORT_ERROR
    | init_flag::MAX_PAGES
    | init_flag::CACHE_SYMLINKS
    | init_flag::NO_OPENDIR_SUPPORT
    | init_flag::EXPLICIT_INVAL_DATA
    | init_flag::HANDLE_KILLPRIV_V2
    | init_flag::INIT_EXT;

/// The result of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Minor version of the protocol in use.
    pub minor: u32,
    /// Capabilities in use.
    pub flags: u64,
    /// The answer to the kernel.
    pub answer: InitOut,
}

/// Optional abilities of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionalFeatures {
    /// Let the kernel cache written data.
    pub writeback: bool,
    /// Serve requests over rings.
    pub ring: bool,
    /// What the handler asks for.
    pub capabilities: u64,
}

impl OptionalFeatures {
    fn flags(self) -> u64 {
        let flag = |wanted: bool, flag: u64| if wanted { flag } else { 0 };
        flag(self.writeback, init_flag::WRITEBACK_CACHE)
            | flag(self.ring, init_flag::OVER_IO_URING)
            | self.capabilities
    }
}

impl Agreement {
    /// Whether requests will come over rings.
    pub fn over_ring(&self) -> bool {
        self.flags & init_flag::OVER_IO_URING != 0
    }
}

/// Answers `offer`. `None` if the kernel's major version is newer: it will ask again with this one.
///
/// # Errors
/// If the kernel is too old.
pub fn negotiate(
    offer: &InitIn,
    extras: OptionalFeatures,
) -> Result<Option<Agreement>, MountError> {
    if offer.major > MAJOR_VERSION {
        return Ok(None);
    }
    if offer.major < MAJOR_VERSION || offer.minor < MINOR_VERSION_MIN {
        return Err(MountError::ProtocolTooOld {
            major: offer.major,
            minor: offer.minor,
            minor_min: MINOR_VERSION_MIN,
        });
    }
    let high = if u64::from(offer.flags) & init_flag::INIT_EXT != 0 {
        u64::from(offer.flags2) << 32
    } else {
        0
    };
    let offered = u64::from(offer.flags) | high;
    let flags = offered & (WANTED | extras.flags());
    let minor = offer.minor.min(MINOR_VERSION);
    let answer = InitOut {
        major: MAJOR_VERSION,
        minor,
        max_readahead: offer.max_readahead.max(READAHEAD_BYTES_MAX),
        flags: flags as u32,
        max_background: BACKGROUND_REQUESTS_MAX,
        congestion_threshold: CONGESTION_THRESHOLD,
        max_write: TRANSFER_BYTES_MAX as u32,
        time_granularity_ns: 1,
        max_pages: (TRANSFER_BYTES_MAX / PAGE_BYTES) as u16,
        flags2: (flags >> 32) as u32,
        ..InitOut::default()
    };
    Ok(Some(Agreement { minor, flags, answer }))
}

/// The answer to a kernel with a newer major version.
pub fn own_version() -> InitOut {
    InitOut { major: MAJOR_VERSION, minor: MINOR_VERSION, ..InitOut::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(major: u32, minor: u32) -> InitIn {
        InitIn {
            major,
            minor,
            max_readahead: 131_072,
            flags: u32::MAX,
            flags2: u32::MAX,
            unused: [0; 11],
        }
    }

    const CACHED: OptionalFeatures =
        OptionalFeatures { writeback: true, ring: false, capabilities: 0 };

    #[test]
    fn only_what_is_wanted_and_offered_is_taken() {
        let both = OptionalFeatures { writeback: true, ring: true, capabilities: 0 };
        let agreed = negotiate(&offer(7, 45), both).unwrap().unwrap();
        assert_eq!(agreed.flags, WANTED | init_flag::WRITEBACK_CACHE | init_flag::OVER_IO_URING);
        assert!(agreed.over_ring() && agreed.answer.flags2 == 1 << 9);
        let agreed = negotiate(&offer(7, 45), CACHED).unwrap().unwrap();
        assert_eq!(agreed.flags, WANTED | init_flag::WRITEBACK_CACHE);
        assert_eq!(agreed.flags & (init_flag::AUTO_INVAL_DATA | init_flag::ASYNC_DIO), 0);
        assert_eq!(
            (agreed.answer.minor, agreed.answer.flags2, agreed.answer.max_pages),
            (MINOR_VERSION, 0, 256)
        );
        let through = negotiate(
            &offer(7, 45),
            OptionalFeatures { writeback: false, ring: false, capabilities: 0 },
        )
        .unwrap()
        .unwrap();
        assert_eq!(through.flags & init_flag::WRITEBACK_CACHE, 0);
        let poor = InitIn { flags: init_flag::ASYNC_READ as u32, ..offer(7, 31) };
        let agreed = negotiate(&poor, CACHED).unwrap().unwrap();
        assert_eq!((agreed.flags, agreed.minor), (init_flag::ASYNC_READ, 31));
    }

    #[test]
    fn a_handler_gets_what_it_asks_for_and_the_kernel_offers() {
        let asks = OptionalFeatures { capabilities: init_flag::ASYNC_DIO, ..CACHED };
        let agreed = negotiate(&offer(7, 45), asks).unwrap().unwrap();
        assert_eq!(agreed.flags, WANTED | init_flag::WRITEBACK_CACHE | init_flag::ASYNC_DIO);
        let poor = InitIn { flags: init_flag::ASYNC_READ as u32, ..offer(7, 31) };
        assert_eq!(negotiate(&poor, asks).unwrap().unwrap().flags, init_flag::ASYNC_READ);
    }

    #[test]
    fn other_versions_are_recognised() {
        assert_eq!(negotiate(&offer(8, 0), CACHED), Ok(None));
        assert!(matches!(
            negotiate(&offer(7, 12), CACHED),
            Err(MountError::ProtocolTooOld { minor: 12, .. })
        ));
        assert!(matches!(
            negotiate(&offer(6, 99), CACHED),
            Err(MountError::ProtocolTooOld { major: 6, .. })
        ));
        assert_eq!((own_version().major, own_version().minor), (7, MINOR_VERSION));
    }
}
