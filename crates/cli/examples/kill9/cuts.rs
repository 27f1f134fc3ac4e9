//! Cuts the power of a virtual machine, and looks at the disks that the cuts may have left.
//!
//! One boot: the guest mounts the volume as the last power cut left it, its workers check it and work; the host kills the machine
//! at a random moment. The disk's write log then tells what was flushed when. From it the host builds disks for several power
//! cuts: the one that happened, and others at random moments before it. Of what was not flushed at a cut, a random part is on
//! the disk, some of it torn. Each disk must pass `fsck`, mount, hold everything that was acknowledged before the cut, and pass
//! `fsck --data` afterwards. The next boot begins with one of them, as it was before its check.
use crate::journal::{self, JOURNAL_BYTES, Mark, Record};
use crate::machine::{Disks, Machine};
use crate::server::Server;
use crate::write_log::{Survivors, WriteLog};
use crate::{Named, Problem, guest, in_round, recover_and_check, workers};
use cairn_environment::clock;
use cairn_environment::random::{self, Seeded};
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const VOLUME_BYTES: u64 = 256 << 20;
/// Less would leave nothing but the writes that the log's own end hides.
const LOAD_MS_MIN: u64 = 2000;
const WRITE_LOG_BYTES: u64 = 8 << 30;

#[derive(clap::Args)]
pub struct Arguments {
    /// The `cairn` command of the host.
    #[arg(long)]
    cairn: PathBuf,
    /// Folder for disks and mount point.
    #[arg(long)]
    work: PathBuf,
    #[arg(long)]
    qemu: PathBuf,
    #[arg(long)]
    kernel: PathBuf,
    #[arg(long)]
    initramfs: PathBuf,
    /// Boots.
    #[arg(long, default_value_t = 5)]
    boots: u64,
    /// Power cuts looked at for each boot.
    #[arg(long, default_value_t = 5)]
    cuts: u64,
    /// Repeats the choices of an earlier run; the moments differ all the same.
    #[arg(long)]
    seed: Option<u64>,
    /// Longest time under load, in milliseconds.
    #[arg(long, default_value_t = 10_000)]
    load_ms_max: u64,
    /// A test of this test: the disk also loses what the last flush before the cut covered. Must fail.
    #[arg(long)]
    lying_disk: bool,
}

/// What the workers remember, in their order.
type Memories = Vec<String>;

/// What the journal says at the end of an epoch, and whether its memories are true then.
#[derive(Clone)]
struct Known {
    memories: Memories,
    mark: Option<Mark>,
}

struct Campaign<'a> {
    arguments: &'a Arguments,
    machine: Machine,
    random: Seeded,
    workers: Vec<Named>,
    memories: Memories,
    cuts: u64,
    lost_writes: u64,
}

pub fn run(arguments: &Arguments) -> Result<String, Problem> {
    let seed = arguments.seed.unwrap_or_else(random::u64);
    println!("seed {seed}");
    let machine = Machine {
        qemu: arguments.qemu.clone(),
        kernel: arguments.kernel.clone(),
        initramfs: arguments.initramfs.clone(),
        work: arguments.work.clone(),
    };
    let workers = workers(seed);
    let memories = workers.iter().map(|(_, worker)| worker.memory()).collect::<Result<_, _>>().map_err(|error| error.to_string())?;
    let mut campaign = Campaign { arguments, machine, random: Seeded::new(seed), workers, memories, cuts: 0, lost_writes: 0 };
    // A small log goes round many times, and is full now and then.
    Server::with_image(&arguments.cairn, &arguments.work, campaign.path("base")).make_volume(&format!("{VOLUME_BYTES}"), "4M")?;
    for boot in 1..=arguments.boots {
        campaign.run_boot(boot).map_err(|problem| format!("seed {seed}: {}", in_round(boot, problem)))?;
    }
    let Campaign { cuts, lost_writes, .. } = campaign;
    Ok(format!("{} boots, {cuts} power cuts with {lost_writes} writes lost or torn, nothing acknowledged was lost", arguments.boots))
}

