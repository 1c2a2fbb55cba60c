//! Shape rules: from the types of an op's inputs to those of its outputs, or the reason why not.

use super::{dense, windows};
use crate::op::{CHOICES, Op};
use crate::types::{DType, Shape, Type};

pub(super) type Inferred = Result<Vec<Type>, String>;

/// The types of the outputs of `op`, or what is wrong with its inputs.
pub fn infer(op: &Op, inputs: &[&Type]) -> Inferred {
    arity(op, inputs.len())?;
    if matches!(op, Op::Input | Op::Read { .. }) {
        return Err("takes its type from the graph".into());
    }
    match op {
        Op::Assign { .. } => Ok(vec![]),
        Op::Seed { dtype } => {
            inputs.iter().try_for_each(|scale| shaped(scale, [3], "the loss scale"))?;
            Ok(vec![Type::new(*dtype, [])])
        }
        Op::Prepare { size } => prepare(inputs, *size),
        Op::Patches { patch } => patches(inputs[0], *patch),
        Op::Unpatches { patch, channels, height, width } => {
            let [b, n, c] = axes(inputs[0])?;
            let grid = (height / patch) * (width / patch);
            require(n == grid && c == channels * patch * patch, || {
                format!("{n} patches of {c} don't tile {height}×{width}×{channels}")
            })?;
            Ok(vec![typed(inputs[0], [b, *channels, *height, *width])])
        }
        Op::Linear { bias, gelu } => linear(inputs, *bias, *gelu),
        Op::LinearGradX { gelu } => {
            let (dy, w) = (inputs[0], inputs[1]);
            let (o, i) = matrix(w);
            require(dy.shape.last() == o, || format!("dy is {dy}, the weight {w}"))?;
            let dx = Type { dtype: dy.dtype, shape: dy.shape.with_last(i) };
            require(!gelu || *inputs[2] == dx, || format!("dx is {dx}, the GELU's input {}", inputs[2]))?;
            Ok(if *gelu { vec![dx, typed(dy, [i])] } else { vec![dx] })
        }
        Op::LinearGradW { shape, accumulate } => {
            let (dy, x) = (inputs[0], inputs[1]);
            let fits = dy.shape.rows() == x.shape.rows()
                && shape.0.first() == Some(&dy.shape.last())
                && shape.count() == dy.shape.last() * x.shape.last();
            require(fits, || format!("dy {dy} and x {x} don't give a weight {shape}"))?;
            let dw = Type { dtype: dy.dtype, shape: shape.clone() };
            require(!accumulate || *inputs[2] == dw, || format!("accumulates {dw} into {}", inputs[2]))?;
            Ok(vec![dw])
        }
        Op::ColumnSum { accumulate } => {
            let sum = typed(inputs[0], [inputs[0].shape.last()]);
            require(!accumulate || *inputs[1] == sum, || format!("accumulates {sum} into {}", inputs[1]))?;
            Ok(vec![sum])
        }
        Op::Gelu | Op::Drop { .. } | Op::Scale { .. } => Ok(vec![inputs[0].clone()]),
        Op::GeluGrad { bias } => {
            same(inputs)?;
            let mut out = vec![inputs[0].clone()];
            out.extend(bias.then(|| typed(inputs[0], [inputs[0].shape.last()])));
            Ok(out)
        }
        Op::Add | Op::Accumulate => {
            same(inputs)?;
            Ok(vec![inputs[0].clone()])
        }
        Op::Embed { class_token } => embed(inputs, *class_token),
        Op::EmbedGrad { class_token } => {
            let [b, t, c] = axes(inputs[0])?;
            let n = t - usize::from(*class_token);
            let mut out = vec![typed(inputs[0], [b, n, c])];
            out.extend(class_token.then(|| typed(inputs[0], [1, 1, c])));
            out.push(typed(inputs[0], [1, t, c]));
            Ok(out)
        }
        Op::LayerNorm { add, .. } => layer_norm(inputs, *add),
        Op::LayerNormGrad { sum, half, .. } => {
            let (x, gamma) = (inputs[0], inputs[3]);
            require(inputs[4..].iter().all(|t| *t == x), || format!("gradients don't match x {x}"))?;
            let mut out = vec![x.clone(), gamma.clone(), gamma.clone()];
            out.extend(sum.then(|| gamma.clone()));
            out.extend(half.map(|dtype| Type { dtype, shape: x.shape.clone() }));
            Ok(out)
        }
        Op::Attention { heads, .. } => {
            let [b, t, c3] = axes(inputs[0])?;
            require(c3 % 3 == 0 && (c3 / 3) % heads == 0, || {
                format!("{c3} channels are not 3 × {heads} heads × a whole head size")
            })?;
            let lse = Type::new(accumulator(inputs[0].dtype), [b, *heads, t]);
            Ok(vec![typed(inputs[0], [b, t, c3 / 3]), lse])
        }
        Op::AttentionGrad { sum, .. } => {
            require(inputs[1] == inputs[3], || format!("out is {}, dout {}", inputs[1], inputs[3]))?;
            let qkv = inputs[0];
            let mut out = vec![qkv.clone()];
            out.extend(sum.then(|| Type::new(accumulator(qkv.dtype), [qkv.shape.last()])));
            Ok(out)
        }
        Op::Pool { .. } => {
            let [b, _, c] = axes(inputs[0])?;
            Ok(vec![typed(inputs[0], [b, c])])
        }
        Op::PoolGrad { tokens, .. } => {
            let [b, c] = axes(inputs[0])?;
            Ok(vec![typed(inputs[0], [b, *tokens, c])])
        }
        Op::CrossEntropy { mixed, .. } => {
            cross_entropy(inputs, *mixed)?;
            let sums = accumulator(inputs[0].dtype);
            Ok(vec![Type::new(sums, []), Type::new(sums, [4])])
        }
        Op::CrossEntropyGrad { mixed, .. } => {
            cross_entropy(inputs, *mixed)?;
            Ok(vec![inputs[0].clone()])
        }
        Op::SumSquares => Ok(vec![Type::new(accumulator(inputs[0].dtype), [1])]),
        Op::Clip { .. } => {
            shaped(inputs[0], [1], "the squared norm")?;
            shaped(inputs[1], [4], "the statistics")?;
            inputs[2..].iter().try_for_each(|scale| shaped(scale, [3], "the loss scale"))?;
            Ok(vec![typed(inputs[0], [3])])
        }
        Op::Advance => {
            shaped(inputs[0], [1], "the count of applied steps")?;
            shaped(inputs[1], [3], "control")?;
            Ok(vec![inputs[0].clone()])
        }
        Op::AdamW { .. } | Op::Lamb { .. } => {
            same(&inputs[..4])?;
            shaped(inputs[4], [3], "control")?;
            shaped(inputs[5], [1], "the count of applied steps")?;
            let mut out = vec![inputs[0].clone(), inputs[2].clone(), inputs[3].clone()];
            out.extend(copy_of(inputs[0], inputs.get(6))?);
            Ok(out)
        }
        Op::Sgd { .. } => {
            same(&inputs[..3])?;
            shaped(inputs[3], [3], "control")?;
            shaped(inputs[4], [1], "the count of applied steps")?;
            let mut out = vec![inputs[0].clone(), inputs[2].clone()];
            out.extend(copy_of(inputs[0], inputs.get(5))?);
            Ok(out)
        }
        Op::Ema { .. } => {
            same(&inputs[..2])?;
            shaped(inputs[2], [3], "control")?;
            Ok(vec![inputs[0].clone()])
        }
        _ => {
            let inferred = dense::infer(op, inputs).or_else(|| windows::infer(op, inputs));
            inferred.unwrap_or_else(|| infer_exchange(op, inputs))
        }
    }
}

