//! What a measurement was made on and when, so that its figures can be understood later and
//! elsewhere.
use cairn_environment::clock;
use cairn_harness::mounts::{self, Mount};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// This machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the processor.
    pub cpu_model: String,
    /// Processors that this program may use.
    pub cpus: usize,
    /// Main memory.
    pub memory_bytes: u64,
    /// Name and release of the kernel.
    pub kernel: String,
    /// What is below the images: the file system of their folder, and the device with its kind.
    /// Empty when it doesn't matter.
    pub device: String,
}

/// The value behind `name:` in a text of such lines.
fn value_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

fn memory_bytes(meminfo: &str) -> u64 {
    let kilobytes = value_of(meminfo, "MemTotal")
        .and_then(|value| value.split(' ').next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

/// What the kernel knows of a disk: its model where it has one, and whether it turns.
fn disk_text(source: &str) -> String {
    let name = source.rsplit('/').next().unwrap_or(source);
    let attribute = |path: &str| fs::read_to_string(format!("/sys/class/block/{name}/{path}")).ok();
    let model = attribute("device/model")
        .or_else(|| attribute("../device/model"))
        .map(|model| format!(" {}", model.trim()));
    let kind = match attribute("queue/rotational")
        .or_else(|| attribute("../queue/rotational"))
        .as_deref()
        .map(str::trim)
    {
        Some("0") => ", not rotational",
        Some("1") => ", rotational",
        _ => "",
    };
    format!("{source}{}{kind}", model.unwrap_or_default())
}

/// What a folder lies on. Of a root that is no mount point (that of a chroot) the table of mounts
/// knows nothing; its number still leads to the disk.
fn below(folder: &Path, mounts: &[Mount]) -> String {
    if let Some(mount) = mounts::mount_of(mounts, folder) {
        return format!("{} on {}", mount.kind, disk_text(&mount.source));
    }
    let number = fs::metadata(folder).map_or(0, |metadata| metadata.dev());
    let disk = fs::canonicalize(format!(
        "/sys/dev/block/{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    ));
    let name = disk.ok().and_then(|disk| {
        Some(disk_text(&Path::new("/dev").join(disk.file_name()?).to_string_lossy()))
    });
    format!(
        "a file system on {}",
        name.unwrap_or_else(|| "a device that does not show here".into())
    )
}

impl Machine {
    /// This one; with `folder`, also what is below that folder.
    pub fn here(folder: Option<&Path>) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let uname = rustix::system::uname();
        // What `Path::parent` says of a name alone is an empty path.
        let folder = folder
            .map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
        let device = folder
            .and_then(|folder| fs::canonicalize(folder).ok())
            .map(|folder| below(&folder, &mounts::all()));
        Self {
            cpu_model: value_of(&read("/proc/cpuinfo"), "model name")
                .unwrap_or("unknown")
                .to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
            kernel: format!(
                "{} {}",
                uname.sysname().to_string_lossy(),
                uname.release().to_string_lossy()
            ),
            device: device.unwrap_or_default(),
        }
    }
}

/// The moment in UTC, as RFC 3339 writes it.
pub fn utc_now() -> String {
    utc_text(clock::now_wall().0)
}

fn utc_text(seconds: i64) -> String {
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years of this count begin in March, so that the day that some of them lack is their last.
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_written_as_in_a_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_793_491_200, "2026-11-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(utc_text(seconds), text);
        }
    }

    #[test]
    fn the_files_of_proc_are_understood() {
        assert_eq!(memory_bytes("MemTotal:       24684668 kB\nMemFree: 1 kB\n"), 24_684_668 * 1024);
        assert_eq!(memory_bytes(""), 0);
        assert_eq!(value_of("a: 1\nmodel name\t: Fast One\n", "model name"), Some("Fast One"));
    }

    #[test]
    fn this_machine_has_figures() {
        let machine = Machine::here(Some(Path::new("/")));
        assert!(
            machine.cpus > 0 && machine.memory_bytes > 0 && machine.kernel.starts_with("Linux "),
            "{machine:?}"
        );
        assert!(machine.device.contains(" on "), "{machine:?}");
        // As in a chroot whose root is no mount point.
        let unlisted = below(Path::new("/"), &[]);
        assert!(
            unlisted.starts_with("a file system on ") && unlisted.len() > "a file system on ".len(),
            "{unlisted}"
        );
        let beside = Machine::here(Path::new("image").parent());
        assert!(beside.device.contains(" on "), "{beside:?}");
    }
}
