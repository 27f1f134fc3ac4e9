//! Forks that are there before they are durable.
mod small_volume;

use cairn_engine::{Attributes, ForkOptions, FsyncKind, InodeId, Volume};
use cairn_environment::clock;
use small_volume::gated::{Gated, Held, is_there};
use small_volume::{get, put};
use std::thread;
use std::time::Duration;

const VOLUME_BYTES: u64 = 64 << 20;
const EARLY: ForkOptions = ForkOptions { early: true };

/// What another thread is likely to have begun by then. A test that only needs it to find a bug
/// may wait for so long; whether it passes without a bug never depends on that.
const A_MOMENT: Duration = Duration::from_millis(50);

fn early_fork(volume: &Volume, source: InodeId, name: &str) -> Attributes {
    volume.fork_with(source, volume.root(), name.as_bytes(), EARLY).unwrap()
}

/// While its superblock is not written, an early fork of a live tree is read and changed. A crash
/// leaves nothing of it.
#[test]
fn an_early_fork_is_there_before_it_is_durable() {
    let gated = Gated::new(VOLUME_BYTES);
    let Gated { gate, volume, base } = &gated;
    put(volume, *base, b"new", b"only written");
    gate.set(Held::Superblocks);
    let fork = early_fork(volume, *base, "trial").inode;
    gate.wait_until_one_is_held();
    assert_eq!(get(volume, fork, b"new").unwrap(), b"only written");
    assert_eq!(get(volume, fork, b"old").unwrap(), b"durable");
    volume.unlink(fork, b"old").unwrap();
    put(volume, *base, b"later", b"not in the fork");
    put(volume, fork, b"mine", b"from the fork");
    assert!(!is_there(volume, fork, "later"));
    assert_eq!(get(volume, fork, b"mine").unwrap(), b"from the fork");
    assert_eq!(get(volume, *base, b"old").unwrap(), b"durable");

    let crashed = gate.after_a_crash();
    assert!(!is_there(&crashed, crashed.root(), "trial"));
    let there = crashed.lookup(crashed.root(), b"base").unwrap().inode;
    assert_eq!(get(&crashed, there, b"old").unwrap(), b"durable");
    crashed.close().unwrap();
    gate.set(Held::Nothing);
    volume.close().unwrap();
}

/// Makes a file in an early fork, and removes one. Then `wanted` of it is not durable, and when its
/// fsync returns, a crash leaves the fork with what `expect` looks at.
fn an_fsync_waits(wanted: impl Fn(&Volume, InodeId) -> InodeId, expect: impl Fn(&Volume, InodeId)) {
    for kind in [FsyncKind::Full, FsyncKind::DataOnly] {
        let gated = Gated::new(VOLUME_BYTES);
        let Gated { gate, volume, base } = &gated;
        put(volume, *base, b"new", b"only written");
        gate.set(Held::Superblocks);
        let fork = early_fork(volume, *base, "trial").inode;
        gate.wait_until_one_is_held();
        let inode = wanted(volume, fork);
        assert!(!volume.is_durable(inode, kind), "{kind:?}");
        let crashed = thread::scope(|scope| {
            let fsync = scope.spawn(|| {
                volume.fsync_blocking(inode, kind).unwrap();
                gate.after_a_crash()
            });
            clock::sleep(A_MOMENT);
            gate.set(Held::Nothing);
            fsync.join().unwrap()
        });
        let fork = crashed.lookup(crashed.root(), b"trial").unwrap().inode;
        assert_eq!(get(&crashed, fork, b"old").unwrap(), b"durable");
        assert_eq!(get(&crashed, fork, b"new").unwrap(), b"only written");
        expect(&crashed, fork);
        crashed.close().unwrap();
        volume.close().unwrap();
    }
}

fn change(volume: &Volume, fork: InodeId) -> InodeId {
    volume.unlink(fork, b"unwanted").unwrap();
    put(volume, fork, b"mine", b"from the fork")
}

#[test]
fn an_fsync_of_a_new_file_waits_for_the_fork() {
    an_fsync_waits(change, |crashed, fork| {
        assert_eq!(get(crashed, fork, b"mine").unwrap(), b"from the fork");
        assert!(!is_there(crashed, fork, "unwanted"));
    });
}

#[test]
fn an_fsync_of_the_root_waits_for_the_fork() {
    let root_of_changed = |volume: &Volume, fork| {
        change(volume, fork);
        fork
    };
    an_fsync_waits(root_of_changed, |crashed, fork| {
        assert!(is_there(crashed, fork, "mine"));
        assert!(!is_there(crashed, fork, "unwanted"));
    });
    // One in which nothing was changed.
    an_fsync_waits(|_, fork| fork, |_, _| {});
}

