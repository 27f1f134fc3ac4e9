//! Several nodes at once: a device answers many requests in hardly more time than one.
//!
//! The caller reads as well, and waits for no thread that has not begun: on a busy machine that
//! would take longer than the reading.
//!
//! Lock discipline: no node's lock is held while one is read; that of the work is, for a moment.
use crate::cache::NodeCache;
use crate::error::TreeError;
use crate::expected::Expected;
use crate::handle::NodeHandle;
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, thread};
use std::sync::{Arc, Weak};

/// Threads that read at once, the caller among them.
const THREADS_MAX: usize = 8;
/// So many nodes are worth a thread.
const NODES_OF_A_THREAD: usize = 4;

/// What becomes of a node that was asked for.
type Fetched = Result<NodeHandle, TreeError>;

struct Work {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    /// Nodes that nobody reads yet, with their places.
    wanted: Vec<(usize, Expected)>,
    /// So many are being read.
    under_way: usize,
    found: Vec<Option<Fetched>>,
}

/// A node that is being read; if that panics, it counts as not found.
struct UnderWay<'w> {
    work: &'w Work,
    place: usize,
    fetched: Option<Fetched>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.work.state.lock();
        state.found[self.place] = self.fetched.take();
        state.under_way -= 1;
        self.work.ended.notify_all();
    }
}

impl Work {
    /// Reads one of the nodes that are left, and returns whether there was one.
    fn fetch_one(&self, cache: &Weak<NodeCache>) -> bool {
        let mut state = self.state.lock();
        let Some((place, expected)) = state.wanted.pop() else { return false };
        state.under_way += 1;
        drop(state);
        let mut under_way = UnderWay { work: self, place, fetched: None };
        // The caller, who has the cache, waits for this one. Afterwards a thread keeps nothing.
        under_way.fetched = cache.upgrade().map(|cache| cache.fetch(&expected));
        true
    }

    /// The caller has found nothing to read any more: what was found.
    fn wait(&self) -> Vec<Option<Fetched>> {
        let mut state = self.state.lock();
        while state.under_way > 0 {
            self.ended.wait(&mut state);
        }
        std::mem::take(&mut state.found)
    }
}

/// The nodes in this order. Those that are not in memory are read at the same time.
pub(crate) fn fetch_many(cache: &Arc<NodeCache>, nodes: &[Expected]) -> Vec<Fetched> {
    let mut found: Vec<Option<Fetched>> =
        nodes.iter().map(|expected| cache.cached(expected).transpose()).collect();
    let missing = found.iter().enumerate().filter(|(_, node)| node.is_none());
    let wanted: Vec<_> = missing.map(|(place, _)| (place, nodes[place])).rev().collect();
    let threads = (wanted.len() / NODES_OF_A_THREAD).clamp(1, THREADS_MAX);
    if threads > 1 {
        let state = Mutex::new(Rank::LEAF, State { wanted, under_way: 0, found });
        let work = Arc::new(Work { state, ended: Condvar::new() });
        let weak = Arc::downgrade(cache);
        for _ in 1..threads {
            let (work, cache) = (Arc::clone(&work), weak.clone());
            let read = move || while work.fetch_one(&cache) {};
            if thread::try_spawn("cairn-read-nodes", read).is_err() {
                break;
            }
        }
        while work.fetch_one(&weak) {}
        found = work.wait();
    }
    let fetch =
        |(node, expected): (Option<Fetched>, _)| node.unwrap_or_else(|| cache.fetch(expected));
    found.into_iter().zip(nodes).map(fetch).collect()
}
