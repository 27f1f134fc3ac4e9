//! `cairn fsck --extract` as a user meets it: what comes out, exit codes, messages.
use cairn_blockdev::{BlockDevice, FileDevice, OpenMode};
use cairn_engine::{
    AllocateMode, AttributeChange, FileType, FsyncKind, InodeId, NewInode, TimeChange, Timestamp,
    Volume, VolumeOptions, XattrMode,
};
use cairn_environment::random::Seeded;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

const SECRET: &[u8] = b"what stands in one block of the file named letter";

struct Cairn {
    folder: tempfile::TempDir,
}

impl Cairn {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    /// What it prints; it ends with this code.
    #[track_caller]
    fn exits_with(&self, code: i32, arguments: &[&str]) -> String {
        told(code, &self.command(arguments).output().unwrap())
    }

    /// A volume made by `fill`, in use: what was synced last is in its log only.
    fn make_volume(
        &self,
        size: &str,
        fill: impl FnOnce(&Volume) -> Result<(), cairn_engine::Error>,
    ) {
        self.exits_with(0, &["mkfs", "used", "--size", size, "--log-size", "4M"]);
        let device = FileDevice::open(&self.path("used"), OpenMode::ReadWrite).unwrap();
        let options = VolumeOptions { background: false, ..VolumeOptions::default() };
        let volume = Volume::open(Arc::new(device) as Arc<dyn BlockDevice>, options).unwrap();
        fill(&volume).unwrap();
        fs::copy(self.path("used"), self.path("image")).unwrap();
    }
}

#[track_caller]
fn told(code: i32, output: &Output) -> String {
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{out}{err}");
    assert!(!err.contains("panicked"), "{err}");
    format!("{out}{err}")
}

fn new(file_type: FileType, mode: u32) -> NewInode<'static> {
    NewInode { file_type, mode, uid: 0, gid: 0, device: 0, target: None }
}

/// Something of everything, half of it in the log.
fn fill(volume: &Volume) -> Result<(), cairn_engine::Error> {
    let root = volume.root();
    let folder = volume.create(root, b"folder", &new(FileType::Directory, 0o750))?.inode;
    let letter = volume.create(folder, b"letter", &new(FileType::Regular, 0o4640))?.inode;
    volume.write(letter, 0, &[1; 8192])?;
    volume.write(letter, 100_000, SECRET)?;
    volume.commit()?;
    volume.write(letter, 4096, &[2; 4096])?;
    volume.allocate(letter, 0, 4096, AllocateMode::PunchHole)?;
    volume.link(letter, root, b"again")?;
    volume.set_xattr(letter, b"user.colour", b"blue", XattrMode::Any)?;
    let target = NewInode { target: Some(b"folder/letter"), ..new(FileType::Symlink, 0o777) };
    volume.create(root, b"link", &target)?;
    volume.create(folder, b"pipe", &new(FileType::Fifo, 0o600))?;
    let device = NewInode { device: 0x0103, ..new(FileType::CharacterDevice, 0o666) };
    volume.create(folder, b"null", &device)?;
    let time = |seconds| Some(TimeChange::At(Timestamp { seconds, nanoseconds: 987_654_321 }));
    let change = AttributeChange {
        uid: Some(1234),
        gid: Some(4321),
        accessed: time(5),
        modified: time(6),
        ..AttributeChange::default()
    };
    volume.set_attributes(letter, &change)?;
    let mode = AttributeChange { mode: Some(0o4640), ..AttributeChange::default() };
    volume.set_attributes(letter, &mode)?;
    let change = AttributeChange { modified: time(7), ..AttributeChange::default() };
    volume.set_attributes(folder, &change)?;
    volume.fsync_blocking(letter, FsyncKind::Full)
}

