//! The [schedule](crate::schedule) of a subvolume, where the volume stores it: in an attribute of
//! its root directory that no program sees.
//!
//! It is text: the subvolume's id, a space, and the schedule. A fork has its origin's, where the id
//! is another one, so it is of no account. When a rollback puts another subvolume into the place,
//! the schedule goes over, and so do the snapshots that it has made: the id of each subvolume that
//! had the place follows, and the generation of the last snapshot that it showed by then,
//! `302<301@90<300@57 every 1h keep 24x1h`. What these make afterwards is their own.
//!
//! A user sets a schedule while the keeper adds to the one that was there. Lock: whoever changes a
//! stored one holds [`Rank::SCHEDULES`] from the read until the other one is stored, and waits for
//! the device after that.
use super::Answer;
use crate::schedule::Schedule;
use cairn_engine::{Error, FsyncKind, InodeId, SnapshotInfo, Volume, XattrMode};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use std::fmt;

/// The name of the attribute.
pub(super) const SCHEDULE_ATTRIBUTE: &[u8] = b"system.cairn.keep";

/// So many subvolumes that had the place are noted, the last ones.
const PREDECESSORS_MAX: usize = 100;

/// The lock for changes of the stored schedules of a volume.
pub(super) struct ScheduleChanges(Mutex<()>);

impl Default for ScheduleChanges {
    fn default() -> Self {
        Self(Mutex::new(Rank::SCHEDULES, ()))
    }
}

/// Snapshots that a schedule has besides those of its subvolume: those of the subvolume `of` up to
/// a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inherited {
    of: u64,
    up_to: u64,
}

/// A schedule, and what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredSchedule {
    subvolume: u64,
    inherited: Vec<Inherited>,
    /// As [`Schedule`] reads it.
    pub(super) text: String,
}

impl StoredSchedule {
    /// The schedule of a subvolume alone.
    pub(super) fn new(subvolume: u64, text: String) -> Self {
        Self { subvolume, inherited: Vec::new(), text }
    }

    fn parse(stored: &[u8]) -> Option<Self> {
        let (place, text) = std::str::from_utf8(stored).ok()?.split_once(' ')?;
        let mut ids = place.split('<');
        let subvolume = ids.next()?.parse().ok()?;
        let inherited = ids.map(|one| {
            let (of, up_to) = one.split_once('@')?;
            Some(Inherited { of: of.parse().ok()?, up_to: up_to.parse().ok()? })
        });
        Some(Self { subvolume, inherited: inherited.collect::<Option<_>>()?, text: text.into() })
    }

    /// What the volume stores for this root directory of a subvolume, if that is in force.
    pub(super) fn of(volume: &Volume, root: InodeId) -> Answer<Option<Self>> {
        let stored = match volume.get_xattr(root, SCHEDULE_ATTRIBUTE) {
            Ok(stored) => Self::parse(&stored),
            Err(Error::NoAttribute) => None,
            Err(error) => return Err(error.into()),
        };
        let subvolume = volume.subvolume_of(root)?.0;
        Ok(stored.filter(|stored| stored.subvolume == subvolume))
    }

    /// Stores another schedule for the subvolume with this root directory, or none. It is durable
    /// then.
    pub(super) fn set(
        changes: &ScheduleChanges,
        volume: &Volume,
        root: InodeId,
        schedule: Option<&Schedule>,
    ) -> Answer<()> {
        let changing = changes.0.lock();
        let stored = match schedule {
            Some(schedule) => {
                let text = schedule.to_string();
                let stored = match Self::of(volume, root)? {
                    Some(before) => Self { text, ..before },
                    None => Self::new(volume.subvolume_of(root)?.0, text),
                };
                let value = stored.to_string();
                volume.set_xattr(root, SCHEDULE_ATTRIBUTE, value.as_bytes(), XattrMode::Any)
            }
            None => match volume.remove_xattr(root, SCHEDULE_ATTRIBUTE) {
                Err(Error::NoAttribute) => Ok(()),
                removed => removed,
            },
        };
        stored?;
        drop(changing);
        Ok(volume.fsync_blocking(root, FsyncKind::Full)?)
    }

