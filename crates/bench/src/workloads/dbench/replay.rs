//! One client's replay of a load, with what dbench 4 does on a file system for each operation of
//! the recorded protocol, and what it does between two of them: it interprets the next line and
//! asks whether its parent lives. That is a system call and about a microsecond for each operation,
//! which belongs to the figures that dbench gives.
//!
//! A name is first resolved as a server for clients that ignore case does: a status, and when there
//! is no such file, a search of the whole directory for the name in other letters.
//!
//! Invariant: operations whose outcome differs from the recorded one end the run; dbench does the
//! same, except for opens.
use super::loadfile::{self, Command, Handle, LoadFile, Operation};
use crate::client::Client;
use crate::recorder::Recorder;
use crate::run_queue::RunQueue;
use crate::target::{Open, Target, TargetFile};
use anyhow::{Context, bail};
use cairn_environment::clock;
use rustix::process::{Pid, getppid, test_kill_process};
use std::collections::HashMap;
use std::io;
use std::time::Duration;

const OPTION_DIRECTORY: u64 = 0x1;
const DISPOSITION_CREATE: u64 = 2;
const DISPOSITION_OVERWRITE: u64 = 4;
const DISPOSITION_OVERWRITE_IF: u64 = 5;
/// How far a set-file operation turns back the two times.
const ACCESSED_BACK_SECONDS: i64 = 10;
const MODIFIED_BACK_SECONDS: i64 = 12;
/// The name that a load file has for the client's own folder.
const RECORDED_CLIENT: &str = "client1";
const NAP: Duration = Duration::from_millis(20);

struct OpenFile {
    file: Box<dyn TargetFile>,
    path: String,
}

/// One client.
pub struct Replay<'a> {
    target: &'a dyn Target,
    load: &'a LoadFile,
    folder: &'a str,
    client_name: String,
    parent: Option<Pid>,
    open: HashMap<Handle, OpenFile>,
    read_buffer: Vec<u8>,
    run_queue: Option<RunQueue>,
}

impl<'a> Replay<'a> {
    /// The client with this number, below `folder`.
    pub fn new(target: &'a dyn Target, folder: &'a str, load: &'a LoadFile, client: usize) -> Self {
        let client_name = format!("client{client}");
        Self {
            target,
            load,
            folder,
            client_name,
            parent: getppid(),
            open: HashMap::new(),
            read_buffer: Vec::new(),
            run_queue: None,
        }
    }

    /// Also records how long metadata operations take without the time in which the thread has no
    /// CPU.
    pub fn with_run_queue(self, wanted: bool) -> Self {
        Self { run_queue: if wanted { RunQueue::of_this_thread() } else { None }, ..self }
    }

    /// Replays the load from the start, until its end or until the run's.
    ///
    /// # Errors
    /// The first operation whose outcome is another one than that of the recording.
    pub fn run_once(&mut self, client: &Client, recorder: &mut Recorder) -> anyhow::Result<()> {
        let load = self.load;
        self.open.clear();
        let pass = clock::now_monotonic();
        for (number, line) in load.lines() {
            if let Some(parent) = self.parent {
                // Only asked, as dbench does; a parent that is gone ends nothing here.
                let _ = test_kill_process(parent);
            }
            if !client.goes_on() {
                break;
            }
            let Some(operation) = loadfile::interpret(line)? else { continue };
            if let Some(not_before) = operation.not_before {
                wait_while(client, || pass.elapsed() < not_before);
            }
            let queued = self.run_queue.as_ref().map(RunQueue::waited);
            let start = clock::now_monotonic();
            let (name, is_metadata) = (operation.command.name(), operation.command.is_metadata());
            let bytes = self
                .perform(operation, client)
                .with_context(|| format!("{name}, line {number}"))?;
            if let (Some(queue), Some(before), true) = (&self.run_queue, queued, is_metadata) {
                let latency = start.elapsed();
                recorder.record_running(
                    name,
                    start,
                    latency.saturating_sub(queue.waited().saturating_sub(before)),
                );
            }
            recorder.record(name, start);
            recorder.add_bytes(bytes);
            client.completed();
        }
        Ok(())
    }

    /// The client's spelling of a path.
    fn own(&self, path: &str) -> String {
        let mut own =
            String::with_capacity(self.folder.len() + path.len() + self.client_name.len());
        own.push_str(self.folder);
        for part in path.split(['\\', '/']).filter(|part| !part.is_empty()) {
            own.push('/');
            own.push_str(if part == RECORDED_CLIENT { &self.client_name } else { part });
        }
        own
    }

    /// Does what the line says; returns how many bytes were read or written.
    fn perform(&mut self, operation: Operation<'_>, client: &Client) -> anyhow::Result<u64> {
        let succeeds = operation.succeeds;
        match operation.command {
            Command::CreateX { path, options, disposition, handle } => {
                self.create(path, options, disposition, handle, succeeds)?
            }
            Command::Close { handle } => drop(
                self.open
                    .remove(&handle)
                    .with_context(|| format!("handle {handle} is not open"))?,
            ),
            Command::ReadX { handle, offset_bytes, length_bytes, expected_bytes } => {
                self.read(handle, offset_bytes, length_bytes, expected_bytes)?;
                return Ok(length_bytes as u64);
            }
            Command::WriteX { handle, offset_bytes, length_bytes } => {
                self.file(handle)?.file.write_at(&vec![0; length_bytes], offset_bytes)?;
                return Ok(length_bytes as u64);
            }
            Command::Rename { from, to } => {
                let (from, to) = (self.own(from), self.own(to));
                self.resolve(&from);
                self.resolve(&to);
                expect(self.target.rename(&from, &to), succeeds)?;
            }
            Command::Unlink { path } => {
                let path = self.resolved(path);
                expect(self.target.unlink(&path), succeeds)?;
            }
            Command::Deltree { path } => delete_files(self.target, &self.own(path))?,
            // Each client tries to make the folder of all.
            Command::Mkdir { path } => drop(self.target.make_directory(&self.resolved(path))),
            Command::Rmdir { path } => {
                let path = self.resolved(path);
                expect(self.target.remove_directory(&path), succeeds)?;
            }
            Command::QueryPath { path } => drop(self.resolved(path)),
            Command::QueryFile { handle } => drop(self.file(handle)?.file.status()?),
            Command::QueryFileSystem => drop(self.target.space_bytes()?),
            Command::SetFile { handle } => self.set_file(handle)?,
            Command::Find { path, entries_max } => self.find(path, entries_max),
            Command::Lock { handle } => self.file(handle)?.file.set_lock(true)?,
            Command::Unlock { handle } => self.file(handle)?.file.set_lock(false)?,
            Command::Flush { handle } => self.file(handle)?.file.sync()?,
            Command::Sleep { time } => {
                let start = clock::now_monotonic();
                wait_while(client, || start.elapsed() < time);
            }
        }
        Ok(0)
    }

