//! A device that lies once: it says that a request has been done, and does something else. A flush
//! makes nothing durable, a write is dropped, or it goes to another place, where it destroys what
//! stands there. Everything before and after is done.
use cairn_blockdev::{BlockDevice, DeviceError, Operation, SimulatedDevice, forward_to_device};
use cairn_environment::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What is done instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lie {
    /// A flush does nothing. What it should have made durable is covered by the next one; until
    /// then a crash may lose it.
    LostFlush,
    /// A write does nothing: what stood there stays.
    LostWrite,
    /// A write goes to the bytes behind its place.
    WriteBehind,
    /// A write goes to this offset, in bytes.
    WriteTo(u64),
}

/// The request that was lied about.
#[derive(Clone, Copy, Debug)]
pub struct Met {
    /// Where it should have gone; 0 for a flush.
    pub offset_bytes: u64,
    /// How much; 0 for a flush.
    pub length_bytes: u64,
    /// Events in the device's history when it had been answered.
    pub history_len: usize,
}

/// See the [module](self).
pub struct Lying {
    device: Arc<SimulatedDevice>,
    lie: Lie,
    /// How many requests of that kind are done before.
    after: u64,
    seen: AtomicU64,
    met: OnceLock<Met>,
}

impl Lying {
    /// Does `after` flushes or writes as asked, and then one as `lie` says.
    pub fn new(device: Arc<SimulatedDevice>, lie: Lie, after: u64) -> Arc<Self> {
        Arc::new(Self { device, lie, after, seen: AtomicU64::new(0), met: OnceLock::new() })
    }

    /// The request that was lied about, if the run got that far.
    pub fn met(&self) -> Option<Met> {
        self.met.get().copied()
    }

    /// Whether this request is the one.
    fn is_it(&self, operation: Operation) -> bool {
        let kind = if self.lie == Lie::LostFlush { Operation::Flush } else { Operation::Write };
        operation == kind && self.seen.fetch_add(1, Ordering::SeqCst) == self.after
    }

    fn note(&self, offset_bytes: u64, length_bytes: u64) {
        let _ = self.met.set(Met {
            offset_bytes,
            length_bytes,
            history_len: self.device.history_len(),
        });
    }
}

impl BlockDevice for Lying {
    // Sets of writes come here one after the other.
    fn write(&self, offset_bytes: u64, buffers: &[&[u8]]) -> Result<(), DeviceError> {
        if !self.is_it(Operation::Write) {
            return self.device.write(offset_bytes, buffers);
        }
        let length_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let place = match self.lie {
            Lie::LostFlush | Lie::LostWrite => None,
            Lie::WriteBehind => Some(offset_bytes + length_bytes),
            Lie::WriteTo(place) => Some(place),
        };
        if let Some(place) = place {
            self.device.write(place.min(self.device.length_bytes() - length_bytes), buffers)?;
        }
        self.note(offset_bytes, length_bytes);
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        if !self.is_it(Operation::Flush) {
            return self.device.flush();
        }
        self.note(0, 0);
        Ok(())
    }

    forward_to_device!(self => self.device; read, discard, length_bytes, flush_time);
}

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_blockdev::simulated::Fate;

    fn first_byte(device: &dyn BlockDevice, block: u64) -> u8 {
        let mut bytes = vec![0; 4096];
        device.read(block * 4096, &mut bytes).expect("it works");
        bytes[0]
    }

    /// Writes blocks 1, 2 and 3, each with a flush; what they hold, now and after a power failure
    /// that loses what is unflushed.
    fn blocks_after(lie: Lie, after: u64) -> [[u8; 5]; 2] {
        let device = Arc::new(SimulatedDevice::new(1 << 20));
        let lying = Lying::new(device.clone(), lie, after);
        for block in 1..4_u8 {
            lying.write(u64::from(block) * 4096, &[&[block; 4096]]).expect("it says so");
            lying.flush().expect("it says so");
        }
        let crashed = device.crash_state_with(|unflushed| vec![Fate::Lost; unflushed.len()]);
        [&*device as &dyn BlockDevice, &crashed]
            .map(|device| [0, 1, 2, 3, 4].map(|block| first_byte(device, block)))
    }

    #[test]
    fn one_request_is_lied_about() {
        let whole = [0, 1, 2, 3, 0];
        assert_eq!(blocks_after(Lie::LostFlush, 3), [whole, whole]);
        assert_eq!(blocks_after(Lie::LostFlush, 1), [whole, whole], "the next flush covers it");
        assert_eq!(blocks_after(Lie::LostFlush, 2), [whole, [0, 1, 2, 0, 0]]);
        assert_eq!(blocks_after(Lie::LostWrite, 1), [[0, 1, 0, 3, 0]; 2]);
        assert_eq!(blocks_after(Lie::WriteTo(4 * 4096), 0), [[0, 0, 2, 3, 1]; 2]);
        assert_eq!(blocks_after(Lie::WriteTo(4096), 2), [[0, 3, 2, 0, 0]; 2]);
        assert_eq!(blocks_after(Lie::WriteBehind, 2), [[0, 1, 2, 0, 3]; 2]);
    }
}
