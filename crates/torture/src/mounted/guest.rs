//! The load inside a virtual machine whose power will be cut: mount, check, work until the end.
use super::journal::{Device, Mark};
use super::server::Server;
use super::workers::{Journal, Problem, check_workers, workers};
use cairn_environment::{clock, thread};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What the host waits for on the console.
pub(super) const STARTED: &str = "CAIRN-GUEST: started";
/// What the host fails at.
pub(super) const TROUBLE: &str = "CAIRN-GUEST: trouble";

/// What the load works with.
pub struct GuestOptions {
    /// Folder for the mount point.
    pub work: PathBuf,
    /// Block device with the volume.
    pub device: PathBuf,
    /// Block device for the journal.
    pub journal: PathBuf,
    /// Block device with what the workers remember: length in 8 bytes, then JSON.
    pub memory: PathBuf,
}

/// The load inside the virtual machine of `cairn torture vm`. Does not return before an error
/// comes; the host learns of it by a line on standard output.
pub fn run(options: &GuestOptions) {
    let problem = match work(options) {
        Err(problem) => problem,
        Ok(()) => "the workers ended".into(),
    };
    say(&format_args!("{TROUBLE}: {}", problem.replace('\n', " | ")));
}

/// On the console. The host notices its silence.
fn say(text: &dyn Display) {
    let mut output = io::stdout().lock();
    let _ = output.write_all(format!("{text}\n").as_bytes()).and_then(|()| output.flush());
}

fn work(arguments: &GuestOptions) -> Result<(), Problem> {
    let mut workers = workers(0);
    let memories: Vec<String> = serde_json::from_str(&read_memory(&arguments.memory)?)
        .map_err(|error| error.to_string())?;
    for ((_, worker), memory) in workers.iter_mut().zip(&memories) {
        worker.recall(memory)?;
    }
    let journal = Device::open(&arguments.journal).map_err(|error| format!("journal: {error}"))?;
    let server = Server::with_image(&arguments.work, arguments.device.clone());
    let _running = server.start(&[])?;
    journal.mark(Mark::Checking).map_err(|error| error.to_string())?;
    check_workers(&server, &mut workers)?;
    File::open(server.mountpoint())
        .and_then(|root| Ok(rustix::fs::syncfs(root)?))
        .map_err(|error| error.to_string())?;
    let mut running = Vec::new();
    let slots: Vec<_> = (0..workers.len()).map(|index| journal.slot(index)).collect();
    for ((_, worker), slot) in workers.iter().zip(&slots) {
        Journal::record(slot, &**worker).map_err(|error| error.to_string())?;
    }
    journal.mark(Mark::Started).map_err(|error| error.to_string())?;
    say(&STARTED);
    for ((name, mut worker), slot) in workers.into_iter().zip(slots) {
        let folder = server.mountpoint().join(&name);
        running.push(thread::spawn("worker", move || {
            let never = AtomicBool::new(false);
            worker.work(&folder, &never, &slot).map_err(|error| format!("{name}: {error}"))
        }));
    }
    while running.iter().all(|worker| !worker.is_finished()) {
        clock::sleep(Duration::from_millis(50));
    }
    let mut ended = running.into_iter().filter(thread::JoinHandle::is_finished);
    ended.try_for_each(|worker| worker.join().map_err(|_| "a worker panicked".to_owned())?)
}

fn read_memory(device: &Path) -> Result<String, Problem> {
    let mut file = File::open(device).map_err(|error| error.to_string())?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|error| error.to_string())?;
    let mut text = String::new();
    file.take(u64::from_le_bytes(length))
        .read_to_string(&mut text)
        .map_err(|error| error.to_string())?;
    Ok(text)
}

/// Writes what [`run`] reads.
pub(super) fn write_memory(path: &Path, memories: &[String]) -> Result<(), Problem> {
    let text = serde_json::to_string(memories).map_err(|error| error.to_string())?;
    let mut bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    bytes.resize(bytes.len().next_multiple_of(1 << 16), 0);
    fs::write(path, bytes).map_err(|error| error.to_string())
}
