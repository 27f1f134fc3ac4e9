//! Makes random operations that are likely to meet: names come from a small set, and half of the
//! paths are ones that exist in the model.
//!
//! A [`Profile`] says what a client's operations are like. [`Profile::swarm`] makes another one for
//! each run: what is rare in an even mix, because something else undoes it or is chosen first, is
//! frequent in some of them.
use crate::contents::Tag;
use crate::generator_data::InOrder;
use crate::model::{Model, NodeId};
use crate::operation::{
    Base, CHANGES_IN_SNAPSHOTS, Name, Operation, Path, Rename, Special, Subvolume, Target,
    XattrSet, xattr_name,
};
use cairn_environment::random::Seeded;

/// Names of snapshots, mostly.
const SNAPSHOT_NAMES: u64 = 5;
/// Snapshots of a client; all are read completely, again and again.
pub(crate) const SNAPSHOTS_MAX: usize = 6;

/// What the operations of a client are like.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Regular files are kept below this length, rare sparse ones aside.
    pub file_bytes_max: u64,
    /// One operation in this many makes something durable.
    pub durability_interval: u64,
    /// Extended attributes up to 64 KiB, files of a TiB, writes of 4 MiB.
    pub extremes: bool,
    /// The power fails: some fsyncs have no client that waits for them, and what has several steps
    /// is left out.
    pub crashes: bool,
    /// This percentage of operations puts an extended attribute of about 60 KiB into the log.
    pub log_pressure_percent: u64,
    /// How often operations are on data, on names, on handles and on attributes, in proportion.
    pub weights: [u64; 4],
    /// This percentage of operations writes up to 150 blocks that are extents of their own, so that
    /// a truncation or removal takes several transactions.
    pub scatter_percent: u64,
    /// This percentage of names has the hash of another one.
    pub colliding_percent: u64,
    /// This percentage of operations is on subvolumes: makes, moves or removes one.
    pub subvolume_percent: u64,
    /// This percentage of operations is on snapshots: makes, deletes, holds or reads one.
    pub snapshot_percent: u64,
    /// This percentage of operations makes or removes a fork.
    pub fork_percent: u64,
    /// Extended attributes have any length up to 60 KiB: trees become deep, and attributes of many
    /// parts give way to short ones.
    pub large_xattrs: bool,
    /// This percentage of operations on data stays with the file of the one before, within two
    /// blocks of its place.
    pub near_percent: u64,
    /// This percentage of operations begins to write neighbouring blocks in their order.
    pub in_order_percent: u64,
}

impl Profile {
    /// For tests without crashes.
    pub const PLAIN: Profile = Profile {
        file_bytes_max: 3 << 20,
        durability_interval: 40,
        extremes: true,
        crashes: false,
        log_pressure_percent: 0,
        weights: [38, 38, 12, 12],
        scatter_percent: 1,
        colliding_percent: 5,
        subvolume_percent: 2,
        snapshot_percent: 2,
        fork_percent: 2,
        large_xattrs: false,
        near_percent: 40,
        in_order_percent: 1,
    };
    /// For crash states: small, and with many points of durability.
    pub const CRASH: Profile = Profile {
        file_bytes_max: 96 << 10,
        durability_interval: 8,
        extremes: false,
        crashes: true,
        scatter_percent: 0,
        near_percent: 25,
        ..Profile::PLAIN
    };
    /// For crash states in which a small log wraps around and is full.
    pub const CRASH_FULL_LOG: Profile =
        Profile { durability_interval: 12, log_pressure_percent: 30, ..Profile::CRASH };

    /// Whether a client may need much space.
    pub fn is_large(&self) -> bool {
        self.file_bytes_max > Self::CRASH.file_bytes_max
            || self.scatter_percent > 0
            || self.large_xattrs
    }

    /// As this one, with a mix of its own.
    #[must_use]
    pub fn swarm(self, random: &mut Seeded) -> Profile {
        let mut pick = |choices: &[u64]| choices[random.below(choices.len() as u64) as usize];
        Profile {
            file_bytes_max: pick(&[16 << 10, 96 << 10, 96 << 10, 512 << 10]),
            durability_interval: pick(&[4, 8, 16, 40]),
            weights: [0; 4].map(|_| pick(&[1, 10, 30, 60])),
            scatter_percent: pick(&[0, 0, 5, 15]),
            colliding_percent: pick(&[0, 5, 50, 90]),
            subvolume_percent: pick(&[0, 1, 3, 8]),
            snapshot_percent: pick(&[0, 0, 3, 8, 20]),
            fork_percent: pick(&[0, 0, 2, 6, 15]),
            large_xattrs: pick(&[0, 0, 1]) == 1,
            near_percent: pick(&[0, 30, 60, 90]),
            in_order_percent: pick(&[0, 1, 2, 6]),
            ..self
        }
    }
}

