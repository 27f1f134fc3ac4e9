//! The virtual machine: QEMU under software emulation, with the volume on a disk whose writes
//! dm-log-writes records.
use super::guest::{STARTED, TROUBLE};
use super::server::text;
use super::session::{Halt, Session};
use super::workers::Problem;
use cairn_environment::{clock, random, thread};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How often a wait looks for a signal.
const SLICE: Duration = Duration::from_millis(100);
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

/// A machine under load.
pub struct Booted<'a> {
    machine: &'a Machine,
    powered: Powered,
    lines: mpsc::Receiver<String>,
    /// How long the load took to begin.
    pub after: Duration,
}

impl Booted<'_> {
    /// Cuts the power after `load`.
    pub fn cut_after(self, session: &Session, load: Duration) -> Result<(), Halt> {
        self.machine.wait(session, &self.lines, load, false)?;
        drop(self.powered);
        Ok(())
    }
}

impl Drop for Powered {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    /// Boots, and waits until the load runs.
    pub fn boot(&self, session: &Session, disks: &Disks<'_>) -> Result<Booted<'_>, Halt> {
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
        command.args([
            "-append",
            &format!("console=ttyS0 quiet panic=-1 rdinit=/init random.seed={}", random::u64()),
        ]);
        for (name, disk) in
            [("volume", disks.volume), ("log", disks.write_log), ("memory", disks.memory)]
        {
            command
                .arg("-drive")
                .arg(format!("if=none,id={name},format=raw,cache=unsafe,file={}", disk.display()));
            command.arg("-device").arg(format!(
                "virtio-blk-pci,drive={name},num-queues=1,queue-size={QUEUE_REQUESTS}"
            ));
        }
        let errors = File::create(self.work.join("qemu.log")).map_err(text)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors).process_group(0);
        let mut machine = Powered(
            command
                .spawn()
                .map_err(|error| Halt::Unable(format!("{}: {error}", self.qemu.display())))?,
        );
        let console =
            machine.0.stdout.take().ok_or_else(|| "the machine has no console".to_owned())?;
        let (sender, lines) = mpsc::channel();
        let mut log = File::create(self.work.join("console.log")).map_err(text)?;
        thread::spawn("console", move || {
            for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                let _ = writeln!(log, "{line}");
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        self.wait(session, &lines, BOOT_TIME_MAX, true)?;
        Ok(Booted { machine: self, powered: machine, lines, after: begin.elapsed() })
    }

    /// Listens for `time`, or until the load runs if `for_start`.
    fn wait(
        &self,
        session: &Session,
        lines: &mpsc::Receiver<String>,
        time: Duration,
        for_start: bool,
    ) -> Result<(), Halt> {
        let begin = clock::now_monotonic();
        loop {
            let left = time.saturating_sub(begin.elapsed());
            match lines.recv_timeout(left.min(SLICE)) {
                Ok(line) if line.contains(TROUBLE) => {
                    return Err(Halt::Found(format!("in the virtual machine: {line}")));
                }
                Ok(line) if for_start && line.contains(STARTED) => return Ok(()),
                Ok(_) => {}
                Err(_) if session.is_interrupted() => return Err(Halt::Interrupted),
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(RecvTimeoutError::Timeout) if !for_start => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Halt::Found(self.silent("did not report the start of its load")));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Halt::Found(self.silent("ended by itself")));
                }
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
