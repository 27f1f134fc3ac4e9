//! `cairn bench report`: a page, or tables for a README, from results that other commands wrote.
use crate::report_page::{self, Results};
use anyhow::{Context, ensure};
use cairn_harness::console;
use clap::Parser;
use std::fs;
use std::path::PathBuf;

/// Make one page of charts and tables from results of `cairn bench run`, `peers` and `ab`, written
/// with --json.
///
/// The page holds everything it needs, and loads nothing from the network.
#[derive(Parser)]
pub struct Arguments {
    /// Files with results.
    #[arg(required = true, value_name = "RESULTS")]
    results: Vec<PathBuf>,
    /// File for the page; an existing file is replaced. Not needed with --markdown.
    #[arg(short, long, value_name = "FILE", required_unless_present = "markdown")]
    output: Option<PathBuf>,
    /// Print the tables as Markdown.
    #[arg(long)]
    markdown: bool,
}

/// Runs the command.
///
/// # Errors
/// When a file can't be read or understood, or the page can't be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(page) = arguments.output.as_ref().and_then(|path| path.canonicalize().ok()) {
        let is_page = |path: &&PathBuf| path.canonicalize().is_ok_and(|path| path == page);
        ensure!(
            !arguments.results.iter().any(|path| is_page(&path)),
            "{} is a file of results; name another file for the page",
            page.display()
        );
    }
    let results = arguments
        .results
        .iter()
        .map(|path| Results::read(path))
        .collect::<anyhow::Result<Vec<Results>>>()?;
    if let Some(path) = &arguments.output {
        fs::write(path, report_page::page(&results))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if arguments.markdown { console::print_text(&report_page::markdown(&results)) } else { Ok(()) }
}
