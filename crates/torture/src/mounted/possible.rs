//! What one thing on a volume may show after a crash: the state that was acknowledged last, or one
//! that was begun since.
use super::workers::Problem;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;

/// The states that are possible.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct Possible<V> {
    acknowledged: V,
    begun: Vec<V>,
}

impl<V: Copy + PartialEq + Debug> Possible<V> {
    /// Only this one.
    pub fn only(acknowledged: V) -> Self {
        Self { acknowledged, begun: Vec::new() }
    }

    /// The one that is there unless something goes wrong.
    pub fn newest(&self) -> V {
        self.begun.last().copied().unwrap_or(self.acknowledged)
    }

    /// Whether nothing else is possible.
    pub fn is_only(&self, state: V) -> bool {
        self.acknowledged == state && self.begun.is_empty()
    }

    /// From now on `state` is possible, too.
    pub fn begin(&mut self, state: V) {
        if self.newest() != state {
            self.begun.push(state);
        }
    }

    /// From now on it must be the newest, until another one is begun.
    pub fn acknowledge(&mut self) {
        *self = Self::only(self.newest());
    }

    /// Takes what was found as the new state, if it is possible.
    pub fn settle(&mut self, found: V) -> Result<(), Problem> {
        let Self { acknowledged, begun } = self;
        if found != *acknowledged && !begun.contains(&found) {
            return Err(format!(
                "version {found:?}, but {acknowledged:?} was acknowledged, then {begun:?} begun"
            ));
        }
        *self = Self::only(found);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_acknowledged_or_begun_since_is_possible_and_nothing_else() {
        let mut states = Possible::only(1);
        states.begin(2);
        states.begin(3);
        [1, 2, 3].into_iter().for_each(|found| states.clone().settle(found).unwrap());
        assert!(
            states.clone().settle(4).unwrap_err().contains("1 was acknowledged, then [2, 3] begun")
        );
        states.acknowledge();
        [1, 2].into_iter().for_each(|found| drop(states.clone().settle(found).unwrap_err()));
        states.settle(3).unwrap();
        assert_eq!(states.newest(), 3);
    }

    #[test]
    fn a_state_that_comes_back_is_possible_after_the_one_between() {
        let mut states = Possible::only(1);
        [2, 1].into_iter().for_each(|state| states.begin(state));
        states.acknowledge();
        states.settle(2).unwrap_err();
        states.settle(1).unwrap();
    }
}
