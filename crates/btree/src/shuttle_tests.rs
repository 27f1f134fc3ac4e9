//! Models: a small tree, few threads, every lock and atomic a point at which the scheduler may
//! switch.
use crate::test_support::{TestVolume, all_items, key, value, version_of};
use crate::{Change, Tree};
use cairn_environment::lock::RwLock;
use cairn_environment::simulation::schedules;
use cairn_environment::{Rank, thread};
use cairn_format::{Generation, Key};
use cairn_space::{Request, Urgency};
use std::sync::Arc;

fn check(model: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(model, schedules(150));
    shuttle::check_pct(model, schedules(150), 3);
}

/// The models of routes have more points at which threads switch.
fn check_routes(model: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(model, schedules(300));
    shuttle::check_pct(model, schedules(300), 4);
}

/// Few points, each of which counts.
fn check_often(model: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(model, schedules(300));
    for depth in 2..5 {
        shuttle::check_pct(model, schedules(300), depth);
    }
}

struct Shared {
    volume: TestVolume,
    tree: Tree,
}

impl Shared {
    /// Keys 0, 2, 4, … with values so large that a leaf holds five. Ascending keys fill them: nine
    /// keys make a leaf of four and one of five.
    fn new(keys: u64, frozen: bool) -> Arc<Shared> {
        let mut volume = TestVolume::new(16 << 20, 1 << 20);
        let tree = volume.create();
        for index in 0..keys {
            volume.insert(&tree, key(2 * index), &value(2 * index, 0, 3_000));
        }
        if frozen {
            volume.commit();
        }
        Arc::new(Shared { volume, tree })
    }

    fn change<T>(&self, operation: impl FnOnce(&Change<'_>) -> T) -> T {
        let reservation = self.volume.reserve(self.tree.worst_case(1));
        operation(&self.volume.change(&reservation))
    }

    fn insert(&self, index: u64, version: u64) -> Option<Vec<u8>> {
        self.change(|change| {
            self.tree
                .insert(change, key(index), &value(index, version, 3_000))
                .expect("insertion works")
        })
    }

    fn remove(&self, index: u64) -> Option<Vec<u8>> {
        self.change(|change| self.tree.remove(change, &key(index)).expect("removal works"))
    }

    /// Commits, and checks what is on the device.
    fn finish(self: Arc<Shared>, expected: &[u64]) {
        let shared = Arc::into_inner(self).expect("all threads have ended");
        let mut volume = shared.volume;
        volume.commit();
        let (items, blocks) = volume.check(shared.tree.root());
        assert_eq!(
            items.keys().copied().collect::<Vec<_>>(),
            expected.iter().map(|index| key(*index)).collect::<Vec<_>>()
        );
        assert_eq!(volume.referenced_blocks(), 4 * blocks.len() as u64);
    }
}

fn spawn(
    shared: &Arc<Shared>,
    task: impl FnOnce(&Shared) + Send + 'static,
) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn("model", move || task(&shared))
}

/// Runs a cursor over everything: keys ascend, and those that stay throughout are among them.
fn assert_cursor_sees(shared: &Shared, lasting: &[u64]) {
    let seen: Vec<Key> =
        shared.tree.range(Key::MIN..=Key::MAX).map(|item| item.expect("readable").0).collect();
    assert!(seen.is_sorted_by(|left, right| left < right), "{seen:?}");
    assert!(lasting.iter().all(|index| seen.contains(&key(*index))), "{seen:?}");
}

fn join_all(threads: Vec<thread::JoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("no panic");
    }
}

/// The root is a full leaf: it grows while others use it.
#[test]
fn growth_beside_a_cursor() {
    for frozen in [false, true] {
        check(move || {
            let shared = Shared::new(5, frozen);
            join_all(vec![
                spawn(&shared, |shared| assert_eq!(shared.insert(1, 1), None)),
                spawn(&shared, |shared| assert_eq!(shared.insert(7, 1), None)),
                spawn(&shared, |shared| assert_cursor_sees(shared, &[0, 2, 4, 6, 8])),
            ]);
            shared.finish(&[0, 1, 2, 4, 6, 7, 8]);
        });
    }
}

