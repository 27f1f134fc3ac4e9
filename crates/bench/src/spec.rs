//! What `--target` says, and how it becomes a target.
//!
//! `DIR` is a directory; `engine:IMAGE`, `engine:memory` and `engine:simulated` run the engine in
//! this process on an image file or block device, on memory, and on memory whose flushes take a
//! given time; `engine:disk` on a simple disk, whose reads take time as well and where nothing else
//! is served during a flush. Options follow a second colon: `engine:simulated:flush_ms=10,size=4G`.
use crate::engine_settings::EngineSettings;
use crate::engine_target::EngineTarget;
use crate::posix_target::PosixTarget;
use crate::simulated_disk::SimulatedDisk;
use crate::target::Target;
use anyhow::{Context, bail, ensure};
use cairn_blockdev::{
    BlockDevice, DeviceError, FileDevice, MemoryDevice, OpenMode, Operation, SimulatedDevice,
    forward_to_device,
};
use cairn_engine::mkfs::{MkfsOptions, mkfs};
use cairn_engine::{FlushPolicy, Volume};
use cairn_harness::Size;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

const SIZE_BYTES_DEFAULT: u64 = 4 << 30;

/// The device under an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DeviceSpec {
    /// An image file or a block device with a volume; where there is none, an image of this size
    /// for one run.
    Image { path: PathBuf, size_bytes: u64 },
    /// Memory.
    Memory { size_bytes: u64 },
    /// Memory whose flush takes a time, and each discard.
    Simulated { size_bytes: u64, flush_time: Duration, discard_time: Duration },
    /// A simple disk that serves one request at a time.
    Disk { size_bytes: u64, read_time: Duration, flush_time: Duration },
}

/// What a load runs against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetSpec {
    /// A directory.
    Directory(PathBuf),
    /// The engine in this process.
    Engine(DeviceSpec),
}

/// Whether flushes reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushMode {
    /// They do.
    Real,
    /// They return at once: nothing is safe, for measuring what flushes cost.
    None,
}

fn parse_milliseconds(name: &str, value: &str) -> Result<Duration, String> {
    let milliseconds: f64 = value
        .parse()
        .map_err(|_| format!("\"{value}\" is not a time; write for example {name}=10"))?;
    Duration::try_from_secs_f64(milliseconds / 1e3)
        .map_err(|error| format!("{name}={value}: {error}"))
}

impl FromStr for TargetSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("engine:") else {
            return Ok(TargetSpec::Directory(text.into()));
        };
        let (name, options) = rest.split_once(':').unwrap_or((rest, ""));
        let mut size_bytes = SIZE_BYTES_DEFAULT;
        let (mut flush_time, mut read_time, mut discard_time) =
            (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        for option in options.split(',').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("size", value)) => {
                    let size: Size = value.parse().map_err(|why| format!("size: {why}"))?;
                    size_bytes = size.bytes;
                }
                Some(("flush_ms", value)) if name == "simulated" || name == "disk" => {
                    flush_time = parse_milliseconds("flush_ms", value)?
                }
                Some(("discard_ms", value)) if name == "simulated" => {
                    discard_time = parse_milliseconds("discard_ms", value)?
                }
                Some(("read_ms", value)) if name == "disk" => {
                    read_time = parse_milliseconds("read_ms", value)?
                }
                _ => {
                    return Err(format!(
                        "\"{option}\" is not an option of engine:{name}; there are size=4G, for \
                         engine:simulated and engine:disk \
                         flush_ms=10, for the one discard_ms=0.02, for the other read_ms=0.5"
                    ));
                }
            }
        }
        size_bytes -= size_bytes % cairn_blockdev::BLOCK_BYTES as u64;
        Ok(TargetSpec::Engine(match name {
            "" => {
                return Err(
                    "engine: lacks the name of an image; write engine:IMAGE, engine:memory \
                    or engine:simulated:flush_ms=10"
                        .into(),
                );
            }
            "memory" => DeviceSpec::Memory { size_bytes },
            "simulated" => DeviceSpec::Simulated { size_bytes, flush_time, discard_time },
            "disk" => DeviceSpec::Disk { size_bytes, read_time, flush_time },
            path => DeviceSpec::Image { path: path.into(), size_bytes },
        }))
    }
}

