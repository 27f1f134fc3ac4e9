use super::*;
use proptest::prelude::*;

fn schedule(text: &str) -> Schedule {
    text.parse().unwrap()
}

fn made_at(times: &[i64]) -> Vec<Automatic> {
    times
        .iter()
        .zip(100..)
        .map(|(time, generation)| Automatic { generation, time: *time })
        .collect()
}

/// The times that stay.
fn left(of: &Schedule, snapshots: &[Automatic]) -> Vec<i64> {
    let goes = of.superfluous(snapshots);
    let stays = snapshots.iter().filter(|snapshot| !goes.contains(snapshot));
    stays.map(|snapshot| snapshot.time).collect()
}

#[test]
fn schedules_are_read_and_shown() {
    for text in ["every 10m keep 6x10m,24x1h,7x1d", "every 1s keep 1x1s", "every 90m keep 3x2w"] {
        assert_eq!(schedule(text).to_string(), text);
    }
    let same = Schedule::new("3600s", "07x86400s,5x168h").unwrap();
    assert_eq!(same.to_string(), "every 1h keep 7x1d,5x1w");
    for (every, keep, told) in [
        ("", "1x1h", "no length of time"),
        ("10", "1x1h", "no length of time"),
        ("m", "1x1h", "no length of time"),
        ("-1m", "1x1h", "no length of time"),
        ("1.5h", "1x1h", "no length of time"),
        ("10 m", "1x1h", "no length of time"),
        ("5\u{e9}", "1x1h", "no length of time"),
        ("0s", "1x1h", "shortest is 1s"),
        ("40000d", "1x1h", "longest is 36525d"),
        ("99999999999999999999s", "1x1h", "too long"),
        ("18446744073709551615w", "1x1h", "too long"),
        ("1m", "", "no rule"),
        ("1m", "1h", "no rule"),
        ("1m", "x1h", "no rule"),
        ("1m", "+3x1h", "no rule"),
        ("1m", "3x1h,", "no rule"),
        ("1m", "3x", "no length of time"),
        ("1m", "3x1y", "no length of time"),
        ("1m", "0x1h", "keeps nothing"),
        ("1m", "10001x1h", "more than 10000"),
        ("1m", "99999999999999999999x1h", "more than 10000"),
        ("1m", "9000x1h,1001x1d", "together"),
        (
            "1m",
            "1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h,1x1h",
            "16 rules",
        ),
    ] {
        let problem = Schedule::new(every, keep).unwrap_err();
        assert!(problem.contains(told), "{every} {keep}: {problem}");
    }
    for text in ["", "every 10m", "keep 1x1h", "every 10m keep", "EVERY 10m keep 1x1h"] {
        assert!(text.parse::<Schedule>().is_err(), "{text}");
    }
}

#[test]
fn names_have_the_time() {
    assert_eq!(name_at(1_795_723_200), "auto-2026-11-26T20:00:00Z");
    assert_eq!(time_in_name(b"auto-2026-11-26T20:00:00Z"), Some(1_795_723_200));
    for other in [
        &b"2026-11-26T20:00:00Z"[..],
        b"auto-",
        b"auto-2026-11-26T20:00:00Z-2",
        b"auto-2026-11-26T20-00-00Z",
        b"Auto-2026-11-26T20:00:00Z",
        b"auto-2026-02-30T20:00:00Z",
        b"auto-\xff",
    ] {
        assert_eq!(time_in_name(other), None);
    }
}

#[test]
fn it_is_time_when_an_interval_begins() {
    let every_ten = schedule("every 10m keep 1x1d");
    let (begin, later) = (1_795_723_200, 1_795_723_200 + 599);
    assert_eq!(every_ten.wait((begin, 0)), Duration::from_secs(600));
    assert_eq!(every_ten.wait((later, 999_999_999)), Duration::from_nanos(1));
    assert_eq!(every_ten.wait((-1, 0)), Duration::from_secs(1));
    // At first at once, unless there is one of this interval.
    assert_eq!(every_ten.wait_at_first((later, 0), None), Duration::ZERO);
    assert_eq!(every_ten.wait_at_first((later, 0), Some(begin - 1)), Duration::ZERO);
    assert_eq!(every_ten.wait_at_first((later, 0), Some(begin)), Duration::from_secs(1));
    // Of a clock that was ahead.
    assert_eq!(every_ten.wait_at_first((later, 0), Some(later + 900)), Duration::ZERO);
}

#[test]
fn the_last_of_each_interval_stays() {
    let hour = 3600;
    let rule = schedule("every 10m keep 3x1h");
    let of_hours = |hours: &[(i64, i64)]| -> Vec<i64> {
        hours.iter().map(|(hours, minutes)| hours * hour + minutes * 60).collect()
    };
    let times = of_hours(&[(1, 0), (1, 50), (2, 10), (5, 0), (5, 59), (6, 0)]);
    // The hours 3 and 4 have none, and don't count.
    assert_eq!(left(&rule, &made_at(&times)), of_hours(&[(2, 10), (5, 59), (6, 0)]));
    let both = schedule("every 10m keep 2x10m,2x1h");
    assert_eq!(left(&both, &made_at(&times)), of_hours(&[(5, 59), (6, 0)]));
    assert_eq!(left(&both, &[]), Vec::<i64>::new());
}

