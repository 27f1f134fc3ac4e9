//! How often the operations of every day allocate, in the long run: shown with an allocator that
//! counts, by thread.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{DirectoryItem, FileType, NewInode, Volume, VolumeOptions, mkfs};
use cairn_harness::allocations::{Counting, allocations_in};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };
const FILES: u64 = 2000;

fn volume() -> Volume {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() }).unwrap()
}

/// Allocations while `work` is done for each name. Tables that grow, and nodes that are split, are
/// among them.
fn per_name(names: &[String], mut work: impl FnMut(&[u8])) -> f64 {
    let count = allocations_in(|| names.iter().for_each(|name| work(name.as_bytes())));
    count as f64 / names.len() as f64
}

#[test]
fn operations_on_names_allocate_nothing_but_what_stays() {
    let volume = volume();
    let root = volume.root();
    let names: Vec<String> = (0..FILES).map(|number| format!("file {number}")).collect();
    for round in 0..3 {
        let create = per_name(&names, |name| drop(volume.create(root, name, &FILE)));
        let lookup = per_name(&names, |name| assert!(volume.lookup(root, name).is_ok()));
        let missing = per_name(&names, |name| assert!(volume.lookup(root, &name[1..]).is_err()));
        let attributes = per_name(&names, |_| assert!(volume.attributes(root).is_ok()));
        let no_xattr =
            per_name(&names, |_| assert!(volume.get_xattr(root, b"security.capability").is_err()));
        let mut listed = Vec::with_capacity(names.len());
        let list = per_name(&names[..1], |_| {
            let mut take = |item: DirectoryItem<'_>, _: &_| {
                listed.push(item.inode);
                true
            };
            volume.read_directory_plus(root, 0, &mut take).unwrap();
        });
        assert_eq!(listed.len(), names.len());
        let unlink = per_name(&names, |name| volume.unlink(root, name).unwrap());
        let counted = (create, lookup, missing, attributes, no_xattr, list, unlink);
        // Creations leave an inode and its state in memory; removals note who waits for the last
        // reference.
        assert!(create < 2.6 && unlink < 0.1, "round {round}: {counted:?}");
        assert_eq!((lookup, missing, attributes, no_xattr), (0.0, 0.0, 0.0, 0.0), "round {round}");
        assert!(list < 20.0, "round {round}: {counted:?}");
        listed.iter().for_each(|inode| volume.forget(*inode, 3));
    }
}
