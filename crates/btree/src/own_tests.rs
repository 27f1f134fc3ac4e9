//! Two trees that share nodes: each change in one of them ends, and leaves the other as it is; and
//! what a fork made can be given back, in parts.
use crate::Tree;
use crate::test_support::{Model, TestVolume, key};
use cairn_environment::random::Seeded;
use cairn_format::{Key, TREE_FILES, TreeId};
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

#[test]
fn a_fork_and_its_source_go_their_own_ways() {
    let seed = std::env::var("CAIRN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut random = Seeded::new(seed);
    let mut volume = TestVolume::new(512 << 20, 64 << 20);
    let source = volume.create();
    let mut models = [Model::new(), Model::new()];
    for index in 0..KEYS {
        let value = large(&mut random);
        volume.insert(&source, key(index), &value);
        models[0].insert(key(index), value);
    }
    assert_eq!(source.root().level, 2);
    let origin = volume.running;
    volume.commit();
    source.boundary().set_list(1);
    source.boundary().set_newest(origin);
    models[1] = models[0].clone();
    let boundary = Arc::new(Boundary::default().of_fork(origin));
    let (cache, space) = (Arc::clone(&volume.cache), Arc::clone(&volume.space));
    let id = TreeId(TREE_FILES.0 + 1);
    let fork = Tree::open_shared(cache, space, id, source.root(), boundary);
    for _ in 0..3000 {
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
    // What the fork made goes, and only that.
    let (mut from, mut parts) = (Key::MIN, 0);
    loop {
        let own = fork.own_nodes(from).unwrap();
        let next = own.next;
        let reservation = volume.reserve(1);
        fork.release_own(&volume.change(&reservation), own).unwrap();
        parts += 1;
        match next {
            Some(next) => from = next,
            None => break,
        }
    }
    assert!(parts > 5, "{parts}");
    volume.commit();
    assert!(all(&source) == models[0]);
    let mut dead = 0;
    for run in volume.space.take_dead().into_values().flatten() {
        dead += run.range.blocks;
        volume.space.free(run.range, volume.running).unwrap();
    }
    assert!(dead > 0);
    volume.commit();
    let nodes = volume.check(source.root()).1.len() as u64;
    assert_eq!(volume.referenced_blocks(), nodes * 4);
}
