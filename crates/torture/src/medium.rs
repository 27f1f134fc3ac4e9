//! What lies between the volume of a recorded run and the device that records.
use crate::composition::{Composition, Present};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_environment::random::Seeded;
use std::sync::Arc;

#[cfg(not(feature = "shuttle"))]
use crate::recorded::RecordedFile;

/// The way to the recording device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Medium {
    /// None: the volume uses the device itself.
    #[default]
    Simulated,
    /// A file of the system; see [`crate::recorded`].
    #[cfg(not(feature = "shuttle"))]
    File,
}

impl Medium {
    /// The run of `cairn torture` that uses it.
    #[cfg(not(feature = "shuttle"))]
    pub(crate) fn command(self) -> &'static str {
        match self {
            Self::Simulated => "crash",
            Self::File => "recorded",
        }
    }

    /// Tries it.
    ///
    /// # Errors
    /// This machine lacks what it needs.
    #[cfg(not(feature = "shuttle"))]
    pub fn check(self) -> Result<(), String> {
        let small = Arc::new(SimulatedDevice::new(1 << 20));
        self.reach(&small, Composition::Single, &mut Seeded::new(0)).open(false).map(drop)
    }

    /// The way of one run.
    #[cfg_attr(feature = "shuttle", expect(unused_variables))]
    pub(crate) fn reach(
        self,
        recorder: &Arc<SimulatedDevice>,
        composition: Composition,
        random: &mut Seeded,
    ) -> Way {
        match self {
            Self::Simulated => Way::Simulated(Arc::clone(recorder), composition),
            #[cfg(not(feature = "shuttle"))]
            Self::File => Way::File {
                file: RecordedFile::new(recorder, random.next_u64()),
                rings: random.chance(3, 4),
                holes: random.chance(3, 4),
            },
        }
    }
}

/// The way to one recording device.
pub(crate) enum Way {
    Simulated(Arc<SimulatedDevice>, Composition),
    #[cfg(not(feature = "shuttle"))]
    File {
        file: RecordedFile,
        /// Unless as on a kernel without io_uring.
        rings: bool,
        holes: bool,
    },
}

impl Way {
    /// The device for a volume; whoever had it before has closed it.
    ///
    /// # Errors
    /// The file can't be mounted, opened or written.
    pub(crate) fn open(&self, read_only: bool) -> Result<Arc<dyn BlockDevice>, String> {
        match self {
            Self::Simulated(device, composition) => {
                composition.open(device, Present::All, read_only)
            }
            #[cfg(not(feature = "shuttle"))]
            Self::File { file, rings, .. } => {
                let device = file.open()?;
                Ok(Arc::new(if *rings { device } else { device.without_rings() }))
            }
        }
    }

    /// The device for a new volume.
    ///
    /// # Errors
    /// As [`Way::open`].
    pub(crate) fn make(&self) -> Result<Arc<dyn BlockDevice>, String> {
        match self {
            Self::Simulated(device, composition) => composition.make(device)?,
            #[cfg(not(feature = "shuttle"))]
            Self::File { file, holes: false, .. } => {
                let device = file.open()?;
                let filled = device.preallocate_and_zero(0, device.length_bytes());
                filled.map_err(|error| error.to_string())?;
            }
            #[cfg(not(feature = "shuttle"))]
            Self::File { .. } => {}
        }
        self.open(false)
    }
}
