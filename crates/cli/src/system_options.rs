//! The options of mount(8) and fstab(5) that every file system takes, so that a line of fstab(5)
//! works as it is.
//!
//! Each is handed to the kernel (`nosuid`, `noatime`), stands for some that are (`user`), or
//! concerns mount(8) alone (`nofail`, `x-systemd.automount`) and is ignored here.
use cairn_fuse::KernelOptions;
use std::path::Path;

/// Concern mount(8), or say what is so anyway.
const IGNORED: &[&str] = &[
    "auto",
    "defaults",
    "iversion",
    "loop",
    "_netdev",
    "noauto",
    "nofail",
    "noiversion",
    "nomand",
    "nouser",
];

/// The same, with a value that may be anything.
const IGNORED_WITH_VALUE: &[&str] = &["comment", "loop"];

/// What the user's and the administrator's programs write down for themselves.
const IGNORED_PREFIXES: &[&str] = &["x-", "X-"];

/// Users may mount this, so it is safe from them unless a later option says otherwise; of each what
/// it stands for.
const IMPLYING: &[(&str, &[&str])] = &[
    ("user", &["nosuid", "nodev", "noexec"]),
    ("users", &["nosuid", "nodev", "noexec"]),
    ("owner", &["nosuid", "nodev"]),
    ("group", &["nosuid", "nodev"]),
];

/// SELinux: which context files get.
const CONTEXTS: &[&str] = &["context", "fscontext", "defcontext", "rootcontext"];

/// Known elsewhere, and without a meaning here.
const REFUSED: &[(&str, &str)] = &[
    ("remount", "a mounted volume keeps its options: unmount it, then mount it with others"),
    ("uid", "each file of a volume has an owner of its own; change it with chown"),
    ("gid", "each file of a volume has a group of its own; change it with chgrp"),
];

/// Whether there is SELinux on this machine; without it, the kernel refuses contexts.
const SELINUX: &str = "/sys/fs/selinux/enforce";

/// What became of an option.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is taken into account, or has nothing to say here.
    Taken,
    /// None of mount(8)'s.
    Unknown,
    /// It can't be used; the text says why.
    Refused(&'static str),
}

/// Takes the option `name`, with its value if it has one, into account.
pub fn apply(kernel: &mut KernelOptions, name: &str, value: Option<&str>) -> Outcome {
    let known = |list: &[&str]| list.contains(&name);
    if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
        return Outcome::Refused(why);
    }
    if IGNORED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
        return Outcome::Taken;
    }
    if let Some((_, implied)) = IMPLYING.iter().find(|(implying, _)| *implying == name) {
        // `user=NAME` is what mount(8) notes of a user's mount.
        return if value.is_none() || name == "user" {
            taken_if(implied.iter().all(|name| kernel.apply(name)))
        } else {
            Outcome::Unknown
        };
    }
    match value {
        None => taken_if(known(IGNORED) || kernel.apply(name)),
        Some(value) if known(CONTEXTS) => {
            let bare = value.trim_matches('"');
            if bare.is_empty() || bare.contains('"') {
                return Outcome::Refused(
                    "a context is a label of SELinux, such as context=\"system_u:object_r:tmp_t:s0\"",
                );
            }
            if Path::new(SELINUX).exists() {
                kernel.set_context(name, bare);
            }
            Outcome::Taken
        }
        Some(_) => taken_if(known(IGNORED_WITH_VALUE)),
    }
}

fn taken_if(known: bool) -> Outcome {
    if known { Outcome::Taken } else { Outcome::Unknown }
}

/// For the help: what [`apply`] knows beside Cairn's own options.
pub fn help() -> String {
    let kernel: Vec<_> = KernelOptions::names().collect();
    format!(
        "and those of mount(8):\n  {}\n  user, users (imply nosuid,nodev,noexec), owner, group (imply nosuid,nodev)\n  \
         context=, fscontext=, defcontext=, rootcontext= (where there is SELinux)\n  ignored: {},\n  x-…, X-…, comment=…\n\
         Of options that contradict each other the later one wins. Mounts by users other than\n\
         root are always nosuid and nodev.",
        // In lines that fit.
        kernel.chunks(8).map(|names| names.join(", ")).collect::<Vec<_>>().join(",\n  "),
        IGNORED.join(", ")
    )
}

/// The options of a list separated by commas; a comma between quotation marks separates nothing.
pub fn split(list: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    let options = list.split(move |character| {
        quoted ^= character == '"';
        character == ',' && !quoted
    });
    options.filter(|option| !option.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> KernelOptions {
        let mut kernel = KernelOptions::default();
        for option in split(list) {
            let (name, value) =
                option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
            assert_eq!(apply(&mut kernel, name, value), Outcome::Taken, "{option}");
        }
        kernel
    }

    #[test]
    fn what_users_may_mount_is_safe_unless_overridden() {
        assert_eq!(parse("user"), parse("nosuid,nodev,noexec"));
        assert_eq!(parse("users,exec"), parse("nosuid,nodev"));
        assert_eq!(parse("exec,user=ada"), parse("nosuid,nodev,noexec"));
        assert_eq!(parse("owner"), parse("group"));
        assert_eq!(parse("user,suid,dev,exec"), KernelOptions::default());
    }

    #[test]
    fn what_concerns_others_is_ignored() {
        let list = "defaults,_netdev,auto,noauto,nofail,nouser,loop,loop=/dev/loop3,comment=a=b,x-systemd.automount,x-a=b,X-mount.mkdir=0755";
        assert_eq!(parse(list), KernelOptions::default());
        assert_eq!(parse("nosuid,defaults"), parse("nosuid"), "as with mount(8)");
        if !Path::new(SELINUX).exists() {
            assert_eq!(parse("context=\"a:b:c:s0:c1,c2\",rootcontext=d"), KernelOptions::default());
        }
    }

    #[test]
    fn commas_between_quotation_marks_separate_nothing() {
        assert_eq!(
            split("a,,context=\"b,c\",d").collect::<Vec<_>>(),
            ["a", "context=\"b,c\"", "d"]
        );
    }

    #[test]
    fn what_has_no_meaning_here_is_told_apart_from_the_unknown() {
        let mut kernel = KernelOptions::default();
        assert!(
            matches!(apply(&mut kernel, "uid", Some("7")), Outcome::Refused(why) if why.contains("chown"))
        );
        assert!(
            matches!(apply(&mut kernel, "remount", None), Outcome::Refused(why) if why.contains("unmount"))
        );
        for (name, value) in [
            ("nosuids", None),
            ("nosuid", Some("1")),
            ("nofail", Some("1")),
            ("owner", Some("x")),
            ("comment", None),
        ] {
            assert_eq!(apply(&mut kernel, name, value), Outcome::Unknown, "{name}");
        }
        assert_eq!(kernel, KernelOptions::default());
    }
}