impl Campaign<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.arguments.work.join(name)
    }

    fn run_boot(&mut self, boot: u64) -> Result<(), Problem> {
        let begin = clock::now_monotonic();
        let (disk, write_log, memory) = (self.path("disk"), self.path("write-log"), self.path("memory"));
        copy(&self.path("base"), &disk)?;
        set_length(&disk, VOLUME_BYTES + JOURNAL_BYTES)?;
        let _ = fs::remove_file(&write_log);
        set_length(&write_log, WRITE_LOG_BYTES)?;
        guest::write_memory(&memory, &self.memories)?;
        let load_ms = LOAD_MS_MIN + self.random.below(self.arguments.load_ms_max.max(1));
        let disks = Disks { volume: &disk, write_log: &write_log, memory: &memory };
        let booted = self.machine.boot_and_cut(&disks, Duration::from_millis(load_ms))?;
        let log = WriteLog::read(&write_log)?;
        let known = self.known(&log)?;
        let cuts = self.choose_cuts(&known);
        // One of them is where the next boot begins.
        let next = self.random.below(cuts.len().max(1) as u64) as usize;
        let current = self.path("current");
        copy(&self.path("base"), &current)?;
        let mut applied = 0;
        let before = self.lost_writes;
        for (index, epoch) in cuts.iter().copied().enumerate() {
            let file = open(&current)?;
            let durable = if self.arguments.lying_disk { epoch.saturating_sub(1) } else { epoch };
            for earlier in applied..durable {
                log.apply(earlier, &file, VOLUME_BYTES)?;
            }
            applied = applied.max(durable);
            self.check_cut(&log, epoch, &known[epoch], index == next)?;
        }
        println!(
            "boot {boot}: started after {:.1} s, power cut after {load_ms} ms; {} flushes; {} cuts checked, {} writes lost or torn; {:.1} s",
            booted.as_secs_f64(),
            log.epochs.len(),
            cuts.len(),
            self.lost_writes - before,
            begin.elapsed().as_secs_f64()
        );
        Ok(())
    }

    /// What the journal says at the end of each epoch.
    fn known(&self, log: &WriteLog) -> Result<Vec<Known>, Problem> {
        let mut now = Known { memories: self.memories.clone(), mark: None };
        let mut known = Vec::new();
        for epoch in &log.epochs {
            for write in epoch.iter().filter(|write| write.offset_bytes >= VOLUME_BYTES) {
                match journal::parse(&log.data(write)?)? {
                    Record::Mark(mark) => now.mark = Some(mark),
                    Record::Memory { worker, text } => *now.memories.get_mut(worker).ok_or("a record of no worker")? = text,
                }
            }
            known.push(now.clone());
        }
        Ok(known)
    }

    /// Epochs in which the power is cut: the last one, where it was cut, and others. While the workers check what they found they
    /// change it, and nobody's memory is true.
    fn choose_cuts(&mut self, known: &[Known]) -> Vec<usize> {
        let possible: Vec<usize> = (0..known.len()).filter(|epoch| known[*epoch].mark != Some(Mark::Checking)).collect();
        let mut chosen: Vec<usize> = possible.last().copied().into_iter().collect();
        while !possible.is_empty() && (chosen.len() as u64) < self.arguments.cuts.min(possible.len() as u64) {
            let epoch = possible[self.random.below(possible.len() as u64) as usize];
            if !chosen.contains(&epoch) {
                chosen.push(epoch);
            }
        }
        chosen.sort_unstable();
        chosen
    }

    fn check_cut(&mut self, log: &WriteLog, epoch: usize, known: &Known, is_next: bool) -> Result<(), Problem> {
        let survivors = match self.random.below(6) {
            0 => Survivors::Nothing,
            1 => Survivors::Everything,
            other => Survivors::Random(other.min(3)),
        };
        let image = self.path("cut");
        copy(&self.path("current"), &image)?;
        self.lost_writes += log.apply_part(epoch, &open(&image)?, VOLUME_BYTES, survivors, &mut self.random)?;
        let kept = self.path("cut-kept");
        copy(&image, &kept)?;
        for ((_, worker), memory) in self.workers.iter_mut().zip(&known.memories) {
            worker.recall(memory)?;
        }
        let server = Server::with_image(&self.arguments.cairn, &self.arguments.work, image);
        let recovery_kills = if self.random.chance(1, 4) { 1 } else { 0 };
        recover_and_check(&server, &mut self.workers, recovery_kills, &mut self.random).map_err(|problem| {
            format!("power cut in epoch {epoch} of {}, {survivors:?}: {problem}\nthe disk is {}", log.epochs.len(), kept.display())
        })?;
        self.cuts += 1;
        if is_next {
            fs::rename(&kept, self.path("base")).map_err(|error| error.to_string())?;
            self.memories.clone_from(&known.memories);
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<File, Problem> {
    OpenOptions::new().read(true).write(true).open(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn set_length(path: &Path, length_bytes: u64) -> Result<(), Problem> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    file.and_then(|file| file.set_len(length_bytes)).map_err(|error| format!("{}: {error}", path.display()))
}

/// Copies an image with its holes.
fn copy(from: &Path, to: &Path) -> Result<(), Problem> {
    let status = Command::new("cp").args(["--sparse=always", "--reflink=auto", "--"]).arg(from).arg(to).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cp {} {}: {status}", from.display(), to.display())),
        Err(error) => Err(format!("cp: {error}")),
    }
}
