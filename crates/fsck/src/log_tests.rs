//! Volumes that were not unmounted: which checkpoints are valid, and what is checked with them.
use crate::test_volume::*;
use crate::{Piece, Severity, Step, TreeReader, Walk};
use cairn_format::*;

const FILE: InodeNumber = InodeNumber(16);

/// An entry of a checkpoint; without a value it is a removal.
pub(crate) type LogEntry = (Key, Option<Vec<u8>>, EntryFlags);

/// A volume in use, and its log.
pub(crate) struct Logged {
    pub(crate) volume: TestVolume,
    ring_block: u64,
    sequence: u64,
    generation: u64,
    epoch: u64,
    flushed: u64,
    superblock: u64,
}

impl Logged {
    /// With one file of 100,000 bytes.
    fn new() -> Self {
        let mut volume = TestVolume::empty();
        volume.make_file(1, "file", 100_000);
        Self::of(volume)
    }

    /// Writes `volume`.
    pub(crate) fn of(mut volume: TestVolume) -> Self {
        volume.superblock.clean = false;
        volume.write();
        let LogPosition { block, sequence } = volume.superblock.log_tail;
        Self {
            ring_block: block,
            sequence,
            generation: volume.superblock.generation.0 + 1,
            epoch: volume.superblock.log_epoch,
            flushed: sequence - 1,
            superblock: 0,
            volume,
        }
    }

    /// Appends a checkpoint that puts (or removes) these items.
    fn append(&mut self, entries: &[LogEntry]) -> u64 {
        self.append_to(TREE_FILES, entries)
    }

    /// As [`Logged::append`], for items of another tree.
    pub(crate) fn append_to(&mut self, tree: TreeId, entries: &[LogEntry]) -> u64 {
        let mut memory = vec![0; 64 * BLOCK_SIZE];
        let mut builder = CheckpointBuilder::new(&mut memory);
        for (key, value, flags) in entries {
            let flags =
                EntryFlags(flags.0 | if value.is_none() { EntryFlags::DELETE.0 } else { 0 });
            builder.push(CheckpointEntry {
                tree,
                key: *key,
                flags,
                value: value.as_deref().unwrap_or_default(),
            });
        }
        let header = CheckpointHeader {
            sequence: self.sequence,
            log_epoch: self.epoch,
            generation: Generation(self.generation),
            flushed_sequence: self.flushed,
            last_operation: LogSeq(1),
            next_inode: self.volume.superblock.next_inode,
            superblock: Generation(self.superblock),
        };
        let bytes = builder.finish(&header, VOLUME, self.ring_block);
        let (log, at) = (self.volume.superblock.geometry.log(), self.ring_block);
        for (index, block) in (0..).zip(bytes.chunks(BLOCK_SIZE)) {
            let block_number = BlockNumber(log.start.0 + (at + index) % log.blocks);
            self.volume.write_block(block_number, block);
        }
        self.ring_block = (at + bytes.len() as u64 / BLOCK_SIZE as u64) % log.blocks;
        self.sequence += 1;
        at
    }

    fn put(&self, key: Key) -> LogEntry {
        (key, Some(self.volume.items[&key].clone()), EntryFlags::default())
    }

    pub(crate) fn inode(&self, inode: InodeNumber) -> LogEntry {
        self.put(Key::new(inode, ItemKind::Inode, 0))
    }

    fn replayable(&self) -> u64 {
        self.volume.check().statistics.checkpoints
    }
}

/// Entries that put `extent` into the file at `file_block` and grow it.
fn appended(log: &mut Logged, file_block: u64, extent: &Extent) -> Vec<LogEntry> {
    log.volume.change_inode(FILE.0, |item| {
        item.blocks += extent.blocks;
        item.size = (file_block + extent.blocks) * BLOCK_SIZE as u64;
    });
    let key = Key::new(FILE, ItemKind::Extent, file_block);
    vec![log.inode(FILE), (key, Some(extent.encode()), EntryFlags::NEW_DATA)]
}

#[test]
fn the_state_after_replay_is_judged() {
    let mut log = Logged::new();
    log.volume.assert_clean();
    // A new file, made and named in two checkpoints. Between them the volume would contradict
    // itself.
    let inode = InodeNumber(log.volume.make_file(1, "second", 0));
    log.append(&[log.inode(inode)]);
    assert_eq!(log.replayable(), 1);
    log.volume.assert_error("says 1 links, but has 0 names");
    let name = TestVolume::entry(inode.0, 1, "second", 0o100644);
    log.append(&[log.inode(INODE_ROOT), (name.0, Some(name.1), EntryFlags::default())]);
    assert_eq!(log.replayable(), 2);
    log.volume.assert_clean();
    // New data, and its removal.
    let extent = log.volume.new_extent(3, ExtentKind::Data);
    let entries = appended(&mut log, 30, &extent);
    log.append(&entries);
    log.volume.assert_clean();
    assert_eq!(log.volume.check().statistics.data_blocks, 28);
    log.volume.change_inode(FILE.0, |item| (item.size, item.blocks) = (100_000, 25));
    log.append(&[
        log.inode(FILE),
        (Key::new(FILE, ItemKind::Extent, 30), None, EntryFlags::default()),
    ]);
    log.volume.assert_clean();
    assert_eq!(log.volume.check().statistics.data_blocks, 25);
}

