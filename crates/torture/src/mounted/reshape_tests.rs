//! The checker of [`Reshape`] is not blind: it reports whatever was acknowledged and is missing.
use super::*;

/// A file of 100 units, written and acknowledged, with a hole of two blocks at unit 40.
fn written() -> (Reshape, File, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = OpenOptions::new()
        .create_new(true)
        .read(true)
        .write(true)
        .open(folder.path().join(NAME))
        .unwrap();
    let mut reshape = Reshape::new(7);
    reshape.exists = true;
    for step in [Step::Write(0..40), Step::Write(56..100)] {
        change(&mut reshape, &step, &file);
    }
    reshape.acknowledge();
    reshape.check(folder.path()).unwrap();
    (reshape, file, folder)
}

fn change(reshape: &mut Reshape, step: &Step, file: &File) {
    reshape.begin(step);
    reshape.perform(step, file, file).unwrap();
}

/// Steps that a file shows; an allocation behind its end is another test's.
const STEPS: &[fn() -> Step] = &[
    || Step::Store(3..9),
    || Step::WriteDirectly(96..120),
    || Step::WriteDirectly(8..16),
    || Step::Write(39..41),
    || Step::Truncate { units: 99 },
    || Step::Truncate { units: 101 },
    || Step::Allocate { units: 90..110, keep_size: false },
    || Step::Punch(30..31),
    || Step::Zero { units: 10..50, keep_size: true },
    || Step::Zero { units: 100..130, keep_size: false },
];

#[test]
fn a_step_that_was_acknowledged_and_is_missing_is_told() {
    for step in STEPS.iter().map(|step| step()) {
        let (mut reshape, _file, folder) = written();
        reshape.begin(&step);
        reshape.acknowledge();
        let told = reshape.check(folder.path()).expect_err(&format!("{step:?}"));
        assert!(told.contains("acknowledged") || told.contains("bytes long"), "{step:?}: {told}");
    }
}

#[test]
fn a_step_that_was_begun_may_be_there_or_not() {
    for step in STEPS.iter().map(|step| step()) {
        let (mut reshape, _file, folder) = written();
        reshape.begin(&step);
        reshape
            .check(folder.path())
            .unwrap_or_else(|problem| panic!("{step:?}, not there: {problem}"));
        let (mut reshape, file, folder) = written();
        reshape.begin(&step);
        match reshape.perform(&step, &file, &file) {
            // Not every file system has this one.
            Err(error)
                if error.kind() == io::ErrorKind::Unsupported
                    && matches!(step, Step::Zero { .. }) =>
            {
                continue;
            }
            performed => performed.unwrap(),
        }
        reshape.check(folder.path()).unwrap_or_else(|problem| panic!("{step:?}, there: {problem}"));
    }
}

#[test]
fn an_msync_acknowledges_what_was_stored_and_no_more() {
    let (mut reshape, file, folder) = written();
    reshape.begin(&Step::Write(20..30));
    change(&mut reshape, &Step::Store(3..9), &file);
    reshape.acknowledge_stored(&(3..9));
    // The write is missing, but the stores are there.
    reshape.check(folder.path()).unwrap();
    reshape.begin(&Step::Store(3..9));
    reshape.acknowledge_stored(&(3..9));
    assert!(reshape.check(folder.path()).unwrap_err().contains("unit 3: "));
    // A file that has become longer keeps that, once something behind its old end was stored and
    // acknowledged.
    let (mut reshape, _file, folder) = written();
    reshape.begin(&Step::Truncate { units: 200 });
    reshape.begin(&Step::Store(150..151));
    reshape.acknowledge_stored(&(150..151));
    assert!(reshape.check(folder.path()).unwrap_err().contains("bytes long"));
}

#[test]
fn room_that_was_allocated_and_is_missing_is_told() {
    let (mut reshape, file, folder) = written();
    let behind = Step::Allocate { units: 160..256, keep_size: true };
    reshape.begin(&behind);
    reshape.check(folder.path()).unwrap();
    // All of it, more than the file has without.
    reshape.begin(&Step::Allocate { units: 0..256, keep_size: true });
    reshape.acknowledge();
    assert!(reshape.check(folder.path()).unwrap_err().contains("were allocated"));
    // The file gave it back, so the checker does not miss it.
    reshape.begin(&Step::Truncate { units: 100 });
    reshape.begin(&Step::Punch(0..104));
    reshape.check(folder.path()).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100 * UNIT_BYTES);
}

#[test]
fn another_files_bytes_and_torn_units_are_told() {
    for (at, bytes) in [(0, pattern::content(99, 1, 512)), (10_000, vec![1; 3])] {
        let (mut reshape, file, folder) = written();
        reshape.begin(&Step::Write(0..100));
        file.write_all_at(&bytes, at).unwrap();
        let told = reshape.check(folder.path()).unwrap_err();
        assert!(told.contains("instead of its own data") || told.contains("torn"), "{told}");
    }
}

#[test]
fn any_steps_leave_what_the_model_says() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = OpenOptions::new()
        .create_new(true)
        .read(true)
        .write(true)
        .open(folder.path().join(NAME))
        .unwrap();
    let mut reshape = Reshape::new(11);
    reshape.exists = true;
    for _ in 0..400 {
        let step = reshape.any_step();
        if matches!(step, Step::Zero { .. } | Step::Allocate { .. }) {
            // What file systems take for that differs; the mounts of `cairn torture` test it.
            continue;
        }
        change(&mut reshape, &step, &file);
        reshape.acknowledge();
        reshape.check(folder.path()).unwrap_or_else(|problem| panic!("{step:?}: {problem}"));
        file = OpenOptions::new().read(true).write(true).open(folder.path().join(NAME)).unwrap();
    }
}
