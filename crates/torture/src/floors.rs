//! What a run must have checked at least, in proportion to its crash states. A run that checked
//! less has found nothing because it looked at nothing.
//!
//! Invariants: each floor is at most a third of the least that was measured of such runs, over
//! several seeds. A report with fewer recorded runs than [`Floors::runs_min`] has none, since
//! chance decides what they meet. A floor of zero is none.
use crate::oracle::Checked;
use crate::promises::{Kind, Promises};
use crate::search::SearchOptions;

/// Least numbers; all but those of runs are for each [`Floors::PER`] crash states.
#[derive(Clone, Copy, Debug)]
pub struct Floors {
    /// With fewer recorded runs there is no floor.
    pub runs_min: u64,
    /// Crash states of each recorded run.
    pub states_per_run: u64,
    /// Different images.
    pub images: u64,
    /// Pairs of an image and the promises in force.
    pub judgements: u64,
    /// Different sets of acknowledgements.
    pub acknowledgements: u64,
    /// States with torn writes.
    pub torn: u64,
    /// States in which a later write survived an earlier one.
    pub reordered: u64,
    /// States of a power failure in a recovery.
    pub during_recovery: u64,
    /// Promises in force, added up over the judgements.
    pub promises: Promises,
    /// Different images with a promise about a snapshot in force.
    pub snapshot_images: u64,
    /// Recovered images whose dead runs were damaged and repaired.
    pub repaired: u64,
    /// Images that were extracted to the host.
    pub extracted: u64,
    /// Wrong states on purpose.
    pub planted: u64,
}

impl Floors {
    /// The crash states that a floor is for.
    pub const PER: u64 = 10_000;

    /// Of random runs (`cairn torture crash`).
    pub const RANDOM: Self = Self {
        runs_min: 10,
        states_per_run: 20,
        images: 3000,
        judgements: 3000,
        acknowledgements: 600,
        torn: 850,
        reordered: 550,
        during_recovery: 850,
        promises: Promises {
            names: 90_000,
            attributes: 55_000,
            links: 50_000,
            xattrs: 45_000,
            data: 120_000,
            sizes: 10_000,
            times: 60_000,
            allocation: 9000,
            subvolumes: 300,
            snapshots: 3000,
            forks: 1500,
            // Few runs have many, and many have none.
            applied: 0,
        },
        snapshot_images: 500,
        repaired: 60,
        extracted: 10,
        planted: 850,
    };
    /// Of searches of recorded runs (`cairn torture systematic`).
    pub const SEARCH: Self = Self {
        runs_min: 30,
        states_per_run: 70,
        images: 310,
        judgements: 380,
        acknowledgements: 15,
        torn: 2600,
        reordered: 800,
        during_recovery: 5,
        promises: Promises {
            names: 90,
            attributes: 20,
            links: 20,
            xattrs: 45,
            data: 17,
            sizes: 15,
            times: 480,
            allocation: 50,
            subvolumes: 9,
            snapshots: 20,
            forks: 50,
            applied: 15,
        },
        snapshot_images: 18,
        repaired: 1,
        extracted: 1,
        planted: 40,
    };
    /// Of searches of workloads from a file, and of sequences that begin with a chosen step: these
    /// say which kinds of change there are.
    pub const FILE: Self = Self {
        promises: Promises {
            names: 0,
            attributes: 0,
            links: 0,
            xattrs: 0,
            data: 0,
            sizes: 0,
            times: Self::SEARCH.promises.times,
            allocation: 0,
            subvolumes: 0,
            snapshots: 0,
            forks: 0,
            applied: 0,
        },
        snapshot_images: 0,
        repaired: 0,
        ..Self::SEARCH
    };
    /// Of runs with a fault (`cairn torture faults`).
    pub const FAULTS: Self = Self {
        runs_min: 1,
        states_per_run: 3,
        images: 860,
        judgements: 1000,
        acknowledgements: 150,
        torn: 700,
        reordered: 560,
        during_recovery: 20,
        promises: Promises {
            names: 980,
            attributes: 480,
            links: 610,
            xattrs: 520,
            data: 780,
            sizes: 370,
            times: 2000,
            allocation: 300,
            // There may be few workloads.
            subvolumes: 0,
            snapshots: 0,
            forks: 0,
            applied: 0,
        },
        snapshot_images: 0,
        repaired: 0,
        extracted: 0,
        planted: 760,
    };

    /// The floors of a search with these options.
    #[must_use]
    pub fn with(self, options: &SearchOptions) -> Self {
        let of_recovered = |floor: u64| {
            let all = floor * SearchOptions::default().recover_one_of;
            all.checked_div(options.recover_one_of).unwrap_or(0)
        };
        let mut floors = Self {
            during_recovery: of_recovered(self.during_recovery),
            repaired: of_recovered(self.repaired),
            ..self
        };
        if options.boundaries_only {
            (floors.states_per_run, floors.torn, floors.reordered) = (0, 0, 0);
        }
        floors
    }

    /// What is below its floor, in words; nothing, if enough was checked.
    #[must_use]
    pub fn too_little(
        &self,
        (runs, states): (u64, u64),
        during_recovery: u64,
        checked: &Checked,
    ) -> Vec<String> {
        if runs < self.runs_min {
            return Vec::new();
        }
        let of_states =
            |floor: u64| (u128::from(floor) * u128::from(states) / u128::from(Self::PER)) as u64;
        let mut all = vec![
            ("different images", checked.images, self.images),
            ("judgements", checked.judgements, self.judgements),
            ("acknowledgements", checked.acknowledgements, self.acknowledgements),
            ("states with torn writes", checked.torn, self.torn),
            ("states with reordered writes", checked.reordered, self.reordered),
            ("power failures in a recovery", during_recovery, self.during_recovery),
            ("images with promised snapshots", checked.snapshot_images, self.snapshot_images),
            ("repaired images", checked.repaired, self.repaired),
            ("extracted images", checked.extracted, self.extracted),
            ("planted wrong states", checked.planted, self.planted),
        ];
        let promised =
            |kind: Kind| (kind.name(), checked.promises.of(kind), self.promises.of(kind));
        all.extend(Kind::ALL.map(promised));
        let all = all.into_iter().map(|(what, count, floor)| (what, count, of_states(floor)));
        let of_runs = ("crash states", states, self.states_per_run * runs);
        std::iter::once(of_runs)
            .chain(all)
            .filter(|(_, count, floor)| count < floor)
            .map(|(what, count, floor)| format!("{what}: {count}, at least {floor}"))
            .collect()
    }
}
