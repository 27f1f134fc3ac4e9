//! Limits the number of threads that wait for requests, or serve them, at a time.
//!
//! The kernel wakes another thread for each request as long as one waits, always the one that has
//! waited longest. But a thread that is about to be free would take the request as soon, with warm
//! caches, and without a thread switch. So there are only as many turns as CPUs. A thread needs a
//! turn to read a request and keeps it while it serves. When it is about to wait for the device or
//! for other threads ([`cairn_environment::thread::will_block`]), it releases its turn, and takes
//! one again before it reads the next request.
//!
//! A released turn is *kept* as long as another thread waits for requests: often its owner is back
//! before the turn is needed. When no thread waits for requests any more, it is *handed on* to a
//! thread that waits for a turn.
//!
//! Invariants:
//! - a turn is with one thread, kept, or in the pipe; a thread releases it when it blocks or ends,
//!   also by a panic;
//! - when a turn is kept, a thread waits for requests, or is about to check whether one is kept;
//! - no thread waits for a condition or for the device with a turn. (It may wait for a lock: the
//!   lock's holder continues without a turn.)
//!
//! Locks: none, so that a turn can be released with any locks held. Threads wait for a turn by
//! reading a byte from a pipe, whose writers wake one reader.
use cairn_environment::atomic::{AtomicUsize, Ordering};
use cairn_environment::thread;
use rustix::fd::OwnedFd;
use rustix::io::{self, Errno};
use rustix::pipe::PipeFlags;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

/// With fewer, one thread could not read while another serves.
const TURNS_MIN: usize = 2;

/// The turns of the threads of one mount.
#[derive(Clone, Debug)]
pub struct Turns(Arc<TurnPool>);

#[derive(Debug)]
struct TurnPool {
    /// Threads that wait for requests.
    waiting: AtomicUsize,
    /// Turns that were released while a thread waited for requests.
    kept: AtomicUsize,
    /// The pipe has a byte for each turn that was handed on.
    reader: OwnedFd,
    writer: OwnedFd,
}

/// The turns of the calling thread, and whether it holds one.
struct ThreadTurn {
    turns: Turns,
    has_turn: bool,
}

thread_local! {
    static THREAD_TURN: RefCell<Option<ThreadTurn>> = const { RefCell::new(None) };
}

/// The calling thread's membership. Dropping it releases the turn.
#[derive(Debug)]
pub struct Membership {
    turns: Turns,
    thread: PhantomData<*const ()>,
}

impl Turns {
    /// Turns for `thread_count` threads; `None` if all of them may read at once.
    pub fn new(thread_count: usize) -> Option<Self> {
        let turns =
            std::thread::available_parallelism().map_or(TURNS_MIN, usize::from).max(TURNS_MIN);
        if turns >= thread_count {
            return None;
        }
        let made = Self::with_count(turns);
        made.inspect_err(|errno| tracing::debug!("all threads wait for requests at once: {errno}"))
            .ok()
    }

    fn with_count(turns: usize) -> io::Result<Self> {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let shared =
            TurnPool { waiting: AtomicUsize::new(0), kept: AtomicUsize::new(0), reader, writer };
        (0..turns).for_each(|_| shared.hand_on());
        Ok(Self(Arc::new(shared)))
    }

    /// Makes the calling thread a member.
    pub fn join(self) -> Membership {
        THREAD_TURN.set(Some(ThreadTurn { turns: self.clone(), has_turn: false }));
        thread::on_block(Some(release_turn));
        Membership { turns: self, thread: PhantomData }
    }
}

impl TurnPool {
    fn hand_on(&self) {
        // The pipe has room for all turns.
        if let Err(errno) = io::write(&self.writer, &[0]) {
            tracing::error!("a turn is lost: {errno}");
        }
    }

    fn take_kept(&self) -> bool {
        self.kept.try_update(Ordering::SeqCst, Ordering::SeqCst, |kept| kept.checked_sub(1)).is_ok()
    }

    fn take(&self) -> bool {
        self.take_kept()
            || loop {
                match io::read(&self.reader, &mut [0]) {
                    Err(Errno::INTR) => {}
                    result => break result.is_ok(),
                }
            }
    }

    /// Releases a turn.
    fn release(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.kept.fetch_add(1, Ordering::SeqCst);
            // The thread that waited may have checked before.
            if self.waiting.load(Ordering::SeqCst) > 0 || !self.take_kept() {
                return;
            }
        }
        self.hand_on();
    }
}

