//! Every write, flush and discard of a run fails in turn, once, twice, at its place for ever, or
//! all of them from then on, with EIO or with ENOSPC. Whatever it was: it is reported, nothing
//! wrong is read, nothing is acknowledged that is not durable, and the volume stops where it must.
//!
//! Several files are written and fsynced at the same time, so that their data travels with groups;
//! writes of a set complete in an order of their own. Which request is the n-th differs a little
//! from run to run; all of them have their turn.
//!
//! A device reports a failure to one of its callers. So once more with a thread that commits all
//! the time, on a device that takes as long as it likes, before it has done something and after:
//! between the failure and the moment at which its caller learns of it, other threads write, flush
//! and acknowledge.
use cairn_blockdev::simulated::RequestInfo;
use cairn_blockdev::{BlockDevice, Operation, SimulatedDevice};
use cairn_engine::{Error, FlushPolicy, FsyncKind, InodeNumber, Volume, VolumeOptions};
use cairn_environment::atomic::{AtomicBool, Ordering};
use cairn_environment::random::Seeded;
use cairn_environment::{clock, thread};
use cairn_fsck::{CheckOptions, PassId, Severity, check};
use cairn_torture::contents::{Tag, pattern};
use cairn_torture::faults::Span;
use cairn_torture::files::{NEW_FILE, create, format, read_all, read_named};
use cairn_torture::uneven::Uneven;
use std::sync::Arc;
use std::time::Duration;

const VOLUME_BYTES: u64 = 48 << 20;
const LOG_BYTES: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Of the writes of each file: some travel with the group, one is too large for that.
const LENGTHS: [u64; 5] = [3_000, 20_000, 300_000, 5_000, 70_000];

#[derive(Clone, Copy, Debug)]
struct Fault {
    /// Requests before it.
    after: u64,
    /// Which of those that follow fail, too.
    span: Span,
    no_space: bool,
}

/// How an fsync is asked for: what it acknowledges, and what it reports, must not depend on that.
#[derive(Clone, Copy, Debug)]
enum Way {
    Blocking,
    Callback,
    /// By a thread that others wait for; it may have time to flush.
    Brief {
        flush: bool,
    },
}

impl Way {
    const ALL: [Way; 4] =
        [Way::Blocking, Way::Callback, Way::Brief { flush: true }, Way::Brief { flush: false }];

    fn fsync(self, volume: &Volume, inode: InodeNumber) -> Result<(), Error> {
        let (sender, told) = std::sync::mpsc::channel();
        let completion = Box::new(move |result| {
            let _ = sender.send(result);
        });
        match self {
            Way::Blocking => return volume.fsync_blocking(inode, FsyncKind::Full),
            Way::Callback => volume.fsync(inode, FsyncKind::Full, completion),
            Way::Brief { flush } => volume.fsync_briefly(inode, FsyncKind::Full, flush, completion),
        }
        told.recv().expect("every fsync ends")
    }
}

/// One file and its versions, each of which holds the whole file.
struct File {
    name: Vec<u8>,
    inode: InodeNumber,
    versions: Vec<Vec<u8>>,
    /// The newest version that an fsync acknowledged.
    acknowledged: Option<usize>,
    /// An fsync failed after that: the data on the device may be incomplete, and reading it an
    /// error.
    suspect: bool,
    errors: Vec<Error>,
}

impl File {
    fn write(&mut self, volume: &Volume, client: u8, round: usize) -> bool {
        let data = pattern(Tag { client, operation: round as u32 }, 0, LENGTHS[round]);
        if let Err(error) = volume.write(self.inode, 0, &data) {
            self.errors.push(error);
            return false;
        }
        let mut version = self.versions.last().cloned().unwrap_or_default();
        version.resize(version.len().max(data.len()), 0);
        version[..data.len()].copy_from_slice(&data);
        self.versions.push(version);
        true
    }

