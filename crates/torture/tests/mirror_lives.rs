//! Random lives of mirrors of two and three members. Members go away and come back, fail in use,
//! are filled again or replaced, and old copies of them return. In between the mirror is opened
//! with any of them, written, flushed, closed or cut off. `CAIRN_SEED` repeats a run.
//!
//! What must come of each step follows from a reference (`mirror_lives/reference.rs`) that knows
//! nothing of labels and counters.
use cairn_blockdev::composed::label::{DATA_START_BYTES, FillProgress};
use cairn_blockdev::composed::{
    Access, Candidate, ComposedError, ComposedKind, Label, MemberState, Mirror, Rebuild, make,
    status,
};
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_environment::random::Seeded;
use cairn_torture::{number_from_environment, seed_from_environment};
use reference::{Disk, Expected, Reference};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

#[path = "mirror_lives/reference.rs"]
mod reference;

const REGISTERS: usize = 4;
const MEMBER_BYTES: u64 = DATA_START_BYTES + (REGISTERS as u64) * 4096;
const LIVES: u64 = 600;
const STEPS: u64 = 24;

/// What must have happened in some life.
const LEAST: [&str; 17] = [
    "opened",
    "closed before copies are compared",
    "opened with a stale member",
    "old copy not used",
    "incomplete member not used",
    "split",
    "perhaps split",
    "degraded refused",
    "failed in use",
    "power failure",
    "power failure in an opening",
    "power failure in a filling",
    "filled",
    "filling continued",
    "filling refused",
    "given up by force",
    "back from the shelf",
];

/// How a run of requests ended.
enum End {
    Closed,
    /// The power failed while nothing was under way.
    Quiet,
    /// The power failed during a request, or one failed.
    Broken,
}

#[derive(Default, Debug)]
struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }
}

struct Life<'a> {
    random: Seeded,
    reference: Reference,
    away: Vec<bool>,
    /// Copies that were made, and disks that were replaced, of each place.
    shelf: Vec<(usize, Disk)>,
    /// Disks whose filling was interrupted.
    unfinished: Vec<(usize, Disk)>,
    next_value: u64,
    /// The members that failed in the running session.
    failed: Vec<usize>,
    /// Requests until the power fails.
    left: Arc<AtomicI64>,
    story: Vec<String>,
    counts: &'a mut Counts,
}

impl<'a> Life<'a> {
    fn new(seed: u64, counts: &'a mut Counts) -> Self {
        let mut random = Seeded::new(seed);
        let members = 2 + random.below(2) as usize;
        let devices: Vec<_> =
            (0..members).map(|_| Arc::new(SimulatedDevice::new(MEMBER_BYTES))).collect();
        let named: Vec<(String, Arc<dyn BlockDevice>)> =
            devices.iter().map(|device| ("disk".to_owned(), device.clone() as _)).collect();
        make(ComposedKind::Mirror, &named).expect("a new mirror");
        Self {
            random,
            reference: Reference::new(devices, REGISTERS),
            away: vec![false; members],
            shelf: Vec::new(),
            unfinished: Vec::new(),
            failed: Vec::new(),
            next_value: 1,
            left: Arc::new(AtomicI64::new(i64::MAX)),
            story: Vec::new(),
            counts,
        }
    }

    fn tell(&mut self, what: String) {
        self.story.push(what);
    }

    fn present(&self) -> Vec<usize> {
        (0..self.reference.disks.len()).filter(|&place| !self.away[place]).collect()
    }

    /// In any order; `without` counts as missing.
    fn candidates(&mut self, without: Option<usize>) -> Vec<Candidate> {
        let mut candidates: Vec<Candidate> = (0..self.reference.disks.len())
            .map(|place| Candidate {
                name: place.to_string(),
                device: (!self.away[place] && without != Some(place))
                    .then(|| self.reference.disks[place].device.clone() as _),
            })
            .collect();
        let end = candidates.len() as u64;
        candidates.swap(self.random.below(end) as usize, self.random.below(end) as usize);
        candidates
    }

