//! The command lines of everyday loads, and what comes of them. What a load needs is there before
//! its time begins; a load's folder is the root of the file system under test.
use super::archive::NEEDLE;
use super::load::Everyday;
use super::materials::{COMMITS, LIBRARIES, Materials, TABLES};
use crate::peers::outputs::{self, Understood};
use crate::peers::process::{command, without_settings};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What is on the file system before the load begins: the commands that put it there.
pub fn preparations(
    load: Everyday,
    clients: usize,
    path: &Path,
    materials: &Materials,
) -> Vec<Command> {
    match load {
        Everyday::Untar | Everyday::NpmLike | Everyday::Git | Everyday::SeqWrite => Vec::new(),
        Everyday::Sync | Everyday::Grep | Everyday::Copy | Everyday::Find | Everyday::Remove => {
            vec![unpack(&materials.archive_of_sources(), path)]
        }
        Everyday::CargoBuild => {
            let mut copy = command("cp", &["-r"]);
            copy.arg(materials.crate_folder()).arg(path.join("crate"));
            vec![copy]
        }
        Everyday::Sqlite | Everyday::SqliteLoad => {
            let mut make = command("sqlite3", &["-batch"]);
            make.arg(path.join("database")).arg(TABLES);
            vec![make]
        }
        Everyday::SeqRead | Everyday::RandRead => vec![write_large_file(path, materials)],
        Everyday::OneFileFdatasync => vec![write_small_files(1, path, materials)],
        Everyday::OwnFilesFdatasync => vec![write_small_files(clients, path, materials)],
    }
}

/// Whether what was prepared is made durable before the load begins.
pub fn settles_first(load: Everyday) -> bool {
    !matches!(load, Everyday::Sync | Everyday::Grep)
}

/// Whether nothing may be cached when the load begins.
pub fn is_cold(load: Everyday) -> bool {
    matches!(load, Everyday::SeqRead | Everyday::RandRead)
}

/// The load itself.
pub fn invocation(
    load: Everyday,
    clients: usize,
    seconds: f64,
    path: &Path,
    materials: &Materials,
) -> Command {
    let tree = path.join(materials.sources().root);
    match load {
        Everyday::Untar => unpack(&materials.archive_of_sources(), path),
        Everyday::NpmLike => unpack(&materials.archive_of_packages(), path),
        Everyday::Sync => with_paths("sync", &["-f"], &[path]),
        Everyday::Grep => with_paths("grep", &["-r", "-l", "-F", NEEDLE], &[&tree]),
        Everyday::Copy => with_paths("cp", &["-r"], &[&tree, &path.join("copy")]),
        Everyday::Find => {
            let mut find = with_paths("find", &[], &[&tree]);
            find.args(["-type", "f", "-size", "+64k"]);
            find
        }
        Everyday::Remove => with_paths("rm", &["-r"], &[&tree]),
        Everyday::Git => {
            // As from another machine: what is sent is a pack, and not files that could be linked.
            let clone = with_paths(
                "git",
                &["clone", "--quiet", "--no-local"],
                &[&materials.repository(), &path.join("clone")],
            );
            without_settings(clone)
        }
        Everyday::CargoBuild => {
            let mut build = command("cargo", &["build", "--offline", "--quiet"]);
            build.current_dir(path.join("crate"));
            without_settings(build)
        }
        Everyday::Sqlite => sqlite(path, &materials.sql_of_single_rows()),
        Everyday::SqliteLoad => sqlite(path, &materials.sql_of_bulk_load()),
        Everyday::SeqWrite => write_large_file(path, materials),
        Everyday::SeqRead => {
            let part_mib = (materials.large_file_mib() / clients as u64).max(1);
            let mut fio = fio(&["--rw=read", "--bs=1M"], clients, part_mib);
            fio.arg(format!("--filename={}", path.join("large").display()))
                .arg(format!("--offset_increment={part_mib}M"));
            fio
        }
        Everyday::RandRead => {
            let mut fio = fio(&["--rw=randread", "--bs=4k"], clients, materials.large_file_mib());
            fio.arg(format!("--filename={}", path.join("large").display()))
                .arg(format!("--runtime={seconds}"));
            fio
        }
        Everyday::OneFileFdatasync => fdatasyncs(clients, 1, seconds, path, materials),
        Everyday::OwnFilesFdatasync => fdatasyncs(clients, clients, seconds, path, materials),
    }
}

/// The figures of a load that took `elapsed` and printed `output`.
pub fn understand(
    load: Everyday,
    output: &str,
    elapsed: Duration,
    materials: &Materials,
) -> Option<Understood> {
    let took = |operations: usize| Some(Understood::time(elapsed, operations as u64));
    match load {
        Everyday::Untar | Everyday::Sync | Everyday::Copy | Everyday::Remove => {
            took(materials.sources().files)
        }
        Everyday::Grep | Everyday::Find => {
            took(materials.sources().files).filter(|_| !output.trim().is_empty())
        }
        Everyday::NpmLike => took(materials.packages().files),
        Everyday::Git => took(COMMITS),
        Everyday::CargoBuild => took(LIBRARIES + 1),
        Everyday::SqliteLoad => took(materials.bulk_rows()),
        Everyday::Sqlite => {
            let rows = materials.single_rows;
            Some(Understood::rate(rows as f64 / elapsed.as_secs_f64(), "commits/s", rows as u64))
        }
        Everyday::SeqWrite => outputs::of_fio_bytes(output, "write"),
        Everyday::SeqRead => outputs::of_fio_bytes(output, "read"),
        Everyday::RandRead => outputs::of_fio_reads(output),
        Everyday::OneFileFdatasync | Everyday::OwnFilesFdatasync => {
            outputs::of_fio_syncs(output, "fdatasync")
        }
    }
}

