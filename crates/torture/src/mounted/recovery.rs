//! Kills of servers that recover a volume.
//!
//! A kill is meant for the time between the moment when a server has opened the image and the one
//! when its mount stands. How long that is depends on the volume and the machine, so the aim
//! adapts: after a kill that came too late the next one comes earlier, otherwise it may come later.
//! Only those in time are counted.
use super::server::Server;
use super::workers::Problem;
use cairn_environment::random::Seeded;
use std::time::Duration;

const FIRST_WINDOW: Duration = Duration::from_millis(60);
const WINDOW_MIN: Duration = Duration::from_micros(100);
const WINDOW_MAX: Duration = Duration::from_secs(1);
/// Servers that are started for one kill, at most.
const TRIES: usize = 8;
/// In one round of so many there are such kills, from one to three.
const ROUNDS: u64 = 3;
const KILLS_MAX: u64 = 3;

/// When servers are killed that recover, and how often that was.
pub(super) struct RecoveryKills {
    /// The longest time from the opened image to a kill.
    window: Duration,
    count: u64,
    /// The next round with such kills.
    chosen: u64,
}

impl RecoveryKills {
    pub fn new() -> Self {
        Self { window: FIRST_WINDOW, count: 0, chosen: 0 }
    }

    /// Servers that were killed so far before their mounts stood.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// How many are to be killed in `round`, the first of which is 1: of each three rounds one has
    /// some.
    pub fn wanted(&mut self, round: u64, random: &mut Seeded) -> u64 {
        if (round - 1).is_multiple_of(ROUNDS) {
            self.chosen = round + random.below(ROUNDS);
        }
        if round == self.chosen { 1 + random.below(KILLS_MAX) } else { 0 }
    }

    /// Kills `wanted` servers while they recover.
    pub fn kill(
        &mut self,
        server: &Server,
        wanted: u64,
        random: &mut Seeded,
    ) -> Result<(), Problem> {
        for _ in 0..wanted {
            for _ in 0..TRIES {
                let delay = self.delay(random);
                let is_in_time = server.start_and_kill(delay)?;
                self.adapt(is_in_time);
                if is_in_time {
                    self.count += 1;
                    break;
                }
            }
        }
        Ok(())
    }

    fn delay(&self, random: &mut Seeded) -> Duration {
        Duration::from_micros(random.below(self.window.as_micros() as u64 + 1))
    }

    fn adapt(&mut self, is_in_time: bool) {
        let window = if is_in_time { self.window * 3 / 2 } else { self.window / 2 };
        self.window = window.clamp(WINDOW_MIN, WINDOW_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_three_rounds_has_kills() {
        for seed in 0..100 {
            let (mut kills, mut random) = (RecoveryKills::new(), Seeded::new(seed));
            let wanted: Vec<u64> = (1..=30).map(|round| kills.wanted(round, &mut random)).collect();
            for three in wanted.chunks(3) {
                let some: Vec<_> = three.iter().filter(|count| **count > 0).collect();
                assert!(matches!(some[..], [1..=KILLS_MAX]), "{seed}: {wanted:?}");
            }
        }
    }

    #[test]
    fn the_aim_adapts_to_the_time_of_a_recovery() {
        for recovery_us in [500, 5_000, 500_000] {
            let (mut kills, mut random) = (RecoveryKills::new(), Seeded::new(recovery_us));
            let (mut hits, mut late) = (0, 0);
            for _ in 0..300 {
                let delay = kills.delay(&mut random).as_micros() as u64;
                kills.adapt(delay < recovery_us);
                hits += u64::from(delay < recovery_us);
                late += u64::from((recovery_us / 2..recovery_us).contains(&delay));
            }
            assert!(hits > 150 && late > 30, "{recovery_us}: {hits}, {late}");
        }
    }
}
