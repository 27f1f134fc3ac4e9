//! Power failures inside mkfs and inside a repair: between every two device operations, with all
//! sets of surviving writes.
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_engine::{Error, FsyncKind, InodeId, Volume, VolumeOptions};
use cairn_format::{
    BLOCK_SIZE, BlockNumber, DirectoryEntry, Geometry, INODE_ROOT, InodeItem, ItemKind, Key,
    NODE_SIZE, Node, RootItem, Superblock, VolumeId,
};
use cairn_fsck::{CheckOptions, check};
use cairn_torture::crash::expect_clean;
use cairn_torture::files::{create, expect_files, format, read_all, read_named};
use cairn_torture::found::Found;
use cairn_torture::survivors::every_state;
use std::collections::BTreeMap;
use std::sync::Arc;

#[path = "interrupted/faults.rs"]
mod faults;

const VOLUME_BYTES: u64 = 16 << 20;
const LOG_BYTES: u64 = 1 << 20;

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Result<Volume, Error> {
    let options = VolumeOptions { background: false, read_only, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options)
}

/// A closed volume with some files.
fn used() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device, false).expect("it opens");
    for number in 0..8 {
        let file = create(&volume, format!("file {number}").as_bytes(), &vec![number; 9000])
            .expect("space");
        volume.forget(file, 1);
    }
    volume.sync().expect("it is healthy");
    volume.close().expect("it closes");
    Arc::new(device.snapshot())
}

/// What a volume holds, in a form that can be compared.
fn holds(device: &Arc<SimulatedDevice>) -> Result<String, Error> {
    let volume = open(device, true)?;
    let found = Found::read(&volume).unwrap_or_else(|error| panic!("{error}"));
    Ok(format!(
        "{:?} {:?}",
        found.names.names,
        found.objects.values().map(|object| &object.bytes).collect::<Vec<_>>()
    ))
}

/// Repairs; the exit code of fsck.
fn repair(device: &SimulatedDevice) -> Result<u8, String> {
    let report = check(device, &CheckOptions { data: true, repair: true }, &mut |_| {})
        .map_err(|error| error.to_string())?;
    device.flush().map_err(|error| error.to_string())?;
    Ok(report.exit_code())
}

