//! `cairn mount`: serves a volume at a directory.
//!
//! States: the command checks what it can by itself, makes the volume if asked to, and starts the
//! server (`daemon`); the server opens the volume, mounts it, announces the mount, serves requests
//! until the mount ends, and closes the volume. SIGTERM and SIGINT end the mount, and with it the
//! server (`mount_end`).
use crate::commands::info;
use crate::create::NewVolume;
use crate::create_composed;
use crate::image::{self, Image};
use crate::mount_end::{self, EndOnSignal};
use crate::mount_options::{self, MountSettings};
use crate::{daemon, logging, memory, mount_error};
use anyhow::{Context, ensure};
use cairn_blockdev::{BlockDevice, OpenMode};
use cairn_engine::{RecoveryProgress, Volume, VolumeOptions};
use cairn_environment::clock;
use cairn_format::Superblock;
use cairn_fuse::{MountInfo, MountOptions};
use cairn_harness::progress::ProgressBar;
use cairn_harness::{Size, console};
use rustix::io::Errno;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Between two messages about a recovery that takes long.
const RECOVERY_MESSAGE_INTERVAL: Duration = Duration::from_secs(1);

/// Mount a volume at a directory; returns when the mount answers.
#[derive(clap::Args)]
#[command(after_help = format!("Mount options:\n{}\n{}", MountSettings::help(), signals_help()))]
pub struct Arguments {
    /// Image file or block device; or several: mirror:A,B, concat:A,B.
    image: Image,
    /// Directory that will show the volume.
    dir: PathBuf,
    /// Mount options, separated by commas.
    #[arg(short = 'o', value_name = "OPTION,…", value_parser = mount_options::checked)]
    options: Vec<String>,
    /// First make a volume of this size, if the image does not exist or is empty.
    #[arg(long, value_name = "SIZE")]
    create: Option<Size>,
    /// Run the server in this process, and return when the mount ends.
    #[arg(long)]
    foreground: bool,
    /// Append the server's messages to this file [default: the system's log (syslog, journal);
    /// standard error with --foreground].
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Socket of the system's log.
    #[arg(long, value_name = "SOCKET", default_value = logging::SYSTEM_LOG_SOCKET)]
    log_socket: PathBuf,
    /// Serve, and announce on standard output that the mount stands.
    #[arg(long, hide = true)]
    serve: bool,
}

fn signals_help() -> String {
    let seconds = mount_end::STOP_AFTER.as_secs();
    format!(
        "SIGTERM and SIGINT unmount the volume. If the mount is in use, the server serves it for up to {seconds} s more, or until another \
         signal. Then the server makes everything durable and ends. The mount stays in place and returns errors until `cairn umount DIR` \
         removes it."
    )
}

impl Arguments {
    /// Whether the directory shows this image already, and answers.
    ///
    /// # Errors
    /// The image does not exist, or the list of mounts can't be read.
    pub fn is_mounted(&self) -> anyhow::Result<bool> {
        let Some(mount) = cairn_fuse::find_mount(&self.dir)?.filter(MountInfo::may_be_cairn) else {
            return Ok(false);
        };
        let image = self.image.absolute()?;
        let is_same = image::same_file(&mount.source, image.mount_source())
            || mount.source.as_os_str() == image.argument();
        Ok(is_same && fs::metadata(&self.dir).is_ok())
    }
}

/// Runs the command.
///
/// # Errors
/// When the volume is not mounted, or, for a server, when the volume could not be closed as it
/// should.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut settings = MountSettings::parse(&arguments.options).map_err(anyhow::Error::msg)?;
    if arguments.serve || arguments.foreground {
        return serve(arguments, &mut settings);
    }
    check_mountpoint(&arguments.dir)?;
    let created = Created::for_mount(arguments)?;
    let code = daemon::start(&server_arguments(arguments)?)?;
    if code == ExitCode::SUCCESS {
        created.keep();
        // Waits until the server has answered.
        fs::metadata(&arguments.dir)
            .with_context(|| format!("{}: the mount does not answer", arguments.dir.display()))?;
    }
    Ok(code)
}

fn check_mountpoint(directory: &Path) -> anyhow::Result<()> {
    let metadata = match fs::metadata(directory) {
        Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
            return Err(mount_error::server_has_ended(directory, Errno::NOTCONN));
        }
        other => other.with_context(|| format!("mount point {}", directory.display()))?,
    };
    ensure!(metadata.is_dir(), "mount point {} is not a directory", directory.display());
    Ok(())
}

/// A volume that was made to be mounted, and the files that were made for it. They are removed if
/// it is not, unless another mount has used it since.
struct Created<'a> {
    image: &'a Image,
    made: Option<(Superblock, Vec<PathBuf>)>,
}

impl<'a> Created<'a> {
    /// An existing volume is left as it is: the same command line starts a volume's life, and
    /// continues it.
    fn for_mount(arguments: &'a Arguments) -> anyhow::Result<Self> {
        let image = &arguments.image;
        let nothing = Self { image, made: None };
        let Some(size) = arguments.create else { return Ok(nothing) };
        if create_composed::holds_volume(image)? {
            return Ok(nothing);
        }
        // Without a member that was there, nothing is left of what was made.
        let missing = match image.paths().iter().any(|path| path.exists()) {
            true => Vec::new(),
            false => image.paths().to_vec(),
        };
        let size = image.paths().iter().all(|path| !is_block_device(path)).then_some(size);
        let wanted = NewVolume { size, ..NewVolume::default() };
        let superblock = create_composed::create(image, &wanted)?;
        Ok(Self { image, made: Some((superblock, missing)) })
    }

