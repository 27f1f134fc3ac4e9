//! Decides whether both sides did the same.
//!
//! Equal must be: what a call returned and read; of every file that it could have changed, before
//! and after it, type, mode, links, owner, group, size and device, and which of the three times the
//! call changed. A time that utimensat(2) set is equal to the nanosecond; every other one is the
//! present. What may differ:
//!
//! - the size of a directory, and blocks within [`BLOCKS_MORE_MAX`] and [`BLOCKS_LESS_MAX`]; a file
//!   whose data the kernel may still hold has any number of them, and ext4 forgets blocks for a
//!   moment while it writes them;
//! - times of a file that the kernel keeps (writeback=on) are those of its coarse clock: a change
//!   in the same tick leaves them alone, and they may be older than one that the server has set;
//! - times of a named pipe, which the kernel updates at reads and writes, but not for FUSE;
//! - times of a file with a shared mapping for writing: the kernel sends its pages when it likes.
use super::side::{Facts, Outcome, name_of_errno};
use super::system::Done;
use cairn_environment::clock;

/// What a call took: the clock may have been read at its beginning.
const PRESENT_SECONDS: i64 = 3;
/// In units of 512 bytes: what the mount may have more of.
const BLOCKS_MORE_MAX: i64 = 64;
/// What the reference may have more of: it counts blocks of extended attributes.
const BLOCKS_LESS_MAX: i64 = 64 + 10 * 128;
const TIME_NAMES: [&str; 3] = ["atime", "mtime", "ctime"];

/// What holds for all comparisons of a run.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The kernel caches what is written to the mount, and keeps the times of its files.
    pub writeback: bool,
    /// Reading changes no access times on the reference.
    pub access_times: bool,
    /// Two changes of a file have different times on the reference.
    pub fine_times: bool,
    /// The run's beginning, in seconds since 1970.
    pub started: i64,
}

/// What is known of the files that are compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// The file had a shared mapping for writing.
    pub mapped: bool,
    /// A call left the times alone, as the kernel may with its writeback cache.
    pub kept: bool,
    /// The kernel has sent everything: a sync came before.
    pub synced: bool,
    /// The file was truncated. With the kernel's writeback cache a truncation to the kernel's
    /// length may be a longer one for the server, which then leaves blocks behind the end.
    pub truncated: bool,
}

/// The facts of one file on both sides: the mount first.
pub type Pair<T> = [T; 2];

/// A result in words.
pub fn shown(value: Done) -> String {
    value.map_or_else(|errno| name_of_errno(errno).to_owned(), |value| value.to_string())
}

/// Compares what a call returned.
///
/// # Errors
/// The difference in words.
pub fn compare_outcomes(outcomes: &Pair<Outcome>) -> Result<(), String> {
    let [mount, reference] = outcomes;
    if mount.value != reference.value {
        let values = [shown(mount.value), shown(reference.value)];
        return Err(format!("returned {}, the reference {}", values[0], values[1]));
    }
    if mount.data != reference.data {
        return Err(format!(
            "read other data than the reference: {}",
            first_difference(&mount.data, &reference.data,)
        ));
    }
    Ok(())
}

/// Where and how two texts differ first.
pub fn first_difference(mount: &[u8], reference: &[u8]) -> String {
    let same = mount.iter().zip(reference).take_while(|(a, b)| a == b).count();
    let part = |bytes: &[u8]| {
        let from = same.saturating_sub(8).min(bytes.len());
        let end = (same + 24).min(bytes.len());
        String::from_utf8_lossy(&bytes[from..end]).escape_debug().to_string()
    };
    format!(
        "{} and {} bytes, different from byte {same} on: \"{}\", the reference has \"{}\"",
        mount.len(),
        reference.len(),
        part(mount),
        part(reference)
    )
}

