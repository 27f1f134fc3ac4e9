//! `cairn torture kill9`, `shutdown`, `sync`, `soak`, `differ`, `vm`: the arguments of the runs
//! that stop real mounts of this program. What they do lives in [`crate::mounted`], which listens
//! to signals itself: with something mounted, a second signal must clean up first.
use super::{from_one, print};
use crate::mounted::differ::run::{self as differ, DifferOptions};
use crate::mounted::guest::{self, GuestOptions};
use crate::mounted::load::{self, LoadOptions};
use crate::mounted::session::{self, SessionOptions};
use crate::mounted::soak::{self, SoakOptions};
use crate::mounted::synced::{self, SyncOptions};
use crate::mounted::vm::{self, VmOptions};
use cairn_harness::duration;
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// What all of these runs take.
#[derive(clap::Args)]
struct Common {
    /// Folder in which the images and the mount point are made, in a folder of their own [default:
    /// the one for temporary files].
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Seed that repeats the choices of an earlier run; the times still differ [default: a random
    /// one, which is printed].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Common {
    fn session(&self) -> SessionOptions {
        SessionOptions { work: self.work.clone(), seed: self.seed }
    }
}

/// The argument with mount options.
pub const MOUNT_OPTIONS: &str = "mount options";

/// How the volumes are mounted.
#[derive(clap::Args)]
struct Mounts {
    /// Options for every mount, as of `cairn mount`: transport=dev, say. The options that the run
    /// needs are added after them.
    #[arg(short = 'o', value_name = "OPTION,…", id = MOUNT_OPTIONS)]
    options: Vec<String>,
}

impl Mounts {
    fn settings(&self) -> session::Mounts {
        session::Mounts { options: self.options.clone() }
    }
}

#[derive(clap::Args)]
struct Load {
    /// Longest time under load, in milliseconds; most rounds take an eighth of it.
    #[arg(long, value_name = "MS", default_value_t = 2500, value_parser = from_one())]
    load_ms_max: u64,
    #[command(flatten)]
    mounts: Mounts,
}

impl Load {
    fn options(&self, rounds: u64, common: &Common) -> LoadOptions {
        LoadOptions {
            rounds,
            load_ms_max: self.load_ms_max,
            mounts: self.mounts.settings(),
            session: common.session(),
        }
    }
}

/// Kill the server of a real mount under load, again and again: nothing acknowledged may be
/// missing.
///
/// Twenty-four workers replace, append, overwrite, rename and remove files, write through mappings
/// and past the page cache, truncate, allocate, punch holes, set attributes, make links, snapshots
/// and forks, each with a memory of what was acknowledged; snapshots and forks of all their files
/// are made meanwhile. At a random moment the server is killed with SIGKILL, sometimes again during
/// recovery. `fsck` must accept what is left, each worker must find what it remembers, also in
/// snapshots, and `fsck --data` must find nothing at the end of each round.
#[derive(Parser)]
pub struct Kill9 {
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = from_one())]
    rounds: u64,
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    common: Common,
}

impl Kill9 {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        print(&load::kill9(&self.load.options(self.rounds, &self.common))?, self.common.json)
    }
}

/// Like kill9, but `cairn shutdown` stops the volume, with or without a flush of its log.
#[derive(Parser)]
pub struct Shutdown {
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = from_one())]
    rounds: u64,
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    common: Common,
}

impl Shutdown {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        print(&load::shutdown(&self.load.options(self.rounds, &self.common))?, self.common.json)
    }
}

/// Write without any fsync, sync, and kill the server at once: everything must be there, including
/// attributes.
///
/// The rounds use sync(2), syncfs(2) and `cairn sync` in turn; without root only the last one,
/// since the other two reach root's mounts only.
#[derive(Parser)]
pub struct Sync {
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = from_one())]
    rounds: u64,
    #[command(flatten)]
    mounts: Mounts,
    #[command(flatten)]
    common: Common,
}

impl Sync {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let options = SyncOptions {
            rounds: self.rounds,
            mounts: self.mounts.settings(),
            session: self.common.session(),
        };
        print(&synced::run(&options)?, self.common.json)
    }
}

/// Run mixed loads on one mount for hours: the server must not grow, and nothing acknowledged may
/// be missing.
///
/// The workers of kill9, loads of `cairn bench`, full volumes; in the second half of the time
/// kills, shutdowns and unmounts. The server's memory, file descriptors and threads are counted
/// after each cycle, when nothing runs. The first ten cycles only warm it up: an hour is long
/// enough to judge growth.
#[derive(Parser)]
pub struct Soak {
    /// Hours; a fraction is possible.
    #[arg(long, value_name = "N", value_parser = duration::hours, allow_negative_numbers = true)]
    hours: Duration,
    /// Time of each load, in seconds; a cycle has five.
    #[arg(
        long,
        value_name = "S",
        default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=600)
    )]
    load_seconds: u64,
    #[command(flatten)]
    mounts: Mounts,
    #[command(flatten)]
    common: Common,
}

