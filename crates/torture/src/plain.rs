//! One client and no crash: after every few operations, and after each remount, the volume must
//! equal the model in everything, and fsck must find nothing.
use crate::contents::{BLOCK_BYTES, Contents, describe};
use crate::crash::expect_clean;
use crate::files::mkfs_options;
use crate::generator::{Generator, Profile};
use crate::model::{Layout, Model, NodeId};
use crate::operation::{Operation, listing, xattr_name};
use crate::runner::{Runner, make_bases};
use crate::snapshot::{
    FullPath, Snapshot, differences, hash, of_model, of_snapshot, of_volume, show,
};
use crate::volume_snapshots::{is_snapshot, listed};
use crate::workload::compare_outcome;
use cairn_blockdev::{BlockDevice, MemoryDevice};
use cairn_engine::mkfs::mkfs;
use cairn_engine::{Attributes, Error, InodeId, SeekTarget, Volume, VolumeOptions};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How one list of operations is tried.
#[derive(Clone, Copy, Debug)]
pub struct PlainOptions {
    /// Length of the volume.
    pub volume_bytes: u64,
    /// Operations between two comparisons.
    pub compare_interval: usize,
    /// Operations between two remounts.
    pub remount_interval: usize,
    /// Periodic work of the volume in the background.
    pub background: bool,
}

impl PlainOptions {
    fn volume_options(&self) -> VolumeOptions {
        VolumeOptions {
            commit_interval: Duration::from_millis(20),
            background: self.background,
            node_cache_bytes: 512 << 10,
            // So small that blocks leave it all the time; or none.
            data_cache_bytes: if self.background { 0 } else { 64 << 10 },
            dirty_data_bytes_max: 4 << 20,
            ..VolumeOptions::default()
        }
    }
}

/// Files up to this length are compared byte by byte, longer ones where they may hold data.
const COMPARE_WHOLE_BYTES: u64 = 4 << 20;

/// Compares contents, sizes, times and what is allocated with the model; exactly, if nothing is in
/// memory, since the volume was just mounted again.
fn compare_files(
    volume: &Volume,
    model: &Model,
    remounted: bool,
    lives: &mut Lives,
) -> Result<(), String> {
    let expected = of_model(model);
    let batch = 1 + expected.names.len() % 13;
    let found =
        of_volume(volume, batch).map_err(|error| format!("reading the namespace: {error}"))?;
    if expected.digest != found.digest {
        return Err(format!(
            "the namespace differs:\n    {}",
            differences(&expected, &found).join("\n    ")
        ));
    }
    for ((path, (_, node)), (_, inode)) in expected.names.iter().zip(found.names.values()) {
        if is_snapshot(path) {
            continue;
        }
        let node = model.node(*node).expect("a snapshot's nodes exist");
        let attributes =
            volume.attributes(*inode).map_err(|error| format!("{}: {error}", show(path)))?;
        if let Some(seconds) =
            node.modified_seconds.filter(|seconds| *seconds != attributes.modified.seconds)
        {
            return Err(format!(
                "{} was modified at {}, expected {seconds}",
                show(path),
                attributes.modified.seconds
            ));
        }
        if let Some(contents) = node.contents() {
            compare_file(volume, path, &attributes, contents, remounted)?;
        }
    }
    compare_snapshots(volume, model, &expected, &found, lives)
}

/// Of each snapshot, by its identity, a digest of all times in it, which never change.
type Lives = BTreeMap<[u8; 16], u64>;

