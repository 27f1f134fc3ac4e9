//! Forks of one subvolume. First all clients make one at the same moment, round after round: those
//! that come at once share a commit. Then one client alone makes early forks, each when nothing is
//! dirty.
use super::{Findings, Place, Settings, snapshots, with_end};
use crate::client::{self, Limit, Measured};
use crate::engine_figures;
use crate::report::Figure;
use crate::target::{Open, Subvolumes};
use anyhow::Context;
use std::io;

const ROUNDS: u64 = 10;
/// In the subvolume, unless that is set.
const FILES: u64 = 1000;
const LIVE: &str = "live";
pub const TOGETHER: &str = "fork with all others";
pub const EARLY: &str = "early fork";

fn fork(place: &Place, number: usize) -> String {
    place.path(&format!("fork-{number}"))
}

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let (subvolumes, live) = (snapshots::of(&*place.target)?, place.path(LIVE));
    subvolumes.make(&live).context("a subvolume cannot be made")?;
    let ran = measure(place, settings);
    let removed = remove_forks(subvolumes, place, settings.clients)
        .and_then(|()| subvolumes.remove(&live))
        .with_context(|| format!("{live} is left behind"));
    with_end(ran, removed)
}

/// Some may never have been made.
fn remove_forks(subvolumes: &dyn Subvolumes, place: &Place, count: usize) -> io::Result<()> {
    let mut numbers = 0..count;
    numbers.try_for_each(|number| snapshots::or_missing(subvolumes.remove(&fork(place, number))))
}

fn measure(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let target = &*place.target;
    for file in 0..settings.files.unwrap_or(FILES) {
        target.open(&place.path(&format!("{LIVE}/file-{file}")), Open::Create)?;
        settings.interrupt.check()?;
    }
    let commits = || target.statistics().map(|counted| engine_figures::count(&counted, "commits"));
    let (mut all, mut all_commits) = (Measured::default(), Some(0));
    for _ in 0..ROUNDS {
        target.sync_all()?;
        let before = commits();
        let measured = together(place, settings)?;
        let made = commits().zip(before).map(|(after, before)| after - before);
        all_commits = all_commits.zip(made).map(|(all, made)| all + made);
        remove_forks(snapshots::of(target)?, place, settings.clients)?;
        all.recorder.merge(&measured.recorder);
        all.seconds += measured.seconds;
        all.completed += measured.completed;
        all.process = all.process + measured.process;
        all.machine = all.machine + measured.machine;
    }
    let early = early(place, settings)?;
    all.recorder.merge(&early.recorder);
    let mut findings = Findings::of_rate(all, "forks/s");
    if let Some(commits) = all_commits {
        let per_round = commits as f64 / ROUNDS as f64;
        findings.figures.push(Figure::new("commits of a round", per_round, ""));
        let forks = findings.completed as f64;
        findings.figures.push(Figure::new("forks per commit", forks / commits.max(1) as f64, ""));
    }
    Ok(findings)
}

/// Each client makes a fork.
fn together(place: &Place, settings: &Settings) -> anyhow::Result<Measured> {
    let plan = settings.plan("forks", Limit::Operations(settings.clients as u64));
    let in_clients = place.clone();
    client::run(&plan, move |client, recorder| {
        let (live, new) = (in_clients.path(LIVE), fork(&in_clients, client.index));
        let subvolumes = snapshots::of(&*in_clients.target)?;
        recorder.time(TOGETHER, || subvolumes.fork(&live, &new))?;
        client.completed();
        Ok(())
    })
}

fn early(place: &Place, settings: &Settings) -> anyhow::Result<Measured> {
    let mut plan = settings.timed_plan(EARLY);
    plan.clients = 1;
    let in_client = place.clone();
    client::run(&plan, move |client, recorder| {
        let (live, new) = (in_client.path(LIVE), fork(&in_client, 0));
        let subvolumes = snapshots::of(&*in_client.target)?;
        while client.goes_on() {
            in_client.target.sync_all()?;
            recorder.time(EARLY, || subvolumes.fork_early(&live, &new))?;
            subvolumes.remove(&new)?;
        }
        Ok(())
    })
}
