//! Real mounts of the tiny file system: they need root and `/dev/fuse`, and are skipped without.
use crate::mounting::{MadeMount, helper};
use crate::tiny_file_system::{TinyFileSystem, options_of_tests, unmount_soon};
use crate::transport::Handler;
use crate::{MountError, MountOptions, Session, Unmounter, find_mount};
use cairn_environment::thread::{self, JoinHandle};
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Whether this process can mount.
pub fn can_mount() -> bool {
    let possible = rustix::process::geteuid().is_root() && fs::exists("/dev/fuse").unwrap_or(false);
    if !possible {
        eprintln!("skipped: needs root and /dev/fuse");
    }
    possible
}

struct MountedSession {
    file_system: Arc<TinyFileSystem>,
    unmounter: Unmounter,
    server: Option<JoinHandle<()>>,
    directory: TempDir,
    forwards_sync: bool,
}

impl MountedSession {
    fn new(options: &MountOptions) -> Self {
        Self::made_by(|image, mountpoint, handler| {
            Session::start(image, mountpoint, options, handler)
        })
    }
    fn made_by(
        start: impl FnOnce(&Path, &Path, Arc<dyn Handler>) -> Result<Session, MountError>,
    ) -> Self {
        let directory = tempfile::Builder::new().prefix("cairn-fuse-test-").tempdir().unwrap();
        let (image, mountpoint) = (directory.path().join("image"), directory.path().join("mnt"));
        fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        fs::create_dir(&mountpoint).unwrap();
        let file_system = Arc::new(TinyFileSystem::new());
        let session = start(&image, &mountpoint, file_system.clone()).unwrap();
        let (unmounter, forwards_sync) = (session.unmounter(), session.forwards_sync());
        let server = Some(thread::spawn("session", move || session.run().unwrap()));
        Self { file_system, unmounter, server, directory, forwards_sync }
    }
    fn path(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }
    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }
    fn unmount(mut self) -> Arc<TinyFileSystem> {
        unmount_soon(&self.unmounter);
        self.server.take().unwrap().join().unwrap();
        assert_eq!(find_mount(&self.path()).unwrap(), None);
        Arc::clone(&self.file_system)
    }
}

impl Drop for MountedSession {
    fn drop(&mut self) {
        // A failed test leaves no mount behind.
        let _ = self.unmounter.detach();
    }
}

