//! Tickets: requests that wait for space, in queues that are served in order.
//!
//! States of a ticket: waiting → granted | failed | stopped | called off. The state changes under
//! the ledger's lock, before its owner is woken; only a waiting ticket changes, so that none is
//! ever granted and failed. While it waits it stands in exactly one queue.
//!
//! Order: removals before writeback before names before ordinary requests; first come, first served
//! within each. Space goes to the first ticket of the first queue that isn't empty, and to no
//! other while that one waits: none barges.
use crate::budget::{Request, Urgency};
use crate::caller::Caller;
use cairn_environment::clock::{Monotonic, now_monotonic};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_may_block};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// How a ticket was decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TicketDecision {
    Granted,
    Failed,
    Stopped,
    CalledOff,
}

/// One waiting request.
pub(crate) struct Ticket {
    pub(crate) request: Request,
    pub(crate) urgency: Urgency,
    /// Position in the order of arrival.
    pub(crate) sequence: u64,
    pub(crate) caller: Option<Caller>,
    began: Monotonic,
    /// None while the ticket waits. Changed with the ledger's lock held as well; the owner waits
    /// with this mutex alone, so that it doesn't queue for the ledger when it is woken.
    decision: Mutex<Option<TicketDecision>>,
    changed: Condvar,
}

impl Ticket {
    pub(crate) fn decision(&self) -> Option<TicketDecision> {
        *self.decision.lock()
    }

    /// Sleeps until the ticket is decided. The ledger is not locked.
    pub(crate) fn wait(&self) -> TicketDecision {
        assert_may_block(None);
        let mut decision = self.decision.lock();
        loop {
            if let Some(decided) = *decision {
                return decided;
            }
            self.changed.wait(&mut decision);
        }
    }
}

/// The queues, by the order in which they are served.
const QUEUES: usize = 4;
/// The queue of ordinary requests; those before it may wait for commits only.
const NORMAL: usize = QUEUES - 1;

/// All waiting tickets.
#[derive(Default)]
pub(crate) struct Tickets {
    queues: [VecDeque<Arc<Ticket>>; QUEUES],
    /// Sequence of the next ticket.
    pub(crate) next_sequence: u64,
    /// Tickets that had to wait so far and do so no more.
    pub(crate) waited: u64,
    /// Tickets that were granted so far.
    pub(crate) granted: u64,
    /// Tickets that failed so far.
    pub(crate) failed: u64,
    /// The longest time that a ticket waited.
    pub(crate) wait_max: Duration,
}

fn queue_of(urgency: Urgency) -> usize {
    match urgency {
        Urgency::Removal | Urgency::Commit => 0,
        Urgency::Writeback => 1,
        Urgency::Name | Urgency::RemovalKept => 2,
        Urgency::Ordinary => NORMAL,
    }
}

impl Tickets {
    /// Whether no ticket waits that a request of `urgency` would overtake. A commit overtakes all.
    pub(crate) fn none_before(&self, urgency: Urgency) -> bool {
        urgency == Urgency::Commit
            || self.queues[..=queue_of(urgency)].iter().all(VecDeque::is_empty)
    }

    /// A new ticket at the end of its queue.
    pub(crate) fn enqueue(
        &mut self,
        request: Request,
        urgency: Urgency,
        caller: Option<Caller>,
    ) -> Arc<Ticket> {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let ticket = Arc::new(Ticket {
            request,
            urgency,
            sequence,
            caller,
            began: now_monotonic(),
            decision: Mutex::new(Rank::LEAF, None),
            changed: Condvar::new(),
        });
        self.queues[queue_of(urgency)].push_back(Arc::clone(&ticket));
        ticket
    }

    /// The ticket that is served next.
    pub(crate) fn first(&self) -> Option<&Arc<Ticket>> {
        self.queues.iter().find_map(VecDeque::front)
    }

    /// The first of those that wait for commits only.
    pub(crate) fn first_urgent(&self) -> Option<&Arc<Ticket>> {
        self.queues[..NORMAL].iter().find_map(VecDeque::front)
    }

    /// The first of the ordinary ones.
    pub(crate) fn first_normal(&self) -> Option<&Arc<Ticket>> {
        self.queues[NORMAL].front()
    }

    /// The ordinary ticket that waits on behalf of request number `request`. The others wait for no
    /// longer than a commit.
    pub(crate) fn of_caller(&self, request: u64) -> Option<&Arc<Ticket>> {
        self.queues[NORMAL]
            .iter()
            .find(|ticket| ticket.caller.is_some_and(|caller| caller.request == request))
    }

    /// Blocks that all ordinary tickets ask for.
    pub(crate) fn normal_blocks(&self) -> u64 {
        self.queues[NORMAL]
            .iter()
            .fold(0, |sum, ticket| sum.saturating_add(ticket.request.blocks()))
    }

    /// How many tickets wait.
    pub(crate) fn waiting(&self) -> u64 {
        self.queues.iter().map(|queue| queue.len() as u64).sum()
    }

    /// A request waited from `began` until now.
    pub(crate) fn count_waited(&mut self, began: Monotonic) {
        self.waited += 1;
        self.wait_max = self.wait_max.max(began.elapsed());
    }

    /// Takes a waiting ticket off its queue, decides it, and wakes its owner.
    pub(crate) fn finish(&mut self, ticket: &Arc<Ticket>, decision: TicketDecision) {
        let previous = ticket.decision.lock().replace(decision);
        assert_eq!(previous, None, "a ticket is decided twice");
        let queue = &mut self.queues[queue_of(ticket.urgency)];
        let position = queue
            .iter()
            .position(|other| Arc::ptr_eq(other, ticket))
            .expect("a waiting ticket stands in its queue");
        queue.remove(position);
        self.count_waited(ticket.began);
        match decision {
            TicketDecision::Granted => self.granted += 1,
            TicketDecision::Failed => self.failed += 1,
            _ => {}
        }
        ticket.changed.notify_one();
    }
}
