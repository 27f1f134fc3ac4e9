//! The namespace of a client at one moment, as plain data: taken from the model, or found on a
//! volume.
//!
//! Contents and sizes of regular files are not part of it, since they may be older after a crash;
//! everything else must be exactly that of one moment. Modification times are left out as well.
use crate::model::{Body, Layout, Model, NodeId};
use crate::operation::{Name, Special};
use crate::runner::special_type;
use crate::volume_snapshots::{is_snapshot, listed, snapshot_facts, snapshot_path};
use cairn_engine::{Attributes, Error, FileType, InodeId, Volume};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Where a name stands: names from the root of the volume.
pub type FullPath = Vec<Vec<u8>>;

/// Everything about one name, but contents, size and times.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Facts {
    /// `d_type` of the object.
    pub file_type: u8,
    /// Whether it is the root directory of a subvolume.
    pub is_subvolume: bool,
    /// Whether it is that of a fork.
    pub is_fork: bool,
    /// If it is that of a fork, how many snapshots it shows: its own, and those of the subvolumes
    /// whose place it has.
    pub shown_snapshots: u32,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Link count.
    pub links: u32,
    /// Device number.
    pub device: u64,
    /// Length of a directory, which is that of its names, or of a symbolic link.
    pub size_bytes: u64,
    /// Target of a symbolic link.
    pub target: Option<Vec<u8>>,
    /// Extended attributes: name, length and hash of the value.
    pub xattrs: Vec<(Vec<u8>, usize, u64)>,
    /// The first name, in order, of the same object.
    pub first_name: FullPath,
}

/// A namespace; `Id` identifies the objects.
#[derive(Clone, Debug, Default)]
pub struct Snapshot<Id> {
    /// Each name with what it refers to.
    pub names: BTreeMap<FullPath, (Facts, Id)>,
    /// Hash of all names and facts.
    pub digest: u64,
}

pub(crate) fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl<Id: Copy + Eq + Hash> Snapshot<Id> {
    /// The namespace of these names; their first names are found anew.
    pub(crate) fn finish(mut names: BTreeMap<FullPath, (Facts, Id)>) -> Self {
        let mut first: HashMap<Id, FullPath> = HashMap::new();
        let mut hasher = DefaultHasher::new();
        for (path, (facts, id)) in &mut names {
            facts.first_name = first.entry(*id).or_insert_with(|| path.clone()).clone();
            (path, &*facts).hash(&mut hasher);
        }
        Self { names, digest: hasher.finish() }
    }
}

/// A path as text.
pub fn show(path: &FullPath) -> String {
    let mut text = String::new();
    for name in path {
        let shown: String = name
            .iter()
            .take(16)
            .flat_map(|&byte| std::ascii::escape_default(byte))
            .map(char::from)
            .collect();
        let _ = if name.len() > 16 {
            write!(text, "/{shown}…({})", name.len())
        } else {
            write!(text, "/{shown}")
        };
    }
    if text.is_empty() { "/".into() } else { text }
}

/// The names in which two snapshots differ.
pub fn differences<A, B>(expected: &Snapshot<A>, found: &Snapshot<B>) -> Vec<String> {
    let mut lines = Vec::new();
    for (path, (facts, _)) in &expected.names {
        match found.names.get(path) {
            None => lines.push(format!(
                "{} is missing (type {}, {} links)",
                show(path),
                facts.file_type,
                facts.links
            )),
            Some((there, _)) if there != facts => {
                lines.push(format!("{}: expected {facts:?}, found {there:?}", show(path)))
            }
            Some(_) => {}
        }
    }
    for (path, (facts, _)) in
        found.names.iter().filter(|(path, _)| !expected.names.contains_key(*path))
    {
        lines.push(format!(
            "{} should not exist (type {}, {} links)",
            show(path),
            facts.file_type,
            facts.links
        ));
    }
    lines
}

fn model_type(body: &Body) -> FileType {
    match body {
        Body::Directory(..) => FileType::Directory,
        Body::Regular(_) => FileType::Regular,
        Body::Symlink(_) => FileType::Symlink,
        Body::Special(special, _) => special_type(*special),
    }
}

fn model_facts(model: &Model, id: NodeId) -> Facts {
    let node = &model.nodes[&id];
    let device = match &node.body {
        Body::Special(Special::CharacterDevice | Special::BlockDevice, device) => {
            u64::from(*device)
        }
        _ => 0,
    };
    Facts {
        file_type: model_type(&node.body) as u8,
        is_subvolume: model.is_subvolume(id),
        is_fork: model.forks().contains_key(&id),
        shown_snapshots: match model.forks().contains_key(&id) {
            true => model.shown_snapshots(id),
            false => 0,
        },
        mode: node.mode,
        uid: node.uid,
        gid: node.gid,
        links: node.links,
        device,
        size_bytes: match &node.body {
            Body::Directory(entries, _) => entries.keys().map(|name| name.len() as u64).sum(),
            Body::Symlink(target) => target.len() as u64,
            _ => 0,
        },
        target: if let Body::Symlink(target) = &node.body { Some(target.clone()) } else { None },
        xattrs: node
            .xattrs
            .iter()
            .map(|(name, value)| (name.clone(), value.bytes.len(), value.hash))
            .collect(),
        first_name: FullPath::new(),
    }
}

