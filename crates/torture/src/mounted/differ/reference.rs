//! The file system that shows what is right: a directory that the user named; or ext4 on a loop
//! device, if the user is root; or else the work folder's own file system.
use super::system::{self, HERE};
use cairn_harness::process::output_of;
use cairn_harness::work_folder::WorkFolder;
use rustix::fs::StatVfsMountFlags;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const IMAGE_BYTES: u64 = 4 << 30;
const CLOCK_TRIES: usize = 30;

/// The reference of a run.
pub struct Reference {
    folder: PathBuf,
    /// Which one, in words.
    pub name: String,
    /// Reading changes no access times there.
    pub no_access_times: bool,
    /// Two changes, each seen by stat(2), have different times.
    pub fine_times: bool,
    _named: Option<WorkFolder>,
}

fn command(program: &str, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(program);
    command.args(arguments).process_group(0).stdin(Stdio::null());
    match output_of(&mut command) {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

/// Without a journal, and without flushes: only what calls return matters. Attributes of 64 KiB
/// need inodes of their own.
fn mount_ext4(work: &Path, mountpoint: &Path) -> Result<(), String> {
    let image = work.join("reference.image");
    let made = fs::File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES));
    made.map_err(|error| error.to_string())?;
    let (image, mountpoint) = (image.to_string_lossy(), mountpoint.to_string_lossy());
    let features = "^has_journal,ea_inode,^metadata_csum";
    command("mkfs.ext4", &["-q", "-F", "-b", "4096", "-O", features, &image])?;
    command("mount", &["-t", "ext4", "-o", "loop,noatime,nobarrier", &image, &mountpoint])
}

impl Reference {
    /// Below `named`, or in the folder `work`, which must be taken off all mounts at the end.
    ///
    /// # Errors
    /// When there is no such directory.
    pub fn new(work: &Path, named: Option<&Path>, privileged: bool) -> Result<Self, String> {
        let kept = named
            .map(|named| WorkFolder::new(named, "cairn-reference"))
            .transpose()
            .map_err(|error| format!("{error:#}"))?;
        let (folder, mut name) = match &kept {
            Some(kept) => (kept.path().to_owned(), "the directory of --reference".to_owned()),
            None => (work.join("reference"), "the file system of the work folder".to_owned()),
        };
        if kept.is_none() {
            fs::create_dir(&folder).map_err(|error| error.to_string())?;
            if privileged {
                match mount_ext4(work, &folder) {
                    Ok(()) => name = "ext4".to_owned(),
                    Err(problem) => name = format!("{name} (no ext4: {problem})"),
                }
            }
        }
        let flags = rustix::fs::statvfs(&folder).map(|space| space.f_flag);
        let no_access_times = flags.is_ok_and(|flags| flags.contains(StatVfsMountFlags::NOATIME));
        let fine_times = has_fine_times(&folder);
        Ok(Self { folder, name, no_access_times, fine_times, _named: kept })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

fn has_fine_times(folder: &Path) -> bool {
    let path = folder.join("clock");
    if fs::write(&path, "").is_err() {
        return false;
    }
    let text = path.to_string_lossy();
    let time = || super::side::facts_of(&text).map(|facts| facts.times[2]);
    let differ = (0..CLOCK_TRIES).all(|_| {
        let before = time();
        system::chmod(HERE, &text, 0o600).is_ok() && time() != before
    });
    fs::remove_file(&path).is_ok() && differ
}
