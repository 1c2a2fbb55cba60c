//! The ONNX form of each op of an evaluation graph.
//!
//! Legend: B batch, T tokens, N patches, C channels, H heads, D head size, I and O inner and outer width of a linear layer, h and w rows
//! and columns of a map.

use super::operand::{Operand, ints, reshape, softmax, transpose};
use super::windows;
use super::writer::{Attribute, Writer};
use graph::Op;
use graph::op::Pooling;

/// Writes an op with its result of shape `out`; the result's name, or none if the op has no ONNX form.
pub fn emit(w: &mut Writer, op: &Op, operands: &[Operand<'_>], out: &[usize]) -> Option<String> {
    Some(match (op, operands) {
        (Op::Patches { patch }, [x]) => patches(w, x, *patch)?,
        (Op::Linear { bias: true, gelu: false }, [x, weight, bias]) => {
            let y = linear(w, x, weight)?;
            let bias = bias.get(w);
            w.node("Add", &[&y, &bias], vec![])
        }
        (Op::Linear { bias: false, gelu: false }, [x, weight]) => linear(w, x, weight)?,
        (Op::Gelu, [x]) => gelu(w, &x.name),
        (Op::SwiGlu, [x]) => {
            let half = x.shape.last()? / 2;
            let [gate, value] = w.split(&x.name, [half; 2]);
            let open = w.node("Sigmoid", &[&gate], vec![]);
            let silu = w.node("Mul", &[&gate, &open], vec![]);
            w.node("Mul", &[&silu, &value], vec![])
        }
        (Op::Embed { class_token: true }, [patches, class, positions]) => {
            let tokens = prepend(w, patches, std::slice::from_ref(class))?;
            add(w, &tokens, positions)
        }
        (Op::Embed { class_token: false }, [patches, positions]) => add(w, &patches.name, positions),
        (Op::Prepend, [x, prefixes @ ..]) => prepend(w, x, prefixes)?,
        (Op::LayerNorm { eps, add: false }, [x, gamma, beta]) => layer_norm(w, x, [gamma, beta], *eps),
        (Op::NormAdd { eps, drop: None, half: None }, [y, shortcut, gamma, beta]) => {
            let y = layer_norm(w, y, [gamma, beta], *eps);
            w.node("Add", &[&shortcut.name, &y], vec![])
        }
        (Op::LayerScale, [x, gamma]) => {
            let gamma = gamma.get(w);
            w.node("Mul", &[&x.name, &gamma], vec![])
        }
        (Op::Attention { heads, drop: None }, [qkv]) => attention(w, qkv, *heads)?,
        (Op::Add, [x, y]) => add(w, &x.name, y),
        (Op::Scale { factor }, [x]) => {
            let factor = w.float(*factor as f32);
            w.node("Mul", &[&x.name, &factor], vec![])
        }
        (Op::Pool { kind: Pooling::First }, [x]) => {
            let first = w.ints("constant_first", &[], || vec![0]);
            w.node("Gather", &[&x.name, &first], vec![("axis", Attribute::Int(1))])
        }
        (Op::Pool { kind: Pooling::Mean }, [x]) => {
            w.node("ReduceMean", &[&x.name], vec![("axes", ints([1])), ("keepdims", Attribute::Int(0))])
        }
        (Op::Reshape { .. }, [x]) => reshape(w, &x.name, out.get(1..)?),
        (Op::Grid { height, width }, [tokens]) => grid(w, tokens, height * width, out.get(1..)?)?,
        (Op::MergePatches, [map]) => windows::merge(w, map)?,
        (Op::PositionBias { window, pretrained }, [w1, b1, w2]) => {
            windows::position_bias(w, *window, *pretrained, [w1, b1, w2])?
        }
        (Op::WindowAttention { heads, windows }, [qkv, q_bias, v_bias, scale, bias]) => {
            windows::attention(w, *heads, windows, qkv, [q_bias, v_bias, scale, bias])?
        }
        _ => return None,
    })
}

fn add(w: &mut Writer, x: &str, y: &Operand<'_>) -> String {
    let y = y.get(w);
    w.node("Add", &[x, &y], vec![])
}

/// (B,ch,height,width) → (B,N,ch·patch²).
fn patches(w: &mut Writer, x: &Operand<'_>, patch: usize) -> Option<String> {
    let &[_, channels, height, width] = x.shape else { return None };
    let (rows, columns) = (height / patch, width / patch);
    let y = reshape(w, &x.name, &[channels, rows, patch, columns, patch]);
    let y = transpose(w, &y, &[0, 2, 4, 1, 3, 5]);
    Some(reshape(w, &y, &[rows * columns, channels * patch * patch]))
}

/// x·wᵀ.
fn linear(w: &mut Writer, x: &Operand<'_>, weight: &Operand<'_>) -> Option<String> {
    let weight = weight.transposed(w)?;
    Some(w.node("MatMul", &[&x.name, &weight], vec![]))
}

/// x·(1 + erf(x/√2))/2, in the order that onnxruntime makes one kernel of. ONNX has an op for it from version 20 on, which fewer
/// programs read.
fn gelu(w: &mut Writer, x: &str) -> String {
    let (root, one, half) = (w.float(std::f32::consts::SQRT_2), w.float(1.0), w.float(0.5));
    let y = w.node("Div", &[x, &root], vec![]);
    let y = w.node("Erf", &[&y], vec![]);
    let y = w.node("Add", &[&y, &one], vec![]);
    let y = w.node("Mul", &[x, &y], vec![]);
    w.node("Mul", &[&y, &half], vec![])
}

/// Prefixes (1,n,C) before x (B,N,C): both padded by zeros to (.,Σn+N,C), and added. So no shape depends on the batch's.
fn prepend(w: &mut Writer, x: &Operand<'_>, prefixes: &[Operand<'_>]) -> Option<String> {
    let (tokens, before) =
        (*x.shape.get(1)?, prefixes.iter().map(|p| Some(*p.shape.get(1)?)).sum::<Option<usize>>()?);
    let names: Vec<String> = prefixes.iter().map(|prefix| prefix.get(w)).collect();
    let prefix = match &names[..] {
        [name] => name.clone(),
        _ => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            w.node("Concat", &names, vec![("axis", Attribute::Int(1))])
        }
    };
    let (front, back) = (w.row(&[0, before as i64, 0, 0, 0, 0]), w.row(&[0, 0, 0, 0, tokens as i64, 0]));
    let x = w.node("Pad", &[&x.name, &front], vec![]);
    let prefix = w.node("Pad", &[&prefix, &back], vec![]);
    Some(w.node("Add", &[&x, &prefix], vec![]))
}

