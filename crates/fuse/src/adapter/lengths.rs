//! What the kernel takes for the length of a file that an application of a fork has changed.
//!
//! Without its writeback cache the kernel asks for the length of a file when a program does
//! (stat(2), SEEK_END) or reads past the end, but not for a write with O_APPEND, sendfile(2),
//! copy_file_range(2) or an access to a mapping: these use the length that it knows, even if it was
//! told that this is no longer valid. There is no notification that says a length. Three ways lead
//! around that:
//! - Data that the server stores into the kernel's cache raises the length, so a file that became
//!   longer is known as such before the application is answered. The page is dropped right after
//!   that: a program may have written to it meanwhile.
//! - An append says in its WRITE that it is one. It goes to the end that the file has when it is
//!   written ([`WritePlace::End`]). So a file that became shorter gets it at its new end, and so
//!   does any file between the change of the volume and the notification. The kernel has the bytes
//!   in its cache at the place that it meant, and keeps that page locked until the answer. So a
//!   thread has it drop the data after that. A program that reads at this very moment may see them
//!   there.
//! - So that this is rarely needed, who asked for the application asks for the attributes of these
//!   files before it goes on ([`crate::apply`]), if it is root. Then the kernel knows the length.
//!
//! A WRITE that says so is none all the same, but one in the middle of the file, if a program asks
//! for that (pwritev2(2) with RWF_NOAPPEND). So it counts as an append if the file ends where the
//! kernel says. Otherwise it does only if the file is *in doubt*: an application has changed it, or
//! one runs. A file is in doubt until an append comes to its end, which shows that the kernel knows
//! it, or until the kernel has forgotten the file. The kernel sends the writes to a file one by
//! one, so no other append ends the doubt meanwhile.
//!
//! A write(2) that is longer than a request becomes several, at consecutive offsets. Each is an
//! append by itself, so they stand one behind the other. If an application comes between two of
//! them, the first ones are a change of the file before it: they make a conflict; or, if the fork
//! wins, they are replaced with the rest of the file, and the last ones stand behind the new
//! content.
//!
//! With the writeback cache the kernel owns the length. It takes a greater one as above, but no
//! smaller one, and its WRITEs do not say that they are appends.
//!
//! Lock: rank `LEAF`, held briefly.
use super::attributes::handle_generation;
use crate::directory_requests::FileInDoubt;
use crate::transport::Notifier;
use cairn_engine::{Attributes, FileType, InodeId, Volume, WritePlace};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, thread};
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Default)]
struct Doubts {
    /// Applications that run.
    running: usize,
    /// Applications that have begun, ever.
    begun: u64,
    nodes: BTreeSet<u64>,
    /// Files of which the kernel caches data at a wrong place.
    misplaced: BTreeSet<u64>,
    /// A thread works on those.
    is_corrected: bool,
}

struct Shared {
    /// Whether a file may be in doubt, readable without the lock.
    any: AtomicBool,
    doubts: Mutex<Doubts>,
}

/// The files of a mount whose length the kernel may not know.
#[derive(Clone)]
pub struct Lengths(Arc<Shared>);

impl Default for Lengths {
    fn default() -> Self {
        let doubts = Mutex::new(Rank::LEAF, Doubts::default());
        Self(Arc::new(Shared { any: AtomicBool::new(false), doubts }))
    }
}

/// An application that runs: while there is one, every file is in doubt.
pub struct RunningApplication<'a>(&'a Lengths);

impl RunningApplication<'_> {
    /// Records that these stay in doubt.
    pub fn note(&self, files: &[FileInDoubt]) {
        self.0.0.doubts.lock().nodes.extend(files.iter().map(|file| file.inode));
    }
}

impl Drop for RunningApplication<'_> {
    fn drop(&mut self) {
        self.0.change(|doubts| doubts.running -= 1);
    }
}

impl Lengths {
    fn change<R>(&self, change: impl FnOnce(&mut Doubts) -> R) -> R {
        let mut doubts = self.0.doubts.lock();
        let result = change(&mut doubts);
        let any = doubts.running > 0 || !doubts.nodes.is_empty();
        self.0.any.store(any, Ordering::Release);
        result
    }