impl Membership {
    /// Waits for a request by `wait`, with a turn.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        THREAD_TURN.with_borrow_mut(|member| {
            if let Some(ThreadTurn { turns, has_turn: has_turn @ false }) = member {
                *has_turn = turns.0.take();
            }
        });
        let shared = &*self.turns.0;
        shared.waiting.fetch_add(1, Ordering::SeqCst);
        let arrived = wait();
        if shared.waiting.fetch_sub(1, Ordering::SeqCst) == 1
            && shared.kept.load(Ordering::SeqCst) > 0
            && shared.take_kept()
        {
            shared.hand_on();
        }
        arrived
    }
}

/// Releases the calling thread's turn.
fn release_turn() {
    THREAD_TURN.with_borrow_mut(|member| {
        if let Some(ThreadTurn { turns, has_turn: has_turn @ true }) = member {
            *has_turn = false;
            turns.0.release();
        }
    });
}

impl Drop for Membership {
    fn drop(&mut self) {
        release_turn();
        thread::on_block(None);
        THREAD_TURN.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::Rank;
    use cairn_environment::lock::{Condvar, Mutex};
    use rustix::event::{PollFd, PollFlags, Timespec};

    /// Whether a thread that waits for a turn gets one.
    fn is_free(turns: &Turns) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(&turns.0.reader, PollFlags::IN)], Some(&now)).unwrap()
            > 0
    }

    #[test]
    fn a_thread_that_blocks_ends_or_panics_hands_its_turn_on() {
        let turns = Turns::with_count(1).unwrap();
        let member = turns.clone().join();
        member.wait(|| assert!(!is_free(&turns)));
        member.wait(|| ());
        assert!(!is_free(&turns), "kept while serving");
        thread::will_block();
        thread::will_block();
        assert!(is_free(&turns));
        member.wait(|| ());
        assert!(!is_free(&turns), "handed on once");
        let condition = Mutex::new(Rank::LEAF, ());
        Condvar::new().wait_for(&mut condition.lock(), std::time::Duration::ZERO);
        assert!(is_free(&turns), "waiting for a condition hands it on");
        member.wait(|| ());
        drop(member);
        assert!(is_free(&turns));
        let panicking = turns.clone();
        let ended = thread::spawn("panicking", move || {
            let member = panicking.join();
            member.wait(|| ());
            panic!("on purpose");
        });
        assert!(ended.join().is_err() && is_free(&turns));
        thread::will_block();
    }

    #[test]
    fn a_turn_is_kept_as_long_as_a_thread_waits_for_requests() {
        let turns = Turns::with_count(2).unwrap();
        let member = turns.clone().join();
        member.wait(|| ());
        // Another thread waits for requests.
        assert!(turns.0.take());
        turns.0.waiting.fetch_add(1, Ordering::SeqCst);
        thread::will_block();
        assert!(!is_free(&turns) && turns.0.kept.load(Ordering::SeqCst) == 1);
        member.wait(|| ());
        assert_eq!(turns.0.kept.load(Ordering::SeqCst), 0, "taken back");
        thread::will_block();
        // The other thread gets a request: no thread waits any more.
        turns.0.waiting.fetch_sub(1, Ordering::SeqCst);
        let third = turns.clone();
        thread::spawn("third", move || third.join().wait(|| ())).join().unwrap();
        assert_eq!(turns.0.kept.load(Ordering::SeqCst), 0);
        assert!(is_free(&turns), "handed on");
    }

    #[test]
    fn no_turn_gets_lost_and_none_is_made() {
        let turns = Turns::with_count(2).unwrap();
        let busy = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..6)
            .map(|_| {
                let (turns, busy) = (turns.clone(), Arc::clone(&busy));
                thread::spawn("taking", move || {
                    let member = turns.join();
                    for round in 0..500 {
                        member.wait(thread::yield_now);
                        assert!(busy.fetch_add(1, Ordering::SeqCst) < 2);
                        thread::yield_now();
                        busy.fetch_sub(1, Ordering::SeqCst);
                        if round % 3 > 0 {
                            thread::will_block();
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let shared = &turns.0;
        assert_eq!(
            (shared.waiting.load(Ordering::SeqCst), shared.kept.load(Ordering::SeqCst)),
            (0, 0)
        );
        assert!(shared.take() && shared.take() && !is_free(&turns), "two, as in the beginning");
    }

    #[test]
    fn a_thread_without_a_membership_releases_nothing() {
        release_turn();
        thread::will_block();
        assert!(Turns::new(1).is_none());
    }
}
