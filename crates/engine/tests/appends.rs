//! Writes to the end of a file, whose length an application of a fork changes meanwhile.
mod small_volume;

use cairn_engine::{
    Apply, AttributeChange, Error, InodeId, Volume, VolumeOptions, Winner, WritePlace, WriteTimes,
};
use cairn_environment::thread;
use small_volume::{DIRECTORY, device, open, open_with, put};
use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const LENGTHS: [usize; 5] = [0, 20, 4096, 10_000, 700_001];
/// The longest goes in several steps.
const APPENDED: [usize; 4] = [1, 5000, 16 * 4096, 2_500_000];

fn content(volume: &Volume, file: InodeId) -> Vec<u8> {
    let mut content = Vec::new();
    volume.read(file, 0, 8 << 20, &mut content).unwrap();
    content
}

fn length(volume: &Volume, file: InodeId) -> u64 {
    volume.attributes(file).unwrap().size_bytes
}

/// A file `log` of `old` bytes in a subvolume, and a fork in which it has `new` bytes.
fn forked_log(volume: &Volume, name: &str, [old, new]: [usize; 2]) -> (InodeId, InodeId) {
    let root = volume.root();
    let origin = volume.create_subvolume(root, name.as_bytes(), &DIRECTORY).unwrap().inode;
    let log = put(volume, origin, b"log", &vec![b'o'; old]);
    let fork = volume.fork(origin, root, format!("{name} forked").as_bytes()).unwrap().inode;
    let forked = volume.lookup(fork, b"log").unwrap().inode;
    let change = AttributeChange { size: Some(0), ..AttributeChange::default() };
    volume.set_attributes(forked, &change).unwrap();
    volume.write(forked, 0, &vec![b'n'; new]).unwrap();
    (log, fork)
}

/// Removes what [`forked_log`] has made.
fn remove(volume: &Volume, log: InodeId, name: &str) {
    volume.forget(log, 1);
    volume.remove_subvolume(volume.root(), name.as_bytes()).unwrap();
    volume.remove_subvolume(volume.root(), format!("{name} forked").as_bytes()).unwrap();
}

#[test]
fn an_append_goes_to_the_end_that_an_application_has_made() {
    let device = device();
    let volume = open(&device, None);
    for (old, new) in LENGTHS.iter().flat_map(|old| LENGTHS.map(|new| (*old, new))) {
        for appended in APPENDED {
            for is_shared in [false, true] {
                let name = format!("{old} {new} {appended} {is_shared}");
                let (log, fork) = forked_log(&volume, &name, [old, new]);
                // The application comes between the question for the end and the write.
                let place = WritePlace::End(length(&volume, log));
                let applied = volume.apply(fork, Winner::Neither).unwrap();
                assert!(matches!(applied, Apply::Done(_)), "{name}: {applied:?}");
                let mut buffer = volume.buffers().take(appended);
                buffer.fill(b'a');
                let shared = buffer.share();
                let end = if is_shared {
                    volume.write_shared(log, place, &shared, 0..appended, WriteTimes::Now)
                } else {
                    volume.write_with(log, place, &shared[..appended], WriteTimes::Now)
                };
                assert_eq!(end.unwrap(), (new + appended) as u64, "{name}");
                let expected = [vec![b'n'; new], vec![b'a'; appended]].concat();
                assert!(content(&volume, log) == expected, "{name}");
                // What has no such end goes to where it belongs.
                let place = WritePlace::At(5);
                assert_eq!(volume.write_with(log, place, b"at", WriteTimes::Now).unwrap(), 7);
                assert_eq!(content(&volume, log)[5..7], *b"at", "{name}");
                remove(&volume, log, &name);
            }
        }
    }
}

#[test]
fn a_file_gets_no_longer_by_an_append_than_it_can_be() {
    let device = device();
    let volume = open(&device, None);
    let file = put(&volume, volume.root(), b"file", b"");
    let size = (1 << 60) - 5;
    let change = AttributeChange { size: Some(size), ..AttributeChange::default() };
    volume.set_attributes(file, &change).unwrap();
    let append = |data: &[u8]| volume.write_with(file, WritePlace::End(0), data, WriteTimes::Now);
    assert!(matches!(append(&[1; 6]), Err(Error::FileTooLarge(_))));
    assert_eq!(length(&volume, file), size);
    assert_eq!(append(&[1; 5]).unwrap(), 1 << 60);
}

type Work = Box<dyn FnOnce()>;

