//! Load generators, written once and run against a directory or against the engine in this process.
//!
//! Layers, imports pointing down: `command` is `cairn bench`; `report_page` shows results;
//! `transport` says how much of the transport's limit a volume reaches, which `memory_file_system`
//! has; `peers` and `ab` compare runs; `workloads` are the generators; `client` runs their threads,
//! `recorder` keeps latencies, `report` is what comes out; `target` is what they run against, named
//! by `spec`; `machine` describes this machine.
//!
//! Every generator works below one directory of its own inside the target and removes it when it
//! ends, also after an interruption ([`cairn_harness::Interrupt`]) or an error.
#![forbid(unsafe_code)]

mod ab;
mod client;
pub mod command;
mod disturbance;
pub mod engine_figures;
mod engine_settings;
mod engine_target;
mod intervals;
mod machine;
mod memory_file_system;
mod peers;
mod posix_target;
mod progress;
mod recorder;
mod report;
mod report_page;
mod resources;
mod run_queue;
mod scratch_image;
mod simulated_disk;
mod spec;
mod table;
mod target;
mod transport;
mod workloads;
