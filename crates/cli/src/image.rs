//! What stands for IMAGE on the command line: a file, a block device, or several of them:
//! `mirror:A,B`, `concat:A,B`.
//!
//! A file whose own name begins like that is written `./mirror:…`; a member that is lost may be
//! written `missing`, or by its old name.
use crate::signature;
use anyhow::{Context, bail, ensure};
use cairn_blockdev::composed::{
    Access, Candidate, ComposedKind, Concat, Label, MemberState, Mirror,
};
use cairn_blockdev::{BlockDevice, DeviceError, FileDevice, OpenMode};
use cairn_engine::STORAGE_ROOM_BYTES;
use cairn_environment::clock;
use cairn_fuse::ShownSource;
use cairn_harness::console;
use clap::builder::{OsStringValueParser, TypedValueParser, ValueParser, ValueParserFactory};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long the end of a server may take whose mount is gone.
const SERVER_END_MAX: Duration = Duration::from_secs(5);
/// Between two looks whether it has ended.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Stands for a member that is lost.
const MISSING: &str = "missing";
const MEMBERS: std::ops::RangeInclusive<usize> = 2..=8;

/// One or several files or block devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// One.
    Single(PathBuf),
    /// Several that make one device.
    Composed(ComposedKind, Vec<PathBuf>),
}

impl ValueParserFactory for Image {
    type Parser = ValueParser;

    fn value_parser() -> ValueParser {
        ValueParser::new(OsStringValueParser::new().try_map(Image::parse))
    }
}

impl fmt::Display for Image {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Image::Single(path) => fmt::Display::fmt(&path.display(), formatter),
            Image::Composed(kind, paths) => {
                let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
                write!(formatter, "{kind}:{}", names.join(","))
            }
        }
    }
}

impl Image {
    fn parse(text: OsString) -> Result<Image, String> {
        let bytes = text.as_bytes();
        let composed =
            [(ComposedKind::Mirror, &b"mirror:"[..]), (ComposedKind::Concat, &b"concat:"[..])];
        let Some((kind, list)) = composed
            .into_iter()
            .find_map(|(kind, prefix)| Some((kind, bytes.strip_prefix(prefix)?)))
        else {
            refuse_misspelt(bytes)?;
            return Ok(Image::Single(text.into()));
        };
        let names: Vec<&[u8]> = list.split(|&byte| byte == b',').collect();
        if !MEMBERS.contains(&names.len()) || names.iter().any(|name| name.is_empty()) {
            return Err(format!("write {kind}:A,B with 2 to 8 files or block devices"));
        }
        Ok(Image::Composed(
            kind,
            names.into_iter().map(|name| PathBuf::from(OsStr::from_bytes(name))).collect(),
        ))
    }

    /// The same image by paths that don't depend on the current directory, as an argument of a
    /// command.
    ///
    /// # Errors
    /// A single image does not exist.
    pub fn absolute(&self) -> anyhow::Result<Image> {
        match self {
            Image::Single(path) => match fs::canonicalize(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(missing(path)),
                found => Ok(Image::Single(found.with_context(|| path.display().to_string())?)),
            },
            Image::Composed(kind, paths) => {
                let absolute = |path: &PathBuf| {
                    if path.as_os_str() == MISSING {
                        Ok(path.clone())
                    } else {
                        fs::canonicalize(path).or_else(|_| std::path::absolute(path))
                    }
                };
                Ok(Image::Composed(*kind, paths.iter().map(absolute).collect::<io::Result<_>>()?))
            }
        }
    }

    /// The image as it is written on a command line.
    pub fn argument(&self) -> OsString {
        match self {
            Image::Single(path) => path.clone().into(),
            Image::Composed(kind, paths) => {
                let mut bytes = format!("{kind}:").into_bytes();
                bytes.extend(
                    paths
                        .iter()
                        .map(|path| path.as_os_str().as_bytes())
                        .collect::<Vec<_>>()
                        .join(&b','),
                );
                OsString::from_vec(bytes)
            }
        }
    }

