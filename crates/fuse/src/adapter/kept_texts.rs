//! Texts that do not fit into one reply: they are kept, and asked for in parts. One goes with its
//! last part, or when no request has asked for it for a while.
//!
//! Lock: the kept texts, for a moment.
use super::Answer;
use crate::kernel::BUFFER_BYTES;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, random, thread};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Text of a reply, which has other fields, too.
const PART_BYTES: usize = BUFFER_BYTES - 256;
/// A text is kept once or twice as long after a request has asked for it.
const UNUSED_TIME: Duration = Duration::from_secs(30);

/// A part of a text.
pub(super) struct Part {
    /// Of the text; 0 if it is not kept.
    pub(super) number: u64,
    pub(super) text: String,
    /// More follows.
    pub(super) more: bool,
}

/// Texts of which not everything was asked for.
pub(super) struct KeptTexts {
    kept: Mutex<HashMap<u64, Kept>>,
    removed: Condvar,
}

struct Kept {
    text: Arc<str>,
    /// Parts that were asked for.
    uses: u64,
}

impl Default for KeptTexts {
    fn default() -> Self {
        Self { kept: Mutex::new(Rank::LEAF, HashMap::new()), removed: Condvar::new() }
    }
}

impl KeptTexts {
    /// The first part of a text of characters of one byte, with `other_bytes` beside it. The rest
    /// is kept.
    pub(super) fn begin(self: &Arc<Self>, text: String, other_bytes: usize) -> Part {
        let length_bytes = PART_BYTES.saturating_sub(other_bytes).max(1);
        if text.len() <= length_bytes {
            return Part { number: 0, text, more: false };
        }
        let part = text[..length_bytes].to_owned();
        Part { number: self.keep(text.into(), UNUSED_TIME), text: part, more: true }
    }

    /// Keeps a text, and returns its number.
    fn keep(self: &Arc<Self>, text: Arc<str>, unused_time: Duration) -> u64 {
        let number = random::u64();
        self.kept.lock().insert(number, Kept { text, uses: 0 });
        let kept = Arc::clone(self);
        thread::spawn("cairn-kept-text", move || kept.drop_unused(number, unused_time));
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

    /// The part of a text from a byte on.
    pub(super) fn part(&self, number: u64, from: u64) -> Answer<Part> {
        let text = {
            let mut kept = self.kept.lock();
            let one = kept.get_mut(&number).ok_or(Errno::STALE)?;
            one.uses += 1;
            Arc::clone(&one.text)
        };
        let from = usize::try_from(from).map_err(|_| Errno::INVAL)?;
        let end = text.len().min(from.saturating_add(PART_BYTES));
        let part = text.get(from..end).ok_or(Errno::INVAL)?;
        let more = end < text.len();
        if !more {
            self.kept.lock().remove(&number);
            self.removed.notify_all();
        }
        Ok(Part { number, text: part.to_owned(), more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::clock;

    #[test]
    fn a_text_comes_in_parts_and_goes_with_the_last() {
        let text: String =
            (0..3 * PART_BYTES).map(|at| char::from(b'a' + (at % 26) as u8)).collect();
        for other_bytes in [0, 100, 2 * PART_BYTES] {
            let kept = Arc::new(KeptTexts::default());
            let Part { number, text: mut found, mut more } = kept.begin(text.clone(), other_bytes);
            assert!(found.len() + other_bytes <= PART_BYTES.max(other_bytes + 1));
            assert!(kept.part(number, text.len() as u64 + 1).is_err());
            while more {
                let part = kept.part(number, found.len() as u64).unwrap();
                found.push_str(&part.text);
                more = part.more;
            }
            assert!(found == text);
            let gone = kept.part(number, 0).err().expect("it is not kept");
            assert_eq!(gone.errno(), Errno::STALE);
        }
    }

    #[test]
    fn a_short_text_is_not_kept() {
        let kept = Arc::new(KeptTexts::default());
        let part = kept.begin("text".into(), 0);
        assert_eq!((part.number, &part.text[..], part.more), (0, "text", false));
        assert!(kept.kept.lock().is_empty());
    }

    #[test]
    fn a_text_that_no_request_asks_for_is_dropped() {
        let kept = Arc::new(KeptTexts::default());
        let number = kept.keep("text".into(), Duration::from_millis(1));
        while kept.kept.lock().contains_key(&number) {
            clock::sleep(Duration::from_millis(1));
        }
    }
}
