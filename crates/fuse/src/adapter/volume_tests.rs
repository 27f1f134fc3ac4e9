//! Real mounts of real volumes: they need root and `/dev/fuse`, and are skipped without.
use crate::kernel::mapping::Mapping;
use crate::session_tests::can_mount;
use crate::tiny_file_system::{options_of_tests, unmount_soon};
use crate::{MountOptions, SessionError, Unmounter, XATTR_STATISTICS, find_mount, mount};
use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
use cairn_engine::{Volume, VolumeOptions, mkfs};
use cairn_environment::clock;
use cairn_environment::thread::{self, JoinHandle};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, StatxFlags, XattrFlags,
};
use rustix::io::Errno;
use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const IMAGE_BYTES: u64 = 256 << 20;

fn open_volume(image: &Path, read_only: bool) -> Volume {
    let mode = if read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    Volume::open(Arc::new(FileDevice::open(image, mode).unwrap()), volume_options(read_only))
        .unwrap()
}

/// Only explicit syncs make anything durable.
fn volume_options(read_only: bool) -> VolumeOptions {
    VolumeOptions {
        read_only,
        commit_interval: Duration::from_secs(1000),
        ..VolumeOptions::default()
    }
}

pub struct MountedImage {
    unmounter: Unmounter,
    server: Option<JoinHandle<Result<(), SessionError>>>,
    directory: TempDir,
    forwards_sync: bool,
}

impl MountedImage {
    pub fn new(options: &MountOptions) -> Self {
        let directory = tempfile::Builder::new().prefix("cairn-fuse-test-").tempdir().unwrap();
        let device = FileDevice::create(&directory.path().join("image"), IMAGE_BYTES).unwrap();
        mkfs::mkfs(&device, &mkfs::MkfsOptions::default()).unwrap();
        drop(device);
        fs::create_dir(directory.path().join("mnt")).unwrap();
        Self::mount(directory, options)
    }
    fn mount(directory: TempDir, options: &MountOptions) -> Self {
        let volume = open_volume(&directory.path().join("image"), options.read_only);
        Self::mount_volume(directory, volume, options)
    }
    /// The same image again, on the device that `wrap` makes of the image's device.
    pub fn remount_through(
        self,
        wrap: impl FnOnce(FileDevice) -> Arc<dyn BlockDevice>,
        options: &MountOptions,
    ) -> Self {
        let directory = self.unmount();
        let device =
            wrap(FileDevice::open(&directory.path().join("image"), OpenMode::ReadWrite).unwrap());
        Self::mount_volume(directory, Volume::open(device, volume_options(false)).unwrap(), options)
    }
    fn mount_volume(directory: TempDir, volume: Volume, options: &MountOptions) -> Self {
        let (image, mountpoint) = (directory.path().join("image"), directory.path().join("mnt"));
        let mounted = mount(volume, &image, &mountpoint, options).unwrap();
        let (unmounter, forwards_sync) = (mounted.unmounter(), mounted.forwards_sync());
        let server = Some(thread::spawn("mounted", move || mounted.run()));
        Self { unmounter, server, directory, forwards_sync }
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("mnt").join(name)
    }
    pub fn root(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }
    /// Unmounts and returns the directory with the image.
    pub fn unmount(mut self) -> TempDir {
        unmount_soon(&self.unmounter);
        self.server.take().unwrap().join().unwrap().unwrap();
        assert_eq!(find_mount(&self.root()).unwrap(), None);
        let other = tempfile::Builder::new().prefix("cairn-fuse-test-").tempdir().unwrap();
        std::mem::replace(&mut self.directory, other)
    }
    /// As [`Self::unmount`], once the connection was cut: the server may have noticed that first.
    pub fn unmount_after_cut(mut self) {
        unmount_soon(&self.unmounter);
        let ended = self.server.take().unwrap().join().unwrap();
        assert!(matches!(ended, Ok(()) | Err(SessionError::Aborted(_))), "{ended:?}");
        assert_eq!(find_mount(&self.root()).unwrap(), None);
    }
    pub fn remount(self, options: &MountOptions) -> Self {
        Self::mount(self.unmount(), options)
    }
    /// The content of a file of the root directory, after another program unmounted.
    fn after_unmount(mut self, name: &str) -> Option<Vec<u8>> {
        self.server.take().unwrap().join().unwrap().unwrap();
        self.after_crash(name)
    }
    /// The content of a file of the root directory after a crash now.
    fn after_crash(&self, name: &str) -> Option<Vec<u8>> {
        let copy = self.directory.path().join("copy");
        fs::copy(self.directory.path().join("image"), &copy).unwrap();
        let volume = open_volume(&copy, false);
        let content = volume.lookup(volume.root(), name.as_bytes()).ok().map(|attributes| {
            let mut content = Vec::new();
            volume.read(attributes.inode, 0, attributes.size_bytes as usize, &mut content).unwrap();
            content
        });
        volume.close().unwrap();
        fs::remove_file(&copy).unwrap();
        content
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        // A failed test leaves no mount behind.
        let _ = self.unmounter.detach();
    }
}

