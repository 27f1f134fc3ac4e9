//! Versions of the programs that take part, as the programs report them.
use super::process::{command, is_installed};
use super::summary::ToolVersion;
use std::process::Stdio;

/// Programs, and how they are asked. fs_mark has no question for it; Debian's package manager is
/// asked where there is one.
const QUESTIONS: &[(&str, &[&str])] = &[
    ("mkfs.ext4", &["mkfs.ext4", "-V"]),
    ("mkfs.xfs", &["mkfs.xfs", "-V"]),
    ("mkfs.btrfs", &["mkfs.btrfs", "--version"]),
    ("losetup", &["losetup", "--version"]),
    ("dbench", &["dbench", "--help"]),
    ("fs_mark", &["dpkg-query", "--show", "fsmark"]),
    ("fio", &["fio", "--version"]),
    ("tar", &["tar", "--version"]),
    ("git", &["git", "--version"]),
    ("cargo", &["cargo", "--version"]),
    ("sqlite3", &["sqlite3", "--version"]),
    ("postgres", &["postgres", "--version"]),
    ("pgbench", &["pgbench", "--version"]),
];

/// Of those of `programs` that report it.
pub fn of(programs: &[&str]) -> Vec<ToolVersion> {
    let asked =
        QUESTIONS.iter().filter(|(program, _)| programs.contains(program) && is_installed(program));
    asked
        .filter_map(|(program, question)| {
            Some(ToolVersion { name: (*program).into(), version: version_of(question)? })
        })
        .collect()
}

/// The first line of the answer that has a digit in it.
fn version_of(question: &[&str]) -> Option<String> {
    let mut asked = command(question[0], &question[1..]);
    let output =
        asked.env("PATH", super::process::search_path()).stdin(Stdio::null()).output().ok()?;
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    said.iter()
        .flat_map(|text| text.lines())
        .map(str::trim)
        .find(|line| line.contains(|letter: char| letter.is_ascii_digit()))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_answers() {
        assert_eq!(
            version_of(&["echo", "a tool, version 1.2"]).as_deref(),
            Some("a tool, version 1.2")
        );
        assert_eq!(
            version_of(&["sh", "-c", "echo tool; echo; echo v7 >&2"]).as_deref(),
            Some("v7")
        );
        assert_eq!(version_of(&["echo", "none"]), None);
        assert_eq!(version_of(&["no-such-command"]), None);
        assert_eq!(of(&["no-such-command"]), []);
    }
}
