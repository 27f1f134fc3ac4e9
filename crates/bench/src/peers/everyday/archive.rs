//! Archives in the format of tar, and what they are filled with: trees that follow from their
//! numbers alone.
//!
//! A file's size is a quantile of a fixed distribution, so the sum of all sizes doesn't depend on
//! chance; which file gets which size, and in which folder it lies, follows from a seed.
use anyhow::{Context, ensure};
use cairn_environment::random::Seeded;
use cairn_harness::Interrupt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

const RECORD_BYTES: usize = 512;
/// An archive ends with a full piece; tar reads and writes pieces of this size.
pub const PIECE_BYTES: usize = 10 << 10;
const NAME_BYTES: usize = 100;
const PREFIX_BYTES: usize = 155;
/// 2023-11-14, so that every archive is the same.
const MODIFIED_SECONDS: u64 = 1_700_000_000;
/// Files take their text from here.
const TEXT_BYTES: usize = 2 << 20;
const SEED: u64 = 0xca12;

/// What some files of a tree contain, and nothing else does.
pub const NEEDLE: &str = "needle_in_a_haystack";
/// One file in this many has it.
const FILES_PER_NEEDLE: usize = 500;

const WORDS: [&str; 24] = [
    "static", "int", "return", "struct", "buffer", "offset", "length", "if", "else", "for",
    "index", "const", "void", "page", "inode", "lock", "unlock", "error", "NULL", "sizeof",
    "flags", "device", "next", "list",
];

/// The shape of a tree.
pub struct Tree {
    /// Its topmost folder.
    pub root: &'static str,
    /// Folders.
    folders: usize,
    /// The longest way down.
    depth_max: usize,
    /// Files.
    pub files: usize,
    /// Sizes in bytes, each with the per mille of files that are no larger.
    sizes: &'static [(u64, u64)],
    extensions: &'static [&'static str],
}

/// As in the sources of a large program: half of the files are smaller than 4.5 kB, and a few hold
/// most of the bytes.
const SOURCE_SIZES: [(u64, u64); 10] = [
    (0, 60),
    (100, 500),
    (250, 1_500),
    (500, 4_500),
    (750, 12_500),
    (900, 28_000),
    (950, 46_000),
    (990, 120_000),
    (999, 350_000),
    (1_000, 1_200_000),
];
/// As among the packages that a program of JavaScript is made of.
const PACKAGE_SIZES: [(u64, u64); 6] =
    [(0, 30), (250, 180), (500, 420), (750, 1_100), (950, 4_000), (1_000, 30_000)];

impl Tree {
    /// Sources of a program: about 9,500 files and 134 MB, times `scale`.
    pub fn sources(scale: f64) -> Self {
        let extensions = &["c", "h", "c", "rs", "txt"];
        Self {
            root: "source-tree",
            folders: scaled(620, scale),
            depth_max: 6,
            files: scaled(9_500, scale),
            sizes: &SOURCE_SIZES,
            extensions,
        }
    }

    /// Packages: 20,000 tiny files in folders that lie deep, times `scale`.
    pub fn packages(scale: f64) -> Self {
        let extensions = &["js", "d.ts", "json", "md"];
        Self {
            root: "node_modules",
            folders: scaled(5_000, scale),
            depth_max: 12,
            files: scaled(20_000, scale),
            sizes: &PACKAGE_SIZES,
            extensions,
        }
    }

    fn size_bytes(&self, rank: usize) -> u64 {
        // In parts per million, in the middle of the file's share.
        let at = (rank as u64 * 2 + 1) * 500_000 / self.files as u64;
        let above = self
            .sizes
            .iter()
            .position(|(mille, _)| mille * 1_000 > at)
            .unwrap_or(self.sizes.len() - 1)
            .max(1);
        let ((low, least), (high, most)) = (self.sizes[above - 1], self.sizes[above]);
        least + (most - least) * (at - low * 1_000) / ((high - low) * 1_000)
    }