/// The ops of the exchange.
fn infer_exchange(op: &Op, inputs: &[&Type]) -> Inferred {
    let x = inputs[0];
    match op {
        Op::Cast { to } => Ok(vec![Type { dtype: *to, shape: x.shape.clone() }]),
        Op::AllReduce { .. } => {
            one_dtype(inputs, "reduces")?;
            Ok(inputs.iter().map(|t| (*t).clone()).collect())
        }
        Op::LossScale { .. } => {
            shaped(x, [3], "the loss scale")?;
            shaped(inputs[1], [3], "control")?;
            Ok(vec![x.clone()])
        }
        Op::Pack { align, to } => {
            require(*align > 0, || "can't align to 0".into())?;
            one_dtype(inputs, "packs")?;
            let count: usize = inputs.iter().map(|t| t.shape.count()).sum();
            Ok(vec![Type::new(to.unwrap_or(x.dtype), [count.next_multiple_of(*align)])])
        }
        Op::Unpack { shapes, to, over } => unpack(inputs, shapes, to.unwrap_or(x.dtype), *over),
        Op::ReduceScatter { ranks, .. } => {
            let [n] = axes(x)?;
            require(*ranks > 0 && n % ranks == 0, || {
                format!("{n} elements don't divide among {ranks} ranks")
            })?;
            Ok(vec![typed(x, [n / ranks])])
        }
        Op::AllGather { ranks } => {
            require(x.shape.rank() > 0, || format!("needs an axis to gather along, got {x}"))?;
            let mut shape = x.shape.clone();
            shape.0[0] *= ranks;
            Ok(vec![typed(x, shape)])
        }
        _ => Err("has no shape rule".into()),
    }
}

