//! What must hold in every state, by what trees really contain: `docs/copy-on-write.md`, I1 to I3.
use crate::machine::Machine;
use crate::mistakes::Mistake;
use crate::volume::{List, OPEN, Outcome, Reference, Snapshot, Stage, Tree, Volume};

fn has(tree: &Tree, block: u8) -> bool {
    tree.references().any(|reference| reference.block == block)
}

fn ensure(holds: bool, text: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(text()) }
}

pub fn check(machine: &Machine) -> Outcome {
    let volume = &machine.running;
    let mut referenced = [0; 256];
    volume.referenced.iter().for_each(|&block| referenced[usize::from(block)] += 1);
    living_trees_are_whole(volume, &referenced)?;
    each_block_is_named_once(volume, &referenced)?;
    runs_have_their_holders(volume)?;
    what_a_crash_leaves_is_whole(machine, referenced)
}

/// Trees that somebody can read: those of heads and of snapshots.
pub fn living(volume: &Volume) -> impl Iterator<Item = &Tree> {
    let heads = volume.subvolumes.iter().filter(|subvolume| subvolume.stage == Stage::Live);
    let snapshots = volume.snapshots.iter().map(|snapshot| &snapshot.tree);
    heads.map(|subvolume| &subvolume.tree).chain(snapshots)
}

fn living_trees_are_whole(volume: &Volume, referenced: &[u8; 256]) -> Outcome {
    let blocks = living(volume).flat_map(Tree::references).map(|reference| reference.block);
    let lost = blocks.into_iter().find(|&block| referenced[usize::from(block)] == 0);
    ensure(lost.is_none(), || format!("block {lost:?} is in a living tree, and free"))
}

/// I1: a referenced block has one counted name; what is not referenced has none.
fn each_block_is_named_once(volume: &Volume, referenced: &[u8; 256]) -> Outcome {
    let mut named = [0; 256];
    let mut count = |references: &mut dyn Iterator<Item = Reference>, above: u8| {
        let counted = references.filter(|reference| reference.birth > above);
        counted.for_each(|reference| named[usize::from(reference.block)] += 1);
    };
    for subvolume in &volume.subvolumes {
        let origin = volume.origin(subvolume.id);
        match subvolume.stage {
            Stage::Live => count(&mut subvolume.tree.references(), origin),
            Stage::Headless => {
                let newest = volume.members(subvolume.id).last().copied().unwrap_or(OPEN);
                let newest = volume.at(subvolume.id, newest).ok_or("headless, no snapshot")?;
                count(&mut newest.tree.references(), origin);
            }
            Stage::Gone => {}
        }
        let lists = volume.lists.iter().filter(|list| list.subvolume == subvolume.id);
        let lists = lists.filter(|list| !list.discarded);
        count(&mut lists.flat_map(|list| list.runs.iter().copied()), origin);
    }
    for dying in &volume.dying {
        count(&mut dying.tree.references(), dying.boundary);
    }
    let wrong =
        (0..usize::from(volume.next_block)).find(|&block| named[block] != referenced[block]);
    ensure(wrong.is_none(), || {
        let block = wrong.unwrap_or_default();
        format!("I1: block {block} has {} names and {} bits", named[block], referenced[block])
    })?;
    let both = volume.pinned.iter().find(|(block, _)| referenced[usize::from(*block)] > 0);
    ensure(both.is_none(), || format!("I2: {both:?} is pinned and referenced"))
}

fn is_held(volume: &Volume, list: &List, run: Reference) -> bool {
    let members = volume.members(list.subvolume);
    members.iter().any(|&generation| run.birth <= generation && generation <= list.since)
}

/// I3: a dead run is in exactly the snapshots of its lineage that birth and list say.
fn runs_have_their_holders(volume: &Volume) -> Outcome {
    for list in volume.lists.iter().filter(|list| !list.discarded) {
        for &run in &list.runs {
            let own = volume.snapshots.iter().filter(|other| other.subvolume == list.subvolume);
            for snapshot in own {
                let said = run.birth <= snapshot.generation && snapshot.generation <= list.since;
                ensure(said == has(&snapshot.tree, run.block), || {
                    format!("I3: {run:?} of the list since {} and {snapshot:?}", list.since)
                })?;
            }
            let is_due = volume.cleanups.iter().any(|cleanup| cleanup.takes(list, run, None));
            let is_origins = run.birth <= volume.origin(list.subvolume);
            let held = is_held(volume, list, run);
            ensure(held || is_due || is_origins, || format!("I3: {run:?} has no holder"))?;
            ensure(!(held && is_due), || format!("I3: {run:?} is held, and due"))?;
        }
    }
    Ok(())
}

