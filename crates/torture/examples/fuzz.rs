//! Fuzzes for a while: `cargo run --release -p cairn-torture --example fuzz SECONDS [SEED [CORPUS [FINDINGS]]]`. New inputs go to
//! the folder CORPUS, what fails to FINDINGS.
use cairn_torture::hostile::{FuzzOptions, fuzz, to_hex};
use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| arguments.get(index).map_or(Ok(1), |text| text.parse());
    let folder = arguments.get(2).map(Path::new);
    let mut corpus = Vec::new();
    if let Some(folder) = folder {
        for entry in std::fs::read_dir(folder)? {
            corpus.push(std::fs::read(entry?.path())?);
        }
    }
    let options =
        FuzzOptions { seed: number(1)?, time: Duration::from_secs(number(0)?), corpus, findings_max: 40, ..FuzzOptions::default() };
    let mut shown = 0;
    let report = fuzz(&options, &mut |progress| {
        if let Some(finding) = progress.found {
            eprintln!("input {}: {}", to_hex(&finding.input), finding.problem);
        }
        if progress.elapsed.as_secs() / 30 > shown {
            shown = progress.elapsed.as_secs() / 30;
            eprintln!("{progress:?}");
        }
    });
    println!("{report}");
    let save = |folder: &Path, input: &[u8]| {
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        std::fs::write(folder.join(format!("{:016x}", hasher.finish())), input)
    };
    if let Some(folder) = folder {
        report.corpus.iter().try_for_each(|input| save(folder, input))?;
    }
    if let Some(folder) = arguments.get(3).map(Path::new) {
        report.findings.iter().try_for_each(|finding| save(folder, &finding.input))?;
    }
    Ok(())
}
