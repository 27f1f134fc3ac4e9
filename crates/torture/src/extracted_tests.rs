//! A lie of an extraction is noticed.
use super::*;
use crate::files::format;
use crate::found::Found;
use cairn_blockdev::SimulatedDevice;
use cairn_engine::{Error, NewInode, Volume, VolumeOptions, XattrMode};
use std::os::unix::fs::symlink;
use std::sync::Arc;

/// A volume with something of everything.
fn volume() -> Arc<SimulatedDevice> {
    let device = Arc::new(SimulatedDevice::new(32 << 20));
    format(&*device, 1 << 20).expect("a new volume");
    let volume = open(&device, false);
    let fill = || -> Result<(), Error> {
        let root = volume.root();
        let new = |file_type, target| NewInode {
            file_type,
            mode: 0o750,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            device: 0,
            target,
        };
        let directory = volume.create(root, b"d", &new(FileType::Directory, None))?.inode;
        let file = volume.create(directory, b"file", &new(FileType::Regular, None))?.inode;
        volume.write(file, 4096, &[1; 9000])?;
        volume.write(file, 100_000, &[2; 5000])?;
        volume.set_xattr(file, b"user.name", b"value", XattrMode::Any)?;
        volume.link(file, root, b"again")?;
        volume.create(root, b"other", &new(FileType::Regular, None))?;
        volume.create(root, b"link", &new(FileType::Symlink, Some(b"d/file")))?;
        volume.create(root, b"pipe", &new(FileType::Fifo, None))?;
        volume.commit()
    };
    fill().expect("space");
    volume.close().expect("it closes");
    device
}

fn open(device: &Arc<SimulatedDevice>, read_only: bool) -> Volume {
    let options = VolumeOptions { background: false, read_only, ..VolumeOptions::default() };
    Volume::open(device.clone() as Arc<dyn BlockDevice>, options).expect("it opens")
}

/// What the comparison says when the extraction was changed like this.
fn after(change: impl FnOnce(&Path)) -> Result<(), String> {
    let device = volume();
    let engine = open(&device, true);
    let found = Found::read(&engine).expect("it is whole");
    let view = View::of_found(&engine, &found).expect("it is whole");
    let (folder, report) = extracted(&*device).expect("it is extracted");
    let kept = |path: &Path| {
        let found = fs::metadata(path).expect("it is there");
        (found.accessed().unwrap(), found.modified().unwrap())
    };
    // A change of a name changes its directory's times: only what is to be noticed may differ.
    let directories = [folder.path().to_owned(), folder.path().join("d")];
    let times = directories.clone().map(|path| kept(&path));
    change(folder.path());
    for (path, (accessed, modified)) in directories.iter().zip(times) {
        if let Ok(directory) = fs::File::open(path) {
            let times = fs::FileTimes::new().set_accessed(accessed).set_modified(modified);
            directory.set_times(times).expect("times");
        }
    }
    expect_same(&view, folder.path(), &report)
}

fn set_attribute(path: &Path, name: &str, value: &[u8]) -> Result<(), rustix::io::Errno> {
    rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty())
}

/// Whether files where extractions stand can have attributes of users.
fn has_attributes() -> bool {
    let file =
        tempfile::NamedTempFile::new_in(IN_MEMORY).or_else(|_| tempfile::NamedTempFile::new());
    set_attribute(file.expect("a file").path(), "user.try", b"").is_ok()
}

fn keeping_times(path: &Path, change: impl FnOnce(&Path)) {
    let before = fs::metadata(path).expect("it is there");
    change(path);
    let times = fs::FileTimes::new()
        .set_accessed(before.accessed().unwrap())
        .set_modified(before.modified().unwrap());
    fs::File::open(path).and_then(|file| file.set_times(times)).expect("times");
}

fn expect_noticed(what: &str, words: &str, change: impl FnOnce(&Path)) {
    let problem = after(change).expect_err(what);
    assert!(problem.contains(words), "{what}: {problem}");
}

#[test]
fn an_extraction_is_what_the_engine_sees() {
    after(|_| {}).unwrap_or_else(|problem| panic!("{problem}"));
}

#[test]
fn a_name_too_few_or_too_many_is_noticed() {
    expect_noticed("a lost name", "again was not extracted", |folder| {
        fs::remove_file(folder.join("again")).unwrap();
    });
    expect_noticed("a new name", "the extraction made new", |folder| {
        fs::write(folder.join("d/new"), "").unwrap();
    });
}

#[test]
fn another_type_or_another_target_is_noticed() {
    expect_noticed("a file for a pipe", "the type of pipe", |folder| {
        fs::remove_file(folder.join("pipe")).unwrap();
        fs::write(folder.join("pipe"), "").unwrap();
    });
    expect_noticed("another target", "link", |folder| {
        fs::remove_file(folder.join("link")).unwrap();
        symlink("d/fifo", folder.join("link")).unwrap();
    });
}

#[test]
fn other_attributes_are_noticed() {
    expect_noticed("another mode", "the mode of again", |folder| {
        let path = folder.join("d/file");
        fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    });
    expect_noticed("another time", "the times of other", |folder| {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = fs::File::open(folder.join("other")).unwrap();
        file.set_times(fs::FileTimes::new().set_modified(time)).unwrap();
    });
    if !has_attributes() {
        return eprintln!("left out: the host has no extended attributes");
    }
    expect_noticed("another value", "user.name", |folder| {
        set_attribute(&folder.join("d/file"), "user.name", b"other").unwrap();
    });
    expect_noticed("an attribute too many", "too many", |folder| {
        set_attribute(&folder.join("other"), "user.b", b"").unwrap();
    });
}

#[test]
fn other_bytes_and_another_size_are_noticed() {
    let write = |folder: &Path, offset: u64| {
        keeping_times(&folder.join("again"), |path| {
            use std::os::unix::fs::FileExt;
            let file = fs::File::options().write(true).open(path).unwrap();
            file.write_all_at(&[9], offset).unwrap();
        });
    };
    expect_noticed("a byte", "other bytes", |folder| write(folder, 5000));
    expect_noticed("a byte of the last block", "other bytes", |folder| write(folder, 104_999));
    expect_noticed("a byte in a hole", "holds something", |folder| write(folder, 50_000));
    expect_noticed("a longer file", "the size", |folder| write(folder, 105_000));
}

#[test]
fn names_of_one_file_for_two_are_noticed() {
    expect_noticed("a copy for a link", "is not the file of its other names", |folder| {
        let (one, other) = (folder.join("again"), folder.join("copy"));
        let before = fs::metadata(&one).unwrap();
        fs::copy(&one, &other).unwrap();
        if has_attributes() {
            set_attribute(&other, "user.name", b"value").unwrap();
        }
        let times = fs::FileTimes::new()
            .set_accessed(before.accessed().unwrap())
            .set_modified(before.modified().unwrap());
        fs::File::open(&other).and_then(|file| file.set_times(times)).unwrap();
        fs::rename(other, one).unwrap();
    });
}