fn unpack(inputs: &[&Type], shapes: &[Shape], dtype: DType, over: bool) -> Inferred {
    let x = inputs[0];
    let count: usize = shapes.iter().map(Shape::count).sum();
    require(count <= x.shape.count(), || format!("{count} elements don't fit in {x}"))?;
    let outputs: Vec<Type> = shapes.iter().map(|s| Type { dtype, shape: s.clone() }).collect();
    let fits = !over || inputs[1..].iter().copied().eq(&outputs);
    require(fits, || "writes over values of other types than it unpacks".into())?;
    Ok(outputs)
}

fn patches(x: &Type, patch: usize) -> Inferred {
    let [b, ch, h, w] = axes(x)?;
    require(patch > 0 && h % patch == 0 && w % patch == 0, || {
        format!("patch {patch} doesn't divide the {h}×{w} image")
    })?;
    Ok(vec![typed(x, [b, (h / patch) * (w / patch), ch * patch * patch])])
}

fn linear(inputs: &[&Type], bias: bool, gelu: bool) -> Inferred {
    let (x, w) = (inputs[0], inputs[1]);
    let (o, i) = matrix(w);
    require(x.shape.last() == i, || format!("x is {x}, the weight {w}: inner widths differ"))?;
    require(!bias || inputs[2].shape.count() == o, || format!("bias is {}, the weight {w}", inputs[2]))?;
    let y = Type { dtype: x.dtype, shape: x.shape.with_last(o) };
    Ok(if gelu { vec![y.clone(), y] } else { vec![y] })
}

fn embed(inputs: &[&Type], class_token: bool) -> Inferred {
    let [b, n, c] = axes(inputs[0])?;
    let t = n + usize::from(class_token);
    let positions = inputs[inputs.len() - 1];
    require(positions.shape == Shape::from([1, t, c]), || {
        format!("{t} tokens of {c} channels, but positions {positions}")
    })?;
    Ok(vec![typed(inputs[0], [b, t, c])])
}

fn layer_norm(inputs: &[&Type], add: bool) -> Inferred {
    let x = inputs[0];
    let gamma = inputs[if add { 2 } else { 1 }];
    require(!add || inputs[1] == x, || format!("adds {} to {x}", inputs[1]))?;
    require(gamma.shape == Shape::from([x.shape.last()]), || format!("x is {x}, its scale {gamma}"))?;
    let rows = Type { dtype: accumulator(x.dtype), shape: without_last(&x.shape) };
    let mut out = vec![x.clone(), rows.clone(), rows];
    if add {
        out.insert(0, x.clone());
    }
    Ok(out)
}

fn prepare(inputs: &[&Type], size: usize) -> Inferred {
    let (pixels, choices, levels) = (inputs[0], inputs[1], inputs[2]);
    let [_, _, _, channels] = axes(pixels)?;
    require(pixels.dtype == DType::U8, || format!("needs pixels as bytes, got {pixels}"))?;
    let [batch, numbers] = axes(choices)?;
    let fits = choices.dtype == DType::I32 && numbers == CHOICES;
    require(fits, || format!("needs {CHOICES} whole numbers for each image, got {choices}"))?;
    let each = Type::new(DType::F32, [channels, 256]);
    require(*levels == each, || format!("pixels are {pixels}, but what bytes become is {levels}"))?;
    if let Some(taps) = inputs.get(3) {
        let [_, row] = axes(taps)?;
        require(taps.dtype == DType::I32 && row > 2, || {
            format!("needs the weights of a resizing, got {taps}")
        })?;
    }
    Ok(vec![Type::new(DType::F32, [batch, channels, size, size])])
}