/// A seeded source of operations.
#[derive(Clone, Debug)]
pub struct Generator {
    pub(crate) random: Seeded,
    pub(crate) profile: Profile,
    /// An early fork that was made just now.
    pub(crate) early_fork: Option<Path>,
    /// Where the operation on data before this one was, in bytes.
    pub(crate) last_place: Option<(Target, u64)>,
    pub(crate) in_order: Option<InOrder>,
}

/// Seconds of a time, before or after the epoch.
fn seconds(random: &mut Seeded) -> i64 {
    random.below(1 << 32) as i64 - (1 << 31)
}

pub(crate) enum Want {
    Any,
    Regular,
    Directory,
    Subvolume,
}

impl Generator {
    /// The source for `seed`.
    pub fn new(seed: u64, profile: Profile) -> Self {
        Self {
            random: Seeded::new(seed),
            profile,
            early_fork: None,
            last_place: None,
            in_order: None,
        }
    }

    pub(crate) fn name(&mut self) -> Name {
        if self.random.chance(self.profile.colliding_percent, 100) {
            let count = u64::from(Name::END - Name::COLLIDING);
            return Name(Name::COLLIDING + self.random.below(count) as u8);
        }
        match self.random.below(40) {
            0 => Name::TOO_LONG,
            1 => Name::BINARY,
            2..5 => {
                Name(Name::SHORT + self.random.below(u64::from(Name::LONG_END - Name::SHORT)) as u8)
            }
            _ => Name(self.random.below(u64::from(Name::SHORT)) as u8),
        }
    }

    fn existing(&mut self, model: &Model, want: &Want) -> Option<(Path, NodeId)> {
        let mut paths = model.paths();
        let is_inside = |id: &NodeId| model.node(*id).is_some_and(|node| node.subvolume != 0);
        let inside = paths.iter().any(|(_, id)| is_inside(id)) && self.random.chance(1, 3);
        paths.retain(|(path, id)| {
            let node = model.node(*id).expect("a path leads to a node");
            if inside && !is_inside(id) {
                return false;
            }
            match want {
                Want::Subvolume => !path.names.is_empty() && model.is_subvolume(*id),
                Want::Any => !path.names.is_empty(),
                Want::Regular => node.contents().is_some(),
                Want::Directory => node.is_directory(),
            }
        });
        if paths.is_empty() {
            None
        } else {
            Some(paths.swap_remove(self.random.below(paths.len() as u64) as usize))
        }
    }

    /// A path for something new: a name in a directory that exists, mostly.
    pub(crate) fn fresh(&mut self, model: &Model) -> Path {
        let directory = self
            .existing(model, &Want::Directory)
            .map(|(path, _)| path)
            .filter(|path| path.names.len() < 4);
        let name = self.name();
        directory.unwrap_or(Path { base: Base::Own, names: Vec::new() }).join(name)
    }

    pub(crate) fn path(&mut self, model: &Model, want: Want) -> Path {
        if self.random.chance(9, 10)
            && let Some((path, _)) = self.existing(model, &want)
        {
            return path;
        }
        self.fresh(model)
    }

    pub(crate) fn target(&mut self, model: &Model, want: Want) -> Target {
        let handles = model.handles();
        if !handles.is_empty() && self.random.chance(1, 4) {
            return Target::Handle(handles[self.random.below(handles.len() as u64) as usize]);
        }
        Target::Path(self.path(model, want))
    }

    pub(crate) fn size_of(model: &Model, target: &Target) -> u64 {
        let node = model.target(target).ok().and_then(|id| model.node(id));
        node.and_then(|node| node.contents()).map_or(0, |contents| contents.size_bytes())
    }

    /// One of the extended attributes of the target, and the length of its value in bytes.
    fn attribute_of(&mut self, model: &Model, target: &Target) -> Option<(u8, u32)> {
        let node = model.target(target).ok().and_then(|id| model.node(id))?;
        let known = (0..14).filter_map(|name| {
            let value = node.xattrs.get(&xattr_name(name))?;
            Some((name, value.bytes.len() as u32))
        });
        let known: Vec<_> = known.collect();
        (!known.is_empty()).then(|| known[self.random.below(known.len() as u64) as usize])
    }

    /// Whether there may be snapshots, if only those that forks need.
    pub(crate) fn takes_snapshots(&self) -> bool {
        self.profile.snapshot_percent + self.profile.fork_percent > 0
    }

