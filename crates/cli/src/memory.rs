//! What a mount's server does about memory: it takes a part of what there is, and never waits for
//! itself.
//!
//! The kernel makes room for a program's memory by writing back what is dirty, also what belongs to
//! this server's mount, or by dropping pages of the server's own program file. A server that needs
//! such memory while it is asked to write waits for itself. So what it may keep depends on the
//! memory that the machine, or its control group, has; and as far as the server is allowed to, its
//! pages stay in memory ([`keep_out_of_reclaim`]).
use cairn_engine::VolumeOptions;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;
use std::fs;
use std::path::{Path, PathBuf};

/// Memory is divided by these for the parts of a volume.
const DATA_CACHE_SHARE: u64 = 32;
const DIRTY_DATA_SHARE: u64 = 16;
const NODE_CACHE_SHARE: u64 = 16;
/// About the bytes of a cached inode with what belongs to it. Inodes get the same share of memory
/// as nodes.
const INODE_BYTES: u64 = 1 << 10;
/// Clean file data, however much memory there is.
const DATA_CACHE_BYTES_MAX: u64 = 512 << 20;

const GROUPS_OF_PROCESS: &str = "/proc/self/cgroup";
const GROUPS: &str = "/sys/fs/cgroup";

/// The memory that this process may use, in bytes: the machine's, or the least that a control group
/// around it has.
pub fn available_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    let machine = system.totalram.saturating_mul(system.mem_unit.into());
    let groups = fs::read_to_string(GROUPS_OF_PROCESS).unwrap_or_default();
    group_limit(&groups, Path::new(GROUPS)).map_or(machine, |limit| limit.min(machine))
}

/// The least limit of the groups that `groups` lists as `/proc/PID/cgroup` does, and of those
/// around them, below `root`.
fn group_limit(groups: &str, root: &Path) -> Option<u64> {
    groups.lines().filter_map(|line| limit_of(line, root)).min()
}

fn limit_of(line: &str, root: &Path) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let (top, file) = match controllers {
        "" => (root.to_owned(), "memory.max"),
        _ if controllers.split(',').any(|controller| controller == "memory") => {
            (root.join("memory"), "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let path = PathBuf::from(path.trim_start_matches('/'));
    let limits = path.ancestors().filter_map(|group| {
        fs::read_to_string(top.join(group).join(file)).ok()?.trim().parse().ok()
    });
    limits.min()
}

/// Lets the parts of `options` have no more than their share of `memory_bytes`; `data_cache_bytes`
/// of clean data if that was asked for.
pub fn share(options: &mut VolumeOptions, memory_bytes: u64, data_cache_bytes: Option<u64>) {
    options.data_cache_bytes = data_cache_bytes
        .unwrap_or_else(|| DATA_CACHE_BYTES_MAX.min(memory_bytes / DATA_CACHE_SHARE));
    options.dirty_data_bytes_max =
        options.dirty_data_bytes_max.min(memory_bytes / DIRTY_DATA_SHARE);
    options.node_cache_bytes = options.node_cache_bytes.min(memory_bytes / NODE_CACHE_SHARE);
    let inodes =
        usize::try_from(memory_bytes / NODE_CACHE_SHARE / INODE_BYTES).unwrap_or(usize::MAX);
    options.inode_cache_entries = options.inode_cache_entries.min(inodes);
}

/// For the process, before it makes threads: memory that it asks for is never made free by writing
/// to a file system, and its pages stay once they are there. Root may do so; without it a mount
/// works as long as memory is not short.
pub fn keep_out_of_reclaim() {
    if let Err(error) = configure_io_flusher_behavior(true) {
        tracing::debug!(
            "the kernel may write to this mount to free memory for its server: {error}"
        );
    }
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = mlockall(flags) {
        tracing::debug!("the server's pages may be reclaimed: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, group: &str, file: &str, limit: &str) {
        fs::create_dir_all(root.join(group)).expect("made");
        fs::write(root.join(group).join(file), limit).expect("written");
    }

    #[test]
    fn the_least_limit_around_a_process_counts() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        write(root, "a/b", "memory.max", "max\n");
        assert_eq!(group_limit("0::/a/b\n", root), None);
        write(root, "a", "memory.max", "5000\n");
        assert_eq!(group_limit("0::/a/b\n", root), Some(5000));
        write(root, "a/b", "memory.max", "3000\n");
        assert_eq!(group_limit("0::/a/b\n", root), Some(3000));
        write(root, "memory/c", "memory.limit_in_bytes", "2000\n");
        assert_eq!(group_limit("9:cpu:/c\n", root), None);
        assert_eq!(group_limit("9:cpu:/c\n8:blkio,memory:/c\n0::/a/b\n", root), Some(2000));
        assert_eq!(group_limit("no group\n", root), None);
    }

    #[test]
    fn parts_get_less_where_there_is_little_memory() {
        let default = VolumeOptions::default();
        let shared = |memory: u64, wanted| {
            let mut options = VolumeOptions::default();
            share(&mut options, memory, wanted);
            options
        };
        let much = shared(64 << 30, None);
        assert_eq!(
            (much.data_cache_bytes, much.dirty_data_bytes_max),
            (DATA_CACHE_BYTES_MAX, default.dirty_data_bytes_max)
        );
        assert_eq!(
            (much.node_cache_bytes, much.inode_cache_entries),
            (default.node_cache_bytes, default.inode_cache_entries)
        );
        let little = shared(512 << 20, None);
        assert_eq!(
            (little.data_cache_bytes, little.dirty_data_bytes_max, little.node_cache_bytes),
            (16 << 20, 32 << 20, 32 << 20)
        );
        assert_eq!(little.inode_cache_entries, 32 << 10);
        assert_eq!(shared(512 << 20, Some(7 << 20)).data_cache_bytes, 7 << 20);
    }
}
