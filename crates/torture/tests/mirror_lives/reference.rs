//! What a mirror must do, without labels and counters.
//!
//! For each disk it notes the *acts* that its content took part in: acknowledged flushes in one
//! set, and what else makes a member go on (being opened, leaving another one behind, being filled)
//! in another. From these sets follows what must come of an attempt to open the mirror:
//!
//! - Two disks of which each holds an acknowledged flush that the other lacks are refused, until
//!   the user gives one up by force.
//! - If all acts of each disk are among those of the next one, and the two last went on with a
//!   common disk, they are opened. Only disks that hold every acknowledged flush are read or
//!   written, all that have every act are, and none that is being filled.
//! - In between, either is right: for example if a member was opened alone and nothing was
//!   written.
//!
//! What is read is what these disks may hold: the last acknowledged value, or a later one.
use cairn_blockdev::SimulatedDevice;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub type Acts = BTreeSet<u32>;

/// A disk, and what the reference knows of it.
#[derive(Clone)]
pub struct Disk {
    pub device: Arc<SimulatedDevice>,
    /// A new one each time that it is filled.
    pub identity: u32,
    pub complete: bool,
    /// Acknowledged flushes.
    pub written: Acts,
    /// Other acts.
    pub went_on: Acts,
    /// The values that each register may have.
    pub registers: Vec<BTreeSet<u64>>,
    /// The identities with which it last went on, its own among them.
    pub partners: Acts,
    /// An old copy: the disk that it is a copy of went on since.
    pub old: bool,
    /// The power failed while its last act was under way: it may be found with it or without.
    pub unsure: bool,
}

impl Disk {
    pub fn holds(&self, other: &Disk) -> bool {
        self.written.is_superset(&other.written)
    }

    pub fn went_on_from(&self, other: &Disk) -> bool {
        self.holds(other) && self.went_on.is_superset(&other.went_on)
    }

    /// Whether what this disk notes shows that it is behind `other`.
    pub fn is_known_behind(&self, other: &Disk) -> bool {
        other.went_on_from(self)
            && !(self.unsure || other.unsure)
            && !self.partners.is_disjoint(&other.partners)
    }

    pub fn acts(&self) -> Acts {
        self.written.union(&self.went_on).copied().collect()
    }

    /// The same content on a disk of its own.
    pub fn copy(&self) -> Disk {
        Disk { device: Arc::new(self.device.snapshot()), ..self.clone() }
    }
}

/// What must come of an attempt to open some disks.
pub struct Expected {
    pub must_refuse: bool,
    pub must_accept: bool,
    /// The complete disks that hold every acknowledged flush.
    pub current: Vec<usize>,
    /// Those that have every other act, too.
    pub newest: Vec<usize>,
}

/// The disks in their places.
pub struct Reference {
    pub disks: Vec<Disk>,
    /// All acts in which a disk with this identity took part.
    pub known: BTreeMap<u32, Acts>,
    next: u32,
}

impl Reference {
    /// A new mirror, whose `registers` hold 0.
    pub fn new(devices: Vec<Arc<SimulatedDevice>>, registers: usize) -> Self {
        let partners: Acts = (0..devices.len() as u32).collect();
        let disk = |(identity, device)| Disk {
            device,
            identity,
            complete: true,
            written: Acts::new(),
            went_on: Acts::new(),
            registers: vec![BTreeSet::from([0]); registers],
            partners: partners.clone(),
            old: false,
            unsure: false,
        };
        let disks = (0..).zip(devices).map(disk).collect();
        Self { disks, known: BTreeMap::new(), next: 100 }
    }

    /// Notes all acts of a disk.
    pub fn note(&mut self, place: usize) {
        let disk = &self.disks[place];
        self.known.entry(disk.identity).or_default().extend(disk.acts());
    }

    pub fn act(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    pub fn expected(&self, present: &[usize]) -> Expected {
        let complete: Vec<usize> =
            present.iter().copied().filter(|&place| self.disks[place].complete).collect();
        let pairs: Vec<(&Disk, &Disk)> = complete
            .iter()
            .flat_map(|&one| complete.iter().map(move |&other| (one, other)))
            .filter(|(one, other)| one < other)
            .map(|(one, other)| (&self.disks[one], &self.disks[other]))
            .collect();
        let all_below = |place: usize, below: fn(&Disk, &Disk) -> bool| {
            complete.iter().all(|&other| below(&self.disks[place], &self.disks[other]))
        };
        let filter = |below| complete.iter().copied().filter(|&at| all_below(at, below)).collect();
        Expected {
            must_refuse: pairs.iter().any(|(one, other)| !one.holds(other) && !other.holds(one)),
            must_accept: !complete.is_empty()
                && pairs
                    .iter()
                    .all(|(one, other)| one.is_known_behind(other) || other.is_known_behind(one)),
            current: filter(Disk::holds),
            newest: filter(Disk::went_on_from),
        }
    }

    /// No rule says what comes of going on with an old copy as if it were the member.
    pub fn would_go_on_with_an_old_copy(&self, expected: &Expected) -> bool {
        expected.current.iter().any(|&place| self.disks[place].old)
    }

    /// These members went on together.
    pub fn go_on(&mut self, in_sync: &[usize], act: u32) {
        let partners: Acts = in_sync.iter().map(|&place| self.disks[place].identity).collect();
        for &place in in_sync {
            let disk = &mut self.disks[place];
            disk.went_on.insert(act);
            disk.partners.clone_from(&partners);
            (disk.old, disk.unsure) = (false, false);
            self.note(place);
        }
    }

    pub fn acknowledge(&mut self, in_sync: &[usize], values: &[u64]) {
        let act = self.act();
        for &place in in_sync {
            let disk = &mut self.disks[place];
            disk.written.insert(act);
            disk.registers = values.iter().map(|value| BTreeSet::from([*value])).collect();
            self.note(place);
        }
    }

    /// The target holds what these members hold, and they go on without what was in its place.
    pub fn fill(&mut self, place: usize, used: &[usize], target: &mut Disk) {
        let source = self.disks[used[0]].clone();
        let registers = (0..source.registers.len())
            .map(|at| used.iter().flat_map(|&one| self.disks[one].registers[at].clone()).collect())
            .collect();
        let (act, identity) = (self.act(), self.act());
        let others: Vec<usize> = used.iter().copied().filter(|&at| at != place).collect();
        let mut partners: Acts = others.iter().map(|&at| self.disks[at].identity).collect();
        partners.insert(identity);
        *target = Disk {
            device: target.device.clone(),
            identity,
            registers,
            partners: partners.clone(),
            ..source
        };
        target.went_on.insert(act);
        self.known.entry(identity).or_default().extend(target.acts());
        for at in others {
            self.disks[at].went_on.insert(act);
            self.disks[at].partners.clone_from(&partners);
            self.note(at);
        }
    }
}
