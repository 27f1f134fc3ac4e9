//! `mount.cairn`: what mount(8) runs for lines of fstab(5) with the type `cairn` or `fuse.cairn`.
//!
//! It is this same program, by a symbolic link of that name in `/sbin`; arguments and exit codes
//! are those that mount(8) asks of a helper.
use super::mount;
use crate::mount_options::MountSettings;
use crate::report;
use clap::Parser;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const NAMES: &[&str] = &["mount.cairn", "mount.fuse.cairn"];

/// Exit codes of mount(8).
const EXIT_USAGE: u8 = 1;
const EXIT_FAILURE: u8 = 32;

/// Mount a volume, for mount(8).
#[derive(Parser)]
#[command(name = "mount.cairn", version)]
struct Arguments {
    /// Image file or block device; or several: mirror:A,B, concat:A,B.
    image: OsString,
    /// Directory that will show the volume.
    dir: PathBuf,
    /// Ignore unknown options.
    #[arg(short)]
    sloppy: bool,
    /// Check the arguments, but mount nothing.
    #[arg(short)]
    fake: bool,
    /// Accepted for mount(8); there is no mount table to write.
    #[arg(short)]
    no_mtab: bool,
    /// Accepted for mount(8); there are no further messages.
    #[arg(short)]
    verbose: bool,
    /// Mount options, separated by commas.
    #[arg(short, value_name = "OPTION,…")]
    options: Vec<String>,
    /// Type of the file system.
    #[arg(short)]
    types: Option<String>,
}

#[derive(Parser)]
struct Mount {
    #[command(flatten)]
    arguments: mount::Arguments,
}

/// Whether this program runs under the name of the helper.
pub fn is_called() -> bool {
    let name = std::env::args_os().next().unwrap_or_default();
    Path::new(&name).file_name().is_some_and(|name| NAMES.iter().any(|helper| name == *helper))
}

/// Mounts what the command line says.
pub fn run() -> ExitCode {
    let parsed = Arguments::try_parse()
        .and_then(|arguments| Ok((Mount::try_parse_from(as_command(&arguments))?, arguments.fake)));
    match parsed {
        Ok((_, true)) => ExitCode::SUCCESS,
        Ok((Mount { arguments }, false)) => report(mount_once(&arguments), EXIT_FAILURE),
        Err(error) => {
            // A failure to print can't be reported anywhere.
            let _ = error.print();
            if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS }
        }
    }
}

/// `mount -a` mounts what is not mounted; mount(8) does not see that this image is.
fn mount_once(arguments: &mount::Arguments) -> anyhow::Result<ExitCode> {
    // A mount whose server has ended answers with an error: then mounting says so.
    if arguments.is_mounted()? { Ok(ExitCode::SUCCESS) } else { mount::run(arguments) }
}

/// The same as a command line of `cairn mount`.
fn as_command(arguments: &Arguments) -> Vec<OsString> {
    let mut command: Vec<OsString> = vec!["mount.cairn".into()];
    for list in &arguments.options {
        let list =
            if arguments.sloppy { MountSettings::without_unknown(list) } else { list.clone() };
        command.extend(["-o".into(), list.into()]);
    }
    command.extend(["--".into(), arguments.image.clone(), arguments.dir.clone().into()]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_order_of_mount_is_understood() {
        let parse = |line: &str| {
            Arguments::try_parse_from(line.split(' '))
                .map(|arguments| as_command(&arguments).join(" ".as_ref()))
        };
        let command = parse("mount.cairn /a /b -sfnv -o rw,barrier,nosuid -t fuse.cairn").unwrap();
        assert_eq!(command, "mount.cairn -o rw,nosuid -- /a /b");
        let command = parse("mount.cairn mirror:/a,/b /c -n -v -o ro,barrier").unwrap();
        assert_eq!(command, "mount.cairn -o ro,barrier -- mirror:/a,/b /c");
        assert!(parse("mount.cairn /a /b -N 7").is_err(), "another namespace");
    }
}
