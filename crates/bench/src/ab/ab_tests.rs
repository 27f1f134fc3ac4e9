//! Every measurement of every mechanism that this program has both sides of: both run, and every
//! figure is found.
use super::*;
use crate::engine_figures;
use std::fs;
use std::path::Path;

const LOAD: &str = r#"Mkdir "\clients" NT_STATUS_OK
Mkdir "\clients\client1" NT_STATUS_OK
NTCreateX "\clients\client1\A" 0x40 0x2 3 NT_STATUS_OK
WriteX 3 0 65536 65536 NT_STATUS_OK
Flush 3 NT_STATUS_OK
Close 3 NT_STATUS_OK
Unlink "\clients\client1\A" 0x6 NT_STATUS_OK
Rmdir "\clients\client1" NT_STATUS_OK
"#;

fn settings(mechanism: Mechanism, folder: &Path) -> AbSettings {
    let loadfile = folder.join("load.txt");
    fs::write(&loadfile, LOAD).unwrap();
    AbSettings {
        mechanism,
        device: None,
        clients: Some(3),
        duration: Duration::from_millis(50),
        repeat: 2,
        quick: true,
        loadfile: Some(loadfile),
        command: vec!["cairn".into(), "bench".into(), "ab".into()],
        interrupt: Interrupt::default(),
    }
}

/// The figures that a comparison lacks, each with the name of its measurement.
fn missing(mechanism: Mechanism, wanted: &[Measurement], comparison: &Comparison) -> Vec<String> {
    // A run as short as this may have too few intervals for a rate of each.
    let may_lack = |name: &str| mechanism == Mechanism::Tickets && name == "files, slow intervals";
    let lacks = |(measured, wanted): (&comparison::Measured, &Measurement)| {
        let is_there = |name| measured.rows.iter().any(|row| row.figure == name);
        let names = wanted.wanted.iter().map(|wanted| wanted.name);
        names
            .filter(|name| !is_there(*name) && !may_lack(name))
            .map(|name| format!("{}: {name}", measured.name))
            .collect::<Vec<_>>()
    };
    comparison.measurements.iter().zip(wanted).flat_map(lacks).collect()
}

#[test]
fn every_measurement_has_all_its_figures_on_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    for mechanism in Mechanism::ALL.into_iter().filter(|mechanism| mechanism.check_built().is_ok())
    {
        let mut settings = settings(mechanism, folder.path());
        // A test must not take as much memory as a volume's size.
        settings.device = Some(DeviceSpec::Simulated {
            size_bytes: 256 << 20,
            flush_time: Duration::from_micros(100),
            discard_time: Duration::ZERO,
        });
        let wanted = measurements::of(mechanism, &settings);
        let mut measure = |duration| {
            settings.duration = duration;
            run(&settings, &mut |_| {})
                .unwrap_or_else(|error| panic!("{}: {error:#}", mechanism.name()))
        };
        let mut comparison = measure(Duration::from_millis(50));
        if !missing(mechanism, &wanted, &comparison).is_empty() {
            // Where much else runs, nothing may have happened in so short a time.
            comparison = measure(Duration::from_secs(3));
        }
        assert_eq!(comparison.measurements.len(), wanted.len());
        for measured in &comparison.measurements {
            assert_eq!((measured.off.len(), measured.on.len()), (2, 2), "{}", measured.name);
        }
        let missing = missing(mechanism, &wanted, &comparison);
        assert!(missing.is_empty(), "{missing:?} of {comparison}");
        let shown = comparison.to_string();
        assert!(shown.contains("published") && shown.contains(mechanism.title()), "{shown}");
        let json = serde_json::to_string(&comparison).unwrap();
        assert!(serde_json::from_str::<Comparison>(&json).unwrap().to_string() == shown, "{json}");
    }
}

/// A stored report shows the same as the printed one.
#[test]
fn figures_survive_json_to_the_last_digit() {
    let mut random = cairn_environment::random::Seeded::new(1);
    for _ in 0..10_000 {
        let figure = random.below(1 << 53) as f64 / (1 + random.below(1 << 30)) as f64;
        let json = serde_json::to_string(&figure).unwrap();
        assert_eq!(
            serde_json::from_str::<f64>(&json).unwrap().to_bits(),
            figure.to_bits(),
            "{json}"
        );
    }
}

#[test]
fn a_missing_image_is_made_for_each_run_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    let mut settings = settings(Mechanism::FlushCoordination, folder.path());
    settings.device = Some(DeviceSpec::Image { path: image.clone(), size_bytes: 64 << 20 });
    let comparison = run(&settings, &mut |_| {}).unwrap();
    assert!(!image.exists());
    assert_eq!(
        comparison.measurements.len(),
        1,
        "the device's own flush time takes the place of three"
    );
    let fsyncs = |report: &Report| report.statistics.as_ref().map(engine_figures::fsyncs);
    assert!(
        comparison.measurements[0]
            .on
            .iter()
            .all(|report| fsyncs(report).is_some_and(|count| count > 0)),
        "{comparison}"
    );
}

#[test]
fn an_image_that_exists_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    fs::write(&image, "somebody's").unwrap();
    let mut settings = settings(Mechanism::FlushCoordination, folder.path());
    settings.device = Some(DeviceSpec::Image { path: image.clone(), size_bytes: 64 << 20 });
    let error = run(&settings, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("name an image that does not exist"), "{error}");
    assert_eq!(fs::read_to_string(&image).unwrap(), "somebody's");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let usual = settings(Mechanism::FlushCoordination, folder.path());
    assert!(
        run(&AbSettings { repeat: 0, ..usual.clone() }, &mut |_| {})
            .unwrap_err()
            .to_string()
            .contains("--repeat")
    );
    usual.interrupt.flag().store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(format!("{:#}", run(&usual, &mut |_| {}).unwrap_err()).contains("interrupted"));
}
