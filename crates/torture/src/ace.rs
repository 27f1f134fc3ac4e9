//! Workloads that another team's tool has generated: the ACE generator of CrashMonkey ("Finding
//! Crash-Consistency Bugs with Bounded Black-Box Crash Testing", OSDI 2018).
//!
//! A file holds one operation a line; `# workload N` begins the next workload. Names are paths
//! without separators: capital letters are directories, `test` is the root. `fsync`, `fdatasync`
//! and `sync` promise what they promise everywhere, which is at least what `checkpoint N` marks.
use crate::contents::Tag;
use crate::model::{Body, Model};
use crate::operation::{Allocate, Base, Name, Operation, Path, Rename, Target, XattrSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;

/// A file of workloads.
pub struct AceFile {
    text: String,
    /// Number and place of each workload.
    workloads: Vec<(u64, Range<usize>)>,
}

/// The first bytes of a file compressed by xz.
const XZ_MAGIC: [u8; 6] = [0xFD, b'7', b'z', b'X', b'Z', 0];

impl AceFile {
    /// Reads a file, plain or compressed by xz.
    ///
    /// # Errors
    /// It can't be read, or holds no workload; in words.
    pub fn read(path: &std::path::Path) -> Result<Self, String> {
        let name = path.display();
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|mut file| file.read_to_end(&mut bytes))
            .map_err(|error| format!("{name}: {error}"))?;
        if bytes.starts_with(&XZ_MAGIC) {
            let mut plain = Vec::new();
            lzma_rs::xz_decompress(&mut BufReader::new(&bytes[..]), &mut plain)
                .map_err(|error| format!("{name}: decompressing it: {error}"))?;
            bytes = plain;
        }
        let text = String::from_utf8(bytes).map_err(|_| {
            format!("{name} is not text; name a file of ACE workloads, plain or .xz")
        })?;
        Self::parse(text).map_err(|error| format!("{name}: {error}"))
    }

    /// Finds the workloads in a text.
    ///
    /// # Errors
    /// There is none, or one has no number.
    pub fn parse(text: String) -> Result<Self, String> {
        let mut workloads: Vec<(u64, Range<usize>)> = Vec::new();
        let mut at = 0;
        for (line, number) in text.split_inclusive('\n').zip(1..) {
            if let Some(name) = line.strip_prefix("# workload ") {
                let parsed = name.trim().parse();
                let workload = parsed.map_err(|_| {
                    format!("line {number}: {:?} is not the number of a workload", name.trim())
                })?;
                workloads.push((workload, at + line.len()..at + line.len()));
            } else if let Some((_, range)) = workloads.last_mut() {
                range.end = at + line.len();
            } else if !line.trim().is_empty() {
                return Err(format!(
                    "line {number}: an operation before the first line `# workload N`"
                ));
            }
            at += line.len();
        }
        if workloads.is_empty() {
            Err("there is no line `# workload N`".into())
        } else {
            Ok(Self { text, workloads })
        }
    }

    /// How many workloads there are.
    pub fn len(&self) -> u64 {
        self.workloads.len() as u64
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.workloads.is_empty()
    }

    /// Number and text of the workload at `index`.
    ///
    /// # Panics
    /// When `index` is not below their number.
    pub fn workload(&self, index: u64) -> (u64, &str) {
        let (number, range) = &self.workloads[index as usize];
        (*number, &self.text[range.clone()])
    }
}

/// The operations of one workload, on an empty volume.
///
/// # Errors
/// A line that can't be understood.
pub fn operations(text: &str) -> Result<Vec<Operation>, String> {
    let mut translator = Translator {
        model: Model::new(crate::model::Layout::Alone),
        operations: Vec::new(),
        opened: Vec::new(),
    };
    for line in text.lines() {
        translator.line(line).map_err(|problem| format!("{line:?}: {problem}"))?;
    }
    Ok(translator.operations)
}

/// Knows what the operations so far have led to, since `open` may create and offsets may count from
/// the end.
struct Translator {
    model: Model,
    operations: Vec<Operation>,
    /// What is or was open; its place is the handle.
    opened: Vec<String>,
}