    /// Its files or block devices.
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            Image::Single(path) => std::slice::from_ref(path),
            Image::Composed(_, paths) => paths,
        }
    }

    /// The source that the mount names to the kernel: the first of its files that exists.
    pub fn mount_source(&self) -> &Path {
        let paths = self.paths();
        paths.iter().find(|path| path.exists()).unwrap_or(&paths[0])
    }

    /// How it is called where mounts are listed.
    pub fn shown(&self) -> ShownSource {
        let name = |path: &PathBuf| {
            path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
        };
        let names = self.paths().iter().map(name).collect::<Vec<_>>().join(",");
        let name = match self {
            Image::Single(_) => names,
            Image::Composed(kind, _) => format!("{kind}:{names}"),
        };
        ShownSource { full: self.to_string(), name }
    }

    /// Opens it. A mirror without one of its members is opened only if `degraded`.
    ///
    /// # Errors
    /// It can't be opened, is in use, or its members don't belong together.
    pub fn open(&self, mode: OpenMode, degraded: bool) -> anyhow::Result<Arc<dyn BlockDevice>> {
        let access = match mode {
            OpenMode::ReadOnly => Access::ReadOnly,
            OpenMode::ReadWrite => Access::ReadWrite,
        };
        match self {
            Image::Single(path) => {
                let device = match open_device(path, mode) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        return Err(missing(path));
                    }
                    opened => opened?,
                };
                refuse_foreign(path)?;
                if let Some(label) = Label::read(&device, &path.display().to_string())? {
                    let (kind, count, path) = (label.kind, label.members.len(), path.display());
                    bail!(
                        "{path} is one of {count} members of a {kind}; name all of them: {kind}:{path},…"
                    );
                }
                Ok(Arc::new(device))
            }
            Image::Composed(ComposedKind::Mirror, _) => {
                Ok(Arc::new(Mirror::open(self.candidates(mode, degraded)?, access, degraded)?))
            }
            Image::Composed(ComposedKind::Concat, _) => {
                Ok(Arc::new(Concat::open(self.candidates(mode, false)?, access)?))
            }
        }
    }

    /// Opens its members, each alone. One that does not exist is a lost one, and, if `tolerant`,
    /// one that can't be opened.
    ///
    /// # Errors
    /// A member is in use or can't be opened, or two are the same.
    pub fn candidates(&self, mode: OpenMode, tolerant: bool) -> anyhow::Result<Vec<Candidate>> {
        let paths = self.paths();
        expect_different(paths)?;
        paths.iter().map(|path| candidate(path, mode, tolerant)).collect()
    }
}

/// A kind with more wrong letters than this was not meant.
const WRONG_LETTERS_MAX: usize = 2;

/// A word that is meant as several devices, but isn't written so, would become the name of a file.
fn refuse_misspelt(text: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(text);
    let Some((kind, list)) =
        text.split_once(':').filter(|(kind, _)| !kind.is_empty() && !kind.contains('/'))
    else {
        return Ok(());
    };
    let word = kind.to_lowercase();
    let near =
        |kind: &ComposedKind| strsim::levenshtein(&word, &kind.to_string()) <= WRONG_LETTERS_MAX;
    let kind_meant = match word.as_str() {
        "raid" | "raid1" | "mirrored" => Some(ComposedKind::Mirror),
        "raid0" | "jbod" | "linear" | "span" | "stripe" | "concatenate" | "concatenation" => {
            Some(ComposedKind::Concat)
        }
        _ => [ComposedKind::Mirror, ComposedKind::Concat].into_iter().find(near),
    };
    let meant = match kind_meant {
        Some(ComposedKind::Mirror) => format!("write mirror:{list} to keep all data on each"),
        Some(ComposedKind::Concat) => format!("write concat:{list} to put one behind the other"),
        None if list.contains(',') => format!(
            "write mirror:{list} to keep all data on each, or concat:{list} to put one behind the other"
        ),
        None => return Ok(()),
    };
    Err(format!(
        "\"{kind}\" is not a kind of composed device; {meant}, or write ./{text} for a file of that name"
    ))
}

fn missing(path: &Path) -> anyhow::Error {
    let path = path.display();
    anyhow::anyhow!(
        "cannot open {path}: No such file or directory; check the path, or make a volume: \
         cairn mkfs {path} --size 4G"
    )
}

