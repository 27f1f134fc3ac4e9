//! File contents that say of themselves whose they are, and whether they are whole.
use cairn_environment::random::Seeded;

const HEADER_BYTES: usize = 24;

/// An identity for part `part` of what belongs to `seed`; no two are alike.
pub fn identity(seed: u64, part: u64) -> u64 {
    Seeded::new(Seeded::new(seed).next_u64() ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93)).next_u64()
}

/// `length` bytes (at least 24) that no other identity, version or length has.
pub fn content(identity: u64, version: u64, length: usize) -> Vec<u8> {
    assert!(length >= HEADER_BYTES, "too short for its own description");
    let mut bytes = Vec::with_capacity(length + 8);
    for word in [identity, version, length as u64] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    let mut random = Seeded::new(identity ^ version.rotate_left(32));
    while bytes.len() < length {
        bytes.extend_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The version of `bytes`, which must be the whole content of `identity` in some version.
pub fn version(identity: u64, bytes: &[u8]) -> Result<u64, String> {
    let word = |index: usize| {
        bytes
            .get(index * 8..index * 8 + 8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
    };
    let (Some(owner), Some(version), Some(length)) = (word(0), word(1), word(2)) else {
        return Err(format!("only {} bytes", bytes.len()));
    };
    if owner != identity {
        return Err(format!(
            "holds {} instead of its own data",
            if owner == 0 { "zeros".to_owned() } else { format!("data of {owner:#x}") }
        ));
    }
    if length != bytes.len() as u64 {
        return Err(format!("{} bytes long, but version {version} has {length}", bytes.len()));
    }
    let expected = content(identity, version, bytes.len());
    match expected.iter().zip(bytes).position(|(expected, found)| expected != found) {
        None => Ok(version),
        Some(at) => Err(format!("torn: version {version} up to byte {at}, then something else")),
    }
}
