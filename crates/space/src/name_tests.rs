//! Names on a full volume, in random histories: when they take from the reserve, how much, and what
//! stays for others.
use crate::reclaim::ReturnWait;
use crate::ticket_tests::{Gate, data, fill, started, volume};
use crate::{Request, Reservation, Space, Urgency};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::random::Seeded;
use cairn_format::{BlockNumber, BlockRange, Generation, NODE_BLOCKS};
use std::sync::Arc;
use std::time::Duration;

fn nodes(nodes: u64) -> Request {
    Request { data_blocks: 0, nodes }
}

/// A volume that is full but for a few blocks; a commit makes what was removed free.
struct Full {
    space: Arc<Space>,
    /// The running transaction.
    running: Arc<Mutex<Generation>>,
    extents: Vec<BlockRange>,
    names: Vec<BlockNumber>,
    _reclaimer: Arc<Gate>,
    random: Seeded,
}

impl Full {
    fn new(seed: u64) -> Full {
        let mut random = Seeded::new(seed);
        let space = volume([16, 64, 160][random.below(3) as usize] << 20);
        space.ledger.lock().reclaim.return_wait = ReturnWait(Duration::ZERO);
        let running = Arc::new(Mutex::new(Rank::TRANSACTION, Generation(2)));
        let (other, counter) = (Arc::downgrade(&space), Arc::clone(&running));
        let commit = move || {
            let mut generation = counter.lock();
            other.upgrade().expect("the test has it").unpin(*generation);
            *generation = generation.next();
        };
        let gate = Gate::new(|_| {}, commit);
        let held = fill(&space, random.below(40));
        let mut extents = Vec::new();
        while held.data_blocks() > 0 {
            let range = space
                .allocate_data(&held, held.data_blocks().min(1 + random.below(60)), None)
                .unwrap();
            space.reference(range);
            extents.push(range);
        }
        started(&space, &gate);
        Full { space, running, extents, names: Vec::new(), _reclaimer: gate, random }
    }

    /// Blocks that an ordinary request for `wanted` nodes, or one that may use `used` nodes of the
    /// reserve, lacks at this moment.
    fn lacking(&self, wanted: u64, used: u64) -> u64 {
        let report = self.space.report();
        let kept = wanted + report.reserved_nodes + report.global_reserve_nodes - used;
        (report.reserved_data + NODE_BLOCKS * kept)
            .saturating_sub(report.total_blocks - report.used - report.pinned)
    }

    fn remove_some(&mut self) {
        for _ in 0..self.random.below(6) {
            if self.extents.is_empty() {
                return;
            }
            let extent =
                self.extents.swap_remove(self.random.below(self.extents.len() as u64) as usize);
            let running = self.running.lock();
            self.space.free(extent, *running).unwrap();
        }
    }

    /// Makes a name, and keeps a part of what it reserved. Returns whether it took from the
    /// reserve.
    fn make_name(&mut self) -> Option<bool> {
        let wanted = 1 + self.random.below(9);
        let quarter = self.space.report().global_reserve_nodes / 4;
        let (lacking, for_a_name, pinned) =
            (self.lacking(wanted, 0), self.lacking(wanted, quarter), self.space.report().pinned);
        let Ok(granted) = self.space.reserve(nodes(wanted), Urgency::Name) else {
            let clusters = self.space.report().free_clusters;
            assert!(
                for_a_name > 0 || self.few_clusters(wanted),
                "{wanted} nodes refused, {clusters} clusters are free"
            );
            return None;
        };
        let from_the_reserve = self.lacking(0, 0) > 0;
        assert!(
            !from_the_reserve || lacking > pinned,
            "it lacked {lacking} blocks, a commit would have brought {pinned}"
        );
        assert_eq!(self.lacking(0, quarter), 0, "more than a quarter of the reserve");
        self.keep(&granted);
        Some(from_the_reserve)
    }

    /// Whole clusters may be fewer than the blocks make one believe.
    fn few_clusters(&self, wanted: u64) -> bool {
        let report = self.space.report();
        report.free_clusters < report.reserved_nodes + report.global_reserve_nodes + wanted
    }

    fn keep(&mut self, granted: &Reservation) {
        for _ in 0..self.random.below(granted.nodes() + 1) {
            self.names.push(self.space.allocate_node(granted).unwrap());
        }
    }

    /// What names leave is enough for those who must never fail.
    fn check(&self) {
        let global = self.space.report().global_reserve_nodes;
        for (urgency, part) in
            [(Urgency::Removal, global / 8), (Urgency::Writeback, 0), (Urgency::Commit, global / 4)]
        {
            assert!(
                self.space.try_reserve(nodes(part), urgency).is_ok(),
                "{part} nodes for {urgency:?}: {:?}",
                self.space.report()
            );
        }
        let written = Request { data_blocks: global / 8, nodes: 0 };
        assert!(
            self.space.try_reserve(written, Urgency::Writeback).is_ok(),
            "writeback: {:?}",
            self.space.report()
        );
    }
}

#[test]
fn names_take_from_the_reserve_only_what_reclaim_cannot_bring() {
    let (mut ordinary, mut from_the_reserve, mut refused) = (0, 0, 0);
    for seed in 0..24 {
        let mut full = Full::new(seed);
        for _ in 0..400 {
            match full.random.below(16) {
                0 => full.remove_some(),
                // Space that comes back fills the reserve first.
                1 => {
                    drop(full.space.try_reserve(data(1 + full.random.below(20)), Urgency::Ordinary))
                }
                _ => match full.make_name() {
                    Some(false) => ordinary += 1,
                    Some(true) => from_the_reserve += 1,
                    None => refused += 1,
                },
            }
            full.check();
        }
        full.space.stop();
    }
    assert!(
        ordinary > 100 && from_the_reserve > 100 && refused > 100,
        "{ordinary}, {from_the_reserve}, {refused}"
    );
}
