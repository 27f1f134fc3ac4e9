//! What is known of the names of snapshots, while snapshots are made and deleted and others look;
//! and a whole volume, where two threads ask for one name.
use crate::mkfs::{MkfsOptions, mkfs};
use crate::store::trees::snapshot_names::{Named, SnapshotNames};
use crate::{Error, Volume, VolumeOptions};
use cairn_blockdev::MemoryDevice;
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::simulation::{self, Settings, schedules};
use cairn_environment::thread;
use cairn_format::{Generation, TreeId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const ID: TreeId = TreeId(300);
const NAMES: [&[u8]; 2] = [b"one", b"two"];

/// The snapshots of a subvolume, as the tree of subvolumes has them.
struct Records {
    names: SnapshotNames,
    items: Mutex<BTreeMap<Generation, &'static [u8]>>,
    /// Of the tree: changes come one after the other.
    lock: Mutex<()>,
}

impl Records {
    fn make(&self, made: u64, name: &'static [u8]) {
        let made = Generation(made);
        let _lock = self.lock.lock();
        let make = || {
            self.items.lock().insert(made, name);
            Ok(())
        };
        self.names
            .while_making(Named { subvolume: ID, made, name }, make)
            .expect("it does not fail");
        self.expect_known(name, &[made]);
    }

    fn delete(&self, made: u64, name: &'static [u8]) {
        let made = Generation(made);
        let _lock = self.lock.lock();
        let delete = || {
            self.items.lock().remove(&made);
            Ok(())
        };
        let snapshot = Named { subvolume: ID, made, name };
        self.names.while_deleting(snapshot, delete).expect("it does not fail");
        self.expect_known(name, &[]);
    }

    /// If names are known, of one of them these snapshots are.
    fn expect_known(&self, name: &[u8], made: &[Generation]) {
        if let Some(known) = self.names.of(ID, name) {
            assert_eq!(known, made, "known after a change");
        }
    }

    /// As a path is looked up: all names are read, item by item, if they are not known.
    fn find(&self, name: &[u8]) -> Vec<Generation> {
        let found = self.names.of(ID, name).unwrap_or_else(|| {
            let (reading, mut names, mut from) = (self.names.begin(), Vec::new(), Generation(0));
            loop {
                let next =
                    self.items.lock().range(from..).next().map(|(made, name)| (*made, *name));
                let Some((made, name)) = next else { break };
                names.push((made, name.to_vec()));
                from = made.next();
            }
            self.names.end(&reading, ID, &names);
            names.into_iter().filter(|(_, of)| of == name).map(|(made, _)| made).collect()
        });
        let items = self.items.lock();
        found.into_iter().filter(|made| items.get(made) == Some(&name)).collect()
    }
}

#[test]
fn what_is_known_of_names_is_all_there_is() {
    shuttle::check_random(
        || {
            let records = Arc::new(Records {
                names: SnapshotNames::new([0; 16]),
                items: Mutex::new(Rank::LEAF, BTreeMap::from([(Generation(1), NAMES[0])])),
                lock: Mutex::new(Rank::SUBVOLUMES, ()),
            });
            let mut threads: Vec<_> = (0..2)
                .map(|_| {
                    let records = Arc::clone(&records);
                    let look = move || NAMES.iter().for_each(|name| drop(records.find(name)));
                    thread::spawn("reader", look)
                })
                .collect();
            let maker = Arc::clone(&records);
            threads.push(thread::spawn("maker", move || maker.make(2, NAMES[1])));
            records.delete(1, NAMES[0]);
            records.make(3, NAMES[0]);
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            for (made, name) in [(3, NAMES[0]), (2, NAMES[1])] {
                assert_eq!(records.find(name), [Generation(made)], "known in part");
                let known = records.names.of(ID, name).expect("it was read");
                assert_eq!(known, [Generation(made)], "what is gone is known");
            }
        },
        schedules(5000),
    );
}

fn two_creations_of_one_name() {
    let device = Arc::new(MemoryDevice::new(16 << 20));
    mkfs(&*device, &MkfsOptions::default()).expect("there is room");
    let options = VolumeOptions { background: false, ..VolumeOptions::default() };
    let volume = Volume::open(device, options).expect("nothing fails");
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let volume = volume.clone();
            let make = move || match volume.create_snapshot(volume.root(), b"one") {
                Ok(_) => true,
                Err(Error::Exists) => false,
                Err(error) => panic!("{error}"),
            };
            thread::spawn("maker", make)
        })
        .collect();
    let made = threads.into_iter().map(|thread| thread.join().expect("no panic"));
    assert_eq!(made.filter(|is_made| *is_made).count(), 1, "a name is used once");
    volume.close().expect("nothing fails");
}

#[test]
fn a_name_is_used_once_although_two_ask_at_once() {
    for seed in 0..schedules(200) as u64 {
        let quiet_max = Duration::from_secs(3600);
        let settings = Settings { seed, steps_max: 3_000_000, quiet_max };
        let outcome = simulation::run(&settings, two_creations_of_one_name).outcome;
        outcome.unwrap_or_else(|error| panic!("schedule {seed}: {error}"));
    }
}