/// Layer norm over the last axis.
fn layer_norm(w: &mut Writer, x: &Operand<'_>, [gamma, beta]: [&Operand<'_>; 2], eps: f64) -> String {
    let (gamma, beta) = (gamma.get(w), beta.get(w));
    let attributes = vec![("axis", Attribute::Int(-1)), ("epsilon", Attribute::Float(eps as f32))];
    w.node("LayerNormalization", &[&x.name, &gamma, &beta], attributes)
}

/// qkv (B,T,3C) → (B,T,C).
fn attention(w: &mut Writer, qkv: &Operand<'_>, heads: usize) -> Option<String> {
    let &[_, tokens, packed] = qkv.shape else { return None };
    let (c, d) = (packed / 3, packed / 3 / heads);
    let parts = w.split(&qkv.name, [c; 3]);
    let [q, k, v] = parts.map(|part| reshape(w, &part, &[tokens, heads, d]));
    let scale = w.float((1.0 / (d as f64).sqrt()) as f32);
    let q = transpose(w, &q, &[0, 2, 1, 3]);
    let q = w.node("Mul", &[&q, &scale], vec![]);
    let k = transpose(w, &k, &[0, 2, 3, 1]);
    let v = transpose(w, &v, &[0, 2, 1, 3]);
    let scores = w.node("MatMul", &[&q, &k], vec![]); // (B,H,T,T)
    let shares = softmax(w, &scores);
    let y = w.node("MatMul", &[&shares, &v], vec![]); // (B,H,T,D)
    let y = transpose(w, &y, &[0, 2, 1, 3]);
    Some(reshape(w, &y, &[tokens, c]))
}

/// The last `kept` tokens, as a map.
fn grid(w: &mut Writer, tokens: &Operand<'_>, kept: usize, sides: &[usize]) -> Option<String> {
    let all = *tokens.shape.get(1)?;
    let (start, end, axis) = (w.row(&[all.checked_sub(kept)? as i64]), w.row(&[all as i64]), w.row(&[1]));
    let last = w.node("Slice", &[&tokens.name, &start, &end, &axis], vec![]);
    Some(reshape(w, &last, sides))
}