    #[track_caller]
    fn expect(&self, holds: bool, what: &str) {
        assert!(holds, "{what}\n{}", self.story.join("\n"));
    }

    #[track_caller]
    fn expect_refusal(&mut self, error: &ComposedError, expected: &Expected, degraded: bool) {
        self.tell(format!("  refused: {error}"));
        match error {
            ComposedError::Diverged { .. } => {
                self.counts.count(if expected.must_refuse { "split" } else { "perhaps split" });
                self.expect(!expected.must_accept, "refused, though no two went on separately");
            }
            ComposedError::NoMember { .. } | ComposedError::NoneComplete { .. } => {
                self.expect(expected.current.is_empty(), "a complete member is there");
            }
            ComposedError::Degraded { .. } => {
                self.counts.count("degraded refused");
                let whole =
                    expected.newest.len() == self.reference.disks.len() && expected.must_accept;
                self.expect(!degraded && !whole, "all members are there and up to date");
            }
            error => self.expect(false, &format!("refused for another reason: {error}")),
        }
    }

    /// `in_sync` are the members that the mirror uses.
    #[track_caller]
    fn expect_use(&mut self, in_sync: &[usize], expected: &Expected) {
        self.tell(format!("  in sync: {in_sync:?}"));
        self.expect(!expected.must_refuse, "two went on separately, and both were taken");
        self.expect(!in_sync.is_empty(), "no member is used");
        for place in in_sync {
            self.expect(
                expected.current.contains(place),
                &format!("{place} is used, but not up to date or not complete"),
            );
        }
        if expected.must_accept {
            for &place in &expected.newest {
                self.expect(
                    in_sync.contains(&place) || self.reference.disks[place].old,
                    &format!("{place} is up to date, but not used"),
                );
            }
        }
        let stale = self.present().iter().any(|place| !in_sync.contains(place));
        self.counts.count(if stale { "opened with a stale member" } else { "opened" });
        if self
            .present()
            .iter()
            .any(|&place| self.reference.disks[place].old && !in_sync.contains(&place))
        {
            self.counts.count("old copy not used");
        }
        if self.present().iter().any(|&place| !self.reference.disks[place].complete) {
            self.counts.count("incomplete member not used");
        }
    }

    /// What the mirror reads from a register.
    #[track_caller]
    fn read(&self, mirror: &Mirror, register: usize) -> u64 {
        let mut block = vec![0; 4096];
        let read = mirror.read(register as u64 * 4096, &mut block);
        self.expect(read.is_ok(), "a read fails");
        u64::from_le_bytes(block[..8].try_into().expect("8 bytes"))
    }

    #[track_caller]
    fn expect_value(&self, register: usize, value: u64, from: &[usize]) {
        let may_be = from
            .iter()
            .any(|&place| self.reference.disks[place].registers[register].contains(&value));
        self.expect(
            may_be,
            &format!(
                "register {register} has {value}; the members may have {:?}",
                from.iter()
                    .map(|&place| &self.reference.disks[place].registers[register])
                    .collect::<Vec<_>>()
            ),
        );
    }

    fn in_sync(mirror: &Mirror) -> Vec<usize> {
        let health = mirror.health().expect("a mirror");
        let used = health.members.iter().filter(|member| member.state == "in sync");
        used.map(|member| member.name.parse().expect("a place")).collect()
    }

    /// Reads without writing anything.
    fn look(&mut self) {
        let present = self.present();
        self.tell(format!("look at {present:?}"));
        let expected = self.reference.expected(&present);
        let candidates = self.candidates(None);
        match Mirror::open(candidates, Access::ReadOnly, true) {
            Err(error) => self.expect_refusal(&error, &expected, true),
            Ok(mirror) => {
                let in_sync = Self::in_sync(&mirror);
                self.expect_use(&in_sync, &expected);
                for register in 0..REGISTERS {
                    self.expect_value(register, self.read(&mirror, register), &in_sync);
                }
            }
        }
    }

