//! Numbers and listings of the directories that lead to snapshots, without a mount.
use super::super::subvolume_tests::{new_inode, new_subvolume, new_volume, open};
use super::*;
use cairn_blockdev::Operation as Request;
use cairn_engine::{AttributeChange, RenameMode, TimeChange};
use cairn_environment::random::Seeded;

const fn id(number: u64) -> InodeId {
    InodeId(number)
}

#[test]
fn a_number_stands_for_one_directory() {
    let shown = SnapshotDirectories::default();
    assert_eq!(shown.node(InodeId::ROOT), InodeId::made_up(0));
    let (first, second) = (shown.node(id(70)), shown.node(id(80)));
    assert!(first != second && shown.node(id(70)) == first);
    assert_eq!(shown.live(second).ok(), Some(id(80)));
    assert_eq!(shown.known_node(id(90)), None);
    // A handle of an earlier mount.
    assert_eq!(shown.live(InodeId::made_up(3)).unwrap_err().errno(), Errno::STALE);
}

#[test]
fn each_listing_has_a_time_of_its_own() {
    let mut shown = Shown::new(InodeId::ROOT);
    let listing = |moves, nanoseconds| {
        let changed = Timestamp { seconds: 1, nanoseconds };
        Listing { moves, failures: 0, changed }
    };
    let mut times = vec![shown.changed];
    for moves in 0..50 {
        times.push(shown.changed_by(listing(moves, 0)));
        times.push(shown.changed_by(listing(moves, 1)));
        assert_eq!(shown.changed_by(listing(moves, 1)), times[times.len() - 1]);
    }
    // The clock is set back, and a second ends.
    shown.changed = Timestamp { seconds: i64::MAX / 2, nanoseconds: 999_999_998 };
    times.push(shown.changed);
    times.extend((50..53).map(|moves| shown.changed_by(listing(moves, 0))));
    assert!(times.is_sorted_by(|one, next| one < next), "{times:?}");
    assert!(times.iter().all(|time| time.nanoseconds < 1_000_000_000));
}

/// As the kernel, when the device fails while a directory is listed, and then no more.
#[test]
fn a_listing_that_lacks_something_is_not_kept() {
    let (device, volume) = new_volume();
    for name in [b"one", b"two"] {
        let sub = new_subvolume(&volume, volume.root(), name);
        volume.create_snapshot(sub, b"s").unwrap();
    }
    volume.close().unwrap();
    let mut short = 0;
    for good in 0.. {
        let volume = open(&device);
        let handler = VolumeHandler::new(volume.clone(), false);
        let time = || handler.attributes_as(volume.root()).unwrap().changed;
        let list = || handler.entries(volume.root()).map(|entries| entries.len());
        let before = time();
        let (mut reads, mut has_failed) = (0, false);
        device.fail_when(move |request| {
            reads += u64::from(request.operation == Request::Read);
            let fails = !has_failed && reads > good;
            has_failed |= fails;
            fails
        });
        let listed = list();
        device.clear_failures();
        let is_short = listed.as_ref().is_ok_and(|listed| *listed < 2);
        let after = time();
        assert!(!is_short || after > before, "the kernel keeps {listed:?}");
        assert_eq!(list().unwrap(), 2);
        assert_eq!(time(), after);
        short += u32::from(is_short);
        drop(handler);
        volume.close().unwrap();
        if listed.is_ok_and(|listed| listed == 2) {
            break;
        }
    }
    assert!(short > 0, "nothing was left out");
}

/// As the kernel: what was listed counts as long as the time of change before it stays. Steps
/// are undone again, so listings come back, between the two also.
#[test]
fn a_listing_is_kept_until_it_changes() {
    let (_device, volume) = new_volume();
    let root = volume.root();
    let directory = new_inode(FileType::Directory, 0, 0o755);
    let [one, two] =
        [&b"one"[..], b"two"].map(|name| volume.create(root, name, &directory).unwrap().inode);
    let (sub, other) = (new_subvolume(&volume, one, b"sub"), new_subvolume(&volume, two, b"other"));
    volume.create_snapshot(sub, b"kept").unwrap();
    let flip = |what: usize, is_done: bool| match what {
        0 => {
            let (from, to) = if is_done { (two, one) } else { (one, two) };
            volume.rename(from, b"sub", to, b"sub", RenameMode::NoReplace).unwrap();
        }
        1 => {
            let (old, new) = if is_done { (b"uno", b"one") } else { (b"one", b"uno") };
            volume.rename(root, old, root, new, RenameMode::NoReplace).unwrap();
            // One of the times can be set back.
            let modified = Some(TimeChange::At(Timestamp::default()));
            let change = AttributeChange { modified, ..AttributeChange::default() };
            volume.set_attributes(root, &change).unwrap();
        }
        of => {
            let of = if of == 2 { sub } else { other };
            if is_done {
                let id = volume.subvolume_of(of).unwrap().0;
                volume.delete_snapshot(id, b"s").unwrap();
            } else {
                volume.create_snapshot(of, b"s").unwrap();
            }
        }
    };
    let handler = VolumeHandler::new(volume.clone(), false);
    let list = |live| {
        let entries = handler.entries(live).unwrap().into_iter();
        entries.map(|entry| (entry.name, entry.node)).collect::<Vec<_>>()
    };
    let time = |live| handler.attributes_as(live).unwrap().changed;
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    let (mut random, mut is_done) = (Seeded::new(seed), [false; 4]);
    let mut step = |random: &mut Seeded| {
        let what = random.below(4) as usize;
        flip(what, is_done[what]);
        is_done[what] = !is_done[what];
    };
    let live = [root, one, two, sub, other];
    let mut kept = live.map(|live| (time(live), list(live)));
    let (mut listings, mut changes) = (BTreeSet::new(), 0);
    for at in 0..400 {
        for (live, kept) in live.iter().zip(&mut kept) {
            let (before, now) = (kept.0, time(*live));
            assert!(now >= before, "seed {seed}, step {at}: {before:?}, then {now:?}");
            if now > before {
                if random.below(3) == 0 {
                    step(&mut random);
                }
                *kept = (now, list(*live));
                changes += 1;
            } else {
                assert_eq!(kept.1, list(*live), "seed {seed}, step {at}: {live:?}");
            }
            listings.insert((*live, kept.1.clone()));
        }
        if random.below(2) == 0 {
            step(&mut random);
        }
    }
    assert!(listings.len() >= 10 && changes >= 100, "{listings:?}, {changes} changes");
    drop(handler);
    volume.close().unwrap();
}
