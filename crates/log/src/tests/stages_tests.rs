//! Stages of requests: which are counted, and that they add up.
use super::testing::*;
use crate::{LogError, StageTime};
use cairn_environment::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

fn counts(volume: &Volume) -> Vec<(&'static str, u64)> {
    volume.log.stage_times().iter().map(|time| (time.stage, time.count)).collect()
}

/// The exact sums of all stages but the total, and of the total, in nanoseconds.
fn sums(times: &[StageTime]) -> (u64, u64) {
    let sum = |time: &StageTime| (time.mean_ns * time.count as f64).round() as u64;
    let parts = times.iter().filter(|time| time.stage != "total").map(sum).sum();
    (parts, times.iter().filter(|time| time.stage == "total").map(sum).sum())
}

#[test]
fn the_stages_of_requests_that_lead_add_up_to_their_totals() {
    let volume = Volume::new();
    assert!(volume.log.stage_times().is_empty());
    for round in 0..20 {
        volume.log.wait_durable(volume.put(round, b"item")).unwrap();
    }
    let all = ["data write", "group wait", "checkpoint write", "flush", "wake-up", "total"];
    assert_eq!(counts(&volume), all.map(|stage| (stage, 20)));
    let times = volume.log.stage_times();
    let (parts, total) = sums(&times);
    assert_eq!(parts, total);
    for time in &times {
        assert!(time.p50_ns <= time.p99_ns && time.p99_ns <= time.max_ns, "{time:?}");
    }
}

#[test]
fn a_request_that_a_commit_completes_and_one_that_finds_nothing_to_do() {
    let mut volume = Volume::new();
    let calls = Arc::new(AtomicU64::new(0));
    // More than the ring takes: the leader asks for a commit.
    for offset in 0..LOG_BLOCKS + 2 {
        volume.put(offset, &[1; 3900]);
    }
    let (last, noted) = (volume.log.last(), Arc::clone(&calls));
    let callback = move |outcome: Result<(), LogError>| {
        outcome.unwrap();
        noted.fetch_add(1, Ordering::SeqCst);
    };
    volume.log.on_durable(last, Box::new(callback));
    assert_eq!((volume.requests().len(), calls.load(Ordering::SeqCst)), (1, 0));
    let cut = volume.cut();
    volume.commit(cut);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(counts(&volume), [("data write", 1), ("commit", 1), ("wake-up", 1), ("total", 1)]);
    let (parts, total) = sums(&volume.log.stage_times());
    assert_eq!(parts, total);
    volume.log.wait_durable(last).unwrap();
    assert_eq!(counts(&volume), [("data write", 2), ("commit", 1), ("wake-up", 1), ("total", 2)]);
}

#[test]
fn what_fails_is_not_counted() {
    let volume = Volume::new();
    let last = volume.put(1, b"item");
    volume.log.abort(LogError::Stopped);
    volume.log.wait_durable(last).unwrap_err();
    assert_eq!(counts(&volume), [("data write", 1)]);
}
