//! One client's replay of a load, with what dbench does on a file system for each operation of the recorded protocol.
//!
//! A name is first resolved as a server for clients that ignore case does: a status, and when there is no such file, a
//! search of the whole directory for the name in other letters.
//!
//! Invariant: operations whose outcome differs from the recorded one end the run; dbench does the same, except for opens.
use super::loadfile::{Command, Handle, Line, LoadFile, PathIndex};
use crate::client::Client;
use crate::recorder::Recorder;
use crate::target::{Open, Target, TargetFile, remove_tree};
use anyhow::{Context, bail};
use cairn_environment::clock;
use std::collections::HashMap;
use std::io;

const OPTION_DIRECTORY: u64 = 0x1;
const DISPOSITION_CREATE: u64 = 2;
const DISPOSITION_OVERWRITE: u64 = 4;
const DISPOSITION_OVERWRITE_IF: u64 = 5;
/// How far a set-file operation turns back the two times.
const ACCESSED_BACK_SECONDS: i64 = 10;
const MODIFIED_BACK_SECONDS: i64 = 12;

struct OpenFile {
    file: Box<dyn TargetFile>,
    path: PathIndex,
}

/// One client.
pub struct Replay<'a> {
    target: &'a dyn Target,
    load: &'a LoadFile,
    /// The client's spelling of each path of the load.
    paths: Vec<String>,
    open: HashMap<Handle, OpenFile>,
    buffer: Vec<u8>,
}

fn operation_name(command: Command) -> &'static str {
    match command {
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
    }
}

impl<'a> Replay<'a> {
    /// The client with this number, below `folder`.
    pub fn new(target: &'a dyn Target, folder: &str, load: &'a LoadFile, client: usize) -> Self {
        let own = |path: &String| format!("{folder}/{}", path.replace("client1", &format!("client{client}")));
        Self { target, load, paths: load.paths.iter().map(own).collect(), open: HashMap::new(), buffer: Vec::new() }
    }

    /// Replays the load from the start, until its end or until the run's.
    ///
    /// # Errors
    /// The first operation whose outcome is another one than that of the recording.
    pub fn run_once(&mut self, client: &Client, recorder: &mut Recorder) -> anyhow::Result<()> {
        let load = self.load;
        self.open.clear();
        for line in &load.lines {
            if !client.goes_on() {
                break;
            }
            let start = clock::now_monotonic();
            let bytes = self.perform(line).with_context(|| format!("{}, line {}", operation_name(line.command), line.number))?;
            recorder.record(operation_name(line.command), start);
            recorder.add_bytes(bytes);
            client.completed();
        }
        Ok(())
    }

    /// Does what the line says; returns how many bytes were read or written.
    fn perform(&mut self, line: &Line) -> anyhow::Result<u64> {
        match line.command {
            Command::CreateX { path, options, disposition, handle } => self.create(path, options, disposition, handle, line.succeeds)?,
            Command::Close { handle } => drop(self.open.remove(&handle).with_context(|| format!("handle {handle} is not open"))?),
            Command::ReadX { handle, offset_bytes, length_bytes, expected_bytes } => {
                self.read(handle, offset_bytes, length_bytes, expected_bytes)?;
                return Ok(length_bytes as u64);
            }
            Command::WriteX { handle, offset_bytes, length_bytes } => {
                self.write(handle, offset_bytes, length_bytes)?;
                return Ok(length_bytes as u64);
            }
            Command::Rename { from, to } => expect(self.target.rename(&self.paths[from], &self.paths[to]), line)?,
            Command::Unlink { path } => {
                self.resolve(path);
                expect(self.target.unlink(&self.paths[path]), line)?;
            }
            Command::Deltree { path } => remove_tree(self.target, &self.paths[path])?,
            // Each client tries to make the folder of all.
            Command::Mkdir { path } => drop(self.target.make_directory(&self.paths[path])),
            Command::Rmdir { path } => {
                self.resolve(path);
                expect(self.target.remove_directory(&self.paths[path]), line)?;
            }
            Command::QueryPath { path } => self.resolve(path),
            Command::QueryFile { handle } => drop(self.file(handle)?.file.status()?),
            Command::QueryFileSystem => drop(self.target.space_bytes()?),
            Command::SetFile { handle } => self.set_file(handle)?,
            Command::Find { path, entries_max } => self.find(path, entries_max),
            Command::Lock { handle } => self.file(handle)?.file.set_lock(true)?,
            Command::Unlock { handle } => self.file(handle)?.file.set_lock(false)?,
            Command::Flush { handle } => self.file(handle)?.file.sync()?,
        }
        Ok(0)
    }