#[test]
fn a_superblock_on_which_a_checkpoint_relies_must_be_there() {
    let newest = Logged::new().volume.superblock.generation.0;
    // In the chain, and behind its end.
    for gap in [0, 1] {
        for (superblock, is_lost) in [(0, false), (newest, false), (newest + 1, true)] {
            let mut log = Logged::new();
            (log.superblock, log.generation) = (newest, newest + 1);
            let inode = log.inode(FILE);
            log.append(std::slice::from_ref(&inode));
            (log.superblock, log.generation) = (superblock, newest + 2);
            log.ring_block += gap;
            log.sequence += gap;
            log.append(&[inode]);
            if is_lost {
                log.volume.assert_error(&format!(
                    "the superblock of generation {superblock} was flushed"
                ));
            } else {
                log.volume.assert_clean();
            }
            assert_eq!(log.replayable(), if is_lost || gap > 0 { 1 } else { 2 });
            if is_lost {
                log.volume.assert_repairable();
            }
        }
    }
}

#[test]
fn checkpoints_of_another_epoch_sequence_or_generation_are_not_replayed() {
    let changes: [fn(&mut Logged); 5] = [
        |log| log.epoch -= 1,
        |log| log.epoch += 1,
        |log| log.sequence += 1,
        |log| log.sequence -= 1,
        // A checkpoint that the superblock covers is accepted, but has no effect.
        |log| log.generation = 5,
    ];
    for change in changes {
        let mut log = Logged::new();
        change(&mut log);
        log.append(&[(Key::new(FILE, ItemKind::Inode, 0), None, EntryFlags::default())]);
        assert_eq!(log.replayable(), 0);
        log.volume.assert_clean();
    }
}

#[test]
fn a_generation_may_rise_but_not_fall() {
    let mut log = Logged::new();
    log.generation = 7;
    log.append(&[log.inode(FILE)]);
    log.append(&[log.inode(FILE)]);
    log.generation = 6;
    log.append(&[log.inode(FILE)]);
    assert_eq!(log.replayable(), 2);
    log.volume.assert_clean();
}

#[test]
fn the_ring_goes_round_at_its_end() {
    let mut log = Logged::new();
    let ring_blocks = log.volume.superblock.geometry.log_blocks;
    log.volume.set_xattr(FILE.0, "user.large", 60_000);
    let entries: Vec<_> =
        log.volume.items.range(Key::all_of_inode(FILE)).map(|(key, _)| log.put(*key)).collect();
    let mut checkpoints = 0;
    while log.ring_block + 16 < ring_blocks || checkpoints == 0 {
        log.append(&entries);
        checkpoints += 1;
    }
    log.append(&entries);
    assert!(log.ring_block < 64, "went round");
    assert_eq!(log.replayable(), checkpoints + 1);
    log.volume.assert_clean();
}

#[test]
fn data_that_never_arrived_ends_the_chain() {
    let mut log = Logged::new();
    log.append(&[log.inode(FILE)]);
    let extent = log.volume.new_extent(3, ExtentKind::Data);
    let entries = appended(&mut log, 30, &extent);
    log.append(&entries);
    log.append(&[log.inode(FILE)]);
    assert_eq!(log.replayable(), 3);
    log.volume.flip(extent.start, BLOCK_SIZE + 7, 1);
    assert_eq!(log.replayable(), 1);
    let report = log.volume.check();
    assert_eq!((report.exit_code(), report.findings[0].severity), (0, Severity::Note), "{report}");
    // A later checkpoint proves that the data had been flushed: so it is damage.
    log.flushed = log.sequence - 1;
    log.append(&[log.inode(FILE)]);
    assert_eq!(log.replayable(), 4);
    log.volume.assert_error("don't match their checksums");
}

