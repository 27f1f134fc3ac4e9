//! What an extraction copied, and what it could not.
use crate::object::ObjectId;
use crate::report::Finding;
use crate::tree_reader::TreeReader;
use crate::walk::shown_path;
use cairn_format::TREE_FILES;
use serde::Serialize;
use std::fmt;

/// Losses beyond this number are counted but not kept.
const LOSSES_MAX: usize = 10_000;

/// Something that was not extracted as it was on the volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Loss {
    /// Its path in the volume; of damage to the volume as a whole: none.
    pub path: Option<String>,
    /// Its inode.
    pub inode: Option<u64>,
    /// Its subvolume, unless that is the first one.
    pub subvolume: Option<u64>,
    /// Of data: where the range begins that is a hole now.
    pub offset_bytes: Option<u64>,
    /// Of data: the length of that range.
    pub length_bytes: Option<u64>,
    /// What is damaged, or what the host refused.
    pub problem: String,
}

impl Loss {
    pub(super) fn new(path: &[u8], object: ObjectId, problem: impl Into<String>) -> Self {
        let subvolume = object.subvolume;
        Self {
            path: Some(shown_path(path)),
            inode: Some(object.inode.0),
            subvolume: (subvolume != TREE_FILES).then_some(subvolume.0),
            offset_bytes: None,
            length_bytes: None,
            problem: problem.into(),
        }
    }

    pub(super) fn data(
        path: &[u8],
        object: ObjectId,
        offset_bytes: u64,
        length_bytes: u64,
        problem: String,
    ) -> Self {
        Self {
            offset_bytes: Some(offset_bytes),
            length_bytes: Some(length_bytes),
            ..Self::new(path, object, problem)
        }
    }

    fn of(finding: &Finding) -> Self {
        Self {
            path: None,
            inode: finding.inode,
            subvolume: finding.subvolume,
            offset_bytes: None,
            length_bytes: None,
            problem: finding.to_string(),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{path}: ")?;
        }
        if let (Some(offset), Some(length)) = (self.offset_bytes, self.length_bytes) {
            write!(f, "{length} bytes at offset {offset} are a hole now: ")?;
        }
        f.write_str(&self.problem)
    }
}

/// The result of an extraction.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ExtractReport {
    /// Identity of the volume.
    pub volume: String,
    /// Name of the volume.
    pub label: String,
    /// Newest committed transaction.
    pub generation: u64,
    /// Checkpoints of the log on top of it.
    pub checkpoints: u64,
    /// Whether it came to its end.
    pub complete: bool,
    /// Directories, the root among them.
    pub directories: u64,
    /// Regular files.
    pub files: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Device files, pipes and sockets.
    pub special_files: u64,
    /// Further names of files.
    pub hard_links: u64,
    /// Bytes of data.
    pub data_bytes: u64,
    /// Objects that belong to the user instead of their owner, for lack of rights.
    pub owners_left_out: u64,
    /// What was not extracted as it was; at most 10,000.
    pub losses: Vec<Loss>,
    /// Losses that were counted but not kept.
    pub losses_dropped: u64,
}

impl ExtractReport {
    pub(super) fn new(reader: &TreeReader<'_>) -> Self {
        let summary = reader.summary.clone();
        let mut report = Self {
            volume: summary.volume,
            label: summary.label,
            generation: summary.generation,
            checkpoints: summary.checkpoints,
            ..Self::default()
        };
        reader.findings().iter().for_each(|finding| report.add(Loss::of(finding)));
        report
    }

    pub(super) fn add(&mut self, loss: Loss) {
        if self.losses.len() < LOSSES_MAX {
            self.losses.push(loss);
        } else {
            self.losses_dropped += 1;
        }
    }

    /// 0: everything was extracted as it was; 4: something was lost, damaged or refused.
    pub fn exit_code(&self) -> u8 {
        if self.losses.is_empty() { 0 } else { 4 }
    }
}

impl fmt::Display for ExtractReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for loss in &self.losses {
            writeln!(f, "{loss}")?;
        }
        if self.losses_dropped > 0 {
            writeln!(f, "… and {} more", self.losses_dropped)?;
        }
        if self.owners_left_out > 0 {
            writeln!(
                f,
                "{} objects belong to this user: only root can give them their owners",
                self.owners_left_out
            )?;
        }
        writeln!(
            f,
            "volume {}: {} files with {} bytes, {} directories, {} symbolic links, {} special \
             files, {} further names",
            self.volume,
            self.files,
            self.data_bytes,
            self.directories,
            self.symlinks,
            self.special_files,
            self.hard_links
        )?;
        let count = self.losses.len() as u64 + self.losses_dropped;
        match (self.complete, count) {
            (false, _) => f.write_str("the extraction is incomplete"),
            (true, 0) => f.write_str("everything was extracted"),
            (true, 1) => f.write_str("1 loss, see above; everything else was extracted"),
            (true, _) => write!(f, "{count} losses, see above; everything else was extracted"),
        }
    }
}