/// After an interrupted mkfs there is no volume, the old one with all its files, or the new one:
/// never half of one.
#[test]
fn an_interrupted_mkfs_leaves_no_volume_or_a_whole_one() {
    let device = used();
    let old = holds(&device).expect("it is healthy");
    device.start_recording();
    format(&*device, LOG_BYTES).expect("a new volume");
    let new = holds(&device).expect("it is healthy");
    let (mut none, mut olds, mut news) = (0, 0, 0);
    let states = every_state(&device, &mut |_, state| {
        match holds(&state) {
            Err(Error::NotAVolume(_)) => none += 1,
            Err(error) => return Err(format!("neither a volume nor none: {error}")),
            Ok(found) => {
                // Superblocks that mkfs has cleared, or not written yet, are made anew from the one
                // that counts.
                if repair(&state)? > 1 {
                    return Err("a repair leaves errors".into());
                }
                expect_clean(&*state)?;
                match () {
                    () if found == old => olds += 1,
                    () if found == new => news += 1,
                    () => {
                        return Err(format!(
                            "a volume that is neither the old nor the new one: {found}"
                        ));
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
    eprintln!(
        "{states} states: {none} times no volume, {olds} times the old one, {news} times the new one"
    );
    assert!(none > 0 && olds > 0 && news > 0);
}

/// Whatever an interrupted repair leaves, the next one mends, and no file is worse.
#[test]
fn an_interrupted_repair_is_repaired_by_the_next() {
    let device = used();
    let before = holds(&device).expect("it is healthy");
    let geometry = Geometry { total_blocks: VOLUME_BYTES / 4096, log_blocks: LOG_BYTES / 4096 };
    let mut damaged: Vec<BlockNumber> = (0..2).map(|slot| geometry.bitmap_block(0, slot)).collect();
    damaged.extend([Geometry::SUPERBLOCKS[0], geometry.superblock_copy()]);
    let device = Arc::new(device.snapshot());
    for block in damaged {
        device.corrupt(block.offset_bytes() + 100, 40, 0x5A);
    }
    let device = Arc::new(device.snapshot());
    device.start_recording();
    assert_eq!(repair(&device), Ok(1), "there was something to repair");
    let states = every_state(&device, &mut |_, state| {
        let code = repair(&state)?;
        if code > 1 {
            return Err(format!("the second repair ends with {code}"));
        }
        expect_clean(&*state)?;
        let found = holds(&state).map_err(|error| error.to_string())?;
        if found == before { Ok(()) } else { Err(format!("the files differ: {found}")) }
    })
    .unwrap_or_else(|error| panic!("{error}"));
    assert!(states > 10, "{states} states");
}

/// A volume whose file tree has an inner node, with an orphan and a file that is only in the log;
/// as a power failure leaves it.
struct Busy {
    device: SimulatedDevice,
    inodes: BTreeMap<Vec<u8>, InodeId>,
}

fn name_of(number: usize) -> Vec<u8> {
    format!("file {number}").into_bytes()
}

fn bytes_of(number: usize) -> Vec<u8> {
    vec![number as u8; 100 + 40 * number]
}

const NO_NAME: usize = 5;
const WRONG_LINKS: usize = 6;
const NO_INODE: usize = 7;
const FILES: usize = 220;

fn busy() -> Busy {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES).expect("a new volume");
    let volume = open(&device, false).expect("it opens");
    let mut inodes = BTreeMap::new();
    for number in 0..FILES {
        let inode = create(&volume, &name_of(number), &bytes_of(number)).expect("space");
        volume.forget(inode, 1);
        inodes.insert(name_of(number), inode);
        // Older versions of the leaves stay behind.
        if number % 40 == 0 {
            volume.sync().and_then(|()| volume.commit()).expect("it is healthy");
        }
    }
    // Its reference is kept, so that it stays an orphan.
    create(&volume, b"orphan", &[0xAA; 5000]).expect("space");
    volume.sync().expect("it is healthy");
    volume.unlink(volume.root(), b"orphan").expect("it is there");
    volume.commit().expect("it is healthy");
    let logged = create(&volume, b"logged", &[0xBB; 5000]).expect("space");
    volume.fsync_blocking(logged, FsyncKind::Full).expect("it is healthy");
    Busy { device: device.snapshot(), inodes }
}

/// The file tree's root and leaves on a device.
struct Tree<'a> {
    device: &'a SimulatedDevice,
    superblock: Superblock,
    root: BlockNumber,
    leaves: Vec<BlockNumber>,
}

fn read_node(device: &SimulatedDevice, volume: VolumeId, address: BlockNumber) -> Node {
    let mut page = Box::new([0; NODE_SIZE]);
    device.read(address.offset_bytes(), &mut page[..]).expect("a healthy device");
    Node::decode(page, volume, address).expect("a node")
}

impl<'a> Tree<'a> {
    fn of(device: &'a SimulatedDevice) -> Self {
        let slot = |address: &BlockNumber| {
            let mut block = vec![0; BLOCK_SIZE];
            device.read(address.offset_bytes(), &mut block).expect("a healthy device");
            Superblock::decode(&block, *address).ok()
        };
        let superblock = Geometry::SUPERBLOCKS
            .iter()
            .filter_map(slot)
            .max_by_key(|slot| slot.generation)
            .expect("a volume");
        let roots = read_node(device, superblock.volume, superblock.root.block);
        let root = RootItem::decode(roots.value(0)).expect("the file tree's").root;
        assert_eq!(root.level, 1, "leaves, and one node above them");
        let above = read_node(device, superblock.volume, root.block);
        let leaves = (0..above.count()).map(|index| above.child(index).block).collect();
        Self { device, superblock, root: root.block, leaves }
    }

    fn damage(&self, block: BlockNumber) {
        self.device.corrupt(block.offset_bytes() + 100, 40, 0x5A);
    }

    /// Changes the items that `wanted` says; there must be some.
    fn change(&self, wanted: impl Fn(Key, &[u8]) -> bool, change: impl Fn(&mut Node, usize)) {
        let mut changed = 0;
        for &address in &self.leaves {
            let mut leaf = read_node(self.device, self.superblock.volume, address);
            for index in (0..leaf.count())
                .rev()
                .filter(|index| wanted(leaf.key(*index), leaf.value(*index)))
                .collect::<Vec<_>>()
            {
                change(&mut leaf, index);
                changed += 1;
            }
            self.device
                .write(address.offset_bytes(), &[&leaf.seal()[..]])
                .expect("a healthy device");
        }
        assert!(changed > 0, "no such item");
    }
}

/// Damage that only new trees mend: a leaf that can't be read, a name and an inode that are not
/// there, and a wrong link count.
fn damage_items(busy: &Busy) -> SimulatedDevice {
    let device = busy.device.snapshot();
    let tree = Tree::of(&device);
    let is_entry = |key: Key, value: &[u8], number| {
        let entry = Key::all(INODE_ROOT, ItemKind::DirectoryEntry).contains(&key);
        entry && DirectoryEntry::name_of(value).is_ok_and(|name| name == name_of(number))
    };
    let inode_of = |number| busy.inodes[&name_of(number)];
    tree.change(|key, value| is_entry(key, value, NO_NAME), |leaf, index| leaf.remove(index));
    tree.change(
        |key, _| Key::all_of_inode(inode_of(NO_INODE).number()).contains(&key),
        |leaf, index| leaf.remove(index),
    );
    tree.change(
        |key, _| key == Key::new(inode_of(WRONG_LINKS).number(), ItemKind::Inode, 0),
        |leaf, index| {
            let item = InodeItem::decode(leaf.value(index)).expect("an inode");
            leaf.replace(index, &InodeItem { links: 9, ..item }.encode()).expect("the same length");
        },
    );
    assert!(tree.leaves.len() > 3, "{} leaves", tree.leaves.len());
    tree.damage(tree.leaves[tree.leaves.len() - 2]);
    device.snapshot()
}

/// The files in the root directory that can be read.
fn readable(busy: &Busy, device: SimulatedDevice) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let volume = open(&Arc::new(device), true).expect("it opens");
    let names = busy.inodes.keys().cloned().chain([b"logged".to_vec()]);
    names.filter_map(|name| Some((name.clone(), read_named(&volume, &name).ok()?))).collect()
}

/// What a repair must leave of a damaged [`Busy`] volume: no errors, all that could be read, and
/// what had lost its name.
fn expect_repaired(
    busy: &Busy,
    device: &Arc<SimulatedDevice>,
    files: &BTreeMap<Vec<u8>, Vec<u8>>,
) -> Result<(), String> {
    expect_clean(&**device)?;
    let volume = open(device, true).map_err(|error| error.to_string())?;
    expect_files(&volume, files)?;
    let unnamed = || {
        let home = volume.lookup(volume.root(), b"lost+found")?.inode;
        let inode =
            volume.lookup(home, format!("#{}", busy.inodes[&name_of(NO_NAME)]).as_bytes())?.inode;
        read_all(&volume, inode)
    };
    match unnamed() {
        Ok(bytes) if bytes == bytes_of(NO_NAME) => Ok(()),
        Ok(bytes) => Err(format!(
            "the file that had lost its name has other contents: {} bytes, {:?}",
            bytes.len(),
            bytes.first()
        )),
        Err(error) => Err(format!("the file that had lost its name: {error}")),
    }
}

/// Interrupts the repair of `device`, which makes its trees anew, everywhere.
fn interrupt_rebuild(busy: &Busy, device: &SimulatedDevice, files: &BTreeMap<Vec<u8>, Vec<u8>>) {
    device.start_recording();
    assert_eq!(repair(device), Ok(1), "there was something to repair");
    let (mut old, mut new) = (0, 0);
    let states = every_state(device, &mut |_, state| {
        *if expect_clean(&*state).is_ok() { &mut new } else { &mut old } += 1;
        let code = repair(&state)?;
        if code > 1 {
            return Err(format!("the second repair ends with {code}"));
        }
        expect_repaired(busy, &state, files)
    })
    .unwrap_or_else(|error| panic!("{error}"));
    eprintln!(
        "{states} states, of the different ones {old} with the old trees, {new} with the new ones"
    );
    assert!(old > 50 && new > 1);
}

/// A leaf is damaged, and items contradict each other.
#[test]
fn an_interrupted_rebuild_of_the_trees_is_done_again_and_loses_nothing() {
    let busy = busy();
    let damaged = damage_items(&busy);
    let files = readable(&busy, damaged.snapshot());
    assert!(
        files.len() > 60 && files.len() < FILES - 10 && files.contains_key(&b"logged"[..]),
        "{} files",
        files.len()
    );
    interrupt_rebuild(&busy, &damaged, &files);
}

/// The node above all leaves is damaged, too, so that the repair has to find them; with the
/// bitmaps, or without.
#[test]
fn an_interrupted_rebuild_from_leaves_that_nothing_leads_to_loses_nothing() {
    let busy = busy();
    for with_bitmaps in [true, false] {
        let damaged = damage_items(&busy);
        let files = readable(&busy, damaged.snapshot());
        let tree = Tree::of(&damaged);
        tree.damage(tree.root);
        if !with_bitmaps {
            (0..2).for_each(|slot| tree.damage(tree.superblock.geometry.bitmap_block(0, slot)));
        }
        interrupt_rebuild(&busy, &damaged.snapshot(), &files);
    }
}
