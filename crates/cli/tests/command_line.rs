//! The command as a user meets it, without a mount: exit codes, refusals, messages.
use cairn_torture::systematic::Sequences;
use std::fs::{self, File};
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
        Command::new(env!("CARGO_BIN_EXE_cairn"))
            .args(arguments)
            .current_dir(self.folder.path())
            .output()
            .unwrap()
    }

    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        self.exits_with(0, arguments)
    }

    #[track_caller]
    fn exits_with(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let told = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(output.status.code(), Some(code), "cairn {}: {told}", arguments.join(" "));
        assert!(!told.contains("panicked"), "cairn {}: {told}", arguments.join(" "));
        told
    }

    /// The command fails, and its message holds each of `parts`.
    #[track_caller]
    fn fails(&self, arguments: &[&str], parts: &[&str]) {
        let told = self.exits_with(1, arguments);
        for part in parts {
            assert!(
                told.contains(part),
                "cairn {}: \"{part}\" is not in: {told}",
                arguments.join(" ")
            );
        }
    }

    fn make_volume(&self) {
        self.succeeds(&[
            "mkfs",
            "image",
            "--size",
            "32M",
            "--log-size",
            "4M",
            "--label",
            "letters",
        ]);
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
    let told = cairn.succeeds(&["stats", "image"]);
    assert!(told.contains("letters") && told.lines().next().unwrap().ends_with("(newest)"));
    for structure in ["super", "log", "tree", "space"] {
        assert!(!cairn.succeeds(&["dump", "image", structure]).trim().is_empty());
        let json = cairn.succeeds(&["dump", "image", structure, "--json"]);
        serde_json::from_str::<serde_json::Value>(&json)
            .unwrap_or_else(|error| panic!("{structure}: {error}: {json}"));
    }
    let report: serde_json::Value =
        serde_json::from_str(&cairn.succeeds(&["fsck", "image", "--json"])).unwrap();
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
        &["mkfs", "image", "--size", "1"],
        &["mkfs", "mirror:image,other", "--size", "1"],
        &["mkfs", "mirror:image,other", "--size", "1M"],
        &["mkfs", "mirror:image,link", "--size", "32M"],
    ];
    // A link that leads nowhere is in the way, but nothing of this command's making.
    std::os::unix::fs::symlink("nowhere", cairn.path("link")).unwrap();
    for arguments in attempts {
        cairn.fails(arguments, &["image"]);
        assert!(!cairn.path("image").exists() && !cairn.path("other").exists(), "{arguments:?}");
    }
    assert!(cairn.path("link").is_symlink());
}

#[test]
fn mistakes_get_clear_messages() {
    let cairn = Cairn::new();
    cairn.make_volume();
    fs::create_dir(cairn.path("dir")).unwrap();
    fs::write(cairn.path("letter"), "Dear Ada").unwrap();
    cairn.fails(&["mount", "missing", "dir"], &["missing", "No such file", "cairn mkfs missing"]);
    cairn.fails(&["mount", "image", "nowhere"], &["nowhere", "No such file"]);
    cairn.fails(&["mount", "image", "letter"], &["letter", "not a directory"]);
    cairn.fails(&["mount", "letter", "dir"], &["letter", "not a usable volume"]);
    cairn.fails(&["mount", "letter", "dir", "--create", "32M"], &["letter", "does not overwrite"]);
    let told = cairn.exits_with(2, &["mount", "image", "dir", "-o", "comit=1"]);
    assert!(told.contains("comit=1") && told.contains("commit=SECONDS"), "{told}");
    cairn.fails(&["umount", "dir"], &["dir"]);
    cairn.fails(&["sync", "dir"], &["dir"]);
    cairn.fails(&["stats", "dir"], &["dir"]);
    cairn.fails(&["stats", "letter"], &["letter"]);
    cairn.fails(&["dump", "missing", "super"], &["missing", "No such file"]);
    cairn.fails(&["dump", "image", "log", "--inodes", "1"], &["--inodes"]);
    cairn.fails(&["mkfs", "dir", "--size", "32M"], &["dir", "neither a regular file"]);
    for arguments in [
        &["mkfs", "raid:c1,c2", "--size", "32M"][..],
        &["mkfs", "mirrors:c1,c2", "--size", "32M"],
        &["fsck", "miror:c1,c2"],
    ] {
        assert!(cairn.exits_with(2, arguments).contains("write mirror:c1,c2"));
        assert!(!cairn.path(arguments[1]).exists());
    }
    cairn.succeeds(&["mkfs", "./raid:c1", "--size", "32M"]);
    cairn.exits_with(2, &["mkfs", "image", "--size", "3X"]);
    assert!(
        cairn
            .exits_with(2, &["mkfs", "new", "--size", "10E"])
            .contains("too large: files and devices have less than 8E")
    );
    cairn.fails(
        &["mkfs", "new", "--size", "1"],
        &["1 bytes is too small: a volume has at least 16M"],
    );
    for command in ["sync", "shutdown", "umount"] {
        cairn.fails(&[command, "nope"], &["nope: No such file or directory", "name the directory"]);
        let told = cairn.exits_with(1, &[command, "image"]);
        assert!(!told.contains("does not answer"), "{told}");
    }
    cairn.exits_with(2, &["dump", "image", "everything"]);
    cairn.exits_with(2, &["no-such-command"]);
}

