//! The judges of crash states are not blind: what must not happen is noticed. And promises that a
//! random run meets too rarely, one test each.
use cairn_blockdev::simulated::Fate;
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{FileType, FsyncKind, NewInode, RenameMode, SeekTarget, Volume, VolumeOptions};
use cairn_environment::atomic::AtomicU64;
use cairn_torture::files::{NEW_FILE, create, format, read_named};
use cairn_torture::generator::Profile;
use cairn_torture::history::ClientHistory;
use cairn_torture::runner::make_bases;
use cairn_torture::snapshot::of_volume;
use cairn_torture::verdict::judge;
use cairn_torture::workload::{Client, session};
use std::sync::Arc;

fn options() -> VolumeOptions {
    VolumeOptions { background: false, ..VolumeOptions::default() }
}

fn open(device: &Arc<SimulatedDevice>) -> Volume {
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options()).expect("it opens")
}

/// A finished run of two clients; everything is durable.
fn finished_run() -> (Arc<SimulatedDevice>, Vec<ClientHistory>) {
    let device = Arc::new(SimulatedDevice::new(32 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device);
    make_bases(&volume, 2).expect("space");
    device.start_recording();
    let order = Arc::new(AtomicU64::new(0));
    let mut clients = (0..2)
        .map(|client| Client::new(client, 77 + u64::from(client), Profile::CRASH, order.clone()))
        .collect();
    session(&mut clients, volume, &device, 150, false).unwrap_or_else(|error| panic!("{error}"));
    (device, clients.into_iter().map(|client| client.history).collect())
}

/// Judges after `change` has tampered with the volume.
fn judged_after(change: impl FnOnce(&Volume)) -> Result<(), String> {
    let (device, histories) = finished_run();
    let volume = open(&Arc::new(device.snapshot()));
    change(&volume);
    judge(&volume, &histories, device.history_len())
}

/// The first regular file of a client's that begins with data, as directory, name and inode.
fn some_file(volume: &Volume) -> (cairn_engine::InodeId, Vec<u8>, cairn_engine::InodeId) {
    let all = of_volume(volume, 10).expect("it is healthy");
    let is_file = |inode| {
        let attributes = volume.attributes(inode).expect("it exists");
        attributes.file_type == FileType::Regular
            && attributes.links == 1
            && matches!(volume.seek(inode, 0, SeekTarget::Data), Ok(0))
    };
    let (path, (_, inode)) =
        all.names.iter().find(|(_, (_, inode))| is_file(*inode)).expect("the clients made files");
    let (name, above) = path.split_last().expect("a file has a name");
    (all.names[above].1, name.clone(), *inode)
}

#[test]
fn the_true_state_is_accepted() {
    judged_after(|_| {}).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_lost_file_is_noticed() {
    let error = judged_after(|volume| {
        let (directory, name, _) = some_file(volume);
        volume.unlink(directory, &name).expect("it exists");
    });
    assert!(error.expect_err("a file is lost").contains("is missing"));
}

#[test]
fn a_file_that_should_be_gone_is_noticed() {
    let error = judged_after(|volume| {
        let new = NewInode {
            file_type: FileType::Regular,
            mode: 0o600,
            uid: 0,
            gid: 0,
            device: 0,
            target: None,
        };
        let (directory, ..) = some_file(volume);
        volume.create(directory, b"0?", &new).expect("space");
    });
    assert!(error.expect_err("a file came back").contains("should not exist"));
}

#[test]
fn foreign_bytes_are_noticed() {
    let error = judged_after(|volume| {
        let (.., inode) = some_file(volume);
        volume.write(inode, 0, b"X").expect("space");
    });
    let error = error.expect_err("a byte changed");
    assert!(error.contains("block 0 holds"), "{error}");
}

#[test]
fn a_truncated_file_is_noticed() {
    let error = judged_after(|volume| {
        let (.., inode) = some_file(volume);
        let change = cairn_engine::AttributeChange { size: Some(0), ..Default::default() };
        volume.set_attributes(inode, &change).expect("it exists");
    });
    assert!(error.expect_err("a file is empty").contains("size is 0"));
}

#[test]
fn a_changed_mode_is_noticed() {
    let error = judged_after(|volume| {
        let (.., inode) = some_file(volume);
        let change = cairn_engine::AttributeChange { mode: Some(0o7777), ..Default::default() };
        volume.set_attributes(inode, &change).expect("it exists");
    });
    assert!(error.is_err());
}

#[test]
fn a_changed_time_is_noticed() {
    let time =
        cairn_engine::TimeChange::At(cairn_engine::Timestamp { seconds: 86_400, nanoseconds: 5 });
    let set = |change: cairn_engine::AttributeChange| {
        judged_after(|volume| {
            let (.., inode) = some_file(volume);
            volume.set_attributes(inode, &change).expect("it exists");
        })
        .expect_err("a time changed")
    };
    let modified =
        set(cairn_engine::AttributeChange { modified: Some(time), ..Default::default() });
    assert!(modified.contains("the time of its last modification"), "{modified}");
    let changed = set(cairn_engine::AttributeChange { changed: Some(time), ..Default::default() });
    assert!(changed.contains("the time of its last change"), "{changed}");
}

#[test]
fn states_before_the_acknowledgement_are_refused() {
    let (device, histories) = finished_run();
    let end = device.history_len();
    let mut explorer = device.explorer();
    explorer.advance_to(end / 3);
    let volume =
        open(&Arc::new(explorer.state_with(|unflushed| vec![Fate::Written; unflushed.len()])));
    judge(&volume, &histories, end / 3)
        .unwrap_or_else(|error| panic!("a state of its own time: {error}"));
    judge(&volume, &histories, end).expect_err("it is too old for the end");
}

/// The device after a crash that loses everything that was not flushed.
fn lose_unflushed(device: &SimulatedDevice) -> Arc<SimulatedDevice> {
    Arc::new(device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]))
}

