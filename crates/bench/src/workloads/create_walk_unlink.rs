//! A large tree in three phases: every client creates its part, walks it with a status of each
//! file, and removes it. A phase begins when the one before is complete and durable. It ends with
//! its work, not with a time.
use super::{Findings, Place, Settings};
use crate::client::{self, Client, Limit, Measured};
use crate::recorder::Recorder;
use crate::report::Figure;
use crate::target::Open;

const FILES_DEFAULT: u64 = 10_000;
const FILES_PER_DIRECTORY: u64 = 1000;

/// The part of one client: files in directories.
#[derive(Clone, Copy)]
struct Tree {
    files: u64,
}

impl Tree {
    fn directories(self) -> u64 {
        self.files.div_ceil(FILES_PER_DIRECTORY)
    }

    fn files_in(self, directory: u64) -> u64 {
        (self.files - directory * FILES_PER_DIRECTORY).min(FILES_PER_DIRECTORY)
    }
}

type Phase = fn(&Place, Tree, &Client, &mut Recorder) -> anyhow::Result<()>;

fn folder_of(place: &Place, client: &Client, directory: u64) -> String {
    place.path(&format!("{}/{directory}", client.index))
}

fn create(
    place: &Place,
    tree: Tree,
    client: &Client,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    place.target.make_directory(&place.path(&client.index.to_string()))?;
    for directory in 0..tree.directories() {
        let folder = folder_of(place, client, directory);
        place.target.make_directory(&folder)?;
        for file in 0..tree.files_in(directory) {
            if !client.goes_on() {
                return Ok(());
            }
            recorder
                .time("create", || place.target.open(&format!("{folder}/{file}"), Open::Create))?;
            client.completed();
        }
    }
    Ok(())
}

fn walk(place: &Place, tree: Tree, client: &Client, recorder: &mut Recorder) -> anyhow::Result<()> {
    for directory in 0..tree.directories() {
        let folder = folder_of(place, client, directory);
        let mut names = Vec::new();
        recorder.time("list", || {
            place.target.list(&folder, &mut |entry| {
                names.push(String::from_utf8_lossy(entry.name).into_owned());
                true
            })
        })?;
        for name in names {
            if !client.goes_on() {
                return Ok(());
            }
            recorder.time("status", || place.target.status(&format!("{folder}/{name}")))?;
            client.completed();
        }
    }
    Ok(())
}

fn unlink(
    place: &Place,
    tree: Tree,
    client: &Client,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    for directory in 0..tree.directories() {
        let folder = folder_of(place, client, directory);
        for file in 0..tree.files_in(directory) {
            if !client.goes_on() {
                return Ok(());
            }
            recorder.time("unlink", || place.target.unlink(&format!("{folder}/{file}")))?;
            client.completed();
        }
        place.target.remove_directory(&folder)?;
    }
    Ok(())
}

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let tree = Tree { files: settings.files.unwrap_or(FILES_DEFAULT) };
    let phases: [(&str, Phase); 3] = [("create", create), ("walk", walk), ("unlink", unlink)];
    let (mut all, mut figures) = (Measured::default(), Vec::new());
    for (name, phase) in phases {
        let in_clients = place.clone();
        let plan = settings.plan(name, Limit::Operations(tree.files * settings.clients as u64));
        let measured =
            client::run(&plan, move |client, recorder| phase(&in_clients, tree, client, recorder))?;
        figures.push(Figure::new(format!("{name}, time"), measured.seconds, "s"));
        figures.push(Figure::new(
            format!("{name}, rate"),
            measured.per_second(measured.completed),
            "files/s",
        ));
        figures.push(Figure::new(
            format!("{name}, CPU in the kernel, whole machine"),
            measured.machine.system_cpu_seconds,
            "s",
        ));
        all.recorder.merge(&measured.recorder);
        all.seconds += measured.seconds;
        all.completed += measured.completed;
        all.process = all.process + measured.process;
        all.machine = all.machine + measured.machine;
        place.target.sync_all()?;
    }
    let mut findings = Findings::of_rate(all, "operations/s");
    findings.figures = figures;
    Ok(findings)
}
