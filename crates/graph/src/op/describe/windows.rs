//! Ops of Swin Transformer V2.
//!
//! Legend: B batch, h and w the map's rows and columns, C channels, H heads, T tokens in a window, N width of the position
//! bias's hidden layer.

use super::{half_copy, whole_heads};
use crate::op::slots::Class::{Compute, Float, Full, Gradient, Stream};
use crate::op::slots::{Description, require};
use crate::types::DType;
use crate::windows::Windows;

fn windowed(heads: usize, windows: Windows) -> Description {
    Description::none()
        .with("H", heads)
        .with("T", windows.tokens())
        .takes("qkv", "B,h,w,3C", Compute)
        .takes("query bias", "C", Full)
        .takes("value bias", "C", Full)
        .takes("logit scale", "H,1,1", Full)
        .takes("position bias", "H,T,T", Full)
        .check(move |l| {
            whole_heads(l.get("C"), heads)?;
            let (Windows { size, shift }, h, w) = (windows, l.get("h"), l.get("w"));
            let sized = size.iter().all(|side| *side > 0) && shift[0] < size[0] && shift[1] < size[1];
            require(sized, || {
                format!("windows of {}×{} can't be shifted by ({},{})", size[0], size[1], shift[0], shift[1])
            })?;
            require(shift[0] < h.max(1) && shift[1] < w.max(1), || {
                format!("a map of {h}×{w} can't be shifted by ({},{})", shift[0], shift[1])
            })
        })
        .set("windows", move |l| Ok(windows.count([l.get("h"), l.get("w")])))
}

pub fn attention(heads: usize, windows: Windows) -> Description {
    windowed(heads, windows).gives("", "B,h,w,C", Compute).gives("lse", "B,windows,H,T", Full)
}

pub fn attention_grad(heads: usize, windows: Windows) -> Description {
    windowed(heads, windows)
        .takes("out", "B,h,w,C", Compute)
        .takes("lse", "B,windows,H,T", Full)
        .takes("dout", "B,h,w,C", Compute)
        .gives("qkv", "B,h,w,3C", Compute)
        .gives("q_bias", "C", Gradient)
        .gives("v_bias", "C", Gradient)
        .gives("logit_scale", "H,1,1", Gradient)
        .gives("bias", "H,T,T", Gradient)
}

fn offsets(window: [usize; 2], pretrained: Option<[usize; 2]>) -> Description {
    let some = |sides: [usize; 2]| sides.iter().all(|side| *side > 0);
    let tokens = some(window) && pretrained.is_none_or(some);
    Description::none()
        .with("T", window[0] * window[1])
        .takes("first weight", "N,2", Full)
        .takes("first bias", "N", Full)
        .takes("second weight", "H,N", Full)
        .check(move |_| require(tokens, || "windows have at least one token".into()))
}

pub fn position_bias(window: [usize; 2], pretrained: Option<[usize; 2]>) -> Description {
    offsets(window, pretrained).gives("", "H,T,T", Full)
}

pub fn position_bias_grad(window: [usize; 2], pretrained: Option<[usize; 2]>) -> Description {
    offsets(window, pretrained)
        .takes("dbias", "H,T,T", Full)
        .gives("0.weight", "N,2", Gradient)
        .gives("0.bias", "N", Gradient)
        .gives("2.weight", "H,N", Gradient)
}

pub fn norm_add(half: Option<DType>) -> Description {
    let op = Description::none()
        .takes("y", "..,C", Compute)
        .takes("shortcut", "..,C", Float)
        .takes("weight", "C", Full)
        .takes("bias", "C", Full)
        .gives("", "..,C", Stream)
        .gives("mean", "..", Full)
        .gives("rstd", "..", Full);
    half_copy(op, half)
}

pub fn norm_add_grad() -> Description {
    Description::none()
        .takes("y", "..,C", Compute)
        .takes("mean", "..", Full)
        .takes("rstd", "..", Full)
        .takes("weight", "C", Full)
        .takes("dout", "..,C", Float)
        .gives("x", "..,C", Compute)
        .gives("weight", "C", Gradient)
        .gives("bias", "C", Gradient)
}

pub fn merge_patches() -> Description {
    Description::none()
        .takes("x", "B,h,w,C", Float)
        .set("h'", |l| Ok(l.get("h").div_ceil(2)))
        .set("w'", |l| Ok(l.get("w").div_ceil(2)))
        .gives("", "B,h',w',4C", Compute)
}

pub fn split_patches(height: usize, width: usize) -> Description {
    Description::none()
        .with("h'", height.div_ceil(2))
        .with("w'", width.div_ceil(2))
        .with("height", height)
        .with("width", width)
        .takes("x", "B,h',w',4C", Float)
        .gives("", "B,height,width,C", Stream)
}
