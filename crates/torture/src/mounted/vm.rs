//! `cairn torture vm`: cuts the power of a virtual machine, and looks at the disks that the cuts
//! may have left.
//!
//! One boot: the guest mounts the volume as the last power cut left it, its workers check it and
//! work; the host kills the machine at a random moment. The disk's write log then shows what was
//! flushed when. From it the host builds disks for several power cuts: the one that happened, and
//! others at random moments before it. Of what was not flushed at a cut, a random part is on the
//! disk, some of it torn. Each disk must pass `fsck`, mount, hold everything that was acknowledged
//! before the cut, and pass `fsck --data` afterwards. The next boot begins with one of them, as it
//! was before its check.
use super::guest;
use super::journal::{self, JOURNAL_BYTES, Mark, Record};
use super::load::recover_and_check;
use super::machine::{Disks, Machine};
use super::recovery::RecoveryKills;
use super::server::{Server, text};
use super::session::{self, Halt, Length, Plan, Session, SessionOptions, SessionReport};
use super::workers::{Named, Problem, workers};
use super::write_log::{Survivors, WriteLog};
use crate::run_report::RunReport;
use anyhow::{Context, ensure};
use cairn_environment::clock;
use cairn_environment::random::Seeded;
use cairn_harness::process::{find_program, output_of};
use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const VOLUME_BYTES: u64 = 256 << 20;
/// Less would leave nothing but the writes that the log's own end hides.
const LOAD_MS_MIN: u64 = 2000;
const WRITE_LOG_BYTES: u64 = 8 << 30;
/// What the sparse disks take of that, as measured.
const NEEDS_BYTES: u64 = 3 << 30;

/// The machine, and how often its power is cut.
///
/// The kernel needs virtio, FUSE and dm-log-writes; the initramfs must set up the disks and start
/// `cairn torture guest`.
pub struct VmOptions {
    /// Kernel to boot.
    pub kernel: PathBuf,
    /// Its first file system, with this program and all that the guest needs.
    pub initramfs: PathBuf,
    /// The emulator.
    pub qemu: String,
    /// Boots.
    pub boots: u64,
    /// Power cuts looked at for each boot.
    pub cuts: u64,
    /// Longest time under load, in milliseconds.
    pub load_ms_max: u64,
    /// A test of this test: the disk also loses what the last flush before the cut covered.
    pub lying_disk: bool,
    /// Folder and seed.
    pub session: SessionOptions,
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
    arguments: &'a VmOptions,
    session: &'a mut Session,
    machine: Machine,
    random: Seeded,
    kills: RecoveryKills,
    workers: Vec<Named>,
    memories: Memories,
    cuts: u64,
    lost_writes: u64,
}

/// Runs it.
///
/// # Errors
/// When this machine cannot run it.
pub fn run(options: &VmOptions) -> anyhow::Result<RunReport<SessionReport>> {
    let qemu = find_program(&options.qemu, &std::env::var("PATH").unwrap_or_default());
    let qemu = qemu.with_context(|| {
        format!("{} is not installed; Debian's package is qemu-system-x86", options.qemu)
    })?;
    for file in [&options.kernel, &options.initramfs] {
        File::open(file).with_context(|| file.display().to_string())?;
    }
    // QEMU takes a comma for the end of a name.
    let work = options.session.work.clone().unwrap_or_default();
    ensure!(
        !work.to_string_lossy().contains(','),
        "--work {}: QEMU cannot use a name with a comma",
        work.display()
    );
    let lying = if options.lying_disk { " --lying-disk" } else { "" };
    let (kernel, initramfs) = (options.kernel.display(), options.initramfs.display());
    let plan = Plan {
        command: format!(
            "vm --boots {} --cuts {} --kernel {kernel} --initramfs {initramfs}{lying}",
            options.boots, options.cuts
        ),
        length: Length::Rounds(options.boots),
        needs_bytes: NEEDS_BYTES,
        verdict: "Nothing acknowledged was lost.",
        evidence: &["cut-kept", "cut.log", "console.log", "qemu.log"],
    };
    session::run(&plan, &options.session, |session| run_boots(options, session, qemu))
}

fn run_boots(arguments: &VmOptions, session: &mut Session, qemu: PathBuf) -> Result<(), Halt> {
    let work = session.folder().to_owned();
    let machine = Machine {
        qemu,
        kernel: arguments.kernel.clone(),
        initramfs: arguments.initramfs.clone(),
        work: work.clone(),
    };
    let workers = workers(session.seed);
    let memories = workers
        .iter()
        .map(|(_, worker)| worker.memory())
        .collect::<Result<_, _>>()
        .map_err(text)?;
    let random = Seeded::new(session.seed);
    // A small log goes round many times, and is full now and then.
    session.make_volume(
        &Server::with_image(&work, work.join("base")),
        &VOLUME_BYTES.to_string(),
        "4M",
    )?;
    session.set("boots", 0, "each with a power cut under load");
    let mut campaign = Campaign {
        arguments,
        session,
        machine,
        random,
        kills: RecoveryKills::new(),
        workers,
        memories,
        cuts: 0,
        lost_writes: 0,
    };
    (1..=arguments.boots).try_for_each(|boot| {
        campaign.run_boot(boot).map_err(|halt| halt.within(&format!("boot {boot}")))
    })
}

