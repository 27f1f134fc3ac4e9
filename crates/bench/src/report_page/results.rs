//! Results that other commands wrote as JSON: which kind they are shows in their fields.
use crate::ab::Comparison;
use crate::peers::Summary;
use crate::report::Report;
use anyhow::{Context, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// What a file holds.
#[derive(Debug)]
pub enum Content {
    /// Of `cairn bench run`.
    Run(Box<Report>),
    /// Of `cairn bench peers`.
    Peers(Box<Summary>),
    /// Of `cairn bench ab`.
    Comparison(Box<Comparison>),
}

/// A file with results.
#[derive(Debug)]
pub struct Results {
    /// Its name.
    pub source: String,
    /// What it holds.
    pub content: Content,
}

impl Results {
    /// Reads a file.
    ///
    /// # Errors
    /// When it can't be read, is no JSON, or is no result of a measurement; the error names the
    /// file.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let text = fs::read(path).with_context(|| format!("cannot read {name}"))?;
        let content = understand(&text).with_context(|| name.clone())?;
        let source = path.file_name().map_or(name, |file| file.to_string_lossy().into_owned());
        Ok(Self { source, content })
    }
}

fn understand(text: &[u8]) -> anyhow::Result<Content> {
    ensure!(
        !text.trim_ascii().is_empty(),
        "it is empty; write results into it with --json, for example \"cairn bench peers --json > FILE\""
    );
    let value: Value =
        serde_json::from_slice(text).context("it is not JSON; results are written with --json")?;
    let has = |name: &str| value.get(name).is_some();
    if has("mechanism") && has("measurements") {
        return Ok(Content::Comparison(read_as(value, "bench ab")?));
    }
    if has("rows") && has("samples") {
        return Ok(Content::Peers(read_as(value, "bench peers")?));
    }
    if has("workload") && has("throughput") {
        return Ok(Content::Run(read_as(value, "bench run")?));
    }
    bail!("it is JSON, but no result of \"cairn bench run\", \"peers\" or \"ab\"")
}

fn read_as<T: DeserializeOwned>(value: Value, command: &str) -> anyhow::Result<Box<T>> {
    serde_json::from_value(value).with_context(|| {
        format!("it looks like a result of \"cairn {command}\", but this version cannot read it")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_result_is_refused_with_the_file_and_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let cases = [
            ("empty", " \n", "it is empty"),
            ("text", "dbench 8 clients", "it is not JSON"),
            ("cut", "{\"workload\": \"dbench\", ", "it is not JSON"),
            ("other", "{\"name\": \"x\"}", "no result"),
            ("list", "[1, 2]", "no result"),
            ("old", "{\"workload\": \"dbench\", \"throughput\": 3}", "this version cannot read it"),
            ("rows", "{\"rows\": [], \"samples\": []}", "this version cannot read it"),
        ];
        for (name, content, reason) in cases {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            let error = format!("{:#}", Results::read(&path).unwrap_err());
            assert!(
                error.contains(&path.display().to_string()) && error.contains(reason),
                "{name}: {error}"
            );
        }
        let error = format!("{:#}", Results::read(&folder.path().join("missing")).unwrap_err());
        assert!(error.contains("missing") && error.contains("No such file"), "{error}");
        assert!(Results::read(folder.path()).is_err());
    }
}