impl DeviceSpec {
    /// Size of a new device.
    pub fn size_bytes(&self) -> u64 {
        match self {
            DeviceSpec::Image { size_bytes, .. }
            | DeviceSpec::Memory { size_bytes }
            | DeviceSpec::Simulated { size_bytes, .. }
            | DeviceSpec::Disk { size_bytes, .. } => *size_bytes,
        }
    }

    /// Opens the device, and says whether it is new, without a volume. An image that is made has no
    /// name from the beginning, so that nothing is left of it, however the run ends.
    ///
    /// # Errors
    /// When it can't be opened or made.
    pub fn open(&self) -> anyhow::Result<(Arc<dyn BlockDevice>, bool)> {
        Ok(match self {
            DeviceSpec::Memory { size_bytes } => (Arc::new(MemoryDevice::new(*size_bytes)), true),
            DeviceSpec::Simulated { size_bytes, flush_time, discard_time } => {
                let device = SimulatedDevice::new(*size_bytes);
                device.set_flush_time(*flush_time);
                device.set_delay(Operation::Discard, *discard_time);
                (Arc::new(device), true)
            }
            DeviceSpec::Disk { size_bytes, read_time, flush_time } => {
                (Arc::new(SimulatedDisk::new(*size_bytes, *read_time, *flush_time)), true)
            }
            DeviceSpec::Image { path, .. } if path.exists() => {
                (Arc::new(FileDevice::open(path, OpenMode::ReadWrite)?), false)
            }
            DeviceSpec::Image { path, size_bytes } => {
                (Arc::new(nameless(path, *size_bytes)?), true)
            }
        })
    }
}

impl TargetSpec {
    /// Whether nothing of it is left after a run, so that nothing has to be removed: on a full
    /// volume that takes long, or fails.
    pub(crate) fn vanishes(&self) -> bool {
        matches!(
            self,
            TargetSpec::Engine(
                DeviceSpec::Memory { .. } | DeviceSpec::Simulated { .. } | DeviceSpec::Disk { .. }
            )
        )
    }

    /// The folder that it lies in, where it lies in one.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match self {
            TargetSpec::Directory(path) => Some(path),
            TargetSpec::Engine(DeviceSpec::Image { path, .. }) => path.parent(),
            TargetSpec::Engine(_) => None,
        }
    }

    /// The name that reports give to it.
    pub fn name(&self) -> String {
        match self {
            TargetSpec::Directory(path) => path.display().to_string(),
            TargetSpec::Engine(DeviceSpec::Memory { .. }) => "engine on memory".into(),
            TargetSpec::Engine(DeviceSpec::Simulated { flush_time, .. }) => {
                format!("engine on memory, flush {flush_time:?}")
            }
            TargetSpec::Engine(DeviceSpec::Disk { read_time, flush_time, .. }) => {
                format!("engine on a disk, read {read_time:?}, flush {flush_time:?}")
            }
            TargetSpec::Engine(DeviceSpec::Image { path, .. }) => {
                format!("engine on {}", path.display())
            }
        }
    }

    /// Opens the target; a missing image is made, and goes away with the target.
    ///
    /// # Errors
    /// When it is no directory or no volume, or can't be made.
    pub fn open(
        &self,
        policy: FlushPolicy,
        flushes: FlushMode,
        engine: &EngineSettings,
    ) -> anyhow::Result<Arc<dyn Target>> {
        match self {
            TargetSpec::Directory(path) => {
                ensure!(
                    flushes == FlushMode::Real,
                    "the flushes of a mounted file system cannot be turned off here"
                );
                let opened = PosixTarget::new(path);
                Ok(Arc::new(opened.with_context(|| {
                    format!("target {}: name a directory, or engine:IMAGE", path.display())
                })?))
            }
            TargetSpec::Engine(spec) => self.open_engine(spec, policy, flushes, engine),
        }
    }

    fn open_engine(
        &self,
        spec: &DeviceSpec,
        policy: FlushPolicy,
        flushes: FlushMode,
        engine: &EngineSettings,
    ) -> anyhow::Result<Arc<dyn Target>> {
        let (device, is_new) = spec.open()?;
        let volume = self.open_volume(device, is_new, policy, flushes, engine)?;
        Ok(Arc::new(EngineTarget::new(volume)))
    }

    /// The volume on a device, which is made on a new one.
    ///
    /// # Errors
    /// When it can't be made or opened.
    pub(crate) fn open_volume(
        &self,
        device: Arc<dyn BlockDevice>,
        is_new: bool,
        policy: FlushPolicy,
        flushes: FlushMode,
        engine: &EngineSettings,
    ) -> anyhow::Result<Volume> {
        if is_new {
            mkfs(&*device, &MkfsOptions::default())
                .with_context(|| format!("target {}", self.name()))?;
        }
        let device: Arc<dyn BlockDevice> = match flushes {
            FlushMode::Real => device,
            FlushMode::None => Arc::new(WithoutFlush { device }),
        };
        Volume::open(device, engine.volume_options(policy))
            .with_context(|| format!("target {}", self.name()))
    }

    /// A scratch device that shows what is under the target: beside the image, in the directory, or
    /// a new one in memory.
    ///
    /// # Errors
    /// When there is no place for a scratch file.
    pub fn scratch_device(&self, size_bytes: u64) -> anyhow::Result<Arc<dyn BlockDevice>> {
        let folder = match self {
            TargetSpec::Directory(path) => path.clone(),
            TargetSpec::Engine(DeviceSpec::Image { path, .. }) => {
                if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
                    bail!(
                        "{} is a device with a volume, which this would overwrite; name a \
                         directory on it",
                        path.display()
                    );
                }
                path.parent()
                    .filter(|parent| !parent.as_os_str().is_empty())
                    .unwrap_or(Path::new("."))
                    .to_path_buf()
            }
            TargetSpec::Engine(spec) => return Ok(spec.open()?.0),
        };
        let path =
            folder.join(format!("cairn-bench-{:016x}.scratch", cairn_environment::random::u64()));
        let device =
            nameless(&path, size_bytes).with_context(|| format!("target {}", self.name()))?;
        device.preallocate_and_zero(0, size_bytes)?;
        Ok(Arc::new(device))
    }
}

