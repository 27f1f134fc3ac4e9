//! The one place that turns the engine's errors into errnos.
use cairn_engine::Error;
use rustix::io::Errno;

/// The errno of the system call for `error`.
pub fn errno_of(error: &Error) -> Errno {
    match error {
        Error::NotFound => Errno::NOENT,
        Error::Exists => Errno::EXIST,
        Error::NotDirectory => Errno::NOTDIR,
        Error::IsDirectory => Errno::ISDIR,
        Error::NotEmpty => Errno::NOTEMPTY,
        Error::NameLength(0) => Errno::INVAL,
        Error::NameLength(_) => Errno::NAMETOOLONG,
        Error::NoSpace | Error::StorageFull(_) | Error::HashCollisions => Errno::NOSPC,
        Error::CrossDevice => Errno::XDEV,
        Error::Stale => Errno::STALE,
        Error::Busy => Errno::BUSY,
        Error::NoSubvolume(_) => Errno::NOENT,
        Error::TooManySubvolumes => Errno::MLINK,
        Error::Interrupted => Errno::INTR,
        Error::ReadOnly => Errno::ROFS,
        Error::NoAttribute => Errno::NODATA,
        Error::InvalidArgument(_) => Errno::INVAL,
        Error::NotPermitted(_) => Errno::PERM,
        Error::FileTooLarge(_) | Error::TooMuchAtOnce => Errno::FBIG,
        Error::TooManyLinks => Errno::MLINK,
        Error::OutOfRange => Errno::NXIO,
        Error::XattrTooLarge => Errno::TOOBIG,
        // "Structure needs cleaning", as ext4, XFS and btrfs return it for damaged metadata.
        Error::Damaged(_) | Error::NotAVolume(_) => Errno::UCLEAN,
        Error::Device(_)
        | Error::DataChecksum { .. }
        | Error::Aborted(_)
        | Error::Panicked
        | Error::Closed => Errno::IO,
    }
}

/// Whether `error` is a fault of the volume or device, not of the request.
pub fn is_volume_failure(error: &Error) -> bool {
    matches!(errno_of(error), Errno::IO | Errno::UCLEAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_volumes_fail_apart() {
        assert!(is_volume_failure(&Error::Aborted("x".into())));
        assert!(is_volume_failure(&Error::NotAVolume("x".into())));
        assert!(!is_volume_failure(&Error::NoSpace));
        assert_eq!(errno_of(&Error::NameLength(0)), Errno::INVAL);
        assert_eq!(errno_of(&Error::NameLength(256)), Errno::NAMETOOLONG);
    }
}