/// What blkid(8) reports of other file systems.
#[test]
fn a_volume_says_which_it_is() {
    let cairn = Cairn::new();
    cairn.succeeds(&["mkfs", "image", "--size", "32M", "-L", "letters"]);
    let of = |image: &str| {
        serde_json::from_str::<serde_json::Value>(&cairn.succeeds(&["info", image, "--json"]))
            .unwrap()
    };
    let info = of("image");
    let uuid = info["uuid"].as_str().unwrap();
    assert_eq!(
        (uuid.len(), info["label"].as_str(), info["total_bytes"].as_u64()),
        (36, Some("letters"), Some(32 << 20))
    );
    let told = cairn.succeeds(&["info", "image"]);
    assert!(
        told.contains(&format!("uuid:   {uuid}\n"))
            && told.contains("label:  letters\n")
            && told.contains("32 MiB"),
        "{told}"
    );
    // One damaged superblock is no obstacle, three are.
    overwrite(&cairn.path("image"), 16 * 4096 + 100, &[0xff; 8]);
    assert_eq!(of("image")["uuid"], uuid);
    for block in [32, (32 << 20) / 4096 - 1] {
        overwrite(&cairn.path("image"), block * 4096 + 100, &[0xff; 8]);
    }
    cairn.fails(&["info", "image"], &["image", "cairn fsck"]);
    cairn.make_mirror();
    assert_eq!(of(MIRROR)["label"], "");
    cairn.fails(&["info", "a"], &["one of 2 members"]);
    cairn.fails(&["info", "missing"], &["missing", "No such file"]);
    fs::write(cairn.path("letter"), "Dear Ada").unwrap();
    cairn.fails(&["info", "letter"], &["not a usable volume"]);
    cairn.exits_with(2, &["info"]);
}

#[test]
fn file_knows_a_volume_by_the_magic_of_this_tree() {
    let cairn = Cairn::new();
    cairn.make_volume();
    cairn.make_mirror();
    let magic = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../share/magic/cairn");
    let told_of = |name: &str| {
        let output = Command::new("file")
            .arg("-b")
            .arg("-m")
            .arg(&magic)
            .arg(cairn.path(name))
            .output()
            .ok()?;
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        Some(String::from_utf8(output.stdout).unwrap())
    };
    let Some(told) = told_of("image") else {
        eprintln!("left out: file(1) is not here");
        return;
    };
    let json: serde_json::Value =
        serde_json::from_str(&cairn.succeeds(&["info", "image", "--json"])).unwrap();
    let uuid = json["uuid"].as_str().unwrap();
    let expected = format!(
        "Cairn file system volume version 1, UUID {uuid}, label \"letters\", 8192 blocks of 4096 bytes\n"
    );
    assert_eq!(told, expected);
    assert_eq!(told_of("a").as_deref(), Some("member of a Cairn mirror or concatenation\n"));
    overwrite(&cairn.path("image"), 16 * 4096, &[0; 4096]);
    assert!(
        told_of("image")
            .unwrap()
            .starts_with("Cairn file system volume, its first superblock is damaged")
    );
    fs::write(cairn.path("letter"), "Dear Ada").unwrap();
    assert!(!told_of("letter").unwrap().contains("Cairn"));
}

