//! The load file: one operation per line, with its arguments and the status that the recorded server gave.
//!
//! `NTCreateX "\clients\client1\~dmtmp\A.DOC" 0x40 0x2 9937 NT_STATUS_OK`: names in quotes with backslashes, numbers
//! decimal or hexadecimal, the status last. A line may begin with a time in seconds, which only a load with a target
//! rate needs; it is skipped. Operations of newer versions that this file format has no rule for are an error, with the line.
use anyhow::{Context, bail};
use std::collections::HashMap;

/// A path of the load file; each client has its own spelling of it.
pub type PathIndex = usize;

/// An open file's number in the load file.
pub type Handle = u64;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Command {
    CreateX { path: PathIndex, options: u64, disposition: u64, handle: Handle },
    Close { handle: Handle },
    ReadX { handle: Handle, offset_bytes: u64, length_bytes: usize, expected_bytes: usize },
    WriteX { handle: Handle, offset_bytes: u64, length_bytes: usize },
    Rename { from: PathIndex, to: PathIndex },
    Unlink { path: PathIndex },
    Deltree { path: PathIndex },
    Mkdir { path: PathIndex },
    Rmdir { path: PathIndex },
    QueryPath { path: PathIndex },
    QueryFile { handle: Handle },
    QueryFileSystem,
    SetFile { handle: Handle },
    Find { path: PathIndex, entries_max: u64 },
    Lock { handle: Handle },
    Unlock { handle: Handle },
    Flush { handle: Handle },
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Its place in the file, from 1.
    pub number: usize,
    /// What to do.
    pub command: Command,
    /// Whether it should succeed.
    pub succeeds: bool,
}

/// A whole load.
#[derive(Debug, Default)]
pub struct LoadFile {
    /// In order.
    pub lines: Vec<Line>,
    /// Relative paths, with `client1` for the client's own folder.
    pub paths: Vec<String>,
}

/// The longest read or write; a larger one is a damaged file.
const TRANSFER_BYTES_MAX: u64 = 16 << 20;

impl LoadFile {
    /// Understands a load file.
    ///
    /// # Errors
    /// The first line that makes no sense.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let mut load = LoadFile::default();
        let mut indexes = HashMap::new();
        for (index, line) in text.lines().enumerate() {
            let words = words_of(line);
            let words = if words.first().is_some_and(|word| word.parse::<f64>().is_ok()) { &words[1..] } else { &words[..] };
            if words.is_empty() || words[0].starts_with('#') {
                continue;
            }
            let mut arguments = Arguments { words, load: &mut load, indexes: &mut indexes };
            let command = arguments.command().with_context(|| format!("line {}: {line}", index + 1))?;
            let succeeds = matches!(words.last().map(String::as_str), Some("NT_STATUS_OK" | "SUCCESS" | "0x00000000"));
            load.lines.push(Line { number: index + 1, command, succeeds });
        }
        if load.lines.is_empty() {
            bail!("it holds no operations");
        }
        Ok(load)
    }
}

/// Words between blanks; quotes hold a word with blanks together.
fn words_of(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut started) = (Vec::new(), String::new(), false, false);
    for character in line.chars() {
        match character {
            '"' => (quoted, started) = (!quoted, true),
            blank if blank.is_whitespace() && !quoted => {
                if std::mem::take(&mut started) {
                    words.push(std::mem::take(&mut word));
                }
            }
            '\\' => (word, started) = (word + "/", true),
            other => {
                word.push(other);
                started = true;
            }
        }
    }
    if started {
        words.push(word);
    }
    words
}

struct Arguments<'a> {
    words: &'a [String],
    load: &'a mut LoadFile,
    indexes: &'a mut HashMap<String, PathIndex>,
}