    fn fsync(&mut self, volume: &Volume, way: Way) -> bool {
        match way.fsync(volume, self.inode) {
            Ok(()) => {
                (self.acknowledged, self.suspect) = (self.versions.len().checked_sub(1), false)
            }
            Err(error) => {
                self.suspect = true;
                self.errors.push(error);
            }
        }
        !self.suspect
    }

    fn newest(&self) -> &[u8] {
        self.versions.last().map_or(&[], Vec::as_slice)
    }

    /// Whether `found` may be there after a crash: each block is that of a version since the
    /// acknowledged one.
    fn permits(&self, found: &[u8]) -> Result<(), String> {
        let possible = &self.versions[self.acknowledged.unwrap_or(0)..];
        if self.acknowledged.is_some()
            && !possible.iter().any(|version| version.len() == found.len())
        {
            return Err(format!("{} bytes is none of its sizes", found.len()));
        }
        for (index, block) in found.chunks(BLOCK).enumerate() {
            let at = index * BLOCK;
            let of = |version: &Vec<u8>| {
                version
                    .get(at..(at + block.len()).min(version.len()))
                    .is_some_and(|part| block.starts_with(part))
            };
            let zeros = self.acknowledged.is_none() && block.iter().all(|&byte| byte == 0);
            if !zeros && !possible.iter().any(of) {
                return Err(format!("block {index} is of no version since the acknowledged one"));
            }
        }
        Ok(())
    }
}

/// The threads that work on the volume.
#[derive(Clone, Copy, Debug)]
struct Company {
    clients: u8,
    /// One thread commits all the time, and the device is [`Uneven`].
    committer: bool,
}

/// Commits until `stop` is set, or a commit fails; returns the error.
fn commit_all_the_time(volume: &Volume, stop: &AtomicBool) -> Option<Error> {
    while !stop.load(Ordering::SeqCst) {
        if let Err(error) = volume.commit() {
            return Some(error);
        }
        clock::sleep(Duration::from_micros(100));
    }
    None
}

fn client(volume: &Volume, number: u8) -> Option<File> {
    let name = format!("file {number}").into_bytes();
    let inode = create(volume, &name, b"").ok()?;
    let mut file = File {
        name,
        inode,
        versions: vec![Vec::new()],
        acknowledged: None,
        suspect: false,
        errors: Vec::new(),
    };
    for round in 0..LENGTHS.len() {
        if !file.write(volume, number, round) {
            break;
        }
        file.fsync(volume, Way::ALL[(round + usize::from(number)) % Way::ALL.len()]);
        if round == 2 && number == 0 {
            file.errors.extend(volume.commit().err());
        }
    }
    Some(file)
}

/// What has failed.
#[derive(Default)]
struct Happened {
    any: AtomicBool,
    /// Something else than a discard, which is only a hint: if all that follows fails as well, a
    /// caller must get the error.
    matters: AtomicBool,
}

/// Has the requests fail; says whether one did.
fn plan(device: &SimulatedDevice, fault: Fault) -> Arc<Happened> {
    let happened = Arc::new(Happened::default());
    let (flags, mut seen, mut first) = (Arc::clone(&happened), 0, None);
    let predicate = move |request: &RequestInfo| {
        if request.operation == Operation::Read {
            return false;
        }
        seen += 1;
        let fails = seen > fault.after && {
            let first = first.get_or_insert(*request);
            fault.span.includes(first, request, seen - fault.after - 1)
        };
        flags.any.fetch_or(fails, Ordering::SeqCst);
        flags.matters.fetch_or(fails && request.operation != Operation::Discard, Ordering::SeqCst);
        fails
    };
    if fault.no_space {
        device.fail_for_lack_of_space_when(predicate)
    } else {
        device.fail_when(predicate)
    }
    happened
}

