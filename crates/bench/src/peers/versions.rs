//! Versions of the programs that take part, as they tell them.
use super::process::{command, is_installed};
use super::summary::ToolVersion;
use std::process::Stdio;

/// Programs, and how they are asked; fs_mark tells its version only in a run.
const QUESTIONS: &[(&str, &str)] = &[
    ("mkfs.ext4", "-V"),
    ("mkfs.xfs", "-V"),
    ("mkfs.btrfs", "--version"),
    ("losetup", "--version"),
    ("dbench", "--help"),
    ("fio", "--version"),
    ("postgres", "--version"),
    ("pgbench", "--version"),
];

/// Of those of `programs` that tell it.
pub fn of(programs: &[&str]) -> Vec<ToolVersion> {
    let asked = QUESTIONS.iter().filter(|(program, _)| programs.contains(program) && is_installed(program));
    asked.filter_map(|(program, question)| Some(ToolVersion { name: (*program).into(), version: version_of(program, question)? })).collect()
}

fn version_of(program: &str, question: &str) -> Option<String> {
    let mut asked = command(program, &[question]);
    let output = asked.env("PATH", super::process::search_path()).stdin(Stdio::null()).output().ok()?;
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    said.iter()
        .flat_map(|text| text.lines())
        .map(str::trim)
        .find(|line| line.contains(|letter: char| letter.is_ascii_digit()))
        .map(str::to_owned)
}
