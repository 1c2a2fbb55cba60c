//! Plans written by hand, on the CPU.

mod common;

use common::written::program;
use cpu::{Executor, Options};

/// Why a program can't be bound.
fn refusal(text: &str) -> String {
    match Executor::<f32>::new(program(text), Options::alone(2, 0)) {
        Ok(_) => panic!("{text} was bound"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_has_no_kernel_is_refused_when_it_is_bound() {
    let prepare = "plan eval batch=2 height=8 width=8 arena=8192\n\
        input pixels u8[4,8,8,3] @0\n\
        input choices i32[2,34] @1024\n\
        input levels f32[3,256] @2048\n\
        0 compute images f32[2,3,8,8] @5120 = prepare(pixels, choices, levels) size=8 ; forward images\n\
        output images\n";
    assert_eq!(refusal(prepare), "images: the CPU executor has no kernel for prepare");
}
