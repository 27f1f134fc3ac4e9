//! IOCTL: making everything durable, and shutting the volume down.
//!
//! States: *running* → *begun*. Once a shutdown has begun, every request is refused with EIO but those that end the mount.
//!
//! The ioctl that other file systems have comes without its flags. Whoever sends it gets the shutdown that loses nothing, which
//! no flag forbids; the one that drops what isn't durable has a number of its own.
use super::extended::is_made_up;
use super::{VolumeHandler, answer};
use crate::kernel;
use crate::protocol::wire::IoctlOut;
use crate::protocol::{Operation, ROOT_NODE, Request, RequestHeader};
use crate::transport::Reply;
use cairn_engine::ShutdownLog;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::thread;
use rustix::io::Errno;
use std::sync::Arc;

/// Whether a shutdown has begun.
#[derive(Clone, Default)]
pub struct ShutdownState(Arc<AtomicBool>);

impl ShutdownState {
    /// Whether requests are refused.
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Whether `request` is answered after a shutdown: it ends the mount, or it is what somebody who unmounts has to know.
pub fn is_still_answered(request: &Request<'_>) -> bool {
    let node = request.header.node;
    match &request.operation {
        Operation::Destroy | Operation::Release | Operation::ReleaseDirectory => true,
        Operation::GetAttributes | Operation::Statx { .. } => node == ROOT_NODE,
        Operation::GetXattr { name, .. } => is_made_up(node, name),
        operation => !operation.expects_reply(),
    }
}

impl VolumeHandler {
    pub(super) fn ioctl(&self, header: &RequestHeader, command: u32, reply: Reply) {
        let shutdown = match command {
            kernel::IOCTL_SYNC => None,
            kernel::IOCTL_SHUTDOWN | kernel::IOCTL_GOING_DOWN => Some(ShutdownLog::Flush),
            kernel::IOCTL_SHUTDOWN_DROP => Some(ShutdownLog::Drop),
            _ => return reply.error(Errno::NOTTY),
        };
        if shutdown.is_some() && header.uid != 0 && header.uid != rustix::process::geteuid().as_raw() {
            return reply.error(Errno::PERM);
        }
        let (volume, writes, state) = (self.volume.clone(), self.writes.clone(), self.shutdown.clone());
        thread::spawn("cairn-sync", move || {
            if shutdown != Some(ShutdownLog::Drop) {
                writes.wait_for_quiet(&reply);
            }
            let done = match shutdown {
                None => volume.sync(),
                Some(log) => {
                    // First: what is answered from now on would be neither refused nor durable.
                    state.0.store(true, Ordering::Release);
                    volume.shut_down(log)
                }
            };
            answer(reply, done.map(|()| IoctlOut::default()).map_err(Into::into));
        });
    }
}