/// The path that a name without separators stands for.
fn path(name: &str) -> Result<Path, String> {
    let mut path = Path { base: Base::Own, names: Vec::new() };
    let mut rest = name;
    if rest == "test" {
        return Ok(path);
    }
    while !rest.is_empty() {
        let names = [("foo", 5), ("bar", 1), ("A", 0), ("B", 3), ("C", 2)];
        let found = names
            .into_iter()
            .find_map(|(name, number)| rest.strip_prefix(name).map(|rest| (rest, Name(number))));
        let Some((after, next)) = found else {
            return Err(format!("{name} is not a name in an ACE workload"));
        };
        path.names.push(next);
        rest = after;
    }
    Ok(path)
}

fn allocate_mode(mode: &str) -> Result<Allocate, String> {
    let has = |flag: &str| mode.split('|').any(|part| part == flag);
    match (mode, has("FALLOC_FL_KEEP_SIZE")) {
        ("0", _) => Ok(Allocate::Extend),
        ("FALLOC_FL_KEEP_SIZE", _) => Ok(Allocate::KeepSize),
        (_, true) if has("FALLOC_FL_PUNCH_HOLE") => Ok(Allocate::Punch),
        (_, true) if has("FALLOC_FL_ZERO_RANGE") => Ok(Allocate::ZeroKeepSize),
        ("FALLOC_FL_ZERO_RANGE", false) => Ok(Allocate::Zero),
        _ => Err(format!("the mode {mode} is not known")),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text} is not a number"))
}

impl Translator {
    fn push(&mut self, operation: Operation) {
        let _ = self.model.apply(&operation);
        self.operations.push(operation);
    }

    fn tag(&self) -> Tag {
        Tag { client: 0, operation: self.operations.len() as u32 }
    }

    fn handle(&mut self, name: &str) -> u8 {
        let known = self.opened.iter().position(|opened| opened == name);
        known.unwrap_or_else(|| {
            self.opened.push(name.to_owned());
            self.opened.len() - 1
        }) as u8
    }

    /// What was opened under this name, wherever it is now.
    fn target(&mut self, name: &str) -> Result<Target, String> {
        let path = path(name)?;
        Ok(if path.names.is_empty() {
            Target::Path(path)
        } else {
            Target::Handle(self.handle(name))
        })
    }

