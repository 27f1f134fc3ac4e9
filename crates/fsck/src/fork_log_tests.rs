//! Volumes with forks that were not unmounted: what the log changes in each tree.
use crate::log_tests::{LogEntry, Logged};
use crate::test_forks::*;
use crate::test_volume::TestVolume;
use cairn_format::*;

fn logged() -> Logged {
    let mut built = full();
    built.make_items();
    built.make_state();
    Logged::of(built.volume)
}

fn extent_key(inode: u64, at: u64) -> Key {
    Key::new(InodeNumber(inode), ItemKind::Extent, at)
}

fn put(volume: &TestVolume, key: Key) -> LogEntry {
    (key, Some(volume.items[&key].clone()), EntryFlags::default())
}

fn removal(key: Key) -> LogEntry {
    (key, None, EntryFlags::default())
}

fn extent(volume: &TestVolume, key: Key) -> Extent {
    Extent::decode(&volume.items[&key]).unwrap()
}

/// The first subvolume removes a file, and the fork keeps a part of it, in one checkpoint after the
/// other or the other way round. Each gives up its own.
#[test]
fn what_one_tree_gives_up_the_other_keeps() {
    let of_origin = |log: &mut Logged| {
        log.volume.unlink(FILE, DIRECTORY, "file-0");
        let (name, _) = TestVolume::entry(FILE, DIRECTORY, "file-0", 0o100644);
        let orphan = Key::new(INODE_ORPHANS, ItemKind::Orphan, FILE);
        log.volume.items.remove(&orphan).unwrap();
        let inode = Key::new(InodeNumber(FILE), ItemKind::Inode, 0);
        let directory = log.inode(InodeNumber(DIRECTORY));
        let entries = [removal(name), removal(inode), removal(extent_key(FILE, 0)), directory];
        log.append_to(TREE_FILES, &entries);
    };
    let of_fork = |log: &mut Logged| {
        let new = log.volume.new_extent(1, ExtentKind::Data);
        let entries = log.volume.within(FORK, |volume| {
            let old = extent(volume, extent_key(FILE, 0));
            let (first, second) = (extent_key(FILE, 0), extent_key(FILE, 1));
            volume.items.insert(first, new.encode());
            volume.items.insert(second, old.slice(1, 1).encode());
            let (key, value, _) = put(volume, first);
            vec![(key, value, EntryFlags::NEW_DATA), put(volume, second)]
        });
        log.append_to(FORK, &entries);
    };
    for fork_first in [false, true] {
        let mut log = logged();
        if fork_first {
            of_fork(&mut log);
            of_origin(&mut log);
        } else {
            of_origin(&mut log);
            of_fork(&mut log);
        }
        log.volume.assert_clean();
        assert_eq!(log.volume.check().statistics.checkpoints, 2);
    }
}

/// Expects an error when the log puts this extent into the fork's file, whose extent before that is
/// its origin's.
#[track_caller]
fn expect(text: &str, change: impl FnOnce(&mut TestVolume, Extent) -> Vec<LogEntry>) {
    let mut log = logged();
    let entries = log.volume.within(FORK, |volume| {
        let old = extent(volume, extent_key(FILE, 0));
        change(volume, old)
    });
    log.append_to(FORK, &entries);
    log.volume.assert_error(text);
}

#[test]
fn the_log_gives_a_fork_nothing_of_others() {
    let entry =
        |at, extent: &Extent| (extent_key(FILE, at), Some(extent.encode()), EntryFlags::default());
    // The origin's blocks, but of another file.
    expect("is not one that this file has from the fork's origin", |volume, _| {
        let other = extent(volume, extent_key(FILE + 3, 0));
        vec![entry(0, &other)]
    });
    // They were born at another time.
    expect("born 5, is not one that this file has from the fork's origin", |_, old| {
        vec![entry(0, &Extent { generation: Generation(5), ..old })]
    });
    expect("is referred to twice", |_, old| vec![entry(0, &old), entry(2, &old)]);
    expect("and written in place by it in 12", |_, old| {
        vec![entry(0, &Extent { written: Generation(12), ..old })]
    });
    // With another birth, in a fork that has no snapshots.
    let mut log = logged();
    let key = extent_key(LARGE + 1, 0);
    let old = log.volume.within(NESTED, |volume| extent(volume, key));
    let (generation, written) = (Generation(12), Generation(12));
    let new = Extent { generation, written, ..old };
    log.append_to(NESTED, &[(key, Some(new.encode()), EntryFlags::default())]);
    log.volume.assert_error("born 12 and has blocks born 6, which a snapshot has");
    // What the origin has written since.
    let mut log = logged();
    let origins = extent(&log.volume, extent_key(LARGE, 5));
    log.append_to(FORK, &[entry(0, &origins)]);
    log.volume.assert_error("is referred to twice");
    // What nobody refers to any more after replay, but is in use before.
    let mut log = logged();
    log.append_to(TREE_FILES, &[removal(extent_key(LARGE, 5))]);
    log.append_to(FORK, &[entry(0, &origins)]);
    log.volume.assert_error("belongs to something else in the superblock's trees");
}

/// A file gets a second name in the fork, in the log alone.
#[test]
fn names_in_the_log_of_a_fork_are_compared() {
    let link = |log: &mut Logged, has_links: bool| {
        let entries = log.volume.within(FORK, |volume| {
            volume.link(FILE + 3, INODE_ROOT.0, "second name");
            let (name, _) = TestVolume::entry(FILE + 3, INODE_ROOT.0, "second name", 0o100644);
            let inode = |inode| Key::new(InodeNumber(inode), ItemKind::Inode, 0);
            let mut entries = vec![put(volume, inode(INODE_ROOT.0)), put(volume, name)];
            entries.extend(has_links.then(|| put(volume, inode(FILE + 3))));
            entries
        });
        log.append_to(FORK, &entries);
    };
    let mut log = logged();
    link(&mut log, true);
    log.volume.assert_clean();
    let mut log = logged();
    link(&mut log, false);
    log.volume.assert_error("says 1 links, but has 2 names");
}