#[test]
fn every_flipped_byte_of_a_flushed_checkpoint_is_found() {
    let mut log = Logged::new();
    let first = log.append(&[log.inode(FILE)]);
    log.flushed = log.sequence - 1;
    log.append(&[log.inode(FILE)]);
    let address = BlockNumber(log.volume.superblock.geometry.log().start.0 + first);
    let covered = CHECKPOINT_HEADER_BYTES + ENTRY_HEADER_BYTES + InodeItem::BYTES;
    for position in 0..covered {
        log.volume.flip(address, position, 0x20);
        log.volume.assert_error("was flushed, as checkpoint 10 says, but is lost");
        log.volume.flip(address, position, 0x20);
    }
    // What follows the covered bytes is padding.
    log.volume.flip(address, covered, 0x20);
    log.volume.assert_clean();
}

#[test]
fn a_flipped_byte_of_the_last_checkpoint_may_be_a_torn_write() {
    let mut log = Logged::new();
    log.append(&[log.inode(FILE)]);
    let last = log.append(&[log.inode(FILE)]);
    log.volume.flip(BlockNumber(log.volume.superblock.geometry.log().start.0 + last), 200, 1);
    assert_eq!(log.replayable(), 1);
    log.volume.assert_clean();
}

#[test]
fn entries_that_cannot_be() {
    let expect = |text: &str, entry: (Key, Option<Vec<u8>>, EntryFlags)| {
        let mut log = Logged::new();
        log.append(&[entry]);
        log.volume.assert_error(text);
    };
    let inode = Logged::new().inode(FILE);
    expect("with unknown flags 0x10", (inode.0, inode.1.clone(), EntryFlags(16)));
    expect("is a removal with a value", (inode.0, inode.1.clone(), EntryFlags::DELETE));
    expect(
        "an item of unknown kind",
        (Key { kind: 201, ..inode.0 }, inode.1.clone(), EntryFlags::default()),
    );
    expect("inode item of 2 bytes", (inode.0, Some(vec![1, 2]), EntryFlags::default()));
    expect("does not exist", (Key::new(FILE, ItemKind::Inode, 0), None, EntryFlags::default()));
    let outside = Extent {
        start: BlockNumber(3),
        blocks: 1,
        kind: ExtentKind::Data,
        generation: Generation(6),
        written: Generation(6),
        checksums: vec![0],
    };
    let extent_key = Key::new(FILE, ItemKind::Extent, 90);
    expect("outside the volume", (extent_key, Some(outside.encode()), EntryFlags::NEW_DATA));
    expect("outside the volume", (extent_key, Some(outside.encode()), EntryFlags::default()));
    expect(
        "bytes of checksums",
        (extent_key, Some(outside.encode()[..24].to_vec()), EntryFlags::NEW_DATA),
    );
    let mut newer = Logged::new().inode(FILE);
    let mut item = InodeItem::decode(newer.1.as_ref().unwrap()).unwrap();
    item.generation = Generation(7);
    newer.1 = Some(item.encode().to_vec());
    expect("the newest is 6", newer);
}

#[test]
fn an_entry_of_another_tree_is_an_error() {
    let log = Logged::new();
    let mut memory = vec![0; BLOCK_SIZE];
    let mut builder = CheckpointBuilder::new(&mut memory);
    builder.push(CheckpointEntry {
        tree: TreeId(9),
        key: Key::MIN,
        flags: EntryFlags::DELETE,
        value: &[],
    });
    let header = CheckpointHeader {
        sequence: log.sequence,
        log_epoch: log.epoch,
        generation: Generation(6),
        flushed_sequence: 0,
        last_operation: LogSeq(1),
        next_inode: 17,
        superblock: Generation(0),
    };
    let bytes = builder.finish(&header, VOLUME, log.ring_block);
    log.volume.write_block(
        BlockNumber(log.volume.superblock.geometry.log().start.0 + log.ring_block),
        bytes,
    );
    log.volume.assert_error("changes tree 9");
}

