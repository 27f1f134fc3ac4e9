//! Extraction of volumes that tests make item by item: whole ones, damaged ones, hostile ones.
use super::*;
use crate::test_volume::*;
use cairn_blockdev::{DeviceError, Operation, forward_to_device};
use cairn_format::*;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::AtomicU64;

struct Extracted {
    folder: tempfile::TempDir,
    result: Result<ExtractReport, ExtractError>,
}

impl Extracted {
    fn of(device: &dyn BlockDevice) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(false);
        let result = extract(device, &folder.path().join("out"), &stop, &mut |_| {});
        Self { folder, result }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("out").join(name)
    }

    fn report(&self) -> &ExtractReport {
        self.result.as_ref().unwrap()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn metadata(&self, name: &str) -> Metadata {
        fs::symlink_metadata(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Asserts that this is the only loss of this path.
    #[track_caller]
    fn assert_loss(&self, path: &str, problem: &str) -> Loss {
        let report = self.report();
        let of_path: Vec<&Loss> =
            report.losses.iter().filter(|loss| loss.path.as_deref() == Some(path)).collect();
        assert!(of_path.len() == 1 && of_path[0].problem.contains(problem), "{report}");
        assert_eq!(report.exit_code(), 4);
        of_path[0].clone()
    }

    /// Asserts that nothing was made beside the directory.
    #[track_caller]
    fn assert_nothing_outside(&self) {
        let beside = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap());
        assert_eq!(beside.map(|entry| entry.file_name()).collect::<Vec<_>>(), ["out"]);
    }
}

/// What `TestVolume` writes into the blocks of a file.
fn expected(volume: &TestVolume, inode: u64) -> Vec<u8> {
    let mut bytes = vec![0; volume.inode(inode).size as usize];
    let range = Key::all(InodeNumber(inode), ItemKind::Extent);
    for (key, value) in volume.items.range(range) {
        let extent = Extent::decode(value).unwrap();
        for index in (0..extent.blocks).filter(|_| extent.kind == ExtentKind::Data) {
            let at = (key.offset + index) as usize * BLOCK_SIZE;
            let end = (at + BLOCK_SIZE).min(bytes.len());
            bytes[at.min(end)..end].fill((extent.start.0 + index) as u8);
        }
    }
    bytes
}

fn inode_of(volume: &TestVolume, name: &str) -> u64 {
    let named = |value: &Vec<u8>| {
        DirectoryEntry::decode(value).ok().filter(|entry| entry.name == name.as_bytes())
    };
    let entries = volume.items.iter().filter(|(key, _)| key.kind == ItemKind::DirectoryEntry as u8);
    entries.filter_map(|(_, value)| named(value)).next().unwrap().target.inode().unwrap().0
}

#[test]
fn everything_comes_out_as_it_was() {
    let mut volume = TestVolume::unwritten();
    let large = inode_of(&volume, "large");
    volume.items.retain(|key, _| key.inode != large || key.kind < 48 || key.kind > 49);
    volume.set_xattr(large, "user.small", 10);
    let sparse = volume.make(1, "holes", 0o100644, 0);
    volume.change_inode(sparse, |item| item.size = 5 * 4096 + 7);
    volume.add_extent(sparse, 1, 1, ExtentKind::Data);
    volume.add_extent(sparse, 5, 1, ExtentKind::Data);
    volume.change_inode(sparse, |item| {
        item.mode = 0o100400;
        item.accessed = Timestamp { seconds: 77, nanoseconds: 123_456_789 };
        item.modified = Timestamp { seconds: -5, nanoseconds: 1 };
    });
    let pipe = volume.make(1, "pipe", 0o10640, 0);
    volume.change_inode(inode_of(&volume, "mail"), |item| item.mode = 0o40500);
    volume.write();
    volume.assert_clean();
    let out = Extracted::of(&volume.device);
    let report = out.report();
    assert!(report.losses.is_empty() && report.complete && report.exit_code() == 0, "{report}");
    assert_eq!((report.files, report.directories, report.symlinks), (43, 3, 1));
    assert_eq!((report.hard_links, report.special_files), (1, 1));
    // Reading it changes the time of its last access.
    let holes = out.metadata("holes");
    for name in ["large", "holes"] {
        assert!(out.bytes(name) == expected(&volume, inode_of(&volume, name)), "{name}");
    }
    for index in 0..40 {
        let name = format!("message-{index}");
        let found = out.bytes(&format!("mail/new/{name}"));
        assert!(found == expected(&volume, inode_of(&volume, &name)), "{name}");
    }
    assert_eq!(out.metadata("large").ino(), out.metadata("mail/other name").ino());
    assert_eq!(fs::read_link(out.path("link")).unwrap(), Path::new("mail/new"));
    assert_eq!((holes.size(), holes.mode()), (5 * 4096 + 7, 0o100400));
    assert_eq!((holes.atime(), holes.atime_nsec()), (77, 123_456_789));
    assert_eq!((holes.mtime(), holes.mtime_nsec()), (-5, 1));
    assert!(holes.blocks() <= 4 * 8, "it takes {} blocks", holes.blocks());
    assert_eq!(out.metadata("sparse").size(), 0);
    let mail = out.metadata("mail");
    assert_eq!((mail.mode(), mail.mtime()), (0o40500, 1_000_000));
    assert_eq!(out.metadata("").mtime(), 1_000_000);
    assert!(out.metadata("pipe").file_type().is_fifo() && pipe > 0);
    assert!(!out.path("gone").exists(), "what was removed stays away");
    let mut value = vec![0; 100];
    let length = rustix::fs::getxattr(out.path("large"), "user.small", &mut value).unwrap();
    assert_eq!(value[..length], [9; 10]);
}

/// A device of which every block can be read at the second try only.
struct FailsOnce<'a> {
    device: &'a dyn BlockDevice,
    /// Where the last read began.
    last: AtomicU64,
}

