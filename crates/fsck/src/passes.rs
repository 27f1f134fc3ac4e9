//! The table of passes, and the loop that runs them.
use crate::checker::Checker;
use crate::report::{Finding, PassId, Severity, Structure};
use crate::{FsckError, bitmaps, data, items, log, namespace, snapshots, superblocks, trees};

/// One pass.
struct Pass {
    id: PassId,
    /// Passes that must have ended without errors. Otherwise this one would only report their
    /// consequences again.
    needs: &'static [PassId],
    run: fn(&mut Checker<'_>) -> Result<(), FsckError>,
}

const PASSES: [Pass; 8] = [
    Pass { id: PassId::Superblocks, needs: &[], run: superblocks::check },
    Pass { id: PassId::Log, needs: &[], run: log::check },
    Pass { id: PassId::Trees, needs: &[], run: trees::check },
    Pass { id: PassId::Items, needs: &[], run: items::check },
    Pass { id: PassId::Namespace, needs: &[PassId::Log, PassId::Trees], run: namespace::check },
    Pass { id: PassId::Bitmaps, needs: &[PassId::Trees], run: bitmaps::check },
    Pass { id: PassId::Snapshots, needs: &[], run: snapshots::check },
    Pass { id: PassId::Data, needs: &[], run: data::check },
];

/// Runs all passes in order.
pub(crate) fn run(checker: &mut Checker<'_>) -> Result<(), FsckError> {
    for pass in &PASSES {
        let is_wanted = match pass.id {
            PassId::Data => checker.options.data,
            PassId::Snapshots => checker.superblock.features.has_snapshots(),
            _ => true,
        };
        if !is_wanted {
            continue;
        }
        if let Some(&damaged) = pass.needs.iter().find(|&&needed| checker.has_errors(needed)) {
            let problem =
                format!("pass {} was left out because pass {damaged} found errors", pass.id);
            checker.report.add(Finding::new(
                pass.id,
                Severity::Note,
                Structure::Superblock,
                problem,
            ));
            continue;
        }
        (pass.run)(checker)?;
        checker.report.passes.push(pass.id);
    }
    Ok(())
}