/// What the fork only has from its origin: as it was durable there, and as it was only written.
#[test]
fn an_fsync_of_a_file_that_nobody_changed_waits_for_the_fork() {
    for name in ["old", "new"] {
        let inherited = |volume: &Volume, fork| volume.lookup(fork, name.as_bytes()).unwrap().inode;
        an_fsync_waits(inherited, |_, _| {});
    }
}

/// It isn't there before the data is that only pages of its source have: that of somebody who has
/// written when the data that was there before was on the device, and before the cut.
#[test]
fn an_early_fork_waits_for_data() {
    let gated = Gated::new(VOLUME_BYTES);
    let Gated { gate, volume, base } = &gated;
    let file = put(volume, *base, b"new", b"");
    gate.set(Held::Superblocks);
    thread::scope(|scope| {
        // It keeps the cut waiting.
        scope.spawn(|| volume.commit().unwrap());
        gate.wait_until_one_is_held();
        let fork = scope.spawn(|| {
            let fork = early_fork(volume, *base, "trial").inode;
            get(volume, fork, b"new").unwrap()
        });
        // It waits for the cut then.
        clock::sleep(A_MOMENT);
        scope.spawn(|| {
            volume.write(file, 0, &[7; 8000]).unwrap();
            volume.fsync_blocking(file, FsyncKind::DataOnly).unwrap();
        });
        // Its data is queued then, and waits for the cut as well.
        clock::sleep(A_MOMENT);
        gate.set(Held::Data);
        // On a busy machine all of that may be over.
        while !gate.is_one_held() && !fork.is_finished() {
            clock::sleep(Duration::from_millis(1));
        }
        // One that does not wait for the data reads now.
        clock::sleep(A_MOMENT);
        gate.set(Held::Nothing);
        // Empty if the cut came before the data.
        let content = fork.join().unwrap();
        assert!(content.is_empty() || content == [7; 8000]);
    });
    volume.close().unwrap();
}

/// Forks of early forks: each is made while its source is not durable, and the last one is removed
/// before it is. The others can be removed then, too, whatever was made of them.
#[test]
fn early_forks_can_be_forked_and_removed() {
    const FORKS: u8 = 8;
    let name = |number: u8| format!("fork {number}");
    let file = |number: u8| format!("file {number}").into_bytes();
    let gated = Gated::new(VOLUME_BYTES);
    let Gated { gate, volume, base } = &gated;
    gate.set(Held::Superblocks);
    let mut source = *base;
    for number in 0..FORKS {
        source = thread::scope(|scope| {
            let fork = scope.spawn(|| early_fork(volume, source, &name(number)).inode);
            if number > 0 {
                // It waits for the commit of its source then.
                clock::sleep(A_MOMENT);
                gate.let_one_pass();
            }
            fork.join().unwrap()
        });
        gate.wait_until_one_is_held();
        for earlier in 0..number {
            assert_eq!(get(volume, source, &file(earlier)).unwrap(), [earlier; 5000]);
        }
        put(volume, source, &file(number), &[number; 5000]);
        assert!(!gate.is_there_after_a_crash(&name(number)));
        assert!(number == 0 || gate.is_there_after_a_crash(&name(number - 1)));
    }
    let remove = |number| {
        volume.remove_subvolume(volume.root(), name(number).as_bytes()).unwrap();
        assert!(!gate.is_there_after_a_crash(&name(number)));
    };
    thread::scope(|scope| {
        let removal = scope.spawn(|| remove(FORKS - 1));
        while is_there(volume, volume.root(), &name(FORKS - 1)) {
            clock::sleep(Duration::from_millis(1));
        }
        assert!(!removal.is_finished(), "nothing was durable");
        gate.set(Held::Nothing);
    });
    for number in (0..FORKS - 1).step_by(2) {
        remove(number);
    }
    let crashed = gate.after_a_crash();
    for number in 0..FORKS {
        let found = crashed.lookup(crashed.root(), name(number).as_bytes());
        assert_eq!(found.is_ok(), number % 2 == 1 && number < FORKS - 1);
        for earlier in 0..=number {
            let Ok(fork) = &found else { break };
            let content = get(&crashed, fork.inode, &file(earlier)).unwrap();
            assert_eq!(content, [earlier; 5000], "file {earlier} in fork {number}");
        }
    }
    crashed.close().unwrap();
    volume.close().unwrap();
}