fn letter() -> Vec<u8> {
    let mut bytes = vec![0; 100_000 + SECRET.len()];
    bytes[4096..8192].fill(2);
    bytes[100_000..].copy_from_slice(SECRET);
    bytes
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Changes a byte of the block that holds `SECRET`; of all of them, in this file.
fn damage(path: &Path) -> usize {
    let bytes = fs::read(path).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    let found = bytes.windows(SECRET.len()).enumerate().filter(|(_, window)| *window == SECRET);
    found.map(|(at, _)| file.write_all_at(b"x", at as u64 + 3).unwrap()).count()
}

#[test]
fn everything_comes_out_of_a_volume_in_use_without_a_mount() {
    let cairn = Cairn::new();
    cairn.make_volume("32M", fill);
    let before = fs::read(cairn.path("image")).unwrap();
    let code = if is_root() { 0 } else { 4 };
    let text = cairn.exits_with(code, &["fsck", "--extract", "out", "image"]);
    assert!(fs::read(cairn.path("image")).unwrap() == before, "the image is only read");
    let at = |name: &str| fs::symlink_metadata(cairn.path("out").join(name)).unwrap();
    let found = at("folder/letter");
    assert!(fs::read(cairn.path("out/again")).unwrap() == letter());
    assert_eq!((found.ino(), found.nlink()), (at("again").ino(), 2));
    assert_eq!((found.mtime(), found.mtime_nsec()), (6, 987_654_321));
    assert_eq!((found.atime(), found.atime_nsec()), (5, 987_654_321));
    assert!(found.blocks() * 512 < 32 << 10, "{} blocks: it has holes", found.blocks());
    assert_eq!((at("folder").mode() & 0o7777, at("folder").mtime()), (0o750, 7));
    assert_eq!(fs::read_link(cairn.path("out/link")).unwrap(), Path::new("folder/letter"));
    assert!(at("folder/pipe").file_type().is_fifo());
    let mut value = [0; 10];
    let length = rustix::fs::getxattr(cairn.path("out/again"), "user.colour", &mut value).unwrap();
    assert_eq!(&value[..length], b"blue");
    if is_root() {
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (1234, 4321, 0o4640));
        assert_eq!((at("folder/null").rdev(), at("folder/null").mode()), (0x0103, 0o20666));
        assert!(text.contains("everything was extracted"), "{text}");
        assert!(text.contains("1 files") && text.contains("1 further names"), "{text}");
    }
}