/// Two leaves split and are copied side by side, while one writer takes the short way; a cursor
/// runs through them.
#[test]
fn splits_beside_a_cursor() {
    for frozen in [false, true] {
        check(move || {
            let shared = Shared::new(9, frozen);
            assert_eq!(shared.tree.root().level, 1);
            join_all(vec![
                spawn(&shared, |shared| {
                    assert_eq!(shared.insert(1, 1), None);
                    assert_eq!(shared.insert(7, 1), None);
                }),
                spawn(&shared, |shared| assert_eq!(shared.insert(11, 1), None)),
                spawn(&shared, |shared| {
                    assert_eq!(version_of(4, &shared.insert(4, 9).expect("there")), 0)
                }),
                spawn(&shared, |shared| {
                    assert_cursor_sees(shared, &[0, 2, 4, 6, 8, 10, 12, 14, 16])
                }),
            ]);
            shared.finish(&[0, 1, 2, 4, 6, 7, 8, 10, 11, 12, 14, 16]);
        });
    }
}

/// Removals merge or balance the leaves, may collapse the root, while a reader looks for what stays
/// and a writer inserts.
#[test]
fn merges_beside_a_reader() {
    for frozen in [false, true] {
        check(move || {
            let shared = Shared::new(9, frozen);
            assert_eq!(shared.tree.root().level, 1);
            join_all(vec![
                spawn(&shared, |shared| {
                    for index in [0, 2, 4, 6] {
                        assert!(shared.remove(index).is_some());
                    }
                }),
                spawn(&shared, |shared| {
                    for index in [16, 14, 12] {
                        assert!(shared.remove(index).is_some());
                    }
                    assert_eq!(shared.remove(16), None);
                }),
                spawn(&shared, |shared| assert_eq!(shared.insert(9, 1), None)),
                spawn(&shared, |shared| {
                    version_of(8, &shared.tree.get(&key(8)).expect("readable").expect("stays"));
                    let (last, _) =
                        shared.tree.last(Key::MIN..=key(8)).expect("readable").expect("stays");
                    assert_eq!(last, key(8));
                    assert_cursor_sees(shared, &[8, 10]);
                }),
            ]);
            shared.finish(&[8, 9, 10]);
        });
    }
}

/// The commit writes the nodes of the cut while the next transaction changes and frees them.
#[test]
fn a_write_beside_the_next_transaction() {
    check(|| {
        let mut shared = Shared::new(5, false);
        let cut = shared.volume.running;
        let root = shared.tree.root();
        let nodes = shared.volume.cache.take_dirty(cut);
        Arc::get_mut(&mut shared).expect("not shared yet").volume.running = Generation(cut.0 + 1);
        join_all(vec![
            spawn(&shared, |shared| {
                assert!(shared.remove(2).is_some());
                assert_eq!(shared.insert(3, 1), None);
            }),
            spawn(&shared, |shared| assert!(shared.remove(8).is_some())),
            spawn(&shared, move |shared| {
                shared.volume.cache.write(&nodes).expect("the device works");
                let (items, _) = shared.volume.check(root);
                assert!(items.keys().copied().eq([0, 2, 4, 6, 8].map(key)), "the cut's state");
            }),
        ]);
        shared.volume.space.unpin(cut);
        shared.finish(&[0, 3, 4, 6]);
    });
}

/// A cold cache: many want the same nodes, which are read once, and a removal misses a sibling.
#[test]
fn misses_beside_changes() {
    check(|| {
        let shared = Shared::new(9, true);
        let Some(Shared { mut volume, tree }) = Arc::into_inner(shared) else {
            panic!("not shared yet")
        };
        let tree = volume.reopen(tree.root());
        let shared = Arc::new(Shared { volume, tree });
        join_all(vec![
            spawn(&shared, |shared| assert!(shared.remove(0).is_some())),
            spawn(&shared, |shared| assert_eq!(shared.insert(5, 1), None)),
            spawn(&shared, |shared| {
                assert!(shared.tree.get(&key(16)).expect("readable").is_some())
            }),
            spawn(&shared, |shared| assert_cursor_sees(shared, &[2, 4, 6, 8, 10, 12, 14, 16])),
        ]);
        shared.finish(&[2, 4, 5, 6, 8, 10, 12, 14, 16]);
    });
}

/// Every key is known to the routes, so that no lookup needs a lock above the leaves until
/// something changes.
fn warm(shared: &Shared, keys: u64) {
    for index in (0..keys).map(|index| 2 * index) {
        assert!(shared.tree.get(&key(index)).expect("readable").is_some());
    }
}

/// Looks `index` up several times: it stays, and its version never goes back.
fn assert_versions_ascend(shared: &Shared, index: u64) {
    let mut last = 0;
    for _ in 0..4 {
        let version =
            version_of(index, &shared.tree.get(&key(index)).expect("readable").expect("stays"));
        assert!(version >= last, "version {version} of {index} after {last}");
        last = version;
    }
}