#[test]
fn logged_extents_may_only_take_free_blocks_or_their_own() {
    // A part of the file's own earlier extent, as a punched hole leaves it.
    let mut log = Logged::new();
    let key = Key::new(FILE, ItemKind::Extent, 0);
    let extent = Extent::decode(&log.volume.items[&key]).unwrap();
    let (front, back) = (extent.slice(0, 4), extent.slice(10, extent.blocks - 10));
    log.volume.change_inode(FILE.0, |item| item.blocks -= 6);
    let back_key = Key::new(FILE, ItemKind::Extent, 10);
    let entries = [
        log.inode(FILE),
        (key, Some(front.encode()), EntryFlags(0)),
        (back_key, Some(back.encode()), EntryFlags(0)),
    ];
    log.append(&entries);
    log.volume.assert_clean();

    // Blocks of a node, and of another file that the same log has removed. Neither may be allocated
    // again before a commit.
    let node_blocks = Extent {
        start: log.volume.nodes[0],
        kind: ExtentKind::Unwritten,
        checksums: Vec::new(),
        ..extent.slice(0, 1)
    };
    let entries = appended(&mut log, 40, &node_blocks);
    log.append(&entries);
    log.volume.assert_error("belongs to something else");

    let mut log = Logged::new();
    let other = InodeNumber(log.volume.make_file(1, "thief", 0));
    log.volume.change_inode(other.0, |item| (item.size, item.blocks) = (4 * BLOCK_SIZE as u64, 4));
    let name = TestVolume::entry(other.0, 1, "thief", 0o100644);
    let stolen = (Key::new(other, ItemKind::Extent, 0), Some(front.encode()), EntryFlags(0));
    log.volume.change_inode(FILE.0, |item| (item.size, item.blocks) = (0, 0));
    let entries = [
        log.inode(INODE_ROOT),
        (name.0, Some(name.1), EntryFlags(0)),
        log.inode(other),
        stolen,
        log.inode(FILE),
        (key, None, EntryFlags(0)),
    ];
    log.append(&entries);
    let report = log.volume.assert_error("belongs to something else");
    assert_eq!(report.errors, 1, "{report}");

    // Two files with the same new blocks.
    let mut log = Logged::new();
    let fresh = log.volume.new_extent(2, ExtentKind::Unwritten);
    let mut entries = appended(&mut log, 40, &fresh);
    log.volume.change_inode(FILE.0, |item| item.blocks += 2);
    entries[0] = log.inode(FILE);
    entries.push((Key::new(FILE, ItemKind::Extent, 50), Some(fresh.encode()), EntryFlags(0)));
    log.append(&entries);
    log.volume.assert_error("is referred to twice");
}

#[test]
fn an_unmounted_volume_has_nothing_to_replay() {
    let mut log = Logged::new();
    log.append(&[log.inode(FILE)]);
    log.volume.superblock.clean = true;
    log.volume.write_superblocks();
    log.volume.assert_error("although the volume was unmounted");
}

#[test]
fn garbage_in_the_log_never_panics() {
    let mut log = Logged::new();
    let first = log.append(&[log.inode(FILE)]);
    let address = BlockNumber(log.volume.superblock.geometry.log().start.0 + first);
    let mut block = vec![0; BLOCK_SIZE];
    cairn_blockdev::BlockDevice::read(&log.volume.device, address.offset_bytes(), &mut block)
        .unwrap();
    for length in [0u32, 47, 95, 96, 97, 4096, 4097, 1 << 20, u32::MAX] {
        let mut damaged = block.clone();
        damaged[12..16].copy_from_slice(&length.to_le_bytes());
        if (48..4096).contains(&length) {
            Header::seal(&mut damaged);
        }
        log.volume.write_block(address, &damaged);
        assert_eq!(log.replayable(), 0, "length {length}");
    }
}

/// What the log put, replaced and removed, as files come out.
#[test]
fn the_state_after_replay_is_read() {
    let mut log = Logged::new();
    let inode = InodeNumber(log.volume.make_file(1, "second", 0));
    let name = TestVolume::entry(inode.0, 1, "second", 0o100644);
    let root = log.inode(INODE_ROOT);
    log.append(&[log.inode(inode), root, (name.0, Some(name.1), EntryFlags::default())]);
    let (old, _) = TestVolume::entry(FILE.0, 1, "file", 0o100644);
    let new = TestVolume::entry(FILE.0, 1, "renamed", 0o100644);
    log.volume.change_inode(INODE_ROOT.0, |item| item.size += 3);
    let extent = log.volume.new_extent(3, ExtentKind::Data);
    let entries = appended(&mut log, 30, &extent);
    log.append(&entries);
    log.append(&[
        log.inode(INODE_ROOT),
        (old, None, EntryFlags::default()),
        (new.0, Some(new.1), EntryFlags::default()),
    ]);
    log.volume.assert_clean();
    let reader = TreeReader::open(&log.volume.device, &mut |_| {}).unwrap();
    let (mut names, mut data) = (Vec::new(), Vec::new());
    for step in Walk::new(&reader) {
        let Step::Object(entry) = step else {
            assert!(!matches!(step, Step::Problem { .. }), "{step:?}");
            continue;
        };
        names.push(String::from_utf8(entry.name.clone()).unwrap());
        if entry.object.inode == FILE {
            let mut take = |piece: Piece<'_>| match piece {
                Piece::Data { offset_bytes, bytes } => {
                    data.push((offset_bytes, bytes.len()));
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            };
            reader.read_file(entry.object, &entry.attributes, &mut take).unwrap();
        }
    }
    names.sort();
    assert_eq!(names, ["renamed", "second"]);
    assert_eq!(data, [(0, 25 * BLOCK_SIZE), (30 * BLOCK_SIZE as u64, 3 * BLOCK_SIZE)]);
}