/// What Ctrl-C leaves is a volume, if mkfs was faster, or nothing.
#[test]
fn an_interrupted_mkfs_leaves_nothing_behind() {
    let cairn = Cairn::new();
    let image = cairn.path("image");
    let interrupt = |arguments: &[&str], signal, begun: &dyn Fn() -> bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        let child = command
            .args(arguments)
            .current_dir(cairn.folder.path())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        while !begun() {
            std::thread::yield_now();
        }
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let mut interrupted = 0;
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let (code, told) =
            interrupt(&["mkfs", "image", "--size", "1G", "--preallocate"], signal, &|| {
                image.exists()
            });
        if code == Some(0) {
            cairn.succeeds(&["fsck", "image"]);
            fs::remove_file(&image).unwrap();
            continue;
        }
        interrupted += 1;
        assert_eq!(code, Some(130), "{told}");
        assert!(told.contains("image was removed") && !image.exists(), "{told}");
    }
    // A file that was there stays, and is said to hold nothing.
    let begun = || fs::metadata(&image).is_ok_and(|metadata| metadata.len() == 1 << 30);
    fs::write(&image, "Dear Ada").unwrap();
    let command = ["mkfs", "image", "--size", "1G", "--preallocate", "--force"];
    let (code, told) = interrupt(&command, rustix::process::Signal::INT, &begun);
    if code != Some(0) {
        interrupted += 1;
        assert!(
            code == Some(130) && told.contains("image holds no volume now") && image.exists(),
            "{told}"
        );
    }
    cairn.succeeds(&command);
    assert!(interrupted > 0, "a gigabyte was written faster than a signal arrived, three times");
}

/// It is named, in one sentence, with what to do; not taken for a damaged volume.
#[test]
fn what_is_no_volume_is_named() {
    let cairn = Cairn::new();
    fs::create_dir(cairn.path("dir")).unwrap();
    let long = |name: &str, offset, magic: &[u8]| {
        fs::File::create(cairn.path(name)).unwrap().set_len(64 << 20).unwrap();
        overwrite(&cairn.path(name), offset, magic);
    };
    long("ext4", 1024 + 56, &[0x53, 0xef]);
    long("swap", 4096 - 10, b"SWAPSPACE2");
    long("disk", 510, &[0x55, 0xaa]);
    long("packed", 0, &[0x1f, 0x8b, 8]);
    long("something", 20, b"Dear Ada");
    fs::write(cairn.path("short"), "Dear Ada").unwrap();
    for (name, what, advice) in [
        ("ext4", "an ext2, ext3 or ext4 file system", "mount(8) mounts it"),
        ("swap", "swap space", "belongs to something else"),
        ("disk", "partition table", "name one of its partitions"),
        ("packed", "compressed by gzip", "unpack it first"),
        ("something", "it holds no cairn superblock", "cairn mkfs"),
        ("short", "8 bytes", "the smallest volume has 16777216"),
    ] {
        for (code, arguments) in [
            (1, &["mount", name, "dir"][..]),
            (8, &["fsck", name]),
            (1, &["dump", name, "super"]),
            (1, &["stats", name]),
        ] {
            let told = cairn.exits_with(code, arguments);
            assert!(
                [name, what, advice].iter().all(|part| told.contains(part)),
                "{arguments:?}: {told}"
            );
            assert!(
                !told.contains("magic") && told.trim().lines().count() == 1,
                "{arguments:?}: {told}"
            );
        }
    }
}