/// What the snapshots from `first` to `last` of a lineage hold alone, as the lists say it.
fn unique_by_lists(volume: &Volume, first: &Snapshot, last: &Snapshot) -> Option<usize> {
    let id = first.subvolume;
    let members = volume.members(id);
    let before = members.iter().rev().find(|&&other| other < first.generation).copied();
    let oldest = before.unwrap_or(volume.origin(id));
    let next = members.iter().find(|&&other| other > last.generation).copied();
    let lists = || volume.lists.iter().filter(|list| list.subvolume == id && !list.discarded);
    let size = |tree: &Tree| tree.references().count();
    if next.is_none() && volume.find(id)?.stage == Stage::Headless {
        // Its head's references are its own. It has what the one before had, without what died in
        // between, and what was born since.
        let origin = volume.find(id)?.origin.and_then(|(part, at)| volume.at(part, at));
        let before = before.and_then(|generation| volume.at(id, generation)).or(origin);
        let in_between = lists()
            .filter(|list| oldest <= list.since && list.since < first.generation)
            .flat_map(|list| &list.runs)
            .filter(|run| run.birth <= oldest)
            .count();
        let before = before.map_or(0, |before| size(&before.tree));
        return (first == last).then(|| size(&last.tree) + in_between - before);
    }
    let next = next.unwrap_or(OPEN);
    let next = if volume.has(Mistake::UniqueOfOwnList) { first.generation + 1 } else { next };
    let with_cleanups = volume.has(Mistake::UniqueWithCleanups);
    let counted = |list: &List| {
        let runs = list.runs.iter().filter(|run| oldest < run.birth);
        let runs = runs.filter(|run| run.birth <= last.generation);
        runs.filter(|run| with_cleanups || is_held(volume, list, **run)).count()
    };
    let lists = lists().filter(|list| first.generation <= list.since && list.since < next);
    Some(lists.map(counted).sum())
}

/// What the snapshots of an interval hold alone is what their deletion would free.
pub fn figures_are_right(volume: &Volume) -> Outcome {
    for first in &volume.snapshots {
        let later = volume.snapshots.iter().filter(|last| {
            last.subvolume == first.subvolume && last.generation >= first.generation
        });
        for last in later {
            let in_it = |other: &Snapshot| {
                other.subvolume == first.subvolume
                    && (first.generation..=last.generation).contains(&other.generation)
            };
            let inside = || volume.snapshots.iter().filter(|other| in_it(other));
            if inside().any(|snapshot| snapshot.clones > 0) {
                continue;
            }
            let Some(said) = unique_by_lists(volume, first, last) else { continue };
            let others = volume.snapshots.iter().filter(|other| !in_it(other));
            let heads = volume.subvolumes.iter().filter(|other| other.stage == Stage::Live);
            let others: Vec<&Tree> = others
                .map(|other| &other.tree)
                .chain(heads.map(|subvolume| &subvolume.tree))
                .collect();
            let mut alone: Vec<u8> = inside()
                .flat_map(|snapshot| snapshot.tree.references())
                .map(|reference| reference.block)
                .filter(|&block| !others.iter().any(|tree| has(tree, block)))
                .collect();
            alone.sort_unstable();
            alone.dedup();
            ensure(said == alone.len(), || {
                let (first, last) = (first.generation, last.generation);
                format!("{first} to {last} hold {alone:?} alone, lists say {said}")
            })?;
        }
    }
    Ok(())
}

/// No block of a superblock that may count after a crash, or of the flushed log, is free.
fn what_a_crash_leaves_is_whole(machine: &Machine, mut kept: [u8; 256]) -> Outcome {
    machine.running.pinned.iter().for_each(|(block, _)| kept[usize::from(*block)] += 1);
    let is_free = |block: &&u8| kept[usize::from(**block)] == 0;
    for (name, other) in [("durable", Some(&machine.durable)), ("frozen", machine.frozen.as_ref())]
    {
        let lost = other.and_then(|other| other.referenced.iter().find(is_free));
        ensure(lost.is_none(), || format!("block {lost:?} of the {name} superblock is free"))?;
    }
    let logged = machine.log[..machine.synced].iter().filter_map(|entry| entry.extent);
    let lost = logged.map(|extent| extent.block).find(|block| is_free(&block));
    ensure(lost.is_none(), || format!("block {lost:?} of the log is free"))
}
