//! Damage that only a snapshot has: it is named with what to do, the rest can be read, and goes
//! with the snapshot. Damage that hides which snapshots there are prevents a mount, which says what
//! to do, too.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use cairn_format::{
    BlockNumber, DirectoryEntry, Geometry, ItemKind, Key, NODE_SIZE, Node, Superblock,
    TREE_SUBVOLUMES,
};
use mounted::Mounted;
use std::fs;

/// Has `edit` change nodes of the image, those at least that were written last. It says which it
/// has changed.
fn edit_pages(mounted: &Mounted, edit: impl Fn(&mut [u8], Node) -> Option<()>) {
    let mut image = fs::read(mounted.path("image")).unwrap();
    let slot = Geometry::SUPERBLOCKS[0];
    let at = slot.offset_bytes() as usize;
    let volume = Superblock::decode(&image[at..at + 4096], slot).unwrap().volume;
    let mut edited = 0;
    for (index, page) in image.chunks_exact_mut(NODE_SIZE).enumerate() {
        let address = BlockNumber((index * NODE_SIZE / 4096) as u64);
        let copy: Box<[u8; NODE_SIZE]> = page.to_vec().into_boxed_slice().try_into().unwrap();
        let Ok(node) = Node::decode(copy, volume, address) else { continue };
        edited += edit(page, node).iter().count();
    }
    assert!(edited > 0);
    fs::write(mounted.path("image"), &image).unwrap();
}

/// The same of nodes that stay nodes.
fn edit_nodes(mounted: &Mounted, edit: impl Fn(&mut Node) -> Option<()>) {
    edit_pages(mounted, |page, mut node| {
        edit(&mut node)?;
        page.copy_from_slice(node.seal());
        Some(())
    });
}

