//! Which locks the current thread holds, and the check of their order in debug builds.
//!
//! States: a lock is *checked* (before a thread may block on it), then *held* (a [`Held`] value
//! lives beside the guard), then dropped, in any order. While a thread waits on a condition
//! variable its mutex stays listed: the thread does nothing meanwhile, and holds the mutex again
//! when it goes on.
//!
//! Lock discipline: takes no lock. In a release build everything here is empty and of size zero.

use crate::rank::Rank;

#[cfg(debug_assertions)]
pub(crate) use checked::{Held, RankTag};
#[cfg(not(debug_assertions))]
pub(crate) use unchecked::{Held, RankTag};

/// Asserts, in debug builds, that the current thread may wait for an fsync group, a reservation or
/// a transaction: it holds no lock but [`Rank::SCHEDULES`], [`Rank::EXTENTS`], and the mutex of
/// rank `waiting_on`, if any, whose condition it waits for.
///
/// ```
/// cairn_environment::assert_may_block(None);
/// ```
///
/// # Panics
/// In a debug build, when another lock is held.
#[track_caller]
pub fn assert_may_block(waiting_on: Option<Rank>) {
    #[cfg(debug_assertions)]
    checked::assert_may_block(waiting_on);
    #[cfg(not(debug_assertions))]
    let _ = waiting_on;
}

/// Asserts, in debug builds, that the current thread holds no lock of rank `rank` exclusively: it
/// is about to wait for a device, and readers shall not wait for that.
///
/// ```
/// cairn_environment::assert_not_exclusive(cairn_environment::Rank::NODE);
/// ```
///
/// # Panics
/// In a debug build, when it holds one.
#[track_caller]
#[inline]
pub fn assert_not_exclusive(rank: Rank) {
    #[cfg(debug_assertions)]
    checked::assert_not_exclusive(rank);
    #[cfg(not(debug_assertions))]
    let _ = rank;
}

/// Asserts, in debug builds, that the current thread holds no lock: it is about to run code of
/// others. A thread that panics is not stopped here; [`holds_a_lock`] shows what it does.
///
/// ```
/// cairn_environment::assert_unlocked();
/// ```
///
/// # Panics
/// In a debug build, when a lock is held.
#[track_caller]
pub fn assert_unlocked() {
    #[cfg(debug_assertions)]
    if !std::thread::panicking()
        && let Some(rank) = checked::first_held()
    {
        panic!("a thread must not run code of others while it holds \"{}\"", rank.name());
    }
}

/// Whether the current thread holds a lock. A release build knows of none.
///
/// ```
/// assert!(!cairn_environment::holds_a_lock());
/// ```
pub fn holds_a_lock() -> bool {
    #[cfg(debug_assertions)]
    return checked::first_held().is_some();
    #[cfg(not(debug_assertions))]
    false
}

#[cfg(debug_assertions)]
mod checked {
    use super::Rank;
    use std::cell::RefCell;

    #[derive(Clone, Copy)]
    struct Entry {
        rank: Rank,
        /// Among the locks of a nested rank, if it has one.
        place: Option<u64>,
        exclusive: bool,
        address: usize,
    }

    #[cfg(not(feature = "shuttle"))]
    thread_local! {
        static HELD: RefCell<Vec<Entry>> = const { RefCell::new(Vec::new()) };
    }
    // Under the model checker many modelled threads share one thread of the system.
    #[cfg(feature = "shuttle")]
    shuttle::thread_local! {
        static HELD: RefCell<Vec<Entry>> = RefCell::new(Vec::new());
    }

    /// The locks under which a thread may wait.
    const MAY_BLOCK: [Rank; 2] = [Rank::SCHEDULES, Rank::EXTENTS];

    /// The rank as a lock stores it.
    #[derive(Clone, Copy)]
    pub(crate) struct RankTag(Rank);

    impl RankTag {
        pub(crate) const fn new(rank: Rank) -> RankTag {
            RankTag(rank)
        }

        /// Panics when this thread must not block on the lock at `address`, which has the given
        /// place in its rank.
        #[track_caller]
        pub(crate) fn check(self, address: usize, place: Option<u64>) {
            check_order(self.0, place, address, None);
        }

