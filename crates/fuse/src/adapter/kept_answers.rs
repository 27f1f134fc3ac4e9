//! Answers that do not fit into one reply: they are kept, and asked for in parts. One goes with its
//! last part, or when no request has asked for it for a while.
//!
//! Lock: the kept answers, for a moment.
use super::Answer;
use crate::directory_requests::{PART_BYTES, Part};
use crate::kernel::BUFFER_BYTES;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, random, thread};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// An answer is kept once or twice as long after a request has asked for it.
const UNUSED_TIME: Duration = Duration::from_secs(30);

/// What a reply carries.
type Buffer = Box<[u8; BUFFER_BYTES]>;

/// Answers of which not everything was asked for.
pub(super) struct KeptAnswers {
    kept: Mutex<HashMap<u64, Kept>>,
    removed: Condvar,
}

struct Kept {
    text: Arc<[u8]>,
    /// The user who asked for it.
    user: u32,
    /// Parts that were asked for.
    uses: u64,
}

impl Default for KeptAnswers {
    fn default() -> Self {
        Self { kept: Mutex::new(Rank::LEAF, HashMap::new()), removed: Condvar::new() }
    }
}

impl KeptAnswers {
    /// The first part of an answer for this user. The rest is kept.
    pub(super) fn begin(self: &Arc<Self>, text: Vec<u8>, user: u32) -> Buffer {
        self.begin_for(text, user, UNUSED_TIME)
    }

    fn begin_for(self: &Arc<Self>, text: Vec<u8>, user: u32, unused_time: Duration) -> Buffer {
        let text: Arc<[u8]> = text.into();
        let fits = text.len() <= PART_BYTES;
        let number = if fits { 0 } else { self.keep(Arc::clone(&text), user, unused_time) };
        part_of(&text, number, 0)
    }

    /// Keeps an answer, and returns its number.
    fn keep(self: &Arc<Self>, text: Arc<[u8]>, user: u32, unused_time: Duration) -> u64 {
        let number = random::u64();
        self.kept.lock().insert(number, Kept { text, user, uses: 0 });
        let kept = Arc::clone(self);
        thread::spawn("cairn-kept-answer", move || kept.drop_unused(number, unused_time));
        number
    }

    fn drop_unused(&self, number: u64, unused_time: Duration) {
        let (mut kept, mut seen) = (self.kept.lock(), 0);
        loop {
            let has_waited = self.removed.wait_for(&mut kept, unused_time);
            match kept.get(&number) {
                None => return,
                Some(one) if has_waited && one.uses == seen => break,
                Some(one) if has_waited => seen = one.uses,
                Some(_) => {}
            }
        }
        kept.remove(&number);
    }

    /// The part of an answer from a byte on, for the user who asked for it.
    pub(super) fn part(&self, number: u64, from: u64, user: u32) -> Answer<Buffer> {
        let text = {
            let mut kept = self.kept.lock();
            let one = kept.get_mut(&number).filter(|one| one.user == user);
            let one = one.ok_or(Errno::STALE)?;
            one.uses += 1;
            Arc::clone(&one.text)
        };
        let from = usize::try_from(from).ok().filter(|from| *from < text.len());
        let from = from.ok_or(Errno::INVAL)?;
        if from + PART_BYTES >= text.len() {
            self.kept.lock().remove(&number);
            self.removed.notify_all();
        }
        Ok(part_of(&text, number, from))
    }
}

fn part_of(text: &[u8], number: u64, from: usize) -> Buffer {
    let rest = &text[from..];
    let part = &rest[..rest.len().min(PART_BYTES)];
    Part { number, answer_bytes: text.len(), part }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::clock;

    const USER: u32 = 1000;

    /// The number and the rest of what a buffer holds.
    fn read(buffer: &Buffer) -> (u64, &[u8]) {
        let end = buffer.iter().position(|byte| *byte == b'\n').unwrap();
        let head = std::str::from_utf8(&buffer[..end]).unwrap();
        (head.split_once(' ').unwrap().0.parse().unwrap(), &buffer[end + 1..])
    }

    #[test]
    fn an_answer_comes_in_parts_and_goes_with_the_last() {
        let text: Vec<u8> = (0..3 * PART_BYTES + 7).map(|at| (at % 251) as u8).collect();
        let kept = Arc::new(KeptAnswers::default());
        let first = kept.begin(text.clone(), USER);
        let (number, rest) = read(&first);
        let mut found = rest[..PART_BYTES].to_vec();
        let failure = |from, user| kept.part(number, from, user).unwrap_err().errno();
        assert_eq!(failure(text.len() as u64, USER), Errno::INVAL);
        assert_eq!(failure(PART_BYTES as u64, USER + 1), Errno::STALE, "another user's");
        while found.len() < text.len() {
            let part = kept.part(number, found.len() as u64, USER).unwrap();
            let more = PART_BYTES.min(text.len() - found.len());
            found.extend_from_slice(&read(&part).1[..more]);
        }
        assert!(found == text);
        assert_eq!(failure(0, USER), Errno::STALE, "it is not kept");
    }

    #[test]
    fn a_short_answer_is_not_kept() {
        for text in [&b""[..], b"text", &[b'x'; PART_BYTES]] {
            let kept = Arc::new(KeptAnswers::default());
            let buffer = kept.begin(text.to_vec(), USER);
            let (number, rest) = read(&buffer);
            assert_eq!((number, &rest[..text.len()]), (0, text));
            assert!(kept.kept.lock().is_empty());
        }
    }

    #[test]
    fn an_answer_that_no_request_asks_for_is_dropped() {
        let kept = Arc::new(KeptAnswers::default());
        let text = vec![b'x'; PART_BYTES + 1];
        let buffer = kept.begin_for(text, USER, Duration::from_millis(1));
        let (number, _) = read(&buffer);
        while kept.kept.lock().contains_key(&number) {
            clock::sleep(Duration::from_millis(1));
        }
    }
}
