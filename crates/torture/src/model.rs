//! A file system in memory, as simple as can be, that says what every operation must return and
//! leave behind.
//!
//! Each client of a test has a model of its own: the tree below its own directory, and its names in
//! the directory that all clients share. Nothing here is taken from the engine, so that a mistake
//! of one is not repeated by the other.
//!
//! Invariants: `links` of a file is the number of its names, of a directory 2 + its subdirectories;
//! a node without names stays as long as a handle refers to it.
use crate::contents::Contents;
use crate::model_forks::Tree;
use crate::operation::{Base, Name, Path, Special, Target};
use crate::volume_snapshots::ModelSnapshot;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Number of a node of the model; never used twice.
pub type NodeId = u32;

/// Why an operation must fail; one value for each error of the engine that a test can cause.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Failure {
    NotFound,
    Exists,
    NotDirectory,
    IsDirectory,
    NotEmpty,
    NameLength,
    NoAttribute,
    InvalidArgument,
    NotPermitted,
    CrossDevice,
    /// The subvolume of the inode was removed.
    Stale,
    /// A snapshot is held, or a subvolume has one.
    Busy,
    /// It is in a snapshot.
    ReadOnly,
    TooLarge,
    XattrTooLarge,
    /// The volume is full. The model has no such limit: [`crate::refusal`] says what may be
    /// refused.
    NoSpace,
    /// The handle is not open: the operation does nothing on either side.
    NotOpen,
    /// A fork and its origin have both changed something.
    Conflicts,
    /// Anything that a healthy volume never returns.
    Other(String),
}

/// What an operation returns when it succeeds.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Value {
    Nothing,
    Bytes(Vec<u8>),
    Count(u64),
}

/// Result of an operation, on either side.
pub type Outcome = Result<Value, Failure>;

/// What a node is.
#[derive(Clone, Debug)]
pub enum Body {
    /// Names and what they refer to; the directory above.
    Directory(BTreeMap<Vec<u8>, NodeId>, NodeId),
    /// Contents.
    Regular(Contents),
    /// Target.
    Symlink(Vec<u8>),
    /// Kind and device number.
    Special(Special, u32),
}

/// Value of an extended attribute. The hash is computed once, since every snapshot needs it.
#[derive(Clone, Debug)]
pub struct XattrValue {
    /// The value.
    pub bytes: Arc<[u8]>,
    /// Its hash, as in a snapshot.
    pub hash: u64,
}

/// A file, directory, link or special file.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Node {
    pub body: Body,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub xattrs: BTreeMap<Vec<u8>, XattrValue>,
    /// Seconds of the modification time, while known.
    pub modified_seconds: Option<i64>,
    /// Handles that are open.
    pub handles: u32,
    /// The root directory of the subvolume that it belongs to.
    pub subvolume: NodeId,
    /// That subvolume was removed.
    pub is_stale: bool,
    /// The node that it is a copy of, or a copy of a copy; its own number, if there is none.
    pub(crate) number: NodeId,
    /// Which operation was the last that may have changed its content.
    pub(crate) touched: u64,
}

impl Node {
    pub(crate) fn new(body: Body, mode: u32, uid: u32, gid: u32) -> Self {
        let links = if matches!(body, Body::Directory(..)) { 2 } else { 1 };
        Self {
            body,
            mode,
            uid,
            gid,
            links,
            xattrs: BTreeMap::new(),
            modified_seconds: None,
            handles: 0,
            subvolume: 0,
            is_stale: false,
            number: 0,
            touched: 0,
        }
    }
    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        matches!(self.body, Body::Directory(..))
    }
    /// Contents of a regular file.
    pub fn contents(&self) -> Option<&Contents> {
        if let Body::Regular(contents) = &self.body { Some(contents) } else { None }
    }
    /// Names in a directory.
    pub fn entries(&self) -> Option<&BTreeMap<Vec<u8>, NodeId>> {
        if let Body::Directory(entries, _) = &self.body { Some(entries) } else { None }
    }
}

/// Which clients use the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// One client that owns the volume: its own directory is the volume's root, the shared one is
    /// called `shared`.
    Alone,
    /// One of several: its own directory is called `client-N`, the shared one `shared`.
    Among(u8),
}

/// Name of the directory that all clients use.
pub const SHARED_NAME: &[u8] = b"shared";

/// Name of a client's own directory.
pub fn own_name(client: u8) -> Vec<u8> {
    format!("client-{client}").into_bytes()
}

/// The model.
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) nodes: BTreeMap<NodeId, Node>,
    pub(crate) handles: BTreeMap<u8, NodeId>,
    pub(crate) own: NodeId,
    pub(crate) shared: NodeId,
    pub(crate) client: u8,
    pub(crate) layout: Layout,
    /// By the root directory of the subvolume, and name.
    pub(crate) snapshots: BTreeMap<(NodeId, Vec<u8>), Arc<ModelSnapshot>>,
    /// Of each fork, by its root directory, the subvolume that it comes from.
    pub(crate) origins: BTreeMap<NodeId, NodeId>,
    /// Of each fork that a rollback has put into the place of another subvolume, the first one that
    /// had it.
    pub(crate) firsts: BTreeMap<NodeId, NodeId>,
    /// Of each fork that there ever was, the subvolume that it comes from, and what it began with.
    pub(crate) begins: BTreeMap<NodeId, (NodeId, Arc<Tree>)>,
    /// Which numbers of nodes an application has given to which subvolume.
    pub(crate) given: BTreeSet<(NodeId, NodeId)>,
    /// How many operations there were.
    pub(crate) performed: u64,
    next: NodeId,
}

