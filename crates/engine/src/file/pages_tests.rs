//! Pages against a model that knows each block by itself.
use super::*;
use cairn_environment::random::Seeded;
use std::collections::BTreeMap as Model;

const BLOCKS: u64 = 600;

fn each(blocks: Range<FileBlock>) -> impl Iterator<Item = FileBlock> {
    (blocks.start.0..blocks.end.0).map(FileBlock)
}

struct Checked {
    pages: Pages,
    pool: BlockPool,
    model: Model<FileBlock, (u8, PageState)>,
    /// What was taken to be written, with the content that it must keep.
    taken: Vec<(Segment, Vec<u8>)>,
    flights: u64,
    /// Flights under way, and the blocks of each.
    flying: Vec<(u64, Segment)>,
}

impl Checked {
    fn new() -> Self {
        let pool = BlockPool::new(8 << 20);
        Self {
            pages: Pages::default(),
            pool,
            model: Model::new(),
            taken: Vec::new(),
            flights: 0,
            flying: Vec::new(),
        }
    }

    fn write(&mut self, block: FileBlock, blocks: u64, fill: u8) {
        let data = self.pool.copy_of(&vec![fill; blocks as usize * BLOCK_SIZE]);
        self.pages.insert(block, data, &self.pool);
        self.model.extend(each(block..block + blocks).map(|b| (b, (fill, PageState::Dirty))));
    }

    fn edit(&mut self, block: FileBlock, fill: u8) {
        self.pages.edit(block, None, &self.pool, |bytes| bytes.fill(fill));
        self.model.insert(block, (fill, PageState::Dirty));
    }

    fn remove(&mut self, gone: Range<FileBlock>) {
        self.pages.remove(gone.clone(), &self.pool);
        self.model.retain(|block, _| !gone.contains(block));
    }

    fn take(&mut self, from: FileBlock, blocks_max: u64, stretches_max: usize) {
        let segments = self.pages.take_dirty(from, blocks_max, stretches_max);
        let mut expected = Vec::new();
        let (mut stretches, mut before) = (0, None);
        for (block, (_, state)) in
            self.model.range_mut(from..).filter(|(_, (_, state))| *state == PageState::Dirty)
        {
            let new = before != Some(*block);
            if expected.len() as u64 == blocks_max || (new && stretches == stretches_max) {
                break;
            }
            stretches += usize::from(new);
            before = Some(block.next());
            *state = PageState::Writing;
            expected.push(*block);
        }
        assert_eq!(
            segments.iter().flat_map(|segment| each(segment.blocks())).collect::<Vec<_>>(),
            expected
        );
        self.taken.extend(segments.into_iter().map(|segment| {
            let content = segment.data.to_vec();
            (segment, content)
        }));
    }

    fn model_of(&mut self, segment: &Segment, before: PageState, after: Option<PageState>) {
        for block in each(segment.blocks()) {
            if self.model.get(&block).is_some_and(|(_, state)| *state == before) {
                match after {
                    Some(after) => self.model.get_mut(&block).unwrap().1 = after,
                    None => drop(self.model.remove(&block)),
                }
            }
        }
    }

    /// What was taken is written, goes with the log, or fails.
    fn finish(&mut self, random: &mut Seeded) {
        for (segment, content) in std::mem::take(&mut self.taken) {
            assert!(segment.data[..] == content[..], "changed in flight");
            let blocks = segment.blocks();
            match random.below(3) {
                0 => {
                    self.pages.written(blocks, None);
                    self.model_of(&segment, PageState::Writing, None);
                }
                1 => {
                    self.pages.not_written(blocks);
                    self.model_of(&segment, PageState::Writing, Some(PageState::Dirty));
                }
                _ => {
                    self.flights += 1;
                    let flight = self.flights;
                    self.pages.written(blocks, Some(flight));
                    self.model_of(&segment, PageState::Writing, Some(PageState::Logged(flight)));
                    self.flying.push((flight, segment));
                }
            }
        }
    }

    /// A flight lands, whichever: others with newer content of the same blocks may be under way.
    fn land(&mut self, random: &mut Seeded) {
        if self.flying.is_empty() {
            return;
        }
        let (flight, segment) =
            self.flying.swap_remove(random.below(self.flying.len() as u64) as usize);
        let written = random.chance(1, 2);
        self.pages.landed(segment.blocks(), flight, written);
        self.model_of(&segment, PageState::Logged(flight), (!written).then_some(PageState::Dirty));
    }