/// Lookups and changes in place follow routes while the leaves that they lead to split, are copied
/// and move.
#[test]
fn routes_beside_splits_and_copies() {
    for frozen in [false, true] {
        check_routes(move || {
            let shared = Shared::new(9, frozen);
            warm(&shared, 9);
            join_all(vec![
                spawn(&shared, |shared| {
                    assert_eq!(shared.insert(1, 1), None);
                    assert_eq!(shared.insert(5, 1), None);
                }),
                spawn(&shared, |shared| {
                    for version in 1..4 {
                        assert_eq!(
                            version_of(6, &shared.insert(6, version).expect("there")),
                            version - 1
                        );
                    }
                }),
                spawn(&shared, |shared| assert_versions_ascend(shared, 6)),
                spawn(&shared, |shared| {
                    assert_versions_ascend(shared, 4);
                    assert_cursor_sees(shared, &[0, 2, 4, 6, 8, 10, 12, 14, 16]);
                }),
            ]);
            assert_eq!(
                version_of(6, &shared.tree.get(&key(6)).expect("readable").expect("there")),
                3
            );
            shared.finish(&[0, 1, 2, 4, 5, 6, 8, 10, 12, 14, 16]);
        });
    }
}

/// The same while leaves merge, balance and vanish, and the root with them.
#[test]
fn routes_beside_merges() {
    for frozen in [false, true] {
        check_routes(move || {
            let shared = Shared::new(9, frozen);
            warm(&shared, 9);
            join_all(vec![
                spawn(&shared, |shared| {
                    for index in [2, 0, 4, 6] {
                        assert!(shared.remove(index).is_some());
                    }
                    assert!(shared.tree.get(&key(0)).expect("readable").is_none());
                }),
                spawn(&shared, |shared| {
                    for index in [12, 16, 14] {
                        assert!(shared.remove(index).is_some());
                        assert!(shared.tree.get(&key(index)).expect("readable").is_none());
                    }
                }),
                spawn(&shared, |shared| {
                    for version in 1..4 {
                        assert_eq!(
                            version_of(8, &shared.insert(8, version).expect("there")),
                            version - 1
                        );
                    }
                }),
                spawn(&shared, |shared| {
                    assert_versions_ascend(shared, 8);
                    assert_versions_ascend(shared, 10);
                }),
            ]);
            shared.finish(&[8, 10]);
        });
    }
}

/// The cut freezes what was changed in place a moment ago: the commit writes the state of the cut,
/// a change after it copies, and readers notice nothing.
#[test]
fn routes_beside_the_cut() {
    check_routes(|| {
        let shared = Shared::new(9, false);
        warm(&shared, 9);
        let running = Arc::new(RwLock::new(Rank::TRANSACTION, shared.volume.running));
        let writer = |index: u64| {
            let running = Arc::clone(&running);
            move |shared: &Shared| {
                for version in 1..4 {
                    let reservation = shared.volume.reserve(shared.tree.worst_case(1));
                    let generation = running.read();
                    let change = Change { generation: *generation, reservation: &reservation };
                    let old = shared
                        .tree
                        .insert(&change, key(index), &value(index, version, 3_000))
                        .expect("insertion works");
                    assert_eq!(version_of(index, &old.expect("there")), version - 1);
                }
            }
        };
        let cut = Arc::clone(&running);
        join_all(vec![
            spawn(&shared, writer(4)),
            spawn(&shared, writer(12)),
            spawn(&shared, move |shared| {
                let mut running = cut.write();
                let (nodes, root) = (shared.volume.cache.take_dirty(*running), shared.tree.root());
                let version = |index| {
                    version_of(
                        index,
                        &shared.tree.get(&key(index)).expect("readable").expect("there"),
                    )
                };
                let versions = [4, 12].map(version);
                *running = running.next();
                drop(running);
                shared.volume.cache.write(&nodes).expect("the device works");
                let (items, _) = shared.volume.check(root);
                assert_eq!(
                    [4, 12].map(|index| version_of(index, &items[&key(index)])),
                    versions,
                    "the cut's state"
                );
            }),
            spawn(&shared, |shared| {
                assert_versions_ascend(shared, 4);
                assert_versions_ascend(shared, 12);
            }),
        ]);
        for index in [4, 12] {
            assert_eq!(
                version_of(index, &shared.tree.get(&key(index)).expect("readable").expect("there")),
                3
            );
        }
    });
}

/// Two trees of one volume that is full: what a thread gives back in one of them is the next thing
/// that another thread gets in the other, in the same transaction.
struct TwoTrees {
    volume: TestVolume,
    trees: [Tree; 2],
}

