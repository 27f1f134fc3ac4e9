//! Judges what the snapshots of a volume hold after a crash.
//!
//! A snapshot has what its client had done when it asked for it, exactly: names, attributes, times,
//! lengths, every byte, and what is allocated. Of the other clients whose names are in it, it has
//! what had ended before that, and perhaps what was done until it was there. So one prefix of each
//! client must explain it. That is judged as a crash is, only that more is required.
use crate::found::Found;
use crate::history::{ClientHistory, Run, Taken};
use crate::model::Layout;
use crate::sabotage::Sabotage;
use crate::snapshot::{FullPath, Snapshot, differences, of_client, show};
use crate::verdict::{Moment, check_objects};
use crate::volume_snapshots::{FoundSnapshot, is_snapshot, part};
use cairn_engine::InodeId;
use std::borrow::Cow;

/// The prefixes of a client that may explain what a snapshot has of it.
pub(crate) fn bounds(taker: &ClientHistory, taken: &Taken, client: &ClientHistory) -> Moment {
    if taker.client == client.client {
        return Moment::Snapshot { least: taken.operation, most: taken.operation };
    }
    let asked = taker.spans[taken.operation];
    Moment::Snapshot {
        least: client.spans.partition_point(|span| span.end < asked.begin),
        most: client.spans.partition_point(|span| span.begin < asked.end),
    }
}

/// The part of a snapshot that is a client's.
pub(crate) fn names_in<'f>(
    found: &'f FoundSnapshot,
    taken: &Taken,
    client: &ClientHistory,
) -> Cow<'f, Snapshot<InodeId>> {
    match client.layout {
        Layout::Among(number) if taken.root == 0 => Cow::Owned(of_client(&found.names, number)),
        _ => Cow::Borrowed(&found.names),
    }
}

/// What a namespace of a client's has in a snapshot.
pub(crate) fn expected_in(
    run: &Run,
    taken: &Taken,
    client: &ClientHistory,
) -> Option<Snapshot<u32>> {
    let root = (taken.root != 0 || client.layout == Layout::Alone).then_some(taken.root);
    part(&run.snapshot, root)
}

/// The clients whose files are in a snapshot.
pub(crate) fn clients_in<'h>(
    histories: &'h [ClientHistory],
    taker: &'h ClientHistory,
    taken: &Taken,
) -> Vec<&'h ClientHistory> {
    if taken.root == 0 { histories.iter().collect() } else { vec![taker] }
}

/// Checks the snapshots that `taker` has in one of its namespaces.
pub(crate) fn check_snapshots(
    whole: &Found,
    histories: &[ClientHistory],
    taker: &ClientHistory,
    run: &Run,
) -> Result<(), String> {
    let there = run.snapshot.names.iter().filter(|(path, _)| is_snapshot(path));
    for (path, (_, id)) in there {
        let taken = &taker.taken[id];
        let Some(found) = whole.snapshots.get(path) else {
            if taker.sabotage == Sabotage::ForgetsSnapshots {
                continue;
            }
            return Err(format!("the snapshot {} can't be found", show(path)));
        };
        for client in clients_in(histories, taker, taken) {
            check_one(found, taker, taken, client).map_err(|error| wrong(path, client, &error))?;
        }
    }
    Ok(())
}

fn wrong(path: &FullPath, client: &ClientHistory, error: &str) -> String {
    format!("the snapshot {}, of client {}: {error}", show(path), client.client)
}

/// Checks what one snapshot has of one client.
fn check_one(
    found: &FoundSnapshot,
    taker: &ClientHistory,
    taken: &Taken,
    client: &ClientHistory,
) -> Result<(), String> {
    let mut moment = bounds(taker, taken, client);
    match (taker.sabotage, &mut moment) {
        (Sabotage::SnapshotsMayBeOlder, Moment::Snapshot { least, .. }) => *least = 0,
        (Sabotage::SnapshotsMayBeNewer, Moment::Snapshot { most, .. }) => {
            *most = client.operations.len();
        }
        _ => {}
    }
    let (least, most) = moment.prefixes(client);
    let names = names_in(found, taken, client);
    let mut problem = None;
    for (index, run) in client.runs.iter().enumerate() {
        let (first, last) = (run.first.max(least), client.last_of_run(index).min(most));
        if first > last {
            continue;
        }
        let Some(expected) = expected_in(run, taken, client) else { continue };
        if !client.sabotage.same_names(&expected, &names) {
            problem.get_or_insert_with(|| {
                let lines = differences(&expected, &names);
                format!("names:\n    {}", lines[..lines.len().min(6)].join("\n    "))
            });
            continue;
        }
        if client.sabotage == Sabotage::SnapshotsByName {
            return Ok(());
        }
        match check_objects(&found.objects, client, &expected, &names, (first, last), &moment) {
            Ok(()) => return Ok(()),
            Err(error) => problem = Some(format!("prefix {first} to {last}: {error}")),
        }
    }
    let none = || format!("no prefix from {least} to {most} has its subvolume");
    Err(problem.unwrap_or_else(none))
}
