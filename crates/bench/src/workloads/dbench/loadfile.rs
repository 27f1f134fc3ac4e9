//! The load file: one operation per line, with its arguments and the status that the recorded
//! server gave.
//!
//! `NTCreateX "\clients\client1\~dmtmp\A.DOC" 0x40 0x2 9937 NT_STATUS_OK`: names in quotes with
//! backslashes, numbers decimal or hexadecimal, the status last. A line may begin with the time in
//! seconds, from the start of the pass, before which it is not run. Operations of newer versions
//! that this file format has no rule for are an error, with the line.
//!
//! A load is checked once and kept as text: each replay interprets the lines again, as dbench does,
//! whose figures hold that work.
use anyhow::{Context, bail};
use std::time::Duration;

/// An open file's number in the load file.
pub type Handle = u64;

/// One operation. Paths are as in the file, with backslashes and with `client1` for the client's
/// own folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Command<'a> {
    CreateX { path: &'a str, options: u64, disposition: u64, handle: Handle },
    Close { handle: Handle },
    ReadX { handle: Handle, offset_bytes: u64, length_bytes: usize, expected_bytes: usize },
    WriteX { handle: Handle, offset_bytes: u64, length_bytes: usize },
    Rename { from: &'a str, to: &'a str },
    Unlink { path: &'a str },
    Deltree { path: &'a str },
    Mkdir { path: &'a str },
    Rmdir { path: &'a str },
    QueryPath { path: &'a str },
    QueryFile { handle: Handle },
    QueryFileSystem,
    SetFile { handle: Handle },
    Find { path: &'a str, entries_max: u64 },
    Lock { handle: Handle },
    Unlock { handle: Handle },
    Flush { handle: Handle },
    Sleep { time: Duration },
}

impl Command<'_> {
    /// The operation's name in dbench's table.
    pub fn name(&self) -> &'static str {
        match self {
            Command::CreateX { .. } => "NTCreateX",
            Command::Close { .. } => "Close",
            Command::ReadX { .. } => "ReadX",
            Command::WriteX { .. } => "WriteX",
            Command::Rename { .. } => "Rename",
            Command::Unlink { .. } => "Unlink",
            Command::Deltree { .. } => "Deltree",
            Command::Mkdir { .. } => "Mkdir",
            Command::Rmdir { .. } => "Rmdir",
            Command::QueryPath { .. } => "Qpathinfo",
            Command::QueryFile { .. } => "Qfileinfo",
            Command::QueryFileSystem => "Qfsinfo",
            Command::SetFile { .. } => "Sfileinfo",
            Command::Find { .. } => "Find",
            Command::Lock { .. } => "LockX",
            Command::Unlock { .. } => "UnlockX",
            Command::Flush { .. } => "Flush",
            Command::Sleep { .. } => "Sleep",
        }
    }

    /// Whether it is one operation on metadata, which moves no data and waits for no device.
    pub fn is_metadata(&self) -> bool {
        !matches!(
            self,
            Command::ReadX { .. }
                | Command::WriteX { .. }
                | Command::Flush { .. }
                | Command::Sleep { .. }
                | Command::Deltree { .. }
                | Command::Lock { .. }
                | Command::Unlock { .. }
        )
    }
}

/// What a line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation<'a> {
    /// What to do.
    pub command: Command<'a>,
    /// Whether it should succeed.
    pub succeeds: bool,
    /// When, from the start of the pass.
    pub not_before: Option<Duration>,
}

/// A whole load, every line of which makes sense.
#[derive(Debug)]
pub struct LoadFile {
    text: String,
}

/// The longest read or write; a larger one is a damaged file.
const TRANSFER_BYTES_MAX: u64 = 16 << 20;

impl LoadFile {
    /// Understands a load file.
    ///
    /// # Errors
    /// The first line that makes no sense.
    pub fn parse(text: String) -> anyhow::Result<Self> {
        let mut operations = 0_u64;
        for (index, line) in text.lines().enumerate() {
            let understood =
                interpret(line).with_context(|| format!("line {}: {line}", index + 1))?;
            operations += u64::from(understood.is_some());
        }
        if operations == 0 {
            bail!("it holds no operations");
        }
        Ok(Self { text })
    }

    /// The lines, each with its place in the file, from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }
}

/// What a line says; nothing when it is empty or a comment.
///
/// # Errors
/// When it makes no sense.
pub fn interpret(line: &str) -> anyhow::Result<Option<Operation<'_>>> {
    let mut all = [""; WORDS_MAX];
    let mut words = words_of(line, &mut all);
    let mut not_before = None;
    let begins_with_digit = line.as_bytes().first().is_some_and(u8::is_ascii_digit);
    if let Some(seconds) =
        words.first().filter(|_| begins_with_digit).and_then(|word| word.parse::<f64>().ok())
    {
        not_before = Some(Duration::try_from_secs_f64(seconds).context("the time is not valid")?);
        words = &words[1..];
    }
    let Some(status) = words.last().filter(|_| !words[0].starts_with('#')) else { return Ok(None) };
    let command = Arguments { words }.command()?;
    let succeeds = match status.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16) == Ok(0),
        None if status.starts_with("NT_STATUS_") => *status == "NT_STATUS_OK",
        None => bail!("it ends with \"{status}\", not with a status such as NT_STATUS_OK"),
    };
    Ok(Some(Operation { command, succeeds, not_before }))
}

