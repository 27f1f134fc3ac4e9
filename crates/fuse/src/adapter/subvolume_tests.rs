//! Requests about subvolumes and their snapshots, of several users to a volume in memory.
use super::keeper_requests::KeeperRequests;
use super::snapshot_directories::SnapshotDirectories;
use super::subvolumes::{self, Asker};
use super::{rollback, snapshots};
use crate::directory_requests::{Answer, Interval, Request, SnapshotPlace, SnapshotRequest};
use crate::protocol::RequestHeader;
use crate::transport::Reply;
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{
    AttributeChange, FileType, InodeId, NewInode, SnapshotInfo, Volume, VolumeOptions, mkfs,
};
use rustix::io::Errno;
use std::sync::Arc;

const SUPERUSER: u32 = 0;
const USER: u32 = 1000;

pub(super) fn open(device: &Arc<SimulatedDevice>) -> Volume {
    Volume::open(device.clone(), VolumeOptions::default()).unwrap()
}

/// A new volume; its root directory is the superuser's.
pub(super) fn new_volume() -> (Arc<SimulatedDevice>, Volume) {
    let device = Arc::new(SimulatedDevice::new(32 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume = open(&device);
    (device, volume)
}

pub(super) fn new_inode(file_type: FileType, uid: u32, mode: u32) -> NewInode<'static> {
    NewInode { file_type, mode, uid, gid: uid, device: 0, target: None }
}

/// A new subvolume of the user.
pub(super) fn new_subvolume(volume: &Volume, parent: InodeId, name: &[u8]) -> InodeId {
    let new = new_inode(FileType::Directory, USER, 0o755);
    volume.create_subvolume(parent, name, &new).unwrap().inode
}

fn new_directory(volume: &Volume, name: &[u8], uid: u32, mode: u32) -> InodeId {
    let new = new_inode(FileType::Directory, uid, mode);
    volume.create(volume.root(), name, &new).unwrap().inode
}

fn change(volume: &Volume, directory: InodeId, uid: u32, mode: u32) {
    let change = AttributeChange { uid: Some(uid), mode: Some(mode), ..AttributeChange::default() };
    volume.set_attributes(directory, &change).unwrap();
}

/// What the server answers this user.
fn ask(volume: &Volume, uid: u32, directory: InodeId, request: &Request) -> Result<Answer, Errno> {
    let header = RequestHeader { unique: 0, opcode: 0, node: directory.0, uid, gid: uid, pid: 0 };
    let (asker, reply) = (Asker::new(&header, uid == SUPERUSER), Reply::silent(0));
    let (shown, keeper) = (SnapshotDirectories::default(), KeeperRequests::new());
    let answer = match request {
        Request::Snapshots(request) => {
            snapshots::serve(volume, &shown, &keeper, directory, &asker, request, &reply)
        }
        Request::Rollback { name, snapshot } => {
            let mount = rollback::Mount { volume, shown: &shown, keeper: &keeper };
            rollback::serve(&mount, directory, &asker, (name, snapshot), &reply)
        }
        request => subvolumes::serve(volume, directory, &asker, request, &reply),
    };
    answer.map_err(|failure| failure.errno())
}

/// Asks for a fork into a directory.
fn fork(
    volume: &Volume,
    uid: u32,
    source: InodeId,
    (directory, name): (InodeId, &str),
) -> Result<(), Errno> {
    let request = Request::Fork { name: name.into(), source: source.0, early: true };
    ask(volume, uid, directory, &request).map(drop)
}

#[test]
fn a_number_does_not_lead_into_a_closed_directory() {
    let (_device, volume) = new_volume();
    let closed = new_directory(&volume, b"closed", SUPERUSER, 0o700);
    let base = new_subvolume(&volume, closed, b"base");
    let of_user = new_directory(&volume, b"of-user", USER, 0o755);
    let by_user = |name: &str| fork(&volume, USER, base, (of_user, name));
    assert_eq!(by_user("1"), Err(Errno::ACCESS));
    assert_eq!(fork(&volume, SUPERUSER, base, (of_user, "2")), Ok(()));
    // Search permission suffices, but on the whole way.
    change(&volume, closed, SUPERUSER, 0o711);
    assert_eq!(by_user("3"), Ok(()));
    change(&volume, volume.root(), SUPERUSER, 0o744);
    assert_eq!(by_user("4"), Err(Errno::ACCESS));
    change(&volume, volume.root(), SUPERUSER, 0o755);
    // Nor into a subvolume that is nested in another one.
    let nested = new_subvolume(&volume, base, b"nested");
    assert_eq!(fork(&volume, USER, nested, (of_user, "5")), Ok(()));
    change(&volume, base, SUPERUSER, 0o700);
    assert_eq!(fork(&volume, USER, nested, (of_user, "6")), Err(Errno::ACCESS));
    assert_eq!(by_user("7"), Err(Errno::PERM));
    // What is no root directory, or does not exist, is none of the volume's.
    for number in [of_user.0, InodeId::made_up(1).0, 77 << 44 | 1, u64::MAX] {
        let request = Request::Fork { name: b"8".to_vec(), source: number, early: true };
        let refused = ask(&volume, USER, of_user, &request).unwrap_err();
        assert_eq!(refused, Errno::INVAL, "{number:x}");
    }
    volume.close().unwrap();
}

#[test]
fn a_snapshot_is_closed_with_its_subvolume() {
    let (_device, volume) = new_volume();
    let of_user = new_directory(&volume, b"of-user", USER, 0o755);
    let old = new_subvolume(&volume, volume.root(), b"home");
    let one = volume.create_snapshot(old, b"one").unwrap();
    let by_user = |name: &str| fork(&volume, USER, one.root, (of_user, name));
    assert_eq!(by_user("1"), Ok(()));
    change(&volume, old, SUPERUSER, 0o755);
    assert_eq!(by_user("2"), Err(Errno::PERM));
    change(&volume, old, USER, 0o600);
    assert_eq!(by_user("3"), Err(Errno::ACCESS));
    change(&volume, old, USER, 0o700);
    // After a rollback two subvolumes show it: each is a way to it.
    let new = volume.rollback(volume.root(), b"home", one.root).unwrap().root;
    for (number, (of_old, of_new, expected)) in [
        (USER, SUPERUSER, Ok(())),
        (SUPERUSER, USER, Ok(())),
        (SUPERUSER, SUPERUSER, Err(Errno::PERM)),
    ]
    .into_iter()
    .enumerate()
    {
        change(&volume, old, of_old, 0o700);
        change(&volume, new, of_new, 0o700);
        assert_eq!(by_user(&format!("rolled back {number}")), expected, "{number}");
    }
    // The earlier one does not show the snapshots of the later one.
    change(&volume, new, USER, 0o700);
    let two = volume.create_snapshot(new, b"two").unwrap();
    change(&volume, new, SUPERUSER, 0o700);
    change(&volume, old, USER, 0o700);
    assert_eq!(fork(&volume, USER, two.root, (of_user, "two")), Err(Errno::PERM));
    volume.close().unwrap();
}

/// Gives snapshots on the device other names of the same length, in all nodes.
fn rename_on(device: &SimulatedDevice, name: &[u8], other: &[u8]) {
    const NODE_BYTES: usize = 16 * 1024;
    let (mut found, mut page) = (false, vec![0; NODE_BYTES]);
    for at in (0..device.length_bytes()).step_by(NODE_BYTES) {
        device.read(at, &mut page).unwrap();
        let places: Vec<usize> =
            (0..NODE_BYTES - name.len()).filter(|at| page[*at..].starts_with(name)).collect();
        if page.starts_with(b"CRNN") && !places.is_empty() {
            places.iter().for_each(|at| page[*at..][..name.len()].copy_from_slice(other));
            cairn_format::Header::seal(&mut page);
            device.write(at, &[&page]).unwrap();
            found = true;
        }
    }
    assert!(found);
}

#[test]
fn temporary_snapshots_are_nobodys() {
    let (device, volume) = new_volume();
    let (id, _) = volume.subvolume_of(volume.root()).unwrap();
    let (made_as, temporary) = (b".diff-0123456789abcdeg", b".diff-0123456789abcdef");
    for name in [&b"one"[..], made_as, b"two"] {
        volume.create_snapshot(volume.root(), name).unwrap();
    }
    // A mount deletes only those that are not held.
    volume.hold_snapshot(id, made_as, true).unwrap();
    volume.close().unwrap();
    rename_on(&device, made_as, temporary);
    let volume = open(&device);
    let all = volume.snapshots(id).unwrap();
    assert!(all.len() == 3 && all[1].is_temporary());
    let asked = |request| ask(&volume, SUPERUSER, volume.root(), &Request::Snapshots(request));
    let listed = asked(SnapshotRequest::List { referenced: false }).unwrap().snapshots;
    let names: Vec<&[u8]> = listed.iter().map(|one| &one.name[..]).collect();
    assert_eq!(names, [b"one", b"two"]);
    let name = temporary.to_vec();
    for held in [false, true] {
        let hold = SnapshotRequest::Hold { name: name.clone(), held };
        assert_eq!(asked(hold), Err(Errno::NODATA));
    }
    assert_eq!(asked(SnapshotRequest::Delete { name }), Err(Errno::NODATA));
    let place = |info: &SnapshotInfo| -> SnapshotPlace { (info.generation, info.subvolume) };
    let intervals = vec![Interval { first: place(&all[0]), last: place(&all[2]) }];
    asked(SnapshotRequest::DeleteIntervals { intervals }).unwrap();
    let left = volume.snapshots(id).unwrap();
    assert!(left.len() == 1 && left[0].is_temporary());
    volume.close().unwrap();
}

/// An error of the device does not read as if there were no such snapshot.
#[test]
fn errors_of_the_device_are_said() {
    let (device, volume) = new_volume();
    let home = new_subvolume(&volume, volume.root(), b"home");
    let file = new_inode(FileType::Regular, USER, 0o644);
    volume.create(home, b"file", &file).unwrap();
    volume.create_snapshot(home, b"one").unwrap();
    volume.create(home, b"other", &file).unwrap();
    volume.close().unwrap();
    let rollback = Request::Rollback { name: b"home".to_vec(), snapshot: b"one".to_vec() };
    for of_fork in [true, false] {
        let volume = open(&device);
        let home = volume.lookup(volume.root(), b"home").unwrap().inode;
        let (id, _) = volume.subvolume_of(home).unwrap();
        let source = volume.snapshot_named(id, b"one").unwrap().root.0;
        device.fail_when(|request| request.operation == Operation::Read);
        let fork = Request::Fork { name: b"fork".to_vec(), source, early: false };
        let request = if of_fork { &fork } else { &rollback };
        let refused = ask(&volume, SUPERUSER, volume.root(), request).unwrap_err();
        assert_eq!(refused, Errno::IO, "{request:?}");
        device.clear_failures();
        ask(&volume, SUPERUSER, volume.root(), request).unwrap();
        volume.close().unwrap();
    }
}
