//! Trees of files of all kinds, and what is seen of them.
use rustix::fs::{CWD, XattrFlags};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// Makes files of all kinds.
pub fn fill(directory: &Path) {
    fs::create_dir_all(directory.join("a/b/c")).unwrap();
    fs::write(directory.join("a/small"), "small").unwrap();
    fs::write(directory.join("a/b/big"), vec![7; 300_000]).unwrap();
    fs::hard_link(directory.join("a/small"), directory.join("a/b/link")).unwrap();
    symlink("a/small", directory.join("symbolic")).unwrap();
    let sparse = File::create(directory.join("a/sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    sparse.write_all_at(b"middle", 500_000).unwrap();
    rustix::fs::mknodat(
        CWD,
        directory.join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o640),
        0,
    )
    .unwrap();
    rustix::fs::setxattr(directory.join("a"), "user.colour", b"blue", XattrFlags::empty()).unwrap();
    for number in 0..300 {
        fs::write(directory.join(format!("a/b/c/{number}")), number.to_string()).unwrap();
    }
}

/// What is below a directory, by its path: what a copy of it has, too.
pub fn tree(directory: &Path) -> BTreeMap<PathBuf, String> {
    let (mut found, mut left) = (BTreeMap::new(), vec![PathBuf::new()]);
    while let Some(below) = left.pop() {
        let path = directory.join(&below);
        let metadata = fs::symlink_metadata(&path).unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_dir() {
            left.extend(
                fs::read_dir(&path).unwrap().map(|one| below.join(one.unwrap().file_name())),
            );
            String::new()
        } else if kind.is_symlink() {
            format!("{:?}", fs::read_link(&path).unwrap())
        } else if kind.is_file() {
            let bytes = fs::read(&path).unwrap();
            format!("{} {:?}", metadata.nlink(), String::from_utf8_lossy(&bytes))
        } else {
            String::new()
        };
        let shown = format!(
            "{:o} {} {} {} {content}",
            metadata.mode(),
            metadata.uid(),
            metadata.mtime(),
            metadata.mtime_nsec()
        );
        found.insert(below, shown);
    }
    found
}
