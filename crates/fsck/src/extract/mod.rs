//! Copies the files of a volume into a directory of the host, without a mount: for volumes that
//! cannot be mounted, and for those that nobody wants to change.
//!
//! The files are read by [`TreeReader`], in the state after replay. Bytes that don't match their
//! checksum are never written: a hole stands in their place, and the report names file and range.
//! Whatever the volume holds, nothing is made outside of the directory, and no symbolic link in it
//! is followed (`host`).
mod host;
mod report;

pub use report::{ExtractReport, Loss};

use crate::second_try::SecondTry;
use crate::tree_reader::{Piece, TreeReader};
use crate::walk::{Entry, Step, Walk};
use crate::{FsckError, Progress};
use cairn_blockdev::BlockDevice;
use cairn_format::{FileType, TreeId, XATTR_OWN_PREFIX};
use host::{Host, HostError, Made};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why an extraction ended early, or could not begin.
#[derive(Debug, thiserror::Error)]
pub enum ExtractError {
    /// The volume cannot be read at all.
    #[error(transparent)]
    Volume(#[from] FsckError),
    /// The directory cannot be made, opened or listed.
    #[error("{}: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is something in the directory.
    #[error("{} is not empty: name a new directory or an empty one", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// The host failed, or is full. The directory holds what was extracted before that.
    #[error("{path}: {source}; what was extracted until then is incomplete")]
    Host {
        /// What was to be made, as a path in the volume.
        path: String,
        /// Why.
        source: io::Error,
        /// What was extracted before that.
        report: Box<ExtractReport>,
    },
    /// The caller wanted it to end. The directory holds what was extracted before that.
    #[error("interrupted; what was extracted until then is incomplete")]
    Interrupted {
        /// What was extracted before that.
        report: Box<ExtractReport>,
    },
}

impl ExtractError {
    /// Exit code if the extraction failed.
    pub const EXIT_CODE: u8 = FsckError::EXIT_CODE;

    /// What was extracted before the error, if anything was.
    pub fn report(&self) -> Option<&ExtractReport> {
        match self {
            Self::Host { report, .. } | Self::Interrupted { report } => Some(report),
            _ => None,
        }
    }
}

/// How far an extraction is.
#[derive(Clone, Copy, Debug)]
pub enum ExtractProgress<'p> {
    /// The trees are being read.
    Reading(Progress),
    /// So much of so many bytes in use was extracted.
    Extracting {
        /// Data written.
        done_bytes: u64,
        /// All blocks in use.
        total_bytes: u64,
        /// Where it is.
        report: &'p ExtractReport,
    },
}