pub fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i / 3) as u8 ^ (i >> 12) as u8).collect()
}

#[test]
fn files_and_names_survive_a_remount() {
    if !can_mount() {
        return;
    }
    for writeback in [true, false] {
        let options = MountOptions { writeback, ..options_of_tests() };
        let mounted = MountedImage::new(&options);
        let big = pattern(5_000_001);
        fs::create_dir_all(mounted.path("a/b")).unwrap();
        fs::write(mounted.path("a/b/big"), &big).unwrap();
        assert!(fs::read(mounted.path("a/b/big")).unwrap() == big);
        assert!(fs::metadata(mounted.path("a/b/big")).unwrap().blocks() >= 5_000_001 / 512);
        fs::rename(mounted.path("a/b/big"), mounted.path("a/moved")).unwrap();
        fs::hard_link(mounted.path("a/moved"), mounted.path("linked")).unwrap();
        symlink("a/moved", mounted.path("symbolic")).unwrap();
        fs::write(mounted.path("gone"), "x").unwrap();
        fs::remove_file(mounted.path("gone")).unwrap();
        fs::remove_dir(mounted.path("a/b")).unwrap();
        assert_eq!(
            fs::metadata(mounted.path("gone")).unwrap_err().raw_os_error(),
            Some(Errno::NOENT.raw_os_error())
        );

        let mounted = mounted.remount(&options);
        assert!(fs::read(mounted.path("symbolic")).unwrap() == big);
        assert_eq!(fs::read_link(mounted.path("symbolic")).unwrap(), Path::new("a/moved"));
        let metadata = fs::metadata(mounted.path("linked")).unwrap();
        assert_eq!((metadata.nlink(), metadata.len(), metadata.mode()), (2, 5_000_001, 0o100_644));
        assert!(!mounted.path("gone").exists() && !mounted.path("a/b").exists());
        assert_eq!(fs::metadata(mounted.path("a")).unwrap().nlink(), 2);
        mounted.unmount();
    }
}

#[test]
fn what_fsync_acknowledged_survives_a_crash() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let content = pattern(300_000);
    let mut file = File::create(mounted.path("synced")).unwrap();
    file.write_all(&content).unwrap();
    assert_eq!(mounted.after_crash("synced"), None);
    file.sync_data().unwrap();
    assert!(mounted.after_crash("synced") == Some(content.clone()));
    file.set_len(10).unwrap();
    file.sync_all().unwrap();
    assert_eq!(mounted.after_crash("synced").as_deref(), Some(&content[..10]));
    drop(file);

    let root = File::open(mounted.root()).unwrap();
    fs::write(mounted.path("named"), "").unwrap();
    root.sync_all().unwrap();
    assert_eq!(mounted.after_crash("named"), Some(Vec::new()));
    drop(root);
    mounted.unmount();
}

