//! Differences between two states as people read them.
use cairn_engine::{Changes, Difference, DifferenceKind};

/// A difference as a line.
pub fn line(difference: &Difference) -> String {
    let path = String::from_utf8_lossy(&difference.path);
    match &difference.kind {
        DifferenceKind::Removed => format!("- {path}"),
        DifferenceKind::Added => format!("+ {path}"),
        DifferenceKind::Moved { from } => format!("R {} -> {path}", String::from_utf8_lossy(from)),
        DifferenceKind::Changed(changes) => {
            let Changes { replaced, data, mode, owner, xattrs, times } = *changes;
            let named = [
                (replaced, "replaced"),
                (data, "data"),
                (mode, "mode"),
                (owner, "owner"),
                (xattrs, "xattrs"),
                (times, "times"),
            ];
            let names: Vec<&str> = named.iter().filter(|one| one.0).map(|one| one.1).collect();
            format!("M {path} ({})", names.join(", "))
        }
    }
}
