//! How long a thread was ready to run and had no CPU: with a hundred threads for each CPU most of a
//! long latency is that, and no file system can change it. Reading it is a system call, so a load
//! does it only when it is asked to.
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The scheduler's count for the thread that made it.
pub struct RunQueue(File);

impl RunQueue {
    /// That of the calling thread; `None` where the kernel doesn't report it.
    pub fn of_this_thread() -> Option<RunQueue> {
        File::open("/proc/thread-self/schedstat").ok().map(RunQueue)
    }

    /// What the thread has waited for a CPU in its life.
    pub fn waited(&self) -> Duration {
        let mut text = [0; 96];
        let read = self.0.read_at(&mut text, 0).unwrap_or(0);
        Duration::from_nanos(second_number(&text[..read]).unwrap_or(0))
    }
}

/// Of "time on a CPU, time in the queue, slices".
fn second_number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_the_second_number() {
        assert_eq!(second_number(b"1089 77 3\n"), Some(77));
        assert_eq!((second_number(b"5"), second_number(b"")), (None, None));
        if let Some(queue) = RunQueue::of_this_thread() {
            let before = queue.waited();
            assert!(queue.waited() >= before);
        }
    }
}