#[test]
fn many_fsyncs_at_once_are_all_answered() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&MountOptions { threads: 2, ..options_of_tests() });
    let threads: Vec<_> = (0..24)
        .map(|number| {
            let path = mounted.path(&format!("file{number}"));
            thread::spawn("syncer", move || {
                let file = File::create(path).unwrap();
                for round in 0..8 {
                    file.write_all_at(&[number; 5000], round * 5000).unwrap();
                    file.sync_all().unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(mounted.after_crash("file23"), Some(vec![23; 40_000]));
    mounted.unmount();
}

#[test]
fn syncs_of_the_whole_volume_reach_it() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    if mounted.forwards_sync {
        fs::write(mounted.path("one"), "1").unwrap();
        rustix::fs::syncfs(File::open(mounted.root()).unwrap()).unwrap();
        assert_eq!(mounted.after_crash("one").as_deref(), Some(&b"1"[..]));
    }
    mounted.unmount();

    for threads in [1, 8] {
        let plain = MountedImage::new(&MountOptions { plain: true, threads, ..options_of_tests() });
        let content = pattern(24 << 20);
        fs::write(plain.path("two"), &content).unwrap();
        crate::sync(&plain.root()).unwrap();
        assert!(plain.after_crash("two") == Some(content));
        plain.unmount();
    }

    // No program syncs here.
    let through =
        MountedImage::new(&MountOptions { plain: true, writeback: false, ..options_of_tests() });
    fs::write(through.path("three"), "3").unwrap();
    // The commit comes by itself; on a busy machine it takes longer than a second.
    let turns = (0..600).take_while(|_| through.after_crash("three").as_deref() != Some(&b"3"[..]));
    let waited =
        turns.inspect(|_| cairn_environment::clock::sleep(Duration::from_millis(100))).count();
    assert!(waited < 600, "it is never committed");
    fs::write(through.path("four"), "4").unwrap();
    // The server is this process, so the unmount does not wait for its end.
    crate::unmount(&through.root()).unwrap();
    assert_eq!(through.after_unmount("four").as_deref(), Some(&b"4"[..]));
}

#[test]
fn all_is_durable_when_umount_returns() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    if mounted.forwards_sync {
        let content = pattern(24 << 20);
        fs::write(mounted.path("unsynced"), &content).unwrap();
        // A child that another test starts has the open file until it becomes its program.
        while let Err(error) =
            rustix::mount::unmount(mounted.root(), rustix::mount::UnmountFlags::empty())
        {
            assert_eq!(error, rustix::io::Errno::BUSY);
            cairn_environment::clock::sleep(Duration::from_millis(1));
        }
        assert!(mounted.after_crash("unsynced") == Some(content));
    }
}

#[test]
fn attributes_are_kept_and_set_id_bits_cleared() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let path = mounted.path("file");
    let file = File::create(&path).unwrap();
    let mode = || fs::metadata(&path).unwrap().mode() & 0o7777;
    fs::set_permissions(&path, Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(mode(), 0o6755);
    std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
    assert_eq!(
        (mode(), fs::metadata(&path).unwrap().uid(), fs::metadata(&path).unwrap().gid()),
        (0o755, 12, 34)
    );
    let time = std::time::SystemTime::UNIX_EPOCH - Duration::from_millis(1500);
    file.set_modified(time).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (-2, 500_000_000));
    let born = rustix::fs::statx(
        CWD,
        &path,
        AtFlags::empty(),
        StatxFlags::BTIME | StatxFlags::BASIC_STATS,
    )
    .unwrap();
    assert_ne!(born.stx_mask & StatxFlags::BTIME.bits(), 0);
    assert!(born.stx_btime.tv_sec > 1_700_000_000, "{:?}", born.stx_btime);
    drop(file);
    let device = rustix::fs::makedev(1, 3);
    rustix::fs::mknodat(
        CWD,
        mounted.path("null"),
        FileType::CharacterDevice,
        Mode::from_raw_mode(0o600),
        device,
    )
    .unwrap();
    rustix::fs::mknodat(CWD, mounted.path("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0)
        .unwrap();

    let mounted = mounted.remount(&options_of_tests());
    let metadata = fs::metadata(mounted.path("file")).unwrap();
    assert_eq!(
        (metadata.mtime(), metadata.mtime_nsec(), metadata.uid(), metadata.gid()),
        (-2, 500_000_000, 12, 34)
    );
    assert_eq!(fs::metadata(mounted.path("null")).unwrap().rdev(), device);
    assert_eq!(fs::read(mounted.path("null")).unwrap(), b"");
    assert_eq!(fs::metadata(mounted.path("pipe")).unwrap().mode(), 0o010_640);
    let again =
        rustix::fs::statx(CWD, mounted.path("file"), AtFlags::empty(), StatxFlags::BTIME).unwrap();
    assert_eq!(
        (again.stx_btime.tv_sec, again.stx_btime.tv_nsec),
        (born.stx_btime.tv_sec, born.stx_btime.tv_nsec)
    );
    mounted.unmount();
}

#[test]
fn large_directories_are_listed_once_each() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let names: std::collections::BTreeSet<String> =
        (0..2500).map(|i| format!("{i:0width$}", width = 1 + i % 200)).collect();
    names.iter().for_each(|name| drop(File::create(mounted.path(name)).unwrap()));
    let mounted = mounted.remount(&options_of_tests());
    let mut seen = 0;
    for entry in fs::read_dir(mounted.root()).unwrap() {
        let entry = entry.unwrap();
        assert!(names.contains(entry.file_name().to_str().unwrap()));
        assert!(entry.metadata().unwrap().is_file());
        seen += 1;
    }
    assert_eq!(seen, names.len());
    for name in &names {
        fs::remove_file(mounted.path(name)).unwrap();
    }
    assert_eq!(fs::read_dir(mounted.root()).unwrap().count(), 0);
    let dots = fs::metadata(mounted.path(".")).unwrap().ino();
    assert_eq!(dots, 1);
    mounted.unmount();
}

#[test]
fn ranges_are_allocated_freed_and_copied() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let content = pattern(1 << 20);
    fs::write(mounted.path("file"), &content).unwrap();
    let file = File::options().read(true).write(true).open(mounted.path("file")).unwrap();
    rustix::fs::fallocate(
        &file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        8192,
        100_000,
    )
    .unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 1 << 20, 1 << 20).unwrap();
    let mut expected = content.clone();
    expected[8192..108_192].fill(0);
    assert!(fs::read(mounted.path("file")).unwrap() == expected);
    assert_eq!(
        rustix::fs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096),
        Err(Errno::OPNOTSUPP)
    );
    let target = File::create(mounted.path("copy")).unwrap();
    let copied =
        rustix::fs::copy_file_range(&file, Some(&mut 4000), &target, Some(&mut 100), 500_000)
            .unwrap();
    assert_eq!(copied, 500_000);
    let copy = fs::read(mounted.path("copy")).unwrap();
    assert!(copy[100..] == expected[4000..504_000] && copy[..100] == [0; 100]);
    drop((file, target));
    mounted.unmount();
}

