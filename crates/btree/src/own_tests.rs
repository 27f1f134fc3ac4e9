//! Two trees that share nodes: each change in one of them ends, and leaves the other as it is; and
//! what a fork made can be given back, in parts.
use crate::Tree;
use crate::test_support::{Model, TestVolume, key};
use cairn_environment::random::Seeded;
use cairn_format::{Generation, Inheritance, Key, TREE_FILES, TreeId};
use cairn_space::Boundary;
use std::sync::Arc;

/// With large values these make a tree of three levels.
const KEYS: u64 = 2600;

fn large(random: &mut Seeded) -> Vec<u8> {
    vec![random.below(256) as u8; 3000]
}

fn all(tree: &Tree) -> Model {
    tree.range(Key::MIN..=Key::MAX).collect::<Result<_, _>>().unwrap()
}

/// A fork of `source` as it was at the last cut.
fn fork(volume: &TestVolume, source: &Tree, number: u64) -> Tree {
    let origin = Generation(volume.running.0 - 1);
    source.boundary().set_list(number);
    source.boundary().set_newest(origin);
    let inheritance = Inheritance { origin, made_until: origin, is_noted: false };
    let boundary = Arc::new(Boundary::default().inheriting(inheritance));
    let (cache, space) = (Arc::clone(&volume.cache), Arc::clone(&volume.space));
    Tree::open_shared(cache, space, TreeId(TREE_FILES.0 + number), source.root(), boundary)
}

#[test]
fn a_fork_and_its_source_go_their_own_ways() {
    let seed = std::env::var("CAIRN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut random = Seeded::new(seed);
    let mut volume = TestVolume::new(1 << 30, 64 << 20);
    let source = volume.create();
    let mut models = [Model::new(), Model::new()];
    for index in 0..KEYS {
        let value = large(&mut random);
        volume.insert(&source, key(index), &value);
        models[0].insert(key(index), value);
    }
    assert_eq!(source.root().level, 2);
    for number in 1..=30 {
        volume.commit();
        let fork = fork(&volume, &source, number);
        models[1] = models[0].clone();
        for _ in 0..60 {
            let side = random.below(2) as usize;
            let tree = [&source, &fork][side];
            let key = key(random.below(KEYS));
            match random.below(8) {
                0 => assert_eq!(volume.remove(tree, key), models[side].remove(&key)),
                1..5 => {
                    let value = large(&mut random);
                    let old = volume.insert(tree, key, &value);
                    assert_eq!(old, models[side].insert(key, value));
                }
                5..7 => assert_eq!(tree.get(&key).unwrap(), models[side].get(&key).cloned()),
                _ if random.below(20) == 0 => drop(volume.commit()),
                _ => {}
            }
        }
        volume.commit();
        assert!(all(&source) == models[0] && all(&fork) == models[1]);
        end_fork(&mut volume, &fork);
        assert!(all(&source) == models[0]);
        // So does what it was made of.
        for run in volume.space.take_dead().into_values().flatten() {
            volume.space.free(run.range, volume.running).unwrap();
        }
        source.boundary().set_newest(Generation(0));
    }
    volume.commit();
    let nodes = volume.check(source.root()).1.len() as u64;
    assert_eq!(volume.referenced_blocks(), nodes * 4);
}

/// What the fork made goes, in parts.
fn end_fork(volume: &mut TestVolume, fork: &Tree) {
    let (mut from, mut parts) = (Some(Key::MIN), 0);
    while let Some(cursor) = from {
        let own = fork.own_nodes(cursor).unwrap();
        from = own.next;
        let reservation = volume.reserve(1);
        fork.release_own(&volume.change(&reservation), own).unwrap();
        parts += 1;
        if parts % 3 == 0 {
            volume.commit();
        }
    }
    volume.commit();
}
