//! The table of passes, and the loop that runs them.
use crate::checker::{Checker, LostNode};
use crate::report::{Finding, PassId, Severity, Structure};
use crate::{FsckError, bitmaps, data, items, log, namespace, snapshots, superblocks, trees};

/// One pass.
struct Pass {
    id: PassId,
    /// Passes that must have ended without errors. Otherwise this one would only report their
    /// consequences again.
    needs: &'static [PassId],
    /// Whether it compares names, and so needs all nodes with names.
    needs_names: bool,
    run: fn(&mut Checker<'_>) -> Result<(), FsckError>,
}

/// A pass that needs no other one.
const fn pass(id: PassId, run: fn(&mut Checker<'_>) -> Result<(), FsckError>) -> Pass {
    Pass { id, needs: &[], needs_names: false, run }
}

const PASSES: [Pass; 8] = [
    pass(PassId::Superblocks, superblocks::check),
    pass(PassId::Log, log::check),
    pass(PassId::Trees, trees::check),
    pass(PassId::Items, items::check),
    Pass { needs_names: true, ..pass(PassId::Namespace, namespace::check) },
    Pass { needs: &[PassId::Trees], ..pass(PassId::Bitmaps, bitmaps::check) },
    pass(PassId::Snapshots, snapshots::check),
    pass(PassId::Data, data::check),
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
        let damaged = pass.needs.iter().copied().find(|needed| checker.has_errors(*needed));
        let lacks_names = pass.needs_names && checker.lost_nodes.iter().any(LostNode::hides_names);
        if let Some(damaged) = damaged.or(lacks_names.then_some(PassId::Trees)) {
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
