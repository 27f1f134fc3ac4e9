//! The page is well-formed, holds everything, shows what it was given, and believes none of it to
//! be HTML.
use super::*;
use crate::ab::{Comparison, Measured, Row, Spread};
use crate::machine::Machine;
use crate::peers::{LoadSeconds, PeerFigure, Sample, Summary, SummaryRow, THROUGHPUT, ToolVersion};
use crate::report::{Figure, OperationSummary, Origin, Report};
use serde_json::json;

const EVIL: &str = "<script src=\"x\">&'</script>";

fn machine() -> Machine {
    Machine {
        cpu_model: "Fast <One>".into(),
        cpus: 2,
        memory_bytes: 24 << 30,
        kernel: "Linux 6.18".into(),
        device: "ext4 on /dev/sda".into(),
    }
}

fn operation(name: &str, factor: f64) -> OperationSummary {
    let us = |latency: f64| latency * factor;
    OperationSummary {
        name: name.into(),
        count: 1000,
        average_us: us(150.0),
        p50_us: Some(us(120.0)),
        p90_us: Some(us(240.0)),
        p99_us: Some(us(900.0)),
        p999_us: Some(us(4000.0)),
        max_us: us(20_000.0),
    }
}

fn report(target: &str) -> Report {
    let stage = |name: &str, mean: f64| json!({"stage": name, "count": 1000, "mean_us": mean, "p50_us": mean, "p99_us": mean * 3.0, "max_us": mean * 9.0});
    Report {
        workload: "fsync-write".into(),
        target: target.into(),
        version: "0.1.0".into(),
        clients: 8,
        seconds: 10.0,
        completed: 1000,
        throughput: Figure::new("throughput", 1234.5, "fsyncs/s"),
        figures: vec![Figure::new("data", 80.0, "MB/s")],
        operations: vec![operation("fsync", 1.0), operation("write", 0.05)],
        cpu_seconds: 1.0,
        system_cpu_seconds: 0.5,
        context_switches: 3000,
        machine_cpu_seconds: 2.0,
        machine_context_switches: 5000,
        statistics: Some(
            json!({"fsyncs_grouped": 1000, "log_flushes": 40, "checkpoints": 40, "log_blocks_written": 200,
            "fsync_stages": [stage("data write", 40.0), stage("group wait", 30.0), stage("checkpoint write", 20.0), stage("flush", 55.0),
                stage("wake-up", 5.0), stage("total", 150.0)]}),
        ),
        origin: Some(Origin {
            date: "2026-01-31T12:00:00Z".into(),
            command: vec!["cairn".into(), EVIL.into()],
            machine: machine(),
            disturbance: None,
        }),
    }
}

fn sample(system: &str, value: f64) -> Sample {
    Sample {
        round: 1,
        system: system.into(),
        workload: "fsync-write@8".into(),
        clients: 8,
        value,
        unit: "fsyncs/s".into(),
        less_is_better: false,
        figures: vec![PeerFigure {
            name: "p99".into(),
            value: 3.0,
            unit: "ms".into(),
            less_is_better: true,
        }],
        latencies: Vec::new(),
        completed: 1000,
        wall_seconds: 11.0,
        machine_cpu_seconds: 1.0,
        machine_context_switches: 2000,
        server_cpu_seconds: 0.0,
        caller_cpu_seconds: 0.0,
        kernel_cpu_seconds: 0.0,
        report: Some(report(system)),
        statistics_before: None,
        statistics_after: None,
    }
}

fn row(
    system: &str,
    figure: &str,
    median: f64,
    times_as_good: f64,
    less_is_better: bool,
) -> SummaryRow {
    SummaryRow {
        workload: "fsync-write@8".into(),
        clients: 8,
        figure: figure.into(),
        system: system.into(),
        unit: if less_is_better { "ms" } else { "fsyncs/s" }.into(),
        less_is_better,
        median,
        min: median * 0.8,
        max: median * 1.5,
        times_as_good: Some(times_as_good),
        ratio_to_best_peer: None,
        cpu_us_per_operation: 300.0,
        context_switches_per_operation: 4.0,
        seconds: LoadSeconds { wall: 11.5, ..LoadSeconds::default() },
    }
}

