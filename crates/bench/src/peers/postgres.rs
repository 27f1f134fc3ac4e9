//! A PostgreSQL server on the file system under test, for pgbench: default settings, an
//! unprivileged user, a socket in the stage's folder and no port. It ends when its guard is
//! dropped.
use super::process::{self, command, run_to_end};
use anyhow::{Context, bail};
use cairn_environment::clock;
use cairn_harness::Interrupt;
use cairn_harness::process::{end, wait_at_most};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// About 70 MB of tables.
const SCALE: &str = "5";
const START_PATIENCE: Duration = Duration::from_secs(60);
const STOP_PATIENCE: Duration = Duration::from_secs(60);
/// Users that may run it, the first that exists.
const USERS: [&str; 2] = ["postgres", "nobody"];

/// A running server.
pub struct Postgres {
    server: Child,
}

/// User and group of the first of `names` in a user table.
fn user_in(table: &str, names: &[&str]) -> Option<(u32, u32)> {
    names.iter().find_map(|name| {
        let mut fields =
            table.lines().find(|line| line.split(':').next() == Some(name))?.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    })
}

struct Setting<'a> {
    user: (u32, u32),
    folder: &'a Path,
    interrupt: &'a Interrupt,
}

impl Setting<'_> {
    fn program(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = command(name, arguments);
        command.uid(self.user.0).gid(self.user.1).current_dir("/");
        command
    }

    fn give_away(&self, path: &Path) -> anyhow::Result<()> {
        fs::create_dir(path)?;
        std::os::unix::fs::chown(path, Some(self.user.0), Some(self.user.1))?;
        Ok(())
    }
}

/// Where the server listens.
pub fn socket_in(folder: &Path) -> PathBuf {
    folder.join("socket")
}

impl Postgres {
    /// Makes a database on the file system at `path`, starts the server, and fills pgbench's
    /// tables.
    ///
    /// # Errors
    /// When one of PostgreSQL's programs fails, or no unprivileged user exists.
    pub fn start(path: &Path, folder: &Path, interrupt: &Interrupt) -> anyhow::Result<Self> {
        let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let user = user_in(&users, &USERS)
            .context("PostgreSQL needs a user that is not root; add one called postgres")?;
        let setting = Setting { user, folder, interrupt };
        let (data, socket) = (path.join("postgres"), socket_in(folder));
        setting.give_away(&data)?;
        if !socket.exists() {
            setting.give_away(&socket)?;
        }
        let mut make = setting
            .program("initdb", &["--username=postgres", "--auth=trust", "--no-instructions", "-D"]);
        make.arg(&data);
        run_to_end(make, folder, interrupt)
            .context("the folders above the images must be open to other users")?;
        let mut serve = setting.program("postgres", &["-c", "listen_addresses=", "-D"]);
        serve.arg(&data).arg("-k").arg(&socket);
        let mut postgres = Self { server: process::start(&mut serve, folder, "postgres")? };
        postgres.wait_until_it_answers(&setting, &socket)?;
        let mut fill = command("pgbench", &["-i", "-q", "-s", SCALE, "-U", "postgres", "-h"]);
        fill.arg(&socket).arg("postgres");
        run_to_end(fill, folder, interrupt)?;
        Ok(postgres)
    }

    fn wait_until_it_answers(
        &mut self,
        setting: &Setting<'_>,
        socket: &Path,
    ) -> anyhow::Result<()> {
        let start = clock::now_monotonic();
        loop {
            let mut ask = command("pg_isready", &["-q", "-h"]);
            ask.arg(socket);
            if run_to_end(ask, setting.folder, setting.interrupt).is_ok() {
                return Ok(());
            }
            setting.interrupt.check()?;
            if self.server.try_wait()?.is_some() || start.elapsed() > START_PATIENCE {
                let said =
                    fs::read_to_string(setting.folder.join("postgres.err")).unwrap_or_default();
                bail!("PostgreSQL did not start: {}", said.trim());
            }
            clock::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // SIGINT ends its sessions first; SIGTERM would wait for them.
        if let Some(server) = Pid::from_raw(self.server.id() as i32) {
            // It may have ended by itself.
            let _ = kill_process(server, Signal::INT);
        }
        if !matches!(wait_at_most(&mut self.server, STOP_PATIENCE), Ok(Some(_))) {
            end(&mut self.server);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found() {
        let table = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65533::/:/bin/false\n";
        assert_eq!(user_in(table, &USERS), Some((65534, 65533)));
        assert_eq!(user_in("root:x:0:0::/:/bin/sh\n", &USERS), None);
    }
}