fn cross_entropy(inputs: &[&Type], mixed: bool) -> Result<(), String> {
    let (logits, labels, weights) = (inputs[0], inputs[1], inputs[2]);
    require(logits.shape.rank() > 1, || format!("logits are {logits}: no axis of classes"))?;
    let rows = without_last(&logits.shape);
    let fits = labels.shape == rows && labels.dtype == DType::I32;
    require(fits, || format!("logits are {logits}, but labels {labels}"))?;
    require(weights.shape == rows, || format!("logits are {logits}, but weights {weights}"))?;
    if !mixed {
        return Ok(());
    }
    let (partners, mix) = (inputs[3], inputs[4]);
    require(partners == labels, || format!("labels are {labels}, but their partners {partners}"))?;
    require(mix == weights, || format!("weights are {weights}, but shares of the label {mix}"))
}

/// The copy of a parameter in half precision, if there is one.
fn copy_of(w: &Type, copy: Option<&&Type>) -> Result<Option<Type>, String> {
    let Some(copy) = copy else { return Ok(None) };
    require(copy.shape == w.shape && copy.dtype.is_half(), || {
        format!("the parameter is {w}, its copy {copy}")
    })?;
    Ok(Some((*copy).clone()))
}

/// Sums of halves are kept in f32.
pub(super) fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A weight as a matrix (O, I): the first axis against all others.
pub fn matrix(w: &Type) -> (usize, usize) {
    let o = w.shape.0.first().copied().unwrap_or(1);
    (o, w.shape.count() / o.max(1))
}

pub(super) fn axes<const N: usize>(t: &Type) -> Result<[usize; N], String> {
    t.shape.0.as_slice().try_into().map_err(|_| format!("needs {N} axes, got {t}"))
}

pub(super) fn without_last(shape: &Shape) -> Shape {
    Shape(shape.0.split_last().map_or(vec![], |(_, rest)| rest.to_vec()))
}

pub(super) fn shaped<const N: usize>(t: &Type, shape: [usize; N], what: &str) -> Result<(), String> {
    let shape = Shape::from(shape);
    require(t.shape == shape, || format!("needs {what} of shape {shape}, got {t}"))
}

pub(super) fn typed(like: &Type, shape: impl Into<Shape>) -> Type {
    Type { dtype: like.dtype, shape: shape.into() }
}

pub(super) fn one_dtype(inputs: &[&Type], does: &str) -> Result<(), String> {
    require(inputs.iter().all(|t| t.dtype == inputs[0].dtype), || format!("{does} values of one type"))
}

fn same(inputs: &[&Type]) -> Result<(), String> {
    match inputs.iter().find(|t| **t != inputs[0]) {
        Some(other) => Err(format!("needs equal types, got {} and {other}", inputs[0])),
        None => Ok(()),
    }
}

