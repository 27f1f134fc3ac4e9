//! What operations log: what they changed, once, and nothing else.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    FileType, FsyncKind, InodeId, NewInode, RenameMode, Volume, VolumeOptions, XattrMode, mkfs,
};
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 0, gid: 0, device: 0, target: None };
const DIRECTORY: NewInode<'static> =
    NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };

struct Fixture {
    volume: Volume,
    directory: InodeId,
    other: InodeId,
}

impl Fixture {
    fn new() -> Self {
        let device = Arc::new(MemoryDevice::new(64 << 20));
        mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
        let volume =
            Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() })
                .unwrap();
        let [directory, other] = [b"directory", b"elsewhere"]
            .map(|name| volume.create(volume.root(), name, &DIRECTORY).unwrap().inode);
        let fixture = Self { volume, directory, other };
        fixture.written(|_| {});
        fixture
    }

    fn create(&self, name: &[u8]) -> InodeId {
        let inode = self.volume.create(self.directory, name, &FILE).unwrap().inode;
        self.volume.forget(inode, 1);
        inode
    }

    /// Items and their bytes in the checkpoint that is written after `work`.
    fn written(&self, work: impl FnOnce(&Self)) -> (u64, u64) {
        let before = self.volume.statistics();
        work(self);
        self.volume.sync().unwrap();
        let after = self.volume.statistics();
        (
            after.log.items_logged - before.log.items_logged,
            after.log.bytes_logged - before.log.bytes_logged,
        )
    }

    fn items(&self, work: impl FnOnce(&Self)) -> u64 {
        self.written(work).0
    }
}

#[test]
fn names_log_the_entry_the_directory_and_what_they_name() {
    let fixture = Fixture::new();
    let Fixture { volume, directory, other, .. } = &fixture;
    // Inode, entry, directory.
    assert_eq!(fixture.items(|f| _ = f.create(b"a")), 3);
    // A hundred names change the directory once.
    assert_eq!(
        fixture.items(|f| (0..100).for_each(|name| _ = f.create(format!("{name}").as_bytes()))),
        201
    );
    let file = volume.lookup(*directory, b"a").unwrap().inode;
    assert_eq!(fixture.items(|f| _ = f.volume.link(file, *directory, b"b").unwrap()), 3);
    // The old entry, the new one, the directory once, the file.
    assert_eq!(
        fixture.items(|f| f
            .volume
            .rename(*directory, b"b", *directory, b"c", RenameMode::Replace)
            .unwrap()),
        4
    );
    // And the other directory.
    assert_eq!(
        fixture.items(|f| f
            .volume
            .rename(*directory, b"c", *other, b"c", RenameMode::Replace)
            .unwrap()),
        5
    );
    assert_eq!(fixture.items(|f| f.volume.unlink(*other, b"c").unwrap()), 3);
    // The last name of a file that is open: an orphan as well.
    assert_eq!(fixture.items(|f| f.volume.unlink(*directory, b"a").unwrap()), 4);
    volume.forget(file, 3);
}

#[test]
fn a_hundred_removals_log_the_directory_once_and_nothing_above_it() {
    let fixture = Fixture::new();
    let name = |index: u32| format!("{index}").into_bytes();
    fixture.items(|f| (0..101).for_each(|index| _ = f.create(&name(index))));
    let one = fixture.items(|f| f.volume.unlink(f.directory, &name(100)).unwrap());
    let hundred = fixture
        .items(|f| (0..100).for_each(|index| f.volume.unlink(f.directory, &name(index)).unwrap()));
    assert_eq!(hundred, 100 * (one - 1) + 1);
}

#[test]
fn what_comes_and_goes_between_two_checkpoints_leaves_only_the_directory() {
    let fixture = Fixture::new();
    let work = |f: &Fixture| {
        for _ in 0..10 {
            let file = f.create(b"temporary");
            f.volume.write(file, 0, &[1; 20_000]).unwrap();
            f.volume.set_xattr(file, b"user.a", &[2; 5000], XattrMode::Any).unwrap();
            f.volume
                .rename(f.directory, b"temporary", f.directory, b"other", RenameMode::Replace)
                .unwrap();
            f.volume.unlink(f.directory, b"other").unwrap();
        }
    };
    assert_eq!(fixture.items(work), 1);
    // Written out before it is removed, it leaves nothing either, though its extents were in the
    // list for a while.
    let written_out = |f: &Fixture| {
        let file = f.create(b"temporary");
        let keeper = f.volume.create(f.directory, b"keeper", &FILE).unwrap().inode;
        f.volume.write(file, 0, &[1; 20_000]).unwrap();
        f.volume.write(keeper, 0, &[1; 4096]).unwrap();
        f.volume
            .rename(f.directory, b"temporary", f.directory, b"other", RenameMode::Replace)
            .unwrap();
        f.volume
            .rename(f.directory, b"other", f.directory, b"keeper", RenameMode::Replace)
            .unwrap();
        f.volume.forget(keeper, 1);
        f.volume.unlink(f.directory, b"keeper").unwrap();
    };
    assert_eq!(fixture.items(written_out), 1);
}

#[test]
fn an_fsync_of_what_is_durable_logs_nothing() {
    let fixture = Fixture::new();
    let file = fixture.create(b"file");
    let fsync = |f: &Fixture| f.volume.fsync_blocking(file, FsyncKind::Full).unwrap();
    fixture.volume.write(file, 0, &[1; 4096]).unwrap();
    assert_eq!(fixture.items(fsync), 4, "inode, extent, entry, directory");
    assert_eq!(fixture.items(fsync), 0);
    // Another file in the same directory is no reason to log this one again.
    let flushes = fixture.volume.statistics().log.flushes;
    assert_eq!(fixture.items(|f| _ = f.create(b"another")), 3);
    assert_eq!(fixture.items(fsync), 0);
    assert_eq!(fixture.volume.statistics().log.flushes, flushes + 1);
}

#[test]
fn an_append_of_one_block_logs_less_than_a_kibibyte() {
    let fixture = Fixture::new();
    let file = fixture.create(b"file");
    fixture.items(|_| {});
    let mut largest_bytes = 0;
    for block in 0..300 {
        let append = |f: &Fixture| {
            f.volume.write(file, block * 4096, &[block as u8; 4096]).unwrap();
            f.volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
        };
        let (items, bytes) = fixture.written(append);
        // The extent grows by one checksum, and from time to time a new one begins.
        assert!((2..=3).contains(&items), "{items} items for block {block}");
        largest_bytes = largest_bytes.max(bytes);
    }
    assert!(largest_bytes < 2048, "{largest_bytes} bytes");
    let statistics = fixture.volume.statistics();
    let average_bytes = statistics.log.bytes_logged / statistics.fsyncs();
    assert!(average_bytes < 1024, "{average_bytes} bytes on average");
}