impl Arguments<'_> {
    fn word(&self, index: usize) -> anyhow::Result<&str> {
        self.words.get(index).map(String::as_str).context("an argument is missing")
    }

    fn number(&self, index: usize) -> anyhow::Result<u64> {
        let word = self.word(index)?;
        let parsed = match word.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => word.parse(),
        };
        parsed.with_context(|| format!("\"{word}\" is not a number"))
    }

    fn length(&self, index: usize) -> anyhow::Result<usize> {
        let length_bytes = self.number(index)?;
        if length_bytes > TRANSFER_BYTES_MAX {
            bail!("{length_bytes} bytes at once are too many");
        }
        Ok(length_bytes as usize)
    }

    fn path(&mut self, index: usize) -> anyhow::Result<PathIndex> {
        let path = self.word(index)?.trim_matches('/').to_owned();
        if path.split('/').any(|part| part == "..") {
            bail!("the path leaves the folder");
        }
        if let Some(&known) = self.indexes.get(&path) {
            return Ok(known);
        }
        self.load.paths.push(path.clone());
        self.indexes.insert(path, self.load.paths.len() - 1);
        Ok(self.load.paths.len() - 1)
    }

    fn command(&mut self) -> anyhow::Result<Command> {
        let handle = |arguments: &Self, index| arguments.number(index);
        Ok(match self.word(0)? {
            "NTCreateX" => Command::CreateX {
                path: self.path(1)?,
                options: self.number(2)?,
                disposition: self.number(3)?,
                handle: if self.word(4)? == "-1" { u64::MAX } else { handle(self, 4)? },
            },
            "Close" => Command::Close { handle: handle(self, 1)? },
            "ReadX" => Command::ReadX {
                handle: handle(self, 1)?,
                offset_bytes: self.number(2)?,
                length_bytes: self.length(3)?,
                expected_bytes: self.length(4)?,
            },
            "WriteX" => Command::WriteX { handle: handle(self, 1)?, offset_bytes: self.number(2)?, length_bytes: self.length(3)? },
            "Rename" => Command::Rename { from: self.path(1)?, to: self.path(2)? },
            "Unlink" => Command::Unlink { path: self.path(1)? },
            "Deltree" => Command::Deltree { path: self.path(1)? },
            "Mkdir" => Command::Mkdir { path: self.path(1)? },
            "Rmdir" => Command::Rmdir { path: self.path(1)? },
            "QUERY_PATH_INFORMATION" => Command::QueryPath { path: self.path(1)? },
            "QUERY_FILE_INFORMATION" => Command::QueryFile { handle: handle(self, 1)? },
            "QUERY_FS_INFORMATION" => Command::QueryFileSystem,
            "SET_FILE_INFORMATION" => Command::SetFile { handle: handle(self, 1)? },
            "FIND_FIRST" => Command::Find { path: self.path(1)?, entries_max: self.number(3)? },
            "LockX" => Command::Lock { handle: handle(self, 1)? },
            "UnlockX" => Command::Unlock { handle: handle(self, 1)? },
            "Flush" => Command::Flush { handle: handle(self, 1)? },
            other => bail!("unknown operation \"{other}\""),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let text = "# a comment\n\
            NTCreateX \"\\clients\\client1\\A B.DOC\" 0x40 0x2 9937 NT_STATUS_OK\n\
            0.125 WriteX 9937 65534 1 1 NT_STATUS_OK\n\n\
            ReadX 9937 0 4096 1 NT_STATUS_OK\n\
            Rename \"\\clients\\client1\\A B.DOC\" \"\\clients\\client1\\C\" NT_STATUS_OK\n\
            Unlink \"\\clients\\client1\\A B.DOC\" 0x6 NT_STATUS_OBJECT_NAME_NOT_FOUND\n\
            FIND_FIRST \"\\clients\\client1\\*\" 260 1366 0 NT_STATUS_NO_SUCH_FILE\n";
        let load = LoadFile::parse(text).unwrap();
        assert_eq!(load.paths, ["clients/client1/A B.DOC", "clients/client1/C", "clients/client1/*"]);
        let commands: Vec<Command> = load.lines.iter().map(|line| line.command).collect();
        let expected = [
            Command::CreateX { path: 0, options: 0x40, disposition: 2, handle: 9937 },
            Command::WriteX { handle: 9937, offset_bytes: 65534, length_bytes: 1 },
            Command::ReadX { handle: 9937, offset_bytes: 0, length_bytes: 4096, expected_bytes: 1 },
            Command::Rename { from: 0, to: 1 },
            Command::Unlink { path: 0 },
            Command::Find { path: 2, entries_max: 1366 },
        ];
        assert_eq!(commands, expected);
        assert_eq!(load.lines.iter().map(|line| line.succeeds).collect::<Vec<_>>(), [true, true, true, true, false, false]);
        assert_eq!(load.lines[1].number, 3);
    }

    #[test]
    fn nonsense_is_refused_with_its_line() {
        for (text, part) in [
            ("", "no operations"),
            ("Close 1 NT_STATUS_OK\nDance 1 NT_STATUS_OK", "line 2"),
            ("ReadX 1 0", "missing"),
            ("ReadX 1 0 99999999999 1 NT_STATUS_OK", "too many"),
            ("Close x NT_STATUS_OK", "not a number"),
            ("Unlink \"\\clients\\..\\..\\etc\" 0x6 NT_STATUS_OK", "leaves the folder"),
        ] {
            let error = format!("{:#}", LoadFile::parse(text).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }
}
