//! Items that come back for the thread of a queue, and whether that thread must be woken for them.
//!
//! No item stays unnoticed while the thread sleeps: the thread marks itself as sleeping before its
//! last look at the items, and a thread that adds an item checks the mark afterwards.
//!
//! Lock: taken alone and briefly.
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::lock::Mutex;

#[derive(Debug)]
pub struct Outbox<T> {
    items: Mutex<Vec<T>>,
    sleeping: AtomicBool,
}

impl<T> Outbox<T> {
    pub fn new() -> Self {
        Self { items: Mutex::new(Rank::FUSE, Vec::new()), sleeping: AtomicBool::new(false) }
    }

    /// Adds an item. Returns whether the caller must wake the thread.
    #[must_use]
    pub fn put(&self, item: T) -> bool {
        self.items.lock().push(item);
        self.sleeping.swap(false, Ordering::SeqCst)
    }

    /// The thread takes all items into `taken`, which is empty, and sleeps from then on, unless it
    /// was woken meanwhile.
    pub fn take_and_sleep(&self, taken: &mut Vec<T>) {
        self.sleeping.store(true, Ordering::SeqCst);
        std::mem::swap(taken, &mut *self.items.lock());
    }

    /// The thread is awake: no other thread need wake it.
    pub fn wake_up(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::atomic::AtomicU64;
    use cairn_environment::random::Seeded;
    use cairn_environment::{clock, thread};
    use std::sync::Arc;
    use std::time::Duration;

    /// Without a system call; otherwise the two threads would never come close enough to each
    /// other.
    fn wait_until(condition: impl Fn() -> bool) {
        let mut looks = 0_u32;
        while !condition() {
            looks += 1;
            if looks.is_multiple_of(256) {
                std::thread::yield_now()
            } else {
                std::hint::spin_loop()
            }
        }
    }

    fn dawdle(random: &mut Seeded) {
        (0..random.below(64)).for_each(|_| std::hint::spin_loop());
    }

    /// Each item is added at some moment while the thread goes to sleep. The thread finds the item
    /// or is woken.
    #[test]
    fn no_item_is_left_lying_while_the_thread_sleeps() {
        const ROUNDS: u64 = 500_000;
        // Where other threads compute on the CPUs, the two seldom run at once, and rounds take
        // long.
        const TIME_MAX: Duration = Duration::from_secs(3);
        const LAST: u64 = u64::MAX;
        let outbox = Arc::new(Outbox::new());
        // The last round that has begun, that has its item, and whose item woke the thread.
        let [begun, put, woke] = std::array::from_fn(|_| Arc::new(AtomicU64::new(0)));
        let putting =
            (Arc::clone(&outbox), Arc::clone(&begun), Arc::clone(&put), Arc::clone(&woke));
        let putter = thread::spawn("putter", move || {
            let (outbox, begun, put, woke) = putting;
            let mut random = Seeded::new(1);
            for round in 1.. {
                wait_until(|| begun.load(Ordering::SeqCst) >= round);
                if begun.load(Ordering::SeqCst) == LAST {
                    return;
                }
                dawdle(&mut random);
                if outbox.put(round) {
                    woke.store(round, Ordering::SeqCst);
                }
                put.store(round, Ordering::SeqCst);
            }
        });
        let (mut random, mut taken, mut slept) = (Seeded::new(2), Vec::new(), 0);
        let begin = clock::now_monotonic();
        for round in (1..=ROUNDS).take_while(|_| begin.elapsed() < TIME_MAX) {
            begun.store(round, Ordering::SeqCst);
            dawdle(&mut random);
            outbox.take_and_sleep(&mut taken);
            wait_until(|| put.load(Ordering::SeqCst) == round);
            if taken.is_empty() {
                slept += 1;
                assert_eq!(
                    woke.load(Ordering::SeqCst),
                    round,
                    "the thread sleeps, and its item is there"
                );
                outbox.take_and_sleep(&mut taken);
            }
            assert_eq!(std::mem::take(&mut taken), [round]);
            outbox.wake_up();
        }
        begun.store(LAST, Ordering::SeqCst);
        putter.join().unwrap();
        assert!(slept > 0, "the thread always found its item");
    }
}
