//! Names whose hashes are equal, so that they share the slots of one hash value in a directory.
//!
//! The hash is keyed by a seed of the volume, so the volumes of these tests are made with
//! [`HASH_SEED`].
//!
//! `cargo run --release -p cairn-torture --example find_colliding_names` found the names.

/// The seed of the volumes in which the names collide.
pub const HASH_SEED: [u8; 16] = *b"equal name slots";

/// Names of each of four clients, in pairs with equal hashes. A client's names begin with its
/// digit.
pub const NAMES: [[&str; 6]; 4] = [
    ["01b2c6ef", "0220a9cb", "020cd2d", "0481bdf", "01601b94", "02d1f328"],
    ["118c82fd", "119f5cc4", "1144303b", "11fe9869", "12aa577", "1fe68c2"],
    ["21fa59ab", "21fc83f5", "212a0af8", "2211bb1a", "2cb3190", "213d97e4"],
    ["3966998", "32bf757e", "31c7c14d", "32878f9c", "32420fb", "311d5ff4"],
];

/// Names of extended attributes, in pairs with equal hashes.
pub const XATTR_NAMES: [&str; 6] = [
    "user.ca92ae5",
    "user.c2103904",
    "user.ce13f4",
    "user.c2d61a4f",
    "user.ce4780d",
    "user.c23cadbf",
];

#[cfg(test)]
mod tests {
    use super::*;
    use cairn_format::hash_name;

    #[test]
    fn the_pairs_collide() {
        for pair in NAMES.iter().chain([&XATTR_NAMES]).flat_map(|names| names.chunks(2)) {
            let [first, second] = [0, 1].map(|index| pair[index].as_bytes());
            assert_eq!(hash_name(&HASH_SEED, first), hash_name(&HASH_SEED, second), "{pair:?}");
            assert_ne!(first, second);
        }
    }
}
