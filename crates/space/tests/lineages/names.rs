//! Equal states get equal names: blocks by the order in which trees show them, generations and ids
//! by their rank.
use crate::machine::Machine;
use crate::volume::{OPEN, Reference, Tree, Volume};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Block,
    Generation,
    Id,
}

type Visit<'a> = &'a mut dyn FnMut(Kind, &mut u8);

fn reference(reference: &mut Reference, visit: Visit) {
    visit(Kind::Generation, &mut reference.birth);
    visit(Kind::Block, &mut reference.block);
}

fn tree(tree: &mut Tree, visit: Visit) {
    for leaf in tree.leaves.iter_mut().flatten() {
        reference(&mut leaf.node, visit);
        reference(&mut leaf.extent, visit);
    }
    tree.top.iter_mut().for_each(|top| reference(top, visit));
}

fn volume(volume: &mut Volume, visit: Visit) {
    visit(Kind::Generation, &mut volume.generation);
    for subvolume in &mut volume.subvolumes {
        visit(Kind::Id, &mut subvolume.id);
        visit(Kind::Id, &mut subvolume.list);
        visit(Kind::Generation, &mut subvolume.boundary);
        if let Some((id, generation)) = &mut subvolume.origin {
            visit(Kind::Id, id);
            visit(Kind::Generation, generation);
        }
        tree(&mut subvolume.tree, visit);
    }
    for snapshot in &mut volume.snapshots {
        visit(Kind::Id, &mut snapshot.subvolume);
        visit(Kind::Generation, &mut snapshot.generation);
        tree(&mut snapshot.tree, visit);
    }
    for dying in &mut volume.dying {
        visit(Kind::Id, &mut dying.subvolume);
        visit(Kind::Generation, &mut dying.boundary);
        tree(&mut dying.tree, visit);
    }
    for list in &mut volume.lists {
        visit(Kind::Id, &mut list.id);
        visit(Kind::Id, &mut list.subvolume);
        visit(Kind::Generation, &mut list.since);
        list.runs.iter_mut().for_each(|run| reference(run, visit));
    }
    for cleanup in &mut volume.cleanups {
        visit(Kind::Id, &mut cleanup.subvolume);
        for generation in
            [&mut cleanup.oldest, &mut cleanup.newest, &mut cleanup.from, &mut cleanup.to]
        {
            visit(Kind::Generation, generation);
        }
    }
    for (block, generation) in &mut volume.pinned {
        visit(Kind::Block, block);
        visit(Kind::Generation, generation);
    }
    volume.referenced.iter_mut().for_each(|block| visit(Kind::Block, block));
}

fn machine(machine: &mut Machine, visit: Visit) {
    volume(&mut machine.running, visit);
    machine.frozen.iter_mut().for_each(|frozen| volume(frozen, visit));
    volume(&mut machine.durable, visit);
    for entry in &mut machine.log {
        visit(Kind::Generation, &mut entry.generation);
        visit(Kind::Id, &mut entry.head);
        entry.extent.iter_mut().for_each(|extent| reference(extent, visit));
    }
}

fn sort(volume: &mut Volume) {
    volume.referenced.sort_unstable();
    volume.pinned.sort_unstable();
    volume.lists.iter_mut().for_each(|list| list.runs.sort_unstable());
    volume.lists.sort_by_key(|list| (list.subvolume, list.since, list.id));
    volume.snapshots.sort_by_key(|snapshot| (snapshot.subvolume, snapshot.generation));
}

pub fn canonical(state: &mut Machine) {
    let mut blocks = [None; 256];
    let mut next_block = 0;
    let mut present = [[false; 256]; 2];
    machine(state, &mut |kind, name| {
        let place = usize::from(*name);
        match kind {
            Kind::Block if blocks[place].is_none() => {
                blocks[place] = Some(next_block);
                next_block += 1;
            }
            Kind::Block => {}
            Kind::Generation => present[0][place] = true,
            Kind::Id => present[1][place] = true,
        }
    });
    present[0][0] = true;
    let ranks = present.map(|present| {
        let mut rank = 0;
        present.map(|is_there| {
            let own = rank;
            rank += u8::from(is_there);
            own
        })
    });
    machine(state, &mut |kind, name| {
        let place = usize::from(*name);
        match kind {
            Kind::Block => *name = blocks[place].unwrap_or(*name),
            Kind::Generation if *name == OPEN => {}
            Kind::Generation => *name = ranks[0][place],
            Kind::Id => *name = ranks[1][place],
        }
    });
    let ids = present[1].iter().filter(|is_there| **is_there).count();
    let Machine { running, frozen, durable, .. } = state;
    for volume in frozen.iter_mut().chain([running, durable]) {
        volume.next_block = next_block;
        volume.next_id = u8::try_from(ids).expect("few ids");
        sort(volume);
    }
}