impl TwoTrees {
    /// Both with keys as [`Shared::new`] makes them.
    fn new(keys: u64) -> Arc<TwoTrees> {
        let volume = TestVolume::new(16 << 20, 1 << 20);
        let trees = [volume.create(), volume.create()];
        for (tree, index) in trees.iter().flat_map(|tree| (0..keys).map(move |key| (tree, 2 * key)))
        {
            volume.insert(tree, key(index), &value(index, 0, 3_000));
        }
        let report = volume.space.report();
        let request = Request { data_blocks: report.total_blocks - report.used, nodes: 0 };
        let all = volume.space.try_reserve(request, Urgency::Commit).expect("so many are free");
        while all.data_blocks() > 0 {
            volume.space.allocate_data(&all, all.data_blocks(), None).expect("they are reserved");
        }
        drop(all);
        Arc::new(TwoTrees { volume, trees })
    }

    /// Inserts as soon as there is room for one new node.
    fn insert(&self, tree: usize, index: u64) {
        let one = Request { data_blocks: 0, nodes: 1 };
        let reservation = loop {
            match self.volume.space.try_reserve(one, Urgency::Commit) {
                Ok(reservation) => break reservation,
                Err(_) => thread::yield_now(),
            }
        };
        let change = self.volume.change(&reservation);
        let old = self.trees[tree].insert(&change, key(index), &value(index, 0, 3_000));
        assert_eq!(old.expect("insertion works"), None);
    }

    /// Removes from a tree whose nodes are all of this transaction, which takes no space.
    fn remove(&self, tree: usize, indexes: &[u64]) {
        let none = Request { data_blocks: 0, nodes: 0 };
        let reservation = self.volume.space.try_reserve(none, Urgency::Commit).expect("nothing");
        for index in indexes {
            let old = self.trees[tree].remove(&self.volume.change(&reservation), &key(*index));
            version_of(*index, &old.expect("removal works").expect("there"));
        }
    }

    fn assert_reads(&self, tree: usize, indexes: &[u64]) {
        for index in indexes {
            let found = self.trees[tree].get(&key(*index)).expect("readable").expect("stays");
            version_of(*index, &found);
        }
    }

    /// Commits, and checks what is in memory and on the device.
    fn finish(self: Arc<TwoTrees>, expected: [&[u64]; 2]) {
        let TwoTrees { mut volume, trees } = Arc::into_inner(self).expect("all threads have ended");
        let expected = expected.map(|indexes| indexes.iter().map(|index| key(*index)));
        for (tree, expected) in trees.iter().zip(expected.clone()) {
            assert!(all_items(tree).into_keys().eq(expected), "in memory");
        }
        volume.commit();
        let mut nodes = 0;
        for (tree, expected) in trees.iter().zip(expected) {
            let (items, blocks) = volume.check(tree.root());
            assert!(items.into_keys().eq(expected), "on the device");
            nodes += blocks.len() as u64;
        }
        assert_eq!(volume.referenced_blocks(), 4 * nodes);
    }
}

fn spawn_two(
    both: &Arc<TwoTrees>,
    task: impl FnOnce(&TwoTrees) + Send + 'static,
) -> thread::JoinHandle<()> {
    let both = Arc::clone(both);
    thread::spawn("model", move || task(&both))
}

/// The leaves of each tree hold 0 to 6, 8 to 14, and 16 to 24. The first two merge with the last
/// removal, and the last one is full.
const MERGING: [u64; 6] = [8, 10, 0, 2, 4, 6];

/// A leaf splits into what a merge in the other tree gives back, beside a reader.
#[test]
fn a_split_takes_what_a_merge_gives_back() {
    check_often(|| {
        let both = TwoTrees::new(13);
        join_all(vec![
            spawn_two(&both, |both| both.remove(0, &MERGING)),
            spawn_two(&both, |both| both.insert(1, 17)),
            spawn_two(&both, |both| both.assert_reads(1, &[16, 24, 18])),
        ]);
        both.finish([
            &[12, 14, 16, 18, 20, 22, 24],
            &[0, 2, 4, 6, 8, 10, 12, 14, 16, 17, 18, 20, 22, 24],
        ]);
    });
}

/// Each tree gives back what the other one takes.
#[test]
fn two_splits_take_what_two_merges_give_back() {
    check_often(|| {
        let both = TwoTrees::new(13);
        join_all(vec![
            spawn_two(&both, |both| both.remove(0, &MERGING)),
            spawn_two(&both, |both| both.remove(1, &MERGING)),
            spawn_two(&both, |both| both.insert(0, 17)),
            spawn_two(&both, |both| both.insert(1, 19)),
        ]);
        both.finish([&[12, 14, 16, 17, 18, 20, 22, 24], &[12, 14, 16, 18, 19, 20, 22, 24]]);
    });
}