/// What the model says.
pub fn of_model(model: &Model) -> Snapshot<NodeId> {
    let mut names = BTreeMap::new();
    let mut todo = vec![(FullPath::new(), 0)];
    while let Some((path, id)) = todo.pop() {
        for (name, &child) in model.nodes[&id].entries().into_iter().flatten() {
            let path: FullPath = path.iter().chain([name]).cloned().collect();
            if model.nodes[&child].is_directory() {
                todo.push((path.clone(), child));
            }
            names.insert(path, (model_facts(model, child), child));
        }
        for ((_, name), snapshot) in model.snapshots.range((id, Vec::new())..(id + 1, Vec::new())) {
            let facts = snapshot_facts(snapshot.is_held);
            names.insert(snapshot_path(&path, name), (facts, snapshot.id));
        }
        if path.is_empty() {
            names.insert(path, (model_facts(model, id), id));
        }
    }
    if matches!(model.layout, Layout::Among(_)) {
        names.remove(&FullPath::new());
        names.remove(&vec![crate::model::SHARED_NAME.to_vec()]);
    }
    Snapshot::finish(names)
}

fn found_facts(volume: &Volume, attributes: &Attributes) -> Result<Facts, Error> {
    let inode = attributes.inode;
    let mut xattrs = Vec::new();
    for name in volume.list_xattrs(inode)? {
        let value = volume.get_xattr(inode, &name)?;
        xattrs.push((name, value.len(), hash(&value[..])));
    }
    xattrs.sort();
    let (id, is_subvolume) = volume.subvolume_of(inode)?;
    let is_fork =
        is_subvolume && volume.subvolumes()?.iter().any(|info| info.id == id && info.is_fork);
    Ok(Facts {
        file_type: attributes.file_type as u8,
        is_subvolume,
        is_fork,
        shown_snapshots: match is_fork {
            true => volume.snapshots(id)?.iter().filter(|info| !info.is_temporary()).count() as u32,
            false => 0,
        },
        mode: attributes.mode & 0o7777,
        uid: attributes.uid,
        gid: attributes.gid,
        links: attributes.links,
        device: attributes.device,
        size_bytes: match attributes.file_type {
            FileType::Regular => 0,
            _ => attributes.size_bytes,
        },
        target: if attributes.file_type == FileType::Symlink {
            Some(volume.read_link(inode)?)
        } else {
            None
        },
        xattrs,
        first_name: FullPath::new(),
    })
}

/// The entries of a directory, read `batch` at a time so that cookies are used.
///
/// # Errors
/// Those of the volume.
pub fn list(
    volume: &Volume,
    directory: InodeId,
    batch: usize,
) -> Result<Vec<(Vec<u8>, InodeId, FileType)>, Error> {
    let (mut entries, mut cookie) = (Vec::new(), 0);
    loop {
        let before = entries.len();
        volume.read_directory(directory, cookie, &mut |item| {
            if entries.len() == before + batch {
                return false;
            }
            entries.push((item.name.to_vec(), item.inode, item.file_type));
            cookie = item.cookie;
            true
        })?;
        if entries.len() == before {
            return Ok(entries);
        }
    }
}

/// In a fork, names may be hidden that are counted: what a directory has are the others.
fn count_entries(facts: &mut Facts, entries: &[(Vec<u8>, InodeId, FileType)]) {
    let is_directory = |entry: &&(_, _, FileType)| entry.2 == FileType::Directory;
    facts.links = 2 + entries.iter().filter(is_directory).count() as u32;
    facts.size_bytes = entries.iter().map(|(name, ..)| name.len() as u64).sum();
}