impl Rules {
    /// Compares a file as it is on both sides.
    ///
    /// # Errors
    /// The difference in words.
    pub fn compare(&self, pair: &Pair<Done<Facts>>, known: Known) -> Result<(), String> {
        let [mount, reference] = match pair {
            [Ok(mount), Ok(reference)] => [mount, reference],
            [Err(mount), Err(reference)] if mount == reference => return Ok(()),
            [mount, reference] => {
                let values = [mount, reference].map(|side| shown(side.map(|_| 0)));
                return Err(format!("stat: {}, the reference {}", values[0], values[1]));
            }
        };
        let facts = |name: &str, mount: String, reference: String| {
            if mount == reference {
                Ok(())
            } else {
                Err(format!("{name} {mount}, the reference has {reference}"))
            }
        };
        facts("mode", format!("{:o}", mount.mode), format!("{:o}", reference.mode))?;
        facts("links", mount.links.to_string(), reference.links.to_string())?;
        facts("uid", mount.uid.to_string(), reference.uid.to_string())?;
        facts("gid", mount.gid.to_string(), reference.gid.to_string())?;
        if !mount.is(libc::S_IFDIR) {
            facts("size", mount.size.to_string(), reference.size.to_string())?;
        }
        if mount.is(libc::S_IFBLK) || mount.is(libc::S_IFCHR) {
            facts("device", mount.device.to_string(), reference.device.to_string())?;
        }
        (0..3).filter(|time| *time > 0 || self.access_times).try_for_each(|time| {
            let present = |facts: &Facts| {
                let seconds = facts.times[time].0;
                let end = clock::now_wall().0 + PRESENT_SECONDS;
                (self.started - PRESENT_SECONDS..=end).contains(&seconds)
            };
            let alike = present(mount) && present(reference)
                || mount.times[time] == reference.times[time]
                || (known.mapped || known.kept) && time == 1
                || mount.is(libc::S_IFIFO) && time < 2;
            if alike {
                return Ok(());
            }
            let times = [mount.times[time], reference.times[time]];
            Err(format!("{} {:?}, the reference has {:?}", TIME_NAMES[time], times[0], times[1]))
        })
    }

    /// Compares how many blocks a file has that the kernel has sent.
    ///
    /// # Errors
    /// The difference in words.
    pub fn compare_blocks(&self, pair: &Pair<Done<Facts>>, known: Known) -> Result<(), String> {
        let [Ok(mount), Ok(reference)] = pair else { return Ok(()) };
        let sent = known.synced || !self.writeback && !known.mapped;
        if !mount.is(libc::S_IFREG) || !sent {
            return Ok(());
        }
        let both = [mount.blocks, reference.blocks];
        let more = if reference.blocks == 0 { 0 } else { reference.blocks + BLOCKS_MORE_MAX };
        let wrong = mount.blocks > more && !(self.writeback && known.truncated)
            || reference.blocks > mount.blocks + BLOCKS_LESS_MAX;
        if wrong {
            Err(format!("{} blocks, the reference has {}", both[0], both[1]))
        } else {
            Ok(())
        }
    }

    /// Compares which times a call changed that began at `begun`, by the kernel's coarse clock.
    ///
    /// # Errors
    /// The difference in words.
    pub fn compare_changes(
        &self,
        begun: (i64, i64),
        before: &Pair<Done<Facts>>,
        after: &Pair<Done<Facts>>,
    ) -> Result<(), String> {
        let ([Ok(mount_before), Ok(reference_before)], [Ok(mount), Ok(reference)]) =
            (before, after)
        else {
            return Ok(());
        };
        let same = mount_before.inode == mount.inode && reference_before.inode == reference.inode;
        if !same || mount.is(libc::S_IFIFO) {
            return Ok(());
        }
        // The kernel takes them from its coarse clock, the server did so before from a fine one.
        let coarse = self.writeback && mount.is(libc::S_IFREG);
        for (time, name) in TIME_NAMES.iter().enumerate().skip(usize::from(!self.access_times)) {
            let [old, new] = [mount_before.times[time], mount.times[time]];
            let changed = [old != new, reference_before.times[time] != reference.times[time]];
            let is_young = |time| begun <= time;
            let young = coarse && is_young(old)
                || !self.fine_times && is_young(reference_before.times[time]);
            if changed[0] != changed[1] && !young {
                let words = changed.map(|changed| if changed { "changed" } else { "kept" });
                return Err(format!(
                    "{} {} ({old:?} to {new:?}), the reference {} it",
                    words[0], name, words[1]
                ));
            }
            if time == 2 && new < if coarse { old.min(begun) } else { old } {
                return Err(format!("ctime went back from {old:?} to {new:?}"));
            }
        }
        Ok(())
    }
}
