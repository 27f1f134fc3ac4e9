//! Answers that do not fit into one reply: they are kept, and asked for in parts. One goes with its
//! last part, when no request has asked for it for a while, or when its user has asked for many
//! others since.
//!
//! Lock: the kept answers, for a moment.
use super::Answer;
use crate::directory_requests::{PART_BYTES, Part};
use crate::kernel::BUFFER_BYTES;
use cairn_environment::clock::{self, Monotonic};
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, random, thread};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// After this time without a request an answer goes.
const UNUSED_TIME: Duration = Duration::from_secs(30);
/// Answers that are kept for a user, and for all.
const OF_USER_MAX: usize = 8;
const KEPT_MAX: usize = 64;

/// What a reply carries.
type Buffer = Box<[u8; BUFFER_BYTES]>;

/// Answers of which not everything was asked for.
pub(super) struct KeptAnswers {
    state: Mutex<State>,
    unused_time: Duration,
}

#[derive(Default)]
struct State {
    /// The one that was asked for last is the last.
    kept: Vec<Kept>,
    /// A thread drops those that are not used.
    is_watched: bool,
}

struct Kept {
    number: u64,
    text: Arc<[u8]>,
    /// The user who asked for it.
    user: u32,
    asked: Monotonic,
}

impl Default for KeptAnswers {
    fn default() -> Self {
        Self::for_time(UNUSED_TIME)
    }
}

impl KeptAnswers {
    fn for_time(unused_time: Duration) -> Self {
        Self { state: Mutex::new(Rank::LEAF, State::default()), unused_time }
    }

    /// The first part of an answer for this user. The rest is kept.
    pub(super) fn begin(self: &Arc<Self>, text: Vec<u8>, user: u32) -> Buffer {
        let text: Arc<[u8]> = text.into();
        let fits = text.len() <= PART_BYTES;
        let number = if fits { 0 } else { self.keep(Arc::clone(&text), user) };
        part_of(&text, number, 0)
    }

    /// Keeps an answer, and returns its number.
    fn keep(self: &Arc<Self>, text: Arc<[u8]>, user: u32) -> u64 {
        let number = random::u64();
        let mut state = self.state.lock();
        let kept = &mut state.kept;
        if kept.iter().filter(|one| one.user == user).count() >= OF_USER_MAX {
            let oldest = kept.iter().position(|one| one.user == user);
            oldest.map(|oldest| kept.remove(oldest));
        } else if kept.len() >= KEPT_MAX {
            kept.remove(0);
        }
        kept.push(Kept { number, text, user, asked: clock::now_monotonic() });
        if !state.is_watched {
            let kept = Arc::clone(self);
            // Without a thread the limits hold, and the next answer tries again.
            let watch = thread::try_spawn("cairn-kept-answers", move || kept.watch());
            state.is_watched = watch.is_ok();
        }
        number
    }

    /// Drops answers that nobody asks for, until there are none.
    fn watch(&self) {
        loop {
            {
                let mut state = self.state.lock();
                state.kept.retain(|one| one.asked.elapsed() < self.unused_time);
                if state.kept.is_empty() {
                    state.is_watched = false;
                    return;
                }
            }
            clock::sleep(self.unused_time);
        }
    }

    /// The part of an answer from a byte on, for the user who asked for it.
    pub(super) fn part(&self, number: u64, from: u64, user: u32) -> Answer<Buffer> {
        let mut state = self.state.lock();
        let kept = &mut state.kept;
        let place = kept.iter().position(|one| (one.number, one.user) == (number, user));
        let place = place.ok_or(Errno::STALE)?;
        let length = kept[place].text.len();
        let from = usize::try_from(from).ok().filter(|from| *from < length);
        let from = from.ok_or(Errno::INVAL)?;
        let mut one = kept.remove(place);
        let text = Arc::clone(&one.text);
        if from + PART_BYTES < length {
            one.asked = clock::now_monotonic();
            kept.push(one);
        }
        drop(state);
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
            assert!(kept.state.lock().kept.is_empty());
        }
    }

    #[test]
    fn an_answer_that_no_request_asks_for_is_dropped() {
        let kept = Arc::new(KeptAnswers::for_time(Duration::from_millis(1)));
        for _ in 0..2 {
            let _first = kept.begin(vec![b'x'; PART_BYTES + 1], USER);
            while kept.state.lock().is_watched {
                clock::sleep(Duration::from_millis(1));
            }
            assert!(kept.state.lock().kept.is_empty());
        }
    }

    #[test]
    fn many_answers_push_out_those_that_were_not_asked_for() {
        let kept = Arc::new(KeptAnswers::default());
        let begin = |user| read(&kept.begin(vec![b'x'; 3 * PART_BYTES], user)).0;
        let part = |number, user| kept.part(number, 1, user).map(drop).map_err(|e| e.errno());
        let other = begin(USER + 1);
        let first: Vec<u64> = (0..OF_USER_MAX).map(|_| begin(USER)).collect();
        assert_eq!(part(first[0], USER), Ok(()));
        let last = begin(USER);
        assert_eq!(part(first[1], USER), Err(Errno::STALE), "it was not used for longest");
        for (number, user) in [(first[0], USER), (last, USER), (other, USER + 1)] {
            assert_eq!(part(number, user), Ok(()));
        }
        for user in 0..2 * KEPT_MAX as u32 {
            begin(2 * USER + user);
        }
        assert_eq!(kept.state.lock().kept.len(), KEPT_MAX);
    }
}