/// A program that copies a sparse file asks for its data right after another program wrote it.
#[test]
fn data_that_the_kernel_still_holds_is_not_called_a_hole() {
    if !can_mount() {
        return;
    }
    for writeback in [true, false] {
        let mounted = MountedImage::new(&MountOptions { writeback, ..options_of_tests() });
        let file = File::create(mounted.path("sparse")).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 4096], 512 << 10).unwrap();
        let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap();
        assert!(data <= 512 << 10, "{data}");
        let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(512 << 10)).unwrap();
        assert!(hole >= (512 << 10) + 4096, "{hole}");
        if !writeback {
            assert_eq!((data, hole), (512 << 10, (512 << 10) + 4096));
            assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(hole)), Err(Errno::NXIO));
        }
        drop(file);
        mounted.unmount();
    }
}

/// Whether SEEK_DATA finds `at`, with only holes around it.
fn is_data(file: &File, at: u64) -> bool {
    let data = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)).unwrap();
    let hole = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(at)).unwrap();
    data <= at && hole > at
}

#[test]
fn what_is_written_through_a_mapping_is_seen_by_all_and_made_durable() {
    if !can_mount() {
        return;
    }
    for (writeback, plain) in [(true, false), (false, false), (false, true)] {
        let mounted = MountedImage::new(&MountOptions { writeback, plain, ..options_of_tests() });
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(mounted.path("mapped"))
            .unwrap();
        file.set_len(1 << 20).unwrap();
        let mapping = Mapping::new(&file, 1 << 20);
        mapping.write(5, b"first");
        mapping.write(700_000, b"second");
        let mut read = [0; 6];
        file.read_exact_at(&mut read, 700_000).unwrap();
        assert_eq!(&read, b"second");
        assert!(is_data(&file, 700_000) && is_data(&file, 5), "not a hole before it is synced");
        file.write_all_at(b"third", 300_000).unwrap();
        assert_eq!(mapping.read(300_004), b'd', "a mapping shows what was written");
        mapping.write(300_000, b"T");
        mapping.sync();
        let expected = [(5, &b"first"[..]), (300_000, b"Third"), (700_000, b"second")];
        let durable = mounted.after_crash("mapped").unwrap();
        assert!(expected.iter().all(|(at, bytes)| durable[*at..].starts_with(bytes)), "msync");
        mapping.write(900_000, b"fourth");
        file.sync_data().unwrap();
        assert!(
            mounted.after_crash("mapped").unwrap()[900_000..].starts_with(b"fourth"),
            "fdatasync"
        );
        // The kernel copies what it has not sent yet.
        mapping.write(100_000, b"fifth");
        let copy = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(mounted.path("copy"))
            .unwrap();
        let copied =
            rustix::fs::copy_file_range(&file, Some(&mut 98_304), &copy, Some(&mut 98_304), 8192)
                .unwrap();
        assert_eq!(copied, 8192);
        assert!(fs::read(mounted.path("copy")).unwrap()[100_000..].starts_with(b"fifth"));
        drop((mapping, file, copy));
        mounted.unmount();
    }
}

