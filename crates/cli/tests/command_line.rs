//! The command as a user meets it, without a mount: exit codes, refusals, messages.
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

    /// Runs `cairn` in the folder.
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_cairn")).args(arguments).current_dir(self.folder.path()).output().unwrap()
    }

    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        self.exits_with(0, arguments)
    }

    #[track_caller]
    fn exits_with(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "cairn {}: {told}", arguments.join(" "));
        assert!(!told.contains("panicked"), "cairn {}: {told}", arguments.join(" "));
        told
    }

    /// The command fails, and its message holds each of `parts`.
    #[track_caller]
    fn fails(&self, arguments: &[&str], parts: &[&str]) {
        let told = self.exits_with(1, arguments);
        for part in parts {
            assert!(told.contains(part), "cairn {}: \"{part}\" is not in: {told}", arguments.join(" "));
        }
    }

    fn make_volume(&self) {
        self.succeeds(&["mkfs", "image", "--size", "32M", "--log-size", "4M", "--label", "letters"]);
    }
}

fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

#[test]
fn a_new_volume_is_clean_and_shows_itself() {
    let cairn = Cairn::new();
    cairn.make_volume();
    assert_eq!(fs::metadata(cairn.path("image")).unwrap().len(), 32 << 20);
    cairn.succeeds(&["fsck", "image"]);
    cairn.succeeds(&["fsck", "image", "--data", "--repair"]);
    assert!(cairn.succeeds(&["stats", "image"]).contains("letters"));
    for structure in ["super", "log", "tree", "space"] {
        assert!(!cairn.succeeds(&["dump", "image", structure]).trim().is_empty());
        let json = cairn.succeeds(&["dump", "image", structure, "--json"]);
        serde_json::from_str::<serde_json::Value>(&json).unwrap_or_else(|error| panic!("{structure}: {error}: {json}"));
    }
    let report: serde_json::Value = serde_json::from_str(&cairn.succeeds(&["fsck", "image", "--json"])).unwrap();
    assert_eq!(report["errors"], 0);
    assert_eq!(report["label"], "letters");
}

#[test]
fn mkfs_refuses_to_overwrite_without_force() {
    let cairn = Cairn::new();
    cairn.make_volume();
    let before = fs::read(cairn.path("image")).unwrap();
    cairn.fails(&["mkfs", "image"], &["image", "a cairn volume", "--force"]);
    assert_eq!(fs::read(cairn.path("image")).unwrap(), before, "a refusal changes nothing");
    fs::write(cairn.path("letter"), "Dear Ada").unwrap();
    cairn.fails(&["mkfs", "letter", "--size", "32M"], &["letter", "not empty"]);
    assert_eq!(fs::read(cairn.path("letter")).unwrap(), b"Dear Ada");
    let sparse = fs::File::create(cairn.path("sparse")).unwrap();
    sparse.set_len(32 << 20).unwrap();
    cairn.succeeds(&["mkfs", "sparse"]);
    overwrite(&cairn.path("letter"), 1024 + 56, &[0x53, 0xef]);
    cairn.fails(&["mkfs", "letter", "--size", "32M"], &["ext4"]);
    cairn.succeeds(&["mkfs", "letter", "--size", "32M", "--force", "--preallocate"]);
    cairn.succeeds(&["fsck", "letter"]);
    cairn.succeeds(&["mkfs", "letter", "--size", "64M", "--force"]);
    assert_eq!(fs::metadata(cairn.path("letter")).unwrap().len(), 64 << 20);
}

#[test]
fn a_failed_mkfs_leaves_no_file_behind() {
    let cairn = Cairn::new();
    let label = "x".repeat(65);
    let attempts: &[&[&str]] = &[
        &["mkfs", "image"],
        &["mkfs", "image", "--size", "1M"],
        &["mkfs", "image", "--size", "32M", "--log-size", "31M"],
        &["mkfs", "image", "--size", "32M", "--label", &label],
    ];
    for arguments in attempts {
        cairn.fails(arguments, &["image"]);
        assert!(!cairn.path("image").exists(), "{arguments:?}");
    }
}

#[test]
fn mistakes_get_clear_messages() {
    let cairn = Cairn::new();
    cairn.make_volume();
    fs::create_dir(cairn.path("dir")).unwrap();
    fs::write(cairn.path("letter"), "Dear Ada").unwrap();
    cairn.fails(&["mount", "missing", "dir"], &["missing", "No such file"]);
    cairn.fails(&["mount", "image", "nowhere"], &["nowhere", "No such file"]);
    cairn.fails(&["mount", "image", "letter"], &["letter", "not a directory"]);
    cairn.fails(&["mount", "letter", "dir"], &["letter", "not a usable volume"]);
    cairn.fails(&["mount", "letter", "dir", "--create", "32M"], &["letter", "does not overwrite"]);
    cairn.fails(&["mount", "image", "dir", "-o", "comit=1"], &["comit=1", "commit=SECONDS"]);
    cairn.fails(&["umount", "dir"], &["dir"]);
    cairn.fails(&["sync", "dir"], &["dir"]);
    cairn.fails(&["stats", "dir"], &["dir"]);
    cairn.fails(&["stats", "letter"], &["letter"]);
    cairn.fails(&["dump", "missing", "super"], &["missing", "No such file"]);
    cairn.fails(&["dump", "image", "log", "--inodes", "1"], &["--inodes"]);
    cairn.fails(&["mkfs", "dir", "--size", "32M"], &["dir", "neither a regular file"]);
    cairn.exits_with(2, &["mkfs", "image", "--size", "3X"]);
    cairn.exits_with(2, &["dump", "image", "everything"]);
    cairn.exits_with(2, &["no-such-command"]);
}

#[test]
fn fsck_tells_damage_by_its_exit_code() {
    let cairn = Cairn::new();
    cairn.make_volume();
    assert!(cairn.exits_with(8, &["fsck", "missing"]).contains("missing"));
    fs::write(cairn.path("letter"), "Dear Ada").unwrap();
    assert!(cairn.exits_with(8, &["fsck", "letter"]).contains("letter"));
    // Slot 0 of the superblock: a repair writes it again from the others.
    overwrite(&cairn.path("image"), 16 * 4096 + 100, &[0xff; 8]);
    cairn.exits_with(1, &["fsck", "image", "--repair"]);
    cairn.succeeds(&["fsck", "image"]);
    // The leaf of the file tree: only a backup helps.
    let start = cairn_format::Geometry::for_size(32 << 20, Some(4 << 20)).unwrap().data_start();
    overwrite(&cairn.path("image"), start.offset_bytes() + 16384 + 100, &[0xff; 8]);
    let told = cairn.exits_with(4, &["fsck", "image", "--repair"]);
    assert!(told.contains("node") && told.contains(&(start.0 + 4).to_string()), "{told}");
    fs::create_dir(cairn.path("dir")).unwrap();
    // All three superblocks.
    for block in [16, 32, (32 << 20) / 4096 - 1] {
        overwrite(&cairn.path("image"), block * 4096, &[0; 4096]);
    }
    cairn.exits_with(8, &["fsck", "image"]);
    cairn.fails(&["mount", "image", "dir"], &["image", "not a usable volume"]);
}

#[test]
fn output_may_be_cut_short() {
    let cairn = Cairn::new();
    cairn.make_volume();
    let command = format!("'{}' dump image space --json | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}", env!("CARGO_BIN_EXE_cairn"));
    let output = Command::new("bash").args(["-c", &command]).current_dir(cairn.folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