    /// Perhaps the power will fail after some requests of `devices`.
    fn arm(&mut self, devices: &[Arc<SimulatedDevice>]) {
        let requests =
            if self.random.chance(1, 4) { self.random.below(40) as i64 } else { i64::MAX };
        self.left.store(requests, SeqCst);
        if requests < i64::MAX {
            self.tell(format!("  the power fails after {requests} requests"));
        }
        for device in devices {
            let left = self.left.clone();
            device.fail_when(move |request| {
                if request.operation == Operation::Read {
                    left.load(SeqCst) < 0
                } else {
                    left.fetch_sub(1, SeqCst) <= 0
                }
            });
        }
    }

    fn power_fails(&mut self) {
        for place in self.present() {
            let disk = &mut self.reference.disks[place];
            disk.device = Arc::new(disk.device.crash_state(&mut self.random));
        }
    }

    /// Opens the mirror for writing, works, and ends in some way.
    fn session(&mut self) {
        let present = self.present();
        let expected = self.reference.expected(&present);
        if self.reference.would_go_on_with_an_old_copy(&expected) {
            return self.look();
        }
        let degraded = self.random.chance(4, 5);
        self.tell(format!("open {present:?}{}", if degraded { ", degraded" } else { "" }));
        let devices: Vec<_> =
            present.iter().map(|&at| self.reference.disks[at].device.clone()).collect();
        self.arm(&devices);
        let candidates = self.candidates(None);
        let opened = Mirror::open(candidates, Access::ReadWrite, degraded);
        let act = self.reference.act();
        let end = match opened {
            Err(ComposedError::Device(_)) if self.left.load(SeqCst) < 0 => {
                for &place in &expected.current {
                    self.reference.disks[place].went_on.insert(act);
                    self.reference.note(place);
                }
                self.tell("  the power fails in the opening".to_owned());
                self.counts.count("power failure in an opening");
                End::Broken
            }
            Err(error) => {
                self.expect_refusal(&error, &expected, degraded);
                End::Closed
            }
            Ok(mirror) => {
                let in_sync = Self::in_sync(&mirror);
                self.expect_use(&in_sync, &expected);
                let whole = in_sync.len() == self.reference.disks.len();
                self.expect(degraded || whole, "it was opened without a member, unasked");
                self.work(mirror, in_sync, act)
            }
        };
        let failed = std::mem::take(&mut self.failed);
        match end {
            End::Closed => failed.into_iter().for_each(|place| {
                let disk = &mut self.reference.disks[place];
                disk.device = Arc::new(disk.device.crash_state(&mut self.random));
            }),
            End::Quiet => self.power_fails(),
            End::Broken => {
                present.iter().for_each(|&place| self.reference.disks[place].unsure = true);
                self.power_fails();
            }
        }
        present.iter().for_each(|&place| self.reference.disks[place].device.clear_failures());
    }

