//! Chooses calls: paths of a small tree, so that most of them meet something, with a memory of what
//! is likely to exist and of what is open.
//!
//! Everything follows from the seed and from what the calls returned; both sides return the same.
//! What Cairn or the reference is documented to refuse alone is not chosen.
use super::arguments;
use super::call::{At, Call, LockKind, MAPS, Octal, SLOTS, Step, SyncKind, Target, USERS};
use super::side::Outcome;
use super::system::How;
use cairn_environment::random::Seeded;
use libc::{O_APPEND, O_CREAT, O_DIRECT, O_DIRECTORY, O_EXCL, O_NOFOLLOW, O_PATH, O_RDONLY};
use libc::{O_RDWR, O_TMPFILE, O_TRUNC, O_WRONLY};

/// With more names than this, most are removed again.
const NAMES_MAX: usize = 48;
/// So many extended attributes are remembered.
const ATTRIBUTES_MAX: usize = 12;
const BLOCK: i64 = 4096;

/// What a scene consists of.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    pub seed: u64,
    /// Files get blocks without data, and copies of ranges: what SEEK_DATA then reports depends on
    /// the file system.
    pub preallocates: bool,
    /// By root, who confines paths to the scene's directory and changes users.
    pub privileged: bool,
    /// Mode of the scene's directory.
    pub root_mode: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Open {
    directory: bool,
    direct: bool,
}

/// Chooses the calls of a scene.
pub struct Chooser {
    random: Seeded,
    scene: Scene,
    known: Vec<(String, bool)>,
    slots: [Option<Open>; SLOTS],
    maps: [usize; MAPS],
    /// The descriptors that were mapped.
    mapped: [usize; MAPS],
    /// The descriptor of the last call: many go on with its file.
    recent: usize,
    /// Extended attributes that were set.
    attributes: Vec<(Target, String)>,
}