fn summary() -> Summary {
    let rows = vec![
        row("ext4", THROUGHPUT, 1000.0, 1.0, false),
        row("xfs", THROUGHPUT, 500.0, 0.5, false),
        row("cairn-image", THROUGHPUT, 2000.0, 2.0, false),
        row("ext4", "p99", 4.0, 0.5, true),
        row("xfs", "p99", 2.0, 1.0, true),
        row("cairn-image", "p99", 1.0, 2.0, true),
    ];
    Summary {
        date: "2026-01-31T12:00:00Z".into(),
        command: vec!["cairn".into(), "bench".into(), "peers".into()],
        machine: machine(),
        tools: vec![ToolVersion { name: "mkfs.ext4".into(), version: "1.47".into() }],
        rounds: 1,
        clients: 8,
        seconds: 10.0,
        size_bytes: 3 << 30,
        direct_io: true,
        buffered_too: false,
        kernel: "6.18".into(),
        cpus: 2,
        version: "0.1.0".into(),
        disturbance: None,
        left_out: Vec::new(),
        rows,
        samples: [("ext4", 1000.0), ("xfs", 500.0), ("cairn-image", 2000.0)]
            .map(|(system, value)| sample(system, value))
            .into(),
    }
}

fn comparison() -> Comparison {
    let spread = |median: f64| Spread { median, min: median * 0.9, max: median * 1.1 };
    let row = Row {
        figure: "throughput".into(),
        unit: "MB/s".into(),
        less_is_better: Some(false),
        off: spread(100.0),
        on: spread(327.0),
        published: "+227 %".into(),
    };
    let neutral = Row {
        figure: "lock waits".into(),
        less_is_better: None,
        published: String::new(),
        ..row.clone()
    };
    let measured = Measured {
        name: "dbench, 200 clients".into(),
        load: "dbench".into(),
        target: "engine on memory".into(),
        clients: 200,
        rows: vec![row, neutral],
        off: vec![report("off")],
        on: vec![report("on")],
    };
    Comparison {
        mechanism: "M2".into(),
        title: "locks".into(),
        off: "node locks spin".into(),
        published: EVIL.into(),
        version: "0.1.0".into(),
        rounds: 1,
        seconds: 5.0,
        origin: Origin { machine: machine(), ..Origin::default() },
        measurements: vec![measured],
    }
}

fn results() -> Vec<Results> {
    let of = |source: &str, content| Results { source: source.into(), content };
    vec![
        of("peers.json", Content::Peers(Box::new(summary()))),
        of("ab.json", Content::Comparison(Box::new(comparison()))),
        of("run <1>.json", Content::Run(Box::new(report(EVIL)))),
    ]
}

/// The names of all elements, or what is wrong with the page.
fn elements(page: &str) -> Result<Vec<String>, String> {
    let mut rest = page.strip_prefix("<!DOCTYPE html>\n").ok_or("no document type")?;
    let (mut open, mut names): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    while let Some(start) = rest.find('<') {
        if rest[..start].contains('>') {
            return Err(format!("a stray > before {}", &rest[start..rest.len().min(start + 40)]));
        }
        let end = start + rest[start..].find('>').ok_or("a tag that does not end")?;
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            let last = open.pop();
            if last.as_deref() != Some(name) {
                return Err(format!("</{name}> closes {last:?}"));
            }
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap_or_default().to_owned();
        if tag.matches('"').count() % 2 != 0
            || name.is_empty()
            || !name.chars().all(|letter| letter.is_ascii_alphanumeric())
        {
            return Err(format!("a bad tag: <{tag}>"));
        }
        if tag.ends_with('/') && !["meta", "rect", "line", "path"].contains(&name.as_str()) {
            return Err(format!("a browser leaves this open: <{tag}>"));
        }
        names.push(name.clone());
        if !tag.ends_with('/') {
            open.push(name);
        }
    }
    if open.is_empty() { Ok(names) } else { Err(format!("never closed: {open:?}")) }
}

#[test]
fn the_page_is_well_formed_and_holds_everything() {
    let page = page(&results());
    let names = elements(&page).unwrap_or_else(|error| panic!("{error}\n{page}"));
    for name in ["svg", "table", "rect", "line", "text", "details", "section", "style"] {
        assert!(names.iter().any(|known| known == name), "there is no {name}");
    }
    for name in ["script", "link", "img", "iframe", "object"] {
        assert!(!names.iter().any(|known| known == name), "there is a {name}");
    }
    let lower = page.to_lowercase();
    for part in ["http:", "https:", "src=", "url(", "@import", "//"] {
        assert!(!lower.replace(&html::escape(EVIL), "").contains(part), "{part}");
    }
    assert!(page.contains("prefers-color-scheme") && page.contains("width=device-width"));
}