fn with_paths(program: &str, arguments: &[&str], paths: &[&Path]) -> Command {
    let mut command = command(program, arguments);
    command.args(paths).env("LC_ALL", "C");
    command
}

fn unpack(archive: &Path, path: &Path) -> Command {
    let mut tar = command("tar", &["--no-same-owner", "-xf"]);
    tar.arg(archive).arg("-C").arg(path);
    tar
}

fn sqlite(path: &Path, script: &Path) -> Command {
    let mut sqlite = command("sqlite3", &["-batch", "-bail"]);
    sqlite.arg(path.join("database")).arg(format!(".read '{}'", script.display()));
    sqlite
}

fn fio(arguments: &[&str], jobs: usize, size_mib: u64) -> Command {
    let mut fio = command(
        "fio",
        &[
            "--name=load",
            "--ioengine=psync",
            "--fallocate=none",
            "--group_reporting",
            "--output-format=json",
        ],
    );
    fio.args(arguments).arg(format!("--numjobs={jobs}")).arg(format!("--size={size_mib}M"));
    fio
}

fn write_large_file(path: &Path, materials: &Materials) -> Command {
    let mut fio = fio(&["--rw=write", "--bs=1M", "--end_fsync=1"], 1, materials.large_file_mib());
    fio.arg(format!("--filename={}", path.join("large").display()));
    fio
}

/// Where the jobs that make small writes durable find their files: `files` is one, or as many as
/// there are jobs.
fn in_small_files(mut fio: Command, files: usize, path: &Path) -> Command {
    match files {
        1 => fio.arg(format!("--filename={}", path.join("synced.0").display())),
        _ => fio
            .arg(format!("--directory={}", path.display()))
            .arg("--filename_format=synced.$jobnum"),
    };
    fio
}

fn write_small_files(files: usize, path: &Path, materials: &Materials) -> Command {
    in_small_files(
        fio(&["--rw=write", "--bs=1M", "--end_fsync=1"], files, materials.synced_file_mib(files)),
        files,
        path,
    )
}

fn fdatasyncs(
    jobs: usize,
    files: usize,
    seconds: f64,
    path: &Path,
    materials: &Materials,
) -> Command {
    let arguments = ["--rw=randwrite", "--bs=4k", "--fdatasync=1", "--time_based"];
    let mut fio =
        in_small_files(fio(&arguments, jobs, materials.synced_file_mib(files)), files, path);
    fio.arg(format!("--runtime={seconds}"));
    fio
}

#[cfg(test)]
mod tests {
    use super::*;

    fn materials() -> Materials {
        Materials::new(Path::new("/stage"), 64 << 20, Duration::from_secs(1))
    }

    #[test]
    fn every_load_says_which_way_is_better() {
        let fio = r#"{"jobs": [{"read": {"iops": 7, "bw_bytes": 3000000, "total_ios": 9}, "write": {"iops": 5, "bw_bytes": 2000000, "total_ios": 8}}]}"#;
        for load in Everyday::ALL {
            let output = if load.commands().contains(&("fio", "fio")) { fio } else { "/a file\n" };
            let understood =
                understand(load, output, Duration::from_millis(1_500), &materials()).unwrap();
            assert_eq!(understood.less_is_better, understood.unit == "s", "{}", load.name());
            assert!(understood.value > 0.0 && understood.completed > 0, "{}", load.name());
        }
        let took =
            understand(Everyday::Untar, "", Duration::from_millis(1_500), &materials()).unwrap();
        assert_eq!((took.value, took.completed), (1.5, materials().sources().files as u64));
        assert!(
            understand(Everyday::Grep, "", Duration::from_secs(1), &materials()).is_none(),
            "nothing was found"
        );
        let commits =
            understand(Everyday::Sqlite, "", Duration::from_secs(4), &materials()).unwrap();
        assert_eq!((commits.value, commits.unit.as_str()), (50.0, "commits/s"));
    }

    #[test]
    fn every_program_that_runs_is_asked_for() {
        for load in Everyday::ALL {
            let needed: Vec<&str> = load.commands().iter().map(|(program, _)| *program).collect();
            let path = Path::new("/mnt");
            let all = preparations(load, 2, path, &materials()).into_iter().chain([invocation(
                load,
                2,
                1.0,
                path,
                &materials(),
            )]);
            for command in all {
                let program = command.get_program().to_string_lossy().into_owned();
                assert!(
                    needed.contains(&program.as_str()) || program == "cp",
                    "{} runs {program}",
                    load.name()
                );
            }
        }
    }

    #[test]
    fn jobs_share_a_file_or_have_their_own() {
        let arguments = |load| -> Vec<String> {
            let command = invocation(load, 8, 2.0, Path::new("/mnt"), &materials());
            command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect()
        };
        let (one, own) =
            (arguments(Everyday::OneFileFdatasync), arguments(Everyday::OwnFilesFdatasync));
        assert!(
            one.contains(&"--filename=/mnt/synced.0".into()) && one.contains(&"--numjobs=8".into()),
            "{one:?}"
        );
        assert!(
            own.contains(&"--filename_format=synced.$jobnum".into())
                && own.contains(&"--size=2M".into()),
            "{own:?}"
        );
        assert!([one, own].iter().all(|arguments| arguments.contains(&"--fdatasync=1".into())));
    }
}