/// The volume stays as long as it was; its superblock's copy is where it was, too.
#[test]
fn an_image_that_was_enlarged_is_no_damaged_one() {
    let cairn = Cairn::new();
    cairn.make_volume();
    fs::File::options().write(true).open(cairn.path("image")).unwrap().set_len(48 << 20).unwrap();
    assert!(cairn.succeeds(&["fsck", "--data", "image"]).contains("0 warnings"));
    let told = cairn.succeeds(&["stats", "image"]);
    assert!(!told.contains("magic"), "{told}");
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
    let told = cairn.exits_with(1, &["fsck", "image", "--repair"]);
    assert!(told.contains("--undo"), "{told}");
    cairn.succeeds(&["fsck", "image", "--undo", "image.before-repair"]);
    cairn.exits_with(1, &["fsck", "image", "--repair", "--backup", "backup"]);
    assert!(cairn.path("backup").exists());
    cairn.succeeds(&["fsck", "image"]);
    // The leaf of the file tree: only a backup helps.
    let start = cairn_format::Geometry::for_size(32 << 20, Some(4 << 20)).unwrap().data_start();
    overwrite(&cairn.path("image"), start.offset_bytes() + 16384 + 100, &[0xff; 8]);
    let told = cairn.exits_with(4, &["fsck", "image", "--repair"]);
    assert!(told.contains("node") && told.contains(&(start.0 + 4).to_string()), "{told}");
    // Half of it: no repair brings the rest back.
    fs::copy(cairn.path("image"), cairn.path("half")).unwrap();
    File::options().write(true).open(cairn.path("half")).unwrap().set_len(16 << 20).unwrap();
    let told = cairn.exits_with(4, &["fsck", "half"]);
    assert!(told.contains("16777216 bytes shorter") && !told.contains("--repair"), "{told}");
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
    let command = format!(
        "'{}' dump image space --json | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}",
        env!("CARGO_BIN_EXE_cairn")
    );
    let output = Command::new("bash")
        .args(["-c", &command])
        .current_dir(cairn.folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const MIRROR: &str = "mirror:a,b";

impl Cairn {
    fn make_mirror(&self) {
        self.succeeds(&["mkfs", MIRROR, "--size", "32M", "--log-size", "4M"]);
    }
}

#[test]
fn a_mirror_is_made_checked_and_shown_like_an_image() {
    let cairn = Cairn::new();
    cairn.make_mirror();
    let bytes = |name: &str| fs::metadata(cairn.path(name)).unwrap().len();
    assert_eq!((bytes("a"), bytes("b")), (33 << 20, 33 << 20));
    for arguments in [
        &["fsck", "--data", MIRROR][..],
        &["stats", MIRROR],
        &["dump", MIRROR, "super"],
        &["fsck", "mirror:b,a"],
    ] {
        cairn.succeeds(arguments);
    }
    let status = cairn.succeeds(&["device", "status", MIRROR]);
    assert!(status.contains("complete") && !status.contains("not unmounted"), "{status}");
    cairn.fails(&["stats", "a"], &["one of 2 members of a mirror", "mirror:a"]);
    cairn.fails(&["mkfs", "a", "--size", "32M"], &["a member of a cairn mirror", "--force"]);
    cairn.fails(&["mkfs", MIRROR, "--size", "32M"], &["--force"]);
    cairn.succeeds(&["mkfs", MIRROR, "--force"]);
}

#[test]
fn members_that_do_not_belong_together_are_refused() {
    let cairn = Cairn::new();
    cairn.make_mirror();
    cairn.succeeds(&["mkfs", "mirror:c,d", "--size", "32M", "--log-size", "4M"]);
    cairn.succeeds(&["mkfs", "concat:x,y", "--size", "32M", "--log-size", "4M"]);
    cairn.succeeds(&["fsck", "concat:y,x"]);
    cairn.fails(&["stats", "mirror:a,c"], &["a and c", "different devices"]);
    cairn.fails(&["stats", "mirror:a,x"], &["x belongs to a concat"]);
    cairn.fails(&["stats", "mirror:a,a"], &["the same file"]);
    cairn.fails(&["stats", "mirror:a,b,c"], &["c"]);
    cairn.fails(&["stats", "mirror:a,b,missing"], &["has 2 members, but 3 are named"]);
    cairn.fails(&["stats", "mirror:p,q"], &["cairn mkfs"]);
    cairn.fails(&["stats", "concat:x,missing"], &["not complete", "missing"]);
    fs::copy(cairn.path("a"), cairn.path("copy")).unwrap();
    cairn.fails(&["stats", "mirror:a,copy"], &["one is a copy of the other"]);
    cairn.exits_with(2, &["stats", "mirror:a"]);
}

#[test]
fn rot_in_either_copy_is_found_and_written_again() {
    let cairn = Cairn::new();
    cairn.make_mirror();
    for (name, block) in [("a", 16), ("b", 65)] {
        overwrite(&cairn.path(name), (256 + block) * 4096 + 300, b"rot");
        let told = cairn.exits_with(4, &["fsck", "--data", MIRROR]);
        assert!(
            told.contains(&format!("{name}: 1 blocks are bad")) && told.contains("--repair"),
            "{told}"
        );
        let told = cairn.exits_with(1, &["fsck", "--data", "--repair", MIRROR]);
        assert!(told.contains("written again"), "{told}");
        cairn.succeeds(&["fsck", "--data", MIRROR]);
    }
}

#[test]
fn a_lost_member_is_replaced() {
    let cairn = Cairn::new();
    cairn.make_mirror();
    fs::remove_file(cairn.path("a")).unwrap();
    let told = cairn.exits_with(4, &["fsck", "--data", MIRROR]);
    assert!(told.contains("is used without a") && told.contains("0 errors"), "{told}");
    cairn.succeeds(&["fsck", "--data", "--degraded", MIRROR]);
    cairn.exits_with(4, &["device", "status", MIRROR]);
    assert!(cairn.exits_with(8, &["fsck", "--repair", MIRROR]).contains("--degraded"));
    cairn.succeeds(&["fsck", "--repair", "--degraded", MIRROR]);
    fs::write(cairn.path("letter"), b"Dear Ada").unwrap();
    cairn.fails(&["device", "replace", MIRROR, "a", "letter"], &["not empty", "--force"]);
    cairn.fails(&["device", "replace", MIRROR, "a", "b"], &["b is a member already"]);
    cairn.fails(&["device", "replace", MIRROR, "z", "new"], &["z is not among the members"]);
    cairn.succeeds(&["device", "replace", MIRROR, "a", "new"]);
    let status = cairn.succeeds(&["device", "status", "mirror:new,b", "--json"]);
    assert!(status.contains("\"complete\""), "{status}");
    cairn.succeeds(&["fsck", "--data", "mirror:new,b"]);
    cairn.succeeds(&["fsck", "--data", "--degraded", "mirror:new,missing"]);
    cairn.fails(&["device", "replace", "mirror:new,b", "b", "b"], &["in sync already"]);
    cairn.succeeds(&["device", "replace", "mirror:new,b", "b", "newer"]);
    assert!(
        cairn
            .exits_with(4, &["device", "status", "mirror:new,b"])
            .contains("replaced by another member")
    );
    cairn.succeeds(&["mkfs", "concat:x,y", "--size", "32M", "--log-size", "4M"]);
    cairn.fails(&["device", "replace", "concat:x,y", "x", "z"], &["no second copy"]);
    cairn.fails(&["device", "status", "letter"], &["single image"]);
}

#[test]
fn torture_tells_what_was_tried_and_how_to_repeat_it() {
    let cairn = Cairn::new();
    let told =
        cairn.succeeds(&["torture", "systematic", "--length", "2", "--sample", "3", "--seed", "7"]);
    let pairs = Sequences::all(2).count();
    let tried = format!("3  of {},{:03}\n", pairs / 1000, pairs % 1000);
    assert!(
        told.contains(&tried) && told.contains("nothing acknowledged was lost. (seed 7)"),
        "{told}"
    );
    let steps = Sequences::all(1).count();
    let last = (steps - 1).to_string();
    let chosen = ["--first", "snapshot the root", "--only", &last, "--seed", "7"];
    let told = cairn.succeeds(&[&["torture", "systematic", "--length", "2"][..], &chosen].concat());
    let tried = format!("1  of {steps}\n");
    for part in ["systematic --length 2 --first 'snapshot the root'\n", &tried] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    let output = cairn.run(&[
        "torture",
        "systematic",
        "--length",
        "1",
        "--only",
        "4",
        "--seed",
        "7",
        "--json",
    ]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "seed 7\n",
        "it stands there before the run"
    );
    assert_eq!(
        (report["passed"].as_bool(), report["workloads"].as_u64(), report["seed"].as_u64()),
        (Some(true), Some(1), Some(7))
    );
    assert!(report["search"]["states"].as_u64() > report["search"]["images"].as_u64(), "{report}");
    assert_eq!(report["interrupted"].as_bool(), Some(false));
    let told =
        cairn.succeeds(&["torture", "crash", "--states", "20", "--seed", "9", "--threads", "1"]);
    assert!(told.contains("crash states") && told.contains("(seed 9)"), "{told}");
}

#[test]
fn torture_tables_the_outcome_of_faults() {
    let cairn = Cairn::new();
    let told = cairn.succeeds(&["torture", "faults", "--sample", "1", "--seed", "3"]);
    for part in [
        "cairn torture faults --sample 1: 1 workloads",
        "read   node        EIO     once",
        "write  log         ENOSPC  from then on",
        "flush  -",
        "(seed 3)",
    ] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    let points = told.split("1 workloads, ").nth(1).and_then(|rest| rest.split(' ').next());
    let points = points.expect("the number of fault points");
    let (_, operations) = told.split_once("  during ").expect("a table of operations");
    let row = operations.lines().nth(1).expect("a row");
    assert!(row.contains(&format!(" {points} ")), "{points} fault points in {told}");
}

#[test]
fn torture_runs_workloads_of_a_file() {
    let cairn = Cairn::new();
    fs::write(
        cairn.path("list"),
        "# workload 1\nmkdir A 0777\nsync\ncheckpoint 1\n# workload 2\nfly A\n",
    )
    .unwrap();
    let told = cairn.succeeds(&["torture", "ace", "list", "--only", "0"]);
    assert!(told.contains("1  of 2"), "{told}");
    cairn.fails(
        &["torture", "ace", "list"],
        &["FOUND in workload 1", "\"fly A\": this is not an operation"],
    );
    let told = cairn.exits_with(2, &["torture", "ace", "list", "--only", "2"]);
    assert!(told.contains("there is no workload 2; there are 2"), "{told}");
    assert!(
        cairn
            .exits_with(2, &["torture", "ace", "list", "--from", "2"])
            .contains("there is no workload 2; there are 2")
    );
    cairn.exits_with(2, &["torture", "systematic", "--length", "4"]);
    cairn.exits_with(2, &["torture", "systematic"]);
}