        /// Lists the lock at `address`, which this thread has just taken.
        pub(crate) fn hold(self, address: usize, place: Option<u64>, exclusive: bool) -> Held {
            let entry = Entry { rank: self.0, place, exclusive, address };
            // A thread that is being torn down has no list any more; it holds nothing that could
            // matter.
            let _ = HELD.try_with(|held| held.borrow_mut().push(entry));
            Held(entry)
        }
    }

    /// Proof that a lock is listed; dropping it takes the lock off the list.
    pub(crate) struct Held(Entry);

    impl Held {
        /// Checks that the mutex may be taken again after a wait: the order must hold without its
        /// own entry.
        #[track_caller]
        pub(crate) fn check_again(&self) {
            check_order(self.0.rank, self.0.place, self.0.address, Some(self.0.address));
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(index) = held.iter().rposition(|entry| entry.address == self.0.address)
                {
                    held.remove(index);
                }
            });
        }
    }

    enum Violation {
        Twice,
        Rank(Rank),
        Place(u64, u64),
    }

    #[track_caller]
    fn check_order(
        wanted: Rank,
        place: Option<u64>,
        address: usize,
        ignored_address: Option<usize>,
    ) {
        if std::thread::panicking() {
            return;
        }
        let violated = HELD.try_with(|held| {
            let held = held.borrow();
            let others = || held.iter().filter(|entry| Some(entry.address) != ignored_address);
            if others().any(|entry| entry.address == address) {
                return Some(Violation::Twice);
            }
            let highest = others().map(|entry| entry.rank).max_by_key(|rank| rank.order())?;
            let allowed = wanted.order() > highest.order()
                || (wanted.order() == highest.order() && wanted.nested());
            if !allowed {
                return Some(Violation::Rank(highest));
            }
            let last = others()
                .filter(|entry| entry.rank == wanted)
                .filter_map(|entry| entry.place)
                .max()?;
            place.filter(|place| *place <= last).map(|place| Violation::Place(place, last))
        });
        match violated {
            Ok(Some(Violation::Twice)) => {
                panic!("the lock \"{}\" is taken twice by one thread", wanted.name())
            }
            Ok(Some(Violation::Place(place, last))) => {
                panic!(
                    "lock order: \"{}\" at place {place} must not be taken while one at place {last} is held",
                    wanted.name()
                )
            }
            Ok(Some(Violation::Rank(highest))) => panic!(
                "lock order: \"{}\" ({}) must not be taken while \"{}\" ({}) is held",
                wanted.name(),
                wanted.order(),
                highest.name(),
                highest.order()
            ),
            Ok(None) | Err(_) => {}
        }
    }

    /// The rank of a lock that this thread holds.
    pub(super) fn first_held() -> Option<Rank> {
        HELD.try_with(|held| held.borrow().first().map(|entry| entry.rank)).ok().flatten()
    }

    #[track_caller]
    pub(super) fn assert_not_exclusive(rank: Rank) {
        let held = HELD.try_with(|held| {
            held.borrow().iter().any(|entry| entry.exclusive && entry.rank == rank)
        });
        assert!(
            held != Ok(true),
            "a thread must not wait for a device here while it holds \"{}\" exclusively",
            rank.name()
        );
    }

    #[track_caller]
    pub(super) fn assert_may_block(waiting_on: Option<Rank>) {
        let in_the_way = HELD.try_with(|held| {
            held.borrow()
                .iter()
                .map(|entry| entry.rank)
                .find(|rank| !MAY_BLOCK.contains(rank) && Some(*rank) != waiting_on)
        });
        if let Ok(Some(rank)) = in_the_way {
            panic!(
                "a thread must not wait here while it holds \"{}\" ({})",
                rank.name(),
                rank.order()
            );
        }
    }
}

#[cfg(not(debug_assertions))]
mod unchecked {
    use super::Rank;

    #[derive(Clone, Copy)]
    pub(crate) struct RankTag;

    impl RankTag {
        pub(crate) const fn new(_: Rank) -> RankTag {
            RankTag
        }

        #[inline(always)]
        pub(crate) fn check(self, _: usize, _: Option<u64>) {}

        #[inline(always)]
        pub(crate) fn hold(self, _: usize, _: Option<u64>, _: bool) -> Held {
            Held
        }
    }

    pub(crate) struct Held;

    impl Held {
        #[inline(always)]
        pub(crate) fn check_again(&self) {}
    }
}
