//! Requests about [differences](crate::differences), on the thread of the request.
//!
//! An answer that does not fit into one reply is kept, and asked for in parts. It goes with the
//! last part, or when nobody has asked for a while.
//!
//! Lock: the kept answers, for a moment.
use super::Answer;
use crate::differences;
use crate::directory_requests::{self, Differences, DifferencesRequest as Request};
use crate::kernel::BUFFER_BYTES;
use cairn_engine::{InodeId, Volume};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, random, thread};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Text of a reply, which has other fields, too.
const PART_BYTES: usize = BUFFER_BYTES - 256;
/// An answer is kept once or twice as long after somebody has asked for it.
const UNUSED_TIME: Duration = Duration::from_secs(30);

/// Answers of which not everything was asked for.
pub(super) struct KeptDifferences {
    kept: Mutex<HashMap<u64, Kept>>,
    removed: Condvar,
}

struct Kept {
    text: Arc<str>,
    /// Parts that were asked for.
    uses: u64,
}

impl Default for KeptDifferences {
    fn default() -> Self {
        Self { kept: Mutex::new(Rank::LEAF, HashMap::new()), removed: Condvar::new() }
    }
}

impl KeptDifferences {
    /// Keeps an answer, and returns its number.
    fn keep(self: &Arc<Self>, text: Arc<str>, unused_time: Duration) -> u64 {
        let number = random::u64();
        self.kept.lock().insert(number, Kept { text, uses: 0 });
        let kept = Arc::clone(self);
        thread::spawn("cairn-differences", move || kept.drop_unused(number, unused_time));
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

    /// The part of an answer from a byte on, and whether more follows.
    fn part(&self, number: u64, from: u64) -> Answer<(String, bool)> {
        let text = {
            let mut kept = self.kept.lock();
            let one = kept.get_mut(&number).ok_or(Errno::STALE)?;
            one.uses += 1;
            Arc::clone(&one.text)
        };
        let (part, more) = part_of(&text, from)?;
        if !more {
            self.kept.lock().remove(&number);
            self.removed.notify_all();
        }
        Ok((part.to_owned(), more))
    }
}

/// The text is of characters of one byte.
fn part_of(text: &str, from: u64) -> Answer<(&str, bool)> {
    let from = usize::try_from(from).map_err(|_| Errno::INVAL)?;
    let end = text.len().min(from.saturating_add(PART_BYTES));
    Ok((text.get(from..end).ok_or(Errno::INVAL)?, end < text.len()))
}

/// Serves a request to the root directory of the older state.
pub(super) fn serve(
    volume: &Volume,
    kept: &Arc<KeptDifferences>,
    old: InodeId,
    is_privileged: bool,
    request: &Request,
) -> Answer<directory_requests::Answer> {
    // It names files in directories that others may not read.
    if !is_privileged {
        return Err(Errno::PERM.into());
    }
    let (part, more) = match *request {
        Request::Begin { new, sent } => {
            let new = InodeId(new);
            // What can change may lack data that the kernel has.
            let can_change = |root| Answer::Ok(volume.subvolume_of(root)?.1);
            if !sent && (can_change(old)? || can_change(new)?) {
                let must_send = Differences { must_send: true, ..Differences::default() };
                (must_send, false)
            } else {
                let text = differences::encode(&volume.differences(old, new)?);
                let (part, more) = part_of(&text, 0)?;
                let part = part.to_owned();
                let number = if more { kept.keep(text.into(), UNUSED_TIME) } else { 0 };
                (Differences { number, text: part, must_send: false }, more)
            }
        }
        Request::Continue { number, from } => {
            let (text, more) = kept.part(number, from)?;
            (Differences { number, text, must_send: false }, more)
        }
    };
    Ok(directory_requests::Answer {
        differences: Some(part),
        more,
        ..directory_requests::Answer::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_environment::clock;

    #[test]
    fn an_answer_comes_in_parts_and_goes_with_the_last() {
        let kept = Arc::new(KeptDifferences::default());
        let text: String =
            (0..3 * PART_BYTES).map(|at| char::from(b'a' + (at % 26) as u8)).collect();
        let number = kept.keep(text.as_str().into(), UNUSED_TIME);
        let mut found = part_of(&text, 0).unwrap().0.to_owned();
        loop {
            let (part, more) = kept.part(number, found.len() as u64).unwrap();
            found.push_str(&part);
            if !more {
                break;
            }
        }
        assert!(found == text);
        assert_eq!(kept.part(number, 0).unwrap_err().errno(), Errno::STALE);
        assert!(part_of(&text, text.len() as u64 + 1).is_err());
    }

    #[test]
    fn an_answer_that_nobody_asks_for_is_dropped() {
        let kept = Arc::new(KeptDifferences::default());
        let number = kept.keep("text".into(), Duration::from_millis(1));
        while kept.kept.lock().contains_key(&number) {
            clock::sleep(Duration::from_millis(1));
        }
    }
}
