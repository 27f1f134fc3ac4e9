//! Making a composed device: the labels that say which members belong together.
use super::error::ComposedError;
use super::label::{
    ComposedKind, DATA_START_BYTES, FillProgress, Identity, LABEL_SLOTS_BYTES, Label, MEMBERS_MAX,
    SIZE_UNIT_BYTES,
};
use crate::aligned::AlignedBuffer;
use crate::device::BlockDevice;
use std::sync::Arc;

/// Makes a new composed device of `devices` and returns its length. Their content is lost. A mirror
/// is as large as its smallest member. The reserved area of each is zeroed, so that no program
/// recognises other content in it.
///
/// 1. Zeros over the old labels of all, flushed. *A crash: no member is left, `make` again.*
/// 2. The new labels. *A crash: some members are missing, and opening reports that.*
///
/// # Errors
/// If there are too few devices, one is too small, or one fails.
pub fn make(
    kind: ComposedKind,
    devices: &[(String, Arc<dyn BlockDevice>)],
) -> Result<u64, ComposedError> {
    if !(2..=MEMBERS_MAX).contains(&devices.len()) {
        return Err(ComposedError::Count { found: devices.len() });
    }
    let usable = |device: &dyn BlockDevice| {
        let bytes = device.length_bytes().saturating_sub(DATA_START_BYTES);
        bytes - bytes % SIZE_UNIT_BYTES
    };
    let mut sizes: Vec<u64> = devices.iter().map(|(_, device)| usable(&**device)).collect();
    if let Some(small) = sizes.iter().position(|bytes| *bytes == 0) {
        return Err(ComposedError::TooSmall {
            member: devices[small].0.clone(),
            needed_bytes: DATA_START_BYTES + SIZE_UNIT_BYTES,
        });
    }
    let smallest = sizes.iter().copied().min().unwrap_or(0);
    let composed_bytes = match kind {
        ComposedKind::Mirror => {
            sizes.fill(smallest);
            smallest
        }
        ComposedKind::Concat => sizes.iter().sum(),
    };
    let pool = Identity::random();
    let members: Vec<Identity> = devices.iter().map(|_| Identity::random()).collect();
    let zeros = AlignedBuffer::zeroed(DATA_START_BYTES as usize);
    for (_, device) in devices {
        device.write(0, &[&zeros])?;
        device.flush()?;
    }
    let raise = Identity::random();
    for (index, (_, device)) in devices.iter().enumerate() {
        let mut label = Label {
            kind,
            progress: FillProgress::Complete,
            index,
            pool,
            member: members[index],
            events: 1,
            sequence: 0,
            open: false,
            in_sync: (1 << devices.len()) - 1,
            member_bytes: sizes[index],
            composed_bytes,
            rebuilt_bytes: 0,
            raise,
            members: members.clone(),
        };
        for _ in LABEL_SLOTS_BYTES {
            label.write(&**device)?;
        }
        device.flush()?;
    }
    Ok(composed_bytes)
}