#[test]
fn the_page_shows_what_it_was_given() {
    let page = page(&results());
    let parts = [
        "ext4",
        "Cairn, image file",
        "64 KiB write + fsync, 8 threads",
        "2.00×",
        "mkfs.ext4",
        "1.47",
        "Fast &lt;One&gt;",
        "+227 %",
        "+227.0 %",
        "dbench, 200 clients",
        "flush",
        "p99.9",
        "1234",
    ];
    for part in parts {
        assert!(page.contains(part), "{part} is missing");
    }
    assert!(page.contains("better →") && page.contains("run &lt;1&gt;.json"));
    // The p99 of 1 ms, where the best peer has 2 ms, is twice as good.
    assert!(page.contains("(less is better)") && page.matches("2.00×").count() > 2, "{page}");
}

#[test]
fn the_verdict_comes_first_and_the_main_comparison_second() {
    let page = page(&results());
    let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text} is missing"));
    assert!(
        at("Cairn beside the best of ext4 and xfs")
            < at("better 2, no clear difference 0, worse 0 of 2 figures"),
        "{page}"
    );
    assert!(
        at("better 2, no clear difference 0") < at("▲ 2.00×")
            && at("▲ 2.00×") < at("Each mechanism, on beside off")
    );
    assert!(at("Furthest ahead: 2.00×") < at("<table"));
    // All the rest is folded up.
    let (mut depth, mut open) = (0_usize, 0);
    for part in page.split_inclusive('>') {
        depth += usize::from(part.ends_with("<details>"));
        depth -= usize::from(part.ends_with("</details>"));
        open += usize::from(
            depth == 0 && (part.contains("class=\"plot\"") || part.contains("class=\"ratios\"")),
        );
    }
    assert_eq!((depth, open), (0, 0));
    assert!(!page.contains("tool:") && !page.contains("busy:"));
}

#[test]
fn a_win_and_a_loss_differ_in_sign_colour_and_word() {
    let mut both = summary();
    both.rows = vec![
        row("ext4", THROUGHPUT, 100.0, 1.0, false),
        row("cairn-image", THROUGHPUT, 300.0, 3.0, false),
        row("cairn-loop", THROUGHPUT, 20.0, 0.2, false),
        row("cairn-image-buffered", THROUGHPUT, 105.0, 1.05, false),
    ];
    let page = page(&[Results { source: "x".into(), content: Content::Peers(Box::new(both)) }]);
    for (class, word, text) in [
        ("win", "better", "▲ 3.00×"),
        ("loss", "worse", "▼ 0.20×"),
        ("even", "no clear difference", "≈ 1.05×"),
    ] {
        assert!(
            page.contains(&format!("<b class=\"chip {class}\" title=\"{word}\">{text}</b>")),
            "{text}: {page}"
        );
    }
}

#[test]
fn a_busy_machine_is_told_before_everything_else() {
    let mut results = results();
    let Content::Peers(summary) = &mut results[0].content else { panic!("not the comparison") };
    summary.disturbance = Some(crate::disturbance::Disturbance {
        load_average: 15.0,
        cpu_share: 0.4,
        stolen_share: 0.0,
    });
    let page = page(&results);
    elements(&page).unwrap();
    let warning = page.find("These figures are doubtful").unwrap();
    assert!(
        warning < page.find("<section").unwrap() && page.contains("1 of 3 results: peers.json"),
        "{page}"
    );
    assert!(markdown(&results).contains("The machine was busy"));
}

#[test]
fn older_results_have_the_same_direction() {
    let mut older = serde_json::to_value(summary()).unwrap();
    for row in older["rows"].as_array_mut().unwrap() {
        let times_as_good = row["times_as_good"].take().as_f64().unwrap();
        row.as_object_mut().unwrap().remove("times_as_good");
        row["ratio_to_best_peer"] =
            if row["less_is_better"] == true { 1.0 / times_as_good } else { times_as_good }.into();
    }
    let older: Summary = serde_json::from_value(older).unwrap();
    assert_eq!(older.markdown(), summary().markdown());
}

