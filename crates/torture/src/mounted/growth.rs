//! Whether servers grow: what each takes after a cycle of load, compared with what it, or one
//! before it, took.
//!
//! States: the first server's life, in which it is compared with itself, from the cycle after
//! [`WARM_UP_CYCLES`] on; then later servers, which live for a cycle each, and are compared with
//! the first of them.
use super::server::text;
use super::workers::Problem;
use cairn_harness::proc::{Status, open_files};

/// Until memory stays where it is, as measured.
const WARM_UP_CYCLES: usize = 10;
/// Memory may grow by a quarter and this.
const MEMORY_KIB_MORE_MAX: u64 = 48 << 10;
const DESCRIPTORS_MORE_MAX: u64 = 4;
const THREADS_MORE_MAX: u64 = 4;

/// What a server takes.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub memory_kib: u64,
    pub descriptors: u64,
    pub threads: u64,
}

impl Taken {
    /// Of a process that runs.
    pub fn of(process_id: u32) -> Result<Self, Problem> {
        let process = process_id.to_string();
        let status = Status::of(&process).map_err(text)?;
        let figure = |name: &str| status.number(name).ok_or(format!("no {name} in /proc"));
        let descriptors = open_files(&process).map_err(text)?;
        Ok(Self { memory_kib: figure("VmRSS")?, descriptors, threads: figure("Threads")? })
    }

    fn check_growth_since(&self, warm: &Self) -> Result<(), Problem> {
        let grown = self.memory_kib > warm.memory_kib * 5 / 4 + MEMORY_KIB_MORE_MAX
            || self.descriptors > warm.descriptors + DESCRIPTORS_MORE_MAX
            || self.threads > warm.threads + THREADS_MORE_MAX;
        if grown { Err(format!("the server has grown from {warm:?} to {self:?}")) } else { Ok(()) }
    }
}

/// What the servers of a run took.
#[derive(Default)]
pub struct Growth {
    /// The first server's, one for each cycle.
    first: Vec<Taken>,
    /// Of each later server.
    later: Vec<Taken>,
    is_later: bool,
    /// Comparisons of the first server with itself.
    pub in_one_life: u64,
    /// Comparisons of later servers with the first of them.
    pub between_lives: u64,
}

impl Growth {
    /// From now on another server runs.
    pub fn begin_next_server(&mut self) {
        self.is_later = true;
    }

    /// What the server that runs takes after a cycle.
    pub fn add(&mut self, taken: Taken) -> Result<(), Problem> {
        let (life, warm, comparisons) = match self.is_later {
            false => (&mut self.first, WARM_UP_CYCLES - 1, &mut self.in_one_life),
            true => (&mut self.later, 0, &mut self.between_lives),
        };
        life.push(taken);
        if life.len() > warm + 1 {
            *comparisons += 1;
            taken.check_growth_since(&life[warm])?;
        }
        Ok(())
    }

    /// The first server after its first cycle and after its last.
    pub fn first_life(&self) -> Option<(Taken, Taken)> {
        Some((*self.first.first()?, *self.first.last()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WARM: Taken = Taken { memory_kib: 100_000, descriptors: 20, threads: 18 };
    const GROWN: Taken = Taken { descriptors: 25, ..WARM };

    #[test]
    fn growth_is_noticed() {
        WARM.check_growth_since(&WARM).unwrap();
        Taken { memory_kib: 125_000 + MEMORY_KIB_MORE_MAX, ..WARM }
            .check_growth_since(&WARM)
            .unwrap();
        Taken { memory_kib: 125_001 + MEMORY_KIB_MORE_MAX, ..WARM }
            .check_growth_since(&WARM)
            .unwrap_err();
        GROWN.check_growth_since(&WARM).unwrap_err();
        Taken { threads: 23, ..WARM }.check_growth_since(&WARM).unwrap_err();
        assert!(Taken::of(std::process::id()).unwrap().threads > 0);
    }

    #[test]
    fn one_server_is_compared_with_itself_once_it_is_warm() {
        let mut growth = Growth::default();
        (0..WARM_UP_CYCLES).for_each(|_| growth.add(WARM).unwrap());
        assert_eq!(growth.in_one_life, 0);
        growth.add(WARM).unwrap();
        assert_eq!(growth.in_one_life, 1);
        growth.add(GROWN).unwrap_err();
    }

    #[test]
    fn servers_after_a_stop_are_compared_with_the_first_of_them() {
        let mut growth = Growth::default();
        growth.add(WARM).unwrap();
        growth.begin_next_server();
        // Not with the server before the first stop: that one was new, or warm.
        growth.add(GROWN).unwrap();
        assert_eq!(growth.between_lives, 0);
        growth.begin_next_server();
        growth.add(GROWN).unwrap();
        assert_eq!((growth.between_lives, growth.in_one_life), (1, 0));
        growth.begin_next_server();
        growth.add(Taken { threads: 30, ..GROWN }).unwrap_err();
    }
}