impl BlockDevice for FailsOnce<'_> {
    fn read(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), DeviceError> {
        if self.last.swap(offset_bytes, Ordering::Relaxed) != offset_bytes {
            let error = std::io::Error::from_raw_os_error(5);
            let length = buffer.len() as u64;
            return Err(DeviceError::new(
                Operation::Read,
                offset_bytes,
                length,
                &"test".into(),
                error,
            ));
        }
        self.device.read(offset_bytes, buffer)
    }
    forward_to_device!(self => self.device; write, write_set, flush, discard, length_bytes, flush_time);
}

#[test]
fn an_error_that_does_not_come_again_costs_nothing() {
    let volume = TestVolume::full();
    let whole = Extracted::of(&volume.device);
    let failing = FailsOnce { device: &volume.device, last: AtomicU64::new(u64::MAX) };
    let out = Extracted::of(&failing);
    assert_ne!(failing.last.load(Ordering::Relaxed), u64::MAX);
    assert_eq!(out.report().to_string(), whole.report().to_string());
}

#[test]
fn damaged_data_becomes_a_hole_and_is_named() {
    let mut volume = TestVolume::empty();
    let file = volume.make_file(1, "file", 10 * 4096 - 6);
    volume.make_file(1, "other", 5000);
    volume.write();
    let key = Key::new(InodeNumber(file), ItemKind::Extent, 0);
    let start = Extent::decode(&volume.items[&key]).unwrap().start.0;
    for block in [3, 4, 9] {
        volume.flip(BlockNumber(start + block), 100, 0xff);
    }
    let out = Extracted::of(&volume.device);
    let mut bytes = expected(&volume, file);
    bytes[3 * 4096..5 * 4096].fill(0);
    bytes[9 * 4096..].fill(0);
    assert!(out.bytes("file") == bytes);
    assert_eq!(out.bytes("other"), expected(&volume, inode_of(&volume, "other")));
    let ranges: Vec<_> = out
        .report()
        .losses
        .iter()
        .map(|loss| (loss.path.as_deref(), loss.offset_bytes, loss.length_bytes))
        .collect();
    let path = Some("/file");
    assert_eq!(
        ranges,
        [(path, Some(3 * 4096), Some(2 * 4096)), (path, Some(9 * 4096), Some(4096 - 6))]
    );
    let text = out.report().to_string();
    assert!(text.contains("/file: 8192 bytes at offset 12288 are a hole now: does"), "{text}");
    assert_eq!(out.report().exit_code(), 4);
}

#[test]
fn extents_that_claim_the_same_part_give_nothing_of_it() {
    let mut volume = TestVolume::empty();
    let file = volume.make_file(1, "file", 8 * 4096);
    volume.add_extent(file, 2, 3, ExtentKind::Data);
    volume.write();
    let out = Extracted::of(&volume.device);
    let loss = out.assert_loss("/file", "another extent claims this part");
    assert_eq!((loss.offset_bytes, loss.length_bytes), (Some(2 * 4096), Some(6 * 4096)));
    let bytes = out.bytes("file");
    assert!(bytes[..2 * 4096].iter().all(|byte| *byte != 0));
    assert!(bytes[2 * 4096..].iter().all(|byte| *byte == 0));
}

