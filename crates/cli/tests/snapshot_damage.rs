//! Damage that only a snapshot has: it is named with what to do, the rest can be read, and goes
//! with the snapshot.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use std::fs;

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
        assert!(advice.contains("cairn snapshot delete"), "{advice}");
        assert!(!advice.contains("without a name"), "{advice}");
    }
    // What is whole comes out, and the damaged file is named.
    let subvolume = "257/one";
    let output = mounted.run(&["fsck", "--extract", "out", "--snapshot", subvolume, "image"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("/lost: 4096 bytes"), "{output:?}");
    assert_eq!(fs::read_to_string(mounted.path("out/kept")).unwrap(), kept);

    mounted.succeeds(&["mount", "image", "dir"]);
    let snapshot = mounted.path("dir/.snapshots/sub/one");
    assert!(fs::read(snapshot.join("lost")).is_err());
    assert_eq!(fs::read_to_string(snapshot.join("kept")).unwrap(), kept);
    mounted.succeeds(&["snapshot", "delete", "dir/sub", "one"]);
    assert_eq!(fs::read_to_string(mounted.path("dir/sub/kept")).unwrap(), kept);
    mounted.succeeds(&["umount", "dir"]);
    mounted.succeeds(&["fsck", "--data", "image"]);
}
