//! Ioctls: sync, the two shutdowns, trim, and requests about subvolumes, snapshots, differences and
//! applications. Each works on a thread of its own, since it may take long.
//!
//! The GOINGDOWN ioctl of other file systems comes without its flags. Its caller gets the shutdown
//! that loses nothing, which every flag permits. The one that drops what isn't durable has a number
//! of its own.
use super::shutdown::ASKED_FOR;
use super::subvolumes::Asker;
use super::{VolumeHandler, answer, apply, differences, fail, rollback, snapshots, subvolumes};
use crate::directory_requests::{self, Request};
use crate::kernel::{self, BUFFER_BYTES};
use crate::protocol::RequestHeader;
use crate::protocol::wire::{IoctlOut, TrimOut, TrimRange};
use crate::transport::Reply;
use cairn_engine::{InodeId, ShutdownLog};
use cairn_environment::thread;
use rustix::io::Errno;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Answers a request about subvolumes or snapshots.
fn answer_request(reply: Reply, buffer: super::Answer<Box<[u8; BUFFER_BYTES]>>) {
    match buffer {
        Ok(buffer) => {
            let _delivery = reply.bytes(&[IoctlOut::default().as_bytes(), &buffer[..]].concat());
        }
        Err(failure) => fail(reply, &failure),
    }
}

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

    /// Serves a request about subvolumes or snapshots.
    fn request_to_directory(&self, header: &RequestHeader, input: &[u8], reply: Reply) {
        let Some(request) = directory_requests::decode(input) else {
            return reply.error(Errno::INVAL);
        };
        let (user, kept) = (header.uid, Arc::clone(&self.kept_answers));
        if let Request::Continue { number, from } = request {
            return answer_request(reply, kept.part(number, from, user));
        }
        let is_privileged = is_privileged(header);
        let asker = Asker::new(header, is_privileged);
        let (volume, directory) = (self.volume.clone(), InodeId(header.node));
        let (shown, keeper) = (Arc::clone(&self.snapshots), Arc::clone(&self.keeper));
        let (writeback, lengths) = (self.writeback, self.lengths.clone());
        thread::spawn("cairn-subvolume", move || {
            let done = match &request {
                Request::Snapshots(request) => {
                    snapshots::serve(&volume, &shown, &keeper, directory, &asker, request, &reply)
                }
                Request::Differences { new, sent } => {
                    let new = InodeId(*new);
                    differences::serve(&volume, directory, new, *sent, is_privileged)
                }
                Request::Apply { winner } => {
                    let mount = apply::Mount { volume: &volume, writeback, lengths: &lengths };
                    apply::serve(&mount, (directory, None), is_privileged, *winner, &reply)
                }
                Request::ApplyTo { target, winner } => {
                    let mount = apply::Mount { volume: &volume, writeback, lengths: &lengths };
                    let target = Some(InodeId(*target));
                    apply::serve(&mount, (directory, target), is_privileged, *winner, &reply)
                }
                Request::Rollback { name, snapshot } => {
                    let mount = rollback::Mount { volume: &volume, shown: &shown, keeper: &keeper };
                    rollback::serve(&mount, directory, &asker, (name, snapshot), &reply)
                }
                request => subvolumes::serve(&volume, directory, &asker, request, &reply),
            };
            let text = done.and_then(|done| Ok(serde_json::to_vec(&done).map_err(|_| Errno::IO)?));
            answer_request(reply, text.map(|text| kept.begin(text, user)));
        });
    }

    pub(super) fn ioctl(&self, header: &RequestHeader, command: u32, input: &[u8], reply: Reply) {
        if command == kernel::IOCTL_TRIM {
            return self.trim(header, input, reply);
        }
        if command == kernel::IOCTL_SUBVOLUMES {
            return self.request_to_directory(header, input, reply);
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
