//! `cairn stats`: what a mounted volume has done, or what a volume is.
use crate::image::{self, Image};
use crate::{mount_error, output};
use anyhow::Context;
use cairn_blockdev::OpenMode;
use serde_json::Value;

/// Show the statistics of a mounted volume, or the superblock of one that is not mounted.
#[derive(clap::Args)]
pub struct Arguments {
    /// Directory that shows the volume, or image file, or block device, or several: mirror:A,B, concat:A,B.
    #[arg(value_parser = image::parser())]
    target: Image,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When there is no volume, or it does not answer.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Image::Single(target) = &arguments.target else { return show_superblocks(arguments) };
    let is_mount = cairn_fuse::find_mount(target)?.is_some();
    let is_directory = std::fs::metadata(target).map(|metadata| metadata.is_dir()).with_context(|| target.display().to_string());
    // A mount whose server is dead can't even be asked what it is; let `statistics` say so.
    if is_mount || is_directory? {
        let text = cairn_fuse::statistics(target).map_err(mount_error::explain)?;
        if arguments.json {
            return output::print_text(&text);
        }
        let value: Value = serde_json::from_str(&text).context("the server's answer is not JSON")?;
        let mut lines = Vec::new();
        flatten("", &value, &mut lines);
        return output::print_text(&lines.join("\n"));
    }
    show_superblocks(arguments)
}

fn show_superblocks(arguments: &Arguments) -> anyhow::Result<()> {
    let device = arguments.target.open(OpenMode::ReadOnly, true)?;
    image::warn_if_degraded(&*device);
    let superblocks = cairn_fsck::dump::dump_super(&*device).with_context(|| arguments.target.to_string())?;
    output::print(&superblocks, arguments.json)
}

/// One line `group.name: value` for each number and text in `value`.
fn flatten(name: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                flatten(&name, value, lines);
            }
        }
        Value::String(text) => lines.push(format!("{name}: {text}")),
        value => lines.push(format!("{name}: {value}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_statistics_become_lines() {
        let mut lines = Vec::new();
        flatten("", &serde_json::json!({"fsync": {"count": 3, "p99_ns": [1, 2]}, "state": "running"}), &mut lines);
        assert_eq!(lines, ["fsync.count: 3", "fsync.p99_ns: [1,2]", "state: running"]);
    }
}