    /// What is stored for the subvolume `new` when it takes the place of `old`, for which `stored`
    /// was, and whose newest snapshot is of the generation `newest`. Nothing if that was not in
    /// force.
    pub(super) fn carried(
        stored: &[u8],
        (old, new): (u64, u64),
        newest: Option<u64>,
    ) -> Option<Vec<u8>> {
        let before = Self::parse(stored).filter(|before| before.subvolume == old)?;
        let last = newest.map(|up_to| Inherited { of: old, up_to });
        let inherited = last.into_iter().chain(before.inherited).take(PREDECESSORS_MAX).collect();
        Some(Self { subvolume: new, inherited, text: before.text }.to_string().into_bytes())
    }

    /// Has the schedule that is stored for this root directory inherit the snapshots of `of`, whose
    /// place it has got, up to this generation at least.
    pub(super) fn extend(
        changes: &ScheduleChanges,
        volume: &Volume,
        root: InodeId,
        (of, up_to): (u64, u64),
    ) -> Result<(), Error> {
        let _changing = changes.0.lock();
        let Ok(Some(mut stored)) = Self::of(volume, root) else { return Ok(()) };
        match stored.inherited.iter_mut().find(|one| one.of == of) {
            Some(one) if one.up_to >= up_to => return Ok(()),
            Some(one) => one.up_to = up_to,
            None => stored.inherited.insert(0, Inherited { of, up_to }),
        }
        stored.inherited.truncate(PREDECESSORS_MAX);
        let value = stored.to_string();
        match volume.set_xattr(root, SCHEDULE_ATTRIBUTE, value.as_bytes(), XattrMode::Replace) {
            // A rollback has just taken it along.
            Err(Error::NoAttribute) => Ok(()),
            set => set,
        }
    }

    /// Whether the schedule has this snapshot, of those that its subvolume shows.
    pub(super) fn has(&self, snapshot: &SnapshotInfo) -> bool {
        snapshot.subvolume == self.subvolume
            || self
                .inherited
                .iter()
                .any(|one| one.of == snapshot.subvolume && snapshot.generation <= one.up_to)
    }
}

impl fmt::Display for StoredSchedule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.subvolume)?;
        for Inherited { of, up_to } in &self.inherited {
            write!(formatter, "<{of}@{up_to}")?;
        }
        write!(formatter, " {}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_that_is_in_force_goes_over() {
        let carried = |stored: &str, places, newest| {
            let carried = StoredSchedule::carried(stored.as_bytes(), places, newest);
            carried.map(|value| String::from_utf8(value).unwrap())
        };
        let every = "every 1h keep 1x1h";
        let first = format!("300 {every}");
        let second = carried(&first, (300, 301), Some(57)).unwrap();
        assert_eq!(second, format!("301<300@57 {every}"));
        let third = carried(&second, (301, 302), Some(90)).unwrap();
        assert_eq!(third, format!("302<301@90<300@57 {every}"));
        assert_eq!(carried(&first, (300, 301), None).unwrap(), format!("301 {every}"));
        assert_eq!(carried(&first, (30, 301), None), None);
        assert_eq!(carried("256 every 1h keep 1x1h", (300, 301), None), None);
        // It stays short enough for an item.
        let long = (0..PREDECESSORS_MAX as u64 + 9).fold(first, |stored, number| {
            let (old, new) = (300 + number, 301 + number);
            carried(&stored, (old, new), Some(u64::from(u32::MAX))).unwrap()
        });
        assert!(long.len() < 3000 && long.ends_with(every), "{long}");
        for bad in ["", "300", "300<301 every 1h", "x every 1h", "300<301@ every 1h"] {
            assert_eq!(StoredSchedule::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
