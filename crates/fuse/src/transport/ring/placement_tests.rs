use super::*;
use rustix::thread::CpuSet;
use std::collections::HashSet;

fn is_idle(queue: &ThreadPlacement) -> bool {
    !kernel::has_normal_policy(queue.thread_id.load(Ordering::Relaxed))
}

/// A yielding queue, whose thread waits until the channel is closed.
fn yielding_queue() -> (Arc<ThreadPlacement>, std::sync::mpsc::Sender<()>, JoinHandle<()>) {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (made, queue) = std::sync::mpsc::channel();
    let thread = thread::spawn("queue", move || {
        let own = Arc::new(ThreadPlacement::default());
        let _manner = YieldPolicy::new(Arc::clone(&own), None);
        own.begin_to_yield(|| ());
        own.waiting.store(true, Ordering::SeqCst);
        made.send(own).unwrap();
        let _closed = ended.recv();
    });
    (queue.recv().unwrap(), end, thread)
}

#[test]
fn a_thread_that_has_work_and_does_not_run_is_rescued() {
    if !may_yield() {
        return eprintln!("left out: this user may not take SCHED_IDLE back");
    }
    let (queue, end, thread) = yielding_queue();
    let mut sample = QueueSample::default();
    assert!(
        sample.update(&queue, |_| Activity::Runnable) && is_idle(&queue),
        "it may just have begun"
    );
    queue.rounds.fetch_add(1, Ordering::Relaxed);
    assert!(
        sample.update(&queue, |_| Activity::Runnable) && is_idle(&queue),
        "it has done something"
    );
    queue.waiting.store(false, Ordering::SeqCst);
    assert!(sample.update(&queue, |_| Activity::Runnable));
    assert!(
        !is_idle(&queue) && queue.kind() == RESCUED && queue.starved.load(Ordering::Relaxed) == 1
    );
    // It was about to set the policy.
    queue.set_policy(true);
    assert!(sample.update(&queue, |_| Activity::Runnable) && is_idle(&queue), "the word is new");
    assert!(
        sample.update(&queue, |_| Activity::Runnable)
            && !is_idle(&queue)
            && queue.kind() == RESCUED
    );
    queue.waiting.store(true, Ordering::SeqCst);
    assert!(sample.update(&queue, |_| Activity::Sleeping) && queue.kind() == RESCUED);
    assert!(sample.update(&queue, |_| Activity::Other) && queue.kind() == NORMAL);
    assert!(!sample.update(&queue, |_| panic!("nothing to look at")));
    drop(end);
    thread.join().unwrap();
}

#[test]
fn a_queue_without_requests_becomes_normal() {
    if !may_yield() {
        return eprintln!("left out: this user may not take SCHED_IDLE back");
    }
    let (queue, end, thread) = yielding_queue();
    let mut sample = QueueSample::default();
    for _ in 0..=QUIET_TICKS {
        assert!(sample.update(&queue, |_| Activity::Sleeping) && is_idle(&queue));
    }
    assert!(sample.update(&queue, |_| Activity::Sleeping));
    assert!(
        !is_idle(&queue) && queue.kind() == NORMAL && queue.starved.load(Ordering::Relaxed) == 0
    );
    drop(end);
    thread.join().unwrap();
}

/// A thread that a handler starts has a normal policy: the watcher does not check it.
#[test]
fn a_thread_that_a_yielding_one_starts_has_the_normal_policy() {
    if !may_yield() {
        return eprintln!("left out: this user may not take SCHED_IDLE back");
    }
    let queue = thread::spawn("queue", || {
        let own = Arc::new(ThreadPlacement::default());
        let _manner = YieldPolicy::new(Arc::clone(&own), None);
        own.begin_to_yield(|| ());
        assert!(is_idle(&own));
        let is_normal = thread::spawn("work", || kernel::has_normal_policy(kernel::thread_id()))
            .join()
            .unwrap();
        assert!(is_normal && !is_idle(&own) && own.kind() == NORMAL);
    });
    queue.join().unwrap();
}

/// No watcher checks it, so nothing else stops the yielding.
#[test]
fn a_queue_yields_while_requests_come_one_by_one_and_are_answered_at_once() {
    if !may_yield() {
        return eprintln!("left out: this user may not take SCHED_IDLE back");
    }
    let served = thread::spawn("queue", || {
        let own = Arc::new(ThreadPlacement::default());
        let state = WatcherState {
            queues: Vec::new(),
            awake: AtomicBool::new(false),
            ended: Mutex::new(Rank::FUSE, false),
            change: Condvar::new(),
        };
        let mut policy = YieldPolicy::new(Arc::clone(&own), Some(Arc::new(state)));
        until_it_yields(&mut policy);
        assert!(is_idle(&own));
        // A thread that waits for others stops yielding at once.
        thread::will_block();
        assert!(!is_idle(&own) && own.kind() == NORMAL);
        policy.end_round(RoundKind::Alone);
        assert!(!policy.yields && policy.penalty == PENALTY_MIN);
        // Requests that come together, and a slow one, stop it as well.
        until_it_yields(&mut policy);
        for _ in 0..SCORE_MAX {
            policy.end_round(RoundKind::Reading);
            assert!(policy.yields && is_idle(&own));
        }
        for _ in 0..SCORE_MAX {
            policy.end_round(RoundKind::Others);
        }
        assert!(!policy.yields && !is_idle(&own) && policy.penalty == PENALTY_MIN);
    });
    served.join().unwrap();
}

