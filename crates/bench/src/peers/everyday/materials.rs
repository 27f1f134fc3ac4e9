//! What everyday loads work on: made once, in the comparison's own folder, from nothing but
//! numbers. No program is asked for anything over a network.
use super::archive::{Tree, scaled};
use super::load::Everyday;
use crate::peers::process::{command, run_to_end, without_settings};
use cairn_harness::Interrupt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// From this size of a file system on, everything has its full size; below it is smaller in
/// proportion.
const FULL_SIZE_BYTES: u64 = 1 << 30;
/// The largest file of the loads that read or write one.
const LARGE_FILE_BYTES_MAX: u64 = 512 << 20;
/// The files of the loads that make small writes durable, all together.
const SYNCED_BYTES_MAX: u64 = 64 << 20;

/// Commits of the repository that is cloned.
pub const COMMITS: usize = 400;
const REPOSITORY_FILES: usize = 600;
/// Libraries of the crate that is built, and functions of each.
pub const LIBRARIES: usize = 8;
const FUNCTIONS: usize = 60;
/// Rows of a bulk load.
const ROWS: usize = 300_000;
/// Transactions for each second of a measurement, and the bounds of their number.
const COMMITS_PER_SECOND: f64 = 200.0;
const COMMITS_MIN: f64 = 100.0;
const COMMITS_MAX: f64 = 5_000.0;

/// What everyday loads work on.
pub struct Materials {
    folder: PathBuf,
    /// Of the full size.
    scale: f64,
    size_bytes: u64,
    /// Rows that are inserted one by one.
    pub single_rows: usize,
}

impl Materials {
    /// For file systems of `size_bytes`; nothing is written yet.
    pub fn new(folder: &Path, size_bytes: u64, duration: Duration) -> Self {
        let single_rows =
            (duration.as_secs_f64() * COMMITS_PER_SECOND).clamp(COMMITS_MIN, COMMITS_MAX) as usize;
        let scale = (size_bytes as f64 / FULL_SIZE_BYTES as f64).min(1.0);
        Self { folder: folder.join("materials"), scale, size_bytes, single_rows }
    }

    /// Writes what `loads` need, and makes it durable: a measurement must not pay for it.
    ///
    /// # Errors
    /// When something can't be written, or the user interrupts it.
    pub fn write(&self, loads: &[Everyday], interrupt: &Interrupt) -> anyhow::Result<()> {
        use Everyday::*;
        let needs = |of: &[Everyday]| loads.iter().any(|load| of.contains(load));
        if loads.is_empty() {
            return Ok(());
        }
        fs::create_dir(&self.folder)?;
        if needs(&[Untar, Sync, Grep, Copy, Find, Remove]) {
            self.sources().pack(&self.archive_of_sources(), interrupt)?;
        }
        if needs(&[NpmLike]) {
            self.packages().pack(&self.archive_of_packages(), interrupt)?;
        }
        if needs(&[Git]) {
            self.make_repository(interrupt)?;
        }
        if needs(&[CargoBuild]) {
            write_crate(&self.crate_folder())?;
        }
        if needs(&[Sqlite, SqliteLoad]) {
            fs::write(self.sql_of_single_rows(), single_rows(self.single_rows))?;
            fs::write(self.sql_of_bulk_load(), bulk_load(self.bulk_rows()))?;
        }
        // Whatever a program made of it, too.
        Ok(rustix::fs::syncfs(File::open(&self.folder)?)?)
    }