#[test]
fn no_name_leads_out_of_the_directory() {
    let mut volume = TestVolume::empty();
    let folder = volume.make_directory(1, "folder");
    for (directory, name) in
        [(1, ".."), (1, "."), (folder, ".."), (folder, "../escaped"), (1, "/tmp/x"), (1, "a\0b")]
    {
        volume.make_file(directory, name, 100);
    }
    // A directory by such a name, and a link that what follows must not go through.
    let above = volume.make_directory(folder, "../../above");
    volume.make_file(above, "file", 100);
    volume.make_file(folder, "kept", 100);
    volume.write();
    let out = Extracted::of(&volume.device);
    out.assert_nothing_outside();
    assert_eq!(out.report().losses.len(), 7, "{}", out.report());
    assert_eq!(out.bytes("folder/kept"), expected(&volume, inode_of(&volume, "kept")));
    assert_eq!((out.report().files, out.report().directories), (1, 2));
}

#[test]
fn names_that_stand_twice_never_overwrite_or_follow_anything() {
    let mut volume = TestVolume::empty();
    let link = volume.make(1, "place", 0o120777, 0);
    let target = b"../beside".to_vec();
    volume.change_inode(link, |item| item.size = target.len() as u64);
    volume.items.insert(Key::new(InodeNumber(link), ItemKind::Symlink, 0), target);
    // The same name again, in the next slot, of a directory with a file in it.
    let directory = volume.make_directory(1, "elsewhere");
    volume.make_file(directory, "file", 10);
    let (key, value) = TestVolume::entry(directory, 1, "place", 0o40755);
    volume.items.insert(Key { offset: key.offset + 1, ..key }, value);
    let (key, _) = TestVolume::entry(directory, 1, "elsewhere", 0o40755);
    volume.items.remove(&key);
    volume.write();
    let out = Extracted::of(&volume.device);
    out.assert_nothing_outside();
    assert!(out.path("place").is_symlink());
    out.assert_loss("/place", "cannot make this directory: File exists");
    assert_eq!(out.report().files, 0);
}

#[test]
fn a_directory_within_itself_ends() {
    let mut volume = TestVolume::empty();
    let outer = volume.make_directory(1, "outer");
    let inner = volume.make_directory(outer, "inner");
    let (key, value) = TestVolume::entry(outer, inner, "again", 0o40755);
    volume.items.insert(key, value);
    volume.change_inode(inner, |item| item.entries += 1);
    volume.write();
    let out = Extracted::of(&volume.device);
    out.assert_loss("/outer/inner/again", "a second name of a directory");
    assert_eq!(out.report().directories, 3);
}

/// The contents of all files below `folder`.
fn find_files(folder: &Path, files: &mut Vec<Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            find_files(&entry.path(), files);
        } else if kind.is_file() {
            files.push(fs::read(entry.path()).unwrap());
        }
    }
}

#[test]
fn what_a_lost_leaf_held_is_named_and_the_rest_goes_on() {
    let volume = TestVolume::full();
    let leaves: Vec<BlockNumber> = volume
        .nodes
        .iter()
        .copied()
        .filter(|address| {
            let node = volume.read_node(*address);
            node.level() == 0 && node.tree() == TREE_FILES
        })
        .collect();
    for address in leaves {
        let node = volume.read_node(address);
        volume.flip(address, 9000, 0x55);
        let out = Extracted::of(&volume.device);
        let report = out.report();
        assert_eq!(report.exit_code(), 4, "{report}");
        assert!(report.complete && !report.losses.is_empty());
        // What does not stand in this leaf is there, by its name or another.
        let inodes: Vec<u64> = node.items().map(|(key, _)| key.inode).collect();
        let large = inode_of(&volume, "large");
        if !inodes.contains(&large) {
            let mut files = Vec::new();
            find_files(&out.path(""), &mut files);
            let found = files.iter().any(|file| *file == expected(&volume, large));
            assert!(found, "no large file: {report}");
        }
        volume.flip(address, 9000, 0x55);
    }
}