    fn work(&mut self, mirror: Mirror, mut in_sync: Vec<usize>, act: u32) -> End {
        self.reference.go_on(&in_sync, act);
        // What no flush covered may be made the same from any of them.
        for register in 0..REGISTERS {
            let all: BTreeSet<u64> = in_sync
                .iter()
                .flat_map(|&place| self.reference.disks[place].registers[register].clone())
                .collect();
            in_sync
                .iter()
                .for_each(|&at| self.reference.disks[at].registers[register].clone_from(&all));
        }
        // What is on it may forbid to go on.
        if self.random.chance(1, 6) {
            self.counts.count("closed before copies are compared");
            return self.close(&mirror, &mut in_sync);
        }
        if mirror.resynchronise(std::slice::from_ref(&(0..REGISTERS as u64 * 4096))).is_err() {
            self.tell("  the power fails while copies are compared".to_owned());
            self.left.store(-1, SeqCst);
            return End::Broken;
        }
        if Self::in_sync(&mirror) != in_sync || self.left.load(SeqCst) < 0 {
            self.left.store(-1, SeqCst);
            return End::Broken;
        }
        let mut values: Vec<u64> = (0..REGISTERS).map(|at| self.read(&mirror, at)).collect();
        for (register, &value) in values.iter().enumerate() {
            self.expect_value(register, value, &in_sync);
            for copy in 0..mirror.copies() {
                let mut block = vec![0; 4096];
                let read = mirror.read_copy(copy, register as u64 * 4096, &mut block);
                self.expect(read.is_ok() && block[..8] == value.to_le_bytes(), "copies differ");
            }
        }
        let open = in_sync
            .iter()
            .any(|&at| self.reference.disks[at].registers.iter().any(|values| values.len() > 1));
        if open {
            self.reference.acknowledge(&in_sync, &values);
        }
        let mut unflushed = false;
        let mut failing = false;
        for _ in 0..self.random.below(10) {
            let result = match self.random.below(10) {
                0..5 => {
                    let (register, value) = (self.random.below(4) as usize, self.next_value);
                    self.next_value += 1;
                    let mut block = vec![value as u8; 4096];
                    block[..8].copy_from_slice(&value.to_le_bytes());
                    for &place in &in_sync {
                        self.reference.disks[place].registers[register].insert(value);
                    }
                    self.tell(format!("  write {register} = {value}"));
                    values[register] = value;
                    unflushed = true;
                    mirror.write(register as u64 * 4096, &[&block])
                }
                5..8 => {
                    self.tell("  flush".to_owned());
                    let result = mirror.flush();
                    if result.is_ok() && std::mem::take(&mut unflushed) {
                        self.reference.acknowledge(&Self::in_sync(&mirror), &values);
                    }
                    result
                }
                _ if !failing => {
                    let place = in_sync[self.random.below(in_sync.len() as u64) as usize];
                    let operation =
                        if self.random.chance(1, 2) { Operation::Write } else { Operation::Flush };
                    self.tell(format!("  {place} will fail a {operation:?}"));
                    self.reference.disks[place].device.fail_next(operation, 1);
                    failing = true;
                    Ok(())
                }
                _ => Ok(()),
            };
            if let Err(error) = result {
                self.tell(format!("  {error}"));
                self.left.store(-1, SeqCst);
                drop(mirror);
                return End::Broken;
            }
            self.leave_behind(&mirror, &mut in_sync);
            for (register, &value) in values.iter().enumerate() {
                if self.left.load(SeqCst) > 0 {
                    let found = self.read(&mirror, register);
                    self.expect(found == value, &format!("{register}: {found}, not {value}"));
                }
            }
        }
        if self.random.chance(1, 3) {
            self.tell("  the power fails".to_owned());
            self.counts.count("power failure");
            let quiet = self.left.swap(-1, SeqCst) >= 0;
            drop(mirror);
            return if quiet { End::Quiet } else { End::Broken };
        }
        let end = self.close(&mirror, &mut in_sync);
        if unflushed && matches!(end, End::Closed) {
            self.reference.acknowledge(&in_sync, &values);
        }
        end
    }

    fn close(&mut self, mirror: &Mirror, in_sync: &mut Vec<usize>) -> End {
        if mirror.close().is_err() || self.left.load(SeqCst) < 0 {
            self.tell("  the power fails in the closing".to_owned());
            self.left.store(-1, SeqCst);
            return End::Broken;
        }
        self.tell("  closed".to_owned());
        self.leave_behind(mirror, in_sync);
        End::Closed
    }

