//! The virtual machine: QEMU under software emulation, with the volume on a disk whose writes dm-log-writes records.
use crate::guest::{STARTED, TROUBLE};
use crate::{Problem, random};
use cairn_environment::{clock, thread};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

const BOOT_TIME_MAX: Duration = Duration::from_secs(300);
/// Requests that a disk takes at once.
const QUEUE_REQUESTS: u32 = 128;
const MEMORY_MIB: u32 = 512;

/// Files that make a machine.
pub struct Machine {
    pub qemu: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// Folder for what the machine says.
    pub work: PathBuf,
}

/// Its disks.
pub struct Disks<'a> {
    pub volume: &'a Path,
    pub write_log: &'a Path,
    pub memory: &'a Path,
}

/// A machine that runs; dropped, it loses its power.
struct Powered(Child);

impl Drop for Powered {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    /// Boots, waits until the load runs, and cuts the power after `load`. Returns how long the load took to begin.
    pub fn boot_and_cut(&self, disks: &Disks<'_>, load: Duration) -> Result<Duration, Problem> {
        let begin = clock::now_monotonic();
        let mut command = Command::new(&self.qemu);
        command.args([
            "-machine",
            "q35",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-nodefaults",
            "-no-reboot",
            "-nographic",
        ]);
        command.args(["-m", &MEMORY_MIB.to_string(), "-serial", "stdio"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initramfs);
        command.args(["-append", &format!("console=ttyS0 quiet panic=-1 rdinit=/init random.seed={}", random::u64())]);
        for (name, disk) in [("volume", disks.volume), ("log", disks.write_log), ("memory", disks.memory)] {
            command.arg("-drive").arg(format!("if=none,id={name},format=raw,cache=unsafe,file={}", disk.display()));
            command.arg("-device").arg(format!("virtio-blk-pci,drive={name},num-queues=1,queue-size={QUEUE_REQUESTS}"));
        }
        let errors = File::create(self.work.join("qemu.log")).map_err(|error| error.to_string())?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let mut machine = Powered(command.spawn().map_err(|error| format!("{}: {error}", self.qemu.display()))?);
        let console = machine.0.stdout.take().ok_or("the machine has no console")?;
        let (sender, lines) = mpsc::channel();
        let mut log = File::create(self.work.join("console.log")).map_err(|error| error.to_string())?;
        thread::spawn("console", move || {
            for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                let _ = writeln!(log, "{line}");
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        self.wait(&lines, BOOT_TIME_MAX, true)?;
        let booted = begin.elapsed();
        self.wait(&lines, load, false)?;
        Ok(booted)
    }

    /// Listens for `time`, or until the load runs if `for_start`.
    fn wait(&self, lines: &mpsc::Receiver<String>, time: Duration, for_start: bool) -> Result<(), Problem> {
        let begin = clock::now_monotonic();
        loop {
            let left = time.saturating_sub(begin.elapsed());
            match lines.recv_timeout(left) {
                Ok(line) if line.contains(TROUBLE) => return Err(format!("in the virtual machine: {line}")),
                Ok(line) if for_start && line.contains(STARTED) => return Ok(()),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if !for_start => return Ok(()),
                Err(RecvTimeoutError::Timeout) => return Err(self.silent("said nothing of its load")),
                Err(RecvTimeoutError::Disconnected) => return Err(self.silent("ended by itself")),
            }
        }
    }

    fn silent(&self, what: &str) -> Problem {
        let tail = |name: &str| {
            let text = fs::read(self.work.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
        };
        format!("the virtual machine {what}:\n{}{}", tail("console.log"), tail("qemu.log"))
    }
}