#[test]
fn a_clock_that_was_ahead_takes_nothing_from_the_present() {
    let rule = schedule("every 1h keep 3x1h");
    let hour = 3600;
    let ahead: Vec<i64> = (1000..1003).map(|number| number * hour).collect();
    let mut snapshots = made_at(&ahead);
    for number in 1..=5 {
        let generation = 200 + number as u64;
        snapshots.push(Automatic { generation, time: number * hour });
        let goes = rule.superfluous(&snapshots);
        assert!(goes.iter().all(|one| one.time >= 1000 * hour || one.time <= (number - 3) * hour));
        snapshots.retain(|one| !goes.contains(one));
        assert!(snapshots.len() == 3 && snapshots.last().unwrap().time == number * hour);
    }
}

/// Rules, and times between which the clock mostly goes on.
fn histories() -> impl Strategy<Value = (Schedule, Vec<i64>)> {
    let interval = prop_oneof![1..100_u64, 100..10_000_u64];
    let rule = (1..8_u64, interval).prop_map(|(count, seconds)| {
        let interval = Interval { seconds };
        Rule { count, interval }
    });
    let steps = prop_oneof![
        12 => 1..50_i64,
        4 => 50..5000_i64,
        1 => -20_000..0_i64,
        1 => Just(0_i64),
    ];
    let rules = prop::collection::vec(rule, 1..4);
    (rules, -10_000..10_000_i64, prop::collection::vec(steps, 0..80)).prop_map(
        |(keep, start, steps)| {
            let times = steps.into_iter().scan(start, |now, step| {
                *now += step;
                Some(*now)
            });
            (Schedule { every: Interval { seconds: 1 }, keep }, times.collect())
        },
    )
}

/// Indexes that a rule wants, written down in another way: runs of snapshots in one interval, of
/// which the last of each of the last runs stays.
fn wanted(rule: &Rule, snapshots: &[Automatic]) -> BTreeSet<usize> {
    let number = |index: usize| snapshots[index].time.div_euclid(rule.interval.seconds as i64);
    let ends = (0..snapshots.len())
        .filter(|index| index + 1 == snapshots.len() || number(*index) != number(index + 1));
    let ends: Vec<usize> = ends.collect();
    ends.into_iter().rev().take(rule.count as usize).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_a_rule_keeps_stays_and_nothing_else((schedule, times) in histories()) {
        let snapshots = made_at(&times);
        let goes = schedule.superfluous(&snapshots);
        let wanted: BTreeSet<usize> =
            schedule.keep.iter().flat_map(|rule| wanted(rule, &snapshots)).collect();
        for (index, snapshot) in snapshots.iter().enumerate() {
            prop_assert_eq!(goes.contains(snapshot), !wanted.contains(&index), "{}", index);
        }
        let stay = snapshots.len() - goes.len();
        prop_assert!(stay as u64 <= schedule.keep.iter().map(|rule| rule.count).sum());
        if let Some(newest) = snapshots.last() {
            prop_assert!(!goes.contains(newest));
        }
        // Once is enough.
        let mut left = snapshots;
        left.retain(|snapshot| !goes.contains(snapshot));
        prop_assert!(schedule.superfluous(&left).is_empty());
    }

    /// Deleting after each snapshot leaves what deleting once at the end leaves, wherever the clock
    /// is set: nothing goes that a rule wants later.
    #[test]
    fn nothing_goes_that_is_wanted_later((schedule, times) in histories()) {
        let all = made_at(&times);
        let mut snapshots: Vec<Automatic> = Vec::new();
        for snapshot in &all {
            snapshots.push(*snapshot);
            let goes = schedule.superfluous(&snapshots);
            snapshots.retain(|one| !goes.contains(one));
            prop_assert_eq!(snapshots.last(), Some(snapshot));
        }
        let goes = schedule.superfluous(&all);
        let mut expected = all;
        expected.retain(|one| !goes.contains(one));
        prop_assert_eq!(snapshots, expected);
    }
}

#[test]
fn what_is_shown_of_a_schedule() {
    let schedule = Schedule::new("1h", "6x10m, 24x60m,2x1d").unwrap();
    assert_eq!(schedule.every(), "1h");
    assert_eq!(schedule.rules(), ["6x10m", "24x1h", "2x1d"]);
    assert_eq!(schedule.finer_rules(), ["6x10m"]);
    assert_eq!(schedule.repeated_rule(), None);
    let repeated = Schedule::new("1h", "6x1d,24x24h").unwrap();
    assert_eq!(repeated.repeated_rule().as_deref(), Some("24x1d"));
    assert_eq!([0, 1, 3599, 3600].map(|now| schedule.next(now)), [3600, 3600, 3600, 7200]);
    assert_eq!(schedule.next(-1), 0);
    assert!(is_automatic_name(b"auto-2020-01-01T00:00:00Z"));
    assert!(!is_automatic_name(b"auto-backup") && !is_automatic_name(b"monday"));
}
