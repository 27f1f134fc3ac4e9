//! The allocator of one volume: ledger, tickets and bitmaps together.
//!
//! See the crate's head for states, invariants and lock discipline.
use crate::boundary::Boundary;
use crate::budget::{Budget, Request, Urgency};
use crate::caller::{self, Caller};
use crate::groups::{Groups, Snapshot};
use crate::reclaim::Reclaim;
use crate::reservation::Reservation;
use crate::shared_flusher::{self, SharedFlusher};
use crate::tickets::{Ticket, TicketDecision, Tickets};
use crate::{Reclaimer, SpaceError};
use cairn_environment::Rank;
use cairn_environment::atomic::{AtomicU64, Ordering};
use cairn_environment::lock::Mutex;
use cairn_format::{
    BITMAP_BYTES, BlockNumber, BlockRange, DeadRun, Generation, Geometry, NODE_BLOCKS,
};
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Pinned ranges that become free under one hold of the locks.
const UNPIN_BATCH: usize = 256;

/// What the ledger's mutex protects.
pub(crate) struct Ledger {
    pub(crate) budget: Budget,
    pub(crate) tickets: Tickets,
    pub(crate) reclaim: Reclaim,
    /// What came before tickets, in their place, if that is chosen.
    pub(crate) shared_flusher: SharedFlusher,
}

impl Ledger {
    /// Grants to the tickets in their order, until one doesn't fit.
    pub(crate) fn satisfy(&mut self) {
        while let Some(first) = self.tickets.first() {
            if self.budget.shortage_blocks(first.request, first.urgency) > 0 {
                break;
            }
            let ticket = Arc::clone(first);
            self.grant(ticket.request);
            self.tickets.finish(&ticket, TicketDecision::Granted);
        }
    }

    pub(crate) fn grant(&mut self, request: Request) {
        self.budget.grant(request);
        self.reclaim.granted_blocks += request.blocks();
    }
}

/// How the space of a volume is used, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpaceReport {
    /// Blocks that can be allocated at all.
    pub total_blocks: u64,
    /// Blocks that trees refer to or that are being written.
    pub used: u64,
    /// Blocks that become free when their transaction is durable.
    pub pinned: u64,
    /// Blocks reserved for data.
    pub reserved_data: u64,
    /// Nodes reserved.
    pub reserved_nodes: u64,
    /// Blocks that an ordinary writer of data would get without waiting.
    pub available_blocks: u64,
    /// Blocks that an ordinary writer of data would get if it waited for reclaim.
    pub obtainable_blocks: u64,
    /// Blocks in use that are about to be freed.
    pub returning: u64,
    /// Nodes that ordinary requests never get.
    pub global_reserve_nodes: u64,
    /// Free aligned clusters: room for nodes.
    pub free_clusters: u64,
    /// Tickets that wait.
    pub tickets_waiting: u64,
    /// Tickets whose owner had to sleep, since the volume was opened.
    pub tickets_waited: u64,
    /// Tickets granted since the volume was opened.
    pub tickets_granted: u64,
    /// Tickets failed since the volume was opened.
    pub tickets_failed: u64,
    /// The longest time that a ticket waited.
    pub ticket_wait_max: Duration,
    /// Times that reclaim began before anybody had to wait.
    pub preemptive_runs: u64,
    /// Times that reclaim asked for delayed data to be written.
    pub reclaim_writes: u64,
    /// Times that reclaim asked for a commit.
    pub reclaim_commits: u64,
}

/// Allocator and reservations of one volume.
pub struct Space {
    pub(crate) ledger: Mutex<Ledger>,
    pub(crate) groups: Mutex<Groups>,
    /// Pinned blocks in all generations; changed under the groups' lock, read anywhere as a hint.
    pinned_blocks: AtomicU64,
    /// Blocks of removed files that are about to be freed.
    returning_blocks: AtomicU64,
}

impl Space {
    /// The space of a volume whose bitmaps, one per block group, say `referenced`.
    ///
    /// # Panics
    /// If there is not exactly one bitmap per group.
    pub fn new(geometry: Geometry, referenced: Vec<Box<[u8; BITMAP_BYTES]>>) -> Arc<Space> {
        let groups = Groups::new(geometry, &referenced);
        let (free_blocks, free_clusters) = groups.free();
        let budget = Budget::new(
            geometry.total_blocks,
            geometry.allocatable().blocks,
            free_blocks,
            free_clusters,
        );
        let ledger = Ledger {
            budget,
            tickets: Tickets::default(),
            reclaim: Reclaim::default(),
            shared_flusher: SharedFlusher::default(),
        };
        Arc::new(Space {
            ledger: Mutex::new(Rank::SPACE_LEDGER, ledger),
            groups: Mutex::new(Rank::SPACE_GROUPS, groups),
            pinned_blocks: AtomicU64::new(0),
            returning_blocks: AtomicU64::new(0),
        })
    }