    /// All files together.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        (0..self.files).map(|rank| self.size_bytes(rank)).sum()
    }

    /// Folders, each behind the one above it.
    fn folder_names(&self, random: &mut Seeded) -> Vec<(String, usize)> {
        let mut folders = vec![(self.root.to_owned(), 1)];
        while folders.len() < self.folders {
            // One of the newest third, so that it goes down.
            let newest = (folders.len() / 3).max(1);
            let (above, depth) = &folders[folders.len() - 1 - random.below(newest as u64) as usize];
            let (above, depth) = if *depth < self.depth_max {
                (above.clone(), *depth)
            } else {
                (self.root.to_owned(), 1)
            };
            folders.push((format!("{above}/part-{}", folders.len()), depth + 1));
        }
        folders
    }

    /// Writes the tree as an archive.
    ///
    /// # Errors
    /// When it can't be written, or the user interrupts it.
    pub fn pack(&self, path: &Path, interrupt: &Interrupt) -> anyhow::Result<()> {
        let mut random = Seeded::new(SEED);
        let text = text(&mut random);
        let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
        let mut archive = Archive { out: BufWriter::with_capacity(1 << 20, file), bytes: 0 };
        let folders = self.folder_names(&mut random);
        for (name, _) in &folders {
            archive.add(&format!("{name}/"), None)?;
        }
        let mut ranks: Vec<usize> = (0..self.files).collect();
        for index in (1..ranks.len()).rev() {
            ranks.swap(index, random.below(index as u64 + 1) as usize);
        }
        for (index, rank) in ranks.into_iter().enumerate() {
            interrupt.check()?;
            let folder = &folders[random.below(folders.len() as u64) as usize].0;
            let extension = self.extensions[index % self.extensions.len()];
            let size_bytes = self.size_bytes(rank) as usize;
            let start = random.below((TEXT_BYTES - size_bytes) as u64) as usize;
            let mut content = format!(
                "/* file {index}{} */\n",
                if index % FILES_PER_NEEDLE == 0 { NEEDLE } else { "" }
            )
            .into_bytes();
            content
                .extend_from_slice(&text[start..start + size_bytes.saturating_sub(content.len())]);
            archive.add(&format!("{folder}/file-{index}.{extension}"), Some(&content))?;
        }
        archive.end()
    }
}

/// At least a few.
pub fn scaled(count: usize, scale: f64) -> usize {
    ((count as f64 * scale).round() as usize).max(8)
}

/// Lines of words.
fn text(random: &mut Seeded) -> Vec<u8> {
    let mut text = Vec::with_capacity(TEXT_BYTES + 16);
    while text.len() < TEXT_BYTES {
        text.extend_from_slice(WORDS[random.below(WORDS.len() as u64) as usize].as_bytes());
        text.push(if random.chance(1, 9) { b'\n' } else { b' ' });
    }
    text.truncate(TEXT_BYTES);
    text
}

/// An archive being written.
struct Archive<W: Write> {
    out: W,
    bytes: usize,
}

impl<W: Write> Archive<W> {
    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.bytes += bytes.len();
        self.out.write_all(bytes).context("cannot write the archive")
    }

    fn pad(&mut self, unit_bytes: usize) -> anyhow::Result<()> {
        let padding = self.bytes.next_multiple_of(unit_bytes) - self.bytes;
        self.write(&vec![0; padding])
    }

    /// A file, or a folder without content, whose name ends with `/`.
    fn add(&mut self, name: &str, content: Option<&[u8]>) -> anyhow::Result<()> {
        let header = header(name, content.map(<[u8]>::len))?;
        self.write(&header)?;
        self.write(content.unwrap_or_default())?;
        self.pad(RECORD_BYTES)
    }

    fn end(mut self) -> anyhow::Result<()> {
        self.write(&[0; 2 * RECORD_BYTES])?;
        self.pad(PIECE_BYTES)?;
        self.out.flush().context("cannot write the archive")
    }
}