    /// An offset, perhaps counted from the end.
    fn offset(&self, target: &Target, text: &str) -> Result<u64, String> {
        let offset: i64 = number(text)?;
        let node = self.model.target(target).ok().and_then(|id| self.model.node(id));
        let size = node.map_or(0, |node| {
            if let Body::Regular(contents) = &node.body { contents.size_bytes() } else { 0 }
        });
        Ok(if offset < 0 {
            size.saturating_sub(offset.unsigned_abs())
        } else {
            offset.unsigned_abs()
        })
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [] | ["none"] | ["checkpoint", _] => {}
            ["open", name, ..] => {
                let path = path(name)?;
                if self.model.resolve(&path).is_err() {
                    self.push(Operation::Create { path: path.clone(), mode: 0o777, uid: 0 });
                }
                let handle = self.handle(name);
                self.push(Operation::Open { path, handle });
            }
            ["opendir", "test", ..] | ["close", "test"] => {}
            ["opendir", name, ..] => {
                let (path, handle) = (path(name)?, self.handle(name));
                self.push(Operation::Open { path, handle });
            }
            ["close", name] => {
                let handle = self.handle(name);
                self.push(Operation::Close { handle });
            }
            ["mkdir", name, ..] => {
                self.push(Operation::MakeDirectory { path: path(name)?, mode: 0o777 })
            }
            ["rmdir", name] => self.push(Operation::RemoveDirectory { path: path(name)? }),
            ["unlink", name] => self.push(Operation::Unlink { path: path(name)? }),
            ["remove", name] => {
                let path = path(name)?;
                let is_directory = self
                    .model
                    .resolve(&path)
                    .ok()
                    .and_then(|id| self.model.node(id))
                    .is_some_and(|node| node.is_directory());
                self.push(if is_directory {
                    Operation::RemoveDirectory { path }
                } else {
                    Operation::Unlink { path }
                });
            }
            ["link", from, to] => self.push(Operation::Link { from: path(from)?, to: path(to)? }),
            ["rename", from, to] => self.push(Operation::Rename {
                from: path(from)?,
                to: path(to)?,
                mode: Rename::Replace,
            }),
            ["truncate", name, size] => {
                self.push(Operation::Truncate {
                    target: Target::Path(path(name)?),
                    size_bytes: number(size)?,
                });
            }
            ["fsetxattr", name] => {
                let (target, tag) = (self.target(name)?, self.tag());
                self.push(Operation::SetXattr {
                    target,
                    name: 1,
                    length_bytes: 4,
                    tag,
                    mode: XattrSet::Any,
                });
            }
            ["removexattr", name] => {
                self.push(Operation::RemoveXattr { target: Target::Path(path(name)?), name: 1 })
            }
            ["fsync" | "fdatasync", name] => {
                let (target, data_only) = (self.target(name)?, words[0] == "fdatasync");
                self.push(Operation::Fsync { target, data_only, wait: true });
            }
            ["sync"] => self.push(Operation::Sync),
            ["falloc", name, mode, offset, length] => {
                let target = self.target(name)?;
                let offset_bytes = self.offset(&target, offset)?;
                self.push(Operation::Allocate {
                    target,
                    offset_bytes,
                    length_bytes: number(length)?,
                    mode: allocate_mode(mode)?,
                });
            }
            ["write" | "dwrite" | "mmapwrite", name, offset, length] => {
                self.write(words[0], name, offset, number(length)?)?
            }
            _ => return Err("this is not an operation of an ACE workload".into()),
        }
        Ok(())
    }

    /// A direct write reaches the volume as any other. One through a mapping needs a file that is
    /// long enough, and `msync` follows it.
    fn write(
        &mut self,
        how: &str,
        name: &str,
        offset: &str,
        length_bytes: u64,
    ) -> Result<(), String> {
        let target = self.target(name)?;
        let offset_bytes = self.offset(&target, offset)?;
        if how == "mmapwrite" {
            self.push(Operation::Allocate {
                target: target.clone(),
                offset_bytes,
                length_bytes,
                mode: Allocate::Extend,
            });
        }
        let tag = self.tag();
        self.push(Operation::Write { target: target.clone(), offset_bytes, length_bytes, tag });
        if how == "mmapwrite" {
            self.push(Operation::Fsync { target, data_only: true, wait: true });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Vec<String> {
        operations(text)
            .expect("it is understood")
            .iter()
            .map(|operation| format!("{operation:?}"))
            .collect()
    }

    #[test]
    fn names_are_paths_without_separators() {
        let path = |name| format!("{:?}", path(name).expect("a name"));
        assert_eq!(
            (path("test"), path("foo"), path("AC")),
            ("own".into(), "own/f".into(), "own/a/c".into())
        );
        assert_eq!((path("ACbar"), path("B")), ("own/a/c/b".into(), "own/d".into()));
        assert!(super::path("Afo").is_err());
    }

    #[test]
    fn what_a_line_does_depends_on_those_before() {
        let found = shown(
            "open foo O_RDWR|O_CREAT 0777\nwrite foo 0 32768\nclose foo\nopen foo O_RDWR|O_CREAT 0777\nwrite foo -2000 5000\n",
        );
        assert_eq!(found[0], "Create { path: own/f, mode: 511, uid: 0 }");
        assert_eq!(found[4], "Open { path: own/f, handle: 0 }", "it exists");
        assert!(found[5].contains("offset_bytes: 30768, length_bytes: 5000"), "{}", found[5]);
        assert!(shown("mkdir A 0777\nremove A\n")[1].starts_with("RemoveDirectory"));
        let mapped = shown("open foo O_RDWR|O_CREAT 0777\nmmapwrite foo 0 8192\n");
        assert!(mapped[2].starts_with("Allocate") && mapped[4].starts_with("Fsync"), "{mapped:?}");
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let error = |text: &str| operations(text).expect_err("it is wrong");
        assert!(error("fly foo\n").contains("\"fly foo\": this is not an operation"));
        assert!(error("write foo x 1\n").contains("x is not a number"));
        assert!(error("falloc foo FALLOC_FL_FLY 0 1\n").contains("FALLOC_FL_FLY"));
        let file = |text: &str| AceFile::parse(text.into()).err().expect("it is wrong");
        assert!(file("\n").contains("no line"));
        assert!(file("sync\n").contains("line 1"));
        assert!(file("# workload x\n").contains("line 1"));
    }

    #[test]
    fn a_file_is_cut_into_workloads() {
        let file =
            AceFile::parse("# workload 7\nsync\nsync\n# workload 9\n# workload 10\nnone\n".into())
                .expect("it is right");
        assert_eq!(file.len(), 3);
        assert_eq!(
            (file.workload(0), file.workload(1), file.workload(2)),
            ((7, "sync\nsync\n"), (9, ""), (10, "none\n"))
        );
    }
}