/// What is on the device after a power failure is what was acknowledged, or newer, or an error
/// where one was reported.
fn judge(device: &SimulatedDevice, files: &[File], random: &mut Seeded) -> Result<(), String> {
    let state = Arc::new(device.crash_state(random));
    let volume = Volume::open(
        state.clone() as Arc<dyn BlockDevice>,
        VolumeOptions { background: false, ..VolumeOptions::default() },
    )
    .map_err(|error| format!("it does not mount: {error}"))?;
    for file in files {
        let name = String::from_utf8_lossy(&file.name).into_owned();
        match read_named(&volume, &file.name) {
            Ok(found) => file.permits(&found).map_err(|error| format!("{name}: {error}"))?,
            Err(Error::NotFound) if file.acknowledged.is_none() => {}
            Err(Error::DataChecksum { .. }) if file.suspect => {}
            Err(error) => {
                return Err(format!("{name}, acknowledged {:?}: {error}", file.acknowledged));
            }
        }
    }
    volume.close().map_err(|error| format!("closing: {error}"))?;
    let report = check(&*state, &CheckOptions { data: true, repair: false }, &mut |_| {})
        .map_err(|error| format!("fsck: {error}"))?;
    let suspect = |path: &str| {
        files
            .iter()
            .any(|file| file.suspect && path.trim_start_matches('/').as_bytes() == file.name)
    };
    let wrong = report.findings.iter().find(|finding| {
        finding.severity == Severity::Error
            && (finding.pass != PassId::Data || !finding.path.as_deref().is_some_and(suspect))
    });
    wrong.map_or(Ok(()), |finding| Err(format!("fsck finds {finding:?}")))
}

/// The volume failed: it says so to everybody, for ever, also when the device works again.
fn expect_stopped(volume: &Volume, files: &mut [File]) -> Result<(), String> {
    for file in &mut *files {
        if volume.fsync_blocking(file.inode, FsyncKind::Full).is_ok()
            && file.acknowledged.is_none_or(|at| at + 1 < file.versions.len())
        {
            return Err("an fsync succeeds after the failure".into());
        }
    }
    if volume.sync().is_ok() || volume.commit().is_ok() {
        return Err("a sync succeeds after the failure".into());
    }
    if !matches!(volume.create(volume.root(), b"later", &NEW_FILE), Err(Error::Aborted(_))) {
        return Err("files can be made after the failure".into());
    }
    if volume.close().is_ok() { Err("closing claims success".into()) } else { Ok(()) }
}

/// Nothing but data was lost, if anything: it is in memory, and goes elsewhere.
fn expect_healed(volume: &Volume, files: &mut [File]) -> Result<(), String> {
    for file in &mut *files {
        if !file.fsync(volume, Way::Blocking) {
            return Err(format!("the device works, an fsync does not: {:?}", file.errors.last()));
        }
    }
    volume.sync().map_err(|error| format!("sync: {error}"))
}

/// The failure of a volume that was closed.
const CLOSED: &str = "the volume is closed";

struct Seen {
    happened: bool,
    stopped: bool,
    reported: bool,
}

/// What all clients did, and the committer's error.
fn work(volume: &Volume, company: Company) -> Result<(Vec<File>, Option<Error>), String> {
    let stop = Arc::new(AtomicBool::new(false));
    let committer = company.committer.then(|| {
        let (volume, stop) = (volume.clone(), stop.clone());
        thread::spawn("committer", move || commit_all_the_time(&volume, &stop))
    });
    let threads: Vec<_> = (0..company.clients)
        .map(|number| {
            let volume = volume.clone();
            thread::spawn("client", move || client(&volume, number))
        })
        .collect();
    let mut files: Vec<File> = Vec::new();
    for thread in threads {
        files.extend(thread.join().map_err(|_| "a client panicked")?);
    }
    stop.store(true, Ordering::SeqCst);
    let Some(committer) = committer else { return Ok((files, None)) };
    let error = committer.join().map_err(|_| "the committer panicked")?;
    // The volume may be committing by itself; this one waits for that.
    Ok((files, error.or_else(|| volume.commit().err())))
}

