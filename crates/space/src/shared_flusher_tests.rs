//! The predecessor of tickets must be correct, too, or comparing with it says nothing.
use crate::ticket_tests::{Gate, data, fill, stress_with, until, volume};
use crate::{Request, Reservation, Space, SpaceError, Urgency};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::thread::{self, JoinHandle};
use std::sync::Arc;
use std::time::Duration;

type Answer = Result<Reservation, SpaceError>;

fn started(space: &Arc<Space>, gate: &Arc<Gate>) {
    let weak = Arc::downgrade(gate);
    space.start_with_shared_flusher(weak);
}

fn asking(space: &Arc<Space>, request: Request, urgency: Urgency) -> JoinHandle<Answer> {
    let other = Arc::clone(space);
    thread::spawn("asking", move || other.reserve(request, urgency))
}

#[test]
fn who_finds_no_space_flushes_stage_by_stage_and_fails_after_the_last() {
    let space = volume(16 << 20);
    let gate = Gate::idle();
    let _held = fill(&space, 10);
    started(&space, &gate);
    assert_eq!(
        space.reserve(data(11), Urgency::Ordinary).unwrap_err(),
        SpaceError::NoSpace { data_blocks: 11, nodes: 0 }
    );
    assert_eq!(gate.calls(), (2, 1));
    assert!(space.reserve(data(5000), Urgency::Removal).is_err(), "larger than the volume");
    assert_eq!(gate.calls(), (2, 1));
    let global_blocks = space.report().global_reserve_nodes * 4;
    assert!(space.reserve(data(global_blocks), Urgency::Removal).is_err());
    assert_eq!(gate.calls(), (2, 2), "an urgent request commits only");
    assert!(space.reserve(data(global_blocks + 11), Urgency::Commit).is_err());
    assert_eq!(gate.calls(), (2, 2), "a commit doesn't wait");
    let report = space.report();
    assert_eq!((report.tickets_waited, report.tickets_granted, report.tickets_failed), (2, 0, 2));
    space.stop();
}

#[test]
fn a_flush_that_helps_ends_after_its_stage() {
    let space = volume(16 << 20);
    let delayed = Arc::new(Mutex::new(Rank::LEAF, None));
    let to_write = Arc::clone(&delayed);
    let gate = Gate::new(
        move |_| {
            let held = to_write.lock().take();
            drop(held);
        },
        || {},
    );
    // Before the start: no preemptive run mixes in.
    *delayed.lock() = Some(fill(&space, 0));
    started(&space, &gate);
    assert_eq!(space.reserve(data(77), Urgency::Ordinary).unwrap().data_blocks(), 77);
    assert_eq!(gate.calls(), (1, 0));
    space.stop();
}

#[test]
fn all_others_wait_for_the_flusher_whether_they_would_fit_or_not() {
    let space = volume(16 << 20);
    let gate = Gate::closed();
    let held = fill(&space, 50);
    started(&space, &gate);
    let flusher = asking(&space, data(100), Urgency::Ordinary);
    until(|| gate.calls().0 == 1);
    let fitting: Vec<_> = (0..4).map(|_| asking(&space, data(10), Urgency::Ordinary)).collect();
    cairn_environment::clock::sleep(Duration::from_millis(20));
    assert!(fitting.iter().all(|handle| !handle.is_finished()));
    assert_eq!(space.report().reserved_data, held.data_blocks(), "nobody was served");
    assert_eq!(
        space.reserve(data(1), Urgency::Writeback).unwrap().data_blocks(),
        1,
        "an urgent one waits for nobody"
    );
    gate.set_open(true);
    assert!(flusher.join().unwrap().is_err());
    let fitting: Vec<_> =
        fitting.into_iter().map(|handle| handle.join().unwrap().unwrap()).collect();
    assert_eq!(fitting.len(), 4);
    space.stop();
}

#[test]
fn stopping_wakes_all_who_wait() {
    let space = volume(16 << 20);
    let gate = Gate::closed();
    let _held = fill(&space, 0);
    started(&space, &gate);
    let mut waiters = vec![asking(&space, data(10), Urgency::Ordinary)];
    until(|| gate.calls().0 == 1);
    waiters.extend((0..3).map(|_| asking(&space, data(10), Urgency::Ordinary)));
    space.shut_down();
    gate.set_open(true);
    for waiter in waiters {
        assert!(waiter.join().unwrap().is_err());
    }
    space.stop();
}

#[test]
fn sixteen_threads_leave_nothing_behind() {
    let report = stress_with(started);
    assert!(report.tickets_waited > 0, "nobody ever had to wait: {report:?}");
}
