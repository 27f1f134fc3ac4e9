//! The options of mount(8) that the kernel handles for every file system.
//!
//! Invariant: of options that exclude each other (`suid` and `nosuid`, `noatime` and `relatime`)
//! the later one wins.
use rustix::mount::MountFlags;
use std::fmt::Write;

/// Options of the kernel for one mount. The default is the kernel's: everything is allowed, access
/// times are relative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelOptions {
    flags: MountFlags,
    /// SELinux contexts, as `name="value"`.
    contexts: Vec<String>,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self { flags: MountFlags::empty(), contexts: Vec::new() }
    }
}

struct FlagOption {
    name: &'static str,
    /// The flags that it clears; of a group of exclusive flags, all.
    clears: MountFlags,
    /// The flags that it sets.
    sets: MountFlags,
}

const fn on(name: &'static str, flag: MountFlags) -> FlagOption {
    FlagOption { name, clears: MountFlags::empty(), sets: flag }
}

const fn off(name: &'static str, flag: MountFlags) -> FlagOption {
    FlagOption { name, clears: flag, sets: MountFlags::empty() }
}

const fn access_times(name: &'static str, flag: MountFlags) -> FlagOption {
    FlagOption { name, clears: ACCESS_TIMES, sets: flag }
}

const ACCESS_TIMES: MountFlags =
    MountFlags::NOATIME.union(MountFlags::RELATIME).union(MountFlags::STRICTATIME);

const FLAGS: &[FlagOption] = &[
    on("nosuid", MountFlags::NOSUID),
    off("suid", MountFlags::NOSUID),
    on("nodev", MountFlags::NODEV),
    off("dev", MountFlags::NODEV),
    on("noexec", MountFlags::NOEXEC),
    off("exec", MountFlags::NOEXEC),
    on("nosymfollow", MountFlags::NOSYMFOLLOW),
    off("symfollow", MountFlags::NOSYMFOLLOW),
    on("sync", MountFlags::SYNCHRONOUS),
    off("async", MountFlags::SYNCHRONOUS),
    on("dirsync", MountFlags::DIRSYNC),
    access_times("noatime", MountFlags::NOATIME),
    off("atime", MountFlags::NOATIME),
    access_times("relatime", MountFlags::RELATIME),
    off("norelatime", MountFlags::RELATIME),
    access_times("strictatime", MountFlags::STRICTATIME),
    off("nostrictatime", MountFlags::STRICTATIME),
    on("nodiratime", MountFlags::NODIRATIME),
    off("diratime", MountFlags::NODIRATIME),
    on("lazytime", MountFlags::LAZYTIME),
    off("nolazytime", MountFlags::LAZYTIME),
    on("silent", MountFlags::SILENT),
    off("loud", MountFlags::SILENT),
];

/// Only root's mounts may omit these; `fusermount3` always sets them.
const ROOT_ONLY: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// Flags that not all versions of `fusermount3` know, and that have no effect on a FUSE mount: the
/// server keeps the times.
const NOT_FOR_HELPER: MountFlags = MountFlags::SILENT
    .union(MountFlags::LAZYTIME)
    .union(MountFlags::NODIRATIME)
    .union(MountFlags::RELATIME)
    .union(MountFlags::STRICTATIME);

impl KernelOptions {
    /// Applies the option `name` of mount(8). Returns false if it is none of the kernel's.
    ///
    /// ```
    /// let mut options = cairn_fuse::KernelOptions::default();
    /// assert!(options.apply("nosuid") && options.apply("noatime"));
    /// assert!(!options.apply("commit"));
    /// ```
    pub fn apply(&mut self, name: &str) -> bool {
        let Some(option) = FLAGS.iter().find(|option| option.name == name) else { return false };
        self.flags = self.flags.difference(option.clears).union(option.sets);
        true
    }

    /// Makes the kernel give files an SELinux context: `name` is `context`, `fscontext`,
    /// `defcontext` or `rootcontext`.
    pub fn set_context(&mut self, name: &str, value: &str) {
        let start = format!("{name}=");
        self.contexts.retain(|context| !context.starts_with(&start));
        self.contexts.push(format!("{start}\"{value}\""));
    }

    /// The names that [`KernelOptions::apply`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FLAGS.iter().map(|option| option.name)
    }

    /// Whether changes of names and attributes must be durable before the caller gets the answer.
    pub fn synchronous(&self) -> bool {
        self.flags.intersects(MountFlags::SYNCHRONOUS | MountFlags::DIRSYNC)
    }

    /// Whether an SELinux context is set.
    pub fn has_context(&self) -> bool {
        !self.contexts.is_empty()
    }

    /// The flags of mount(2).
    pub(super) fn flags(&self) -> MountFlags {
        self.flags
    }

    /// A part of the data of mount(2). Begins with a comma.
    pub(super) fn data(&self) -> String {
        self.contexts.iter().fold(String::new(), |mut data, context| {
            let _ = write!(data, ",{context}");
            data
        })
    }

    /// Options for `fusermount3`. Begins with a comma.
    pub(super) fn helper_options(&self) -> String {
        let flags = self.flags.difference(ROOT_ONLY | NOT_FOR_HELPER);
        let names =
            FLAGS.iter().filter(|option| !option.sets.is_empty() && flags.contains(option.sets));
        names.fold(String::new(), |mut list, option| {
            let _ = write!(list, ",{}", option.name);
            list
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> KernelOptions {
        let mut options = KernelOptions::default();
        for name in list.split(',') {
            assert!(options.apply(name), "{name}");
        }
        options
    }

    #[test]
    fn the_later_one_wins() {
        assert_eq!(
            parse("nosuid,nodev,noexec,suid,dev,exec,noatime,atime,sync,async"),
            KernelOptions::default()
        );
        assert_eq!(parse("noatime,strictatime,relatime").flags(), MountFlags::RELATIME);
        assert_eq!(parse("strictatime,noatime").flags(), MountFlags::NOATIME);
        assert_eq!(parse("noatime,norelatime").flags(), MountFlags::NOATIME);
        assert!(
            parse("dirsync").synchronous()
                && parse("sync").synchronous()
                && !parse("async").synchronous()
        );
        assert!(!KernelOptions::default().apply("user"));
    }

    #[test]
    fn the_helper_gets_what_it_knows() {
        assert_eq!(
            parse("nosuid,nodev,noexec,noatime,lazytime,dirsync,nodiratime").helper_options(),
            ",noexec,dirsync,noatime"
        );
        assert_eq!(KernelOptions::default().helper_options(), "");
    }

    #[test]
    fn a_context_is_quoted_and_replaced() {
        let mut options = KernelOptions::default();
        options.set_context("context", "a:b:c:s0:c1,c2");
        options.set_context("rootcontext", "r");
        options.set_context("context", "d");
        assert_eq!(options.data(), ",rootcontext=\"r\",context=\"d\"");
    }
}