    /// The volume is mounted.
    fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        let Some((made, files)) = &self.made else { return };
        // Another mount that has it open keeps it from being opened. One that was killed leaves it
        // unclean, and one that has put something into it has taken numbers. What fails here is
        // not the error that counts.
        let Ok(device) = self.image.open(OpenMode::ReadWrite, false) else { return };
        let is_as_made = info::newest_on(&*device).is_ok_and(|found| {
            let numbers =
                |volume: &Superblock| (volume.volume, volume.next_inode, volume.next_tree);
            found.clean && numbers(&found) == numbers(made)
        });
        if is_as_made {
            files.iter().for_each(|path| drop(fs::remove_file(path)));
        }
    }
}

fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.is_file())
}

/// The command line of the server: the same mount, with paths that don't depend on the current
/// directory.
fn server_arguments(arguments: &Arguments) -> anyhow::Result<Vec<OsString>> {
    let mut list: Vec<OsString> = vec!["mount".into(), "--serve".into()];
    for options in &arguments.options {
        list.extend(["-o".into(), options.into()]);
    }
    if let Some(log) = &arguments.log {
        list.extend(["--log".into(), std::path::absolute(log)?.into()]);
    }
    list.extend(["--log-socket".into(), std::path::absolute(&arguments.log_socket)?.into()]);
    list.push("--".into());
    list.push(arguments.image.absolute()?.argument());
    list.push(fs::canonicalize(&arguments.dir)?.into());
    Ok(list)
}

fn serve(arguments: &Arguments, settings: &mut MountSettings) -> anyhow::Result<ExitCode> {
    check_mountpoint(&arguments.dir)?;
    let created = Created::for_mount(arguments)?;
    let image = arguments.image.absolute()?;
    let log = arguments.log.as_deref().map(logging::open).transpose()?;
    if let (Some(log), false) = (&log, arguments.serve) {
        rustix::stdio::dup2_stderr(log)?;
    }
    logging::start();
    daemon::raise_open_files_limit();
    memory::keep_out_of_reclaim();
    let nowhere = daemon::Nowhere::open()?;
    let signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    let volume = open_volume(&image, settings)?;
    let options = MountOptions { shown: Some(image.shown()), ..settings.mount.clone() };
    let session =
        match cairn_fuse::mount(volume.clone(), image.mount_source(), &arguments.dir, &options) {
            Ok(session) => session,
            Err(error) => {
                // The error that counts is the one at hand; nothing has changed.
                let _ = volume.close();
                return Err(mount_error::explain(error));
            }
        };
    created.keep();
    let ender = session.ender();
    let interrupted = EndOnSignal::start(signals, ender.clone(), arguments.dir.clone());
    if arguments.serve {
        // A mount without a server must not stay behind.
        daemon::detach(log, &arguments.log_socket, &nowhere)
            .inspect_err(|_| drop(ender.unmount()))?;
    }
    // Not earlier: until now standard error is the user's.
    let transport = if session.is_over_ring() { "uring" } else { "dev" };
    tracing::info!(image = %image, mountpoint = %arguments.dir.display(), transport, "mounted");
    let served = session.run();
    match &served {
        Ok(()) => tracing::info!("unmounted; everything is durable"),
        Err(error) => tracing::error!("{error}"),
    }
    served.with_context(|| image.to_string())?;
    Ok(interrupted.exit_code())
}

/// Where the disk that holds the image has no room for what a mount must write, the volume is
/// opened for reading, and `settings` say so.
fn open_volume(image: &Image, settings: &mut MountSettings) -> anyhow::Result<Volume> {
    let read_only = settings.mount.read_only;
    let mode = if read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let device = image.open(mode, settings.degraded)?;
    let mut options = VolumeOptions { read_only, ..settings.volume.clone() };
    memory::share(
        &mut options,
        memory::available_bytes(),
        settings.data_cache.map(|size| size.bytes),
    );
    let volume = match open_with_progress(Arc::clone(&device), options.clone()) {
        Err(cairn_engine::Error::StorageFull(_)) if !read_only => {
            console::tell(&format_args!(
                "cairn: warning: {image}: the disk that holds it is full, so the volume is mounted read-only; free space on that disk, \
                 then unmount the volume and mount it again"
            ));
            settings.mount.read_only = true;
            open_with_progress(device, VolumeOptions { read_only: true, ..options })
        }
        opened => opened,
    };
    let volume = volume.map_err(|error| mount_error::of_volume(error, image, None))?;
    // A volume whose root directory can't be read would be a mount that doesn't answer.
    volume
        .attributes(volume.root())
        .map_err(|error| mount_error::of_volume(error, image, Some("the root directory")))?;
    Ok(volume)
}

/// Long recoveries show on a terminal how far they are, and elsewhere leave a message every second.
fn open_with_progress(
    device: Arc<dyn BlockDevice>,
    options: VolumeOptions,
) -> Result<Volume, cairn_engine::Error> {
    let mut bar: Option<ProgressBar> = None;
    let (mut shown, mut reported) = ("", clock::now_monotonic());
    Volume::open_reporting(device, options, &mut |progress| {
        let RecoveryProgress { phase, done, total } = progress;
        let bar = bar.get_or_insert_with(|| ProgressBar::items(phase, total));
        if shown != phase {
            shown = phase;
            bar.restart(phase, total);
        }
        bar.set(done);
        if bar.is_hidden() && reported.elapsed() >= RECOVERY_MESSAGE_INTERVAL {
            reported = clock::now_monotonic();
            tracing::info!("recovery: {phase}, {done} of {total}");
        }
    })
}