    fn file(&self, handle: Handle) -> anyhow::Result<&OpenFile> {
        self.open.get(&handle).with_context(|| format!("handle {handle} is not open"))
    }

    /// The client's spelling of a path, looked for.
    fn resolved(&self, path: &str) -> String {
        let path = self.own(path);
        self.resolve(&path);
        path
    }

    /// Looks for a name as dbench does; what it finds has no influence.
    fn resolve(&self, path: &str) {
        if self.target.status(path).is_ok() {
            return;
        }
        let Some((directory, name)) = path.rsplit_once('/') else { return };
        // A directory that is missing has no such name either.
        let _ = self
            .target
            .list(directory, &mut |entry| !entry.name.eq_ignore_ascii_case(name.as_bytes()));
    }

    fn create(
        &mut self,
        path: &str,
        options: u64,
        disposition: u64,
        handle: Handle,
        succeeds: bool,
    ) -> anyhow::Result<()> {
        let name = self.resolved(path);
        let is_directory = options & OPTION_DIRECTORY != 0;
        if is_directory {
            // It may exist already.
            let _ = self.target.make_directory(&name);
        }
        let how = match disposition {
            _ if is_directory => Open::Directory,
            DISPOSITION_CREATE => Open::Create,
            DISPOSITION_OVERWRITE | DISPOSITION_OVERWRITE_IF => Open::Truncate,
            _ => Open::Existing,
        };
        let opened = match self.target.open(&name, how) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                self.target.open(&name, Open::Directory)
            }
            opened => opened,
        };
        match (opened, succeeds) {
            (Ok(file), true) => {
                file.status()?;
                self.open.insert(handle, OpenFile { file, path: name });
                Ok(())
            }
            (Err(error), true) => Err(error).with_context(|| format!("cannot open {name}")),
            // When it succeeds, the recording's share mode forbade it, and a file system has none.
            (_, false) => Ok(()),
        }
    }

    fn read(
        &mut self,
        handle: Handle,
        offset_bytes: u64,
        length_bytes: usize,
        expected_bytes: usize,
    ) -> anyhow::Result<()> {
        let mut buffer = std::mem::take(&mut self.read_buffer);
        buffer.resize(buffer.len().max(length_bytes), 0);
        let read = self.file(handle)?.file.read_at(&mut buffer[..length_bytes], offset_bytes);
        self.read_buffer = buffer;
        let bytes = read?;
        if bytes != expected_bytes {
            bail!("{bytes} bytes were read at {offset_bytes}, {expected_bytes} were expected");
        }
        Ok(())
    }

    fn set_file(&self, handle: Handle) -> anyhow::Result<()> {
        let open = self.file(handle)?;
        let status = open.file.status()?;
        let (accessed, modified) = (
            status.accessed_seconds - ACCESSED_BACK_SECONDS,
            status.modified_seconds - MODIFIED_BACK_SECONDS,
        );
        match self.target.set_times(&open.path, accessed, modified) {
            // Renamed or removed meanwhile; dbench doesn't look at the result.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            set => Ok(set?),
        }
    }

    fn find(&self, path: &str, entries_max: u64) {
        let path = self.resolved(path);
        let Some((directory, _)) =
            path.rsplit_once('/').filter(|_| path.contains(['<', '>', '*', '?', '"']))
        else {
            return;
        };
        let mut left = entries_max;
        // A directory that is missing has no entries.
        let _ = self.target.list(directory, &mut |_| {
            left = left.saturating_sub(1);
            left > 0
        });
    }
}

/// Removes the files below a path and leaves the directories; a missing one is fine.
fn delete_files(target: &dyn Target, path: &str) -> io::Result<()> {
    let mut names = Vec::new();
    // A directory that is missing has no entries.
    let _ = target.list(path, &mut |entry| {
        names.push(String::from_utf8_lossy(entry.name).into_owned());
        true
    });
    for name in names {
        let below = format!("{path}/{name}");
        if target.status(&below)?.is_directory {
            delete_files(target, &below)?
        } else {
            target.unlink(&below)?
        }
    }
    Ok(())
}

/// Waits in short steps, so that the end of the run ends it.
fn wait_while(client: &Client, goes_on: impl Fn() -> bool) {
    while goes_on() && client.goes_on() {
        clock::sleep(NAP);
    }
}

/// Fails when an operation that succeeded in the recording does not, or the other way round.
fn expect(result: io::Result<()>, succeeds: bool) -> anyhow::Result<()> {
    match result {
        Ok(()) if !succeeds => bail!("it succeeded, which it did not in the recording"),
        Err(error) if succeeds => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
