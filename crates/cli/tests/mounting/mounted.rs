//! A volume of a test, on a real mount.
#![allow(dead_code, reason = "each test program uses a part of it")]
use crate::mounting;
use cairn_environment::lock::MutexGuard;
use cairn_harness::mounts;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

/// A folder with room for an image and a mount point; nothing stays mounted after it.
pub struct Mounted {
    pub folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Mounted {
    /// `None` where mounts are not possible.
    pub fn new() -> Option<Self> {
        let alone = mounting::alone()?;
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("dir")).unwrap();
        Some(Self { folder, _alone: alone })
    }

    /// With a new volume of 64 MiB, mounted.
    pub fn with_volume() -> Option<Self> {
        let mounted = Self::new()?;
        mounted.succeeds(&["mkfs", "--size", "64M", "image"]);
        mounted.succeeds(&["mount", "image", "dir"]);
        Some(mounted)
    }

    /// Runs `test` on a mount of a new volume of 128 MiB for each transport that this machine has;
    /// `options` begin with a comma. `CAIRN_TEST_TRANSPORT` leaves one.
    pub fn on_each_transport(options: &str, test: impl Fn(&Self)) {
        for transport in mounts::transports_of_tests() {
            let Some(mounted) = Self::new() else { return };
            mounted.succeeds(&["mkfs", "--size", "128M", "image"]);
            let options = format!("transport={transport}{options}");
            mounted.succeeds(&["mount", "-o", &options, "image", "dir"]);
            test(&mounted);
            mounted.end();
        }
    }

    /// Ends the mount, and checks the volume with its data.
    #[track_caller]
    pub fn end(&self) {
        self.succeeds(&["umount", "dir"]);
        self.succeeds(&["fsck", "--data", "image"]);
    }

    /// The same, and a new mount.
    #[track_caller]
    pub fn remount(&self) {
        self.end();
        self.succeeds(&["mount", "image", "dir"]);
    }

    /// What has this name in the mount.
    pub fn at(&self, name: &str) -> PathBuf {
        self.path(&format!("dir/{name}"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().unwrap()
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cairn"));
        command.args(arguments).current_dir(self.folder.path());
        if let (Some(&"mount"), Ok(transport)) =
            (arguments.first(), std::env::var("CAIRN_TEST_TRANSPORT"))
        {
            command.args(["-o", &format!("transport={transport}")]);
        }
        command
    }

    /// Runs a shell script in the folder, in a mount namespace of its own; `None` where there can
    /// be none: in a chroot whose root is no mount point, the host would see the mounts.
    pub fn in_own_namespace(&self, script: &str, variables: &[(&str, &str)]) -> Option<Output> {
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "private"]).current_dir(self.folder.path());
            command
        };
        if !unshare()
            .arg("true")
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
        {
            eprintln!("left out: no mount namespace of its own");
            return None;
        }
        Some(unshare().args(["sh", "-c", script]).envs(variables.iter().copied()).output().unwrap())
    }

    #[track_caller]
    pub fn exits_with(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let told = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(output.status.code(), Some(code), "cairn {}: {told}", arguments.join(" "));
        told
    }

    #[track_caller]
    pub fn succeeds(&self, arguments: &[&str]) -> String {
        self.exits_with(0, arguments)
    }

    /// A server in the foreground, whose mount stands; it logs to `log`.
    pub fn serve(&self, arguments: &[&str]) -> Child {
        let mut server = self
            .command(&[&["mount", "--foreground", "--log", "log"], arguments].concat())
            .spawn()
            .unwrap();
        while !self.is_mounted() {
            assert!(server.try_wait().unwrap().is_none(), "the server ended: {}", self.logged());
            cairn_environment::clock::sleep(std::time::Duration::from_millis(5));
        }
        server
    }

    /// What a server has logged.
    pub fn logged(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Whether the kernel lists the mount, also without a server.
    pub fn is_listed(&self) -> bool {
        mounts::is_mounted_below(&self.path("dir"))
    }

    pub fn is_mounted(&self) -> bool {
        fs::metadata(self.path("dir")).unwrap().dev()
            != fs::metadata(self.folder.path()).unwrap().dev()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let directory = self.path("dir");
        if self.is_listed() {
            let _ = self.run(&["umount", "dir"]);
            let _ = Command::new("umount").arg("-l").arg(&directory).stderr(Stdio::null()).status();
            let _ = Command::new("fusermount3")
                .args(["-u", "-z"])
                .arg(&directory)
                .stderr(Stdio::null())
                .status();
        }
    }
}