    fn file(&self, handle: Handle) -> anyhow::Result<&OpenFile> {
        self.open.get(&handle).with_context(|| format!("handle {handle} is not open"))
    }

    /// Looks for a name as dbench does; what it finds has no influence.
    fn resolve(&self, path: PathIndex) {
        let path = &self.paths[path];
        if self.target.status(path).is_ok() {
            return;
        }
        let Some((directory, name)) = path.rsplit_once('/') else { return };
        // A directory that is missing has no such name either.
        let _ = self.target.list(directory, &mut |entry| !entry.name.eq_ignore_ascii_case(name.as_bytes()));
    }

    fn create(&mut self, path: PathIndex, options: u64, disposition: u64, handle: Handle, succeeds: bool) -> anyhow::Result<()> {
        self.resolve(path);
        let name = &self.paths[path];
        let is_directory = options & OPTION_DIRECTORY != 0;
        if is_directory {
            // It may exist already.
            let _ = self.target.make_directory(name);
        }
        let how = match disposition {
            _ if is_directory => Open::Directory,
            DISPOSITION_CREATE => Open::Create,
            DISPOSITION_OVERWRITE | DISPOSITION_OVERWRITE_IF => Open::Truncate,
            _ => Open::Existing,
        };
        let opened = match self.target.open(name, how) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => self.target.open(name, Open::Directory),
            opened => opened,
        };
        match (opened, succeeds) {
            (Ok(file), true) => {
                file.status()?;
                self.open.insert(handle, OpenFile { file, path });
                Ok(())
            }
            (Err(error), true) => Err(error).with_context(|| format!("cannot open {name}")),
            (Err(error), false) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            // The recording's share mode forbade it, and a file system has none.
            (Ok(_), false) => Ok(()),
            (Err(error), false) => Err(error).with_context(|| format!("{name} should be missing")),
        }
    }

    fn read(&mut self, handle: Handle, offset_bytes: u64, length_bytes: usize, expected_bytes: usize) -> anyhow::Result<()> {
        self.grow_buffer(length_bytes);
        let mut buffer = std::mem::take(&mut self.buffer);
        let read = self.file(handle)?.file.read_at(&mut buffer[..length_bytes], offset_bytes);
        self.buffer = buffer;
        let bytes = read?;
        if bytes != expected_bytes {
            bail!("{bytes} bytes were read at {offset_bytes}, {expected_bytes} were expected");
        }
        Ok(())
    }

    fn write(&mut self, handle: Handle, offset_bytes: u64, length_bytes: usize) -> anyhow::Result<()> {
        self.grow_buffer(length_bytes);
        Ok(self.file(handle)?.file.write_at(&self.buffer[..length_bytes], offset_bytes)?)
    }

    fn grow_buffer(&mut self, length_bytes: usize) {
        if self.buffer.len() < length_bytes {
            self.buffer.resize(length_bytes, 0);
        }
    }

    fn set_file(&self, handle: Handle) -> anyhow::Result<()> {
        let open = self.file(handle)?;
        let status = open.file.status()?;
        let (accessed, modified) = (status.accessed_seconds - ACCESSED_BACK_SECONDS, status.modified_seconds - MODIFIED_BACK_SECONDS);
        match self.target.set_times(&self.paths[open.path], accessed, modified) {
            // Renamed or removed meanwhile; dbench doesn't look at the result.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            set => Ok(set?),
        }
    }

    fn find(&self, path: PathIndex, entries_max: u64) {
        self.resolve(path);
        let path = &self.paths[path];
        let Some((directory, _)) = path.rsplit_once('/').filter(|_| path.contains(['<', '>', '*', '?', '"'])) else { return };
        let mut left = entries_max;
        // A directory that is missing has no entries.
        let _ = self.target.list(directory, &mut |_| {
            left = left.saturating_sub(1);
            left > 0
        });
    }
}

/// Fails when an operation that succeeded in the recording does not, or the other way round.
fn expect(result: io::Result<()>, line: &Line) -> anyhow::Result<()> {
    match result {
        Ok(()) if !line.succeeds => bail!("it succeeded, which it did not in the recording"),
        Err(error) if line.succeeds => Err(error.into()),
        _ => Ok(()),
    }
}
