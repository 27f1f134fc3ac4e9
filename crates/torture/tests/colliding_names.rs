//! Names whose hashes are equal share slots: none hides another, whichever of them goes first, and
//! a listing goes on behind each of them.
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::mkfs::mkfs;
use cairn_engine::{Error, InodeId, RenameMode, Volume, VolumeOptions, XattrMode};
use cairn_torture::colliding::{NAMES, XATTR_NAMES};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{NEW_FILE, mkfs_options};
use std::collections::BTreeMap;
use std::sync::Arc;

type Names = BTreeMap<Vec<u8>, InodeId>;

fn volume() -> (Arc<MemoryDevice>, Volume) {
    let device = Arc::new(MemoryDevice::new(32 << 20));
    mkfs(&*device, &mkfs_options(1 << 20)).expect("a new volume");
    let volume = open(&device);
    (device, volume)
}

fn open(device: &Arc<MemoryDevice>) -> Volume {
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

fn make_all(volume: &Volume) -> Names {
    let names = NAMES.iter().flatten().map(|name| name.as_bytes().to_vec());
    names
        .map(|name| {
            let inode = volume.create(volume.root(), &name, &NEW_FILE).expect("space").inode;
            volume.forget(inode, 1);
            (name, inode)
        })
        .collect()
}

/// Names with their cookies, from `cookie` on.
fn listed(volume: &Volume, cookie: u64) -> Vec<(Vec<u8>, u64)> {
    let mut found = Vec::new();
    let read = volume.read_directory(volume.root(), cookie, &mut |item| {
        found.push((item.name.to_vec(), item.cookie));
        true
    });
    read.expect("it is healthy");
    found
}

fn expect(volume: &Volume, names: &Names) {
    for name in NAMES.iter().flatten().map(|name| name.as_bytes()) {
        let found = volume.lookup(volume.root(), name);
        match (found, names.get(name)) {
            (Ok(found), Some(inode)) => {
                volume.forget(found.inode, 1);
                assert_eq!(found.inode, *inode, "{}", String::from_utf8_lossy(name));
            }
            (Err(Error::NotFound), None) => {}
            (found, expected) => panic!("{name:?}: {found:?}, expected {expected:?}"),
        }
    }
    let mut found: Vec<Vec<u8>> = listed(volume, 0).into_iter().map(|(name, _)| name).collect();
    found.sort();
    assert_eq!(found, names.keys().cloned().collect::<Vec<_>>());
}

#[test]
fn each_of_a_pair_goes_alone() {
    for first_goes in [0, 1] {
        let (device, volume) = volume();
        let mut names = make_all(&volume);
        for pair in NAMES.iter().flat_map(|names| names.chunks(2)) {
            let gone = pair[first_goes].as_bytes();
            volume.unlink(volume.root(), gone).expect("it is there");
            names.remove(gone);
            expect(&volume, &names);
            assert_eq!(
                volume.unlink(volume.root(), gone).unwrap_err().to_string(),
                Error::NotFound.to_string()
            );
        }
        volume.close().expect("it closes");
        expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
        let volume = open(&device);
        expect(&volume, &names);
        // The free slot of a pair is taken again.
        for (name, inode) in make_missing(&volume, &names) {
            names.insert(name, inode);
        }
        expect(&volume, &names);
    }
}

fn make_missing(volume: &Volume, names: &Names) -> Names {
    let all = NAMES.iter().flatten().map(|name| name.as_bytes().to_vec());
    all.filter(|name| !names.contains_key(name))
        .map(|name| {
            let inode = volume.create(volume.root(), &name, &NEW_FILE).expect("space").inode;
            volume.forget(inode, 1);
            (name, inode)
        })
        .collect()
}

#[test]
fn one_of_a_pair_is_renamed_over_the_other_or_changes_places_with_it() {
    let (_, volume) = volume();
    let root = volume.root();
    let mut names = make_all(&volume);
    for names_of_client in &NAMES {
        let [first, second, third, fourth, ..] = names_of_client.map(str::as_bytes);
        volume.rename(root, first, root, second, RenameMode::Replace).expect("both are there");
        let moved = names.remove(first).expect("it was made");
        names.insert(second.to_vec(), moved);
        expect(&volume, &names);
        volume.rename(root, third, root, fourth, RenameMode::Exchange).expect("both are there");
        let [one, other] = [third, fourth].map(|name| names[name]);
        names.extend([(third.to_vec(), other), (fourth.to_vec(), one)]);
        expect(&volume, &names);
        volume.rename(root, third, root, first, RenameMode::NoReplace).expect("the name is free");
        let moved = names.remove(third).expect("it was made");
        names.insert(first.to_vec(), moved);
        expect(&volume, &names);
    }
}

/// A program reads some names, removes them, and goes on: it meets each other name exactly once.
#[test]
fn a_listing_goes_on_behind_every_name_though_it_went() {
    for read in 0..=NAMES.iter().flatten().count() {
        let (_, volume) = volume();
        make_all(&volume);
        let all = listed(&volume, 0);
        let cookie = read.checked_sub(1).map_or(0, |last| all[last].1);
        for (name, _) in &all[..read] {
            volume.unlink(volume.root(), name).expect("it is there");
        }
        assert_eq!(listed(&volume, cookie), all[read..], "behind {read} names");
    }
}

#[test]
fn attributes_of_a_pair_are_two() {
    let (device, volume) = volume();
    let file = volume.create(volume.root(), b"file", &NEW_FILE).expect("space").inode;
    let value = |index: usize| vec![index as u8; 10 + 6000 * index];
    for (index, name) in XATTR_NAMES.iter().enumerate() {
        volume.set_xattr(file, name.as_bytes(), &value(index), XattrMode::Create).expect("space");
    }
    for (index, name) in XATTR_NAMES.iter().enumerate() {
        assert_eq!(volume.get_xattr(file, name.as_bytes()).expect("it is there"), value(index));
    }
    for pair in [0, 2, 4] {
        volume.remove_xattr(file, XATTR_NAMES[pair].as_bytes()).expect("it is there");
        let other = volume.get_xattr(file, XATTR_NAMES[pair + 1].as_bytes());
        assert_eq!(other.expect("it stays"), value(pair + 1));
        // In the slot that is free now; shorter than what it held.
        volume
            .set_xattr(file, XATTR_NAMES[pair].as_bytes(), b"new", XattrMode::Create)
            .expect("space");
        assert_eq!(
            volume.get_xattr(file, XATTR_NAMES[pair].as_bytes()).expect("it is there"),
            b"new"
        );
        assert_eq!(
            volume.get_xattr(file, XATTR_NAMES[pair + 1].as_bytes()).expect("it stays"),
            value(pair + 1)
        );
    }
    volume.forget(file, 1);
    volume.close().expect("it closes");
    expect_clean(&*device).unwrap_or_else(|error| panic!("{error}"));
}
