//! Each mechanism is turned off by its own switch.
use super::super::mechanism::{LockedDescents, Mechanism};
use crate::workloads::Settings;
use cairn_engine::Baselines;

#[test]
fn each_mechanism_turns_off_itself_alone() {
    let none = Baselines::default();
    let switches = [
        (Mechanism::EarlyWakeUp, none),
        (Mechanism::TreeLocks, Baselines { waking_locks: true, ..none }),
        (Mechanism::FlushCoordination, none),
        (Mechanism::Tickets, Baselines { shared_flusher: true, ..none }),
        (Mechanism::CommittedItemList, Baselines { two_pass_insertion: true, ..none }),
    ];
    assert_eq!(switches.map(|(mechanism, _)| mechanism), Mechanism::ALL);
    for (mechanism, wanted) in switches {
        let usual = Settings::default();
        let [off, on] = mechanism.sides(&usual, LockedDescents::Neither);
        assert_eq!(
            (off.engine.baselines, on.engine.baselines),
            (wanted, none),
            "{}",
            mechanism.name()
        );
        assert_eq!(
            off.policy != usual.policy,
            mechanism == Mechanism::FlushCoordination,
            "{}",
            mechanism.name()
        );
        let waits = off.engine.fsync_wait != on.engine.fsync_wait;
        assert_eq!(waits, mechanism == Mechanism::EarlyWakeUp, "{}", mechanism.name());
    }
}

#[test]
fn descents_are_locked_where_the_measurement_says() {
    let of = |locked_descents| {
        Mechanism::TreeLocks
            .sides(&Settings::default(), locked_descents)
            .map(|side| side.engine.baselines)
    };
    for (locked_descents, wanted) in [
        (LockedDescents::Neither, [false, false]),
        (LockedDescents::Off, [true, false]),
        (LockedDescents::Both, [true, true]),
    ] {
        let sides = of(locked_descents);
        assert_eq!(sides.map(|side| side.locked_descents), wanted);
        assert_eq!(sides.map(|side| side.waking_locks), [true, false]);
    }
}