fn one_run(fault: Fault, company: Company, random: &mut Seeded) -> Result<Seen, String> {
    let device = Arc::new(SimulatedDevice::new(VOLUME_BYTES));
    format(&*device, LOG_BYTES)?;
    let flush = if random.chance(1, 2) { FlushPolicy::Overlap } else { FlushPolicy::Auto };
    let options =
        VolumeOptions { background: false, discard: true, flush, ..VolumeOptions::default() };
    let used: Arc<dyn BlockDevice> = if company.committer {
        Uneven::new(device.clone(), random.next_u64(), 50, 500)
    } else {
        device.clone()
    };
    let volume = Volume::open(used, options).map_err(|error| error.to_string())?;
    device.set_delay(
        Operation::Flush,
        Duration::from_micros(if company.clients > 1 { 200 } else { 0 }),
    );
    let happened = plan(&device, fault);
    let (mut files, commit_error) = work(&volume, company)?;
    let reported = files.iter().any(|file| !file.errors.is_empty())
        || files.len() < usize::from(company.clients)
        || commit_error.is_some();
    let seen = Seen {
        happened: happened.any.load(Ordering::SeqCst),
        stopped: volume.statistics().failure.is_some(),
        reported,
    };
    for file in &files {
        let found = read_all(&volume, file.inode)
            .map_err(|error| format!("reading while mounted: {error}"))?;
        if found != file.newest() {
            return Err("what is read while mounted is not what was written".into());
        }
    }
    if reported && !seen.happened {
        return Err(format!(
            "an error without a fault: {:?}",
            files.iter().flat_map(|file| &file.errors).next()
        ));
    }
    if happened.matters.load(Ordering::SeqCst) && fault.span == Span::FromThenOn && !reported {
        return Err("requests fail, and nobody was told".into());
    }
    judge(&device, &files, random)?;
    device.clear_failures();
    if seen.stopped {
        expect_stopped(&volume, &mut files)?;
        judge(&device, &files, random)?;
    } else {
        let healed = expect_healed(&volume, &mut files);
        judge(&device, &files, random)?;
        let closed = volume.close().map_err(|error| format!("closing: {error}"));
        // The thread that wrote the log may learn of it last, when a commit has made everything
        // durable.
        let learned_late =
            seen.happened && volume.statistics().failure.is_some_and(|failure| failure != CLOSED);
        if !learned_late {
            healed.and(closed)?;
        }
    }
    judge(&device, &files, random)?;
    Ok(seen)
}

fn every_fault(company: Company) {
    let mut random = Seeded::new(cairn_torture::seed_from_environment());
    let mut table = Vec::new();
    let kinds = [
        (Span::Once, false),
        (Span::Twice, false),
        (Span::SamePlace, false),
        (Span::FromThenOn, false),
        (Span::Once, true),
        (Span::FromThenOn, true),
    ];
    for (span, no_space) in kinds {
        let (mut points, mut stopped, mut reported) = (0, 0, 0);
        for after in 0.. {
            let fault = Fault { after, span, no_space };
            let seen = one_run(fault, company, &mut random)
                .unwrap_or_else(|error| panic!("{fault:?}, {company:?}: {error}"));
            if !seen.happened {
                break;
            }
            points += 1;
            stopped += u64::from(seen.stopped);
            reported += u64::from(seen.reported);
        }
        assert!(
            points > 15 && stopped > 0 && reported >= stopped,
            "{points} requests, {stopped} stopped the volume, {reported} reported"
        );
        table.push(format!(
            "{} {}: {points} requests, {stopped} stopped the volume, {} were reported to their fsync, {} healed by trying again",
            if no_space { "ENOSPC" } else { "EIO" },
            span.name(),
            reported - stopped,
            points - reported
        ));
    }
    eprintln!("{company:?}:\n{}", table.join("\n"));
}

#[test]
fn every_request_of_one_client_fails_in_turn() {
    every_fault(Company { clients: 1, committer: false });
}

#[test]
fn every_request_of_several_clients_fails_in_turn() {
    every_fault(Company { clients: 5, committer: false });
}

#[test]
fn every_request_of_clients_and_a_committer_fails_in_turn() {
    every_fault(Company { clients: 4, committer: true });
}
