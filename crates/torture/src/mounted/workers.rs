//! Patterns of use, each with a memory of what was acknowledged, and the threads on which they
//! work.
//!
//! A worker's folder is its own; nothing is shared between threads but the gate, which has copies
//! of the memories, and the flag that says that errors are expected from now on. Memories live
//! outside the volume; those of a virtual machine's guest, in its journal.
use super::append::Append;
use super::direct::Direct;
use super::gate::Gate;
use super::label::Label;
use super::lineage::Lineage;
use super::memory::Memory;
use super::overwrite::Overwrite;
use super::pattern;
use super::replace::Replace;
use super::reshape::Reshape;
use super::server::Server;
use super::tree::Tree;
use cairn_environment::thread;
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::AddAssign;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a failed check says.
pub type Problem = String;

/// A pattern of use, with its memory of what was acknowledged.
pub trait Worker: Memory + Copied + Send {
    /// Works below `folder` until an error comes, or `stop` is set. `journal` gets a record before
    /// each change that a crash may leave, and after each acknowledgement.
    fn work(&mut self, folder: &Path, stop: &AtomicBool, journal: &dyn Journal) -> io::Result<()>;
    /// How often something was acknowledged, in all rounds.
    fn acknowledgements(&self) -> u64;
    /// Compares the folder with what is remembered, takes what it finds as the new state, and
    /// tidies up for the next round.
    fn check(&mut self, folder: &Path) -> Result<(), Problem>;
    /// Whether it works in subvolumes of its own, which a snapshot of its folder leaves out.
    fn has_subvolumes(&self) -> bool {
        false
    }
    /// What checks have found of snapshots and forks, in all rounds.
    fn kept(&self) -> Kept {
        Kept::default()
    }
}

/// A worker that remembers the same.
pub trait Copied {
    fn copy(&self) -> Box<dyn Worker>;
}

impl<W: Worker + Clone + 'static> Copied for W {
    fn copy(&self) -> Box<dyn Worker> {
        Box::new(self.clone())
    }
}

/// Acknowledged promises that a check found kept, each counted at each check.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub struct Kept {
    /// A snapshot is there, and shows what it must.
    pub snapshots: u64,
    /// A fork is there, with what it had or got since.
    pub forks: u64,
    /// What a subvolume was before a rollback is there.
    pub rollbacks: u64,
    /// A deleted snapshot or removed subvolume is gone.
    pub deletions: u64,
}

impl AddAssign for Kept {
    fn add_assign(&mut self, other: Self) {
        self.snapshots += other.snapshots;
        self.forks += other.forks;
        self.rollbacks += other.rollbacks;
        self.deletions += other.deletions;
    }
}

/// Keeps what a worker remembers where a power cut does not reach.
pub trait Journal: Sync {
    fn record(&self, worker: &dyn Worker) -> io::Result<()>;
}

/// A worker and the name of its folder.
pub type Named = (String, Box<dyn Worker>);

/// All of them, three of each kind.
pub fn workers(seed: u64) -> Vec<Named> {
    let mut workers: Vec<Named> = Vec::new();
    for index in 0..3u64 {
        let own = |kind: u64| pattern::identity(seed, kind * 100 + index);
        workers.push((format!("replace-{index}"), Box::new(Replace::new(own(1)))));
        workers.push((format!("append-{index}"), Box::new(Append::new(own(2)))));
        workers.push((format!("overwrite-{index}"), Box::new(Overwrite::new(own(3)))));
        workers.push((format!("tree-{index}"), Box::new(Tree::new(own(4)))));
        workers.push((format!("reshape-{index}"), Box::new(Reshape::new(own(5)))));
        workers.push((format!("label-{index}"), Box::new(Label::new(own(6)))));
        workers.push((format!("direct-{index}"), Box::new(Direct::new(own(7)))));
        workers.push((format!("lineage-{index}"), Box::new(Lineage::new(own(8)))));
    }
    workers
}

/// A worker that has ended, and how.
pub type Outcome = (Named, Result<(), Problem>);

/// Lets each worker work on a thread of its own, until the flag is set or an error comes; an error
/// before is a defect.
pub fn start_workers(
    server: &Server,
    workers: Vec<Named>,
    gate: &Arc<Gate>,
) -> (Arc<AtomicBool>, Vec<thread::JoinHandle<Outcome>>) {
    let stop = Arc::new(AtomicBool::new(false));
    let start = |(index, (name, mut worker)): (usize, Named)| {
        let (stop, folder) = (Arc::clone(&stop), server.mountpoint().join(&name));
        let journal = gate.journal(index);
        thread::spawn("worker", move || {
            let result = std::fs::create_dir_all(&folder)
                .and_then(|()| worker.work(&folder, &stop, &journal));
            let expected = stop.load(Ordering::SeqCst);
            let result = result
                .or_else(|error| if expected { Ok(()) } else { Err(format!("{name}: {error}")) });
            ((name, worker), result)
        })
    };
    let threads = workers.into_iter().enumerate().map(start).collect();
    (stop, threads)
}

/// Waits for them; the first error is the outcome.
pub fn join_workers(
    threads: Vec<thread::JoinHandle<Outcome>>,
) -> Result<(Vec<Named>, Result<(), Problem>), Problem> {
    let mut result = Ok(());
    let mut workers = Vec::new();
    for thread in threads {
        let (worker, outcome) = thread.join().map_err(|_| "a worker panicked".to_owned())?;
        result = result.and(outcome);
        workers.push(worker);
    }
    Ok((workers, result))
}

/// Has each worker compare what it finds with what it remembers.
pub fn check_workers(server: &Server, workers: &mut [Named]) -> Result<(), Problem> {
    for (name, worker) in workers {
        let folder = server.mountpoint().join(&*name);
        // A round may end before a worker has made its folder.
        std::fs::create_dir_all(&folder).map_err(|error| format!("{name}: {error}"))?;
        worker.check(&folder).map_err(|problem| format!("{name}: {problem}"))?;
    }
    Ok(())
}
