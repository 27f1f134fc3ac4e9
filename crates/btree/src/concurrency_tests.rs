use crate::test_support::{Model, TestVolume, all_items, assert_same, key, value, version_of};
use crate::{Change, Tree};
use cairn_environment::atomic::{AtomicBool, AtomicU64, Ordering};
use cairn_environment::lock::RwLock;
use cairn_environment::random::Seeded;
use cairn_environment::{Rank, thread};
use cairn_format::{Generation, Key};
use cairn_space::{Request, Urgency};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A tree that threads share, with a transaction that they join and a committer cuts.
pub(crate) struct Shared {
    pub(crate) volume: TestVolume,
    pub(crate) tree: Tree,
    /// Held shared by the threads that have joined, exclusively by the cut.
    running: RwLock<Generation>,
    stop: AtomicBool,
    commits: AtomicU64,
}

impl Shared {
    pub(crate) fn new(cache_bytes: u64) -> Shared {
        let volume = TestVolume::new(256 << 20, cache_bytes);
        let (tree, running) = (volume.create(), RwLock::new(Rank::TRANSACTION, volume.running));
        Shared { volume, tree, running, stop: AtomicBool::new(false), commits: AtomicU64::new(0) }
    }

    /// One joined operation.
    fn joined<T>(&self, operation: impl FnOnce(&Change<'_>) -> T) -> T {
        let request = Request { data_blocks: 0, nodes: self.tree.worst_case(1) };
        let reservation =
            self.volume.space.reserve(request, Urgency::Commit).expect("the volume has room");
        let running = self.running.read();
        operation(&Change { generation: *running, reservation: &reservation })
    }

    pub(crate) fn insert(&self, index: u64, value: &[u8]) -> Option<Vec<u8>> {
        self.joined(|change| self.tree.insert(change, key(index), value).expect("insertion works"))
    }

    fn remove(&self, index: u64) -> Option<Vec<u8>> {
        self.joined(|change| self.tree.remove(change, &key(index)).expect("removal works"))
    }

    /// Cut, write while others go on, unpin.
    pub(crate) fn commit(&self) {
        let mut running = self.running.write();
        let (cut, nodes) = (*running, self.volume.cache.take_dirty(*running));
        *running = cut.next();
        drop(running);
        self.volume.cache.write(&nodes).expect("the device works");
        drop(nodes);
        self.volume.space.unpin(cut);
        self.commits.fetch_add(1, Ordering::SeqCst);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Runs `workers` to their end, while `others` and a committer run until then; then checks the
    /// committed tree.
    fn run(self, workers: Vec<Task>, others: Vec<Task>) -> (Shared, Model) {
        let shared = Arc::new(self);
        let start = |name: &str, task: Task| {
            let shared = Arc::clone(&shared);
            thread::spawn(name, move || task(&shared))
        };
        let mut background: Vec<_> = others.into_iter().map(|task| start("other", task)).collect();
        background.push(start(
            "committer",
            Box::new(|shared: &Shared| {
                while !shared.stopped() {
                    shared.commit();
                    thread::yield_now();
                }
            }),
        ));
        // On a busy machine the workers might have ended before it began.
        while shared.commits.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        let workers: Vec<_> = workers.into_iter().map(|task| start("worker", task)).collect();
        let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join().is_ok()).collect();
        shared.stop.store(true, Ordering::SeqCst);
        let others: Vec<_> = background.into_iter().map(|thread| thread.join().is_ok()).collect();
        assert!(outcomes.into_iter().chain(others).all(|fine| fine), "a thread panicked");
        let shared = Arc::into_inner(shared).expect("all threads have ended");
        shared.commit();
        let (items, blocks) = shared.volume.check(shared.tree.root());
        assert_eq!(
            shared.volume.referenced_blocks(),
            4 * blocks.len() as u64,
            "nodes that are referenced but not reachable"
        );
        assert_same(&all_items(&shared.tree), &items);
        (shared, items)
    }
}

pub(crate) type Task = Box<dyn FnOnce(&Shared) + Send>;

/// Four writers, each with a range of its own, which grows and shrinks, so that leaves are shared
/// at the borders only.
#[test]
fn writers_in_ranges_of_their_own_agree_with_their_models() {
    for cache_bytes in [1 << 20, 64 << 20] {
        let models: Arc<[RwLock<Model>; 4]> =
            Arc::new(std::array::from_fn(|_| RwLock::new(Rank::EXTENTS, Model::new())));
        let writer = |number: usize| -> Task {
            let models = Arc::clone(&models);
            Box::new(move |shared: &Shared| {
                let (mut random, mut model) = (Seeded::new(number as u64), Model::new());
                for step in 0..6_000 {
                    let index = number as u64 * 1_000 + random.below(1_000);
                    if random.chance(if step / 1_500 % 2 == 0 { 4 } else { 1 }, 5) {
                        let value = value(index, step, random.below(900) as usize);
                        assert_eq!(shared.insert(index, &value), model.insert(key(index), value));
                    } else {
                        assert_eq!(shared.remove(index), model.remove(&key(index)));
                    }
                    if step % 16 == 0 {
                        let index = number as u64 * 1_000 + random.below(1_000);
                        assert_eq!(
                            shared.tree.get(&key(index)).expect("readable").as_ref(),
                            model.get(&key(index))
                        );
                    }
                }
                *models[number].write() = model;
            })
        };
        let reader = |seed: u64| -> Task {
            Box::new(move |shared: &Shared| {
                let mut random = Seeded::new(seed);
                while !shared.stopped() {
                    let index = random.below(4_000);
                    if let Some(value) = shared.tree.get(&key(index)).expect("readable") {
                        version_of(index, &value);
                    }
                }
            })
        };
        let (shared, items) = Shared::new(cache_bytes)
            .run((0..4).map(writer).collect(), vec![reader(10), reader(11), reader(12)]);
        let expected =
            models.iter().flat_map(|model| std::mem::take(&mut *model.write())).collect();
        assert_same(&items, &expected);
        assert_eq!(shared.volume.cache.statistics().dirty, 0);
    }
}

/// All writers use the same few keys. A value says what its writer counted, so that each writer's
/// last word is known.
#[test]
fn writers_of_the_same_keys_never_tear_or_lose_a_value() {
    let writer = |number: u64| -> Task {
        Box::new(move |shared: &Shared| {
            let mut random = Seeded::new(number);
            for step in 0..5_000 {
                let index = random.below(300);
                let old = if random.chance(3, 5) {
                    shared.insert(
                        index,
                        &value(index, number + 8 * step, 16 + random.below(1_500) as usize),
                    )
                } else {
                    shared.remove(index)
                };
                if let Some(old) = old {
                    version_of(index, &old);
                }
            }
            // The last word: every writer writes every key of its own residue, and no other
            // touches those now.
            for index in (1_000 + number..1_100).step_by(8) {
                assert_eq!(shared.insert(index, &value(index, number, 100)), None);
            }
        })
    };
    let (_, items) = Shared::new(1 << 20).run((0..8).map(writer).collect(), Vec::new());
    for (index, number) in (1_000..1_100).map(|index| (index, (index - 1_000) % 8)) {
        assert_eq!(version_of(index, &items[&key(index)]), number);
    }
}

/// Cursors run while everything around the keys that stay is inserted and removed: leaves split,
/// merge, move and vanish.
#[test]
fn a_cursor_sees_every_lasting_key_once_and_in_order() {
    let shared = Shared::new(1 << 20);
    let lasting = |index: u64| index % 10 == 3;
    for index in (0..3_000).filter(|index| lasting(*index)) {
        shared.insert(index, &value(index, 1, 120));
    }
    let writer = |number: u64| -> Task {
        Box::new(move |shared: &Shared| {
            let mut random = Seeded::new(number);
            for step in 0..60 {
                let first = random.below(3_000);
                for index in (first..first + 120).filter(|index| !lasting(*index)) {
                    if (step + number).is_multiple_of(2) {
                        shared.insert(index, &value(index, 1, 700));
                    } else {
                        shared.remove(index);
                    }
                }
                // A lasting key's value changes, its key never goes.
                for index in (first..first + 120).filter(|index| lasting(*index) && *index < 3_000)
                {
                    assert!(
                        shared
                            .insert(index, &value(index, step + 2, 16 + random.below(600) as usize))
                            .is_some()
                    );
                }
            }
        })
    };
    let cursor = |seed: u64| -> Task {
        Box::new(move |shared: &Shared| {
            let mut random = Seeded::new(seed);
            let mut rounds = 0;
            while !shared.stopped() || rounds < 3 {
                rounds += 1;
                let first = random.below(1_000);
                let last = first + random.below(1_900);
                let seen: Vec<(Key, Vec<u8>)> = shared
                    .tree
                    .range(key(first)..=key(last))
                    .collect::<Result<_, _>>()
                    .expect("readable");
                assert!(seen.is_sorted_by(|left, right| left.0 < right.0), "keys ascend");
                let seen: BTreeMap<Key, Vec<u8>> = seen.into_iter().collect();
                for index in (first..=last).filter(|index| lasting(*index)) {
                    version_of(
                        index,
                        seen.get(&key(index)).unwrap_or_else(|| panic!("key {index} was not seen")),
                    );
                }
                let (found, _) = shared
                    .tree
                    .last(Key::MIN..=key(last + 10))
                    .expect("readable")
                    .expect("lasting keys");
                assert!(found >= key(last), "a lasting key lies in any ten");
            }
        })
    };
    let (_, items) =
        shared.run((0..4).map(writer).collect(), (0..4).map(|seed| cursor(seed + 20)).collect());
    assert!(
        (0..3_000).filter(|index| lasting(*index)).all(|index| items.contains_key(&key(index)))
    );
}

/// Threads that fill one tree from nothing and empty it again: the root grows and collapses under
/// all of them.
#[test]
fn the_root_grows_and_collapses_under_load() {
    let worker = |number: u64| -> Task {
        Box::new(move |shared: &Shared| {
            for round in 0..12 {
                for index in (number..160).step_by(8) {
                    assert_eq!(shared.insert(index, &value(index, round, 3_000)), None);
                }
                for index in (0..20).rev().map(|step| 8 * step + number) {
                    assert_eq!(
                        version_of(index, &shared.remove(index).expect("inserted before")),
                        round
                    );
                }
            }
        })
    };
    let (shared, items) = Shared::new(64 << 20).run((0..8).map(worker).collect(), Vec::new());
    assert!(items.is_empty());
    assert_eq!(shared.tree.root().level, 0);
}

/// A writer waits for a leaf that is being read, and the cache counts it; then it goes on.
#[test]
fn waits_for_locks_are_counted() {
    let shared = Arc::new(Shared::new(1 << 20));
    shared.insert(1, &value(1, 1, 50));
    let waits = || shared.volume.cache.statistics().leaf_lock_waits;
    let before = waits();
    let writer = shared
        .tree
        .get_with(&key(1), |bytes| {
            assert_eq!(version_of(1, bytes), 1);
            let (writer, seen) = (Arc::clone(&shared), waits());
            assert_eq!(seen, before);
            let writer =
                thread::spawn("writer", move || writer.insert(1, &value(1, 2, 50)).is_some());
            while waits() == seen {
                thread::yield_now();
            }
            writer
        })
        .expect("readable")
        .expect("there");
    assert!(writer.join().expect("no panic"));
    assert_eq!(version_of(1, &shared.tree.get(&key(1)).expect("readable").expect("there")), 2);
}
