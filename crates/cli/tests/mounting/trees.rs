//! Trees of files of all kinds, and what is seen of them.
use rustix::fs::{CWD, XattrFlags};
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
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
            format!("{} {}", metadata.nlink(), short(&bytes))
        } else {
            String::new()
        };
        let shown = format!(
            "{:o} {}:{} {} {} {:?} {content}",
            metadata.mode(),
            metadata.uid(),
            metadata.gid(),
            metadata.mtime(),
            metadata.mtime_nsec(),
            attributes(&path)
        );
        found.insert(below, shown);
    }
    found
}

/// Bytes, or what stands for many of them.
fn short(bytes: &[u8]) -> String {
    if bytes.len() <= 100 {
        return format!("{:?}", String::from_utf8_lossy(bytes));
    }
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{} bytes {:x}", bytes.len(), hasher.finish())
}

/// The extended attributes of a file, by name.
fn attributes(path: &Path) -> BTreeMap<String, String> {
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let names = names.map(|name| String::from_utf8(name.to_owned()).unwrap());
    let value = |name: &String| {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        short(&value[..length])
    };
    names.map(|name| (name.clone(), value(&name))).collect()
}
