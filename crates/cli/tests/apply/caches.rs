//! What the kernel knows of both sides: all of the fork comes over, and programs see it at once.
use super::mounted::Mounted;
use super::{WITH_WRITEBACK, apply, names, new_mount, text, with_fork};
use cairn_environment::clock;
use cairn_torture::mounted::mapping::Mapping;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const FILES: [&str; 7] =
    ["file", "mapped", "longer", "shorter", "mode", "directory/gone", "directory/moved"];

fn prepare(base: &Path) {
    fs::create_dir_all(base.join("directory/inner")).unwrap();
    fs::create_dir(base.join("elsewhere")).unwrap();
    for name in FILES {
        fs::write(base.join(name), vec![b'0'; 10_000]).unwrap();
    }
    symlink("file", base.join("link")).unwrap();
}

fn open(path: PathBuf) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn first_of(file: &File) -> u8 {
    let mut first = [0];
    file.read_exact_at(&mut first, 0).unwrap();
    first[0]
}

#[test]
fn programs_see_the_new_state_at_once() {
    for options in WITH_WRITEBACK {
        with_fork(options, prepare, |mounted, base, fork| {
            let at = |name: &str| base.join(name);
            // The kernel knows all of it: attributes, data, listings, and what is missing.
            for name in FILES {
                assert_eq!(fs::read(at(name)).unwrap(), vec![b'0'; 10_000]);
            }
            let of_base = ["directory", "elsewhere", "file", "link", "longer", "mapped", "mode"];
            assert_eq!(names(base), [&of_base[..], &["shorter"]].concat());
            assert_eq!(names(&at("directory")), ["gone", "inner", "moved"]);
            assert!(!at("new").exists() && !at("elsewhere/moved").exists());
            assert!(names(&at("elsewhere")).is_empty());
            let [file, mapped, longer, moved, gone] =
                ["file", "mapped", "longer", "directory/moved", "directory/gone"]
                    .map(|name| open(at(name)));
            let mapping = Mapping::new(&mapped, 0, 10_000).unwrap();
            let mut byte = [0];
            mapping.load(&mut byte).unwrap();
            let directory = File::open(at("directory")).unwrap();

            let to = |name: &str| fork.join(name);
            for name in ["file", "mapped"] {
                open(to(name)).write_all_at(&[b'1'; 10_000], 0).unwrap();
            }
            fs::write(to("longer"), vec![b'1'; 50_001]).unwrap();
            fs::write(to("shorter"), "1").unwrap();
            fs::set_permissions(to("mode"), fs::Permissions::from_mode(0o600)).unwrap();
            fs::remove_file(to("directory/gone")).unwrap();
            fs::rename(to("directory/moved"), to("elsewhere/moved")).unwrap();
            open(to("elsewhere/moved")).write_all_at(b"1", 0).unwrap();
            fs::rename(to("directory"), to("renamed")).unwrap();
            fs::write(to("new"), "1").unwrap();
            fs::remove_file(to("link")).unwrap();
            symlink("new", to("link")).unwrap();
            apply(mounted, &[]);

            // Through what was open before.
            for file in [&file, &mapped, &longer, &moved] {
                assert_eq!(first_of(file), b'1');
            }
            let mut all = vec![0; 10_000];
            mapping.load(&mut all).unwrap();
            assert!(all == vec![b'1'; 10_000]);
            assert_eq!(longer.metadata().unwrap().len(), 50_001);
            let mut last = [0];
            longer.read_exact_at(&mut last, 50_000).unwrap();
            assert_eq!(&last, b"1");
            // A file without a name is there as long as it is open.
            assert_eq!((first_of(&gone), gone.metadata().unwrap().nlink()), (b'0', 0));
            let here = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory));
            assert_eq!(names(Path::new(&here)), ["inner"]);
            assert_eq!(
                directory.metadata().unwrap().ino(),
                at("renamed").metadata().unwrap().ino()
            );
            // By their names, also for other programs.
            assert_eq!(text(at("shorter")), "1");
            assert_eq!(fs::metadata(at("shorter")).unwrap().len(), 1);
            assert_eq!(fs::metadata(at("mode")).unwrap().mode() & 0o777, 0o600);
            assert_eq!(text(at("link")), "1");
            let now = ["elsewhere", "file", "link", "longer", "mapped", "mode", "new", "renamed"];
            assert_eq!(names(base), [&now[..], &["shorter"]].concat());
            assert!(!at("directory").exists());
            assert_eq!(names(&at("renamed")), ["inner"]);
            assert_eq!(names(&at("elsewhere")), ["moved"]);
            assert_eq!(fs::read(at("elsewhere/moved")).unwrap()[..2], *b"10");
            let listed = Command::new("ls").arg(at("renamed")).output().unwrap();
            assert_eq!(listed.stdout, b"inner\n");
            // What is written through it goes on from there.
            file.write_all_at(b"2", 1).unwrap();
            moved.write_all_at(b"2", 1).unwrap();
            moved.sync_all().unwrap();
            drop((file, mapped, longer, moved, gone, mapping, directory));
            let check = || {
                assert_eq!(fs::read(at("file")).unwrap()[..3], *b"121");
                assert_eq!(fs::read(at("elsewhere/moved")).unwrap()[..3], *b"120");
                assert_eq!(fs::read(at("longer")).unwrap(), vec![b'1'; 50_001]);
            };
            check();
            new_mount(mounted, options);
            check();
        });
    }
}

