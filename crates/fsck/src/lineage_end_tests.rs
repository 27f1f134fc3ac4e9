//! Subvolumes that were removed before the forks of their snapshots: each state is in order, and
//! what contradicts it is found.
use crate::TreeReader;
use crate::dump::dump_tree;
use crate::fork_tests::expect_in;
use crate::test_lineage_ends::*;
use crate::test_snapshots::SnapshotVolume;
use cairn_format::*;

/// Fails unless a check finds nothing, and counts so many inodes.
#[track_caller]
fn expect_in_order(built: &mut SnapshotVolume, inodes: u64) {
    built.volume.superblock.inodes = inodes;
    built.write();
    built.volume.assert_clean();
}

/// The states of the base, one after the other. In even ones a tree is being removed: its own, then
/// those of its three snapshots, the newest first. After each of them it is headless, and at last
/// gone.
const STATES: usize = 8;

/// The base in a state, in which the removal has come to the cursor; and how many inodes count.
fn at(state: usize, is_fork: bool, cursor: Key) -> (SnapshotVolume, u64) {
    let mut built = full(is_fork);
    for step in 0..=state {
        let cursor = if step == state { cursor } else { Key::MIN };
        match step {
            0 => lose_name(&mut built, cursor),
            7 => built.end(BASE),
            step if step % 2 == 0 => bury_newest(&mut built, cursor),
            _ => end_part(&mut built),
        }
    }
    let with_base = state == 0 && !is_fork && cursor == Key::MIN;
    (built, INODES + if with_base { INODES_OF_BASE } else { 0 })
}

/// The tree that is being removed in such a state, if one is.
fn dying_root(built: &mut SnapshotVolume) -> Option<NodePointer> {
    if !built.volume.subvolumes.contains_key(&BASE) {
        return None;
    }
    let item = *item_of(built, BASE);
    let own = built.lineage(BASE).root;
    item.is_dying.then(|| item.dying_root.unwrap_or(own))
}

#[test]
fn each_state_is_in_order() {
    let mut cursors = 0;
    for (is_fork, state) in (0..STATES).flat_map(|state| [(true, state), (false, state)]) {
        let (mut built, inodes) = at(state, is_fork, Key::MIN);
        let root = dying_root(&mut built);
        expect_in_order(&mut built, inodes);
        let ends = root.map(|root| ends_of_nodes(&built, root.block)).unwrap_or_default();
        for cursor in ends {
            let (mut built, inodes) = at(state, is_fork, cursor);
            expect_in_order(&mut built, inodes);
            cursors += 1;
        }
    }
    assert!(cursors > 20, "{cursors}");
}

/// A snapshot that no fork needs any more may have to wait.
#[test]
fn the_newest_snapshot_may_wait() {
    for is_fork in [true, false] {
        let (mut built, inodes) = at(1, is_fork, Key::MIN);
        let id = FORKS[2];
        built.volume.remove_subvolume_name(id, INODE_ROOT.0, "fork three");
        built.remove_subvolume(id);
        built.commit();
        expect_in_order(&mut built, inodes);
        // Another one has no reason to.
        let id = FORKS[1];
        built.volume.remove_subvolume_name(id, INODE_ROOT.0, "fork two");
        built.remove_subvolume(id);
        built.commit();
        built.write();
        expect_in("but no fork of it", &built.volume);
    }
}

#[track_caller]
fn expect(state: usize, text: &str, change: impl Fn(&mut SnapshotVolume)) {
    for is_fork in [true, false] {
        let (mut built, inodes) = at(state, is_fork, Key::MIN);
        built.volume.superblock.inodes = inodes;
        change(&mut built);
        built.write();
        expect_in(text, &built.volume);
    }
}