#[test]
fn leaves_below_a_damaged_node_are_found() {
    let volume = TestVolume::full();
    let inner: Vec<BlockNumber> = volume
        .nodes
        .iter()
        .copied()
        .filter(|address| volume.read_node(*address).level() == 1)
        .collect();
    assert!(inner.len() > 2);
    for address in inner {
        volume.flip(address, 9000, 0x55);
        let out = Extracted::of(&volume.device);
        let report = out.report();
        assert_eq!((report.files, report.directories, report.symlinks), (42, 3, 1), "{report}");
        // The node itself; and the attribute that is too long for ext4.
        assert!(report.losses[0].problem.contains("node"), "{report}");
        let others = report.losses[1..].iter();
        let others: Vec<_> = others.filter(|loss| !loss.problem.contains("user.large")).collect();
        assert!(others.is_empty(), "{report}");
        volume.flip(address, 9000, 0x55);
    }
}

#[test]
fn a_directory_that_holds_something_is_refused() {
    let volume = TestVolume::full();
    let folder = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    let extract_to =
        |path: &Path| extract(&volume.device, path, &stop, &mut |_| {}).map(|report| report.files);
    fs::write(folder.path().join("file"), "x").unwrap();
    let refused = extract_to(folder.path()).unwrap_err();
    assert!(matches!(refused, ExtractError::NotEmpty { .. }), "{refused}");
    let refused = extract_to(&folder.path().join("file")).unwrap_err();
    assert!(refused.to_string().contains("Not a directory"), "{refused}");
    let refused = extract_to(&folder.path().join("no/such")).unwrap_err();
    assert!(refused.to_string().contains("No such file"), "{refused}");
    fs::create_dir(folder.path().join("empty")).unwrap();
    assert_eq!(extract_to(&folder.path().join("empty")).unwrap(), 42);
}

#[test]
fn it_ends_when_the_caller_wants_that() {
    let volume = TestVolume::full();
    let folder = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    let mut show = |progress: ExtractProgress<'_>| {
        if let ExtractProgress::Extracting { report, .. } = progress
            && report.data_bytes > 1_300_000
        {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let ended = extract(&volume.device, &folder.path().join("out"), &stop, &mut show);
    let Err(ExtractError::Interrupted { report }) = ended else { panic!("{ended:?}") };
    assert!(!report.complete && report.files < 42, "{report}");
    // No half of the large file is left.
    let large = folder.path().join("out/large");
    assert!(!large.exists() || fs::metadata(large).unwrap().len() == 1_500_000);
}

#[test]
fn a_short_device_gives_what_it_has() {
    let mut volume = TestVolume::empty();
    volume.make_file(1, "first", 9000);
    let last = volume.make_file(1, "last", 20_000);
    volume.write();
    let key = Key::new(InodeNumber(last), ItemKind::Extent, 0);
    let start = Extent::decode(&volume.items[&key]).unwrap().start;
    let short = cairn_blockdev::MemoryDevice::new(start.offset_bytes());
    let mut bytes = vec![0; start.offset_bytes() as usize];
    volume.device.read(0, &mut bytes).unwrap();
    short.write(0, &[&bytes]).unwrap();
    let out = Extracted::of(&short);
    assert_eq!(out.bytes("first"), expected(&volume, inode_of(&volume, "first")));
    let loss = out.assert_loss("/last", "lie outside the volume");
    assert_eq!((loss.offset_bytes, loss.length_bytes), (Some(0), Some(20_000)));
    assert_eq!(out.bytes("last"), vec![0; 20_000]);
}

#[test]
fn attributes_that_no_host_takes_are_named() {
    let mut volume = TestVolume::empty();
    let file = volume.make_file(1, "file", 10);
    volume.change_inode(file, |item| item.modified.nanoseconds = 1_073_741_823);
    let huge = volume.make_file(1, "huge", 0);
    volume.change_inode(huge, |item| item.size = i64::MAX as u64);
    let device = volume.make(1, "device", 0o20600, 0);
    volume.change_inode(device, |item| item.device = u64::MAX);
    let link = volume.make(1, "link", 0o120777, 0);
    volume.change_inode(link, |item| item.size = 9);
    volume.write();
    let out = Extracted::of(&volume.device);
    out.assert_loss("/file", "cannot set the times");
    out.assert_loss("/huge", "its length of 9223372036854775807 bytes");
    out.assert_loss("/device", "cannot make this character device");
    out.assert_loss("/link", "its target of 9 bytes is damaged");
    assert_eq!(out.bytes("file"), expected(&volume, file));
    assert!(!out.path("link").is_symlink());
}