impl Soak {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let options = SoakOptions {
            time: self.hours,
            load: Duration::from_secs(self.load_seconds),
            mounts: self.mounts.settings(),
            session: self.common.session(),
        };
        print(&soak::run(&options)?, self.common.json)
    }
}

/// Make random system calls on a mount and on another file system, side by side: after each of them
/// everything must be the same.
///
/// Results, errnos, what stat reports of every file concerned, which times changed, data, holes,
/// directories, extended attributes, locks; by root also permissions, with three users. The volumes
/// are mounted over both transports, with and without the writeback cache, in turns. In between the
/// server is killed after a sync, and the volume is unmounted. A finding comes with the calls that
/// show it, as few as possible.
#[derive(Parser)]
pub struct Differ {
    /// Begin no other run after so many calls; a run has 25,000 [default: 200000, or as many as
    /// --seconds allows].
    #[arg(long, value_name = "N", value_parser = from_one())]
    calls: Option<u64>,
    /// Begin no other run after this time.
    #[arg(long, value_name = "S", value_parser = duration::seconds, allow_negative_numbers = true)]
    seconds: Option<Duration>,
    /// Only the run with this number.
    #[arg(long, value_name = "N")]
    run: Option<u64>,
    /// Compare with this directory's file system [default: ext4 on a loop device; without root the
    /// file system of the work folder].
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,
    #[command(flatten)]
    mounts: Mounts,
    #[command(flatten)]
    common: Common,
}

impl Differ {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let options = DifferOptions {
            calls: self.calls,
            time: self.seconds,
            only_run: self.run,
            reference: self.reference.clone(),
            mounts: self.mounts.settings(),
            session: self.common.session(),
        };
        print(&differ::run(&options)?, self.common.json)
    }
}

/// Cut the power of a virtual machine under load: nothing acknowledged may be missing from any disk
/// that the power cut may leave.
///
/// In a machine under QEMU (no KVM is needed) the workers of kill9 use a volume on a disk whose
/// writes and flushes are recorded. The machine loses its power at a random moment. The run then
/// builds disks that this power cut, or an earlier one, may have left: some of the unflushed writes
/// are lost, or torn at a sector. Each disk must pass fsck, mount, and hold what was acknowledged.
///
/// The kernel needs virtio, FUSE and dm-log-writes; the initramfs must set up the disks and start
/// `cairn torture guest`. `scripts/vm-cuts` of the source tree makes both from Debian's package of
/// the cloud kernel, and runs this command.
#[derive(Parser)]
pub struct Vm {
    /// Kernel to boot.
    #[arg(long, value_name = "FILE")]
    kernel: PathBuf,
    /// Initramfs of the guest, with this program and everything that the guest needs.
    #[arg(long, value_name = "FILE")]
    initramfs: PathBuf,
    /// The emulator.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: String,
    /// Boots.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = from_one())]
    boots: u64,
    /// Power cuts to check for each boot.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = from_one())]
    cuts: u64,
    /// Longest time under load, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    load_ms_max: u64,
    /// A test of this test: the disk also loses what the last flush before the cut covered. The run
    /// must find the loss.
    #[arg(long)]
    lying_disk: bool,
    #[command(flatten)]
    common: Common,
}

impl Vm {
    /// Runs the command.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let options = VmOptions {
            kernel: self.kernel.clone(),
            initramfs: self.initramfs.clone(),
            qemu: self.qemu.clone(),
            boots: self.boots,
            cuts: self.cuts,
            load_ms_max: self.load_ms_max,
            lying_disk: self.lying_disk,
            session: self.common.session(),
        };
        print(&vm::run(&options)?, self.common.json)
    }
}

/// The load inside the virtual machine of `cairn torture vm`.
#[derive(Parser)]
pub struct Guest {
    /// Folder for the mount point.
    #[arg(long)]
    work: PathBuf,
    /// Block device with the volume.
    #[arg(long)]
    device: PathBuf,
    /// Block device for the journal.
    #[arg(long)]
    journal: PathBuf,
    /// Block device with what the workers remember: length in 8 bytes, then JSON.
    #[arg(long)]
    memory: PathBuf,
}

impl Guest {
    /// Does not return before an error comes.
    pub fn run(&self) -> ExitCode {
        guest::run(&GuestOptions {
            work: self.work.clone(),
            device: self.device.clone(),
            journal: self.journal.clone(),
            memory: self.memory.clone(),
        });
        ExitCode::FAILURE
    }
}
