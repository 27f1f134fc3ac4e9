//! Things that must come to an end.
use cairn_blockdev::{BlockDevice, MemoryDevice, Operation, SimulatedDevice};
use cairn_engine::{Error, FileType, InodeId, NewInode, Volume, VolumeOptions, XattrMode, mkfs};
use cairn_environment::{clock, thread};
use cairn_format::{
    BLOCK_SIZE, DirectoryEntry, EntryTarget, INODE_ROOT, InodeItem, InodeNumber, ItemKind, Key,
    NODE_BLOCKS, NODE_SIZE, Node, hash_name, name_slot_range,
};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };

fn within<T: Send + 'static>(
    seconds: u64,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (send, receive) = mpsc::channel();
    thread::spawn("work", move || send.send(work()));
    receive
        .recv_timeout(Duration::from_secs(seconds))
        .unwrap_or_else(|_| panic!("{what}: no end after {seconds} s"))
}

/// The commit thread writes dirty data before it commits. That logs items, and logging waits, when
/// list and ring are full, for a commit.
#[test]
fn the_commit_thread_does_not_wait_for_itself() {
    let device = Arc::new(SimulatedDevice::new(128 << 20));
    mkfs::mkfs(
        &*device,
        &mkfs::MkfsOptions { log_bytes: Some(1 << 20), ..mkfs::MkfsOptions::default() },
    )
    .unwrap();
    device.set_delay(Operation::Write, Duration::from_millis(1));
    let options =
        VolumeOptions { commit_interval: Duration::from_secs(1), ..VolumeOptions::default() };
    let volume = Volume::open(device, options).unwrap();
    let done = volume.clone();
    within(30, "setting attributes while the commit thread works", move || {
        let files: Vec<_> = (0..1500)
            .map(|i| {
                volume.create(volume.root(), format!("file {i}").as_bytes(), &FILE).unwrap().inode
            })
            .collect();
        for &file in &files {
            volume.write(file, 0, b"data").unwrap();
        }
        let dirty = volume.statistics().dirty_data_bytes;
        while volume.statistics().dirty_data_bytes == dirty {
            clock::sleep(Duration::from_millis(1));
        }
        let value = vec![7; 3000];
        for &file in &files {
            volume.set_xattr(file, b"user.x", &value, XattrMode::Any).unwrap();
        }
    });
    done.close().unwrap();
}

/// A volume whose root directory was changed by `change`, called with its leaf.
fn damaged(change: impl FnOnce(&mut Node, &dyn Fn(&[u8]) -> u64)) -> Volume {
    let device = Arc::new(MemoryDevice::new(64 << 20));
    let superblock = mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let address = cairn_format::BlockNumber(superblock.root.block.0 + NODE_BLOCKS);
    let mut page: Box<[u8; NODE_SIZE]> = vec![0; NODE_SIZE].into_boxed_slice().try_into().unwrap();
    device.read(address.0 * BLOCK_SIZE as u64, &mut page[..]).unwrap();
    let mut node = Node::decode(page, superblock.volume, address).unwrap();
    change(&mut node, &|name| *name_slot_range(hash_name(&superblock.hash_seed, name)).start());
    node.seal();
    device.write(address.0 * BLOCK_SIZE as u64, &[&node.page()[..]]).unwrap();
    Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() }).unwrap()
}

fn put(node: &mut Node, key: Key, value: &[u8]) {
    match node.search(&key) {
        Ok(index) => node.replace(index, value).unwrap(),
        Err(index) => node.insert(index, key, value).unwrap(),
    }
}

#[test]
fn an_entry_without_its_inode_is_an_error() {
    let volume = damaged(|node, slot| {
        let entry = DirectoryEntry {
            target: EntryTarget::Inode(InodeNumber(4711), FileType::Regular),
            name: b"dangling".to_vec(),
        };
        put(
            node,
            Key::new(INODE_ROOT, ItemKind::DirectoryEntry, slot(b"dangling")),
            &entry.encode(),
        );
    });
    assert!(volume.lookup(volume.root(), b"dangling").is_err());
    // Whatever the result is, there is one.
    let _: Result<(), Error> =
        within(10, "removing a dangling entry", move || volume.unlink(volume.root(), b"dangling"));
}

#[test]
fn directories_that_contain_each_other_are_an_error() {
    let volume = damaged(|node, slot| {
        let root = InodeItem::decode(
            node.value(node.search(&Key::new(INODE_ROOT, ItemKind::Inode, 0)).unwrap()),
        )
        .unwrap();
        let loops = InodeItem { parent: 12, ..root };
        put(node, Key::new(InodeNumber(12), ItemKind::Inode, 0), &loops.encode());
        let entry = DirectoryEntry {
            target: EntryTarget::Inode(InodeNumber(12), FileType::Directory),
            name: b"own parent".to_vec(),
        };
        put(
            node,
            Key::new(INODE_ROOT, ItemKind::DirectoryEntry, slot(b"own parent")),
            &entry.encode(),
        );
    });
    let moved = volume.create(volume.root(), b"moved", &DIRECTORY).unwrap().inode;
    assert_ne!(moved, InodeId(12));
    let _: Result<(), Error> =
        within(10, "moving into a directory that contains itself", move || {
            volume.rename(
                volume.root(),
                b"moved",
                InodeId(12),
                b"moved",
                cairn_engine::RenameMode::Replace,
            )
        });
}