#[test]
fn damaged_data_of_a_snapshot_is_named_and_goes_with_it() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/sub"]);
    let lost: Vec<u8> = (0..20_000_u32).map(|index| (index * 7 % 251) as u8 + 1).collect();
    let kept = "It is in the snapshot, too.".repeat(1000);
    fs::write(mounted.path("dir/sub/lost"), &lost).unwrap();
    fs::write(mounted.path("dir/sub/kept"), &kept).unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/sub", "one"]);
    fs::remove_file(mounted.path("dir/sub/lost")).unwrap();
    mounted.succeeds(&["umount", "dir"]);
    let mut image = fs::read(mounted.path("image")).unwrap();
    let block = &lost[4096..8192];
    let at = image.chunks_exact(4096).position(|found| found == block).expect("it is stored");
    image[at * 4096 + 100] ^= 0xff;
    fs::write(mounted.path("image"), &image).unwrap();

    for arguments in [&["fsck", "--data", "image"][..], &["fsck", "--repair", "--data", "image"]] {
        let output = mounted.run(arguments);
        assert_eq!(output.status.code(), Some(4), "{arguments:?}");
        let report = String::from_utf8(output.stdout).unwrap();
        assert!(report.contains("snapshot \"one\""), "{report}");
        let advice = String::from_utf8(output.stderr).unwrap();
        for command in ["fsck image --extract DIR --snapshot 257/one", "--accept-loss 257/one"] {
            assert!(advice.contains(command), "{advice}");
        }
        assert!(!advice.contains("without a name"), "{advice}");
    }
    // What is whole comes out, and the damaged file is named.
    let subvolume = "257/one";
    let output = mounted.run(&["fsck", "--extract", "out", "--snapshot", subvolume, "image"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("/lost: 4096 bytes"), "{output:?}");
    assert_eq!(fs::read_to_string(mounted.path("out/kept")).unwrap(), kept);

    // Given up, it goes with all that only it had; that can be taken back.
    let damaged = fs::read(mounted.path("image")).unwrap();
    let other = &["fsck", "image", "--repair", "--accept-loss", "two"];
    assert!(mounted.exits_with(4, other).contains("no snapshot of that name is damaged"));
    mounted.exits_with(1, &["fsck", "image", "--repair", "--accept-loss", "257/one"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    assert_eq!(mounted.succeeds(&["snapshot", "list", "dir/sub"]).lines().count(), 0);
    assert_eq!(fs::read_to_string(mounted.path("dir/sub/kept")).unwrap(), kept);
    mounted.succeeds(&["umount", "dir"]);
    fs::write(mounted.path("image"), &damaged).unwrap();
    mounted.exits_with(1, &["fsck", "image", "--repair", "--accept-loss", "257/one"]);
    mounted.succeeds(&["fsck", "image", "--undo", "image.before-repair"]);
    assert!(fs::read(mounted.path("image")).unwrap() == damaged);

    mounted.succeeds(&["mount", "image", "dir"]);
    let snapshot = mounted.path("dir/.snapshots/sub/one");
    assert!(fs::read(snapshot.join("lost")).is_err());
    assert_eq!(fs::read_to_string(snapshot.join("kept")).unwrap(), kept);
    mounted.succeeds(&["snapshot", "delete", "dir/sub", "one"]);
    assert_eq!(fs::read_to_string(mounted.path("dir/sub/kept")).unwrap(), kept);
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
}

/// A directory has no name any more: what is in it has no path.
#[test]
fn a_comparison_goes_on_behind_damage() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/sub"]);
    let at = |name: &str| mounted.path("dir/sub").join(name);
    for directory in ["hidden", "whole"] {
        fs::create_dir(at(directory)).unwrap();
        fs::write(at(directory).join("file"), "then").unwrap();
        fs::write(at(directory).join("old"), "then").unwrap();
    }
    mounted.succeeds(&["snapshot", "create", "dir/sub", "one"]);
    for directory in ["hidden", "whole"] {
        fs::write(at(directory).join("file"), "now").unwrap();
        fs::write(at(directory).join("new"), "now").unwrap();
        fs::remove_file(at(directory).join("old")).unwrap();
    }
    mounted.succeeds(&["snapshot", "create", "dir/sub", "two"]);
    mounted.succeeds(&["umount", "dir"]);
    edit_nodes(&mounted, |node| {
        let is_it = |(key, value): (Key, &[u8])| {
            let is_entry = ItemKind::from_u8(key.kind) == Some(ItemKind::DirectoryEntry);
            is_entry && DirectoryEntry::name_of(value).is_ok_and(|name| name == b"hidden")
        };
        let index = (node.level() == 0).then(|| node.items().position(is_it))??;
        node.remove(index);
        Some(())
    });

    mounted.succeeds(&["mount", "image", "dir"]);
    let [one, two] = ["one", "two"].map(|name| format!("dir/.snapshots/sub/{name}"));
    for new in [&two[..], "dir/sub"] {
        let output = mounted.run(&["diff", &one, new]);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{told}");
        let shown = String::from_utf8(output.stdout).unwrap();
        assert_eq!(shown, "M whole/file (data)\n+ whole/new\n- whole/old\n");
        let damage = told.matches("its parent has no entry of it").count();
        assert!(damage > 0 && told.contains("`cairn fsck IMAGE`"), "{told}");
    }
    mounted.succeeds(&["umount", "dir"]);
}

#[test]
fn a_damaged_tree_of_subvolumes_is_named_with_what_to_do() {
    let Some(mounted) = Mounted::new() else { return };
    mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
    mounted.succeeds(&["mount", "image", "dir"]);
    mounted.succeeds(&["subvolume", "create", "dir/sub"]);
    fs::write(mounted.path("dir/sub/file"), "kept").unwrap();
    mounted.succeeds(&["snapshot", "create", "dir/sub", "one"]);
    mounted.succeeds(&["umount", "dir"]);
    edit_pages(&mounted, |page, node| (node.tree() == TREE_SUBVOLUMES).then(|| page[1000] ^= 0xff));

    let told = mounted.exits_with(1, &["mount", "image", "dir"]);
    let advice = format!("`cairn fsck {}`", mounted.path("image").display());
    assert!(told.contains("node at block") && told.contains(&advice), "{told}");
    // So it goes on from there.
    let told = mounted.exits_with(4, &["fsck", "image"]);
    let reason = "the tree that names the snapshots is damaged";
    let refusal = format!("image can't be repaired: {reason}");
    assert!(told.contains(&refusal) && told.contains("cairn fsck --extract"), "{told}");
    assert!(!told.contains("cairn fsck image --repair"), "{told}");
    let told = mounted.exits_with(4, &["fsck", "image", "--repair"]);
    assert!(told.contains(reason) && told.contains("cairn fsck --extract"), "{told}");
    let of_snapshot = ["fsck", "image", "--extract", "out", "--snapshot", "257/one"];
    let told = mounted.exits_with(8, &of_snapshot);
    assert!(told.contains(reason) && told.contains("without --snapshot"), "{told}");
    mounted.exits_with(4, &["fsck", "image", "--extract", "out"]);
    let is_kept = |path: &str| fs::read(mounted.path(path)).is_ok_and(|data| data == b"kept");
    assert!(["out/sub/file", "out/lost+found/257/file"].into_iter().any(is_kept));
}