fn exercise(path: &Path) {
    let big: Vec<u8> = (0..3_000_000_u32).map(|i| (i / 7) as u8).collect();
    fs::write(path.join("big"), &big).unwrap();
    fs::write(path.join("small"), "hello").unwrap();
    assert_eq!(fs::read(path.join("small")).unwrap(), b"hello");
    assert!(fs::read(path.join("big")).unwrap() == big);
    let file = fs::File::options().read(true).write(true).open(path.join("big")).unwrap();
    file.write_at(b"in the middle", 1_500_000).unwrap();
    file.sync_all().unwrap();
    let mut read = [0; 13];
    file.read_exact_at(&mut read, 1_500_000).unwrap();
    assert_eq!(&read, b"in the middle");
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["big", "small"]);
    fs::remove_file(path.join("small")).unwrap();
    assert_eq!(fs::metadata(path.join("small")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    assert_eq!(fs::metadata(path.join("big")).unwrap().len(), 3_000_000);
}

#[test]
fn a_root_mount_reads_writes_syncs_and_unmounts() {
    if !can_mount() {
        return;
    }
    let mounted = MountedSession::new(&options_of_tests());
    exercise(&mounted.path());
    let info = find_mount(&mounted.path()).unwrap().expect("mounted");
    if mounted.forwards_sync {
        assert_eq!(
            (info.file_system_type.as_str(), &info.source),
            ("fuseblk.cairn", &mounted.image())
        );
        rustix::fs::syncfs(fs::File::open(mounted.path()).unwrap()).unwrap();
        assert_eq!(mounted.file_system.seen().syncs, 1);
    }
    crate::sync(&mounted.path()).unwrap();
    let forwards_sync = mounted.forwards_sync;
    let seen = mounted.unmount().seen();
    assert_eq!((seen.fsyncs, seen.opens, seen.finished), (1, 1, true));
    assert_eq!((seen.syncs, seen.ioctls), if forwards_sync { (2, 0) } else { (0, 1) });
    assert_eq!(seen.destroyed, forwards_sync);
    assert!(seen.largest_write_bytes > 100_000, "{seen:?}");
    let loops = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(
        !loops.contains("cairn-fuse-test")
            || !loops.contains(&info.mountpoint.display().to_string())
    );
}

#[test]
fn a_plain_mount_without_the_writeback_cache_works_on_one_thread() {
    if !can_mount() {
        return;
    }
    let mounted = MountedSession::new(&MountOptions {
        plain: true,
        writeback: false,
        threads: 1,
        ..options_of_tests()
    });
    assert!(!mounted.forwards_sync);
    exercise(&mounted.path());
    let info = find_mount(&mounted.path()).unwrap().expect("mounted");
    assert_eq!((info.file_system_type.as_str(), info.source), ("fuse.cairn", mounted.image()));
    crate::sync(&mounted.path()).unwrap();
    assert_eq!(mounted.unmount().seen().ioctls, 1);
}

#[test]
fn the_helper_mounts_and_hands_the_connection_over() {
    if !can_mount() || std::process::Command::new("fusermount3").arg("--version").output().is_err()
    {
        return;
    }
    let options = MountOptions { read_only: true, ..options_of_tests() };
    let mounted = MountedSession::made_by(|image, mountpoint, handler| {
        let device = helper::mount(
            image,
            mountpoint,
            &MountOptions { allow_other: true, ..options.clone() },
        )?;
        Session::serve(
            MadeMount {
                device,
                mountpoint: mountpoint.to_owned(),
                forwards_sync: false,
                link: None,
            },
            None,
            &options,
            handler,
        )
    });
    assert_eq!(
        fs::write(mounted.path().join("file"), "x").unwrap_err().raw_os_error(),
        Some(Errno::ROFS.raw_os_error())
    );
    let info = find_mount(&mounted.path()).unwrap().unwrap();
    assert_eq!(
        (info.file_system_type.as_str(), info.source, info.read_only),
        ("fuse.cairn", mounted.image(), true)
    );
    let inside = fs::File::open(mounted.path()).unwrap();
    assert_eq!(helper::unmount(&mounted.path(), false), Err(MountError::MountBusy(mounted.path())));
    drop(inside);
    helper::unmount(&mounted.path(), false).unwrap();
    assert!(matches!(
        helper::mount(Path::new("/x"), Path::new("/nowhere"), &MountOptions::default()),
        Err(MountError::HelperFailed(_))
    ));
    mounted.unmount();
}

#[test]
fn an_unanswered_request_fails_with_an_io_error() {
    if !can_mount() {
        return;
    }
    let mounted = MountedSession::new(&options_of_tests());
    fs::write(mounted.path().join("file"), "x").unwrap();
    assert_eq!(rustix::fs::removexattr(mounted.path().join("file"), "user.a"), Err(Errno::IO));
    mounted.unmount();
}

#[test]
fn a_mount_in_use_is_busy_until_it_is_detached() {
    if !can_mount() {
        return;
    }
    let mut mounted = MountedSession::new(&options_of_tests());
    fs::write(mounted.path().join("file"), "x").unwrap();
    let open = fs::File::open(mounted.path().join("file")).unwrap();
    assert_eq!(crate::unmount(&mounted.path()), Err(MountError::MountBusy(mounted.path())));
    assert_eq!(mounted.unmounter.unmount(), Err(MountError::MountBusy(mounted.path())));
    let second = Session::start(
        &mounted.image(),
        &mounted.path(),
        &options_of_tests(),
        mounted.file_system.clone(),
    );
    assert!(matches!(second, Err(MountError::AlreadyMounted { .. })), "{second:?}");
    mounted.unmounter.detach().unwrap();
    assert_eq!(find_mount(&mounted.path()).unwrap(), None);
    assert!(!mounted.file_system.seen().finished);
    drop(open);
    mounted.server.take().unwrap().join().unwrap();
    assert!(mounted.file_system.seen().finished);
}

#[test]
fn loop_devices_are_released() {
    if !can_mount() {
        return;
    }
    let mounted = MountedSession::new(&options_of_tests());
    let image = mounted.image();
    if !mounted.forwards_sync {
        return;
    }
    let device = find_mount(&mounted.path()).unwrap().unwrap().device;
    let backing =
        format!("/sys/block/{}/loop/backing_file", device.file_name().unwrap().to_str().unwrap());
    assert_eq!(fs::read_to_string(&backing).unwrap().trim_end(), image.to_str().unwrap());
    mounted.unmount();
    assert!(
        !fs::read_to_string(&backing).is_ok_and(|now| now.trim_end() == image.to_str().unwrap())
    );
}

#[test]
fn wrong_mount_points_are_named() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::Builder::new().prefix("cairn-fuse-test-").tempdir().unwrap();
    let (image, missing) = (directory.path().join("image"), directory.path().join("missing"));
    fs::write(&image, vec![0; 8192]).unwrap();
    let start = |source: &Path, mountpoint: &Path| {
        Session::start(source, mountpoint, &options_of_tests(), Arc::new(TinyFileSystem::new()))
            .map(drop)
            .unwrap_err()
    };
    assert_eq!(start(&image, &missing), MountError::MountPointMissing(missing.clone()));
    assert_eq!(start(&image, &image), MountError::MountPointNotDirectory(image.clone()));
    assert_eq!(
        start(&missing, directory.path()),
        MountError::SourceUnusable { path: missing.clone(), errno: Errno::NOENT }
    );
    assert_eq!(
        crate::unmount(directory.path()),
        Err(MountError::NotMounted(directory.path().to_owned()))
    );
    assert!(matches!(crate::unmount(Path::new("/proc")), Err(MountError::NotCairn { .. })));
    assert!(matches!(crate::statistics(Path::new("/proc")), Err(MountError::NotCairn { .. })));
    assert_eq!(
        crate::sync(directory.path()),
        Err(MountError::NotInCairn(directory.path().to_owned()))
    );
    assert_eq!(
        crate::sync(&missing),
        Err(MountError::PathUnusable { path: missing, errno: Errno::NOENT })
    );
}
