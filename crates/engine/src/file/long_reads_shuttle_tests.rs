//! A snapshot is deleted while others begin and end to read it: nothing is freed under a reader,
//! and everything is freed in the end.
use crate::InodeId;
use crate::file::long_reads::LongReads;
use crate::file::removal_queue::{Orphan, Removal, RemovalQueue};
use cairn_environment::atomic::{AtomicBool, Ordering::SeqCst};
use cairn_environment::simulation::schedules;
use cairn_environment::thread;
use std::sync::Arc;

const CLEANUP: Orphan = Orphan { number: InodeId::ROOT, blocks: 0, removal: Removal::DeadRuns };

struct Snapshot {
    root: InodeId,
    reads: LongReads,
    queue: RemovalQueue,
    has_ended: AtomicBool,
    is_freed: AtomicBool,
}

impl Snapshot {
    fn read(&self) {
        self.reads.begin(&[self.root]);
        if !self.has_ended.load(SeqCst) {
            for _ in 0..2 {
                thread::yield_now();
                assert!(!self.is_freed.load(SeqCst), "freed under a reader");
            }
        }
        self.reads.end(&[self.root]).into_iter().for_each(|work| self.queue.push(work));
    }

    /// As a reaper, or a thread that waits itself.
    fn free(&self, waits: bool) {
        if waits {
            self.reads.wait(self.root);
        } else {
            while let Some(taken) = self.queue.wait_and_take() {
                if !self.reads.postpones(self.root, taken.orphan) {
                    break;
                }
            }
        }
        self.is_freed.store(true, SeqCst);
    }
}

#[test]
fn a_deletion_beside_readers() {
    for waits in [false, true] {
        shuttle::check_random(
            move || {
                let snapshot = Arc::new(Snapshot {
                    root: InodeId::root_of(7),
                    reads: LongReads::new(),
                    queue: RemovalQueue::new(),
                    has_ended: AtomicBool::new(false),
                    is_freed: AtomicBool::new(false),
                });
                let readers: Vec<_> = (0..2)
                    .map(|_| {
                        let snapshot = Arc::clone(&snapshot);
                        thread::spawn("reader", move || snapshot.read())
                    })
                    .collect();
                let freeing = Arc::clone(&snapshot);
                let cleaner = thread::spawn("cleaner", move || {
                    freeing.has_ended.store(true, SeqCst);
                    freeing.queue.push(CLEANUP);
                    freeing.free(waits);
                });
                readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
                cleaner.join().expect("no panic");
            },
            schedules(2000),
        );
    }
}
