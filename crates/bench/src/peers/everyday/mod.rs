//! What people do with a file system all day: unpack, search, copy and remove sources, clone,
//! build, keep a database, read and write large files. Known programs do it, on things that this
//! program generates.
//!
//! Layers, imports pointing down: `run` has the command lines and understands what came of them;
//! `materials` writes what they work on, trees as archives (`archive`); `load` names the loads.
mod archive;
mod load;
mod materials;
mod run;

pub use load::Everyday;
pub use materials::Materials;
pub use run::{invocation, is_cold, preparations, settles_first, understand};
