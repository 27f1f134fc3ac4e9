//! Files whose length changes while programs have them open: appends, copies and mappings go by
//! the new one.
use super::mounted::Mounted;
use super::{WITH_WRITEBACK, apply, new_mount, text, with_fork};
use cairn_environment::clock;
use cairn_torture::mounted::mapping::Mapping;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

const LENGTHS: [usize; 5] = [0, 20, 4096, 10_000, 700_001];

/// Pairs of lengths before and after.
fn pairs(wanted: impl Fn(usize, usize) -> bool) -> Vec<(usize, usize)> {
    let all = LENGTHS.iter().flat_map(|old| LENGTHS.iter().map(|new| (*old, *new)));
    all.filter(|(old, new)| old != new && wanted(*old, *new)).collect()
}

fn appender(path: &PathBuf, flags: i32) -> File {
    OpenOptions::new().append(true).create(true).custom_flags(flags).open(path).unwrap()
}

/// Reads through an open file without asking for its length; at most so many bytes.
fn read(file: &File, length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    let mut at = 0;
    while let more @ 1.. = file.read_at(&mut data[at..], at as u64).unwrap() {
        at += more;
    }
    data.truncate(at);
    data
}

/// A log that a program keeps open for appends, with these flags.
struct Log {
    path: PathBuf,
    file: File,
    lengths: (usize, usize),
}

/// With its writeback cache the kernel keeps the length of an open file that becomes shorter.
#[test]
fn appends_go_to_the_new_end() {
    let all = pairs(|_, _| true);
    let longer = pairs(|old, new| old < new);
    for (options, pairs) in [("", all), (",writeback=on", longer)] {
        for flags in [0, rustix::fs::OFlags::DSYNC.bits() as i32] {
            appends_to_logs(options, flags, &pairs);
        }
    }
}

fn appends_to_logs(options: &str, flags: i32, pairs: &[(usize, usize)]) {
    let name = |(old, new): (usize, usize)| format!("{old} to {new}");
    let prepare = |base: &Path| {
        for pair in pairs {
            fs::write(base.join(name(*pair)), vec![b'o'; pair.0]).unwrap();
        }
    };
    with_fork(options, prepare, |mounted, base, fork| {
        let open = |lengths: &(usize, usize)| {
            let path = base.join(name(*lengths));
            let file = appender(&path, flags);
            // The kernel knows it.
            assert_eq!(file.metadata().unwrap().len(), lengths.0 as u64);
            assert_eq!(fs::read(&path).unwrap().len(), lengths.0);
            fs::write(fork.join(name(*lengths)), vec![b'n'; lengths.1]).unwrap();
            Log { path, file, lengths: *lengths }
        };
        let mut logs: Vec<Log> = pairs.iter().map(open).collect();
        apply(mounted, &[]);
        let mut expected = Vec::new();
        for Log { path, file, lengths: (_, new) } in &mut logs {
            let mut all = vec![b'n'; *new];
            let mut append = |data: &[u8]| {
                file.write_all(data).unwrap();
                all.extend(data);
            };
            append(b"first\n");
            append(b"second\n");
            // Longer than a request.
            append(&[b'x'; 2_100_000]);
            append(b"last\n");
            // Another user does not make the kernel ask for lengths: it has them soon.
            if rustix::process::geteuid().is_root() {
                let reader = File::open(&*path).unwrap();
                assert!(read(&reader, all.len() + 1) == all, "{}", path.display());
            }
            file.write_all(b"end").unwrap();
            all.extend(b"end");
            expected.push(all);
        }
        let check = || {
            for (pair, expected) in pairs.iter().zip(&expected) {
                let found = fs::read(base.join(name(*pair))).unwrap();
                assert!(found == *expected, "{}: {} bytes", name(*pair), found.len());
            }
        };
        drop(logs);
        new_mount(mounted, options);
        check();
    });
}

#[test]
fn copies_and_mappings_reach_to_the_new_end() {
    for options in WITH_WRITEBACK {
        let prepare = |base: &Path| fs::write(base.join("file"), [b'o'; 20]).unwrap();
        with_fork(options, prepare, |mounted, base, fork| {
            let file = OpenOptions::new().read(true).write(true).open(base.join("file")).unwrap();
            let mapping = Mapping::new(&file, 0, 10_000).unwrap();
            let mut first = [0];
            mapping.load(&mut first).unwrap();
            fs::write(fork.join("file"), [b'n'; 10_000]).unwrap();
            apply(mounted, &[]);
            let copy = File::create(base.join("copy")).unwrap();
            let copied = rustix::fs::copy_file_range(&file, None, &copy, None, 1 << 20).unwrap();
            assert_eq!(copied, 10_000);
            let outside = File::create(mounted.path("outside")).unwrap();
            assert_eq!(rustix::fs::sendfile(&outside, &file, Some(&mut 0), 1 << 20), Ok(10_000));
            let mut all = vec![0; 10_000];
            mapping.load(&mut all).unwrap();
            assert!(all == [b'n'; 10_000] && fs::read(base.join("copy")).unwrap() == all);
        });
    }
}

/// An append while an application runs comes before it, which is a conflict then, or after it.
#[test]
fn an_append_meanwhile_is_before_or_behind() {
    Mounted::on_each_transport("", |mounted| {
        let mut expected = Vec::new();
        for (round, lengths) in [(20, 9_000), (9_000, 20)].into_iter().cycle().take(24).enumerate()
        {
            let [base, fork] = ["base", "fork"].map(|name| format!("dir/{name}{round}"));
            let log = mounted.path(&format!("{base}/log"));
            mounted.succeeds(&["subvolume", "create", &base]);
            fs::write(&log, "o".repeat(lengths.0)).unwrap();
            mounted.succeeds(&["fork", &base, &fork]);
            fs::write(mounted.path(&format!("{fork}/log")), "n".repeat(lengths.1)).unwrap();
            let mut file = appender(&log, 0);
            let mut command = mounted.command(&["apply", &fork]);
            let command = command.stdout(Stdio::null()).stderr(Stdio::null());
            let mut command = command.spawn().unwrap();
            clock::sleep(Duration::from_millis(round as u64));
            file.write_all(b"1\n").unwrap();
            file.write_all(b"2\n").unwrap();
            let code = command.wait().unwrap().code();
            file.write_all(b"3\n").unwrap();
            let before = match code {
                Some(0) => "n".repeat(lengths.1),
                Some(1) => "o".repeat(lengths.0),
                code => panic!("{code:?}"),
            };
            expected.push((log, before + "1\n2\n3\n"));
        }
        new_mount(mounted, "");
        for (log, expected) in expected {
            let found = text(log.clone());
            assert!(found == expected, "{}: {} bytes", log.display(), found.len());
        }
    });
}