    /// Notes which members failed meanwhile.
    fn leave_behind(&mut self, mirror: &Mirror, in_sync: &mut Vec<usize>) {
        let now = Self::in_sync(mirror);
        if now != *in_sync {
            self.tell(format!("  in sync: {now:?}"));
            self.counts.count("failed in use");
            // Nobody uses it before it was taken out: what it failed to write may be there.
            self.failed.extend(in_sync.iter().filter(|place| !now.contains(place)));
            let act = self.reference.act();
            self.reference.go_on(&now, act);
            *in_sync = now;
        }
    }

    /// Fills a member in its place, or replaces it by a new disk.
    fn rebuild(&mut self) {
        let place = self.random.below(self.reference.disks.len() as u64) as usize;
        let in_place = self.random.chance(1, 2) && !self.away[place];
        let continued = self.unfinished.iter().position(|(at, _)| *at == place);
        let without = in_place.then_some(place);
        let sources: Vec<usize> =
            self.present().into_iter().filter(|&at| Some(at) != without).collect();
        let expected = self.reference.expected(&sources);
        if self.reference.would_go_on_with_an_old_copy(&expected) {
            return;
        }
        let mut target = match continued {
            _ if in_place => self.reference.disks[place].clone(),
            Some(index) if self.random.chance(2, 3) => {
                self.counts.count("filling continued");
                self.unfinished.swap_remove(index).1
            }
            _ => Disk {
                device: Arc::new(SimulatedDevice::new(MEMBER_BYTES)),
                complete: false,
                ..self.reference.disks[place].clone()
            },
        };
        let force = self.random.chance(1, 4);
        let what = if in_place { "in its place" } else { "by another disk" };
        let forced = if force { ", by force" } else { "" };
        self.tell(format!("fill {place} {what} from {sources:?}{forced}"));
        let candidates = self.candidates(without);
        let position = candidates
            .iter()
            .position(|candidate| candidate.name == place.to_string())
            .expect("it is named");
        let used: Vec<usize> = status(ComposedKind::Mirror, &candidates)
            .map(|members| {
                let used = members.into_iter().filter(|member| member.state == MemberState::InSync);
                used.map(|member| member.name.parse().expect("a place")).collect()
            })
            .unwrap_or_default();
        let mut devices: Vec<_> =
            sources.iter().map(|&at| self.reference.disks[at].device.clone()).collect();
        devices.push(target.device.clone());
        self.arm(&devices);
        let new = Candidate { name: "new".to_owned(), device: Some(target.device.clone()) };
        let started = Rebuild::start(candidates, position, new, force);
        let cut = self.left.load(SeqCst) < 0;
        let work = match started {
            Err(ComposedError::Device(_)) if cut => None,
            Err(error) => {
                devices.iter().for_each(|device| device.clear_failures());
                return self.expect_no_filling(&error, &target, force, &expected);
            }
            Ok(rebuild) => {
                self.expect_use(&used, &expected);
                let newest = &self.reference.disks[expected.current[0]];
                self.expect(
                    force || !target.complete || newest.holds(&target),
                    "the only copy of something acknowledged is overwritten, unasked",
                );
                if force && target.complete && !newest.holds(&target) {
                    self.counts.count("given up by force");
                }
                target.complete = false;
                Some(rebuild)
            }
        };
        let finished = work.map(|mut rebuild| {
            rebuild.copy(&mut |_| {})?;
            rebuild.finish()
        });
        let broken = !matches!(finished, Some(Ok(())));
        self.expect(!broken || self.left.load(SeqCst) < 0, "the filling fails");
        devices.iter().for_each(|device| device.clear_failures());
        if broken {
            self.tell("  the power fails".to_owned());
            self.counts.count("power failure in a filling");
            self.power_fails();
            target.device = if in_place {
                self.reference.disks[place].device.clone()
            } else {
                Arc::new(target.device.crash_state(&mut self.random))
            };
            self.note_target(&mut target);
            used.iter().for_each(|&at| self.reference.disks[at].unsure = true);
        } else {
            self.counts.count("filled");
            target.complete = true;
        }
        if finished.is_some() && target.complete {
            self.reference.fill(place, &used, &mut target);
        }
        self.put(place, target, in_place);
    }

