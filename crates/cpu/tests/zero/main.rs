//! Stages of ZeRO: whatever ranks divide, they train alike, in the memory that was planned.

#[path = "../common/mod.rs"]
mod common;
mod groups;
mod memory;
mod runs;
mod stages;