    fn check(&self) {
        let found: Vec<(FileBlock, u8)> = self
            .pages
            .within(FileBlock::FIRST..FileBlock::END)
            .flat_map(|(blocks, bytes)| {
                assert_eq!(bytes.len() as u64, (blocks.end - blocks.start) * BLOCK_SIZE as u64);
                each(blocks).zip(bytes.chunks(BLOCK_SIZE).map(|block| block[0])).collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(
            found,
            self.model.iter().map(|(block, (fill, _))| (*block, *fill)).collect::<Vec<_>>()
        );
        let count = |of: fn(PageState) -> bool| {
            self.model.values().filter(|(_, state)| of(*state)).count() as u64
        };
        assert_eq!(self.pages.blocks(), self.model.len() as u64);
        assert_eq!(self.pages.dirty(), count(|state| state == PageState::Dirty));
        assert_eq!(self.pages.logged(), count(|state| matches!(state, PageState::Logged(_))));
        assert_eq!(self.pages.last(), self.model.last_key_value().map(|(block, _)| *block));
    }
}

#[test]
fn pages_are_what_was_written() {
    let mut random = Seeded::new(7);
    for _ in 0..20 {
        let mut checked = Checked::new();
        for step in 0..200 {
            let (block, fill) = (FileBlock(random.below(BLOCKS)), step as u8);
            match random.below(9) {
                0 | 1 => checked.write(block, 1 + random.below(64), fill),
                2 | 3 => checked.edit(block, fill),
                4 => checked.remove(block..block + 1 + random.below(50)),
                5 => checked.take(block, 1 + random.below(100), 1 + random.below(6) as usize),
                6 => checked.finish(&mut random),
                _ => checked.land(&mut random),
            }
            checked.check();
        }
    }
}

#[test]
fn a_page_alone_is_changed_where_it_is_and_a_shared_one_is_copied() {
    let mut checked = Checked::new();
    checked.write(FileBlock(10), 16, 1);
    let edited = FileBlock(12);
    let address =
        |checked: &Checked| checked.pages.within(edited..edited.next()).next().unwrap().1.as_ptr();
    let before = address(&checked);
    checked.edit(edited, 2);
    assert_eq!(address(&checked), before);
    checked.take(FileBlock::FIRST, 100, 100);
    checked.edit(edited, 3);
    assert_ne!(address(&checked), before);
    checked.check();
    assert_eq!(checked.taken[0].0.data[2 * BLOCK_SIZE], 2);
}

/// Writes that overlap nearly whole leave little of each buffer in use.
#[test]
fn what_is_left_of_a_buffer_does_not_keep_it() {
    let mut checked = Checked::new();
    for block in 0..200 {
        checked.write(FileBlock(block), 64, block as u8);
    }
    checked.check();
    let kept: usize = checked.pages.runs.values().map(|run| run.data.kept_blocks()).sum();
    let used = checked.pages.blocks() as usize;
    assert!(kept <= used * KEPT_SHARE_MIN, "{kept} blocks for {used}");
    // Cut in the middle: what stays on both sides is small, too.
    let cut = FileBlock(1000);
    checked.write(cut, 256, 5);
    checked.remove(cut + 1..cut + 255);
    assert!(checked.pages.runs.range(cut..).all(|(_, run)| run.data.kept_blocks() == 1));
}

#[test]
fn a_part_of_an_absent_block_stands_on_its_base_or_on_zeros() {
    let pool = BlockPool::new(1 << 20);
    drop(pool.copy_of(&[9; BLOCK_SIZE]));
    let mut pages = Pages::default();
    pages.edit(FileBlock(3), None, &pool, |bytes| bytes[10..20].fill(1));
    let mut base = pool.take(BLOCK_SIZE);
    base.fill(4);
    pages.edit(FileBlock(5), Some(base), &pool, |bytes| bytes[0..5].fill(2));
    let block = |block: u64| {
        let block = FileBlock(block);
        pages.within(block..block.next()).next().unwrap().1
    };
    assert_eq!((block(3)[9], block(3)[10], block(3)[20], block(3)[4095]), (0, 1, 0, 0));
    assert_eq!((block(5)[4], block(5)[5]), (2, 4));
}
