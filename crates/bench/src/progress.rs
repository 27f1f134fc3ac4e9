//! A bar on standard error while a load runs, when that is a terminal; otherwise nothing.
//!
//! A line is never longer than the terminal is wide, or the terminal would break it and keep each
//! state of it on the screen: the text behind the bar is cut.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, Write};
use std::time::Duration;

/// Shows how much of a time or of a number of operations is over; disappears when dropped.
pub struct Progress {
    bar: ProgressBar,
    over_time: bool,
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Progress {
    /// A bar over a time.
    pub fn over_time(task: &str, duration: Duration) -> Self {
        Self::new(task, milliseconds(duration), true)
    }

    /// A bar over a number of operations.
    pub fn over_operations(task: &str, total: u64) -> Self {
        Self::new(task, total, false)
    }

    fn new(task: &str, total: u64, over_time: bool) -> Self {
        // This target draws on a terminal only.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        bar.set_style(
            ProgressStyle::with_template("{prefix:<20!} {percent:>3}% {bar:10} {wide_msg}")
                .expect("the template is valid"),
        );
        bar.set_prefix(task.to_owned());
        Self { bar, over_time }
    }

    /// Moves on: so much time is over, so many operations are done.
    pub fn set(&self, elapsed: Duration, operations: u64) {
        self.bar.set_position(if self.over_time { milliseconds(elapsed) } else { operations });
        self.bar.set_message(format!("{operations} operations, {:.0} s", elapsed.as_secs_f64()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The steps of a long run: a bar and a note on a terminal, lines on a standard error that is none.
pub struct Steps {
    bar: ProgressBar,
}

impl Steps {
    /// So many steps to do.
    pub fn new(task: &str, total: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template(
            "{prefix:<5!} {bar:10} {pos}/{len} {elapsed:>4} {wide_msg}",
        );
        bar.set_style(style.expect("the template is valid"));
        bar.set_prefix(task.to_owned());
        Self { bar }
    }

    /// Tells what happens next, in a line of its own.
    pub fn say(&self, text: &str) {
        if self.bar.is_hidden() {
            // Whoever closed standard error doesn't want to know.
            let _ = writeln!(io::stderr(), "{text}");
        } else {
            self.bar.println(text);
        }
    }

    /// Tells what is going on, behind the bar.
    pub fn note(&self, text: &str) {
        self.bar.set_message(text.to_owned());
    }

    /// Another step is done.
    pub fn done(&self) {
        self.bar.inc(1);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
