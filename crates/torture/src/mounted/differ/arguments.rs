//! Random arguments of calls: names, modes, owners, times, offsets. Each prefers what is near a
//! limit.
use cairn_environment::random::Seeded;

const BLOCK: i64 = 4096;
/// The longest name that exists.
const NAME_BYTES_MAX: usize = 255;
/// The longest target of a symbolic link.
const TARGET_BYTES_MAX: usize = 4095;

fn pick<T: Copy>(random: &mut Seeded, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

/// A name of a directory entry.
pub fn name(random: &mut Seeded) -> String {
    match random.below(100) {
        0 => "n".repeat(NAME_BYTES_MAX),
        1 => "m".repeat(NAME_BYTES_MAX + 1),
        2 => ".".into(),
        3 => "..".into(),
        4 => "\u{fc} \n\\".into(),
        5 => "l".repeat(NAME_BYTES_MAX - random.below(30) as usize),
        6..20 => format!("x{}", random.below(40)),
        _ => pick(random, &["a", "b", "c", "d", "e", "f", "g"]).into(),
    }
}

/// A target of about the greatest length.
pub fn long_target(random: &mut Seeded) -> String {
    let length = pick(
        random,
        &[59, 60, 61, 1000, TARGET_BYTES_MAX - 1, TARGET_BYTES_MAX, TARGET_BYTES_MAX + 1],
    );
    "t/".repeat(length / 2) + if length % 2 == 1 { "t" } else { "" }
}

/// A mode of a file, often with one of the three highest bits.
pub fn mode(random: &mut Seeded) -> u32 {
    let plain = pick(random, &[0o777, 0o777, 0o755, 0o700, 0o644, 0o666, 0o070, 0o005, 0, 0o751]);
    let high = pick(random, &[0, 0, 0, 0, 0, 0o4000, 0o2000, 0o6000, 0o1000, 0o7000]);
    let exotic = random.chance(1, 10);
    if exotic { random.below(0o10000) as u32 } else { plain | high }
}

/// A user and a group, each perhaps none.
pub fn owner(random: &mut Seeded) -> [u32; 2] {
    let none = u32::MAX;
    [
        pick(random, &[none, none, 0, 1001, 1002, 77_777]),
        pick(random, &[none, none, 0, 1001, 1002, 2000, 2000, 0xffff_fffe]),
    ]
}

/// A time for utimensat(2). Those of the present are always "now".
pub fn time(random: &mut Seeded) -> (i64, i64) {
    let nanoseconds = pick(random, &[0, 1, 123_456_789, 999_999_999, 999_999_999]);
    match random.below(10) {
        0..3 => (0, libc::UTIME_NOW),
        3..5 => (0, libc::UTIME_OMIT),
        5 => (0, 1_000_000_000),
        6 => (-(random.below(1 << 31) as i64), nanoseconds),
        7 => {
            (pick(random, &[0, -1, 1, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 33) + 5]), nanoseconds)
        }
        _ => (random.below(1_600_000_000) as i64, nanoseconds),
    }
}

/// An offset or a length in a file.
pub fn offset(random: &mut Seeded) -> i64 {
    match random.below(40) {
        0..8 => random.below(40) as i64,
        8..20 => random.below(20_000) as i64,
        20..30 => random.below(20) as i64 * BLOCK + pick(random, &[-1, 0, 0, 1]),
        30..37 => random.below(150_000) as i64,
        37 => pick(random, &[1 << 20, 1 << 30, (1 << 32) - 1, 1 << 40]) + random.below(9000) as i64,
        38 => -1,
        _ => 0,
    }
}

/// How much to read or write at once.
pub fn transfer(random: &mut Seeded) -> usize {
    match random.below(30) {
        0 => 0,
        1..10 => 1 + random.below(100) as usize,
        10..20 => 1 + random.below(6000) as usize,
        20..25 => (1 + random.below(4) as usize) * BLOCK as usize,
        25..28 => random.below(30_000) as usize,
        _ => random.below(super::side::TRANSFER_BYTES_MAX as u64) as usize,
    }
}

/// The name of an extended attribute.
pub fn attribute(random: &mut Seeded) -> String {
    let name = pick(
        random,
        &[
            "user.a",
            "user.a",
            "user.b",
            "user.c",
            "trusted.a",
            "trusted.b",
            "security.test",
            "system.none",
            "other.x",
            "user.",
            "user",
            "",
        ],
    );
    match random.below(20) {
        0 => format!("user.{}", "v".repeat(NAME_BYTES_MAX - 5)),
        1 => format!("user.{}", "w".repeat(NAME_BYTES_MAX - 4)),
        _ => name.into(),
    }
}