/// Compares each snapshot with what the model had when it was made.
fn compare_snapshots(
    volume: &Volume,
    model: &Model,
    expected: &Snapshot<NodeId>,
    found: &Snapshot<InodeId>,
    lives: &mut Lives,
) -> Result<(), String> {
    let identities: BTreeMap<_, _> = listed(volume)
        .map_err(|error| format!("listing snapshots: {error}"))?
        .into_iter()
        .map(|info| (info.root, info.uuid))
        .collect();
    for (path, (_, id)) in expected.names.iter().filter(|(path, _)| is_snapshot(path)) {
        let mut all = model.snapshots().values();
        let of_model = all.find(|snapshot| snapshot.id == *id).expect("it is the model's");
        let wrong = |error: String| format!("the snapshot {}: {error}", show(path));
        let root = found.names[path].1;
        let there = of_snapshot(volume, root, 1 + of_model.names.names.len() % 13)
            .map_err(|error| wrong(error.to_string()))?;
        if of_model.names.digest != there.digest {
            return Err(wrong(differences(&of_model.names, &there).join("\n    ")));
        }
        let mut times = Vec::new();
        for ((path, (_, node)), (_, inode)) in of_model.names.names.iter().zip(there.names.values())
        {
            let attributes = volume.attributes(*inode).map_err(|error| wrong(error.to_string()))?;
            let seconds = of_model.modified_seconds.get(node).copied();
            if seconds.is_some_and(|seconds| seconds != attributes.modified.seconds) {
                let found = attributes.modified.seconds;
                return Err(wrong(format!(
                    "{} was modified at {found}, expected {seconds:?}",
                    show(path)
                )));
            }
            let all = [attributes.modified, attributes.changed, attributes.created];
            times.push(all.map(|time| (time.seconds, time.nanoseconds)));
            let Some(contents) = of_model.files.get(node) else { continue };
            compare_file(volume, path, &attributes, contents, true).map_err(wrong)?;
        }
        let times = hash(times);
        if *lives.entry(identities[&root]).or_insert(times) != times {
            return Err(wrong("times in it have changed".into()));
        }
    }
    Ok(())
}

/// Compares a file's length, how much of it is allocated, and its bytes.
fn compare_file(
    volume: &Volume,
    path: &FullPath,
    attributes: &Attributes,
    contents: &Contents,
    is_written: bool,
) -> Result<(), String> {
    let inode = attributes.inode;
    if contents.size_bytes() != attributes.size_bytes {
        return Err(format!(
            "{} has {} bytes, expected {}",
            show(path),
            attributes.size_bytes,
            contents.size_bytes()
        ));
    }
    let (blocks, expected) =
        (attributes.blocks_512 * 512 / BLOCK_BYTES, contents.allocated().len() as u64);
    // Of data in memory it is not always known whether it will need more space.
    if blocks < expected || is_written && blocks > expected {
        return Err(format!(
            "{} (inode {inode}) occupies {blocks} blocks, expected {expected}",
            show(path)
        ));
    }
    compare_contents(volume, inode, contents)
        .map_err(|error| format!("{} (inode {inode}): {error}", show(path)))
}

fn compare_contents(volume: &Volume, inode: InodeId, contents: &Contents) -> Result<(), String> {
    let size = contents.size_bytes();
    let ranges: Vec<(u64, u64)> = if size <= COMPARE_WHOLE_BYTES {
        vec![(0, size + 1)]
    } else {
        let around = contents
            .blocks()
            .keys()
            .map(|block| (block.saturating_sub(1) * BLOCK_BYTES, 3 * BLOCK_BYTES));
        around.chain([(0, BLOCK_BYTES), (size - 5, 100)]).collect()
    };
    for (offset, length) in ranges {
        let expected = contents.read(offset, length);
        let mut found = Vec::new();
        volume
            .read(inode, offset, length as usize, &mut found)
            .map_err(|error| format!("reading at {offset}: {error}"))?;
        if expected != found {
            let at = expected.iter().zip(&found).take_while(|(a, b)| a == b).count();
            let near = |bytes: &[u8]| {
                describe(
                    offset + at as u64,
                    &bytes[at.min(bytes.len())..bytes.len().min(at + 8192)],
                )
            };
            return Err(format!(
                "differs at {}: expected {}, found {}",
                offset + at as u64,
                near(&expected),
                near(&found)
            ));
        }
    }
    compare_holes(volume, inode, contents)
}