    /// The bitmaps of an empty volume: only what can't be allocated is set.
    pub fn fresh_bitmaps(geometry: &Geometry) -> Vec<Box<[u8; BITMAP_BYTES]>> {
        let empty = vec![Box::new([0; BITMAP_BYTES]); geometry.groups() as usize];
        Groups::new(*geometry, &empty).referenced_bytes().collect()
    }

    /// Starts reclaim: from now on a request that doesn't fit waits, if its urgency allows, while
    /// `reclaimer` is asked to write delayed data and to commit. Before, it fails at once.
    ///
    /// # Panics
    /// If it was started before.
    pub fn start(self: &Arc<Self>, reclaimer: Weak<dyn Reclaimer>) {
        crate::reclaim::start(self, reclaimer);
    }

    /// Ends reclaim and waits for its threads; waiting requests fail with [`SpaceError::Stopped`],
    /// later ones fail at once if they don't fit. Must not be called from within the reclaimer's
    /// functions; its destructor may.
    pub fn stop(&self) {
        crate::reclaim::stop(self);
    }

    /// As [`Self::stop`], without waiting for the threads: may be called from anywhere.
    pub fn shut_down(&self) {
        self.ledger.lock().shut_down();
    }

    /// Reserves space; waits for it as `urgency` allows, with no lock held but an inode's extents
    /// mutex.
    ///
    /// # Errors
    /// No space, after reclaim found none; or the volume stopped meanwhile.
    pub fn reserve(
        self: &Arc<Self>,
        request: Request,
        urgency: Urgency,
    ) -> Result<Reservation, SpaceError> {
        self.reserve_for(caller::current(), request, urgency)
    }

    /// Reserves space if it is there and no ticket waits that comes first.
    ///
    /// # Errors
    /// No space at this moment.
    pub fn try_reserve(
        self: &Arc<Self>,
        request: Request,
        urgency: Urgency,
    ) -> Result<Reservation, SpaceError> {
        let mut ledger = self.ledger.lock();
        if self.grant_at_once(&mut ledger, request, urgency) {
            Ok(Reservation::new(self, request))
        } else {
            Err(no_space(request))
        }
    }

    /// As [`Self::reserve`], on behalf of `caller`.
    pub(crate) fn reserve_for(
        self: &Arc<Self>,
        caller: Option<Caller>,
        request: Request,
        urgency: Urgency,
    ) -> Result<Reservation, SpaceError> {
        if urgency == Urgency::Name {
            match self.reserve_without_the_reserve(caller, request) {
                Err(SpaceError::NoSpace { .. }) => {}
                decided => return decided,
            }
        }
        let mut ledger = match shared_flusher::reserve(self, self.ledger.lock(), request, urgency) {
            ControlFlow::Break(decided) => return decided,
            ControlFlow::Continue(ledger) => ledger,
        };
        if self.grant_at_once(&mut ledger, request, urgency) {
            return Ok(Reservation::new(self, request));
        }
        let may_wait = urgency != Urgency::Commit
            && ledger.reclaim.is_running()
            && ledger.budget.is_possible(request, urgency);
        if !may_wait {
            return Err(no_space(request));
        }
        let ticket = ledger.tickets.enqueue(request, urgency, caller);
        ledger.reclaim.kick(urgency);
        drop(ledger);
        if urgency == Urgency::Ordinary && caller.is_some_and(Caller::is_gone) {
            self.withdraw(&ticket);
        }
        match ticket.wait() {
            TicketDecision::Granted => Ok(Reservation::new(self, request)),
            TicketDecision::Failed => Err(no_space(request)),
            TicketDecision::Stopped => Err(SpaceError::Stopped),
            TicketDecision::CalledOff => Err(SpaceError::CalledOff),
        }
    }

    /// A name as an ordinary request; waits only while what it lacks could come back, or names on a
    /// full volume would take as long as it takes reclaim to give up.
    fn reserve_without_the_reserve(
        self: &Arc<Self>,
        caller: Option<Caller>,
        request: Request,
    ) -> Result<Reservation, SpaceError> {
        let mut ledger = self.ledger.lock();
        if self.grant_at_once(&mut ledger, request, Urgency::Ordinary) {
            return Ok(Reservation::new(self, request));
        }
        let coming_blocks =
            self.pinned_hint() + self.returning_hint() + ledger.budget.delayed_blocks();
        let hopeless = ledger.budget.shortage_blocks(request, Urgency::Ordinary) > coming_blocks;
        drop(ledger);
        if hopeless {
            Err(no_space(request))
        } else {
            self.reserve_for(caller, request, Urgency::Ordinary)
        }
    }

