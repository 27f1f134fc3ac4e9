//! Finds names whose hashes are equal under [`HASH_SEED`], for the table in `colliding.rs`: pairs
//! for each client of a test, and pairs of names of extended attributes. It takes half a minute.
use cairn_format::hash_name;
use cairn_torture::colliding::HASH_SEED;

const NAMES: u32 = 48_000_000;

fn main() {
    for prefix in ["0", "1", "2", "3", "user.c"] {
        let name = |number: u32| format!("{prefix}{number:x}").into_bytes();
        let mut hashes: Vec<(u64, u32)> =
            (0..NAMES).map(|number| (hash_name(&HASH_SEED, &name(number)), number)).collect();
        hashes.sort_unstable();
        for pair in hashes.windows(2).filter(|pair| pair[0].0 == pair[1].0).take(3) {
            let [first, second] =
                [pair[0].1, pair[1].1].map(|number| format!("{prefix}{number:x}"));
            println!("{first} {second}");
        }
    }
}