/// What an operation did, for a history.
#[derive(Clone, Debug, Default)]
pub struct Effects {
    /// Nodes whose data changed.
    pub data: BTreeSet<NodeId>,
    /// Nodes whose attributes, names or entries changed, with certainty in the log.
    pub metadata: BTreeSet<NodeId>,
    /// The regular file that took the place of another by rename.
    pub replacement: Option<NodeId>,
    /// The file that was truncated.
    pub truncated: Option<NodeId>,
    /// What was allocated between the two steps of an operation: a range that is to be zero is a
    /// hole before it is filled.
    pub allocated_between: Option<Arc<BTreeSet<u64>>>,
    /// The file that lost whole blocks, and which.
    pub gone: Option<(NodeId, Range<u64>)>,
    /// Node and kind of an fsync.
    pub fsync: Option<(NodeId, bool)>,
    /// A subvolume or a snapshot was made or removed: the namespace is durable when the operation
    /// returns.
    pub is_durable: bool,
    /// Which snapshots there are has changed, or which of them are held.
    pub snapshots: bool,
    /// The number of a new snapshot, and the root directory of its subvolume.
    pub taken: Option<(NodeId, NodeId)>,
    /// The nodes of a new fork.
    pub fork: Option<NewFork>,
    /// What an application of a fork has changed.
    pub applied: Option<Applied>,
}

/// What a fork's origin has got from it.
#[derive(Clone, Debug, Default)]
pub struct Applied {
    /// The nodes that have got the content of others, and of which.
    pub nodes: BTreeMap<NodeId, NodeId>,
}

/// What is in a new fork.
#[derive(Clone, Debug)]
pub struct NewFork {
    /// Its nodes, and of which ones they are copies.
    pub nodes: BTreeMap<NodeId, NodeId>,
    /// The number of the snapshot that it is made of.
    pub snapshot: Option<NodeId>,
}

impl Model {
    /// The state after the harness has made the two bases, both with mode 0755 and owner 0.
    pub fn new(layout: Layout) -> Self {
        let directory = |above| Node::new(Body::Directory(BTreeMap::new(), above), 0o755, 0, 0);
        let mut nodes = BTreeMap::from([(0, directory(0)), (1, directory(0)), (2, directory(0))]);
        let (own, client) = match layout {
            Layout::Alone => (0, 0),
            Layout::Among(client) => (2, client),
        };
        nodes.iter_mut().for_each(|(id, node)| node.number = *id);
        let mut root = BTreeMap::from([(SHARED_NAME.to_vec(), 1)]);
        match layout {
            Layout::Alone => drop(nodes.remove(&2)),
            Layout::Among(client) => drop(root.insert(own_name(client), 2)),
        }
        nodes.insert(
            0,
            Node {
                links: 2 + root.len() as u32,
                ..Node::new(Body::Directory(root, 0), 0o755, 0, 0)
            },
        );
        Self {
            nodes,
            handles: BTreeMap::new(),
            own,
            shared: 1,
            client,
            layout,
            snapshots: BTreeMap::new(),
            origins: BTreeMap::new(),
            firsts: BTreeMap::new(),
            begins: BTreeMap::new(),
            given: BTreeSet::new(),
            performed: 0,
            next: 3,
        }
    }

    /// The client whose names the model's are.
    pub fn client(&self) -> u8 {
        self.client
    }

    /// The node with this number.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// The nodes of the own and the shared directory.
    pub fn bases(&self) -> [NodeId; 2] {
        [self.own, self.shared]
    }

    /// Handles that are open.
    pub fn handles(&self) -> Vec<u8> {
        self.handles.keys().copied().collect()
    }

    /// Every path of the client's, with its node; bases first.
    pub fn paths(&self) -> Vec<(Path, NodeId)> {
        let start = |base| Path { base, names: Vec::new() };
        let mut found = vec![(start(Base::Own), self.own), (start(Base::Shared), self.shared)];
        let mut next = 0;
        while let Some((path, id)) = found.get(next).cloned() {
            next += 1;
            let Some(entries) = self.nodes[&id].entries() else { continue };
            for (bytes, &child) in entries {
                if let Some(name) = Name::all().find(|name| name.bytes(self.client) == *bytes) {
                    found.push((path.join(name), child));
                }
            }
        }
        found
    }

    /// The root directory of a subvolume, as far as the client's namespace shows it.
    pub(crate) fn shown(&self, root: NodeId) -> Option<NodeId> {
        (root != 0 || self.layout == Layout::Alone).then_some(root)
    }