    /// The client's operation number `index`.
    pub fn next(&mut self, model: &Model, index: usize) -> Operation {
        let tag = Tag { client: model.client(), operation: index as u32 };
        let going_on = self.in_early_fork(model).or_else(|| self.goes_on_in_order(model, tag));
        if let Some(operation) = going_on {
            return operation;
        }
        if self.random.chance(1, self.profile.durability_interval) {
            return self.durability(model);
        }
        if self.random.chance(self.profile.log_pressure_percent, 100) {
            let target = Target::Path(self.path(model, Want::Any));
            let length_bytes = 50_000 + self.random.below(15_000) as u32;
            return Operation::SetXattr { target, name: 0, length_bytes, tag, mode: XattrSet::Any };
        }
        if self.random.chance(self.profile.scatter_percent, 100) {
            return self.scatter(model, tag);
        }
        if self.random.chance(self.profile.in_order_percent, 100) {
            return self.begin_in_order(model);
        }
        if self.random.chance(self.profile.subvolume_percent, 100) {
            return self.on_subvolumes(model);
        }
        if self.random.chance(self.profile.snapshot_percent, 100) {
            return self.on_snapshots(model);
        }
        if self.random.chance(self.profile.fork_percent, 100) {
            return self.on_forks(model);
        }
        let [data, names, handles, attributes] = self.profile.weights;
        let choice = self.random.below(data + names + handles + attributes);
        match () {
            () if choice < data => self.on_data(model, tag),
            () if choice < data + names => self.on_names(model),
            () if choice < data + names + handles => self.on_handles(model),
            () => self.on_attributes(model, tag),
        }
    }

    fn on_names(&mut self, model: &Model) -> Operation {
        match self.random.below(43) {
            40.. => Operation::List {
                directory: self.path(model, Want::Directory),
                at_a_time: 1 + self.random.below(9) as u8,
            },
            0..10 => {
                let mode = self.random.below(0o1000) as u32;
                Operation::Create {
                    path: self.fresh(model),
                    mode,
                    uid: self.random.below(5) as u32,
                }
            }
            10..14 => {
                let set_group_id = if self.random.chance(1, 6) { 0o2000 } else { 0 };
                Operation::MakeDirectory { path: self.fresh(model), mode: 0o755 | set_group_id }
            }
            14..16 => {
                let lengths = [1, 10, 100, 1000, 4095, 4096, 0];
                let rare = if self.random.chance(1, 4) { 7 } else { 4 };
                Operation::MakeSymlink {
                    path: self.fresh(model),
                    target_bytes: lengths[self.random.below(rare) as usize],
                }
            }
            16 => {
                let kinds = [
                    Special::Fifo,
                    Special::Socket,
                    Special::CharacterDevice,
                    Special::BlockDevice,
                ];
                let special = kinds[self.random.below(4) as usize];
                Operation::MakeSpecial {
                    path: self.fresh(model),
                    special,
                    device: self.random.below(1 << 20) as u32,
                }
            }
            17..20 => Operation::Link { from: self.path(model, Want::Any), to: self.fresh(model) },
            20..24 => Operation::Unlink { path: self.path(model, Want::Any) },
            24..27 => Operation::RemoveDirectory { path: self.path(model, Want::Directory) },
            _ => self.rename(model),
        }
    }

    fn on_subvolumes(&mut self, model: &Model) -> Operation {
        match self.random.below(10) {
            0..5 => Operation::MakeSubvolume { path: self.fresh(model), mode: 0o755 },
            5 => Operation::RemoveDirectory { path: self.path(model, Want::Subvolume) },
            6 | 7 => {
                let modes = [Rename::Replace, Rename::Replace, Rename::Leave, Rename::Exchange];
                let to = if self.random.chance(1, 4) {
                    self.path(model, Want::Directory)
                } else {
                    self.fresh(model)
                };
                Operation::Rename {
                    from: self.path(model, Want::Subvolume),
                    to,
                    mode: modes[self.random.below(4) as usize],
                }
            }
            _ => {
                let want = if self.random.chance(1, 8) { Want::Any } else { Want::Subvolume };
                Operation::RemoveSubvolume { path: self.path(model, want) }
            }
        }
    }

    /// A snapshot that exists, mostly, or the place for one.
    pub(crate) fn snapshot(&mut self, model: &Model, exists: bool) -> (Subvolume, Name) {
        let (mut of, mut name) = (Subvolume::Root, Name(self.random.below(SNAPSHOT_NAMES) as u8));
        if self.random.chance(1, 2)
            && let Some((path, _)) = self.existing(model, &Want::Subvolume)
        {
            of = Subvolume::At(path);
        }
        let has_been_chosen = exists && self.random.chance(9, 10);
        let all: Vec<_> = model.snapshots().keys().collect();
        if has_been_chosen && !all.is_empty() {
            let (root, bytes) = all[self.random.below(all.len() as u64) as usize];
            let mut paths = model.paths().into_iter();
            of = match paths.find(|(_, id)| id == root) {
                Some((path, _)) => Subvolume::At(path),
                None => Subvolume::Root,
            };
            let is_name = |name: &Name| name.bytes(model.client()) == *bytes;
            name = (0..Name::END).map(Name).find(is_name).unwrap_or(name);
        } else if self.random.chance(1, 8) {
            name = Some(self.name()).filter(|name| *name != Name::TOO_LONG).unwrap_or(name);
        }
        if self.random.chance(1, 30) {
            of = Subvolume::At(self.path(model, Want::Any));
        }
        (of, name)
    }