/// Copies all files of the volume on `device` into `directory`, which does not exist or is empty,
/// until `stop` is set. Calls `progress` now and then.
///
/// What the volume has lost, and what the host refuses to make, is in the report, and the rest goes
/// on. Without the rights of root, files belong to the user, and their set-user-ID and set-group-ID
/// bits are left out.
///
/// # Errors
/// If there is no volume, the directory holds something, or the host fails or is full.
pub fn extract(
    device: &dyn BlockDevice,
    directory: &Path,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(ExtractProgress<'_>),
) -> Result<ExtractReport, ExtractError> {
    host::expect_empty(directory)?;
    let device = &SecondTry(device);
    let reader = TreeReader::open(device, &mut |done| progress(ExtractProgress::Reading(done)))?;
    extract_all(&reader, directory, stop, progress)
}

/// As [`extract`], of the snapshot `name` of a subvolume. Subvolumes below it are left out.
///
/// # Errors
/// As [`extract`], and if there is no such snapshot.
pub fn extract_snapshot(
    device: &dyn BlockDevice,
    (subvolume, name): (TreeId, &[u8]),
    directory: &Path,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(ExtractProgress<'_>),
) -> Result<ExtractReport, ExtractError> {
    host::expect_empty(directory)?;
    let device = &SecondTry(device);
    let mut reading = |done| progress(ExtractProgress::Reading(done));
    let reader = TreeReader::open_snapshot(device, subvolume, name, &mut reading)?;
    extract_all(&reader, directory, stop, progress)
}

fn extract_all(
    reader: &TreeReader<'_>,
    directory: &Path,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(ExtractProgress<'_>),
) -> Result<ExtractReport, ExtractError> {
    let host = Host::new(directory)?;
    let report = ExtractReport::new(reader);
    let mut extraction = Extraction { reader, host, report, stop, progress };
    match extraction.run() {
        Ok(()) => Ok(extraction.report),
        Err(Ended::Interrupted) => {
            Err(ExtractError::Interrupted { report: Box::new(extraction.report) })
        }
        Err(Ended::Host(path, source)) => Err(ExtractError::Host {
            path: crate::walk::shown_path(&path),
            source,
            report: Box::new(extraction.report),
        }),
    }
}

/// Why it does not go on.
enum Ended {
    Interrupted,
    /// What was to be made, and the host's error.
    Host(Vec<u8>, io::Error),
}

struct Extraction<'x, 'a> {
    reader: &'x TreeReader<'a>,
    host: Host,
    report: ExtractReport,
    stop: &'x AtomicBool,
    progress: &'x mut dyn FnMut(ExtractProgress<'_>),
}

impl Extraction<'_, '_> {
    fn run(&mut self) -> Result<(), Ended> {
        let mut walk = Walk::new(self.reader);
        while let Some(step) = walk.next() {
            self.expect_to_go_on()?;
            match step {
                Step::Enter(entry) => {
                    if !self.enter(walk.path(), &entry)? {
                        walk.leave_out();
                    }
                }
                Step::Leave(entry) => {
                    let left = self.host.leave().map_err(|error| ended(walk.path(), error))?;
                    self.dress(walk.path(), &entry, &left)?;
                }
                Step::Object(entry) => self.object(walk.path(), &entry)?,
                Step::Problem { object, problem } => {
                    self.report.add(Loss::new(walk.path(), object, problem));
                }
            }
        }
        self.host.sync().map_err(|error| ended(b"", error))?;
        self.report.complete = true;
        Ok(())
    }

    fn expect_to_go_on(&mut self) -> Result<(), Ended> {
        (self.progress)(ExtractProgress::Extracting {
            done_bytes: self.report.data_bytes,
            total_bytes: self.reader.summary.used_bytes,
            report: &self.report,
        });
        if self.stop.load(Ordering::Relaxed) { Err(Ended::Interrupted) } else { Ok(()) }
    }

    /// Ends the extraction if the host failed; otherwise notes that it refused one thing.
    fn refused(&mut self, path: &[u8], entry: &Entry, error: HostError) -> Result<(), Ended> {
        if error.ends_all() {
            return Err(ended(path, error));
        }
        self.report.add(Loss::new(path, entry.object, error.to_string()));
        Ok(())
    }

    fn enter(&mut self, path: &[u8], entry: &Entry) -> Result<bool, Ended> {
        match self.host.enter(&entry.name) {
            Ok(()) => {
                self.report.directories += 1;
                Ok(true)
            }
            Err(error) => {
                self.refused(path, entry, error)?;
                Ok(false)
            }
        }
    }

    fn object(&mut self, path: &[u8], entry: &Entry) -> Result<(), Ended> {
        let linked = entry.attributes.links > 1;
        if linked && let Some(made) = self.host.link(entry.object, &entry.name) {
            match made {
                Ok(()) => {
                    self.report.hard_links += 1;
                    return Ok(());
                }
                // A copy is better than nothing.
                Err(error) => self.refused(path, entry, error)?,
            }
        }
        let made = match entry.file_type {
            FileType::Regular => self.regular(path, entry)?,
            FileType::Symlink => self.symlink(path, entry)?,
            _ => self.special(path, entry)?,
        };
        if made && linked {
            self.host.remember(entry.object, &entry.name);
        }
        Ok(())
    }

    fn regular(&mut self, path: &[u8], entry: &Entry) -> Result<bool, Ended> {
        let file = match self.host.create(&entry.name) {
            Ok(file) => file,
            Err(error) => {
                self.refused(path, entry, error)?;
                return Ok(false);
            }
        };
        let object = entry.object;
        let reader = self.reader;
        let written = reader.read_file(object, &entry.attributes, &mut |piece| {
            match piece {
                Piece::Data { offset_bytes, bytes } => {
                    self.expect_to_go_on()?;
                    self.report.data_bytes += bytes.len() as u64;
                    file.write(offset_bytes, bytes).map_err(|error| ended(path, error))?;
                }
                Piece::Damaged { offset_bytes, length_bytes, problem } => {
                    let loss = Loss::data(path, object, offset_bytes, length_bytes, problem);
                    self.report.add(loss);
                }
                Piece::Missing { problem } => self.report.add(Loss::new(path, object, problem)),
            }
            Ok(())
        });
        let ended_early = written.and_then(|()| match file.set_size(entry.attributes.size) {
            Err(error) if !error.ends_all() => {
                self.report.add(Loss::new(path, object, error.to_string()));
                Ok(())
            }
            result => result.map_err(|error| ended(path, error)),
        });
        if let Err(ended) = ended_early {
            // Half a file would be taken for a whole one.
            self.host.remove(&entry.name);
            return Err(ended);
        }
        self.report.files += 1;
        self.dress(path, entry, &file.done())?;
        Ok(true)
    }

    fn symlink(&mut self, path: &[u8], entry: &Entry) -> Result<bool, Ended> {
        let target = match self.reader.target(entry.object, entry.attributes.size) {
            Ok(target) => target,
            Err(problem) => {
                self.report.add(Loss::new(path, entry.object, problem));
                return Ok(false);
            }
        };
        let made = self.host.symlink(&entry.name, &target);
        self.made(path, entry, made, |report| &mut report.symlinks)
    }

    fn special(&mut self, path: &[u8], entry: &Entry) -> Result<bool, Ended> {
        let made = self.host.special(&entry.name, entry.file_type, &entry.attributes);
        self.made(path, entry, made, |report| &mut report.special_files)
    }

    fn made(
        &mut self,
        path: &[u8],
        entry: &Entry,
        made: Result<Made, HostError>,
        count: fn(&mut ExtractReport) -> &mut u64,
    ) -> Result<bool, Ended> {
        match made {
            Ok(made) => {
                *count(&mut self.report) += 1;
                self.dress(path, entry, &made)?;
                Ok(true)
            }
            Err(error) => {
                self.refused(path, entry, error)?;
                Ok(false)
            }
        }
    }

    /// Sets owner, extended attributes, mode and times of what the host holds, in an order in which
    /// none undoes another.
    fn dress(&mut self, path: &[u8], entry: &Entry, made: &Made) -> Result<(), Ended> {
        let mut xattrs = self.reader.xattrs(entry.object);
        // Settings of the volume have no place on the host.
        xattrs.whole.retain(|(name, _)| !name.starts_with(XATTR_OWN_PREFIX));
        for problem in xattrs.problems {
            self.report.add(Loss::new(path, entry.object, problem));
        }
        let attributes = &entry.attributes;
        let owners = match self.host.set_owner(made, attributes) {
            Ok(owners) => owners,
            Err(error) => return Err(ended(path, error)),
        };
        self.report.owners_left_out += u64::from(!owners.all());
        for (name, value) in &xattrs.whole {
            if let Err(error) = self.host.set_xattr(made, name, value) {
                self.refused(path, entry, error)?;
            }
        }
        let mode = owners.safe_mode(attributes.mode);
        if let Err(error) = self.host.set_mode(made, entry.file_type, mode) {
            self.refused(path, entry, error)?;
        }
        if let Err(error) = self.host.set_times(made, attributes) {
            self.refused(path, entry, error)?;
        }
        Ok(())
    }
}

fn ended(path: &[u8], error: HostError) -> Ended {
    Ended::Host(path.to_vec(), error.into())
}

#[cfg(test)]
mod extract_tests;
