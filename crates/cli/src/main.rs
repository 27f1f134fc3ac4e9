//! The `cairn` command: makes, mounts, checks and shows Cairn volumes.
//!
//! Each command lives in a file of its own under `commands/`, those that measure and torture in
//! crates of their own; it returns the process's exit code or an error, which is printed here, in
//! one place. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 after Ctrl-C; 4 of `stats
//! --check` and `device status`, if what they look at is not as it should be; `fsck` has its own (0
//! clean, 1 repaired, 4 errors left, 8 failure); of `diff` 1 is a difference, of `apply` it is a
//! conflict, of `torture` a finding, and 2 is everything else.
#![forbid(unsafe_code)]

mod commands;
mod create;
mod create_composed;
mod daemon;
mod image;
mod logging;
mod making;
mod memory;
mod mount_end;
mod mount_error;
mod mount_options;
mod repair_backup;
mod shell;
mod signature;
mod system_options;

use cairn_bench::command as bench;
use cairn_blockdev::DeviceError;
use cairn_harness::{EXIT_INTERRUPTED, Interrupted, console};
use cairn_torture::command as torture;
use clap::{Parser, Subcommand};
use mount_options::MountSettings;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// A crash-safe, checksummed, copy-on-write file system in user space.
#[derive(Parser)]
#[command(name = "cairn", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Mkfs(commands::mkfs::Arguments),
    Mount(commands::mount::Arguments),
    Umount(commands::umount::Arguments),
    Sync(commands::sync::Arguments),
    Trim(commands::trim::Arguments),
    Shutdown(commands::shutdown::Arguments),
    Subvolume(commands::subvolume::Arguments),
    Snapshot(commands::snapshot::Arguments),
    Fork(commands::fork::Arguments),
    Rollback(commands::rollback::Arguments),
    Diff(commands::diff::Arguments),
    Apply(commands::apply::Arguments),
    Fsck(commands::fsck::Arguments),
    Dump(commands::dump::Arguments),
    Stats(commands::stats::Arguments),
    Info(commands::info::Arguments),
    Device(commands::device::Arguments),
    Bench(bench::Arguments),
    #[command(mut_subcommands(
        |run| torture::check_mount_options(run, mount_options::checked)
    ))]
    Torture(torture::Arguments),
}

fn main() -> ExitCode {
    if commands::mount_helper::is_called() {
        return commands::mount_helper::run();
    }
    let result = match Arguments::parse().command {
        Command::Mkfs(arguments) => commands::mkfs::run(&arguments),
        Command::Mount(arguments) => return report(commands::mount::run(&arguments), 1),
        Command::Umount(arguments) => commands::umount::run(&arguments),
        Command::Sync(arguments) => commands::sync::run(&arguments),
        Command::Trim(arguments) => commands::trim::run(&arguments),
        Command::Shutdown(arguments) => commands::shutdown::run(&arguments),
        Command::Subvolume(arguments) => return report(commands::subvolume::run(&arguments), 1),
        Command::Snapshot(arguments) => return report(commands::snapshot::run(&arguments), 1),
        Command::Fork(arguments) => commands::fork::run(&arguments),
        Command::Rollback(arguments) => commands::rollback::run(&arguments),
        Command::Diff(arguments) => {
            return report(commands::diff::run(&arguments), commands::diff::EXIT_FAILURE);
        }
        Command::Apply(arguments) => {
            return report(commands::apply::run(&arguments), commands::apply::EXIT_FAILURE);
        }
        Command::Fsck(arguments) => {
            return report(commands::fsck::run(&arguments), commands::fsck::EXIT_FAILURE);
        }
        Command::Dump(arguments) => commands::dump::run(&arguments),
        Command::Stats(arguments) => return report(commands::stats::run(&arguments), 1),
        Command::Info(arguments) => commands::info::run(&arguments),
        Command::Device(arguments) => return report(commands::device::run(&arguments), 1),
        Command::Bench(arguments) => bench::run(&arguments, |lists| {
            MountSettings::parse(lists).map(|settings| settings.mount).map_err(anyhow::Error::msg)
        }),
        Command::Torture(arguments) => {
            return report(torture::run(&arguments), torture::EXIT_UNABLE);
        }
    };
    report(result.map(|()| ExitCode::SUCCESS), 1)
}

/// What was looked at is not as it should be: `fsck` leaves errors, `stats --check` finds failures,
/// a device is degraded.
pub(crate) const EXIT_UNSOUND: u8 = 4;

/// The exit code of a command; an error goes to standard error first.
fn report(result: anyhow::Result<ExitCode>, failure: u8) -> ExitCode {
    result.unwrap_or_else(|error| {
        console::tell(&format_args!("cairn: {}", message(&error)));
        ExitCode::from(if error.is::<Interrupted>() { EXIT_INTERRUPTED } else { failure })
    })
}

/// Does something with each of several arguments, as mkdir(1) and rm(1) do: reports the error of
/// one, and goes on with the next. The exit code is 1 if there was an error.
pub(crate) fn each<T>(
    arguments: impl IntoIterator<Item = T>,
    act: impl Fn(T) -> anyhow::Result<()>,
) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for one in arguments {
        if let Err(error) = act(one) {
            code = report(Err(error), 1);
        }
    }
    code
}

/// The error and its causes, each once: some errors name their cause themselves. Of a lock, the way
/// out stands instead of the system's "temporarily unavailable".
fn message(error: &anyhow::Error) -> String {
    let in_use = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<DeviceError>())
        .find(|error| error.is_in_use())
        .map(|error| &*error.device);
    let causes = error.chain().filter(|cause| !(in_use.is_some() && cause.is::<io::Error>()));
    let text = causes.fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.as_str() {
            "" => cause,
            text if text.contains(&cause) => text.to_owned(),
            text => format!("{text}: {cause}"),
        }
    });
    let Some(device) = in_use else { return text };
    match cairn_fuse::mount_point_of(Path::new(device)) {
        Some(directory) => {
            let unmount = shell::command("cairn umount", &[mount_error::shown(&directory)]);
            format!("{text}: it is mounted; `{unmount}` unmounts it")
        }
        None => format!("{text}; if it is mounted, run `cairn umount DIR`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_printed_once() {
        let error = anyhow::anyhow!("no space").context("image: no space").context("mkfs");
        assert_eq!(message(&error), "mkfs: image: no space");
    }
}
