//! Waits that end because nobody wants their outcome any more.
use crate::ticket_tests::{Gate, data, fill, started, until, volume, waiting};
use crate::{Caller, SpaceError, Urgency, on_behalf_of};
use cairn_environment::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

fn caller(request: u64, is_gone: fn(u32) -> bool) -> Caller {
    Caller { request, thread: 5, is_gone }
}

#[test]
fn who_is_killed_while_it_waits_leaves_nothing_behind() {
    let (space, gate) = (volume(16 << 20), Gate::closed());
    started(&space, &gate);
    let held = fill(&space, 10);
    let before = space.report();
    let handles: Vec<_> = (1..=3)
        .map(|request| {
            let other = Arc::clone(&space);
            let handle = thread::spawn("killed", move || {
                // The second one lives on, though it got a signal.
                let asked =
                    caller(request, if request == 2 { |_| false } else { |thread| thread == 5 });
                on_behalf_of(asked, || other.reserve(data(11), Urgency::Ordinary))
            });
            (request, handle)
        })
        .collect();
    let mut survivor = None;
    for (request, handle) in handles {
        if request == 2 {
            survivor = Some(handle);
        } else {
            // Either it saw by itself that its caller is gone, or it is told.
            space.call_off(request);
            assert_eq!(handle.join().unwrap().err(), Some(SpaceError::CalledOff));
        }
    }
    until(|| space.report().tickets_waiting == 1);
    assert!(!space.call_off(2) && !space.call_off(77), "who lives goes on waiting");
    assert_eq!(space.report().tickets_waiting, 1);
    drop(held);
    drop(survivor.unwrap().join().unwrap().unwrap());
    gate.set_open(true);
    space.stop();
    let after = space.report();
    assert_eq!(
        (after.reserved_data, after.reserved_nodes, after.tickets_waiting),
        (0, 0, 0),
        "{before:?} {after:?}"
    );
}

#[test]
fn a_caller_that_dies_later_is_found_by_its_ticket() {
    static DEAD: AtomicBool = AtomicBool::new(false);
    let (space, gate) = (volume(16 << 20), Gate::closed());
    started(&space, &gate);
    let held = fill(&space, 10);
    let other = Arc::clone(&space);
    let first = thread::spawn("killed", move || {
        on_behalf_of(caller(1, |_| DEAD.load(SeqCst)), || {
            other.reserve(data(11), Urgency::Ordinary)
        })
    });
    until(|| space.report().tickets_waiting == 1);
    let second = waiting(&space, data(9), Urgency::Ordinary);
    assert!(!space.call_off(1), "it lives");
    DEAD.store(true, SeqCst);
    assert!(space.call_off(1));
    assert_eq!(first.join().unwrap().err(), Some(SpaceError::CalledOff));
    // The small one behind it fits.
    drop(second.join().unwrap().unwrap());
    drop(held);
    gate.set_open(true);
    space.stop();
    assert_eq!((space.report().reserved_data, space.report().tickets_waiting), (0, 0));
}
