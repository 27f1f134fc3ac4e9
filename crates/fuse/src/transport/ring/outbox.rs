//! What has come back for the thread of a queue, and whether that thread must be woken for it.
//!
//! No item is left lying while the thread sleeps: it says that it sleeps before it looks for the last time, and whoever puts
//! an item in looks afterwards whether it sleeps.
//!
//! Lock: taken alone and for a moment.
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

    /// Adds an item; whether the thread must be woken now.
    #[must_use]
    pub fn put(&self, item: T) -> bool {
        self.items.lock().push(item);
        self.sleeping.swap(false, Ordering::SeqCst)
    }

    /// The thread takes all items into `taken`, which is empty, and sleeps from then on, unless it was to be woken meanwhile.
    pub fn take_and_sleep(&self, taken: &mut Vec<T>) {
        self.sleeping.store(true, Ordering::SeqCst);
        std::mem::swap(taken, &mut *self.items.lock());
    }

    /// The thread is awake: nobody need wake it.
    pub fn wake_up(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::random::Seeded;
    use cairn_environment::thread;
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::time::Duration;

    /// Each item is put in at some moment while the thread goes to sleep; then nothing but that item would wake it.
    #[test]
    fn no_item_is_left_lying_while_the_thread_sleeps() {
        const ROUNDS: u64 = 200_000;
        let outbox = Arc::new(Outbox::new());
        let (waker, woken) = mpsc::channel();
        let (ask, asked) = mpsc::sync_channel(0);
        let putting = Arc::clone(&outbox);
        let putter = thread::spawn("putter", move || {
            let mut random = Seeded::new(1);
            while let Ok(round) = asked.recv() {
                (0..random.below(200)).for_each(|_| std::hint::spin_loop());
                if putting.put(round) {
                    let _ = waker.send(());
                }
            }
        });
        let (mut random, mut taken) = (Seeded::new(2), Vec::new());
        for round in 0..ROUNDS {
            ask.send(round).unwrap();
            (0..random.below(200)).for_each(|_| std::hint::spin_loop());
            loop {
                outbox.take_and_sleep(&mut taken);
                if !taken.is_empty() {
                    break;
                }
                // Long enough for a putter that lost its CPU.
                woken.recv_timeout(Duration::from_secs(60)).expect("the thread sleeps, and its item is there");
                outbox.wake_up();
            }
            assert_eq!(std::mem::take(&mut taken), [round]);
            outbox.wake_up();
        }
        drop(ask);
        putter.join().unwrap();
    }
}
