//! Ctrl-C and its like: the first signal asks a run to end in order, the second one ends it at
//! once.
use crate::{EXIT_INTERRUPTED, console};
use anyhow::Context;
use cairn_environment::thread;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The signals that end a run.
pub(crate) const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Listens to signals for as long as the process lives: calls `first`, and says that the run ends
/// after `part`; then `second`, and ends the process.
///
/// # Errors
/// When the system refuses.
pub fn listen(
    part: &'static str,
    first: impl Fn() + Send + 'static,
    second: impl Fn() + Send + 'static,
) -> anyhow::Result<()> {
    let mut signals = Signals::new(SIGNALS).context("cannot handle signals")?;
    drop(thread::spawn("signals", move || {
        for (count, _) in signals.forever().enumerate() {
            if count > 0 {
                second();
                std::process::exit(EXIT_INTERRUPTED.into());
            }
            // Before the run can end.
            console::tell(&format_args!(
                "cairn: the run ends after {part}; the same signal again ends it at once"
            ));
            first();
        }
    }));
    Ok(())
}