/// Creates so many files that the first ones leave memory, and fsyncs the one called `wanted`.
fn fsync_after_many(wanted: u32) {
    let device = Arc::new(SimulatedDevice::new(64 << 20));
    format(&*device, 4 << 20).expect("a new volume");
    let options = VolumeOptions { inode_cache_entries: 0, ..options() };
    let volume = Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens");
    let mut inodes = Vec::new();
    for number in 0..3000 {
        inodes.push(
            volume
                .create(volume.root(), format!("{number}").as_bytes(), &NEW_FILE)
                .expect("space")
                .inode,
        );
    }
    assert!(volume.statistics().inodes_in_memory < 2000, "nothing left memory");
    volume.fsync_blocking(inodes[wanted as usize], FsyncKind::Full).expect("it is healthy");
    let state = lose_unflushed(&device);
    read_named(&open(&state), format!("{wanted}").as_bytes())
        .unwrap_or_else(|error| panic!("{wanted} was fsynced: {error}"));
}

#[test]
fn fsync_of_an_inode_that_left_memory_still_counts() {
    // Which ones leave is not known; of several old ones some do.
    (0..8).map(|step| step * 100).for_each(fsync_after_many);
}

#[test]
fn replacing_by_rename_leaves_old_or_new_contents() {
    let device = Arc::new(SimulatedDevice::new(32 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device);
    let other = create(&volume, b"other", b"x").expect("space");
    let old = create(&volume, b"config", b"old contents").expect("space");
    volume.fsync_blocking(old, FsyncKind::Full).expect("it is healthy");
    device.start_recording();
    create(&volume, b"config.new", &[b'n'; 10_000]).expect("space");
    volume
        .rename(volume.root(), b"config.new", volume.root(), b"config", RenameMode::Replace)
        .expect("both exist");
    // The fsync of another file makes the rename durable; no client ever asked for the file's data.
    volume.write(other, 0, b"y").expect("space");
    volume.fsync_blocking(other, FsyncKind::Full).expect("it is healthy");
    let mut explorer = device.explorer();
    let (mut olds, mut news) = (0, 0);
    loop {
        for fate in [Fate::Lost, Fate::Written] {
            let state =
                Arc::new(explorer.state_with(|unflushed| vec![fate.clone(); unflushed.len()]));
            match read_named(&open(&state), b"config").expect("it always exists") {
                contents if contents == b"old contents" => olds += 1,
                contents if contents == vec![b'n'; 10_000] => news += 1,
                contents => panic!(
                    "after {} events the file holds {} bytes",
                    explorer.position(),
                    contents.len()
                ),
            }
        }
        if !explorer.advance() {
            break;
        }
    }
    assert!(olds > 0 && news > 0, "{olds} old, {news} new");
    volume.close().expect("it closes");
}
