//! Counts the requests of each kind, and the time that they took of their threads.
//!
//! The time of an fsync ends when its data is written: another thread sends the answer later.
use crate::protocol::wire::opcode;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::clock;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// One more than the largest opcode with a counter of its own.
const OPCODE_END: usize = 64;

#[derive(Default)]
struct OpcodeCounter {
    count: AtomicU64,
    /// Requests that the queue's thread answered, although requests of this kind may have to
    /// wait.
    at_once: AtomicU64,
    time_ns: AtomicU64,
}

/// Counters since the start of the mount.
pub struct RequestCounters([OpcodeCounter; OPCODE_END]);

impl Default for RequestCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| OpcodeCounter::default()))
    }
}

impl RequestCounters {
    /// Serves a request with opcode `number` by `serve`, and counts it.
    pub fn count(&self, number: u32, serve: impl FnOnce()) {
        let begin = clock::now_monotonic();
        serve();
        self.add(number, begin.elapsed());
    }

    /// As [`RequestCounters::count`], but counts the request only if `says` returns true for the
    /// result of `serve`.
    pub fn count_at_once<R>(
        &self,
        number: u32,
        serve: impl FnOnce() -> R,
        says: impl FnOnce(&R) -> bool,
    ) -> R {
        let begin = clock::now_monotonic();
        let done = serve();
        if says(&done) {
            self.add(number, begin.elapsed());
            if let Some(counter) = self.0.get(number as usize) {
                counter.at_once.fetch_add(1, Ordering::Relaxed);
            }
        }
        done
    }

    fn add(&self, number: u32, time: Duration) {
        if let Some(counter) = self.0.get(number as usize) {
            counter.count.fetch_add(1, Ordering::Relaxed);
            counter.time_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// `{"LOOKUP": {"count": 3, "time_ns": 4000}, …}`, without those that never came; with
    /// `at_once` if it is not zero.
    pub fn to_json(&self) -> Value {
        let counters = self.0.iter().enumerate().filter_map(|(number, counter)| {
            let count = counter.count.load(Ordering::Relaxed);
            let at_once = counter.at_once.load(Ordering::Relaxed);
            let mut value =
                json!({ "count": count, "time_ns": counter.time_ns.load(Ordering::Relaxed) });
            if at_once > 0 {
                value["at_once"] = json!(at_once);
            }
            (count > 0).then(|| {
                (
                    opcode::name(number as u32).map_or_else(|| number.to_string(), str::to_owned),
                    value,
                )
            })
        });
        Value::Object(counters.collect::<Map<_, _>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_name() {
        let counters = RequestCounters::default();
        counters.count(opcode::LOOKUP, || ());
        counters.count(opcode::LOOKUP, || ());
        counters.count(7, || ());
        counters.count(4096, || ());
        assert_eq!(counters.count_at_once(opcode::LOOKUP, || "left", |_| false), "left");
        assert_eq!(counters.count_at_once(opcode::READ, || "done", |_| true), "done");
        let json = counters.to_json();
        assert_eq!((&json["LOOKUP"]["count"], &json["7"]["count"]), (&json!(2), &json!(1)));
        assert_eq!(
            (&json["LOOKUP"]["at_once"], &json["READ"]["at_once"]),
            (&json!(null), &json!(1))
        );
        assert_eq!(json.as_object().map(Map::len), Some(3));
    }
}
