//! A power failure at any point of one operation, and of a change that follows it: a volume shows
//! nothing of it or all of it, and fsck finds nothing wrong.
use crate::history::{checked, seed};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::Volume;
use cairn_environment::random::Seeded;
use std::fmt::Debug;
use std::sync::Arc;

/// An operation and a change, as a device has recorded them.
pub struct Recorded<T> {
    pub device: Arc<SimulatedDevice>,
    pub random: Seeded,
    /// How long the recording was when the operation had returned, and when the change was durable.
    pub ended: [usize; 2],
    /// What a volume shows before the operation, after it, and after the change.
    pub outcomes: [T; 3],
}

fn expect_clean(device: &dyn BlockDevice, context: &str) {
    let report = checked(device);
    assert_eq!(report.errors, 0, "{context}:\n{report}");
}

impl<T: PartialEq + Debug> Recorded<T> {
    /// Opens so many states of each point by `open`. `shown` must be one of the outcomes that are
    /// possible by then; `go_on` gets the number of that, and the context.
    pub fn crash_everywhere(
        mut self,
        states: usize,
        open: impl Fn(&Arc<SimulatedDevice>) -> Volume,
        shown: impl Fn(&Volume) -> T,
        go_on: impl Fn(&Volume, usize, &str),
    ) {
        let mut seen = [0; 3];
        let mut explorer = self.device.explorer();
        loop {
            let position = explorer.position();
            for state in 0..states {
                let context = format!("seed {}, event {position}, state {state}", seed());
                let survivor = Arc::new(explorer.state(&mut self.random));
                expect_clean(&*survivor, &context);
                let volume = open(&survivor);
                let found = shown(&volume);
                let least = self.ended.iter().filter(|ended| position >= **ended).count();
                let Some(which) = (least..3).find(|at| self.outcomes[*at] == found) else {
                    panic!("{context}: {found:?}, and at least {least} had ended");
                };
                seen[which] += 1;
                go_on(&volume, which, &context);
                volume.close().unwrap();
                expect_clean(&*survivor, &context);
            }
            if !explorer.advance() {
                break;
            }
        }
        assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    }
}
