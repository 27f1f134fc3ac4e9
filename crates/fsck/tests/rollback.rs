//! A power failure at any point of a rollback: before, or all of it, and fsck finds nothing wrong.
mod crashes;
mod history;

use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{FsyncKind, InodeId, RollbackOptions, Volume, VolumeOptions, XattrMode};
use cairn_environment::random::Seeded;
use crashes::Recorded;
use history::{DIRECTORY, FILE, FIRST, device, open, seed};
use std::sync::Arc;

const OLD_NAME: &[u8] = b"home~before-rollback-1";
const ATTRIBUTE: &[u8] = b"user.of";
/// States at each point.
const STATES: usize = 4;

/// Shows the first subvolume at the root, whatever the default is.
fn open_first(device: &Arc<SimulatedDevice>) -> Volume {
    let options =
        VolumeOptions { background: false, subvolume: Some(FIRST), ..VolumeOptions::default() };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

fn text(volume: &Volume, directory: InodeId) -> Option<Vec<u8>> {
    let file = volume.lookup(directory, b"file").ok()?.inode;
    let mut text = Vec::new();
    volume.read(file, 0, 100, &mut text).unwrap();
    Some(text)
}

/// What a volume shows of it.
#[derive(PartialEq, Eq, Debug)]
struct Shown {
    has_old: bool,
    text: Vec<u8>,
    links: u32,
    subvolumes: usize,
    snapshots: usize,
    is_default: bool,
    has_attribute: bool,
    old_has_attribute: bool,
}

fn shown(volume: &Volume) -> Shown {
    let root = volume.root();
    let home = volume.lookup(root, b"home").expect("there is always one").inode;
    let old = volume.lookup(root, OLD_NAME).ok().map(|found| found.inode);
    let id = volume.subvolume_of(home).unwrap().0;
    let all = volume.subvolumes().unwrap();
    let attribute = |root| volume.get_xattr(root, ATTRIBUTE).ok();
    assert!(volume.lookup(old.unwrap_or(home), b"nested").is_ok());
    Shown {
        has_old: old.is_some(),
        text: text(volume, home).unwrap(),
        links: volume.attributes(root).unwrap().links,
        subvolumes: all.len(),
        snapshots: volume.snapshots(id).unwrap().len(),
        is_default: all.iter().any(|info| info.id == id && info.is_default),
        has_attribute: attribute(home) == Some(id.to_string().into_bytes()),
        old_has_attribute: old.is_some_and(|old| attribute(old).is_some()),
    }
}

#[test]
fn a_crash_leaves_all_of_it_or_nothing() {
    let random = Seeded::new(seed());
    let device = device();
    let volume = open(&device, false);
    let root = volume.root();
    let home = volume.create_subvolume(root, b"home", &DIRECTORY).unwrap().inode;
    let id = volume.subvolume_of(home).unwrap().0;
    let file = volume.create(home, b"file", &FILE).unwrap().inode;
    volume.write(file, 0, b"then").unwrap();
    // What the fork has to leave out, and to finish.
    volume.create_subvolume(home, b"nested", &DIRECTORY).unwrap();
    let unnamed = volume.create_unnamed(home, &FILE).unwrap().inode;
    let then = volume.create_snapshot(home, b"then").unwrap().root;
    volume.write(file, 0, b"now ").unwrap();
    volume.set_xattr(home, ATTRIBUTE, id.to_string().as_bytes(), XattrMode::Any).unwrap();
    volume.set_default_subvolume(id).unwrap();
    volume.sync().unwrap();

    device.start_recording();
    let carried = |_: &[u8], _, new: u64| Some(new.to_string().into_bytes());
    let options = RollbackOptions { permits: &|_| Ok(()), carried: Some((ATTRIBUTE, &carried)) };
    // An fsync of something else meanwhile makes the log follow.
    volume.write(unnamed, 0, b"x").unwrap();
    volume.fsync_blocking(unnamed, FsyncKind::Full).unwrap();
    let done = volume.rollback_with(root, b"home", then, options).unwrap();
    let ended = device.explorer().history_len();
    let forked = volume.lookup(done.root, b"file").unwrap().inode;
    volume.write(forked, 0, b"late").unwrap();
    volume.fsync_blocking(forked, FsyncKind::Full).unwrap();
    let written = device.explorer().history_len();

    let before = Shown {
        has_old: false,
        text: b"now ".to_vec(),
        links: 3,
        subvolumes: 3,
        snapshots: 1,
        is_default: true,
        has_attribute: true,
        old_has_attribute: false,
    };
    let after = |text: &[u8]| Shown {
        has_old: true,
        text: text.to_vec(),
        links: 4,
        subvolumes: 4,
        snapshots: 1,
        is_default: true,
        has_attribute: true,
        old_has_attribute: false,
    };
    let (ended, outcomes) = ([ended, written], [before, after(b"then"), after(b"late")]);
    let recorded = Recorded { device, random, ended, outcomes };
    recorded.crash_everywhere(STATES, open_first, shown, |_, _, _| {});
}
