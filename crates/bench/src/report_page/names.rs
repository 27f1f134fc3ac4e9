//! Loads and figures in words that need no knowledge of the tools.

/// What a load of a comparison does: `tool:fio@16` is "64 KiB write + fsync, 16 jobs (fio)".
/// Another program's load stays as it is.
pub fn load(name: &str) -> String {
    let (generator, clients) = name
        .split_once('@')
        .map_or((name, None), |(generator, clients)| (generator, Some(clients)));
    let (what, one, many, tool) = match generator {
        "tool:fio" => ("64 KiB write + fsync", "job", "jobs", " (fio)"),
        "tool:fs_mark" => {
            ("new 4 KiB files, each with an fsync", "process", "processes", " (fs_mark)")
        }
        "tool:fs_mark-nosync" => {
            ("new 4 KiB files without fsync", "process", "processes", " (fs_mark)")
        }
        "tool:dbench" => ("office file server", "client", "clients", " (dbench)"),
        "tool:pgbench" => ("PostgreSQL, short transactions", "client", "clients", " (pgbench)"),
        "dbench" => ("office file server", "client", "clients", " (Cairn's dbench)"),
        "fsync-write" => ("64 KiB write + fsync", "thread", "threads", ""),
        "small-durable-files" => ("mail delivery, small durable files", "thread", "threads", ""),
        "fs_mark" => ("new 4 KiB files, each with an fsync", "thread", "threads", ""),
        "create-walk-unlink" => ("create, list and remove a tree", "thread", "threads", ""),
        "fsync-happy" => ("reads and writes beside fsyncs", "thread", "threads", ""),
        "isolation" => ("small fsyncs beside a large one", "thread", "threads", ""),
        "one-file-fsync" => ("4 KiB of one file + fsync", "thread", "threads", ""),
        "snapshots" => ("4 KiB + fsync beside one snapshot or fork", "thread", "threads", ""),
        "snapshots-beside-dbench" => {
            ("office file server beside one snapshot or fork", "client", "clients", "")
        }
        "snapshot-deletion" => return "delete snapshots, in three orders".into(),
        "forks" => ("copies of one tree at the same moment", "thread", "threads", ""),
        "many-snapshots" => return "open a volume that has many of them".into(),
        "round-trip" => ("getxattr, nothing to do", "thread", "threads", ""),
        "device-limit" => return "the device alone: write + flush".into(),
        "untar" => return "unpack the sources of a program (tar)".into(),
        "sync" => return "make unpacked sources durable (sync)".into(),
        "grep" => return "search sources just unpacked (grep -r)".into(),
        "cp" => return "copy sources (cp -r)".into(),
        "find" => return "look at all sources (find)".into(),
        "rm" => return "remove sources (rm -r)".into(),
        "git" => return "clone a repository (git)".into(),
        "cargo-build" => return "build a crate (cargo)".into(),
        "npm-like" => return "unpack 20,000 tiny files in deep folders (tar)".into(),
        "sqlite" => return "SQLite, a transaction for each row".into(),
        "sqlite-load" => return "SQLite, all rows in one transaction".into(),
        "seq-write" => return "write a large file, with an fsync at its end (fio)".into(),
        "seq-read" => ("read a large file, not cached", "job", "jobs", " (fio)"),
        "rand-read" => ("read 4 KiB at random, not cached", "job", "jobs", " (fio)"),
        "one-file-fdatasync" => {
            ("4 KiB write + fdatasync, all in one file", "job", "jobs", " (fio)")
        }
        "own-files-fdatasync" => {
            ("4 KiB write + fdatasync, each in its own file", "job", "jobs", " (fio)")
        }
        other => (other, "client", "clients", ""),
    };
    let clients = clients.map_or_else(String::new, |clients| {
        format!(", {clients} {}", if clients == "1" { one } else { many })
    });
    format!("{what}{clients}{tool}")
}

/// A figure beside the main one: `fsync p99` is "fsync, 99 % are faster".
pub fn figure(name: &str) -> String {
    match name.split_once("p99") {
        Some((operation, "")) => {
            format!(
                "{}99 % are faster",
                if operation.is_empty() {
                    String::new()
                } else {
                    format!("{}, ", operation.trim())
                }
            )
        }
        _ => name.to_owned(),
    }
}

/// A file system of a comparison.
pub fn system(name: &str) -> String {
    let (base, buffered) =
        name.strip_suffix("-buffered").map_or((name, ""), |base| (base, ", page cache below"));
    let places = [
        ("cairn-image", "Cairn, image file"),
        ("cairn-loop", "Cairn, loop device"),
        ("cairn-memory", "in memory over FUSE"),
    ];
    let place =
        places.into_iter().find_map(|(name, place)| Some((place, base.strip_prefix(name)?)));
    let Some((place, way)) = place else { return format!("{base}{buffered}") };
    let (transport, writeback) =
        way.strip_suffix("-writeback").map_or((way, ""), |transport| (transport, ", writeback"));
    let transport = match transport {
        "" => "",
        "-dev" => ", /dev/fuse",
        "-uring" => ", io_uring",
        _ => return name.to_owned(),
    };
    format!("{place}{transport}{writeback}{buffered}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads::Workload;

    #[test]
    fn names_are_plain() {
        assert_eq!(load("tool:fio@16"), "64 KiB write + fsync, 16 jobs (fio)");
        assert_eq!(load("dbench@1"), "office file server, 1 client (Cairn's dbench)");
        assert_eq!(
            (load("device-limit").as_str(), load("new@3").as_str()),
            ("the device alone: write + flush", "new, 3 clients")
        );
        assert_eq!(
            (figure("fsync p99").as_str(), figure("p99").as_str()),
            ("fsync, 99 % are faster", "99 % are faster")
        );
        assert_eq!(figure("maximum latency"), "maximum latency");
        assert_eq!(system("cairn-loop-buffered"), "Cairn, loop device, page cache below");
        assert_eq!(system("cairn-memory-uring"), "in memory over FUSE, io_uring");
        assert_eq!(system("cairn-image-uring-writeback"), "Cairn, image file, io_uring, writeback");
        assert_eq!(
            system("cairn-loop-dev-buffered"),
            "Cairn, loop device, /dev/fuse, page cache below"
        );
        assert_eq!(
            (system("cairn-image").as_str(), system("xfs").as_str(), system("cairn-x").as_str()),
            ("Cairn, image file", "xfs", "cairn-x")
        );
    }

    #[test]
    fn every_load_of_every_day_has_a_plain_name() {
        for workload in crate::peers::PeerWorkload::everyday() {
            let (name, plain) = (workload.name(), load(&workload.name()));
            assert!(plain.contains(' ') && plain != format!("{name}, 1 client"), "{name}: {plain}");
        }
        assert_eq!(load("rand-read@32"), "read 4 KiB at random, not cached, 32 jobs (fio)");
    }

    #[test]
    fn every_load_has_a_plain_name() {
        for workload in Workload::ALL {
            assert!(
                !load(&format!("{}@2", workload.name())).contains(workload.name())
                    || workload == Workload::Dbench,
                "{}",
                workload.name()
            );
        }
    }
}
