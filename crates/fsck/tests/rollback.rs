//! A power failure at any point of a rollback: before, or all of it, and fsck finds nothing wrong.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{
    FileType, FsyncKind, InodeId, NewInode, RollbackOptions, Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use cairn_fsck::{CheckOptions, check};
use std::sync::Arc;

const DIRECTORY: NewInode<'_> = NewInode {
    file_type: FileType::Directory,
    mode: 0o755,
    uid: 0,
    gid: 0,
    device: 0,
    target: None,
};
const FILE: NewInode<'_> = NewInode { file_type: FileType::Regular, mode: 0o644, ..DIRECTORY };
const OLD_NAME: &[u8] = b"home~before-rollback-1";
const ATTRIBUTE: &[u8] = b"user.of";
/// States at each point.
const STATES: usize = 4;

fn open(device: &Arc<SimulatedDevice>) -> Volume {
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    Volume::open(Arc::clone(device) as Arc<dyn BlockDevice>, options).unwrap()
}

fn expect_clean(device: &dyn BlockDevice, context: &str) {
    let report = check(device, &CheckOptions { data: true, repair: false }, &mut |_| {}).unwrap();
    assert_eq!(report.errors, 0, "{context}:\n{report}");
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
    let seed = std::env::var("CAIRN_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut random = Seeded::new(seed);
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let volume = open(&device);
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
    let mut seen = [0; 3];
    let mut explorer = device.explorer();
    loop {
        let position = explorer.position();
        for state in 0..STATES {
            let context = format!("seed {seed}, event {position}, state {state}");
            let survivor = Arc::new(explorer.state(&mut random));
            expect_clean(&*survivor, &context);
            let options = VolumeOptions {
                background: false,
                subvolume: Some(256),
                ..VolumeOptions::default()
            };
            let survivor_device = Arc::clone(&survivor) as Arc<dyn BlockDevice>;
            let volume = Volume::open(survivor_device, options).unwrap();
            let found = shown(&volume);
            let all = [&before, &after(b"then"), &after(b"late")];
            let least = usize::from(position >= ended) + usize::from(position >= written);
            let Some(which) = (least..3).find(|at| *all[*at] == found) else {
                panic!("{context}: {found:?}, and at least {least} had ended");
            };
            seen[which] += 1;
            volume.close().unwrap();
            expect_clean(&*survivor, &context);
        }
        if !explorer.advance() {
            break;
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}