    /// The tree of sources.
    pub fn sources(&self) -> Tree {
        Tree::sources(self.scale)
    }
    /// The tree of packages.
    pub fn packages(&self) -> Tree {
        Tree::packages(self.scale)
    }
    /// Rows of the bulk load.
    pub fn bulk_rows(&self) -> usize {
        scaled(ROWS, self.scale)
    }
    /// The tree of sources, as tar unpacks it.
    pub fn archive_of_sources(&self) -> PathBuf {
        self.folder.join("sources.tar")
    }
    /// The tree of packages.
    pub fn archive_of_packages(&self) -> PathBuf {
        self.folder.join("packages.tar")
    }
    /// What is cloned.
    pub fn repository(&self) -> PathBuf {
        self.folder.join("repository.git")
    }
    /// What is built.
    pub fn crate_folder(&self) -> PathBuf {
        self.folder.join("crate")
    }
    /// Rows one by one.
    pub fn sql_of_single_rows(&self) -> PathBuf {
        self.folder.join("single-rows.sql")
    }
    /// Rows at once.
    pub fn sql_of_bulk_load(&self) -> PathBuf {
        self.folder.join("bulk-load.sql")
    }

    /// Size of a file that is written or read from end to end, in whole MiB.
    pub fn large_file_mib(&self) -> u64 {
        (LARGE_FILE_BYTES_MAX.min(self.size_bytes / 4) >> 20).max(1)
    }

    /// Size of each of `files` files, in whole MiB.
    pub fn synced_file_mib(&self, files: usize) -> u64 {
        ((SYNCED_BYTES_MAX.min(self.size_bytes / 4) / files as u64) >> 20).max(1)
    }

    fn make_repository(&self, interrupt: &Interrupt) -> anyhow::Result<()> {
        let (repository, stream) = (self.repository(), self.folder.join("commits"));
        fs::write(&stream, commits())?;
        let mut make = command("git", &["init", "--quiet", "--bare", "--initial-branch=main"]);
        make.arg(&repository);
        run_to_end(without_settings(make), &self.folder, interrupt)?;
        let mut import =
            command("sh", &["-c", "exec git -C \"$1\" fast-import --quiet <\"$2\"", "sh"]);
        import.arg(&repository).arg(&stream);
        run_to_end(without_settings(import), &self.folder, interrupt)?;
        Ok(fs::remove_file(stream)?)
    }
}

/// What a file of the repository holds after a commit that changed it.
fn repository_file(file: usize, commit: usize) -> String {
    let line = |line: usize| {
        format!("line {line} of file {file}: {}\n", (line * 7_919 + file * 31 + commit) % 1_000_003)
    };
    (0..40 + file % 160).map(line).collect()
}

/// A stream for `git fast-import`: the first commit brings all files, each later one changes three.
fn commits() -> String {
    let mut stream = String::new();
    for commit in 0..COMMITS {
        let (message, seconds) = (format!("Change number {commit}\n"), 1_700_000_000 + commit * 60);
        let length = message.len();
        stream.push_str(&format!("commit refs/heads/main\ncommitter A <a@example.org> {seconds} +0000\ndata {length}\n{message}"));
        let changed = |index: usize| {
            if commit == 0 { index } else { (commit * 37 + index * 211) % REPOSITORY_FILES }
        };
        for file in (0..if commit == 0 { REPOSITORY_FILES } else { 3 }).map(changed) {
            let (text, folder) = (repository_file(file, commit), file % 40);
            stream.push_str(&format!(
                "M 100644 inline folder-{folder}/file-{file}.txt\ndata {}\n{text}\n",
                text.len()
            ));
        }
    }
    stream.push_str("done\n");
    stream
}

/// A workspace of small libraries and a program that uses them all, without any dependency from
/// elsewhere.
fn write_crate(folder: &Path) -> anyhow::Result<()> {
    let libraries: Vec<String> = (0..LIBRARIES).map(|index| format!("part{index}")).collect();
    let dependencies: String =
        libraries.iter().map(|name| format!("{name} = {{ path = \"{name}\" }}\n")).collect();
    let package = |name: &str| {
        format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2021\"\n")
    };
    fs::create_dir_all(folder.join("src"))?;
    fs::write(
        folder.join("Cargo.toml"),
        format!(
            "{}\n[workspace]\nmembers = [\"part*\"]\n\n[dependencies]\n{dependencies}",
            package("whole")
        ),
    )?;
    let calls: String = libraries
        .iter()
        .map(|name| format!("    sum = sum.wrapping_add({name}::all(sum));\n"))
        .collect();
    fs::write(
        folder.join("src/main.rs"),
        format!("fn main() {{\n    let mut sum = 1u64;\n{calls}    println!(\"{{sum}}\");\n}}\n"),
    )?;
    for name in &libraries {
        fs::create_dir_all(folder.join(name).join("src"))?;
        fs::write(folder.join(name).join("Cargo.toml"), package(name))?;
        fs::write(folder.join(name).join("src/lib.rs"), library())?;
    }
    Ok(())
}