#[test]
fn appended_parts_follow_each_other_whatever_their_length() {
    if !can_mount() {
        return;
    }
    for writeback in [true, false] {
        let options = MountOptions { writeback, ..options_of_tests() };
        let mounted = MountedImage::new(&options);
        let all = pattern(3_000_000);
        let mut file =
            File::options().append(true).create_new(true).open(mounted.path("appended")).unwrap();
        let (mut at, mut length) = (0, 1);
        while at < all.len() {
            let end = all.len().min(at + length);
            file.write_all(&all[at..end]).unwrap();
            (at, length) = (end, length * 3 + 7);
        }
        assert!(fs::read(mounted.path("appended")).unwrap() == all);
        file.sync_all().unwrap();
        assert!(mounted.after_crash("appended").unwrap() == all);
        drop(file);
        let mounted = mounted.remount(&options);
        assert!(fs::read(mounted.path("appended")).unwrap() == all);
        mounted.unmount();
    }
}

#[test]
fn extended_attributes_and_those_of_the_mount() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let path = mounted.path("file");
    fs::write(&path, "").unwrap();
    let value = pattern(5000);
    let get = |name: &str| {
        let mut buffer = vec![0; 70_000];
        rustix::fs::getxattr(&path, name, &mut buffer[..]).map(|length| buffer[..length].to_vec())
    };
    rustix::fs::setxattr(&path, "user.long", &value, XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(&path, "trusted.short", b"s", XattrFlags::CREATE).unwrap();
    assert_eq!(
        rustix::fs::setxattr(&path, "user.long", b"", XattrFlags::CREATE),
        Err(Errno::EXIST)
    );
    assert_eq!(
        rustix::fs::setxattr(&path, "user.other", b"", XattrFlags::REPLACE),
        Err(Errno::NODATA)
    );
    assert_eq!(get("user.long").unwrap(), value);
    assert_eq!(rustix::fs::getxattr(&path, "user.long", &mut [0; 10][..]), Err(Errno::RANGE));
    assert_eq!(get("user.none"), Err(Errno::NODATA));
    let mut names = vec![0; 1000];
    let length = rustix::fs::listxattr(&path, &mut names[..]).unwrap();
    let mut names: Vec<&[u8]> = names[..length].split_inclusive(|&byte| byte == 0).collect();
    names.sort();
    assert_eq!(names, [&b"trusted.short\0"[..], b"user.long\0"]);
    rustix::fs::removexattr(&path, "user.long").unwrap();
    assert_eq!(get("user.long"), Err(Errno::NODATA));

    let statistics = crate::statistics(&mounted.root()).unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&statistics).unwrap();
    assert_eq!(statistics["failure"], serde_json::Value::Null);
    assert!(statistics["total_bytes"].as_u64().unwrap() > IMAGE_BYTES / 2);
    assert_eq!(rustix::fs::listxattr(mounted.root(), &mut [0_u8; 100][..]), Ok(0));
    assert_eq!(
        rustix::fs::setxattr(mounted.root(), XATTR_STATISTICS, b"", XattrFlags::empty()),
        Err(Errno::PERM)
    );
    mounted.unmount();
}

#[test]
fn files_without_names_live_until_they_are_closed() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(mounted.path("unlinked"))
        .unwrap();
    file.write_all(b"still here").unwrap();
    fs::remove_file(mounted.path("unlinked")).unwrap();
    file.sync_all().unwrap();
    let mut text = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), file.metadata().unwrap().nlink()), ("still here", 0));
    drop(file);

    let unnamed = rustix::fs::open(
        mounted.root(),
        OFlags::TMPFILE | OFlags::RDWR,
        Mode::from_raw_mode(0o600),
    )
    .unwrap();
    rustix::io::write(&unnamed, b"named later").unwrap();
    let descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&unnamed));
    rustix::fs::linkat(CWD, descriptor, CWD, mounted.path("named"), AtFlags::SYMLINK_FOLLOW)
        .unwrap();
    drop(unnamed);
    let mounted = mounted.remount(&options_of_tests());
    assert_eq!(fs::read(mounted.path("named")).unwrap(), b"named later");
    assert_eq!(fs::read_dir(mounted.root()).unwrap().count(), 1);
    mounted.unmount();
}