/// File capabilities as setcap(8) writes them: version 2, `cap_net_bind_service`, effective.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// What a user may look at.
#[derive(Debug, PartialEq)]
struct Facts {
    mode: u32,
    owner: (u32, u32),
    links: u64,
    times: [(i64, i64); 2],
    data: Vec<u8>,
    attributes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Files and directories with any combination of mode, owner, times, names, data and attributes.
/// Returns what must come out, by name.
fn fill_at_random(
    volume: &Volume,
    names: &[&[u8]],
    random: &mut Seeded,
) -> Result<BTreeMap<String, Facts>, cairn_engine::Error> {
    let mut expected = BTreeMap::new();
    for number in 0..120 {
        let is_file = random.chance(3, 4);
        let kind = if is_file { FileType::Regular } else { FileType::Directory };
        let name = format!("object {number}");
        let root = volume.root();
        let inode = volume.create(root, name.as_bytes(), &new(kind, 0o700))?.inode;
        let mut data = Vec::new();
        if is_file {
            data = vec![0; random.below(20_000) as usize];
            let from = random.below(data.len() as u64 + 1) as usize;
            data[from..].fill(number as u8 + 1);
            volume.write(inode, from as u64, &data[from..])?;
            data = if from == data.len() { Vec::new() } else { data };
        }
        let mut attributes = BTreeMap::new();
        for name in names {
            if random.chance(1, 2) {
                continue;
            }
            let value = match *name {
                b"security.capability" if !is_file => continue,
                b"security.capability" => CAPABILITY.to_vec(),
                _ => vec![number as u8; random.below(700) as usize],
            };
            attributes.insert(name.to_vec(), value);
        }
        // In either order: a change of the owner may take set-id bits and capabilities away.
        let owner = (random.below(2) as u32 * 1234, random.below(2) as u32 * 4321);
        let set_owner = AttributeChange {
            uid: Some(owner.0),
            gid: Some(owner.1),
            ..AttributeChange::default()
        };
        volume.set_attributes(inode, &set_owner)?;
        for (name, value) in &attributes {
            volume.set_xattr(inode, name, value, XattrMode::Any)?;
        }
        let times = [(); 2].map(|()| (random.below(1 << 31) as i64, random.below(1 << 29) as i64));
        let time = |(seconds, nanoseconds): (i64, i64)| {
            Some(TimeChange::At(Timestamp { seconds, nanoseconds: nanoseconds as u32 }))
        };
        let mode = 0o700 | random.below(0o10000) as u32;
        let change = AttributeChange {
            mode: Some(mode),
            accessed: time(times[0]),
            modified: time(times[1]),
            ..AttributeChange::default()
        };
        volume.set_attributes(inode, &change)?;
        let links = if is_file { 1 + random.below(2) } else { 2 };
        if is_file && links == 2 {
            volume.link(inode, root, format!("other {number}").as_bytes())?;
        }
        expected.insert(name, Facts { mode, owner, links, times, data, attributes });
    }
    volume.sync()?;
    Ok(expected)
}

/// What came out at `path`.
fn facts(path: &Path) -> Facts {
    let found = fs::symlink_metadata(path).unwrap();
    let mut buffer = vec![0; 1 << 16];
    let length = rustix::fs::listxattr(path, &mut buffer).unwrap();
    let names: Vec<Vec<u8>> =
        buffer[..length].split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
    let attributes = names.into_iter().filter(|name| !name.is_empty());
    let attributes = attributes.map(|name| {
        let length = rustix::fs::getxattr(path, name.as_slice(), &mut buffer).unwrap();
        (name, buffer[..length].to_vec())
    });
    Facts {
        attributes: attributes.collect(),
        mode: found.mode() & 0o7777,
        owner: (found.uid(), found.gid()),
        links: found.nlink(),
        times: [(found.atime(), found.atime_nsec()), (found.mtime(), found.mtime_nsec())],
        data: if found.is_file() { fs::read(path).unwrap() } else { Vec::new() },
    }
}

#[test]
fn every_combination_of_attributes_comes_out() {
    if !is_root() {
        eprintln!("NOTE: this test needs root, who can give files to others");
        return;
    }
    let seed = std::env::var("CAIRN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let cairn = Cairn::new();
    // What the host can hold.
    let probe = cairn.path("probe");
    fs::write(&probe, "").unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    let mut names: Vec<&[u8]> =
        vec![b"user.colour", b"user.size", b"trusted.origin", b"security.capability"];
    names.retain(|name| rustix::fs::setxattr(&probe, *name, &CAPABILITY, flags).is_ok());
    let mut expected = BTreeMap::new();
    cairn.make_volume("64M", |volume| {
        expected = fill_at_random(volume, &names, &mut Seeded::new(seed))?;
        Ok(())
    });
    cairn.exits_with(0, &["fsck", "--extract", "out", "image"]);
    for (name, expected) in &expected {
        // Times first: reading may change them.
        let found = facts(&cairn.path("out").join(name));
        assert!(found == *expected, "seed {seed}, {name}:\n{found:?}\n{expected:?}");
    }
}

#[test]
fn without_the_rights_of_root_files_belong_to_the_user() {
    if !is_root() {
        return;
    }
    let cairn = Cairn::new();
    cairn.make_volume("32M", fill);
    fs::set_permissions(cairn.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(cairn.path("mine")).unwrap();
    chown(cairn.path("mine"), Some(65534), Some(65534)).unwrap();
    let mut command = cairn.command(&["fsck", "--extract", "mine/out", "image", "--json"]);
    let Ok(output) = command.uid(65534).gid(65534).output() else {
        eprintln!("left out: another user cannot run the command here");
        return;
    };
    let text = told(4, &output);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let losses = report["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 1, "{text}");
    assert_eq!(losses[0]["path"], "/folder/null");
    let problem = losses[0]["problem"].as_str().unwrap();
    assert!(problem.contains("cannot make this character device"), "{problem}");
    assert!(report["owners_left_out"].as_u64().unwrap() >= 4, "{text}");
    assert_eq!(report["complete"], true);
    let found = fs::metadata(cairn.path("mine/out/again")).unwrap();
    // It would give this user's rights to everybody who runs it.
    assert_eq!((found.uid(), found.mode() & 0o7777), (65534, 0o640));
}

#[test]
fn damage_is_named_and_makes_a_hole() {
    let cairn = Cairn::new();
    // Data of the log's last checkpoint would take the checkpoint with it.
    cairn.make_volume("32M", |volume| fill(volume).and_then(|()| volume.commit()));
    assert!(damage(&cairn.path("image")) > 0);
    let text = cairn.exits_with(4, &["fsck", "--extract", "out", "image"]);
    let line = format!(
        "{} bytes at offset 98304 are a hole now: does not match its checksum",
        100_000 + SECRET.len() - 98_304
    );
    assert!(text.contains(&line) && text.contains("/again") || text.contains("/letter"), "{text}");
    let mut expected = letter();
    expected[98_304..].fill(0);
    assert!(fs::read(cairn.path("out/folder/letter")).unwrap() == expected);
    let text = cairn.exits_with(4, &["fsck", "--extract", "json", "image", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let loss = report["losses"].as_array().unwrap().last().unwrap();
    assert_eq!(loss["offset_bytes"], 98_304, "{text}");
    // All nodes: nothing is left, and that is said.
    let bytes = fs::read(cairn.path("image")).unwrap();
    let image = File::options().write(true).open(cairn.path("image")).unwrap();
    for (index, _) in bytes.chunks(4096).enumerate().filter(|(_, block)| block.starts_with(b"CRNN"))
    {
        image.write_all_at(&[0xff; 8], index as u64 * 4096 + 100).unwrap();
    }
    let text = cairn.exits_with(4, &["fsck", "--extract", "rest", "image"]);
    assert!(text.contains("node") && text.contains("losses, see above"), "{text}");
}

#[test]
fn either_copy_of_a_mirror_is_enough() {
    let cairn = Cairn::new();
    for image in ["mirror:a,b", "concat:c,d"] {
        let names: Vec<&str> = image.split_once(':').unwrap().1.split(',').collect();
        cairn.exits_with(0, &["mkfs", image, "--size", "32M", "--log-size", "4M"]);
        cairn.exits_with(0, &["fsck", "--extract", &format!("empty {image}"), image]);
        // The members hold the volume behind their labels.
        cairn.make_volume("32M", |volume| {
            fill(volume)?;
            volume.sync()?;
            volume.commit()
        });
        let bytes = fs::read(cairn.path("image")).unwrap();
        let mut at = 0;
        for name in &names {
            let member = File::options().write(true).open(cairn.path(name)).unwrap();
            let room = member.metadata().unwrap().len() as usize - (1 << 20);
            member.write_all_at(&bytes[at..at + room], 1 << 20).unwrap();
            at += if image.starts_with("mirror") { 0 } else { room };
        }
        fs::remove_file(cairn.path("used")).unwrap();
        let out = format!("out {image}");
        let code = if is_root() { 0 } else { 4 };
        if image.starts_with("mirror") {
            assert!(damage(&cairn.path("a")) > 0);
        }
        cairn.exits_with(code, &["fsck", "--extract", &out, image]);
        assert!(fs::read(cairn.path(&out).join("folder/letter")).unwrap() == letter(), "{image}");
    }
    fs::remove_file(cairn.path("a")).unwrap();
    let text = cairn
        .exits_with(if is_root() { 0 } else { 4 }, &["fsck", "--extract", "one", "mirror:a,b"]);
    assert!(text.contains("is used without a:"), "{text}");
    assert!(fs::read(cairn.path("one/again")).unwrap() == letter());
}

#[test]
fn mistakes_get_clear_messages() {
    let cairn = Cairn::new();
    cairn.make_volume("32M", fill);
    let fails = |arguments: &[&str], parts: &[&str]| {
        let text = cairn.exits_with(8, arguments);
        assert!(parts.iter().all(|part| text.contains(part)), "{arguments:?}: {text}");
    };
    fs::create_dir(cairn.path("full")).unwrap();
    fs::write(cairn.path("full/file"), "x").unwrap();
    fails(&["fsck", "--extract", "full", "image"], &["full is not empty", "a new directory"]);
    fails(&["fsck", "--extract", "full/file", "image"], &["full/file: Not a directory"]);
    fails(&["fsck", "--extract", "no/such", "image"], &["no/such: No such file"]);
    fails(&["fsck", "--extract", "out", "missing"], &["missing", "No such file"]);
    fs::write(cairn.path("text"), "Dear Ada").unwrap();
    fails(&["fsck", "--extract", "out", "text"], &["text"]);
    assert!(!cairn.path("out").exists(), "nothing is made before the volume is read");
    for other in ["--repair", "--data"] {
        let text = cairn.exits_with(2, &["fsck", "--extract", "out", "image", other]);
        assert!(text.contains("--extract"), "{text}");
    }
    let held = FileDevice::open(&cairn.path("image"), OpenMode::ReadWrite).unwrap();
    fails(&["fsck", "--extract", "out", "image"], &["image", "in use"]);
    drop(held);
    fs::create_dir(cairn.path("out")).unwrap();
    cairn.exits_with(if is_root() { 0 } else { 4 }, &["fsck", "--extract", "out", "image"]);
}

/// One directory is open at a time, and no path is as long as the tree is deep.
#[test]
fn a_tree_may_be_deeper_than_paths_are_long() {
    const DEPTH: usize = 3000;
    let cairn = Cairn::new();
    cairn.make_volume("64M", |volume| {
        let mut at = volume.root();
        for _ in 0..DEPTH {
            at = volume.create(at, b"deep", &new(FileType::Directory, 0o755))?.inode;
        }
        let file = volume.create(at, b"file", &new(FileType::Regular, 0o644))?.inode;
        volume.write(file, 0, b"the bottom")?;
        // A second name far above, and one beside the first.
        volume.link(file, volume.root(), b"top")?;
        volume.link(file, at, b"beside")?;
        volume.sync()?;
        volume.commit()
    });
    let text = cairn.exits_with(0, &["fsck", "--extract", "out", "image"]);
    assert!(text.contains("3001 directories") && text.contains("2 further names"), "{text}");
    assert_eq!(fs::read(cairn.path("out/top")).unwrap(), b"the bottom");
    assert_eq!(fs::metadata(cairn.path("out/top")).unwrap().nlink(), 3);
    // The standard library keeps each directory open on its way down.
    assert!(Command::new("rm").arg("-rf").arg(cairn.path("out")).status().unwrap().success());
}

#[test]
fn a_full_host_is_reported_and_leaves_no_half_file() {
    let cairn = Cairn::new();
    cairn.make_volume("64M", |volume| {
        for index in 0..20_u8 {
            let name = format!("file-{index}");
            let new = new(FileType::Regular, 0o644);
            let file: InodeId = volume.create(volume.root(), name.as_bytes(), &new)?.inode;
            volume.write(file, 0, &vec![index + 1; 300_000])?;
        }
        volume.sync()?;
        volume.commit()
    });
    fs::create_dir(cairn.path("small")).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=2m", "none"])
        .arg(cairn.path("small"))
        .stderr(Stdio::null())
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("left out: it takes a file system in memory");
        return;
    }
    let output =
        cairn.command(&["fsck", "--extract", "small/out", "image", "--json"]).output().unwrap();
    let lengths: Vec<u64> = fs::read_dir(cairn.path("small/out"))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .collect();
    let unmounted = Command::new("umount").arg(cairn.path("small")).status().unwrap();
    let text = told(8, &output);
    assert!(
        text.contains("No space left on device") && text.contains("small/out: /file-"),
        "{text}"
    );
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["complete"], false);
    assert_eq!(report["files"], lengths.len());
    assert!(lengths.iter().all(|length| *length == 300_000) && !lengths.is_empty(), "{lengths:?}");
    assert!(unmounted.success());
}

#[test]
fn ctrl_c_ends_it_in_order() {
    let cairn = Cairn::new();
    cairn.make_volume("512M", |volume| {
        for index in 0..400_u32 {
            let name = format!("file-{index}");
            let new = new(FileType::Regular, 0o644);
            let file = volume.create(volume.root(), name.as_bytes(), &new)?.inode;
            volume.write(file, 0, &vec![index as u8 | 1; 1 << 20])?;
        }
        volume.sync()?;
        volume.commit()
    });
    let mut command = cairn.command(&["fsck", "--extract", "out", "image"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while !cairn.path("out/file-7").exists() {
        cairn_environment::clock::sleep(std::time::Duration::from_millis(1));
    }
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    // It may have been quicker.
    if output.status.code() != Some(0) {
        let text = told(130, &output);
        assert!(text.contains("interrupted") && text.contains("incomplete"), "{text}");
    }
    for entry in fs::read_dir(cairn.path("out")).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().len(), 1 << 20);
    }
}