    /// Takes a ticket that is no longer wanted off its queue, unless it was decided at the last
    /// moment. Returns whether it was called off.
    fn withdraw(&self, ticket: &Arc<Ticket>) -> bool {
        let mut ledger = self.ledger.lock();
        if ticket.decision().is_none() {
            ledger.tickets.finish(ticket, TicketDecision::CalledOff);
            ledger.satisfy();
        }
        ticket.decision() == Some(TicketDecision::CalledOff)
    }

    /// The caller of request number `request` got a signal to stop: if it is gone, and waits as an
    /// ordinary request, its wait ends. Returns whether it did.
    pub fn call_off(&self, request: u64) -> bool {
        let ticket = self.ledger.lock().tickets.of_caller(request).cloned();
        ticket.is_some_and(|ticket| {
            ticket.caller.is_some_and(Caller::is_gone) && self.withdraw(&ticket)
        })
    }

    fn grant_at_once(&self, ledger: &mut Ledger, request: Request, urgency: Urgency) -> bool {
        if request.blocks() == 0 {
            return true;
        }
        let fits = ledger.tickets.none_before(urgency)
            && ledger.budget.shortage_blocks(request, urgency) == 0;
        if fits {
            ledger.grant(request);
            ledger.preempt_if_worthwhile(self.pinned_hint());
        }
        fits
    }