    /// Called before an application changes the volume.
    pub fn begin_application(&self) -> RunningApplication<'_> {
        self.change(|doubts| {
            doubts.running += 1;
            doubts.begun += 1;
        });
        RunningApplication(self)
    }

    /// If a file is in doubt, the number of applications until now.
    fn doubt(&self, node: InodeId) -> Option<u64> {
        if !self.0.any.load(Ordering::Acquire) {
            return None;
        }
        let doubts = self.0.doubts.lock();
        let is_in_doubt = doubts.running > 0 || doubts.nodes.contains(&node.0);
        is_in_doubt.then_some(doubts.begun)
    }

    /// Where a WRITE goes that says that it is an append, and that the kernel sends for this
    /// offset.
    pub fn place_of_append(&self, node: InodeId, offset_bytes: u64, volume: &Volume) -> WritePlace {
        let doubt = self.doubt(node);
        match length_of(volume, node) {
            Some(end_bytes) if end_bytes == offset_bytes => {
                if let Some(begun) = doubt {
                    self.change(|doubts| {
                        if doubts.running == 0 && doubts.begun == begun {
                            doubts.nodes.remove(&node.0);
                        }
                    });
                }
                WritePlace::End(end_bytes)
            }
            // An application that has made this length had begun when it was read.
            Some(end_bytes) if self.doubt(node).is_some() => WritePlace::End(end_bytes),
            _ => WritePlace::At(offset_bytes),
        }
    }

    /// The kernel has forgotten the file.
    pub fn forget(&self, node: u64) {
        if self.0.any.load(Ordering::Acquire) {
            self.change(|doubts| doubts.nodes.remove(&node));
        }
    }

    /// Has the kernel drop what it caches of a file after an append that went elsewhere than it
    /// meant. Called after the answer.
    pub fn correct(&self, node: InodeId, notifier: Notifier, volume: &Volume) {
        let mut doubts = self.0.doubts.lock();
        doubts.misplaced.insert(node.0);
        if !std::mem::replace(&mut doubts.is_corrected, true) {
            let (lengths, volume) = (self.clone(), volume.clone());
            thread::spawn("cairn-lengths", move || lengths.correct_all(&notifier, &volume));
        }
    }

    fn correct_all(&self, notifier: &Notifier, volume: &Volume) {
        loop {
            let next = {
                let mut doubts = self.0.doubts.lock();
                let next = doubts.misplaced.pop_first();
                doubts.is_corrected = next.is_some();
                next
            };
            let Some(node) = next else { return };
            if notifier.invalidate_data(node) {
                tell(volume, InodeId(node), notifier);
            }
        }
    }
}

/// The length of a regular file.
pub fn length_of(volume: &Volume, inode: InodeId) -> Option<u64> {
    Some(regular(volume, inode)?.size_bytes)
}

fn regular(volume: &Volume, inode: InodeId) -> Option<Attributes> {
    volume.attributes(inode).ok().filter(|file| file.file_type == FileType::Regular)
}

/// Tells a kernel without writeback cache, which has just dropped the data of a file, how long that
/// is, as far as it can be told. Never on a request thread. `None` if it is no regular file.
pub fn tell(volume: &Volume, inode: InodeId, notifier: &Notifier) -> Option<FileInDoubt> {
    let file = regular(volume, inode)?;
    if lengthen(volume, inode, file.size_bytes, notifier) {
        notifier.invalidate_data(inode.0);
    }
    let generation = handle_generation(&file, None) as u32;
    Some(FileInDoubt { inode: inode.0, generation })
}

/// Has the kernel take a length of a file that is greater than the one that it knows. Returns
/// whether it got a part of the data. Never on a request thread.
pub fn lengthen(volume: &Volume, inode: InodeId, length_bytes: u64, notifier: &Notifier) -> bool {
    let mut last = [0];
    let Some(at) = length_bytes.checked_sub(1) else { return false };
    let is_read = matches!(volume.read_into(inode, at, &mut last), Ok(1));
    if is_read {
        notifier.store(inode.0, at, &last);
    }
    is_read
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::MemoryDevice;
    use cairn_engine::{NewInode, VolumeOptions, mkfs};

    #[test]
    fn a_write_to_another_offset_is_an_append_only_if_the_length_is_in_doubt() {
        let device = Arc::new(MemoryDevice::new(32 << 20));
        mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
        let volume = Volume::open(device, VolumeOptions::default()).unwrap();
        let file_type = FileType::Regular;
        let new = NewInode { file_type, mode: 0o644, uid: 7, gid: 70, device: 0, target: None };
        let make = |name: &[u8]| {
            let file = volume.create(volume.root(), name, &new).unwrap().inode;
            volume.write(file, 0, &[1; 100]).unwrap();
            file
        };
        let [changed, other] = [make(b"changed"), make(b"other")];
        let lengths = Lengths::default();
        let place = |file, offset_bytes| lengths.place_of_append(file, offset_bytes, &volume);
        let (inside, at_end) = (WritePlace::At(40), WritePlace::End(100));
        let begin = || {
            assert_eq!([place(changed, 40), place(changed, 100)], [inside, at_end]);
            let running = lengths.begin_application();
            // An append to the end shows nothing while one runs.
            for file in [changed, other] {
                assert_eq!([place(file, 100), place(file, 40)], [at_end; 2]);
            }
            running.note(&[FileInDoubt { inode: changed.0, generation: 0 }]);
            drop(running);
            assert_eq!([place(changed, 40), place(other, 40)], [at_end, inside]);
        };
        begin();
        assert_eq!(place(changed, 100), at_end);
        begin();
        lengths.forget(changed.0);
        assert_eq!(place(changed, 40), inside);
    }
}
