//! The serial form of ops, and that each is documented.

use super::{AttentionDrop, Op, PathDrop, Per, Sampling, Window};
use crate::types::{DType, Shape};
use crate::windows::Windows;
use std::collections::BTreeSet;

#[test]
fn ops_survive_their_serial_form() {
    let ops = [
        Op::Add,
        Op::Linear { bias: true, gelu: false },
        Op::LinearGradW { shape: Shape::from([3, 4]), accumulate: true },
        Op::Attention { heads: 3, drop: Some(AttentionDrop { rate: 0.1, site: 7 }) },
        Op::Drop { rate: 0.5, site: 1, per: Per::Sample },
        Op::CrossEntropy { smoothing: 0.1, mixed: true },
        Op::CrossEntropyGrad { smoothing: 0.0, mixed: false },
        Op::Pack { align: 1, to: Some(DType::Bf16) },
        Op::Unpack { shapes: vec![Shape::from([2, 3])], to: Some(DType::F32), over: true },
        Op::Prepare { size: 224 },
        Op::Quantize { to: DType::E4M3, transposed: true, accumulate: false },
        Op::ScaledMatmul { to: DType::Bf16, bias: false, accumulate: true },
        Op::Rescale { to: DType::E5M2, margin: 1 },
        Op::Conv { window: Window { stride: 1, pad: 1 }, bias: true },
        Op::BatchNorm { eps: 1e-5, relu: true, running: false },
        Op::Resize { height: 3, width: 4, sampling: Sampling::Average },
        Op::ResizeGrad { height: 3, width: 4, sampling: Sampling::Bilinear },
        Op::WindowAttention { heads: 3, windows: Windows { size: [8, 8], shift: [4, 0] } },
        Op::PositionBias { window: [16, 16], pretrained: Some([12, 12]) },
        Op::NormAdd { eps: 1e-5, drop: Some(PathDrop { rate: 0.1, site: 3 }), half: Some(DType::Bf16) },
    ];
    for op in ops {
        let (name, mut map) = op.name_and_attributes();
        map.insert("op".into(), name.into());
        assert_eq!(serde_json::from_value::<Op>(map.into()).unwrap(), op);
    }
}

/// The name in plan texts of every variant with its doc comment and the names of its fields, from the source.
fn variants() -> Vec<(String, String, Vec<String>)> {
    let source = include_str!("../op.rs");
    let body = source.split_once("pub enum Op {").unwrap().1;
    let (mut found, mut text, mut depth) = (vec![], String::new(), 0usize);
    for line in body.lines().map(str::trim) {
        let name = |line: &str| line.split([' ', ',', ':', '{']).next().unwrap_or_default().to_string();
        let fields = |line: &str| {
            let inside =
                line.split_once('{').map_or(line, |(_, rest)| rest).trim_end_matches(['}', ',', ' ']);
            let names = inside
                .split(", ")
                .filter_map(|field| field.split_once(": "))
                .map(|(name, _)| name.trim().to_string());
            names.collect::<Vec<String>>()
        };
        if let Some(more) = line.strip_prefix("///") {
            text += more;
        } else if depth == 0 && line == "}" {
            break;
        } else if depth == 0 && line.starts_with(char::is_uppercase) {
            found.push((
                name(line),
                std::mem::take(&mut text),
                if line.contains(": ") { fields(line) } else { vec![] },
            ));
            depth = usize::from(line.ends_with('{'));
        } else if depth == 1 && line.starts_with('}') {
            depth = 0;
        } else if depth == 1 && line.starts_with(char::is_lowercase) {
            found.last_mut().unwrap().2.extend(fields(line));
        }
    }
    found
}

#[test]
fn every_op_and_every_attribute_is_documented() {
    let source = include_str!("../op.rs");
    let table = source.split_once("| attribute | meaning |").unwrap().1.split_once("pub enum").unwrap().0;
    let known: BTreeSet<&str> =
        table.lines().flat_map(|row| row.split('|').nth(1)).flat_map(|cell| cell.split('`')).collect();
    let variants = variants();
    assert!(variants.len() > 70, "{} ops", variants.len());
    for (op, text, fields) in variants {
        assert!(!text.trim().is_empty(), "{op} has no doc comment");
        for field in fields {
            let is_named = known.contains(field.as_str()) || text.contains(&format!("`{field}`"));
            assert!(is_named, "{field} of {op} is neither in the table nor in the text of the op");
        }
    }
}