    /// The caller is about to free `blocks` blocks that are in use: they count as obtainable, and
    /// no ticket fails at once while there are any. To be taken back with [`Self::retract`] as they
    /// are freed.
    pub fn announce(&self, blocks: u64) {
        self.returning_blocks.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Of the announced blocks, `blocks` are freed now or won't be.
    pub fn retract(&self, blocks: u64) {
        self.returning_blocks.fetch_sub(blocks, Ordering::Relaxed);
    }

    /// What was announced and is not free yet.
    pub(crate) fn returning_hint(&self) -> u64 {
        self.returning_blocks.load(Ordering::Relaxed)
    }

    /// Takes space back from a reservation and serves the tickets that wait.
    pub(crate) fn give_back(&self, data_blocks: u64, nodes: u64) {
        let mut ledger = self.ledger.lock();
        ledger.budget.give_back(data_blocks, nodes);
        ledger.satisfy();
        ledger.note_return();
    }

    /// Hands out 1 to `blocks` contiguous blocks for data: at `goal` if that is free, otherwise
    /// where data is written now. The blocks are in flight until [`Self::reference`] or
    /// [`Self::cancel`].
    ///
    /// # Errors
    /// The reservation holds no data blocks.
    ///
    /// # Panics
    /// If the reservation belongs to another volume, or `blocks` is 0.
    pub fn allocate_data(
        &self,
        reservation: &Reservation,
        blocks: u64,
        goal: Option<BlockNumber>,
    ) -> Result<BlockRange, SpaceError> {
        assert!(
            reservation.is_of(self) && blocks > 0,
            "data blocks are allocated from a reservation of the volume"
        );
        let mut ledger = self.ledger.lock();
        let taken = reservation.take_data(blocks)?;
        let mut groups = self.groups.lock();
        let placed = groups.place_data(taken, goal, ledger.budget.breakable());
        let range = placed.expect("the ledger keeps blocks for every reservation");
        let clusters_broken = groups.occupy(range);
        reservation.untake_data(taken - range.blocks);
        ledger.budget.allocated(range.blocks, 0, clusters_broken);
        Ok(range)
    }

    /// An extent item that refers to `range`, which is in flight, was inserted into the tree.
    ///
    /// # Panics
    /// If `range` is not in flight.
    pub fn reference(&self, range: BlockRange) {
        self.groups.lock().reference(range);
    }

    /// Takes back `range`, which was handed out and never referenced.
    ///
    /// # Panics
    /// If `range` is not in flight.
    pub fn cancel(&self, range: BlockRange) {
        let mut ledger = self.ledger.lock();
        let clusters_formed = self.groups.lock().vacate(range);
        ledger.budget.freed(range.blocks, clusters_formed);
        ledger.satisfy();
    }

    /// Takes the first free blocks in `within`, to discard them: only blocks that an ordinary
    /// writer could be given now, and never all of those. They are in flight until
    /// [`Self::release_held`]; the tickets that wait count on their coming back. Also returns how
    /// many blocks in `within` are free from there on, which may be more. `None`: there are none,
    /// or all are needed.
    pub fn hold_free(&self, within: BlockRange) -> Option<(BlockRange, u64)> {
        let mut ledger = self.ledger.lock();
        let mut groups = self.groups.lock();
        let mut range = groups.first_free(within)?;
        let run_blocks = range.blocks;
        range.blocks = run_blocks.min(ledger.budget.room_blocks() / 2);
        if range.blocks == 0 {
            return None;
        }
        let clusters_broken = groups.occupy(range);
        if !ledger.budget.take_unreserved(range.blocks, clusters_broken) {
            groups.vacate(range);
            return None;
        }
        self.announce(range.blocks);
        Some((range, run_blocks))
    }

    /// Gives back what [`Self::hold_free`] took.
    ///
    /// # Panics
    /// If `range` is not in flight.
    pub fn release_held(&self, range: BlockRange) {
        self.cancel(range);
        self.retract(range.blocks);
    }

    /// As [`Self::cancel`], and the blocks are reserved for `reservation` again at once.
    ///
    /// # Panics
    /// If `range` is not in flight.
    pub fn cancel_into(&self, range: BlockRange, reservation: &Reservation) {
        let mut ledger = self.ledger.lock();
        let clusters_formed = self.groups.lock().vacate(range);
        ledger.budget.freed(range.blocks, clusters_formed);
        ledger.budget.grant(Request { data_blocks: range.blocks, nodes: 0 });
        reservation.add_data(range.blocks);
        ledger.satisfy();
    }

    /// Whether a tree refers to each block of `range`, as far as the allocator knows.
    pub fn is_referenced(&self, range: BlockRange) -> bool {
        self.groups.lock().require_referenced(range).is_ok()
    }

    /// No tree refers to `range` any more: it is pinned until `running`, the transaction that freed
    /// it, is durable.
    ///
    /// # Errors
    /// `range` is not referenced: the tree that named it is wrong.
    ///
    /// # Panics
    /// If `running` was unpinned already.
    pub fn free(&self, range: BlockRange, running: Generation) -> Result<(), SpaceError> {
        self.pin(&mut self.groups.lock(), range, running)
    }

    pub(crate) fn pin(
        &self,
        groups: &mut Groups,
        range: BlockRange,
        running: Generation,
    ) -> Result<(), SpaceError> {
        groups.dereference(range)?;
        groups.pin(range, running);
        self.pinned_blocks.fetch_add(range.blocks, Ordering::Relaxed);
        Ok(())
    }

    /// Hands out a cluster for a node; it counts as referenced at once.
    ///
    /// # Errors
    /// The reservation holds no nodes.
    ///
    /// # Panics
    /// If the reservation belongs to another volume.
    pub fn allocate_node(&self, reservation: &Reservation) -> Result<BlockNumber, SpaceError> {
        assert!(reservation.is_of(self), "nodes are allocated from a reservation of the volume");
        let mut ledger = self.ledger.lock();
        reservation.take_node()?;
        let mut groups = self.groups.lock();
        let address =
            groups.place_node().expect("the ledger keeps a cluster for every reserved node");
        let clusters_broken = groups.occupy(BlockRange::node(address));
        groups.reference(BlockRange::node(address));
        ledger.budget.allocated(0, 1, clusters_broken);
        Ok(address)
    }

    /// The node at `address`, made by transaction `made_in`, is dead. If that is the running
    /// transaction, it was never written and its blocks are free at once; otherwise it is given up
    /// as by [`Self::give_up`].
    ///
    /// # Errors
    /// The blocks are not referenced: the tree that named the node is wrong.
    pub fn free_node(
        &self,
        address: BlockNumber,
        made_in: Generation,
        boundary: &Boundary,
        running: Generation,
    ) -> Result<(), SpaceError> {
        let range = BlockRange::node(address);
        if made_in != running {
            let run = DeadRun { range, birth: made_in, is_node: true };
            return self.give_up(run, boundary, running);
        }
        let mut ledger = self.ledger.lock();
        let mut groups = self.groups.lock();
        groups.require_node(address)?;
        groups.dereference(range)?;
        let clusters_formed = groups.vacate(range);
        drop(groups);
        ledger.budget.freed(NODE_BLOCKS, clusters_formed);
        ledger.satisfy();
        Ok(())
    }

    /// Log replay: `range` belongs to an extent that a checkpoint brings back. To be called for all
    /// checkpoints before the first allocation of the mount, otherwise an allocation could take
    /// blocks that a later checkpoint refers to.
    ///
    /// # Errors
    /// `range` is not all free, lies outside the volume, or a reservation needs it.
    pub fn reference_replayed(&self, range: BlockRange) -> Result<(), SpaceError> {
        let mut ledger = self.ledger.lock();
        let mut groups = self.groups.lock();
        groups.require(range, "free", |group, piece| group.allocated.none_set(piece))?;
        let clusters_broken = groups.occupy(range);
        if !ledger.budget.take_unreserved(range.blocks, clusters_broken) {
            groups.vacate(range);
            return Err(no_space(Request { data_blocks: range.blocks, nodes: 0 }));
        }
        groups.reference(range);
        Ok(())
    }

    /// For log replay: as [`Self::reference_replayed`] for those blocks of `range` that are free.
    /// The others belong to the file already: an extent was cut, or joined with one that was
    /// appended.
    ///
    /// # Errors
    /// `range` lies outside the volume, or a reservation needs the blocks.
    pub fn reference_missing(&self, range: BlockRange) -> Result<(), SpaceError> {
        let runs = self.groups.lock().free_runs(range)?;
        for run in runs {
            self.reference_replayed(run)?;
        }
        Ok(())
    }

    /// The next snapshot has the bitmap of `group`, whether it changed or not.
    pub fn mark_changed(&self, group: u64) {
        self.groups.lock().mark_changed(group as usize);
    }

    /// The bitmaps that changed since the last snapshot. At the cut of `generation` they equal what
    /// its trees refer to.
    pub fn snapshot(&self, generation: Generation) -> Snapshot {
        self.groups.lock().snapshot(generation)
    }

    /// What `generation` pins, by ascending address and joined: what can be discarded before
    /// [`Self::unpin`].
    pub fn pinned(&self, generation: Generation) -> Vec<BlockRange> {
        self.groups.lock().pinned(generation)
    }

    /// The superblock of `generation` is durable: what it pinned becomes free. Once per generation,
    /// in ascending order.
    ///
    /// # Panics
    /// If `generation` or a later one was unpinned before.
    pub fn unpin(&self, generation: Generation) {
        let ranges = self.groups.lock().take_pinned(generation);
        for batch in ranges.chunks(UNPIN_BATCH) {
            let mut ledger = self.ledger.lock();
            let mut groups = self.groups.lock();
            let (mut blocks, mut clusters_formed) = (0, 0);
            for &range in batch {
                clusters_formed += groups.vacate(range);
                blocks += range.blocks;
            }
            self.pinned_blocks.fetch_sub(blocks, Ordering::Relaxed);
            groups.unlock_fair();
            ledger.budget.freed(blocks, clusters_formed);
            ledger.satisfy();
            // Those who write need both locks between two batches.
            ledger.unlock_fair();
        }
    }

    /// How the space is used at this moment.
    pub fn report(&self) -> SpaceReport {
        let ledger = self.ledger.lock();
        let groups = self.groups.lock();
        let pinned = self.pinned_hint();
        drop(groups);
        let used = ledger.budget.total_blocks - ledger.budget.free_blocks - pinned;
        // Freed and retracted are two steps.
        let returning = self.returning_hint().min(used);
        let (budget, tickets) = (&ledger.budget, &ledger.tickets);
        SpaceReport {
            total_blocks: budget.total_blocks,
            used,
            pinned,
            reserved_data: budget.data_reserved,
            reserved_nodes: budget.nodes_reserved,
            available_blocks: budget.available_blocks(),
            obtainable_blocks: budget.obtainable_blocks(pinned + returning),
            returning,
            global_reserve_nodes: budget.global_nodes,
            free_clusters: budget.free_clusters,
            tickets_waiting: tickets.waiting(),
            tickets_waited: tickets.waited,
            tickets_granted: tickets.granted,
            tickets_failed: tickets.failed,
            ticket_wait_max: tickets.wait_max,
            preemptive_runs: ledger.reclaim.preemptive_runs,
            reclaim_writes: ledger.reclaim.writes,
            reclaim_commits: ledger.reclaim.commits,
        }
    }

    /// Pinned blocks; exact while the groups' lock is held.
    pub(crate) fn pinned_hint(&self) -> u64 {
        self.pinned_blocks.load(Ordering::Relaxed)
    }
}

pub(crate) fn no_space(request: Request) -> SpaceError {
    SpaceError::NoSpace { data_blocks: request.data_blocks, nodes: request.nodes }
}