#[test]
fn contradictions_are_found() {
    for state in [0, 1, 2] {
        expect(state, "has lost its name, but has a snapshot of", |built| {
            let mut newest = built.lineage(BASE).snapshots.last_entry().unwrap();
            let item = newest.get_mut();
            (item.is_hidden, item.name) = (false, b"name".to_vec());
        });
        expect(state, "a cleanup in lists since its snapshot", |built| {
            let newest = *built.lineage(BASE).snapshots.last_key_value().unwrap().0;
            let cleanup = CleanupItem {
                oldest: newest,
                lists_from: newest.next(),
                lists_to: newest.next().next(),
            };
            built.lineage(BASE).cleanups.insert(newest.next(), cleanup);
        });
        expect(state, "is to be shown by default, but is being removed", |built| {
            built.volume.superblock.default_subvolume = BASE;
        });
        expect(state, "is in subvolume 257, which is being removed", |built| {
            item_of(built, FORKS[0]).parent = BASE;
        });
        expect(state, "but has no snapshot", |built| {
            let lineage = built.lineage(BASE);
            lineage.snapshots.clear();
            let item = item_of(built, BASE);
            (item.is_dying, item.is_headless, item.dying_root) = (false, true, None);
        });
    }
    expect(0, "dead lists without snapshots", |built| built.lineage(BASE).snapshots.clear());
    for state in [1, 2] {
        expect(state, "is headless, but has a tree of files", |built| {
            let root = built.lineage(FORKS[0]).root;
            built.headless.clear();
            built.lineage(BASE).root = root;
        });
        expect(state, "but the superblock says that there are no forks", |built| {
            built.volume.superblock.features.incompatible &= !Features::FORKS;
        });
    }
    expect(1, "is headless, but has a dead list since", |built| {
        let newest = *built.lineage(BASE).snapshots.last_key_value().unwrap().0;
        let list = DeadListItem { list: built.volume.superblock.next_list };
        built.volume.superblock.next_list += 1;
        built.lineage(BASE).lists.insert(newest, list);
    });
    for state in [0, 2] {
        expect(state, "impossible in a list that is discarded", |built| {
            let newest = *built.lineage(BASE).snapshots.last_key_value().unwrap().0;
            let list = built.lineage(BASE).lists.last_key_value().unwrap().1.list;
            let added = built.generation();
            let range = BlockRange::new(BlockNumber(800), 1);
            let run = DeadRun { range, birth: newest.next(), is_node: false };
            built.dead.entry((list, added)).or_default().push(run);
        });
    }
    expect(2, "leads outside the volume", |built| {
        let root = NodePointer { block: BlockNumber(1 << 40), generation: Generation(5), level: 0 };
        item_of(built, BASE).dying_root = Some(root);
    });
}

/// What the newest snapshot has counts, and so does what is left of the one before.
#[test]
fn blocks_of_snapshots_that_count_are_in_use() {
    for state in [0, 1, 2] {
        for is_fork in [true, false] {
            let (mut built, _) = at(state, is_fork, Key::MIN);
            let newest = built.lineage(BASE).snapshots.last_key_value().unwrap().1.root.block;
            let dying = dying_root(&mut built).map(|root| root.block);
            for block in [Some(newest), dying].into_iter().flatten() {
                let (mut built, _) = at(state, is_fork, Key::MIN);
                built.lineage(BASE).blocks.remove(&block.0).unwrap();
                built.write();
                built.volume.assert_error("1 blocks in use are marked free");
            }
        }
    }
}

#[test]
fn a_plain_subvolume_has_no_cursor() {
    let mut built = full(true);
    let id = built.plain_subvolume("plain");
    built.commit();
    built.within(id, SnapshotVolume::commit);
    built.volume.remove_subvolume_name(id, INODE_ROOT.0, "plain");
    built.commit();
    let item = item_of(&mut built, id);
    (item.is_dying, item.cursor.inode) = (true, 1);
    built.write();
    expect_in("has a cursor, but shares nothing", &built.volume);
}

#[test]
fn a_dump_shows_the_states() {
    for (state, text) in [(0, ", dying"), (1, ", headless"), (2, ", headless, dying")] {
        let (mut built, _) = at(state, true, Key::MIN);
        built.write();
        let dump = dump_tree(&built.volume.device, TREE_SUBVOLUMES, None).unwrap().to_string();
        let line = dump.lines().find(|line| line.contains("fork of the snapshot of"));
        assert!(line.is_some_and(|line| line.ends_with(text)), "{state}: {dump}");
        assert_eq!(dump.contains("gives up the tree at"), state == 2);
    }
}

/// What was removed is not among what can be copied out.
#[test]
fn what_has_no_name_is_not_extracted() {
    for state in 0..STATES {
        let (mut built, _) = at(state, true, Key::MIN);
        built.write();
        let reader = TreeReader::open(&built.volume.device, &mut |_| {}).unwrap();
        assert!(reader.findings().is_empty(), "{state}");
        assert!(reader.subvolumes().all(|id| id != BASE), "{state}");
        assert_eq!(reader.subvolumes().count(), 4 - state / 2, "{state}");
    }
}

/// A bit of a field that says where the subvolume stands is another one.
#[test]
fn changed_items_are_found() {
    let fields = [32..40, 64..80, 97..98, 104..120];
    let mut changed = 0;
    for (state, byte) in
        (0..3).flat_map(|state| fields.clone().into_iter().flatten().map(move |byte| (state, byte)))
    {
        for bit in [0, 1, 6] {
            let (mut built, inodes) = at(state, true, Key::MIN);
            built.volume.superblock.inodes = inodes;
            let item = item_of(&mut built, BASE);
            let mut bytes = item.encode();
            bytes[byte] ^= 1 << bit;
            let Ok(other) = SubvolumeItem::decode(&bytes) else { continue };
            if other == (SubvolumeItem { names_others: true, ..*item }) {
                // It may have been removed before names of its origin's subvolumes were.
                continue;
            }
            *item = other;
            built.write();
            let report = built.volume.check();
            assert!(report.errors > 0, "state {state}, byte {byte}, bit {bit}: {other:?}");
            changed += 1;
        }
    }
    assert!(changed > 60, "{changed}");
}