pub(super) fn require(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

/// How many inputs the op takes.
fn arity(op: &Op, given: usize) -> Result<(), String> {
    let range = match op {
        Op::Input | Op::Read { .. } => 0..=0,
        Op::Seed { .. } => 0..=1,
        Op::SumSquares | Op::Pack { .. } | Op::AllReduce { .. } => 1..=usize::MAX,
        Op::Unpack { shapes, over, .. } => one(1 + if *over { shapes.len() } else { 0 }),
        Op::Linear { bias, .. } => one(2 + usize::from(*bias)),
        Op::LinearGradW { accumulate, .. } => one(2 + usize::from(*accumulate)),
        Op::ColumnSum { accumulate } => one(1 + usize::from(*accumulate)),
        Op::Embed { class_token } => one(2 + usize::from(*class_token)),
        Op::LayerNorm { add, .. } => one(3 + usize::from(*add)),
        Op::LayerNormGrad { add, .. } => one(5 + usize::from(*add)),
        Op::Clip { scaled, .. } => one(2 + usize::from(*scaled)),
        Op::AdamW { .. } | Op::Lamb { .. } => 6..=7,
        Op::Sgd { .. } => 5..=6,
        Op::AttentionGrad { .. } => one(4),
        Op::Ema { .. } => one(3),
        Op::CrossEntropy { mixed, .. } => one(if *mixed { 5 } else { 3 }),
        Op::CrossEntropyGrad { mixed, .. } => one(if *mixed { 6 } else { 4 }),
        Op::LinearGradX { gelu } => one(2 + usize::from(*gelu)),
        Op::GeluGrad { .. } | Op::Add | Op::Accumulate | Op::Advance => one(2),
        Op::LossScale { .. } => one(2),
        Op::Prepare { .. } => 3..=4,
        _ => dense::arity(op).unwrap_or_else(|| one(windows::arity(op).unwrap_or(1))),
    };
    if range.contains(&given) {
        return Ok(());
    }
    Err(format!("takes {} inputs, got {given}", range.start()))
}

pub(super) fn one(n: usize) -> std::ops::RangeInclusive<usize> {
    n..=n
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s<const N: usize>(shape: [usize; N]) -> Type {
        Type::new(DType::F32, shape)
    }

    #[test]
    fn a_patch_must_divide_the_image() {
        let error = infer(&Op::Patches { patch: 5 }, &[&f32s([1, 3, 32, 32])]).unwrap_err();
        assert_eq!(error, "patch 5 doesn't divide the 32×32 image");
    }

    #[test]
    fn a_linear_layer_names_both_shapes() {
        let op = Op::Linear { bias: false, gelu: false };
        let error = infer(&op, &[&f32s([2, 3]), &f32s([5, 4])]).unwrap_err();
        assert_eq!(error, "x is f32[2,3], the weight f32[5,4]: inner widths differ");
        assert_eq!(infer(&op, &[&f32s([2, 4]), &f32s([5, 4])]).unwrap(), vec![f32s([2, 5])]);
    }

    #[test]
    fn arity_is_checked_first() {
        assert_eq!(infer(&Op::Add, &[&f32s([1])]).unwrap_err(), "takes 2 inputs, got 1");
    }

    #[test]
    fn images_are_made_of_bytes_and_choices() {
        let (pixels, choices) = (Type::new(DType::U8, [10, 32, 30, 3]), Type::new(DType::I32, [8, CHOICES]));
        let (levels, taps) = (f32s([3, 256]), Type::new(DType::I32, [448, 5]));
        let op = Op::Prepare { size: 224 };
        for inputs in [&[&pixels, &choices, &levels][..], &[&pixels, &choices, &levels, &taps]] {
            assert_eq!(infer(&op, inputs).unwrap(), [f32s([8, 3, 224, 224])]);
        }
        let error = infer(&op, &[&pixels, &choices, &f32s([1, 256])]).unwrap_err();
        assert_eq!(error, "pixels are u8[10,32,30,3], but what bytes become is f32[1,256]");
        let narrow = Type::new(DType::I32, [8, 4]);
        assert!(infer(&op, &[&pixels, &narrow, &levels]).is_err());
        assert!(infer(&op, &[&f32s([10, 32, 30, 3]), &choices, &levels]).is_err());
    }

    #[test]
    fn mixed_labels_come_with_partners_and_shares() {
        let (logits, labels, weights) = (f32s([4, 10]), Type::new(DType::I32, [4]), f32s([4]));
        let (dloss, wide) = (f32s([]), f32s([4, 1]));
        let plain = [&logits, &labels, &weights];
        let mixed = |partners, mix| [&plain[..], &[partners, mix]].concat();
        let op = Op::CrossEntropy { smoothing: 0.1, mixed: true };
        let grad = Op::CrossEntropyGrad { smoothing: 0.1, mixed: true };
        assert_eq!(infer(&op, &mixed(&labels, &weights)).unwrap(), [f32s([]), f32s([4])]);
        let inputs = [&mixed(&labels, &weights)[..], &[&dloss]].concat();
        assert_eq!(infer(&grad, &inputs).unwrap(), [f32s([4, 10])]);

        let refused = |inputs: &[&Type]| infer(&op, inputs).unwrap_err();
        assert_eq!(refused(&plain), "takes 5 inputs, got 3");
        let three = Type::new(DType::I32, [3]);
        assert_eq!(refused(&mixed(&three, &weights)), "labels are i32[4], but their partners i32[3]");
        assert_eq!(refused(&mixed(&weights, &weights)), "labels are i32[4], but their partners f32[4]");
        assert_eq!(refused(&mixed(&labels, &wide)), "weights are f32[4], but shares of the label f32[4,1]");
        let plain_op = Op::CrossEntropy { smoothing: 0.1, mixed: false };
        assert_eq!(infer(&plain_op, &mixed(&labels, &weights)).unwrap_err(), "takes 3 inputs, got 5");
    }
}
