//! Ioctls: sync, the two shutdowns, trim, and requests about subvolumes. Each works on a thread of
//! its own, since it may take long.
//!
//! The GOINGDOWN ioctl of other file systems comes without its flags. Its caller gets the shutdown
//! that loses nothing, which every flag permits. The one that drops what isn't durable has a number
//! of its own.
use super::shutdown::ASKED_FOR;
use super::{VolumeHandler, answer};
use crate::kernel;
use crate::protocol::RequestHeader;
use crate::protocol::wire::{IoctlOut, TrimOut, TrimRange};
use crate::transport::Reply;
use cairn_engine::ShutdownLog;
use cairn_environment::thread;
use rustix::io::Errno;
use zerocopy::FromBytes;

/// Whether the caller is root or the server's user.
fn is_privileged(header: &RequestHeader) -> bool {
    header.uid == 0 || header.uid == rustix::process::geteuid().as_raw()
}

impl VolumeHandler {
    /// FITRIM.
    fn trim(&self, header: &RequestHeader, input: &[u8], reply: Reply) {
        if !is_privileged(header) {
            return reply.error(Errno::PERM);
        }
        let Ok(range) = TrimRange::read_from_bytes(input) else { return reply.error(Errno::INVAL) };
        let volume = self.volume.clone();
        thread::spawn("cairn-trim", move || {
            let trimmed = volume
                .trim(range.start..range.start.saturating_add(range.length), range.least_bytes);
            let out = |length| TrimOut {
                header: IoctlOut::default(),
                range: TrimRange { length, ..range },
            };
            answer(reply, trimmed.map(out).map_err(Into::into));
        });
    }

    pub(super) fn ioctl(&self, header: &RequestHeader, command: u32, input: &[u8], reply: Reply) {
        if command == kernel::IOCTL_TRIM {
            return self.trim(header, input, reply);
        }
        if command == kernel::IOCTL_SUBVOLUMES {
            return self.subvolumes(header, is_privileged(header), input, reply);
        }
        let shutdown = match command {
            kernel::IOCTL_SYNC => None,
            kernel::IOCTL_SHUTDOWN | kernel::IOCTL_GOING_DOWN => Some(ShutdownLog::Flush),
            kernel::IOCTL_SHUTDOWN_DROP => Some(ShutdownLog::Drop),
            _ => return reply.error(Errno::NOTTY),
        };
        if shutdown.is_some() && !is_privileged(header) {
            return reply.error(Errno::PERM);
        }
        let (volume, writes, state) =
            (self.volume.clone(), self.writes.clone(), self.shutdown.clone());
        thread::spawn("cairn-sync", move || {
            if shutdown != Some(ShutdownLog::Drop) {
                writes.wait_for_quiet(&reply);
            }
            let done = match shutdown {
                None => volume.sync(),
                Some(log) => {
                    // First: a later answer would be neither refused nor durable.
                    state.begin(ASKED_FOR);
                    if log == ShutdownLog::Flush {
                        state.wait_for_changes();
                    }
                    volume.shut_down(log)
                }
            };
            answer(reply, done.map(|()| IoctlOut::default()).map_err(Into::into));
        });
    }
}
