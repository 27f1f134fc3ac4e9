//! A progress bar on standard error, when that is a terminal; otherwise nothing, or a line now and
//! then.
//!
//! A line is never longer than the terminal is wide, or the terminal would break it and keep each
//! state of it on the screen: the bar takes what the numbers leave, or the note behind the bar is
//! cut, and so is a long name.
use crate::console::{self, grouped};
use cairn_environment::clock;
use indicatif::{ProgressBar as Bar, ProgressDrawTarget, ProgressStyle};
use std::cell::Cell;
use std::time::Duration;

const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows how far something has got; disappears when dropped.
pub struct ProgressBar {
    bar: Bar,
    /// When a task without a terminal last printed how far it is.
    told: Option<Cell<clock::Monotonic>>,
}

impl ProgressBar {
    /// A bar over `total_bytes`.
    pub fn bytes(task: &str, total_bytes: u64) -> Self {
        Self::new(
            task,
            total_bytes,
            "{prefix:<12!} {wide_bar} {percent:>3}% of {binary_total_bytes} {eta:>4}",
        )
    }

    /// A bar over `total` things of any kind.
    pub fn items(task: &str, total: u64) -> Self {
        Self::new(task, total, "{prefix:<12!} {wide_bar} {percent:>3}% of {human_len} {eta:>4}")
    }

    /// A short bar over `total` of a load, with a note behind it.
    pub fn load(task: &str, total: u64) -> Self {
        Self::new(task, total, "{prefix:<20!} {percent:>3}% {bar:10} {wide_msg}")
    }

    /// A short bar over the steps of a long run, with a note behind it.
    pub fn steps(task: &str, total: u64) -> Self {
        Self::new(task, total, "{prefix:<5!} {bar:10} {pos}/{len} {elapsed:>4} {wide_msg}")
    }

    fn new(task: &str, total: u64, template: &str) -> Self {
        // This target draws on a terminal only.
        let bar = Bar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template(template).expect("the template is valid"));
        bar.set_prefix(task.to_owned());
        Self { bar, told: None }
    }

    /// Where there is no terminal, a line says now and then how far it is.
    pub fn in_lines(mut self) -> Self {
        self.told = Some(Cell::new(clock::now_monotonic()));
        self
    }

    /// Whether there is no terminal to draw on.
    pub fn is_hidden(&self) -> bool {
        self.bar.is_hidden()
    }

    /// Moves to `done`.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
        let Some(told) = self
            .told
            .as_ref()
            .filter(|told| self.bar.is_hidden() && told.get().elapsed() >= LINE_INTERVAL)
        else {
            return;
        };
        told.set(clock::now_monotonic());
        self.tell(&format!(
            "{}: {} of {}",
            self.bar.prefix(),
            grouped(done),
            grouped(self.bar.length().unwrap_or(0))
        ));
    }

    /// Another one is done.
    pub fn advance(&self) {
        self.bar.inc(1);
    }

    /// Says behind the bar what is going on, on a terminal.
    pub fn note(&self, text: String) {
        self.bar.set_message(text);
    }

    /// Prints `line` above the bar, or where it would be.
    pub fn tell(&self, line: &str) {
        if self.bar.is_hidden() {
            console::tell(&line);
        } else {
            self.bar.println(line);
        }
    }

    /// Starts over with another task.
    pub fn restart(&self, task: &str, total: u64) {
        self.bar.set_prefix(task.to_owned());
        self.bar.set_length(total);
        self.bar.set_position(0);
    }
}

impl Drop for ProgressBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