#[test]
fn renames_replace_refuse_or_exchange() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let (a, b) = (mounted.path("a"), mounted.path("b"));
    fs::write(&a, "a").unwrap();
    fs::write(&b, "b").unwrap();
    let rename = |flags| rustix::fs::renameat_with(CWD, &a, CWD, &b, flags);
    assert_eq!(rename(RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename(RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"b".to_vec(), b"a".to_vec()));
    assert_eq!(rename(RenameFlags::WHITEOUT | RenameFlags::EXCHANGE), Err(Errno::INVAL));
    rename(RenameFlags::empty()).unwrap();
    assert!(!a.exists());
    assert_eq!(fs::read(&b).unwrap(), b"b");
    mounted.unmount();
}

/// What an overlay file system needs from its upper layer.
#[test]
fn a_rename_leaves_a_whiteout() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    let (a, b) = (mounted.path("a"), mounted.path("b"));
    fs::write(&a, "a").unwrap();
    let rename =
        |from: &Path, to: &Path, flags| rustix::fs::renameat_with(CWD, from, CWD, to, flags);
    rename(&a, &b, RenameFlags::WHITEOUT).unwrap();
    assert_eq!(rename(&a, &b, RenameFlags::WHITEOUT | RenameFlags::NOREPLACE), Err(Errno::EXIST));
    let check = |mounted: &MountedImage| {
        let left = fs::symlink_metadata(mounted.path("a")).unwrap();
        assert!(left.file_type().is_char_device());
        assert_eq!((left.rdev(), left.mode() & 0o7777, left.uid()), (0, 0, 0));
        assert_eq!(fs::read(mounted.path("b")).unwrap(), b"a");
        assert_eq!(fs::read_dir(mounted.root()).unwrap().count(), 2);
    };
    check(&mounted);
    let mounted = mounted.remount(&options_of_tests());
    check(&mounted);
    fs::remove_file(mounted.path("a")).unwrap();
    assert!(!mounted.path("a").exists());
    mounted.unmount();
}

#[test]
fn a_read_only_mount_reads_and_nothing_else() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&options_of_tests());
    fs::write(mounted.path("file"), "text").unwrap();
    let mounted = mounted.remount(&MountOptions { read_only: true, ..options_of_tests() });
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"text");
    assert_eq!(
        fs::write(mounted.path("file"), "x").unwrap_err().raw_os_error(),
        Some(Errno::ROFS.raw_os_error())
    );
    assert!(find_mount(&mounted.root()).unwrap().unwrap().read_only);
    mounted.unmount();
}

#[test]
fn a_full_volume_says_so_and_files_can_be_removed() {
    if !can_mount() {
        return;
    }
    let mounted = MountedImage::new(&MountOptions { writeback: false, ..options_of_tests() });
    let block = vec![1; 1 << 20];
    let mut file = File::create(mounted.path("filler")).unwrap();
    let failure = (0..512)
        .find_map(|_| file.write_all(&block).err())
        .expect("the volume is smaller than what was written");
    assert_eq!(failure.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    drop(file);
    fs::remove_file(mounted.path("filler")).unwrap();
    // The kernel forgets the removed file at a time of its choice; over io_uring a write may
    // overtake that.
    let available_bytes = || {
        rustix::fs::statvfs(mounted.root()).map(|space| space.f_bavail * space.f_frsize).unwrap()
    };
    while available_bytes() < IMAGE_BYTES * 3 / 4 {
        clock::sleep(Duration::from_millis(1));
    }
    // The freed space can be used again.
    let mut file = File::create(mounted.path("again")).unwrap();
    for _ in 0..IMAGE_BYTES / 2 / block.len() as u64 {
        file.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
    drop(file);
    assert!(available_bytes() < IMAGE_BYTES / 2, "{} bytes available", available_bytes());
    mounted.unmount();
}
