//! What operations reserve is enough for what they do, whatever the trees look like: an operation
//! that needs more would stop the volume. And it is not far more, or space would be refused that is
//! there.
use cairn_blockdev::MemoryDevice;
use cairn_engine::{
    AllocateMode, AttributeChange, Error, FileType, FsyncKind, InodeId, NewInode, RenameMode,
    Volume, VolumeOptions, XattrMode, mkfs,
};
use cairn_environment::random::Seeded;
use std::sync::Arc;

const FILE: NewInode<'static> =
    NewInode { file_type: FileType::Regular, mode: 0o644, uid: 7, gid: 8, device: 0, target: None };

/// A name as long as names get: the items of directories are large then, and the tree is high.
fn name(number: u64) -> Vec<u8> {
    let mut name = format!("{number}-").into_bytes();
    name.resize(200 + (number % 56) as usize, b'n');
    name
}

struct Load {
    volume: Volume,
    directories: Vec<InodeId>,
    /// Names in use, in each directory.
    names: u64,
    random: Seeded,
}

impl Load {
    fn directory(&mut self) -> InodeId {
        self.directories[self.random.below(self.directories.len() as u64) as usize]
    }

    fn name(&mut self) -> Vec<u8> {
        name(self.random.below(self.names))
    }

    /// Uses the file under some name, if there is one.
    fn with_file(
        &mut self,
        act: impl FnOnce(&Volume, InodeId, &mut Seeded) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (directory, name) = (self.directory(), self.name());
        let inode = self.volume.lookup(directory, &name)?.inode;
        let result = act(&self.volume, inode, &mut self.random);
        self.volume.forget(inode, 1);
        result
    }

    fn name_something(&mut self) -> Result<(), Error> {
        let (directory, name) = (self.directory(), self.name());
        let target = vec![b't'; 1 + self.random.below(4000) as usize];
        match self.random.below(8) {
            0..5 => self
                .volume
                .create(directory, &name, &FILE)
                .map(|new| self.volume.forget(new.inode, 1)),
            5 => {
                let link = NewInode { file_type: FileType::Symlink, target: Some(&target), ..FILE };
                self.volume
                    .create(directory, &name, &link)
                    .map(|new| self.volume.forget(new.inode, 1))
            }
            6 => self
                .volume
                .create_unnamed(directory, &FILE)
                .map(|new| self.volume.forget(new.inode, 1)),
            _ => self.with_file(|volume, inode, _| {
                volume.link(inode, directory, &name).map(|_| volume.forget(inode, 1))
            }),
        }
    }

    fn change_something(&mut self) -> Result<(), Error> {
        let kind = self.random.below(6);
        self.with_file(|volume, inode, random| {
            let (at, length) = (random.below(60) * 3000, 1 + random.below(20_000));
            match kind {
                0 | 1 => {
                    for piece in 0..random.below(20) {
                        volume.write(
                            inode,
                            at + piece * 9000,
                            &vec![piece as u8; length as usize % 9000],
                        )?;
                    }
                    volume.fsync_blocking(inode, FsyncKind::Full)
                }
                2 => volume
                    .set_attributes(
                        inode,
                        &AttributeChange { size: Some(at), ..AttributeChange::default() },
                    )
                    .map(drop),
                3 => volume.allocate(
                    inode,
                    at,
                    length,
                    AllocateMode::Allocate { keep_size: random.chance(1, 2) },
                ),
                4 => volume.allocate(inode, at, length, AllocateMode::PunchHole),
                _ => {
                    let attribute = [b"user.small", b"user.large"][random.below(2) as usize];
                    if random.chance(1, 4) {
                        return volume.remove_xattr(inode, attribute);
                    }
                    let value = vec![
                        9;
                        random.below(if attribute == b"user.small" { 100 } else { 60_000 })
                            as usize
                    ];
                    volume.set_xattr(inode, attribute, &value, XattrMode::Any)
                }
            }
        })
    }

    fn step(&mut self) -> Result<(), Error> {
        match self.random.below(10) {
            0..3 => self.name_something(),
            3..7 => self.change_something(),
            7 | 8 => {
                let (directory, name) = (self.directory(), self.name());
                self.volume.unlink(directory, &name)
            }
            _ => {
                let (from, old, to, new) =
                    (self.directory(), self.name(), self.directory(), self.name());
                match self.random.below(4) {
                    0 => self.volume.rename(from, &old, to, &new, RenameMode::Exchange),
                    1 => {
                        let left =
                            NewInode { file_type: FileType::CharacterDevice, mode: 0, ..FILE };
                        self.volume.rename_leaving(from, &old, to, &new, RenameMode::Replace, &left)
                    }
                    _ => self.volume.rename(from, &old, to, &new, RenameMode::Replace),
                }
            }
        }
    }
}

/// Random operations; the greatest share of its reservation that any of them used, in percent.
fn load(seed: u64, (steps, names): (u64, u64), commit_each: u64) -> u64 {
    let device = Arc::new(MemoryDevice::new(512 << 20));
    mkfs::mkfs(&*device, &mkfs::MkfsOptions::default()).unwrap();
    let volume =
        Volume::open(device, VolumeOptions { background: false, ..VolumeOptions::default() })
            .unwrap();
    let new = NewInode { file_type: FileType::Directory, mode: 0o755, ..FILE };
    let directories = (0..8)
        .map(|number| volume.create(volume.root(), &name(number), &new).unwrap().inode)
        .collect();
    let mut load = Load { volume, directories, names, random: Seeded::new(seed) };
    let mut done = 0;
    for step in 0..steps {
        match load.step() {
            Ok(()) => done += 1,
            Err(error @ (Error::Aborted(_) | Error::Damaged(_) | Error::Device(_))) => {
                panic!("seed {seed}, step {step}: {error}")
            }
            Err(_) => {}
        }
        // After a commit every node must be copied again: the worst case.
        if load.random.chance(1, commit_each) {
            load.volume.commit().unwrap();
        }
    }
    let statistics = load.volume.statistics();
    assert!(done > steps / 8, "only {done} of {steps} steps did anything");
    assert_eq!(statistics.failure, None, "seed {seed}");
    load.volume.close().unwrap();
    assert!(
        statistics.worst_case_used_percent <= 100,
        "seed {seed}: an operation used more than it reserved"
    );
    statistics.worst_case_used_percent
}

#[test]
fn nothing_needs_more_than_it_reserved() {
    let used = (0..6).map(|seed| load(seed, (3_000, 375), [1, 2, 10][seed as usize % 3])).max();
    assert!(
        used >= Some(40),
        "at most {used:?} % of a reservation was used: worst cases are guessed"
    );
}

#[test]
fn trees_without_height_are_no_exception() {
    let used = (100..160).map(|seed| load(seed, (100, 4), 1 + seed % 3)).max();
    assert!(
        used >= Some(40),
        "at most {used:?} % of a reservation was used: worst cases are guessed"
    );
}