/// A file that becomes shorter while a program has it open.
#[test]
fn an_open_file_becomes_shorter() {
    with_fork("", prepare, |mounted, base, fork| {
        let mut file = open(base.join("shorter"));
        let mut all = Vec::new();
        assert_eq!(file.read_to_end(&mut all).unwrap(), 10_000);
        fs::write(fork.join("shorter"), "short").unwrap();
        apply(mounted, &[]);
        assert_eq!(file.metadata().unwrap().len(), 5);
        all.clear();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"short");
    });
}

/// With its writeback cache the kernel keeps the length of an open file that becomes shorter; it
/// learns the new one when the file is closed.
#[test]
fn an_open_file_becomes_shorter_in_the_kernels_cache() {
    if !kernel_forgets_files_on_request() {
        return;
    }
    with_fork(",writeback=on", prepare, |mounted, base, fork| {
        let path = base.join("shorter");
        let file = open(path.clone());
        assert_eq!(first_of(&file), b'0');
        fs::write(fork.join("shorter"), "1").unwrap();
        super::change_times(&fork.join("shorter"), 1_000_000_000);
        apply(mounted, &[]);
        assert_eq!(first_of(&file), b'1');
        drop(file);
        let begin = clock::now_monotonic();
        while fs::metadata(&path).unwrap().len() != 1 {
            assert!(begin.elapsed() < Duration::from_secs(120), "the kernel keeps the length");
            clock::sleep(Duration::from_millis(50));
        }
        assert_eq!(fs::metadata(&path).unwrap().mtime(), 1_000_000_000);
        assert_eq!(text(path), "1");
    });
}

/// Since Linux 6.18.
fn kernel_forgets_files_on_request() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(18))
}

/// Data that only the kernel has when the command starts: of the fork, and of the base.
#[test]
fn what_the_kernel_caches_counts() {
    for options in WITH_WRITEBACK {
        with_fork(options, prepare, |mounted, base, fork| {
            let at = |name: &str| base.join(name);
            let forked = open(fork.join("file"));
            forked.write_all_at(b"1", 5000).unwrap();
            let mapped = open(fork.join("mapped"));
            let mut mapping = Mapping::new(&mapped, 0, 10_000).unwrap();
            mapping.store(7000, b"1").unwrap();
            let of_base = open(at("longer"));
            let mut mapping_of_base = Mapping::new(&of_base, 0, 10_000).unwrap();
            mapping_of_base.store(3, b"B").unwrap();
            of_base.write_all_at(b"B", 9000).unwrap();
            apply(mounted, &[]);
            let check = || {
                assert_eq!(fs::read(at("file")).unwrap()[5000], b'1');
                assert_eq!(fs::read(at("mapped")).unwrap()[7000], b'1');
                let longer = fs::read(at("longer")).unwrap();
                assert_eq!((longer[3], longer[9000], longer.len()), (b'B', b'B', 10_000));
            };
            check();
            // Of the same file that is a conflict.
            mapping.store(1, b"2").unwrap();
            let of_base_too = open(at("mapped"));
            let mut mapping_of_base_too = Mapping::new(&of_base_too, 0, 10_000).unwrap();
            mapping_of_base_too.store(9000, b"B").unwrap();
            let told = mounted.exits_with(1, &["apply", "dir/fork"]);
            assert!(told.starts_with("mapped: changed in both"), "{told}");
            let mut byte = [0; 2];
            mapping_of_base_too.load(&mut byte).unwrap();
            assert_eq!(&byte, b"00");
            apply(mounted, &["--theirs"]);
            mapping_of_base_too.load(&mut byte).unwrap();
            assert_eq!(&byte, b"02");
            assert_eq!(fs::read(at("mapped")).unwrap()[9000], b'0');
            drop((mapping, mapping_of_base, mapping_of_base_too));
            drop((forked, mapped, of_base, of_base_too));
            new_mount(mounted, options);
            check();
            assert_eq!(fs::read(at("mapped")).unwrap()[1], b'2');
        });
    }
}

/// Other programs change other files meanwhile: nothing of that is lost, and the kernel knows what
/// the volume has, as the next mount shows.
#[test]
fn changes_meanwhile_stay() {
    for options in WITH_WRITEBACK {
        with_fork(options, prepare, |mounted, base, fork| {
            for (round, file) in FILES[..5].iter().enumerate() {
                fs::write(fork.join(file), "of the fork").unwrap();
                fs::write(fork.join(format!("elsewhere/of the fork {round}")), "x").unwrap();
                let mut command = mounted.command(&["apply", "dir/fork"]);
                let mut command = command.stdout(Stdio::null()).spawn().unwrap();
                let mut number = 0;
                while command.try_wait().unwrap().is_none() {
                    let name = base.join(format!("elsewhere/{round} {number}"));
                    fs::write(&name, number.to_string()).unwrap();
                    let renamed = base.join(format!("directory/{round} {number}"));
                    fs::rename(&name, renamed).unwrap();
                    number += 1;
                }
                // It may give up, but not conflict.
                let code = command.wait().unwrap().code();
                assert!(matches!(code, Some(0 | 2)), "{code:?}");
                for number in 0..number {
                    let found = text(base.join(format!("directory/{round} {number}")));
                    assert_eq!(found, number.to_string());
                }
            }
            apply(mounted, &[]);
            for name in &FILES[..5] {
                assert_eq!(text(base.join(name)), "of the fork");
            }
            let seen = |mounted: &Mounted| {
                let base = mounted.at("base");
                (super::tree(&base), names(&base.join("elsewhere")))
            };
            let before = seen(mounted);
            assert_eq!(before.1.len(), 5);
            new_mount(mounted, options);
            assert_eq!(seen(mounted), before);
        });
    }
}
