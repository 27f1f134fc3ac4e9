//! A volume of the model: what one superblock and the bitmaps would say, and how a reference dies.
//!
//! A tree holds two files, each in a leaf of its own with one extent; a root stands above the
//! leaves while there are two of them. So a removal makes an older leaf the root.
use crate::mistakes::Mistake;

pub type Outcome = Result<(), String>;

/// No upper end of an interval.
pub const OPEN: u8 = u8::MAX;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Reference {
    pub birth: u8,
    pub block: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Leaf {
    pub node: Reference,
    pub extent: Reference,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tree {
    pub top: Option<Reference>,
    pub leaves: [Option<Leaf>; 2],
}

impl Tree {
    pub fn references(&self) -> impl Iterator<Item = Reference> + use<> {
        let of_leaves = self.leaves.into_iter().flatten().flat_map(|leaf| [leaf.node, leaf.extent]);
        self.top.into_iter().chain(of_leaves)
    }

    fn root(&self) -> Option<Reference> {
        self.top.or_else(|| self.leaves.iter().flatten().next().map(|leaf| leaf.node))
    }

    pub fn is_full(&self) -> bool {
        self.leaves.iter().all(Option::is_some)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// It has a head of its own.
    Live,
    /// Its head is the newest snapshot.
    Headless,
    /// Only dying records are left.
    Gone,
}

/// A lineage: its snapshots and lists name it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Subvolume {
    pub id: u8,
    pub stage: Stage,
    pub tree: Tree,
    pub origin: Option<(u8, u8)>,
    pub boundary: u8,
    pub list: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Snapshot {
    pub subvolume: u8,
    pub generation: u8,
    pub tree: Tree,
    pub deferred: bool,
    pub clones: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct List {
    pub id: u8,
    pub subvolume: u8,
    pub since: u8,
    pub runs: Vec<Reference>,
    pub discarded: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Cleanup {
    pub subvolume: u8,
    /// Births above `oldest`, up to `newest`.
    pub oldest: u8,
    pub newest: u8,
    /// Lists since `from`, before `to`.
    pub from: u8,
    pub to: u8,
}

impl Cleanup {
    pub fn takes(&self, list: &List, run: Reference, mistake: Option<Mistake>) -> bool {
        self.subvolume == list.subvolume
            && (!list.discarded || mistake == Some(Mistake::DiscardedCleaned))
            && (self.from..self.to).contains(&list.since)
            && self.oldest < run.birth
            && run.birth <= self.newest
    }
}

/// A tree that is walked and freed; what the walk has passed is no longer in it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Dying {
    pub subvolume: u8,
    pub boundary: u8,
    pub tree: Tree,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Volume {
    /// The running transaction, or the one whose cut this is.
    pub generation: u8,
    pub next_block: u8,
    pub next_id: u8,
    pub referenced: Vec<u8>,
    /// Block and the transaction that pins it.
    pub pinned: Vec<(u8, u8)>,
    pub subvolumes: Vec<Subvolume>,
    pub snapshots: Vec<Snapshot>,
    pub lists: Vec<List>,
    pub cleanups: Vec<Cleanup>,
    pub dying: Vec<Dying>,
    pub mistake: Option<Mistake>,
}

impl Volume {
    /// One subvolume with both files.
    pub fn new(mistake: Option<Mistake>) -> Self {
        let [top, a, b, c, d] = [0, 1, 2, 3, 4].map(|block| Reference { birth: 1, block });
        let leaves = [Some(Leaf { node: a, extent: b }), Some(Leaf { node: c, extent: d })];
        let tree = Tree { top: Some(top), leaves };
        let head =
            Subvolume { id: 0, stage: Stage::Live, tree, origin: None, boundary: 0, list: 1 };
        let list = List { id: 1, subvolume: 0, since: 0, runs: Vec::new(), discarded: false };
        Volume {
            generation: 1,
            next_block: 5,
            next_id: 2,
            referenced: vec![0, 1, 2, 3, 4],
            pinned: Vec::new(),
            subvolumes: vec![head],
            snapshots: Vec::new(),
            lists: vec![list],
            cleanups: Vec::new(),
            dying: Vec::new(),
            mistake,
        }
    }

    pub fn has(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    pub fn find(&self, id: u8) -> Option<&Subvolume> {
        self.subvolumes.iter().find(|subvolume| subvolume.id == id)
    }

    pub fn subvolume(&mut self, id: u8) -> Result<&mut Subvolume, String> {
        let found = self.subvolumes.iter_mut().find(|subvolume| subvolume.id == id);
        found.ok_or_else(|| format!("subvolume {id} is unknown"))
    }

    /// Generations of a lineage's snapshots, ascending.
    pub fn members(&self, id: u8) -> Vec<u8> {
        let own = self.snapshots.iter().filter(|snapshot| snapshot.subvolume == id);
        let mut members: Vec<u8> = own.map(|snapshot| snapshot.generation).collect();
        members.sort_unstable();
        members
    }

    /// Births up to here are not the lineage's: those of its origin, if it is a clone.
    pub fn origin(&self, id: u8) -> u8 {
        self.find(id).and_then(|subvolume| subvolume.origin).map_or(0, |(_, generation)| generation)
    }

    pub fn has_cleanups(&self, id: u8) -> bool {
        self.cleanups.iter().any(|cleanup| cleanup.subvolume == id)
    }

    pub fn new_list(&mut self, subvolume: u8, since: u8) -> u8 {
        let id = self.next_id;
        self.next_id += 1;
        self.lists.push(List { id, subvolume, since, runs: Vec::new(), discarded: false });
        id
    }

    fn new_reference(&mut self) -> Reference {
        let block = self.next_block;
        self.next_block += 1;
        self.referenced.push(block);
        Reference { birth: self.generation, block }
    }

    /// A block loses its reference, and is free at once.
    pub fn free(&mut self, block: u8) -> Outcome {
        let place = self.referenced.iter().position(|&other| other == block);
        let place = place.ok_or_else(|| format!("block {block} is freed twice"))?;
        self.referenced.swap_remove(place);
        Ok(())
    }

    /// A block loses its reference, and is free when this transaction is durable.
    pub fn pin(&mut self, block: u8) -> Outcome {
        self.free(block)?;
        self.pinned.push((block, self.generation));
        Ok(())
    }

    /// The only place where a head gives blocks up.
    fn kill(&mut self, head: u8, dead: Reference, is_node: bool) -> Outcome {
        let free_at_once = is_node || self.has(Mistake::DataFreeAtOnce);
        if dead.birth == self.generation && free_at_once {
            return self.free(dead.block);
        }
        let excluded = self.has(Mistake::BoundaryExcluded);
        let subvolume = self.subvolume(head)?;
        let (boundary, list) = (subvolume.boundary, subvolume.list);
        if dead.birth <= self.origin(head) && self.has(Mistake::InheritedNotNoted) {
            return Ok(());
        }
        if dead.birth < boundary || (dead.birth == boundary && !excluded) {
            let list = self.lists.iter_mut().find(|other| other.id == list);
            list.ok_or("a head without a list")?.runs.push(dead);
            return Ok(());
        }
        self.pin(dead.block)
    }

    fn changed_node(&mut self, head: u8, node: Reference) -> Result<Reference, String> {
        if node.birth == self.generation {
            return Ok(node);
        }
        self.kill(head, node, true)?;
        Ok(self.new_reference())
    }

    /// Writes a file: an extent that the log names, or a new one.
    pub fn put(
        &mut self,
        head: u8,
        file: usize,
        logged: Option<Reference>,
    ) -> Result<Reference, String> {
        let mut tree = self.subvolume(head)?.tree;
        let extent = match logged {
            Some(extent) => {
                self.referenced.push(extent.block);
                extent
            }
            None => self.new_reference(),
        };
        let node = match tree.leaves[file] {
            Some(leaf) => {
                self.kill(head, leaf.extent, false)?;
                self.changed_node(head, leaf.node)?
            }
            None => self.new_reference(),
        };
        tree.leaves[file] = Some(Leaf { node, extent });
        tree.top = match tree.top {
            Some(top) => Some(self.changed_node(head, top)?),
            None => tree.is_full().then(|| self.new_reference()),
        };
        self.subvolume(head)?.tree = tree;
        Ok(extent)
    }

    /// Removes one of two files: the other leaf, however old, becomes the root.
    pub fn remove(&mut self, head: u8, file: usize) -> Outcome {
        let mut tree = self.subvolume(head)?.tree;
        let (Some(leaf), Some(top)) = (tree.leaves[file].take(), tree.top.take()) else {
            return Err("the file is not there".into());
        };
        self.kill(head, leaf.extent, false)?;
        self.kill(head, leaf.node, true)?;
        self.kill(head, top, true)?;
        self.subvolume(head)?.tree = tree;
        Ok(())
    }

    /// The tree that a snapshot of the head gets.
    pub fn tree_at_cut(&self, head: &Subvolume) -> Tree {
        let newest = self.members(head.id).last().copied();
        let newest = self
            .snapshots
            .iter()
            .find(|snapshot| snapshot.subvolume == head.id && Some(snapshot.generation) == newest);
        let old_root = head.tree.root().is_some_and(|root| root.birth <= head.boundary);
        match newest {
            Some(snapshot) if old_root && self.has(Mistake::UnchangedByGeneration) => snapshot.tree,
            _ => head.tree,
        }
    }
}
