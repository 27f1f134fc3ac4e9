//! What the volume of a recorded run stands on: one device, or parts of one as the members of a
//! composed device. All have one record, so the power fails for all members at once, and each loses
//! what it has not flushed itself.
use cairn_blockdev::composed::{Access, Candidate, ComposedKind, Concat, Mirror, make};
use cairn_blockdev::{BlockDevice, SimulatedDevice};
use cairn_environment::random::Seeded;
use std::ops::Range;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// What each member has in addition to its share: its label, and what is left of it after rounding.
const EXTRA_BYTES: u64 = 2 * MIB;

/// How the volume's device is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Composition {
    /// One device.
    Single,
    /// Of two members; the first is a third of it.
    Concat,
    /// Of two members.
    Mirror,
}

/// Which members of a mirror there are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Present {
    /// Both.
    All,
    /// The one with this index.
    Only(usize),
}

impl Composition {
    /// Any of them, mostly a single device.
    pub(crate) fn random(random: &mut Seeded) -> Self {
        match random.below(6) {
            0 => Self::Concat,
            1 => Self::Mirror,
            _ => Self::Single,
        }
    }

    /// Which members are there after a power failure: of a mirror one may be lost.
    pub(crate) fn present(self, random: &mut Seeded) -> Present {
        match (self, random.below(4)) {
            (Self::Mirror, 0) => Present::Only(0),
            (Self::Mirror, 1) => Present::Only(1),
            _ => Present::All,
        }
    }

    /// A device for a volume of `volume_bytes`.
    pub fn device(self, volume_bytes: u64) -> SimulatedDevice {
        SimulatedDevice::new(match self {
            Self::Single => volume_bytes,
            Self::Concat => volume_bytes + 2 * EXTRA_BYTES,
            Self::Mirror => 2 * (volume_bytes + EXTRA_BYTES),
        })
    }

    /// Which parts of a device of `whole` bytes are the members.
    pub fn ranges(self, whole: u64) -> [Range<u64>; 2] {
        let middle = match self {
            Self::Single => whole,
            Self::Mirror => whole / 2,
            Self::Concat => whole / 3 / MIB * MIB,
        };
        [0..middle, middle..whole]
    }

    fn members(self, device: &Arc<SimulatedDevice>) -> [Arc<dyn BlockDevice>; 2] {
        self.ranges(device.length_bytes()).map(|range| Arc::new(device.part(range)) as _)
    }

    /// Writes the labels of the members.
    ///
    /// # Errors
    /// Those of the members, in words.
    pub fn make(self, device: &Arc<SimulatedDevice>) -> Result<(), String> {
        let kind = match self {
            Self::Single => return Ok(()),
            Self::Concat => ComposedKind::Concat,
            Self::Mirror => ComposedKind::Mirror,
        };
        let named = ["a", "b"].map(str::to_owned).into_iter().zip(self.members(device));
        let named: Vec<_> = named.collect();
        make(kind, &named).map(drop).map_err(|error| format!("making the members: {error}"))
    }

    /// The device of the volume.
    ///
    /// # Errors
    /// The members are not as they must be, in words.
    pub fn open(
        self,
        device: &Arc<SimulatedDevice>,
        present: Present,
        read_only: bool,
    ) -> Result<Arc<dyn BlockDevice>, String> {
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let is_there = |index| present == Present::All || present == Present::Only(index);
        let candidates = || {
            let members = ["a", "b"].into_iter().zip(self.members(device)).enumerate();
            let candidate = |(index, (name, member)): (usize, (&str, _))| Candidate {
                name: name.to_owned(),
                device: Some(member).filter(|_| is_there(index)),
            };
            members.map(candidate).collect()
        };
        let opened: Result<Arc<dyn BlockDevice>, _> = match self {
            Self::Single => return Ok(Arc::clone(device) as _),
            Self::Concat => Concat::open(candidates(), access).map(|device| Arc::new(device) as _),
            Self::Mirror => {
                let degraded = present != Present::All;
                Mirror::open(candidates(), access, degraded).map(|device| Arc::new(device) as _)
            }
        };
        opened.map_err(|error| format!("opening the members: {error}"))
    }
}