fn library() -> String {
    let function = |index: usize| {
        format!(
            "#[derive(Clone, Debug, PartialEq)]\npub struct Thing{index} {{ pub name: String, pub values: Vec<u64> }}\n\
             pub fn function{index}(seed: u64) -> u64 {{\n    let values: Vec<u64> = (0..seed % {n}).map(|i| i.wrapping_mul(seed)).collect();\n    \
             let thing = Thing{index} {{ name: format!(\"{{seed}}\"), values }};\n    \
             thing.values.iter().fold(thing.name.len() as u64, |a, b| a.wrapping_mul(31).wrapping_add(*b))\n}}\n",
            n = index + 3
        )
    };
    let calls: String = (0..FUNCTIONS)
        .map(|index| format!("    sum = sum.wrapping_add(function{index}(sum));\n"))
        .collect();
    let functions: String = (0..FUNCTIONS).map(function).collect();
    format!(
        "{functions}pub fn all(seed: u64) -> u64 {{\n    let mut sum = seed;\n{calls}    sum\n}}\n"
    )
}

/// What stands in a table before a load.
pub const TABLES: &str = "CREATE TABLE single(id INTEGER PRIMARY KEY, name TEXT, amount INTEGER);\
    CREATE TABLE bulk(id INTEGER PRIMARY KEY, name TEXT, amount INTEGER);";

/// Each row is a transaction of its own.
fn single_rows(rows: usize) -> String {
    (0..rows)
        .map(|row| {
            format!(
                "INSERT INTO single VALUES({row}, 'the name of row {row}', {});\n",
                row * 7919 % 10_007
            )
        })
        .collect()
}

fn bulk_load(rows: usize) -> String {
    format!(
        "BEGIN;\nWITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {rows})\n\
         INSERT INTO bulk SELECT n, 'the name of row ' || n, n * 7919 % 10007 FROM numbers;\nCREATE INDEX by_amount ON bulk(amount, name);\nCOMMIT;\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_file_systems_get_less() {
        let of =
            |size_bytes: u64| Materials::new(Path::new("/x"), size_bytes, Duration::from_secs(2));
        let (full, small) = (of(3 << 30), of(64 << 20));
        assert_eq!(
            (
                full.sources().files,
                full.large_file_mib(),
                full.synced_file_mib(1),
                full.synced_file_mib(32)
            ),
            (9_500, 512, 64, 2)
        );
        assert_eq!(
            (small.large_file_mib(), small.synced_file_mib(1), small.synced_file_mib(32)),
            (16, 16, 1)
        );
        // A tree and its copy take less than a third.
        assert!(small.sources().bytes() * 6 < 64 << 20, "{}", small.sources().bytes());
        assert_eq!((full.single_rows, full.bulk_rows()), (400, 300_000));
        assert_eq!(
            Materials::new(Path::new("/x"), 1, Duration::from_secs(9_999)).single_rows,
            5_000
        );
    }

    #[test]
    fn the_repository_has_its_commits() {
        let stream = commits();
        assert_eq!(
            stream.lines().filter(|line| *line == "commit refs/heads/main").count(),
            COMMITS
        );
        assert_eq!(
            stream.lines().filter(|line| line.starts_with("M 100644")).count(),
            REPOSITORY_FILES + 3 * (COMMITS - 1)
        );
        assert_eq!(stream, commits());
    }

    #[test]
    fn scripts_have_a_line_for_each_row() {
        assert_eq!(single_rows(7).lines().count(), 7);
        assert!(bulk_load(12).contains("n < 12)"));
    }
}