fn until_it_yields(policy: &mut YieldPolicy) {
    while !policy.yields {
        policy.end_round(RoundKind::Alone);
    }
}

/// With the real watcher, and a computing program on the same CPU.
#[test]
fn a_queue_that_yields_is_kept_from_starving() {
    if !may_yield() {
        return eprintln!("left out: this user may not take SCHED_IDLE back");
    }
    let watcher = Watcher::start(2);
    let (join, queue) = (watcher.joiner(0), Arc::clone(&watcher.queues[0]));
    let all_done = Arc::new(AtomicBool::new(false));
    let hog_done = Arc::clone(&all_done);
    let served = thread::spawn("queue", move || {
        let mut cpu = CpuSet::new();
        cpu.set(rustix::thread::sched_getcpu());
        rustix::thread::sched_setaffinity(None, &cpu).unwrap();
        let mut policy = join();
        let hog = thread::spawn("hog", move || {
            rustix::thread::sched_setaffinity(None, &cpu).unwrap();
            while !hog_done.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        while policy.penalty == PENALTY_MIN {
            policy.end_round(RoundKind::Alone);
        }
        assert!(!policy.yields);
        all_done.store(true, Ordering::Relaxed);
        hog.join().unwrap();
    });
    served.join().unwrap();
    assert_eq!(queue.kind(), NORMAL);
}

#[test]
fn the_activity_of_a_thread_is_reported() {
    assert_eq!(activity(kernel::thread_id()), Activity::Runnable);
    assert_eq!(activity(i32::MAX), Activity::Other);
}

/// The protocol between a queue's thread and the watcher, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Model {
    kind: u64,
    epoch: u8,
    idle: bool,
    waiting: bool,
    thread: ThreadStep,
    watcher: WatcherStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ThreadStep {
    /// Between two calls.
    Free,
    /// In `begin_to_yield`, before the policy.
    SetIdle,
    /// In `be_normal`, before the policy, with the word that it has read.
    SetNormal(u8),
    /// In `be_normal`, before the word.
    StoreNormal(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum WatcherStep {
    Free,
    /// It has read this kind and epoch.
    Read(u64, u8),
    /// And whether the thread waits.
    Decided(u64, u8, bool),
    SetNormal,
}

impl Model {
    fn steps(self) -> Vec<Self> {
        let mut next = Vec::new();
        match self.thread {
            ThreadStep::Free if self.waiting => next.push(Self { waiting: false, ..self }),
            ThreadStep::Free => {
                next.push(Self { waiting: true, ..self });
                if self.kind == NORMAL && self.epoch < 3 {
                    next.push(Self {
                        kind: YIELDING,
                        epoch: self.epoch + 1,
                        thread: ThreadStep::SetIdle,
                        ..self
                    });
                }
                if self.kind != NORMAL {
                    next.push(Self { thread: ThreadStep::SetNormal(self.epoch), ..self });
                }
            }
            ThreadStep::SetIdle => next.push(Self { idle: true, thread: ThreadStep::Free, ..self }),
            ThreadStep::SetNormal(epoch) => {
                next.push(Self { idle: false, thread: ThreadStep::StoreNormal(epoch), ..self })
            }
            ThreadStep::StoreNormal(epoch) => {
                next.push(Self { kind: NORMAL, epoch, thread: ThreadStep::Free, ..self })
            }
        }
        match self.watcher {
            WatcherStep::Free if self.kind != NORMAL => {
                next.push(Self { watcher: WatcherStep::Read(self.kind, self.epoch), ..self })
            }
            WatcherStep::Free => {}
            WatcherStep::Read(kind, epoch) => {
                next.push(Self { watcher: WatcherStep::Decided(kind, epoch, self.waiting), ..self })
            }
            WatcherStep::Decided(kind, epoch, waiting) => {
                next.push(if (kind, epoch) == (self.kind, self.epoch) {
                    Self {
                        kind: if waiting { NORMAL } else { RESCUED },
                        watcher: WatcherStep::SetNormal,
                        ..self
                    }
                } else {
                    Self { watcher: WatcherStep::Free, ..self }
                })
            }
            WatcherStep::SetNormal => {
                next.push(Self { idle: false, watcher: WatcherStep::Free, ..self })
            }
        }
        next
    }
}

/// In every interleaving, the watcher checks a thread with SCHED_IDLE, or is just making it normal.
#[test]
fn no_thread_is_left_with_the_idle_policy() {
    let first = Model {
        kind: NORMAL,
        epoch: 0,
        idle: false,
        waiting: false,
        thread: ThreadStep::Free,
        watcher: WatcherStep::Free,
    };
    let (mut sample, mut open) = (HashSet::from([first]), vec![first]);
    while let Some(model) = open.pop() {
        assert!(
            !model.idle || model.kind != NORMAL || model.watcher == WatcherStep::SetNormal,
            "{model:?}"
        );
        open.extend(model.steps().into_iter().filter(|next| sample.insert(*next)));
    }
    assert!(
        sample.len() > 100
            && sample.iter().any(|model| model.idle)
            && sample.iter().any(|model| model.kind == RESCUED),
        "{}",
        sample.len()
    );
}
