//! Reports whether a caller was killed while it waits for an answer.
//!
//! The kernel sends INTERRUPT for every signal that a program handles, and most programs don't
//! expect `EINTR` from a file system. Only a killed caller certainly ignores the answer; the
//! request stays until it gets one.
use std::fs;

/// SIGKILL in a set of signals as `/proc` prints it.
const KILL: u64 = 1 << 8;

/// Whether the thread has ended or has a pending fatal signal. 0 is a caller outside this process
/// id namespace.
pub fn is_dying(thread: u32) -> bool {
    if thread == 0 {
        return false;
    }
    match fs::read_to_string(format!("/proc/{thread}/status")) {
        Ok(status) => has_kill_pending(&status),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

fn has_kill_pending(status: &str) -> bool {
    let sets = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")));
    sets.filter_map(|set| u64::from_str_radix(set.trim(), 16).ok()).any(|set| set & KILL != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_killed_are_dying() {
        assert!(!has_kill_pending(
            "Name:\tx\nSigPnd:\t0000000000000002\nShdPnd:\t0000000000010000\n"
        ));
        assert!(has_kill_pending("SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
        assert!(has_kill_pending("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000101\n"));
        assert!(!is_dying(0) && !is_dying(std::process::id()));
        assert!(is_dying(u32::MAX), "no thread has this number");
    }
}
