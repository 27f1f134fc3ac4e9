//! Whether the user wants a run to end.
//!
//! States: *runs* → (signal) *is to end*. The run looks at the flag, ends in order, and takes away
//! what it made. A second signal ends the process at once, where nothing would be left behind.
use crate::{EXIT_INTERRUPTED, signals};
use anyhow::Context;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The user wants the run to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// What a second signal does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondSignal {
    /// The process ends at once.
    EndsAtOnce,
    /// The run goes on to its end: something is mounted that must be taken away.
    ChangesNothing,
}

/// A flag that a signal sets; every loop of a run looks at it.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
}

impl Interrupt {
    /// One that signals set from now on, without a word.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn by_signals(second: SecondSignal) -> anyhow::Result<Self> {
        let interrupt = Self::default();
        for signal in signals::SIGNALS {
            if second == SecondSignal::EndsAtOnce {
                // Before the flag is set, so that the first signal finds it unset.
                signal_hook::flag::register_conditional_shutdown(
                    signal,
                    EXIT_INTERRUPTED.into(),
                    interrupt.flag(),
                )
                .context("cannot handle signals")?;
            }
            signal_hook::flag::register(signal, interrupt.flag())
                .context("cannot handle signals")?;
        }
        Ok(interrupt)
    }

    /// One that signals set from now on. The first signal reports to the user that the run ends; a
    /// second one ends the process at once.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn by_signals_with_notice() -> anyhow::Result<Self> {
        let interrupt = Self::default();
        let flag = interrupt.flag();
        signals::listen("what is under way", move || flag.store(true, Ordering::SeqCst), || {})?;
        Ok(interrupt)
    }

    /// The flag itself.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.flag.clone()
    }

    /// Whether the run should end.
    pub fn is_set(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// Fails when the run should end.
    ///
    /// # Errors
    /// When the flag is set.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.is_set() { Err(Interrupted.into()) } else { Ok(()) }
    }
}
