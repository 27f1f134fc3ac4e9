//! A server and its programs in a control group with little memory. `CAIRN_MOUNT_TESTS` as in
//! `mounting`.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use cairn_environment::clock;
use mounted::Mounted;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LIMIT_BYTES: u64 = 512 << 20;
/// A load that takes longer hangs.
const PATIENCE: Duration = Duration::from_mins(8);
/// More than the group has memory for: a large file, a tree copied twice, and small files with an
/// fsync each, all at once.
const LOAD: &str = "
    set -e
    for client in 1 2 3 4 5 6 7 8 9 10 11 12; do
        (for file in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
            dd if=/dev/urandom of=dir/small.$client.$file bs=3000 count=9 conv=fsync status=none
        done) &
    done
    dd if=/dev/zero of=dir/large bs=1M count=900 status=none &
    cp -r tree dir/first
    cp -r dir/first dir/second
    wait
    sync -f dir
";

/// A control group with a memory limit; it is removed in the end.
struct Group(PathBuf);

impl Group {
    /// `None` where this process may make none.
    fn new() -> Option<Group> {
        let name = format!("cairn-test-{}", std::process::id());
        for (root, limit) in
            [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")]
        {
            let path = Path::new(root).join(&name);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let group = Group(path);
            if group.0.join(limit).exists()
                && fs::write(group.0.join(limit), LIMIT_BYTES.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        eprintln!("left out: no control group for memory can be made");
        None
    }

    /// A command that runs in the group.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""])
            .arg(&self.0)
            .arg(program)
            .stdin(Stdio::null());
        command
    }

    fn kills(&self) -> u64 {
        let text = ["memory.events", "memory.oom_control"]
            .map(|file| fs::read_to_string(self.0.join(file)).unwrap_or_default())
            .concat();
        let mut counts =
            text.lines().filter_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        counts.next().expect("the group counts who was killed")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Not before the last process in it has gone.
        for _ in 0..500 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            clock::sleep(Duration::from_millis(10));
        }
    }
}

fn make_tree(root: &Path) {
    for folder in 0..40 {
        let folder_path = root.join(folder.to_string());
        fs::create_dir_all(&folder_path).unwrap();
        for file in 0..40_usize {
            fs::write(folder_path.join(file.to_string()), vec![folder as u8; 1000 + file * 1500])
                .unwrap();
        }
    }
}

fn assert_same(one: &Path, other: &Path) {
    for entry in fs::read_dir(one).unwrap().map(Result::unwrap) {
        let (one, other) = (entry.path(), other.join(entry.file_name()));
        if entry.file_type().unwrap().is_dir() {
            assert_same(&one, &other);
        } else {
            assert!(fs::read(&one).unwrap() == fs::read(&other).unwrap(), "{}", other.display());
        }
    }
}

/// Whether it ends with success before patience does; the server of a hanging one is killed, or
/// nothing would ever end it.
fn ends(load: &mut Child, server: &mut Child) -> bool {
    let begin = clock::now_monotonic();
    while begin.elapsed() < PATIENCE {
        if let Some(status) = load.try_wait().unwrap() {
            return status.success();
        }
        clock::sleep(Duration::from_millis(50));
    }
    let _ = server.kill();
    false
}

fn works_with_little_memory(options: &str) {
    let Some(mounted) = Mounted::new() else { return };
    let Some(group) = Group::new() else { return };
    make_tree(&mounted.path("tree"));
    mounted.succeeds(&["mkfs", "image", "--size", "3G"]);
    let mount =
        mounted.command(&["mount", "--foreground", "--log", "log", "-o", options, "image", "dir"]);
    let mut server = group.command(env!("CARGO_BIN_EXE_cairn"));
    let mut server =
        server.args(mount.get_args()).current_dir(mounted.folder.path()).spawn().unwrap();
    while !mounted.is_mounted() {
        assert!(server.try_wait().unwrap().is_none(), "the server ended: {}", mounted.logged());
        clock::sleep(Duration::from_millis(5));
    }
    let mut load =
        group.command("sh").args(["-c", LOAD]).current_dir(mounted.folder.path()).spawn().unwrap();
    assert!(
        ends(&mut load, &mut server),
        "{options}: the load does not end, or failed: {}",
        mounted.logged()
    );
    for copy in ["dir/first", "dir/second"] {
        assert_same(&mounted.path("tree"), &mounted.path(copy));
    }
    assert_eq!(fs::metadata(mounted.path("dir/large")).unwrap().len(), 900 << 20);
    assert_eq!(group.kills(), 0, "nobody was killed for want of memory");
    mounted.succeeds(&["umount", "dir"]);
    assert!(server.wait().unwrap().success());
    assert!(mounted.succeeds(&["fsck", "--data", "image"]).contains("0 errors"));
}

#[test]
fn a_mount_goes_on_where_memory_is_short() {
    works_with_little_memory("writeback=off");
}

#[test]
fn the_kernel_makes_room_by_writing_to_a_mount_whose_server_wants_memory() {
    works_with_little_memory("writeback=on");
}