    /// After a power failure: whether the disk says that it is complete.
    fn note_target(&self, target: &mut Disk) {
        let label = Label::read(&*target.device, "new").expect("it can be read");
        target.complete = label.is_some_and(|label| label.progress == FillProgress::Complete);
    }

    /// Puts a disk that was filled, or should have been, where it belongs.
    fn put(&mut self, place: usize, target: Disk, in_place: bool) {
        if in_place {
            self.reference.disks[place] = target;
        } else if target.complete || self.random.chance(1, 3) {
            let before = std::mem::replace(&mut self.reference.disks[place], target);
            self.shelf.push((place, before));
            self.away[place] = false;
        } else {
            self.unfinished.push((place, target));
        }
    }

    #[track_caller]
    fn expect_no_filling(
        &mut self,
        error: &ComposedError,
        target: &Disk,
        force: bool,
        expected: &Expected,
    ) {
        let newest = expected.newest.first().map(|&at| &self.reference.disks[at]);
        let is_behind =
            newest.is_some_and(|newest| expected.must_accept && target.is_known_behind(newest));
        let current = expected.current.first().map(|&at| &self.reference.disks[at]);
        let is_current = newest.or(current).is_some_and(|newest| target.holds(newest));
        match error {
            ComposedError::WouldLose { .. } => {
                self.tell(format!("  refused: {error}"));
                self.counts.count("filling refused");
                self.expect(
                    target.complete && !force && !is_behind,
                    "nothing would be lost by filling it",
                );
            }
            ComposedError::InSync { .. } => {
                self.tell(format!("  refused: {error}"));
                self.expect(target.complete && is_current, "the target is not in sync");
            }
            error => self.expect_refusal(error, expected, true),
        }
    }

    /// A copy is made of a member, or one comes back in its place, or a disk that was replaced.
    fn exchange(&mut self) {
        if self.random.chance(1, 2) || self.shelf.is_empty() {
            let place = self.random.below(self.reference.disks.len() as u64) as usize;
            self.tell(format!("copy {place}"));
            self.shelf.push((place, self.reference.disks[place].copy()));
            return;
        }
        let which = self.random.below(self.shelf.len() as u64) as usize;
        let (place, mut disk) = self.shelf.swap_remove(which);
        disk.old =
            self.reference.known.get(&disk.identity).is_some_and(|known| *known != disk.acts());
        self.tell(format!(
            "{place} is a disk from the shelf now{}",
            if disk.old { ", an old copy" } else { "" }
        ));
        if !disk.old {
            self.counts.count("back from the shelf");
        }
        let before = std::mem::replace(&mut self.reference.disks[place], disk);
        self.shelf.push((place, before));
    }

    fn live(&mut self) {
        for _ in 0..STEPS {
            for place in 0..self.reference.disks.len() {
                if self.random.chance(1, 4) {
                    self.away[place] = self.random.chance(1, 3);
                }
            }
            match self.random.below(10) {
                0..5 => self.session(),
                5 => self.look(),
                6..8 => self.rebuild(),
                _ => self.exchange(),
            }
        }
    }
}

#[test]
fn lives_of_mirrors_keep_what_was_acknowledged_and_refuse_what_went_on_separately() {
    let seed = seed_from_environment();
    let lives = number_from_environment("CAIRN_LIVES").unwrap_or(LIVES);
    let mut random = Seeded::new(seed);
    let mut counts = Counts::default();
    for number in 0..lives {
        let mut life = Life::new(random.next_u64(), &mut counts);
        life.tell(format!("CAIRN_SEED={seed}, life {number}:"));
        life.live();
    }
    eprintln!("{lives} lives: {:?}", counts.0);
    for what in LEAST {
        assert!(counts.0.contains_key(what) || lives < LIVES, "no life had this: {what}");
    }
}