    fn on_snapshots(&mut self, model: &Model) -> Operation {
        let has_many = model.snapshots().len() >= SNAPSHOTS_MAX;
        let choice = if has_many { 7 + self.random.below(13) } else { self.random.below(20) };
        let (of, name) = self.snapshot(model, choice >= 7);
        match choice {
            0..7 => Operation::CreateSnapshot { of, name },
            7..12 => Operation::DeleteSnapshot { of, name },
            12..14 => Operation::HoldSnapshot { of, name, held: self.random.chance(1, 3) },
            // Files may be too long to be read.
            14..18 if self.profile.crashes => Operation::ReadSnapshot { of, name },
            _ => {
                let change = self.random.below(u64::from(CHANGES_IN_SNAPSHOTS)) as u8;
                Operation::ChangeInSnapshot { of, name, change }
            }
        }
    }

    fn rename(&mut self, model: &Model) -> Operation {
        let (want_from, want_to) = match self.random.below(4) {
            0 => (Want::Directory, Want::Directory),
            1 => (Want::Any, Want::Any),
            _ => (Want::Regular, Want::Regular),
        };
        let from = self.path(model, want_from);
        let to =
            if self.random.chance(2, 3) { self.path(model, want_to) } else { self.fresh(model) };
        let mode = match self.random.below(8) {
            0 => Rename::NoReplace,
            1 | 2 => Rename::Exchange,
            3 => Rename::Leave,
            _ => Rename::Replace,
        };
        Operation::Rename { from, to, mode }
    }

    fn on_handles(&mut self, model: &Model) -> Operation {
        let handle = self.random.below(5) as u8;
        match self.random.below(9) {
            0..4 => Operation::Open { path: self.path(model, Want::Regular), handle },
            4..6 => Operation::CreateUnnamed {
                directory: self.path(model, Want::Directory),
                handle,
                mode: 0o640,
            },
            6 => Operation::LinkHandle { handle, to: self.fresh(model) },
            _ => Operation::Close { handle },
        }
    }

    /// Something, half of the time.
    fn maybe<T>(&mut self, make: impl Fn(&mut Seeded) -> T) -> Option<T> {
        self.random.chance(1, 2).then(|| make(&mut self.random))
    }

    fn on_attributes(&mut self, model: &Model, tag: Tag) -> Operation {
        let target = self.target(model, Want::Any);
        let name = self.random.below(14) as u8;
        if self.random.chance(1, 10)
            && let Some((name, length_bytes)) = self.attribute_of(model, &target)
        {
            // Of the same length, one value may be taken for the other.
            return Operation::SetXattr { target, name, length_bytes, tag, mode: XattrSet::Any };
        }
        match self.random.below(12) {
            0..3 => Operation::SetMode { target, mode: self.random.below(0o1000) as u32 },
            3..5 => Operation::SetOwner {
                target,
                uid: self.random.below(9) as u32,
                gid: self.random.below(9) as u32,
            },
            5 => Operation::SetModified { target, seconds: seconds(&mut self.random) },
            8 => Operation::SetAttributes {
                size_bytes: (!self.profile.crashes && self.random.chance(1, 2))
                    .then(|| self.offset(Self::size_of(model, &target))),
                target,
                mode: self.maybe(|random| random.below(0o1000) as u32),
                uid: self.maybe(|random| random.below(9) as u32),
                gid: self.maybe(|random| random.below(9) as u32),
                seconds: self.maybe(seconds),
            },
            6 => Operation::GetXattr { target, name },
            7 => Operation::RemoveXattr { target, name },
            _ => {
                let mode = [XattrSet::Any, XattrSet::Any, XattrSet::Create, XattrSet::Replace]
                    [self.random.below(4) as usize];
                let length_bytes = match self.random.below(12) {
                    0 => 0,
                    3..9 if self.profile.large_xattrs => self.random.below(60_000) as u32,
                    1 if self.profile.extremes => 60_000 + self.random.below(5_600) as u32,
                    2..5 => self.random.below(8192) as u32,
                    _ => self.random.below(200) as u32,
                };
                Operation::SetXattr { target, name, length_bytes, tag, mode }
            }
        }
    }
}