/// More words than this has no line.
const WORDS_MAX: usize = 12;

/// Words between blanks; quotes hold a word with blanks together.
fn words_of<'a, 'b>(line: &'a str, words: &'b mut [&'a str; WORDS_MAX]) -> &'b [&'a str] {
    let (mut rest, mut count) = (line.trim_ascii(), 0);
    while !rest.is_empty() && count < WORDS_MAX {
        let (word, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        words[count] = word;
        count += 1;
        rest = after.trim_ascii_start();
    }
    &words[..count]
}

struct Arguments<'a, 'b> {
    words: &'b [&'a str],
}

impl<'a> Arguments<'a, '_> {
    fn word(&self, index: usize) -> anyhow::Result<&'a str> {
        self.words.get(index).copied().context("an argument is missing")
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
            bail!("{length_bytes} bytes are too many for one operation");
        }
        Ok(length_bytes as usize)
    }

    fn path(&self, index: usize) -> anyhow::Result<&'a str> {
        let path = self.word(index)?;
        if path.contains("..") && path.split(['\\', '/']).any(|part| part == "..") {
            bail!("the path leaves the folder");
        }
        Ok(path)
    }

    fn command(&self) -> anyhow::Result<Command<'a>> {
        let handle = |index| self.number(index);
        Ok(match self.word(0)? {
            "NTCreateX" => Command::CreateX {
                path: self.path(1)?,
                options: self.number(2)?,
                disposition: self.number(3)?,
                handle: if self.word(4)? == "-1" { u64::MAX } else { handle(4)? },
            },
            "Close" => Command::Close { handle: handle(1)? },
            "ReadX" => Command::ReadX {
                handle: handle(1)?,
                offset_bytes: self.number(2)?,
                length_bytes: self.length(3)?,
                expected_bytes: self.length(4)?,
            },
            "WriteX" => Command::WriteX {
                handle: handle(1)?,
                offset_bytes: self.number(2)?,
                length_bytes: self.length(3)?,
            },
            "Rename" => Command::Rename { from: self.path(1)?, to: self.path(2)? },
            "Unlink" => Command::Unlink { path: self.path(1)? },
            "Deltree" => Command::Deltree { path: self.path(1)? },
            "Mkdir" => Command::Mkdir { path: self.path(1)? },
            "Rmdir" => Command::Rmdir { path: self.path(1)? },
            "QUERY_PATH_INFORMATION" => Command::QueryPath { path: self.path(1)? },
            "QUERY_FILE_INFORMATION" => Command::QueryFile { handle: handle(1)? },
            "QUERY_FS_INFORMATION" => Command::QueryFileSystem,
            "SET_FILE_INFORMATION" => Command::SetFile { handle: handle(1)? },
            "FIND_FIRST" => Command::Find { path: self.path(1)?, entries_max: self.number(3)? },
            "LockX" => Command::Lock { handle: handle(1)? },
            "UnlockX" => Command::Unlock { handle: handle(1)? },
            "Flush" => Command::Flush { handle: handle(1)? },
            "Sleep" => Command::Sleep { time: Duration::from_micros(self.number(1)?) },
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
        let load = LoadFile::parse(text.into()).unwrap();
        let operations: Vec<(usize, Operation)> = load
            .lines()
            .filter_map(|(number, line)| Some((number, interpret(line).unwrap()?)))
            .collect();
        let document = "\\clients\\client1\\A B.DOC";
        let expected = [
            Command::CreateX { path: document, options: 0x40, disposition: 2, handle: 9937 },
            Command::WriteX { handle: 9937, offset_bytes: 65534, length_bytes: 1 },
            Command::ReadX { handle: 9937, offset_bytes: 0, length_bytes: 4096, expected_bytes: 1 },
            Command::Rename { from: document, to: "\\clients\\client1\\C" },
            Command::Unlink { path: document },
            Command::Find { path: "\\clients\\client1\\*", entries_max: 1366 },
        ];
        assert_eq!(
            operations.iter().map(|(_, operation)| operation.command).collect::<Vec<_>>(),
            expected
        );
        let outcomes: Vec<bool> =
            operations.iter().map(|(_, operation)| operation.succeeds).collect();
        assert_eq!(outcomes, [true, true, true, true, false, false]);
        assert_eq!(
            (operations[1].0, operations[1].1.not_before),
            (3, Some(Duration::from_millis(125)))
        );
        assert_eq!(operations[0].1.not_before, None);
    }

    #[test]
    fn nonsense_is_refused_with_its_line() {
        for (text, part) in [
            ("", "no operations"),
            ("Close 1 NT_STATUS_OK\nDance 1 NT_STATUS_OK", "line 2"),
            ("ReadX 1 0", "missing"),
            ("Close 1", "not with a status"),
            ("ReadX 1 0 99999999999 1 NT_STATUS_OK", "too many"),
            ("Close x NT_STATUS_OK", "not a number"),
            ("Unlink \"\\clients\\..\\..\\etc\" 0x6 NT_STATUS_OK", "leaves the folder"),
        ] {
            let error = format!("{:#}", LoadFile::parse(text.into()).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }
}
