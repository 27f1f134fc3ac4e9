//! Makes new inputs from old ones.
use cairn_environment::random::Seeded;

/// Longest input, in bytes.
pub const BYTES_MAX: usize = 240;

/// A new input, made from one or two of `corpus`.
pub fn mutate(corpus: &[Vec<u8>], random: &mut Seeded) -> Vec<u8> {
    let mut bytes = pick(corpus, random).to_vec();
    if bytes.is_empty() {
        bytes.push(random.next_u64() as u8);
    }
    for _ in 0..1 + random.below(4) {
        change(&mut bytes, corpus, random);
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

fn pick<'c>(corpus: &'c [Vec<u8>], random: &mut Seeded) -> &'c [u8] {
    // Every other time one of the newest, which have been tried least.
    let count = corpus.len() as u64;
    let back = if random.chance(1, 2) { random.below(count) } else { random.below(count.min(64)) };
    &corpus[(count - 1 - back) as usize]
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Seeded) {
    let length = bytes.len() as u64;
    let at = random.below(length.max(1)) as usize;
    match random.below(8) {
        0 | 1 if at < bytes.len() => bytes[at] = random.next_u64() as u8,
        2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        3 if at < bytes.len() => {
            bytes[at] = bytes[at].wrapping_add(random.below(5) as u8).wrapping_sub(2)
        }
        4 => drop(bytes.drain(at..(at + random.below(6) as usize).min(bytes.len()))),
        5 => {
            let new: Vec<u8> = (0..4 + random.below(12)).map(|_| random.next_u64() as u8).collect();
            drop(bytes.splice(at..at, new));
        }
        6 => bytes.extend((0..4 + random.below(12)).map(|_| random.next_u64() as u8)),
        _ => {
            let other = pick(corpus, random);
            let from = random.below(other.len().max(1) as u64) as usize;
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from.min(other.len())..]);
        }
    }
}

/// A shorter input for which `fails` still holds: parts are left out as long as that works, at most
/// `tries` times.
pub fn shrink(bytes: &[u8], tries: usize, mut fails: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut best = bytes.to_vec();
    let mut left = tries;
    let mut part = (best.len() / 2).max(1);
    loop {
        let (mut at, mut changed) = (1, false);
        while at < best.len() && left > 0 {
            let candidate = [&best[..at], &best[(at + part).min(best.len())..]].concat();
            left -= 1;
            if fails(&candidate) {
                best = candidate;
                changed = true;
            } else {
                at += part;
            }
        }
        if left == 0 || (part == 1 && !changed) {
            return best;
        }
        part = (part / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinking_keeps_what_fails() {
        let bytes: Vec<u8> = (0..100).collect();
        let small = shrink(&bytes, 1000, |bytes| bytes.contains(&33) && bytes.contains(&70));
        assert_eq!(small, [0, 33, 70]);
    }

    #[test]
    fn new_inputs_differ_and_stay_short() {
        let mut random = Seeded::new(5);
        let corpus = vec![vec![1, 2, 3], vec![0; BYTES_MAX]];
        let inputs: Vec<_> = (0..200).map(|_| mutate(&corpus, &mut random)).collect();
        assert!(inputs.iter().all(|input| input.len() <= BYTES_MAX));
        assert!(inputs.iter().filter(|input| !corpus.contains(input)).count() > 150);
    }
}