    /// The snapshots: the root directory of the subvolume, the name, and what it holds.
    pub fn snapshots(&self) -> &BTreeMap<(NodeId, Vec<u8>), Arc<ModelSnapshot>> {
        &self.snapshots
    }

    /// Whether a subvolume has snapshots; those that only its forks need have no names.
    pub(crate) fn has_snapshots(&self, root: NodeId) -> bool {
        self.snapshots.keys().any(|(of, _)| *of == root)
    }

    /// The forks: the root directory of each, and that of the subvolume that it comes from.
    pub fn forks(&self) -> &BTreeMap<NodeId, NodeId> {
        &self.origins
    }

    /// A number that no node has.
    pub(crate) fn new_id(&mut self) -> NodeId {
        self.next += 1;
        self.next - 1
    }

    /// The number of the node that is inserted next.
    pub(crate) fn next_id(&self) -> NodeId {
        self.next
    }

    pub(crate) fn insert(&mut self, node: Node) -> NodeId {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, Node { number: id, ..node });
        id
    }

    pub(crate) fn get(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("ids come from the model")
    }

    pub(crate) fn entries(&mut self, directory: NodeId) -> &mut BTreeMap<Vec<u8>, NodeId> {
        match &mut self.get(directory).body {
            Body::Directory(entries, _) => entries,
            other => unreachable!("the caller checked that {other:?} is a directory"),
        }
    }

    /// Removes a node that has neither names nor handles.
    pub(crate) fn reap(&mut self, id: NodeId) {
        if self.nodes[&id].links == 0 && self.nodes[&id].handles == 0 {
            self.nodes.remove(&id);
        }
    }

    fn lookup(&self, directory: NodeId, name: Name) -> Result<NodeId, Failure> {
        let bytes = name.bytes(self.client);
        Self::expect_name(&bytes)?;
        let entries = self.nodes[&directory].entries().ok_or(Failure::NotDirectory)?;
        entries.get(&bytes).copied().ok_or(Failure::NotFound)
    }

    /// The node that a path refers to.
    pub fn resolve(&self, path: &Path) -> Result<NodeId, Failure> {
        let base = if path.base == Base::Own { self.own } else { self.shared };
        path.names.iter().try_fold(base, |directory, &name| self.lookup(directory, name))
    }

    /// The directory that a path's last name stands in, and the name; neither is checked.
    pub(crate) fn place(&self, path: &Path) -> Result<(NodeId, Vec<u8>), Failure> {
        let (directory, name) = path.split().ok_or(Failure::InvalidArgument)?;
        Ok((self.resolve(&directory)?, name.bytes(self.client)))
    }

    /// As [`Model::place`], with a name that is possible and a directory that is one.
    pub(crate) fn resolve_parent(&self, path: &Path) -> Result<(NodeId, Vec<u8>), Failure> {
        let (parent, name) = self.place(path)?;
        Self::expect_name(&name)?;
        self.expect_directory(parent)?;
        Ok((parent, name))
    }

    pub(crate) fn expect_name(name: &[u8]) -> Result<(), Failure> {
        if name.len() > 255 { Err(Failure::NameLength) } else { Ok(()) }
    }

    pub(crate) fn expect_directory(&self, node: NodeId) -> Result<(), Failure> {
        if self.nodes[&node].is_directory() { Ok(()) } else { Err(Failure::NotDirectory) }
    }

    /// The node that a target refers to.
    pub fn target(&self, target: &Target) -> Result<NodeId, Failure> {
        match target {
            Target::Path(path) => self.resolve(path),
            Target::Handle(handle) => {
                let node = *self.handles.get(handle).ok_or(Failure::NotOpen)?;
                if self.nodes[&node].is_stale { Err(Failure::Stale) } else { Ok(node) }
            }
        }
    }

    /// Whether a node is the root directory of a subvolume.
    pub fn is_subvolume(&self, id: NodeId) -> bool {
        self.nodes[&id].subvolume == id
    }

    /// Whether names of other subvolumes stand in the one with the root directory `root`.
    pub(crate) fn holds_subvolumes(&self, root: NodeId) -> bool {
        let is_inside = |directory: NodeId| self.nodes[&directory].subvolume == root;
        self.nodes.iter().any(|(id, node)| {
            let above = if let Body::Directory(_, above) = node.body { above } else { root };
            *id != root && node.subvolume == *id && !node.is_stale && is_inside(above)
        })
    }

    /// Removes the subvolume with the root directory `root`, with all that is in it.
    pub(crate) fn remove_tree(&mut self, root: NodeId) {
        self.origins.remove(&root);
        self.nodes.retain(|_, node| node.subvolume != root || node.handles > 0);
        for node in self.nodes.values_mut().filter(|node| node.subvolume == root) {
            (node.is_stale, node.links) = (true, 0);
        }
    }

    /// Whether `directory` is `above` or lies below it.
    pub(crate) fn is_below(&self, mut directory: NodeId, above: NodeId) -> bool {
        loop {
            if directory == above {
                return true;
            }
            let Body::Directory(_, parent) = self.nodes[&directory].body else { return false };
            if parent == directory {
                return false;
            }
            directory = parent;
        }
    }
}
