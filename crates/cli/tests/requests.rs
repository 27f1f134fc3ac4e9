//! What calls of a program cost in requests: the table in `docs/fuse.md`, done on a real mount.
//!
//! `CAIRN_MOUNT_TESTS` as in `mounting`; `CAIRN_TEST_TRANSPORT` names the transport of the mounts.
#[path = "mounting/mounted.rs"]
mod mounted;
mod mounting;

use mounted::Mounted;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::SystemTime;

const TABLE: &str = include_str!("../../../docs/fuse.md");
/// Others that use this machine may have the kernel forget what it had cached.
const TRIES: usize = 5;
/// The kernel that the table was made with: minor number of 6.
const KERNEL_MINOR: u32 = 18;
const BLOCK: [u8; 4096] = [7; 4096];

type Requests = BTreeMap<String, i64>;

fn requests(mounted: &Mounted) -> Requests {
    let statistics: Value =
        serde_json::from_str(&mounted.succeeds(&["stats", "dir", "--json"])).unwrap();
    let counted = statistics["requests"].as_object().unwrap().iter();
    counted.map(|(name, counter)| (name.clone(), counter["count"].as_i64().unwrap())).collect()
}

fn add(sum: &mut Requests, other: &Requests, sign: i64) {
    for (name, count) in other {
        *sum.entry(name.clone()).or_default() += sign * count;
    }
}

/// What `call` costs, beyond asking for it. The kernel sends FORGET when it likes.
fn cost(mounted: &Mounted, call: impl FnOnce()) -> String {
    let mut cost = Requests::new();
    let first = requests(mounted);
    let second = requests(mounted);
    call();
    add(&mut cost, &requests(mounted), 1);
    add(&mut cost, &second, -2);
    add(&mut cost, &first, 1);
    let listed = cost.into_iter().filter(|(name, count)| *count > 0 && name != "FORGET");
    listed
        .map(|(name, count)| if count > 1 { format!("{name} {count}") } else { name })
        .collect::<Vec<_>>()
        .join(", ")
}

fn normal(cell: &str) -> String {
    let mut names: Vec<&str> = cell
        .split(',')
        .map(str::trim)
        .filter(|name| !matches!(*name, "" | "–" | "FORGET"))
        .collect();
    names.sort_unstable();
    names.join(", ")
}

/// Rows of the table: the call, and its requests, without and with the writeback cache.
fn rows() -> Vec<(&'static str, [String; 2])> {
    let from = TABLE.find("| call | requests |").unwrap();
    let lines = TABLE[from..].lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = lines.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    cells
        .map(|cells| (cells[1], [normal(cells[2]), normal(&format!("{},{}", cells[2], cells[3]))]))
        .collect()
}

/// All calls of the table in `folder`, in its order.
fn calls(folder: &Path) -> Vec<Box<dyn FnOnce()>> {
    let at = |name: &str| folder.join(name);
    let (file, other, link, directory, missing) =
        (at("file"), at("other"), at("link"), at("directory"), at("missing"));
    let overwrite = |path: &Path, durable: bool| {
        let path = path.to_owned();
        move || {
            let mut open = OpenOptions::new().write(true).open(path).unwrap();
            open.write_all(&BLOCK).unwrap();
            if durable {
                open.sync_all().unwrap();
            }
        }
    };
    let look = |path: &Path, there: bool| {
        let path = path.to_owned();
        move || assert_eq!(rustix::fs::stat(path).is_ok(), there)
    };
    let list = || {
        let folder = folder.to_owned();
        move || assert_eq!(fs::read_dir(folder).unwrap().count(), 4)
    };
    let path = |path: &Path| path.to_owned();
    let (a, b, c, d, e, f, g, h, i, j, k, l, m) = (
        path(&file),
        path(&file),
        path(&file),
        path(&file),
        path(&file),
        path(&file),
        path(&other),
        path(&other),
        path(&link),
        path(&directory),
        path(&link),
        path(&other),
        path(&directory),
    );
    vec![
        Box::new(move || File::create_new(a).unwrap().write_all(&BLOCK).unwrap()),
        Box::new(overwrite(&file, false)),
        Box::new(overwrite(&file, true)),
        Box::new(move || {
            OpenOptions::new().append(true).open(b).unwrap().write_all(&BLOCK[..100]).unwrap()
        }),
        Box::new(move || File::open(c).unwrap().read_exact(&mut [0; 4096]).unwrap()),
        Box::new(look(&file, true)),
        Box::new(look(&file, true)),
        Box::new({
            let file = file.clone();
            move || assert!(fs::metadata(file).unwrap().is_file())
        }),
        Box::new(look(&missing, false)),
        Box::new(look(&missing, false)),
        Box::new(move || fs::set_permissions(d, Permissions::from_mode(0o600)).unwrap()),
        Box::new(move || {
            OpenOptions::new()
                .write(true)
                .open(e)
                .unwrap()
                .set_modified(SystemTime::UNIX_EPOCH)
                .unwrap()
        }),
        Box::new({
            let file = file.clone();
            move || chown(file, Some(1), Some(1)).unwrap()
        }),
        Box::new(move || fs::rename(f, g).unwrap()),
        Box::new(move || fs::hard_link(h, i).unwrap()),
        Box::new(move || fs::create_dir(j).unwrap()),
        Box::new(list()),
        Box::new(list()),
        Box::new(move || fs::remove_file(k).unwrap()),
        Box::new(move || fs::remove_file(l).unwrap()),
        Box::new(move || fs::remove_dir(m).unwrap()),
    ]
}

fn kernel_has_table() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release
        .split(|character: char| !character.is_ascii_digit())
        .map_while(|number| number.parse::<u32>().ok());
    numbers.next() > Some(6) || numbers.next() >= Some(KERNEL_MINOR)
}

fn costs_are_those_of_the_table(writeback: &str, column: usize) {
    let Some(mounted) = Mounted::new() else { return };
    if !kernel_has_table() || !rustix::process::geteuid().is_root() {
        eprintln!("left out: the table is that of Linux 6.{KERNEL_MINOR}, for root");
        return;
    }
    mounted.succeeds(&[
        "mount",
        "image",
        "dir",
        "--create",
        "64M",
        "-o",
        &format!("writeback={writeback}"),
    ]);
    let rows = rows();
    let mut found: Vec<Vec<String>> = vec![Vec::new(); rows.len()];
    for number in 0..TRIES {
        let folder = mounted.path(&format!("dir/{number}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("beside"), "text").unwrap();
        fs::metadata(&folder).unwrap();
        let calls = calls(&folder);
        assert_eq!(calls.len(), rows.len());
        for (call, found) in calls.into_iter().zip(&mut found) {
            found.push(cost(&mounted, call));
        }
        if rows.iter().zip(&found).all(|((_, expected), found)| found.contains(&expected[column])) {
            break;
        }
    }
    mounted.succeeds(&["umount", "dir"]);
    let others =
        rows.iter().zip(&found).filter(|((_, expected), found)| !found.contains(&expected[column]));
    let others: Vec<_> = others
        .map(|((call, expected), found)| {
            format!("{call}: expected \"{}\", found {found:?}", expected[column])
        })
        .collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
fn each_call_costs_the_requests_of_the_table() {
    costs_are_those_of_the_table("off", 0);
}

#[test]
fn with_the_writeback_cache_calls_cost_what_the_table_says() {
    costs_are_those_of_the_table("on", 1);
}