/// What `seek` calls a hole must be zeros, and it must come to an end.
fn compare_holes(volume: &Volume, inode: InodeId, contents: &Contents) -> Result<(), String> {
    let size = contents.size_bytes();
    let mut at = 0;
    while at < size {
        let data = match volume.seek(inode, at, SeekTarget::Data) {
            Ok(data) => data,
            Err(Error::OutOfRange) => size,
            Err(error) => return Err(format!("seeking data at {at}: {error}")),
        };
        let hidden = contents
            .blocks()
            .range(at / BLOCK_BYTES..data / BLOCK_BYTES)
            .find(|(_, block)| block.iter().any(|&byte| byte != 0));
        if data < at || hidden.is_some_and(|(block, _)| (block + 1) * BLOCK_BYTES > at) {
            return Err(format!(
                "seek says that {at} to {data} is a hole, but there is data in it"
            ));
        }
        if data >= size {
            break;
        }
        let hole = volume
            .seek(inode, data, SeekTarget::Hole)
            .map_err(|error| format!("seeking a hole at {data}: {error}"))?;
        if hole <= data {
            return Err(format!("seek finds data and a hole at {data}"));
        }
        at = hole;
    }
    Ok(())
}

/// `statfs` must make sense.
fn compare_space(volume: &Volume, volume_bytes: u64) -> Result<(), String> {
    let space = volume.space();
    let sane = space.available_blocks <= space.free_blocks
        && space.free_blocks <= space.total_blocks
        && space.total_blocks <= volume_bytes / BLOCK_BYTES
        && u64::from(space.block_size) == BLOCK_BYTES;
    if sane { Ok(()) } else { Err(format!("statfs reports {space:?}")) }
}

/// Performs `operations` on a new volume.
///
/// # Errors
/// The first difference from the model.
pub fn replay(operations: &[Operation], options: &PlainOptions) -> Result<(), String> {
    let mut list = operations.iter().cloned();
    perform(options, &mut |_, _| list.next()).1
}

type NextOperation<'a> = dyn FnMut(&Model, usize) -> Option<Operation> + 'a;

/// Performs what `next` gives until it gives nothing; returns what was performed.
fn perform(
    options: &PlainOptions,
    next: &mut NextOperation<'_>,
) -> (Vec<Operation>, Result<(), String>) {
    let mut done = Vec::new();
    let result = try_perform(options, next, &mut done);
    (done, result)
}

fn try_perform(
    options: &PlainOptions,
    next: &mut NextOperation<'_>,
    done: &mut Vec<Operation>,
) -> Result<(), String> {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(options.volume_bytes));
    mkfs(&*device, &mkfs_options(1 << 20)).map_err(|error| format!("mkfs: {error}"))?;
    let open = || {
        Volume::open(device.clone(), options.volume_options())
            .map_err(|error| format!("open: {error}"))
    };
    let mut volume = open()?;
    make_bases(&volume, 0).map_err(|error| format!("making the bases: {error}"))?;
    let mut model = Model::new(Layout::Alone);
    let start = |volume: &Volume| {
        Runner::new(volume, Layout::Alone).map_err(|error| format!("the bases: {error}"))
    };
    let mut runner = start(&volume)?;
    let mut lives = Lives::new();
    while let Some(operation) = next(&model, done.len()) {
        let index = done.len();
        done.push(operation.clone());
        let found = runner.perform(index, &operation);
        let (expected, _) = model.apply(&operation);
        compare_outcome(index, &operation, &found, &expected)?;
        if done.len().is_multiple_of(options.compare_interval) {
            compare_files(&volume, &model, false, &mut lives)
                .map_err(|error| format!("after operation {index}: {error}"))?;
            compare_space(&volume, options.volume_bytes)?;
        }
        if done.len().is_multiple_of(options.remount_interval) {
            remount(&mut runner, &mut model, volume, &*device)
                .map_err(|error| format!("after operation {index}: {error}"))?;
            volume = open()?;
            compare_unopened(&volume)
                .map_err(|error| format!("remounted after operation {index}: {error}"))?;
            runner = start(&volume)?;
            compare_files(&volume, &model, true, &mut lives)
                .map_err(|error| format!("remounted after operation {index}: {error}"))?;
        }
    }
    remount(&mut runner, &mut model, volume, &*device)?;
    compare_files(&open()?, &model, true, &mut lives)
        .map_err(|error| format!("remounted at the end: {error}"))
}