impl Chooser {
    pub fn new(scene: Scene) -> Self {
        let (slots, maps, mapped) = ([None; SLOTS], [0; MAPS], [0; MAPS]);
        let (random, known, attributes) = (Seeded::new(scene.seed), Vec::new(), Vec::new());
        Self { random, scene, known, slots, maps, mapped, recent: 0, attributes }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random.chance(percent, 100)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Only the confined may go up.
    fn name(&mut self) -> String {
        let name = arguments::name(&mut self.random);
        if name == ".." && !self.scene.privileged { "a".into() } else { name }
    }

    fn tag(&mut self) -> u64 {
        self.random.next_u64()
    }

    /// A directory to make a name in, with a slash behind it unless it is the root.
    fn parent(&mut self) -> String {
        let directories: Vec<usize> =
            (0..self.known.len()).filter(|index| self.known[*index].1).collect();
        if directories.is_empty() || self.chance(30) {
            return String::new();
        }
        let chosen = self.pick(&directories);
        let path = self.known[chosen].0.clone();
        if path.matches('/').count() > 5 { String::new() } else { path + "/" }
    }

    fn fresh(&mut self) -> String {
        let parent = self.parent();
        parent + &self.name()
    }

    fn existing(&mut self) -> String {
        if self.known.is_empty() {
            return self.fresh();
        }
        let index = self.below(self.known.len());
        self.known[index].0.clone()
    }

    /// One that is likely to lead somewhere.
    fn path(&mut self) -> String {
        let path = if self.chance(80) { self.existing() } else { self.fresh() };
        if self.chance(92) { path } else { self.detour(path) }
    }

    fn detour(&mut self, path: String) -> String {
        match self.below(if self.scene.privileged { 8 } else { 7 }) {
            0 => path + "/",
            1 => path + "/.",
            2 if self.scene.privileged => path + "/../" + &self.name(),
            2 | 3 => format!("./{path}"),
            4 => path + "/x",
            5 => path.replace('/', "//"),
            6 => String::new(),
            _ => format!("/../{path}"),
        }
    }

    fn at(&mut self, path: String) -> At {
        if path.starts_with('/') || self.chance(90) {
            return At { directory: None, path };
        }
        let slot = self.slot(|open| open.directory);
        At { directory: Some(slot), path: self.name() }
    }

    fn some(&mut self) -> At {
        let path = self.path();
        self.at(path)
    }

    fn new_name(&mut self) -> At {
        let path = if self.chance(85) { self.fresh() } else { self.path() };
        self.at(path)
    }

    fn slot(&mut self, wanted: impl Fn(&Open) -> bool) -> usize {
        if self.slots[self.recent].as_ref().is_some_and(&wanted) && self.chance(35) {
            return self.recent;
        }
        let all: Vec<usize> =
            (0..SLOTS).filter(|slot| self.slots[*slot].as_ref().is_some_and(&wanted)).collect();
        if all.is_empty() || self.chance(3) { self.below(SLOTS) } else { self.pick(&all) }
    }

    fn file(&mut self) -> usize {
        if self.chance(96) { self.slot(|open| !open.directory) } else { self.below(SLOTS) }
    }

    fn is_direct(&self, slot: usize) -> bool {
        self.slots[slot].is_some_and(|open| open.direct)
    }

    fn target(&mut self) -> Target {
        if self.chance(25) {
            Target::Slot(self.slot(|_| true))
        } else {
            let path = self.path();
            Target::Path(At { directory: None, path }, self.random.chance(2, 3))
        }
    }

    /// The next call.
    pub fn next(&mut self) -> Step {
        let user = if self.scene.privileged && self.chance(40) {
            1 + self.below(USERS.len() - 1)
        } else {
            0
        };
        Step { user, call: self.call() }
    }

    fn call(&mut self) -> Call {
        let opened = self.slots.iter().filter(|slot| slot.is_some()).count();
        if opened < 3 && self.chance(50) {
            return self.open();
        }
        if self.known.len() > NAMES_MAX && self.chance(40) {
            return self.removal();
        }
        match self.below(1000) {
            0..110 => self.open(),
            110..150 => Call::Close { slot: self.slot(|_| true) },
            150..160 => Call::Duplicate { slot: self.slot(|_| true), to: self.below(SLOTS) },
            160..240 => self.read(),
            240..350 => self.write(),
            350..385 => self.seek(),
            385..400 => Call::Truncate { path: self.path(), length: self.length() },
            400..425 => Call::TruncateOpen { slot: self.file(), length: self.length() },
            425..460 => self.allocate(),
            460..480 => self.copy(),
            480..510 => {
                let (from, to) = (self.some(), self.new_name());
                Call::Link { from, to, follow: self.random.chance(1, 3) }
            }
            510..517 if self.scene.privileged => {
                Call::LinkOpen { slot: self.file(), to: self.new_name() }
            }
            510..545 => self.symlink(),
            545..560 => Call::ReadLink { at: self.some(), room: self.pick(&[1, 10, 5000]) },
            560..620 => self.rename(),
            620..665 => self.removal(),
            665..710 => {
                let mode = Octal(arguments::mode(&mut self.random));
                Call::MakeDirectory { at: self.new_name(), mode }
            }
            710..725 => self.make_node(),
            725..760 => {
                let mode = Octal(arguments::mode(&mut self.random));
                Call::Mode { target: self.target(), mode }
            }
            760..790 if self.scene.privileged => {
                let [uid, gid] = arguments::owner(&mut self.random);
                Call::Owner { target: self.target(), uid, gid }
            }
            760..820 => {
                let times = [(); 2].map(|()| arguments::time(&mut self.random));
                Call::Times { target: self.target(), times }
            }
            820..835 => {
                let mode = self.pick(&[0, 1, 2, 4, 6, 7]);
                Call::Access { at: self.some(), mode, effective: self.random.chance(1, 2) }
            }
            835..850 => Call::Stat { target: self.target() },
            850..900 => self.xattr(),
            900..930 => self.list(),
            930..935 => Call::FileSystem { slot: self.slot(|_| true) },
            935..942 => self.sync(),
            942..975 => self.mapped(),
            975..993 => self.lock(),
            _ => Call::Umask { mask: Octal(self.pick(&[0, 0o022, 0o077, 0o027, 0o002, 0o777])) },
        }
    }

    fn open(&mut self) -> Call {
        let slot = match (0..SLOTS).find(|slot| self.slots[*slot].is_none()) {
            Some(slot) if self.chance(90) => slot,
            _ => self.below(SLOTS),
        };
        let mode = Octal(arguments::mode(&mut self.random));
        let access = self.pick(&[O_RDWR, O_RDWR, O_RDWR, O_RDONLY, O_WRONLY]);
        let (flags, at) = match self.below(20) {
            0..7 => {
                let extra = self.pick(&[0, 0, 0, O_EXCL, O_TRUNC, O_APPEND, O_NOFOLLOW]);
                (access | O_CREAT | extra, self.new_name())
            }
            7..13 => {
                let extra = self.pick(&[0, 0, 0, O_APPEND, O_TRUNC, O_NOFOLLOW, O_DIRECTORY]);
                (access | extra, self.some())
            }
            13..16 => (O_RDONLY | self.pick(&[0, O_DIRECTORY]), {
                let parent = self.parent() + ".";
                self.at(parent)
            }),
            16 => (O_PATH | self.pick(&[0, O_NOFOLLOW, O_DIRECTORY]), self.some()),
            17 => {
                let (parent, extra) = (self.parent() + ".", self.pick(&[0, 0, O_EXCL]));
                (self.pick(&[O_RDWR, O_WRONLY]) | O_TMPFILE | extra, self.at(parent))
            }
            18 => (O_RDWR | O_CREAT | O_DIRECT, self.new_name()),
            _ => (access | self.pick(&[0, O_DIRECT, O_CREAT | O_EXCL | O_NOFOLLOW]), self.some()),
        };
        Call::Open { slot, at, flags: Octal(flags as u32), mode }
    }

    fn offset(&mut self) -> i64 {
        arguments::offset(&mut self.random)
    }

    fn length(&mut self) -> i64 {
        arguments::offset(&mut self.random)
    }

    /// How and how much to read or write.
    fn transfer(&mut self, slot: usize) -> (How, usize) {
        if self.is_direct(slot) {
            let offset = self.offset() / BLOCK * BLOCK;
            return (How::At(offset.max(0)), self.pick(&[1, 1, 2, 3, 8]) * BLOCK as usize);
        }
        let offset = self.offset();
        let ways =
            [How::Plain, How::Plain, How::At(offset), How::Vectored, How::VectoredAt(offset)];
        (self.pick(&ways), arguments::transfer(&mut self.random))
    }

    fn read(&mut self) -> Call {
        let slot = self.file();
        let (how, length) = self.transfer(slot);
        Call::Read { slot, how, length }
    }

    fn write(&mut self) -> Call {
        let slot = self.file();
        let (mut how, length) = self.transfer(slot);
        if !self.is_direct(slot) && self.chance(6) {
            how = How::Append;
        }
        Call::Write { slot, how, length, tag: self.tag() }
    }

    fn seek(&mut self) -> Call {
        let slot = self.slot(|open| !open.directory);
        let whence = self.pick(&[0, 0, 1, 2, 3, 3, 4, 4, 9]);
        let offset = if self.chance(80) { self.offset() } else { -(self.below(10_000) as i64) };
        match self.slots[slot] {
            // Offsets in directories are the file system's own.
            Some(Open { directory: true, .. }) => Call::Seek { slot, offset: 0, whence: 0 },
            _ => Call::Seek { slot, offset, whence },
        }
    }

    fn allocate(&mut self) -> Call {
        use libc::{FALLOC_FL_KEEP_SIZE as KEEP, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};
        let modes: &[i32] = if self.scene.preallocates {
            &[
                0,
                KEEP,
                FALLOC_FL_PUNCH_HOLE | KEEP,
                FALLOC_FL_ZERO_RANGE,
                FALLOC_FL_ZERO_RANGE | KEEP,
                FALLOC_FL_PUNCH_HOLE,
            ]
        } else {
            &[FALLOC_FL_PUNCH_HOLE | KEEP]
        };
        let (mode, offset) = (self.pick(modes), self.offset());
        let length = 1 + self.offset() % (200 << 10);
        Call::Allocate { slot: self.file(), mode, offset, length }
    }

    fn copy(&mut self) -> Call {
        if !self.scene.preallocates {
            return self.read();
        }
        let (from, to) = (self.file(), self.file());
        // The reference copies through the descriptors, and direct I/O needs whole blocks.
        if self.is_direct(from) || self.is_direct(to) {
            return self.read();
        }
        let offsets = if self.chance(70) { Some((self.offset(), self.offset())) } else { None };
        Call::Copy { from, to, offsets, length: arguments::transfer(&mut self.random) }
    }

    fn symlink(&mut self) -> Call {
        let target = match self.below(12) {
            0 => arguments::long_target(&mut self.random),
            1 if self.scene.privileged => format!("/{}", self.existing()),
            2 if self.scene.privileged => format!("../{}", self.existing()),
            3 => ".".into(),
            4 => String::new(),
            5..8 => self.name(),
            _ => self.existing(),
        };
        Call::Symlink { target, at: self.new_name() }
    }

    fn rename(&mut self) -> Call {
        let from = self.some();
        let to = if self.chance(50) { self.new_name() } else { self.some() };
        Call::Rename { from, to, flags: self.pick(&[0, 0, 0, 0, 1, 1, 2, 2, 3, 8]) }
    }

    fn removal(&mut self) -> Call {
        let at = self.some();
        match self.below(5) {
            0 | 1 => Call::RemoveDirectory { at },
            _ => Call::Unlink { at },
        }
    }

    fn make_node(&mut self) -> Call {
        let kinds = if self.scene.privileged {
            &[libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFREG, 0, libc::S_IFCHR, libc::S_IFBLK][..]
        } else {
            &[libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFREG, 0]
        };
        let mode = Octal(self.pick(kinds) | arguments::mode(&mut self.random));
        // The null device, and two numbers that no driver has.
        let devices =
            [libc::makedev(1, 3), libc::makedev(0xabc, 0xa_bcde), libc::makedev(0xabd, 9)];
        Call::MakeNode { at: self.new_name(), mode, device: self.pick(&devices) }
    }

    fn xattr(&mut self) -> Call {
        let (mut target, tag) = (self.target(), self.tag());
        let mut name = arguments::attribute(&mut self.random);
        if !self.attributes.is_empty() && self.chance(50) {
            let index = self.below(self.attributes.len());
            let (of, known) = self.attributes[index].clone();
            (target, name) = (of, if self.chance(80) { known } else { name });
        }
        match self.below(10) {
            0..4 => {
                let length = self.pick(&[0, 1, 9, 100, 100, 900, 3000, 5000, 65536, 65537]);
                Call::SetXattr { target, name, length, tag, flags: self.pick(&[0, 0, 1, 2]) }
            }
            4..6 => {
                Call::GetXattr { target, name, room: self.pick(&[0, 1, 100, 1000, 65536, 65536]) }
            }
            6..8 => Call::ListXattrs { target, room: self.pick(&[0, 1, 20, 1000]) },
            _ => Call::RemoveXattr { target, name },
        }
    }

    fn list(&mut self) -> Call {
        if self.chance(30) {
            return Call::ListAgain { slot: self.slot(|open| open.directory) };
        }
        let parent = self.parent();
        let remove = if self.chance(25) {
            let inside = |path: &str| {
                path.strip_prefix(&parent).filter(|rest| !rest.contains('/')).map(str::to_owned)
            };
            let names: Vec<String> =
                self.known.iter().filter(|known| !known.1).filter_map(|k| inside(&k.0)).collect();
            if names.is_empty() { None } else { Some(names[self.below(names.len())].clone()) }
        } else {
            None
        };
        let path = if self.chance(90) { parent + "." } else { self.path() };
        Call::List { at: At { directory: None, path }, remove }
    }

    fn sync(&mut self) -> Call {
        let (offset, length) = (self.below(9000) as i64, self.below(9000) as i64);
        let kinds = [SyncKind::Full, SyncKind::Data, SyncKind::Range(offset, length)];
        let kind = if self.chance(5) { SyncKind::FileSystem } else { self.pick(&kinds) };
        Call::Sync { slot: self.slot(|_| true), kind }
    }

    fn mapped(&mut self) -> Call {
        let map = self.below(MAPS);
        let (length, tag) = (self.maps[map], self.tag());
        if length == 0 || self.chance(10) {
            let (pages, offset) = (1 + self.below(6), self.below(8) as i64 * BLOCK);
            let (slot, for_writing) = (self.file(), self.random.chance(2, 3));
            return Call::Map { map, slot, offset, length: pages * BLOCK as usize, for_writing };
        }
        let at = self.below(length - 1);
        let part = 1 + self.below((length - at).min(2500));
        match self.below(16) {
            0 => Call::Unmap { map },
            1 => Call::SyncMap { map },
            2..8 => Call::Load { map, at, length: part },
            _ => Call::Store { map, at, length: part, tag },
        }
    }

    fn lock(&mut self) -> Call {
        let kind = if self.chance(50) {
            LockKind::Whole(self.pick(&[libc::LOCK_SH, libc::LOCK_EX, libc::LOCK_UN]))
        } else {
            let kind = self.pick(&[libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK]);
            let (from, length) = (self.below(40) as i64, self.below(20) as i64);
            LockKind::Bytes(kind, from, length)
        };
        Call::Lock { slot: self.slot(|_| true), kind }
    }

    /// Remembers what a call did. `is_directory` of the descriptor that an open call returned.
    pub fn learn(&mut self, call: &Call, outcome: &Outcome, is_directory: bool) {
        if outcome.value.is_err() {
            return;
        }
        match call {
            Call::Store { map, .. } => self.recent = self.mapped[*map],
            Call::Open { slot, .. } => self.recent = *slot,
            _ => {
                if let Some(Target::Slot(slot)) = call.targets().last() {
                    self.recent = *slot;
                }
            }
        }
        match call {
            Call::Open { slot, at, flags, .. } => {
                let flags = flags.0 as i32;
                let direct = flags & O_DIRECT != 0;
                self.slots[*slot] = Some(Open { directory: is_directory, direct });
                if flags & O_CREAT != 0 {
                    self.add(at, false);
                }
            }
            Call::Close { slot } => self.slots[*slot] = None,
            Call::Duplicate { slot, to } => self.slots[*to] = self.slots[*slot],
            Call::Map { map, slot, length, .. } => {
                (self.maps[*map], self.mapped[*map]) = (*length, *slot);
            }
            Call::Unmap { map } => self.maps[*map] = 0,
            Call::MakeDirectory { at, .. } => self.add(at, true),
            Call::Symlink { at, .. } | Call::MakeNode { at, .. } => self.add(at, false),
            Call::Link { to, .. } | Call::LinkOpen { to, .. } => self.add(to, false),
            Call::SetXattr { target, name, .. } => {
                if self.attributes.len() > ATTRIBUTES_MAX {
                    self.attributes.remove(0);
                }
                self.attributes.push((target.clone(), name.clone()));
            }
            Call::Unlink { at } | Call::RemoveDirectory { at } => self.remove(&at.path),
            Call::Rename { from, to, flags } if from.directory.or(to.directory).is_none() => {
                self.renamed(&from.path, &to.path, *flags)
            }
            _ => {}
        }
    }

    fn add(&mut self, at: &At, directory: bool) {
        let known = self.known.iter().any(|(path, _)| *path == at.path);
        if at.directory.is_none() && !known {
            self.known.push((at.path.clone(), directory));
        }
    }

    fn remove(&mut self, path: &str) {
        self.known.retain(|(known, _)| known != path);
    }

    fn renamed(&mut self, from: &str, to: &str, flags: u32) {
        let below = |path: &str, old: &str, new: &str| {
            let rest = path.strip_prefix(old)?;
            (rest.is_empty() || rest.starts_with('/')).then(|| format!("{new}{rest}"))
        };
        if flags != 2 {
            self.known.retain(|(path, _)| below(path, to, "").is_none());
        }
        for (path, _) in &mut self.known {
            if let Some(moved) = below(path, from, to) {
                *path = moved;
            } else if flags == 2
                && let Some(moved) = below(path, to, from)
            {
                *path = moved;
            }
        }
    }
}