/// POSIX.1-1988, "ustar": fields of fixed width, numbers in octal digits.
fn header(name: &str, size_bytes: Option<usize>) -> anyhow::Result<[u8; RECORD_BYTES]> {
    let (prefix, rest) =
        split_name(name).with_context(|| format!("{name} is too long for an archive"))?;
    ensure!(name.is_ascii(), "{name} is no name for an archive");
    let (mode, kind) = if size_bytes.is_some() { (0o644, b'0') } else { (0o755, b'5') };
    let mut header = [0; RECORD_BYTES];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    put(0, rest.as_bytes());
    put(100, format!("{mode:07o}").as_bytes());
    put(108, b"0000000");
    put(116, b"0000000");
    put(124, format!("{:011o}", size_bytes.unwrap_or(0)).as_bytes());
    put(136, format!("{MODIFIED_SECONDS:011o}").as_bytes());
    put(148, b"        ");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    put(345, prefix.as_bytes());
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(header)
}

/// A long name in two fields, without the `/` between them.
fn split_name(name: &str) -> Option<(&str, &str)> {
    if name.len() <= NAME_BYTES {
        return Some(("", name));
    }
    let fits =
        |at: usize| at <= PREFIX_BYTES && name.len() - at - 1 <= NAME_BYTES && at + 1 < name.len();
    let at = name.match_indices('/').map(|(at, _)| at).find(|at| fits(*at))?;
    Some((&name[..at], &name[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_source_tree_is_as_large_as_it_says() {
        let tree = Tree::sources(1.0);
        assert_eq!(tree.files, 9_500);
        assert!((132_000_000..136_000_000).contains(&tree.bytes()), "{}", tree.bytes());
        let median = tree.size_bytes(tree.files / 2);
        assert!((4_000..5_000).contains(&median), "{median}");
        let largest_tenth: u64 =
            (tree.files * 9 / 10..tree.files).map(|rank| tree.size_bytes(rank)).sum();
        assert!(largest_tenth > tree.bytes() / 2, "{largest_tenth}");
        assert!(Tree::packages(1.0).bytes() / 20_000 < 2_000);
        let small = Tree::sources(0.01);
        assert_eq!(small.files, 95);
        assert!(small.bytes() < tree.bytes() / 50, "{}", small.bytes());
    }

    #[test]
    fn tar_unpacks_what_was_packed() {
        let folder = tempfile::tempdir().unwrap();
        for (tree, name) in [(Tree::sources(0.01), "a"), (Tree::packages(0.02), "b")] {
            let [one, other] =
                ["one", "other"].map(|copy| folder.path().join(format!("{name}-{copy}.tar")));
            tree.pack(&one, &Interrupt::default()).unwrap();
            tree.pack(&other, &Interrupt::default()).unwrap();
            let archive = std::fs::read(&one).unwrap();
            assert!(archive == std::fs::read(&other).unwrap(), "two archives of one tree differ");
            assert_eq!(archive.len() % PIECE_BYTES, 0);
            let unpacked = folder.path().join(name);
            std::fs::create_dir(&unpacked).unwrap();
            let tar =
                Command::new("tar").arg("-xf").arg(&one).arg("-C").arg(&unpacked).output().unwrap();
            assert!(tar.status.success() && tar.stderr.is_empty(), "{tar:?}");
            let listed = Command::new("find")
                .arg(&unpacked)
                .args(["-type", "f", "-printf", "%s %d\n"])
                .output()
                .unwrap();
            let lines = String::from_utf8(listed.stdout).unwrap();
            let numbers = |index: usize| {
                lines
                    .lines()
                    .map(move |line| line.split(' ').nth(index).unwrap().parse::<u64>().unwrap())
            };
            assert_eq!(lines.lines().count(), tree.files);
            // The first line of a tiny file is as long as it is.
            assert!(numbers(0).sum::<u64>().abs_diff(tree.bytes()) < 40 * tree.files as u64);
            assert!(numbers(1).max().unwrap() >= 4, "{lines}");
        }
        let found = Command::new("grep")
            .args(["-rl", NEEDLE])
            .arg(folder.path().join("a"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&found.stdout).lines().count(), 1);
    }

    #[test]
    fn long_names_are_split() {
        let long = format!("{}/{}", "a".repeat(90), "b".repeat(50));
        assert_eq!(split_name(&long), Some((&long[..90], &long[91..])));
        assert_eq!(split_name("short"), Some(("", "short")));
        assert_eq!(split_name(&"c".repeat(101)), None);
        assert!(header(&"c".repeat(101), None).is_err());
    }
}
