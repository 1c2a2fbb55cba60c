//! Ops of dense prediction: images are channels-last, (B,h,w,C).
//!
//! Legend: B batch, h and w height and width, C channels, I and O input and output channels of a convolution, K classes.

use crate::op::Window;
use crate::op::slots::Class::{Compute, Exactly, Float, Full, Gradient};
use crate::op::slots::{Description, Letters, require};
use crate::types::{DType, Shape};

/// Height or width of a convolution's result.
fn reach(window: Window, size: usize, kernel: usize) -> Result<usize, String> {
    require(window.stride > 0, || "can't step by 0".into())?;
    let padded = size + 2 * window.pad;
    let room = padded.checked_sub(kernel);
    room.map(|room| room / window.stride + 1)
        .ok_or_else(|| format!("a kernel of {kernel} is larger than the padded input of {padded}"))
}

/// Checks that a map of `(height, width)` has a result of `h'` × `w'`.
fn reaches(
    window: Window,
    l: &Letters<'_>,
    map: (usize, usize),
    kernel: (usize, usize),
) -> Result<(), String> {
    let (height, width) = (reach(window, map.0, kernel.0)?, reach(window, map.1, kernel.1)?);
    require(height == l.get("h'") && width == l.get("w'"), || {
        format!("dy {} doesn't come from a map of {}×{}", l.operand(0), map.0, map.1)
    })
}

pub fn conv(window: Window, bias: bool) -> Description {
    Description::none()
        .takes("x", "B,h,w,I", Compute)
        .takes("weight", "O,kh,kw,I", Compute)
        .takes_if(bias, "bias", "O", Compute)
        .set("h'", move |l| reach(window, l.get("h"), l.get("kh")))
        .set("w'", move |l| reach(window, l.get("w"), l.get("kw")))
        .gives("", "B,h',w',O", Compute)
        .multiplies()
}

pub fn conv_grad_x(window: Window, height: usize, width: usize) -> Description {
    Description::none()
        .with("height", height)
        .with("width", width)
        .takes("dy", "B,h',w',O", Compute)
        .takes("weight", "O,kh,kw,I", Compute)
        .check(move |l| reaches(window, l, (height, width), (l.get("kh"), l.get("kw"))))
        .gives("x", "B,height,width,I", Compute)
        .multiplies()
}

pub fn conv_grad_w(window: Window, shape: &Shape, accumulate: bool) -> Description {
    let kernel = match shape.0[..] {
        [_, height, width, _] => (height, width),
        _ => (0, 0),
    };
    Description::none()
        .takes("dy", "B,h',w',O", Compute)
        .takes("x", "B,h,w,I", Compute)
        .takes_if(accumulate, "sum so far", "O,kh,kw,I", Full)
        .check(move |l| reaches(window, l, (l.get("h"), l.get("w")), kernel))
        .gives_shape("weight", shape, "O,kh,kw,I", Gradient)
        .over_if(accumulate, 2)
        .multiplies()
}

pub fn join_moments() -> Description {
    Description::none()
        .takes("moments", "3parts,C", Full)
        .check(|l| require(l.get("parts") > 0, || "joins the moments of no part".into()))
        .gives("moments.all", "3,C", Full)
}

/// Operands of a batch norm.
pub fn normalised() -> Description {
    Description::none()
        .takes("x", "..,C", Compute)
        .takes("moments", "3,C", Full)
        .takes("weight", "C", Full)
        .takes("bias", "C", Full)
}

/// running, moments → running.
pub fn running_moments() -> Description {
    Description::none()
        .takes("running moments", "3,C", Full)
        .takes("moments", "3,C", Full)
        .gives("running", "3,C", Full)
        .over(0)
}

pub fn resize(height: usize, width: usize) -> Description {
    Description::none()
        .with("height", height)
        .with("width", width)
        .takes("x", "B,h,w,C", Compute)
        .check(move |l| {
            let least = l.get("h").min(l.get("w")).min(height).min(width);
            require(least > 0, || format!("can't resize {} to {height}×{width}", l.operand(0)))
        })
        .gives("", "B,height,width,C", Compute)
}

pub fn concat(operands: usize) -> Description {
    let maps = (0..operands.max(1)).fold(Description::none(), |op, _| op.takes("map", "..,?", Compute));
    maps.set("C", |l| Ok(l.operands().iter().map(|t| t.shape.last()).sum())).gives("", "..,C", Compute)
}

pub fn slice(start: usize, channels: usize) -> Description {
    Description::none()
        .with("channels", channels)
        .takes("x", "..,C", Compute)
        .check(move |l| {
            let end = start.saturating_add(channels);
            let there = channels > 0 && end <= l.get("C");
            require(there, || format!("{} has no channels {start} to {end}", l.operand(0)))
        })
        .gives("", "..,channels", Compute)
}

/// Small logits, and the labels and weights of the pixels that they are enlarged to.
pub fn pixels() -> Description {
    Description::none()
        .takes("logits", "B,h,w,K", Float)
        .takes("labels", "B,h',w'", Exactly(DType::I32))
        .takes("weights", "B,h',w'", Full)
        .check(|l| {
            let least = ["h", "w", "h'", "w'"].map(|side| l.get(side)).into_iter().min();
            require(least > Some(0), || format!("logits are {}, but labels {}", l.operand(0), l.operand(1)))
        })
}

pub fn grid(height: usize, width: usize) -> Description {
    Description::none()
        .with("height", height)
        .with("width", width)
        .takes("x", "B,T,C", Float)
        .check(move |l| {
            let tokens = l.get("T");
            let enough = tokens >= height * width;
            require(enough, || format!("{tokens} tokens are too few for a grid of {height}×{width}"))
        })
        .gives("", "B,height,width,C", Compute)
}

pub fn ungrid(tokens: usize) -> Description {
    Description::none()
        .with("T", tokens)
        .takes("x", "B,h,w,C", Compute)
        .check(move |l| {
            let enough = tokens >= l.get("h") * l.get("w");
            require(enough, || format!("{tokens} tokens are too few for {}", l.operand(0)))
        })
        .gives("", "B,T,C", Compute)
}