/// Closes everything; fsck must be content.
fn remount(
    runner: &mut Runner,
    model: &mut Model,
    volume: Volume,
    device: &dyn BlockDevice,
) -> Result<(), String> {
    runner.close_all();
    for handle in model.handles() {
        let _ = model.apply(&Operation::Close { handle });
    }
    let failures = volume.statistics().failures;
    if failures.count() > 0 {
        return Err(format!("nothing has failed, but the volume counts {failures:?}"));
    }
    volume.close().map_err(|error| format!("closing: {error}"))?;
    expect_clean(device).map(|_| ())
}

/// What is told of subvolumes that nobody has opened yet must be what is found in them.
fn compare_unopened(volume: &Volume) -> Result<(), String> {
    for name in (0..3).map(xattr_name) {
        let told = volume.subvolumes_with_attribute(&name).map_err(|error| error.to_string())?;
        let told: BTreeMap<_, _> =
            told.into_iter().map(|(id, root, value)| (id, (root, value))).collect();
        for one in volume.subvolumes().map_err(|error| error.to_string())? {
            let Ok(root) = volume.root_of_subvolume(one.id) else { continue };
            let Ok(value) = volume.get_xattr(root, &name) else { continue };
            let is_whole = told.get(&one.id).map(|told| *told == (root, value.clone()));
            // A long value is not told.
            if is_whole == Some(false) || is_whole.is_none() && value.len() < 100 && !one.is_dying {
                let name = String::from_utf8_lossy(&name);
                return Err(format!(
                    "before it was opened, subvolume {} had another {name}",
                    one.id
                ));
            }
        }
    }
    Ok(())
}

/// Performs `count` random operations on a new volume; a list that fails is made shorter before it
/// is reported.
///
/// # Errors
/// The first difference, with a list of operations that shows it.
pub fn run(
    seed: u64,
    count: usize,
    profile: Profile,
    options: &PlainOptions,
) -> Result<(), String> {
    let mut generator = Generator::new(seed, profile);
    let (done, result) =
        perform(options, &mut |model, index| (index < count).then(|| generator.next(model, index)));
    let Err(error) = result else { return Ok(()) };
    let (shorter, error) = shrink(done, error, options);
    let shown = &shorter[shorter.len().saturating_sub(LISTED_MAX)..];
    let left_out = shorter.len() - shown.len();
    Err(format!(
        "CAIRN_SEED={seed}: {error}\n  {options:?}\n  operations, without the first {left_out}:\n{}",
        listing(shown)
    ))
}

/// Operations that a report lists.
const LISTED_MAX: usize = 80;

/// Leaves out what is not needed for the list to fail (delta debugging: Zeller, Hildebrandt, 2002,
/// in its simple form).
fn shrink(
    mut operations: Vec<Operation>,
    mut error: String,
    options: &PlainOptions,
) -> (Vec<Operation>, String) {
    const TIME_MAX: Duration = Duration::from_secs(60);
    let begin = cairn_environment::clock::now_monotonic();
    let options =
        PlainOptions { compare_interval: 1.max(options.compare_interval / 8), ..*options };
    let mut part = operations.len() / 2;
    while part > 0 {
        let mut at = 0;
        while at < operations.len() && begin.elapsed() < TIME_MAX {
            let shorter: Vec<Operation> =
                [&operations[..at], &operations[(at + part).min(operations.len())..]].concat();
            match replay(&shorter, &options) {
                Err(problem) => (operations, error) = (shorter, problem),
                Ok(()) => at += part,
            }
        }
        part /= 2;
    }
    (operations, error)
}