/// What the whole volume holds.
///
/// # Errors
/// Those of the volume.
pub fn of_volume(volume: &Volume, batch: usize) -> Result<Snapshot<InodeId>, Error> {
    let root = volume.root();
    let mut names = BTreeMap::from([(
        FullPath::new(),
        (found_facts(volume, &volume.attributes(root)?)?, root),
    )]);
    let mut todo = vec![(FullPath::new(), root)];
    // By subvolume, that in which its name stands.
    let mut parents = BTreeMap::new();
    let mut paths = BTreeMap::from([(volume.subvolume_of(root)?.0, FullPath::new())]);
    let hiding: BTreeSet<u64> = volume
        .subvolumes()?
        .into_iter()
        .filter_map(|info| info.hides_names.then_some(info.id))
        .collect();
    while let Some((path, directory)) = todo.pop() {
        let entries = list(volume, directory, batch)?;
        if hiding.contains(&volume.subvolume_of(directory)?.0) {
            let (facts, _) = names.get_mut(&path).expect("it was found before");
            count_entries(facts, &entries);
        }
        for (name, listed, listed_type) in entries {
            let attributes = volume.lookup(directory, &name)?;
            let facts = found_facts(volume, &attributes);
            volume.forget(attributes.inode, 1);
            let mut path = path.clone();
            path.push(name);
            if attributes.inode != listed || attributes.file_type != listed_type {
                let problem = format!(
                    "{} is listed as inode {listed} but looked up as {}",
                    show(&path),
                    attributes.inode
                );
                return Err(Error::NotAVolume(problem));
            }
            if attributes.file_type == FileType::Directory {
                let parent = volume.parent(attributes.inode)?;
                if parent != directory {
                    let problem = format!("the parent of {} is inode {parent}", show(&path));
                    return Err(Error::NotAVolume(problem));
                }
                todo.push((path.clone(), attributes.inode));
            }
            let (subvolume, is_root) = volume.subvolume_of(attributes.inode)?;
            let (above, _) = volume.subvolume_of(directory)?;
            let is_second = is_root && parents.insert(subvolume, above).is_some();
            if is_second || !is_root && subvolume != above {
                let problem = format!("{} in subvolume {above} is one of {subvolume}", show(&path));
                return Err(Error::NotAVolume(problem));
            }
            if is_root {
                paths.insert(subvolume, path.clone());
            }
            names.insert(path, (facts?, attributes.inode));
        }
    }
    expect_subvolumes(volume, &parents)?;
    for info in listed(volume)? {
        let Some(path) = paths.get(&info.subvolume) else {
            return Err(Error::NotAVolume(format!("a snapshot of no subvolume: {info:?}")));
        };
        let path = snapshot_path(path, &info.name);
        names.insert(path, (snapshot_facts(info.is_held), info.root));
    }
    Ok(Snapshot::finish(names))
}

/// What a snapshot of a subvolume holds, from its root directory.
///
/// # Errors
/// Those of the volume.
pub fn of_snapshot(
    volume: &Volume,
    root: InodeId,
    batch: usize,
) -> Result<Snapshot<InodeId>, Error> {
    let (own, _) = volume.subvolume_of(root)?;
    let top = found_facts(volume, &volume.attributes(root)?)?;
    let mut names = BTreeMap::from([(FullPath::new(), (top, root))]);
    let mut todo = vec![(FullPath::new(), root)];
    while let Some((above, directory)) = todo.pop() {
        for (name, listed, listed_type) in list(volume, directory, batch)? {
            let path: FullPath = above.iter().chain([&name]).cloned().collect();
            let attributes = volume.lookup(directory, &name)?;
            let facts = found_facts(volume, &attributes);
            volume.forget(attributes.inode, 1);
            let shown = (attributes.inode, attributes.file_type);
            if shown != (listed, listed_type) {
                let problem = format!("{} is listed as {listed}, and is {shown:?}", show(&path));
                return Err(Error::NotAVolume(problem));
            }
            if volume.subvolume_of(listed)? != (own, false) {
                let problem = format!("{} in a snapshot of {own} is not of it", show(&path));
                return Err(Error::NotAVolume(problem));
            }
            if attributes.file_type == FileType::Directory {
                todo.push((path.clone(), attributes.inode));
            }
            names.insert(path, (facts?, attributes.inode));
        }
    }
    Ok(Snapshot::finish(names))
}

/// Each subvolume with a name was met where the volume says that it is, and no other one.
fn expect_subvolumes(volume: &Volume, parents: &BTreeMap<u64, u64>) -> Result<(), Error> {
    let (shown, _) = volume.subvolume_of(volume.root())?;
    let all = volume.subvolumes()?;
    let named = all.iter().filter(|info| info.id != shown && !info.is_dying);
    let listed: BTreeMap<u64, u64> = named.map(|info| (info.id, info.parent)).collect();
    if listed == *parents {
        return Ok(());
    }
    let problem = format!("subvolumes and their parents: names {parents:?}, listed {listed:?}");
    Err(Error::NotAVolume(problem))
}

/// The part of a whole volume's snapshot that belongs to one client, as [`of_model`] shows it.
pub fn of_client(whole: &Snapshot<InodeId>, client: u8) -> Snapshot<InodeId> {
    let own = crate::model::own_name(client);
    let belongs = |path: &FullPath| match path.first() {
        Some(_) if is_snapshot(path) => {
            path.last().is_some_and(|name| Name::belongs_to(name, client))
        }
        Some(first) if *first == own => true,
        Some(first) if first == crate::model::SHARED_NAME => {
            path.get(1).is_some_and(|name| Name::belongs_to(name, client))
        }
        _ => false,
    };
    let names = whole
        .names
        .iter()
        .filter(|(path, _)| belongs(path))
        .map(|(path, entry)| (path.clone(), entry.clone()));
    Snapshot::finish(names.collect())
}
