//! What is known of a dead list, while cuts add to it and cleaners read it.
use crate::store::list_births::{ItemBirths, ListBirths};
use cairn_environment::Rank;
use cairn_environment::lock::Mutex;
use cairn_environment::simulation::schedules;
use cairn_environment::thread;
use cairn_format::{Generation, Key};
use std::sync::Arc;

const LIST: u64 = 7;
/// Each cut adds so many items.
const ITEMS: u64 = 2;
const CUTS: u64 = 2;

/// The list, as the tree of dead runs has it.
struct List {
    known: ListBirths,
    items: Mutex<Vec<Key>>,
}

impl List {
    fn cut(&self, generation: u64) {
        self.known.while_adding(LIST, || {
            for item in 0..ITEMS {
                self.items.lock().push(Key::dead_runs(LIST, Generation(generation), item));
            }
        });
    }

    /// As a cleanup reads it: item by item.
    fn read(&self) {
        if self.known.of(LIST).is_some() {
            return;
        }
        let (reading, mut found) = (self.known.begin(LIST), Vec::new());
        while let Some(key) = self.items.lock().get(found.len()).copied() {
            found.push(ItemBirths { key, births: Generation(1)..=Generation(1) });
        }
        self.known.end(reading, found);
    }
}

#[test]
fn what_is_known_after_a_cut_is_all_there_is() {
    shuttle::check_random(
        || {
            let items = Mutex::new(Rank::LEAF, Vec::new());
            let list = Arc::new(List { known: ListBirths::new(), items });
            let cleaners: Vec<_> = (0..2)
                .map(|_| {
                    let list = Arc::clone(&list);
                    thread::spawn("cleaner", move || list.read())
                })
                .collect();
            for generation in 1..=CUTS {
                list.cut(generation);
            }
            cleaners.into_iter().for_each(|cleaner| cleaner.join().expect("no panic"));
            if let Some(known) = list.known.of(LIST) {
                assert_eq!(known.len() as u64, CUTS * ITEMS, "known in part");
            }
        },
        schedules(5000),
    );
}