#[test]
fn a_device_is_compared_with_its_like() {
    let mut both = summary();
    both.buffered_too = true;
    both.rows = vec![
        row("ext4", THROUGHPUT, 100.0, 1.0, false),
        row("cairn-loop", THROUGHPUT, 300.0, 3.0, false),
        row("ext4-buffered", THROUGHPUT, 1000.0, 1.0, false),
        row("cairn-loop-buffered", THROUGHPUT, 500.0, 0.5, false),
        SummaryRow { unit: "%".into(), ..row("ext4", "loss", 1.0, 4.0, true) },
    ];
    let page = page(&[Results { source: "x".into(), content: Content::Peers(Box::new(both)) }]);
    elements(&page).unwrap();
    assert!(page.contains("with and without direct I/O"));
    for bar in [
        "ext4, page cache below: 1.00×",
        "Cairn, loop device: 3.00×",
        "Cairn, loop device, page cache below: 0.50×",
    ] {
        assert!(page.contains(bar), "{bar}");
    }
    // A part of a whole stands in the table only, without a ratio.
    assert!(page.contains(": loss, % (less is better)") && !page.contains("4.00×"), "{page}");
}

#[test]
fn the_table_and_the_bars_say_the_same() {
    let page = page(&results());
    let numbers = &page[page.find("times as good</th>").unwrap()..];
    let numbers = &numbers[..numbers.find("</table>").unwrap()];
    let of_p99 = &numbers[numbers.find("99 % are faster, ms (less is better)").unwrap()..];
    assert_eq!(
        (
            of_p99.matches("0.50×").count(),
            of_p99.matches("1.00×").count(),
            of_p99.matches("2.00×").count()
        ),
        (1, 1, 1),
        "{of_p99}"
    );
    assert!(page.contains("ext4: 0.50×") && page.contains("xfs: 1.00×"));
}

#[test]
fn a_tool_has_the_stages_of_its_own_time() {
    let mut of_tool = summary();
    let statistics = |count: u64, mean: f64| {
        json!({"fsyncs_grouped": count, "log_flushes": count, "fsync_stages":
            [{"stage": "flush", "count": count, "mean_us": mean, "p50_us": mean, "p99_us": mean, "max_us": mean}]})
    };
    of_tool.samples = vec![Sample {
        report: None,
        statistics_before: Some(statistics(10, 7000.0)),
        statistics_after: Some(statistics(20, 4000.0)),
        ..sample("cairn-image", 1.0)
    }];
    let page = page(&[Results { source: "x".into(), content: Content::Peers(Box::new(of_tool)) }]);
    assert!(page.contains("of 1.00 ms on average"), "{page}");
}

#[test]
fn nothing_measured_is_a_page_too() {
    let mut empty = summary();
    (empty.rows, empty.samples) = (Vec::new(), Vec::new());
    let mut none = report("x");
    (none.operations, none.statistics, none.origin) = (Vec::new(), None, None);
    let of = |content| Results { source: "x".into(), content };
    for results in
        [Vec::new(), vec![of(Content::Peers(Box::new(empty))), of(Content::Run(Box::new(none)))]]
    {
        elements(&page(&results)).unwrap();
    }
}

#[test]
fn markdown_has_the_ratios() {
    let text = markdown(&results());
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.contains(&"| workload | ext4 | xfs | cairn-image | cairn-image, times as good as the best other |"), "{text}");
    assert!(lines.contains(&"| fsync-write@8, fsyncs/s | 1000 | 500 | 2000 | 2.00 |"), "{text}");
    assert!(
        lines.contains(&"| fsync-write@8, p99, ms (less is better) | 4.00 | 2.00 | 1.00 | 2.00 |"),
        "{text}"
    );
    assert!(
        lines
            .contains(&"| dbench, 200 clients: throughput, MB/s | 100 | 327 | +227.0 % | +227 % |"),
        "{text}"
    );
}

#[test]
fn a_load_in_seconds_is_better_when_it_is_shorter() {
    let timed = |system: &str, median: f64, times_as_good: f64| SummaryRow {
        workload: "untar".into(),
        unit: "s".into(),
        ..row(system, THROUGHPUT, median, times_as_good, true)
    };
    let rows = vec![
        timed("ext4", 4.0, 1.0),
        timed("cairn-loop", 1.0, 4.0),
        timed("cairn-image", 16.0, 0.25),
    ];
    let left_out = vec!["git is left out: git (package git) is not installed".into()];
    let page = page(&[Results {
        source: "x.json".into(),
        content: Content::Peers(Box::new(Summary { rows, left_out, ..summary() })),
    }]);
    assert!(page.contains("▲ 4.00×") && page.contains("▼ 0.25×"), "{page}");
    assert!(
        page.contains("unpack the sources of a program (tar)")
            && page.contains("s, less is better"),
        "{page}"
    );
    assert!(page.contains("git is left out") && page.contains("11.50"), "{page}");
}
