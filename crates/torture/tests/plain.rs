//! Random operations of one client, without crashes: the volume equals the model.
use cairn_environment::random::Seeded;
use cairn_torture::generator::Profile;
use cairn_torture::plain::{PlainOptions, run};
use cairn_torture::seed_from_environment;

fn check(lists: u64, count: usize, profile: Profile, options: &PlainOptions) {
    let seed = seed_from_environment();
    for list in 0..lists {
        if let Err(error) = run(seed.wrapping_add(list), count, profile, options) {
            panic!("{error}");
        }
    }
}

#[test]
fn without_background_work() {
    let options = PlainOptions {
        volume_bytes: 256 << 20,
        compare_interval: 100,
        remount_interval: 900,
        background: false,
    };
    check(3, 4000, Profile::PLAIN, &options);
}

#[test]
fn with_background_work() {
    let options = PlainOptions {
        volume_bytes: 256 << 20,
        compare_interval: 100,
        remount_interval: 700,
        background: true,
    };
    check(3, 4000, Profile::PLAIN, &options);
}

#[test]
fn compared_after_every_operation() {
    let options = PlainOptions {
        volume_bytes: 64 << 20,
        compare_interval: 1,
        remount_interval: 150,
        background: false,
    };
    check(4, 600, Profile::CRASH, &options);
}

/// Each list has a mix of its own: colliding names, many extents, attributes of many parts.
#[test]
fn with_another_mix_for_each_list() {
    let options = PlainOptions {
        volume_bytes: 256 << 20,
        compare_interval: 10,
        remount_interval: 120,
        background: false,
    };
    let mut random = Seeded::new(seed_from_environment());
    for _ in 0..12 {
        let profile = Profile::CRASH.swarm(&mut random);
        if let Err(error) = run(random.next_u64(), 400, profile, &options) {
            panic!("{profile:?}\n{error}");
        }
    }
}

/// Snapshots come and go all the time, of several subvolumes; each is compared after each step.
#[test]
fn with_many_snapshots() {
    let mut random = Seeded::new(seed_from_environment());
    for list in 0..6 {
        let options = PlainOptions {
            volume_bytes: 64 << 20,
            compare_interval: 1,
            remount_interval: 40,
            background: list % 2 == 1,
        };
        let profile = Profile {
            snapshot_percent: [8, 15, 30][random.below(3) as usize],
            subvolume_percent: 4,
            weights: [[60, 20, 8, 8], [20, 60, 8, 8]][random.below(2) as usize],
            ..Profile::CRASH.swarm(&mut random)
        };
        if let Err(error) = run(random.next_u64(), 300, profile, &options) {
            panic!("{profile:?}\n{error}");
        }
    }
}
