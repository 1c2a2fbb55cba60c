//! The commands, a file each: they parse nothing and compute nothing, but call the libraries and print what comes back.

pub mod bench;
pub mod classify;
pub mod data;
pub mod doctor;
pub mod eval;
pub mod explain;
pub mod export;
pub mod launch;
pub mod models;
pub mod plan;
pub mod report;
pub mod segment;
pub mod serve;
pub mod shells;
pub mod study;
pub mod train;