impl Campaign<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.session.folder().join(name)
    }

    fn run_boot(&mut self, boot: u64) -> Result<(), Halt> {
        let begin = clock::now_monotonic();
        let load_ms = LOAD_MS_MIN + self.random.below(self.arguments.load_ms_max.max(1));
        let booted = self.boot_and_cut(boot, Duration::from_millis(load_ms))?;
        let log = WriteLog::read(&self.path("write-log"))?;
        let known = self.known(&log)?;
        let cuts = self.choose_cuts(&known);
        let before = self.lost_writes;
        self.check_cuts(&log, &known, &cuts)?;
        self.session.set("boots", boot, "");
        let told = format!(
            "started after {:.1} s, power cut after {load_ms} ms; {} flushes; {} cuts checked, {} \
             writes lost or torn; {:.1} s",
            booted.as_secs_f64(),
            log.epochs.len(),
            cuts.len(),
            self.lost_writes - before,
            begin.elapsed().as_secs_f64()
        );
        self.session.tell_round(boot, &told);
        Ok(())
    }

    /// Runs the machine on the volume that the last boot left. Returns how long the load took to
    /// begin.
    fn boot_and_cut(&self, boot: u64, load: Duration) -> Result<Duration, Halt> {
        let (disk, write_log, memory) =
            (self.path("disk"), self.path("write-log"), self.path("memory"));
        copy(&self.path("base"), &disk)?;
        set_length(&disk, VOLUME_BYTES + JOURNAL_BYTES)?;
        let _ = fs::remove_file(&write_log);
        set_length(&write_log, WRITE_LOG_BYTES)?;
        guest::write_memory(&memory, &self.memories)?;
        let disks = Disks { volume: &disk, write_log: &write_log, memory: &memory };
        // The first boot has a new volume: when it fails, so does the machine.
        let booted = self
            .machine
            .boot(self.session, &disks)
            .map_err(|halt| if boot == 1 { halt.unable() } else { halt })?;
        let after = booted.after;
        booted.cut_after(self.session, load)?;
        Ok(after)
    }

    fn check_cuts(&mut self, log: &WriteLog, known: &[Known], cuts: &[usize]) -> Result<(), Halt> {
        // One of them is where the next boot begins.
        let next = self.random.below(cuts.len().max(1) as u64) as usize;
        let current = self.path("current");
        copy(&self.path("base"), &current)?;
        let mut applied = 0;
        for (index, epoch) in cuts.iter().copied().enumerate() {
            if self.session.is_interrupted() {
                return Err(Halt::Interrupted);
            }
            let file = open(&current)?;
            let durable = if self.arguments.lying_disk { epoch.saturating_sub(1) } else { epoch };
            for earlier in applied..durable {
                log.apply(earlier, &file, VOLUME_BYTES)?;
            }
            applied = applied.max(durable);
            self.check_cut(log, epoch, &known[epoch], index == next)?;
            self.session.set(
                "power_cuts",
                self.cuts,
                "looked at: the one that was, and others before it",
            );
            self.session.set(
                "writes_lost",
                self.lost_writes,
                "or torn, of those that no flush covered",
            );
        }
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
                    Record::Memory { worker, text } => {
                        *now.memories.get_mut(worker).ok_or("a record of no worker")? = text
                    }
                }
            }
            known.push(now.clone());
        }
        Ok(known)
    }

    /// Epochs in which the power is cut: the last one, where it was cut, and others. While the
    /// workers check what they found they change it, and the memory of none is true.
    fn choose_cuts(&mut self, known: &[Known]) -> Vec<usize> {
        let possible: Vec<usize> =
            (0..known.len()).filter(|epoch| known[*epoch].mark != Some(Mark::Checking)).collect();
        let mut chosen: Vec<usize> = possible.last().copied().into_iter().collect();
        while !possible.is_empty()
            && (chosen.len() as u64) < self.arguments.cuts.min(possible.len() as u64)
        {
            let epoch = possible[self.random.below(possible.len() as u64) as usize];
            if !chosen.contains(&epoch) {
                chosen.push(epoch);
            }
        }
        chosen.sort_unstable();
        chosen
    }

    fn check_cut(
        &mut self,
        log: &WriteLog,
        epoch: usize,
        known: &Known,
        is_next: bool,
    ) -> Result<(), Problem> {
        let survivors = match self.random.below(6) {
            0 => Survivors::Nothing,
            1 => Survivors::Everything,
            other => Survivors::Random(other.min(3)),
        };
        let image = self.path("cut");
        copy(&self.path("current"), &image)?;
        self.lost_writes +=
            log.apply_part(epoch, &open(&image)?, VOLUME_BYTES, survivors, &mut self.random)?;
        let kept = self.path("cut-kept");
        copy(&image, &kept)?;
        for ((_, worker), memory) in self.workers.iter_mut().zip(&known.memories) {
            worker.recall(memory)?;
        }
        let server = Server::with_image(self.session.folder(), image);
        let recovery_kills = if self.random.chance(1, 4) { 1 } else { 0 };
        let kills = (recovery_kills, &mut self.random);
        recover_and_check(&server, &mut self.workers, &mut self.kills, kills).map_err(
            |problem| {
                format!(
                    "power cut in epoch {epoch} of {}, {survivors}: {problem}",
                    log.epochs.len()
                )
            },
        )?;
        self.cuts += 1;
        if is_next {
            fs::rename(&kept, self.path("base")).map_err(|error| error.to_string())?;
            self.memories.clone_from(&known.memories);
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<File, Problem> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn set_length(path: &Path, length_bytes: u64) -> Result<(), Problem> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    file.and_then(|file| file.set_len(length_bytes))
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// Copies an image with its holes.
fn copy(from: &Path, to: &Path) -> Result<(), Problem> {
    let mut command = Command::new("cp");
    command
        .args(["--sparse=always", "--reflink=auto", "--"])
        .arg(from)
        .arg(to)
        .stdin(Stdio::null())
        .process_group(0);
    match output_of(&mut command) {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let told = String::from_utf8_lossy(&output.stderr);
            Err(format!("cp {} {}: {}: {told}", from.display(), to.display(), output.status))
        }
        Err(error) => Err(format!("cp: {error}")),
    }
}