/// What is known to be something else is not taken for a damaged volume.
fn refuse_foreign(path: &Path) -> anyhow::Result<()> {
    // What can't be read here can't be read as a volume either.
    let Ok(file) = fs::File::open(path) else { return Ok(()) };
    match signature::explain_foreign(&file) {
        Ok(Some(what)) => bail!("{}: not a usable volume: {what}", path.display()),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// One member, opened if it is there.
///
/// # Errors
/// It is in use or, unless `tolerant`, can't be opened.
pub fn candidate(path: &Path, mode: OpenMode, tolerant: bool) -> anyhow::Result<Candidate> {
    let name = path.display().to_string();
    if path.as_os_str() == MISSING {
        return Ok(Candidate { name, device: None });
    }
    match open_device(path, mode) {
        Ok(device) => Ok(Candidate { name, device: Some(Arc::new(device)) }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(Candidate { name, device: None })
        }
        Err(error) if tolerant && !error.is_in_use() => {
            console::tell(&format_args!("cairn: warning: {error}; continuing without it"));
            Ok(Candidate { name, device: None })
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens one file or block device. A server whose mount is gone ends soon, so its end is waited
/// for.
fn open_device(path: &Path, mode: OpenMode) -> Result<FileDevice, DeviceError> {
    let begin = clock::now_monotonic();
    loop {
        match FileDevice::open(path, mode) {
            Err(error)
                if error.is_in_use()
                    && begin.elapsed() < SERVER_END_MAX
                    && cairn_fuse::mount_point_of(path).is_none() =>
            {
                clock::sleep(RETRY_INTERVAL)
            }
            other => return other,
        }
    }
}

/// Whether `path` alone holds a volume that was unmounted in good order.
pub fn is_clean(path: PathBuf) -> bool {
    let Ok(device) = Image::Single(path).open(OpenMode::ReadOnly, false) else { return false };
    let superblocks =
        cairn_fsck::dump::dump_super(&*device).map(|dump| dump.superblocks).unwrap_or_default();
    superblocks
        .iter()
        .filter(|superblock| superblock.newest)
        .any(|newest| newest.fields.as_ref().is_some_and(|fields| fields.clean))
}

/// No two paths lead to the same file or device.
///
/// # Errors
/// Two do.
pub fn expect_different(paths: &[PathBuf]) -> anyhow::Result<()> {
    for (at, first) in paths.iter().enumerate() {
        for second in &paths[at + 1..] {
            ensure!(
                !same_file(first, second),
                "{} and {} are the same file",
                first.display(),
                second.display()
            );
        }
    }
    Ok(())
}

/// Whether both paths lead to the same file or block device; a path that leads nowhere is like
/// nothing but itself.
pub fn same_file(first: &Path, second: &Path) -> bool {
    let identity = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        let is_device = metadata.file_type().is_block_device();
        Some(if is_device {
            (true, metadata.rdev(), 0)
        } else {
            (false, metadata.dev(), metadata.ino())
        })
    };
    match (identity(first), identity(second)) {
        (Some(first), Some(second)) => first == second,
        (None, None) => first == second && first.as_os_str() != MISSING,
        _ => false,
    }
}

/// Warns the user that a device goes on without some of its members.
pub fn warn_if_degraded(device: &dyn BlockDevice) {
    let Some(health) = device.health().filter(|health| health.degraded) else { return };
    for member in health.members.iter().filter(|member| member.state != MemberState::InSync.text())
    {
        console::tell(&format_args!(
            "cairn: warning: the {} is used without {}: {}",
            health.kind, member.name, member.state
        ));
    }
}

/// Warns the user when the disk that holds a sparse image is full: the volume is well, but can't be
/// written to.
pub fn warn_if_storage_is_full(image: &Image) {
    for path in image.paths() {
        let Ok(metadata) = fs::metadata(path) else { continue };
        if !metadata.is_file() || metadata.blocks() * 512 >= metadata.len() {
            continue;
        }
        let Ok(host) = rustix::fs::statvfs(path) else { continue };
        let free_blocks =
            if rustix::process::geteuid().is_root() { host.f_bfree } else { host.f_bavail };
        let free_bytes = free_blocks.saturating_mul(host.f_frsize);
        if free_bytes < STORAGE_ROOM_BYTES {
            console::tell(&format_args!(
                "cairn: warning: the disk that holds {} is full ({} KiB are free), so there is no room for writes to the image; a mount \
                 can only read and remove files, or only read; free space on that disk",
                path.display(),
                free_bytes / 1024
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Image, String> {
        Image::parse(text.into())
    }

    #[test]
    fn images_are_parsed_and_written_again() {
        assert_eq!(parse("volume.cairn"), Ok(Image::Single("volume.cairn".into())));
        assert_eq!(parse("./mirror:a,b"), Ok(Image::Single("./mirror:a,b".into())));
        for (text, kind, members) in [
            ("mirror:a,/dev/b", ComposedKind::Mirror, 2),
            ("concat:a,b,c", ComposedKind::Concat, 3),
        ] {
            let image = parse(text).unwrap();
            assert_eq!((image.to_string(), image.argument()), (text.to_owned(), text.into()));
            assert!(
                matches!(&image, Image::Composed(found, paths) if *found == kind && paths.len() == members)
            );
        }
        for text in ["mirror:", "mirror:a", "concat:a,,b", "mirror:a,b,c,d,e,f,g,h,i", "mirror:,a"]
        {
            assert!(parse(text).unwrap_err().contains("2 to 8"), "{text}");
        }
    }

    #[test]
    fn a_misspelt_kind_makes_no_file() {
        for (text, meant) in [
            ("raid:c1,c2", "write mirror:c1,c2"),
            ("mirrors:a,b", "write mirror:a,b"),
            ("miror:a", "write mirror:a"),
            ("MIRROR:a,b", "write mirror:a,b"),
            ("concta:a,b", "write concat:a,b"),
            ("jbod:a,b", "write concat:a,b"),
            ("zzzzzz:a,b", "write mirror:a,b to keep all data on each, or concat:a,b"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(meant) && error.contains(&format!("./{text}")), "{error}");
        }
        for text in
            ["./raid:x", "/tmp/mirrors:a,b", "backup:2026", "C:x", ":a,b", "a,b", "12:30:00"]
        {
            assert_eq!(parse(text), Ok(Image::Single(text.into())));
        }
    }

    #[test]
    fn the_same_file_is_found_by_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&first, b"").unwrap();
        assert!(!same_file(&first, &second));
        fs::hard_link(&first, &second).unwrap();
        assert!(same_file(&first, &second));
        assert!(!same_file(Path::new(MISSING), Path::new(MISSING)), "two members may be lost");
    }
}
