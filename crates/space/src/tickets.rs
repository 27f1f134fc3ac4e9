//! Tickets: requests that wait for space, in queues that are served in order.
//!
//! States of a ticket: waiting → granted | failed | stopped | withdrawn | called off. The state
//! changes under the ledger's lock, before its owner is woken; only a waiting ticket changes, so
//! that none is ever granted and failed. While it waits it stands in exactly one queue.
//!
//! Order: removals before writeback before names before ordinary requests; first come, first served
//! within each. Space goes to the first ticket of the first queue that isn't empty, and to nobody
//! else while that one waits: nobody barges.
use crate::budget::{Request, Urgency};
use crate::caller::{self, Caller};
use cairn_environment::clock::{Monotonic, now_monotonic};
use cairn_environment::lock::{Condvar, Mutex};
use cairn_environment::{Rank, assert_may_block};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// What became of a ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Waiting,
    Granted,
    Failed,
    Stopped,
    Withdrawn,
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
    /// Changed with the ledger's lock held as well. The owner waits with this mutex alone: whoever
    /// is woken doesn't queue for the ledger behind those who still work.
    outcome: Mutex<Outcome>,
    changed: Condvar,
}

impl Ticket {
    pub(crate) fn outcome(&self) -> Outcome {
        *self.outcome.lock()
    }

    /// Sleeps until the ticket is decided or `deadline` is over. The ledger is not locked.
    pub(crate) fn wait(&self, deadline: Option<Monotonic>) -> Outcome {
        assert_may_block(None);
        let mut outcome = self.outcome.lock();
        while *outcome == Outcome::Waiting {
            match deadline.map(|deadline| deadline - now_monotonic()) {
                None => self.changed.wait(&mut outcome),
                Some(Duration::ZERO) => break,
                Some(rest) => drop(self.changed.wait_for(&mut outcome, rest)),
            }
        }
        *outcome
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
        Urgency::Priority => 1,
        Urgency::Name => 2,
        Urgency::Normal => NORMAL,
    }
}

impl Tickets {
    /// Whether nobody waits whom a request of `urgency` would overtake. A commit overtakes
    /// everybody.
    pub(crate) fn none_before(&self, urgency: Urgency) -> bool {
        urgency == Urgency::Commit
            || self.queues[..=queue_of(urgency)].iter().all(VecDeque::is_empty)
    }

    /// A new ticket at the end of its queue.
    pub(crate) fn enqueue(&mut self, request: Request, urgency: Urgency) -> Arc<Ticket> {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let outcome = Mutex::new(Rank::LEAF, Outcome::Waiting);
        let caller = caller::current();
        let ticket = Arc::new(Ticket {
            request,
            urgency,
            sequence,
            caller,
            began: now_monotonic(),
            outcome,
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

    /// Somebody waited from `began` until now.
    pub(crate) fn count_waited(&mut self, began: Monotonic) {
        self.waited += 1;
        self.wait_max = self.wait_max.max(began.elapsed());
    }

    /// Takes a waiting ticket off its queue, sets what became of it, and wakes its owner.
    pub(crate) fn finish(&mut self, ticket: &Arc<Ticket>, outcome: Outcome) {
        let previous = std::mem::replace(&mut *ticket.outcome.lock(), outcome);
        assert_eq!(previous, Outcome::Waiting, "a ticket is decided twice");
        let queue = &mut self.queues[queue_of(ticket.urgency)];
        let position = queue
            .iter()
            .position(|other| Arc::ptr_eq(other, ticket))
            .expect("a waiting ticket stands in its queue");
        queue.remove(position);
        self.count_waited(ticket.began);
        match outcome {
            Outcome::Granted => self.granted += 1,
            Outcome::Failed => self.failed += 1,
            _ => {}
        }
        ticket.changed.notify_one();
    }
}