/// A new file for a moment, which goes away with the last use of it.
fn nameless(path: &Path, size_bytes: u64) -> anyhow::Result<FileDevice> {
    let device = FileDevice::create(path, size_bytes)?;
    std::fs::remove_file(path).with_context(|| format!("{} cannot be removed", path.display()))?;
    Ok(device)
}

/// Another device, whose flushes return at once.
struct WithoutFlush {
    device: Arc<dyn BlockDevice>,
}

impl BlockDevice for WithoutFlush {
    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }

    forward_to_device!(self => self.device;
        read, write, write_set, write_set_while, discard, length_bytes, copies, read_copy,
        repair, resynchronise, close, health, observe, note_damage);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::{DeviceHealth, SetWrite};
    use cairn_environment::Rank;
    use cairn_environment::lock::Mutex;
    use std::ops::Range;

    #[test]
    fn targets_are_understood() {
        let parse = |text: &str| text.parse::<TargetSpec>().unwrap();
        assert_eq!(parse("/mnt/x"), TargetSpec::Directory("/mnt/x".into()));
        assert_eq!(
            parse("engine:memory"),
            TargetSpec::Engine(DeviceSpec::Memory { size_bytes: 4 << 30 })
        );
        let simulated = DeviceSpec::Simulated {
            size_bytes: 1 << 30,
            flush_time: Duration::from_millis(10),
            discard_time: Duration::from_micros(20),
        };
        assert_eq!(
            parse("engine:simulated:flush_ms=10,discard_ms=0.02,size=1G"),
            TargetSpec::Engine(simulated)
        );
        let (read_time, flush_time) = (Duration::from_micros(500), Duration::from_millis(10));
        let disk = DeviceSpec::Disk { size_bytes: 1 << 30, read_time, flush_time };
        assert_eq!(parse("engine:disk:flush_ms=10,read_ms=0.5,size=1G"), TargetSpec::Engine(disk));
        let image =
            TargetSpec::Engine(DeviceSpec::Image { path: "a/b".into(), size_bytes: 4 << 30 });
        for size in ["4G", "4GiB", "4GB", "4294967296"] {
            assert_eq!(parse(&format!("engine:a/b:size={size}")), image);
        }
    }

    #[test]
    fn of_a_new_image_nothing_is_left_and_an_old_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let target =
            TargetSpec::Engine(DeviceSpec::Image { path: path.clone(), size_bytes: 64 << 20 });
        let open =
            || target.open(FlushPolicy::Auto, FlushMode::Real, &EngineSettings::default()).unwrap();
        let made = open();
        // However the process ends from here on.
        assert!(!path.exists());
        made.make_directory("below").unwrap();
        made.close().unwrap();
        let device = FileDevice::create(&path, 64 << 20).unwrap();
        mkfs(&device, &MkfsOptions::default()).unwrap();
        drop(device);
        let opened = open();
        opened.make_directory("below").unwrap();
        opened.close().unwrap();
        assert!(path.exists());
        target.scratch_device(1 << 20).unwrap().flush().unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn without_flushes_a_device_is_what_it_was() {
        struct Mirror {
            seen: Mutex<Vec<&'static str>>,
        }
        impl Mirror {
            fn note(&self, call: &'static str) -> Result<(), DeviceError> {
                self.seen.lock().push(call);
                Ok(())
            }
        }
        impl BlockDevice for Mirror {
            fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
                self.note("read")
            }
            fn write(&self, _: u64, _: &[&[u8]]) -> Result<(), DeviceError> {
                self.note("write")
            }
            fn write_set(&self, writes: &[SetWrite<'_>]) -> Vec<Result<(), DeviceError>> {
                writes.iter().map(|_| self.note("set")).collect()
            }
            fn write_set_while(
                &self,
                writes: &[SetWrite<'_>],
                _: &mut dyn FnMut(),
            ) -> Vec<Result<(), DeviceError>> {
                writes.iter().map(|_| self.note("set while")).collect()
            }
            fn flush(&self) -> Result<(), DeviceError> {
                self.note("flush")
            }
            fn discard(&self, _: u64, _: u64) -> Result<(), DeviceError> {
                self.note("discard")
            }
            fn length_bytes(&self) -> u64 {
                8192
            }
            fn flush_time(&self) -> Duration {
                Duration::from_secs(1)
            }
            fn copies(&self) -> usize {
                2
            }
            fn read_copy(&self, _: usize, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
                self.note("copy")
            }
            fn repair(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
                self.note("repair")
            }
            fn resynchronise(&self, _: &[Range<u64>]) -> Result<(), DeviceError> {
                self.note("resynchronise")
            }
            fn close(&self) -> Result<(), DeviceError> {
                self.note("close")
            }
            fn health(&self) -> Option<DeviceHealth> {
                self.note("health").ok()?;
                None
            }
        }
        let mirror = Arc::new(Mirror { seen: Mutex::new(Rank::LEAF, Vec::new()) });
        let device = WithoutFlush { device: mirror.clone() };
        let (mut buffer, block) = ([0; 4096], [1; 4096]);
        device.read(0, &mut buffer).unwrap();
        device.write(0, &[&block]).unwrap();
        let set = [SetWrite { offset_bytes: 0, buffers: vec![&block] }];
        assert_eq!(
            (device.write_set(&set).len(), device.write_set_while(&set, &mut || {}).len()),
            (1, 1)
        );
        device.flush().unwrap();
        device.discard(0, 4096).unwrap();
        device.read_copy(1, 0, &mut buffer).unwrap();
        device.repair(0, &block).unwrap();
        device.resynchronise(&[]).unwrap();
        device.close().unwrap();
        assert!(device.health().is_none());
        assert_eq!(
            (device.copies(), device.length_bytes(), device.flush_time()),
            (2, 8192, Duration::ZERO)
        );
        let calls = [
            "read",
            "write",
            "set",
            "set while",
            "discard",
            "copy",
            "repair",
            "resynchronise",
            "close",
            "health",
        ];
        assert_eq!(*mirror.seen.lock(), calls);
    }

    #[test]
    fn bad_targets_say_what_is_possible() {
        for text in [
            "engine:",
            "engine:memory:flush_ms=1",
            "engine:simulated:read_ms=1",
            "engine:disk:read_ms=x",
            "engine:simulated:flush_ms=-1",
            "engine:memory:size=4X",
            "engine:memory:speed=9",
        ] {
            let error = text.parse::<TargetSpec>().unwrap_err();
            assert!(
                ["size=4G", "512M, 4G", "_ms=", "IMAGE"].iter().any(|part| error.contains(part)),
                "{error}"
            );
        }
        let error = "engine:memory:size=99999999T".parse::<TargetSpec>().unwrap_err();
        assert!(error.contains("too large"), "{error}");
    }
}
