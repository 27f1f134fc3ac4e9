//! Several nodes at once: a device answers many requests in hardly more time than one.
//!
//! Lock discipline: none is held. Threads hold that of what is found, and of which node is next,
//! for a moment.
use crate::cache::NodeCache;
use crate::error::TreeError;
use crate::expected::Expected;
use crate::handle::NodeHandle;
use cairn_environment::lock::Mutex;
use cairn_environment::{Rank, thread};
use std::sync::Arc;

/// Threads that read at once, the caller among them.
const THREADS_MAX: usize = 8;
/// So many nodes are worth a thread.
const NODES_OF_A_THREAD: usize = 4;

/// What becomes of a node that was asked for.
type Fetched = Result<NodeHandle, TreeError>;

/// Nodes that are still to be read, with their places, and what was found.
struct Work {
    wanted: Mutex<Vec<(usize, Expected)>>,
    found: Mutex<Vec<Option<Fetched>>>,
}

impl Work {
    fn next(&self) -> Option<(usize, Expected)> {
        self.wanted.lock().pop()
    }

    fn run(&self, cache: &NodeCache) {
        while let Some((place, expected)) = self.next() {
            let fetched = cache.fetch(&expected);
            self.found.lock()[place] = Some(fetched);
        }
    }
}

/// The nodes in this order. Those that are not in memory are read at the same time.
pub(crate) fn fetch_many(cache: &Arc<NodeCache>, nodes: &[Expected]) -> Vec<Fetched> {
    let mut found: Vec<Option<Fetched>> =
        nodes.iter().map(|expected| cache.cached(expected).transpose()).collect();
    let missing = found.iter().enumerate().filter(|(_, node)| node.is_none());
    let wanted: Vec<_> = missing.map(|(place, _)| (place, nodes[place])).collect();
    let threads = (wanted.len() / NODES_OF_A_THREAD).clamp(1, THREADS_MAX);
    if !wanted.is_empty() {
        let work = Arc::new(Work {
            wanted: Mutex::new(Rank::LEAF, wanted),
            found: Mutex::new(Rank::LEAF, found),
        });
        let helpers: Vec<_> = (1..threads)
            .map(|_| {
                let (work, cache) = (Arc::clone(&work), Arc::clone(cache));
                thread::spawn("cairn-read-nodes", move || work.run(&cache))
            })
            .collect();
        work.run(cache);
        for helper in helpers {
            if let Err(panic) = helper.join() {
                std::panic::resume_unwind(panic);
            }
        }
        found = std::mem::take(&mut *work.found.lock());
    }
    found.into_iter().map(|node| node.expect("each is fetched by one thread")).collect()
}