thread_local! {
    /// What is done when this thread is about to wait, and how often it waits before that.
    static MEANWHILE: RefCell<Option<(u32, Work)>> = const { RefCell::new(None) };
}

fn do_meanwhile() {
    let is_due = |(waits, _): &mut (u32, _)| waits.checked_sub(1).map(|left| *waits = left);
    let due = MEANWHILE.with_borrow_mut(|planned| planned.take_if(|one| is_due(one).is_none()));
    if let Some((_, work)) = due {
        work();
    }
}

/// Applies the fork while an append is between the choice of its place and the inode's lock: a
/// large step waits there for memory. In a volume that was just opened, the first and the third
/// step do. Returns what the file holds then.
fn applied_meanwhile(
    [old, new, appended]: [usize; 3],
    waits_before: u32,
    winner: Winner,
) -> (Apply, Vec<u8>) {
    let volume = open(&device(), None);
    let (log, fork) = forked_log(&volume, "origin", [old, new]);
    let data = vec![b'a'; appended];
    let (other, applied) = (volume.clone(), Rc::new(OnceCell::new()));
    let result = Rc::clone(&applied);
    let apply = move || result.set(other.apply(fork, winner).unwrap()).unwrap();
    MEANWHILE.set(Some((waits_before, Box::new(apply))));
    thread::on_block(Some(do_meanwhile));
    let place = WritePlace::End(length(&volume, log));
    let end = volume.write_with(log, place, &data, WriteTimes::Now).unwrap();
    thread::on_block(None);
    let content = content(&volume, log);
    assert_eq!(end, content.len() as u64);
    (Rc::into_inner(applied).unwrap().take().unwrap(), content)
}

#[test]
fn an_append_that_has_begun_goes_behind_an_application() {
    for [old, new] in [[20, 9_000], [9_000, 20], [4096, 0], [0, 2_000_000]] {
        for appended in [1_000_000, 2_500_000] {
            let (applied, content) = applied_meanwhile([old, new, appended], 0, Winner::Neither);
            assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
            assert!(content == [vec![b'n'; new], vec![b'a'; appended]].concat());
        }
    }
}

/// The first steps count as written before.
#[test]
fn an_application_between_two_steps_is_refused_or_replaces_the_first_ones() {
    const APPENDED: usize = 2_500_000;
    for [old, new] in [[20, 9_000], [9_000, 20], [4096, 0], [0, 2_000_000]] {
        let (applied, content) = applied_meanwhile([old, new, APPENDED], 1, Winner::Neither);
        assert!(matches!(applied, Apply::Conflicts(_)), "{applied:?}");
        assert!(content == [vec![b'o'; old], vec![b'a'; APPENDED]].concat());
        let (applied, content) = applied_meanwhile([old, new, APPENDED], 1, Winner::Fork);
        assert!(matches!(applied, Apply::Done(_)), "{applied:?}");
        let rest = APPENDED - ((2 << 20) - old % 4096);
        assert!(content == [vec![b'n'; new], vec![b'a'; rest]].concat());
    }
}

/// An application is refused if the append comes before it.
#[test]
fn an_append_meanwhile_is_before_or_behind() {
    let device = device();
    let volume = Arc::new(open_with(&device, VolumeOptions::default()));
    for round in 0..200 {
        let [old, new] = if round % 2 == 0 { [20, 9_000] } else { [9_000, 20] };
        let (log, fork) = forked_log(&volume, "origin", [old, new]);
        let applies = Arc::new(AtomicBool::new(false));
        let appender = {
            let (volume, applies) = (Arc::clone(&volume), Arc::clone(&applies));
            thread::spawn("appender", move || {
                let data = vec![b'a'; 1_000_000];
                while !applies.load(Ordering::Acquire) {}
                for _ in 0..round * 10 {
                    length(&volume, log);
                }
                let place = WritePlace::End(length(&volume, log));
                volume.write_with(log, place, &data, WriteTimes::Now).unwrap()
            })
        };
        applies.store(true, Ordering::Release);
        let applied = volume.apply(fork, Winner::Neither).unwrap();
        let end = appender.join().unwrap();
        let before = match applied {
            Apply::Done(_) => vec![b'n'; new],
            Apply::Conflicts(_) => vec![b'o'; old],
        };
        let expected = [before, vec![b'a'; 1_000_000]].concat();
        assert!(content(&volume, log) == expected, "round {round}");
        assert_eq!(end, expected.len() as u64);
        remove(&volume, log, "origin");
    }
}
