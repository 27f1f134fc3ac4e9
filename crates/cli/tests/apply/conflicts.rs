//! Conflicts: which there are, that nothing is changed then, and what the options decide.
use super::mounted::Mounted;
use super::{apply, names, nothing_is_left, text, tree, with_fork};
use rustix::fs::XattrFlags;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

fn prepare(base: &Path) {
    for directory in ["directory", "emptied"] {
        fs::create_dir(base.join(directory)).unwrap();
    }
    for name in ["both", "mode", "removed in base", "removed in fork", "same", "emptied/file"] {
        fs::write(base.join(name), name).unwrap();
    }
}

/// Changes both so that each thing that an option decides is there once.
fn quarrel(base: &Path, fork: &Path) {
    for (side, name) in [(base, "base"), (fork, "fork")] {
        fs::write(side.join("both"), name).unwrap();
        fs::write(side.join("directory/new"), name).unwrap();
        rustix::fs::setxattr(
            side.join("directory"),
            "user.of",
            name.as_bytes(),
            XattrFlags::empty(),
        )
        .unwrap();
        // The same on both sides.
        fs::write(side.join("same"), "changed").unwrap();
        super::change_times(&side.join("same"), 1_000_000_000);
        // And something that is none.
        fs::write(side.join(format!("only in {name}")), name).unwrap();
    }
    fs::set_permissions(base.join("mode"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(fork.join("mode"), fs::Permissions::from_mode(0o604)).unwrap();
    fs::remove_file(base.join("removed in base")).unwrap();
    fs::write(fork.join("removed in base"), "changed").unwrap();
    fs::remove_file(fork.join("removed in fork")).unwrap();
    fs::write(base.join("removed in fork"), "changed").unwrap();
    fs::remove_dir_all(fork.join("emptied")).unwrap();
    fs::write(base.join("emptied/another"), "new").unwrap();
}

const KINDS: [(&str, &str); 7] = [
    ("both", "both_changed"),
    ("directory", "both_changed"),
    ("directory/new", "both_named"),
    ("emptied", "removed_in_fork"),
    ("mode", "both_changed"),
    ("removed in base", "removed_in_origin"),
    ("removed in fork", "removed_in_fork"),
];

pub fn conflicts(mounted: &Mounted, arguments: &[&str]) -> Vec<Value> {
    let told = mounted.exits_with(1, &[&["apply", "--json", "dir/fork"], arguments].concat());
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(
        (&told["applied"], &told["names"], &told["files"]),
        (&json!(false), &json!(0), &json!(0))
    );
    assert_eq!(told["path"], "/base");
    told["conflicts"].as_array().unwrap().clone()
}

#[test]
fn conflicts_change_nothing() {
    with_fork("", prepare, |mounted, base, fork| {
        quarrel(base, fork);
        let before = (tree(base), tree(fork));
        let expected =
            KINDS.map(|(path, kind)| json!({ "path": path, "kind": kind, "can_be_decided": true }));
        assert_eq!(conflicts(mounted, &[]), expected);
        let told = mounted.exits_with(1, &["apply", "dir/fork"]);
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines.len(), KINDS.len() + 1, "{told}");
        for ((path, _), line) in KINDS.iter().zip(&lines) {
            assert!(line.starts_with(&format!("{path}: ")), "{told}");
        }
        assert!(lines[5].ends_with("changed in the fork, removed in dir/base"), "{told}");
        assert!(lines[7].contains("nothing was changed: 7 conflicts; `--theirs`"), "{told}");
        assert_eq!((tree(base), tree(fork)), before);
        mounted.remount();
        assert_eq!((tree(base), tree(fork)), before);
        // Without those the rest comes over.
        for name in ["both", "removed in base"] {
            let _ = fs::remove_file(fork.join(name));
            let _ = fs::remove_file(base.join(name));
        }
        assert_eq!(conflicts(mounted, &[]).len(), KINDS.len() - 2);
    });
}

/// The highest directory that was removed is named, not only what was in it.
#[test]
fn a_removed_directory_is_named() {
    let prepare = |base: &Path| {
        for directory in ["kept/one/below", "kept/two/below"] {
            fs::create_dir_all(base.join(directory)).unwrap();
            fs::write(base.join(directory).join("file"), "file").unwrap();
        }
    };
    with_fork("", prepare, |mounted, base, fork| {
        fs::remove_dir_all(base.join("kept/one")).unwrap();
        fs::write(fork.join("kept/one/below/file"), "changed").unwrap();
        fs::write(fork.join("kept/one/below/new"), "new").unwrap();
        fs::remove_dir_all(fork.join("kept/two")).unwrap();
        fs::write(base.join("kept/two/below/file"), "changed").unwrap();
        let shown = |conflict: &Value| {
            let of = |name: &str| conflict[name].as_str().unwrap_or("-").to_owned();
            [of("path"), of("kind"), of("removed")].join(" ")
        };
        let found: Vec<String> = conflicts(mounted, &[]).iter().map(shown).collect();
        let (of_origin, of_fork) = ("removed_in_origin kept/one", "removed_in_fork kept/two");
        assert_eq!(
            found,
            [
                format!("kept/one/below/file {of_origin}"),
                format!("kept/one/below/new {of_origin}"),
                format!("kept/two/below/file {of_fork}"),
            ]
        );
        let told = mounted.exits_with(1, &["apply", "dir/fork"]);
        assert!(told.contains("the directory kept/one was removed in dir/base\n"), "{told}");
        assert!(told.contains("the directory kept/two was removed in the fork\n"), "{told}");
        let told = mounted.exits_with(1, &["apply", "--theirs", "dir/fork"]);
        assert!(told.contains("in the directory kept/one, which was removed in"), "{told}");
    });
}

#[test]
fn the_fork_wins_with_theirs() {
    with_fork("", prepare, |mounted, base, fork| {
        quarrel(base, fork);
        let before = tree(fork);
        // A directory goes only when it is empty.
        fs::remove_file(base.join("emptied/another")).unwrap();
        apply(mounted, &["--theirs"]);
        let check = || {
            for name in ["both", "directory/new", "only in fork"] {
                assert_eq!(text(base.join(name)), "fork", "{name}");
            }
            assert_eq!(text(base.join("only in base")), "base");
            assert_eq!(text(base.join("removed in base")), "changed");
            assert!(!base.join("removed in fork").exists() && !base.join("emptied").exists());
            assert_eq!(fs::metadata(base.join("mode")).unwrap().mode() & 0o777, 0o604);
            let mut value = [0; 10];
            let length = rustix::fs::getxattr(base.join("directory"), "user.of", &mut value[..]);
            assert_eq!(&value[..length.unwrap()], b"fork");
            assert_eq!(tree(fork), before);
        };
        check();
        mounted.remount();
        check();
        nothing_is_left(mounted);
    });
}

#[test]
fn the_origin_wins_with_ours() {
    with_fork("", prepare, |mounted, base, fork| {
        quarrel(base, fork);
        apply(mounted, &["--ours"]);
        let check = || {
            for name in ["both", "directory/new", "only in base"] {
                assert_eq!(text(base.join(name)), "base", "{name}");
            }
            assert_eq!(text(base.join("only in fork")), "fork");
            assert_eq!(text(base.join("removed in fork")), "changed");
            assert_eq!(text(base.join("emptied/another")), "new");
            assert!(!base.join("removed in base").exists());
            assert_eq!(fs::metadata(base.join("mode")).unwrap().mode() & 0o777, 0o600);
            assert_eq!(text(fork.join("both")), "fork");
        };
        check();
        let before = tree(base);
        mounted.remount();
        check();
        apply(mounted, &["--ours"]);
        assert_eq!(tree(base), before);
    });
}

#[test]
fn moves_of_both_sides() {
    let prepare = |base: &Path| {
        fs::create_dir(base.join("directory")).unwrap();
        fs::write(base.join("file"), "file").unwrap();
    };
    for (option, name) in [("--theirs", "in the fork"), ("--ours", "in the base")] {
        with_fork("", prepare, |mounted, base, fork| {
            fs::rename(base.join("file"), base.join("directory/in the base")).unwrap();
            fs::rename(fork.join("file"), fork.join("directory/in the fork")).unwrap();
            let before = (tree(base), tree(fork));
            assert_eq!(conflicts(mounted, &[])[0]["kind"], "both_moved");
            assert_eq!((tree(base), tree(fork)), before);
            apply(mounted, &[option]);
            assert_eq!(names(base), ["directory"]);
            assert_eq!(names(&base.join("directory")), [name]);
            mounted.remount();
            assert_eq!(text(base.join("directory").join(name)), "file");
            assert_eq!(names(&base.join("directory")), [name]);
        });
    }
}

#[test]
fn a_loop_is_decided_by_hand() {
    let prepare = |base: &Path| {
        for name in ["one", "two"] {
            fs::create_dir(base.join(name)).unwrap();
        }
        fs::write(base.join("file"), "file").unwrap();
    };
    with_fork("", prepare, |mounted, base, fork| {
        fs::rename(base.join("one"), base.join("two/one")).unwrap();
        fs::rename(fork.join("two"), fork.join("one/two")).unwrap();
        fs::write(base.join("file"), "base").unwrap();
        let before = (tree(base), tree(fork));
        for arguments in [&[][..], &["--theirs"], &["--ours"]] {
            let found = conflicts(mounted, arguments);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(
                (&found[0]["kind"], &found[0]["can_be_decided"]),
                (&json!("loop"), &json!(false))
            );
            let told = mounted.exits_with(1, &[&["apply", "dir/fork"], arguments].concat());
            assert!(told.contains("move it back in one of them"), "{told}");
            assert!(told.contains(if arguments.is_empty() {
                "no option"
            } else {
                "does not decide"
            }));
            assert_eq!((tree(base), tree(fork)), before);
        }
        // As the advice says.
        fs::rename(fork.join("one/two"), fork.join("two")).unwrap();
        apply(mounted, &[]);
        assert_eq!(names(base), ["file", "two"]);
        assert_eq!(names(&base.join("two")), ["one"]);
    });
}

/// What was applied, and is changed again, has been changed by both.
#[test]
fn another_round_needs_another_fork() {
    with_fork("", prepare, |mounted, base, fork| {
        fs::write(fork.join("both"), "1").unwrap();
        fs::write(fork.join("new"), "1").unwrap();
        apply(mounted, &[]);
        fs::write(base.join("both"), "2").unwrap();
        assert_eq!(conflicts(mounted, &[])[0]["path"], "both");
        mounted.succeeds(&["subvolume", "delete", "dir/fork"]);
        mounted.succeeds(&["fork", "dir/base", "dir/fork"]);
        for name in ["both", "new"] {
            fs::write(fork.join(name), "3").unwrap();
        }
        apply(mounted, &[]);
        assert_eq!((text(base.join("both")), text(base.join("new"))), ("3".into(), "3".into()));
        nothing_is_left(mounted);
    });
}

/// Both sides agree where they did the same, however they did it.
#[test]
fn the_same_change_is_no_conflict() {
    with_fork("", prepare, |mounted, base, fork| {
        for side in [base, fork] {
            fs::rename(side.join("both"), side.join("renamed")).unwrap();
            fs::remove_file(side.join("mode")).unwrap();
            fs::remove_dir_all(side.join("emptied")).unwrap();
            fs::set_permissions(side.join("same"), fs::Permissions::from_mode(0o700)).unwrap();
        }
        let before = tree(base);
        apply(mounted, &[]);
        assert_eq!(tree(base).keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
        assert_eq!(fs::metadata(base.join("same")).unwrap().mode() & 0o777, 0o700);
        nothing_is_left(mounted);
    });
}

/// More than one answer of the server has room for, with all kinds of bytes.
#[test]
fn a_long_list_is_whole() {
    let every_byte: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    let long = |number: usize| {
        let mut name = format!("{number:04}").into_bytes();
        name.extend(every_byte.iter().skip(number % 40).take(200));
        std::ffi::OsString::from(std::ffi::OsStr::from_bytes(&name))
    };
    with_fork(
        "",
        |_| {},
        |mounted, base, fork| {
            for number in 0..500 {
                fs::write(base.join(long(number)), "base").unwrap();
                fs::write(fork.join(long(number)), "fork").unwrap();
            }
            let found = conflicts(mounted, &[]);
            assert_eq!(found.len(), 500);
            let told = mounted.run(&["apply", "dir/fork"]);
            let told = String::from_utf8(told.stdout).unwrap();
            let shown = |number| cairn_fsck::shown_path(long(number).as_bytes());
            for (number, line) in told.lines().enumerate() {
                assert!(line.starts_with(&format!("{}: ", shown(number))), "{line}");
            }
            assert_eq!(told.lines().count(), 500);
            apply(mounted, &["--theirs"]);
            assert_eq!(text(base.join(long(499))), "fork");
        },
    );
}
