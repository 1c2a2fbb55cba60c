//! Cross-entropy: a warp for each row of logits, then one block that adds up what the blocks found. Rows that are pixels are
//! many, and have kernels of their own.

use super::rows::{launch, pointer, singles, typed};
use crate::action::{Action, Address, Arg, Kernel, Operand, Source, StepContext};
use crate::error::CudaError;
use graph::{DType, Op, Shape, Type};

/// Threads of a block, as in loss.cu.
const THREADS: usize = 128;
/// Rows that a block has at a time.
const ROWS: usize = THREADS / 32;
/// Blocks of the forward pass at most, each with four partial sums.
const PARTS: usize = 1024;

/// Blocks where rows are pixels: sixteen for each processor of an H200.
const PIXEL_PARTS: usize = 2112;
/// Classes that a warp has in registers.
const PIXEL_CLASSES: usize = 256;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::CrossEntropy { smoothing, mixed } => cross_entropy(cx, smoothing, mixed),
        Op::CrossEntropyGrad { smoothing, mixed } => cross_entropy_grad(cx, smoothing, mixed),
        Op::Seed { .. } => seed(cx),
        _ => Err(cx.no_kernel()),
    }
}

pub fn scratch(op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> usize {
    match op {
        Op::CrossEntropy { mixed, .. } => {
            let shape = &inputs[0].shape;
            let parts =
                if are_pixels(shape, *mixed) { pixel_parts(shape.rows()) } else { parts(shape.rows()) };
            8 * 4 * parts
        }
        _ => 0,
    }
}

fn parts(rows: usize) -> usize {
    rows.div_ceil(ROWS).clamp(1, PARTS)
}

fn pixel_parts(rows: usize) -> usize {
    rows.div_ceil(ROWS).clamp(1, PIXEL_PARTS)
}

/// Tells whether rows are pixels, with one label each.
fn are_pixels(logits: &Shape, mixed: bool) -> bool {
    logits.rank() > 2 && !mixed && logits.last() <= PIXEL_CLASSES
}

/// Arguments logits, labels, weights, partners and mixes, the last two null where nothing is mixed.
fn batch(cx: &StepContext<'_>, mixed: bool) -> Result<[Arg; 5], CudaError> {
    let labels: &[usize] = if mixed { &[1, 3] } else { &[1] };
    let numbers: &[usize] = if mixed { &[2, 4] } else { &[2] };
    let are = |inputs: &[usize], dtype: DType| inputs.iter().all(|&i| cx.input(i).dtype == dtype);
    if !are(labels, DType::I32) || !are(numbers, DType::F32) {
        return Err(cx.no_kernel());
    }
    let address = |i: usize| if i < 3 || mixed { cx.input(i).address } else { 0 };
    Ok([0, 1, 2, 3, 4].map(|i| Arg::Pointer(address(i))))
}

/// Arguments rows, classes, smoothing.
fn sizes(logits: &Operand, smoothing: f64) -> [Arg; 3] {
    let (rows, classes) = (logits.shape.rows(), logits.shape.last());
    [Arg::I32(rows as i32), Arg::I32(classes as i32), Arg::F32(smoothing as f32)]
}

/// Registers of a lane that hold a row.
fn registers(logits: &Operand) -> usize {
    logits.shape.last().div_ceil(32)
}

fn cross_entropy(cx: &StepContext<'_>, smoothing: f64, mixed: bool) -> Result<Vec<Action>, CudaError> {
    let logits = cx.input(0);
    singles(cx, cx.outputs)?;
    let pixels = are_pixels(&logits.shape, mixed);
    let rows = logits.shape.rows();
    let parts = if pixels { pixel_parts(rows) } else { parts(rows) };
    let mut args = batch(cx, mixed)?.to_vec();
    if pixels {
        args.truncate(3);
    }
    args.push(Arg::Pointer(cx.scratch));
    args.extend(sizes(logits, smoothing));
    let name = match pixels {
        true => format!("pixel_loss<{}, {}>", typed(cx, logits)?, registers(logits)),
        false => format!("cross_entropy<{}>", typed(cx, logits)?),
    };
    Ok(vec![launch(Source::Loss, name, [parts, 1, 1], THREADS, args), summed(cx, parts)])
}

/// Loss and statistics of so many parts that lie in the scratch.
pub(super) fn summed(cx: &StepContext<'_>, parts: usize) -> Action {
    let args = vec![
        Arg::Pointer(cx.scratch),
        Arg::I32(parts as i32),
        Arg::Pointer(cx.header),
        pointer(cx.output(0)),
        pointer(cx.output(1)),
    ];
    launch(Source::Loss, "cross_entropy_sums".into(), [1, 1, 1], THREADS, args)
}

fn cross_entropy_grad(cx: &StepContext<'_>, smoothing: f64, mixed: bool) -> Result<Vec<Action>, CudaError> {
    let (logits, dlogits) = (cx.input(0), cx.output(0));
    let dloss = if mixed { 5 } else { 3 };
    singles(cx, &cx.inputs[dloss..])?;
    let pixels = are_pixels(&logits.shape, mixed);
    let mut args = batch(cx, mixed)?.to_vec();
    if pixels {
        args.truncate(3);
    }
    args.extend([pointer(cx.input(dloss)), Arg::Pointer(cx.header), pointer(dlogits)]);
    args.extend(sizes(logits, smoothing));
    let (of, to, rows) = (typed(cx, logits)?, typed(cx, dlogits)?, logits.shape.rows());
    let (name, blocks) = match pixels {
        true => (format!("pixel_grad<{of}, {to}, {}>", registers(logits)), pixel_parts(rows)),
        false => (format!("cross_entropy_grad<{of}, {to}>"), rows.div_ceil(ROWS)),
    };
    Ok(vec![launch(Source::Loss, name, [blocks, 1, 1], THREADS, args)])
}

fn seed(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    singles(cx, cx.inputs)?;
    let scale: Address = cx.inputs.first().map_or(0, |scale| scale.address);
    let name = format!("seed<{}>", typed(cx, cx.output(0))?);
    Ok(vec![launch(Source::Loss, name, [1, 1, 1], 1, vec![Arg::Pointer(scale), pointer(cx.output(0))])])
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut names = vec!["cross_entropy_sums".to_string()];
    for t in ["float", "bf16", "f16"] {
        names.extend([
            format!("cross_entropy<{t}>"),
            format!("cross_entropy_grad<{t}, {t}>"),
            format!("seed<{t}>"),
        ]);
    }
    for (l, d) in [("float", "float"), ("float", "bf16"), ("bf16", "bf16"), ("float", "f16")] {
        names.push(format!("pixel_grad<{l}, {d}, 5>"));
    }
    names.extend(["pixel_loss<float, 5>".to_string(), "pixel_loss<bf16, 8>".into()]);
    names.into_iter().map(|name| (Kernel::new(Source::Loss, name), 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const PLAIN: [&str; 3] = ["bf16[256,1000]", "i32[256]", "f32[256]"];
    const LOSS: [&str; 2] = ["f32[]", "f32[4]"];

    #[test]
    fn partial_sums_fit_their_scratch() {
        for rows in [1, 3, 256, 5000, 1_000_000] {
            assert!(parts(rows) <= PARTS && (parts(rows) == PARTS || parts(rows) * ROWS >= rows));
        }
        let op = Op::CrossEntropy { smoothing: 0.1, mixed: false };
        let actions = step(op.clone(), &PLAIN, &LOSS).unwrap();
        assert_eq!(names(&actions), ["cross_entropy<bf16>", "cross_entropy_sums"]);
        assert_eq!(launches(&actions)[0].grid, [64, 1, 1]);
        assert_eq!(launches(&actions)[1].args[1], Arg::I32(64));
        assert_eq!(scratch(&op, &[&PLAIN[0].parse().unwrap()], &[]), 64 * 4 * 8);
    }

    #[test]
    fn pixels_have_kernels_of_their_own() {
        let inputs = ["f32[8,512,512,150]", "i32[8,512,512]", "f32[8,512,512]"];
        let op = Op::CrossEntropy { smoothing: 0.0, mixed: false };
        let actions = step(op.clone(), &inputs, &LOSS).unwrap();
        assert_eq!(names(&actions), ["pixel_loss<float, 5>", "cross_entropy_sums"]);
        assert_eq!(launches(&actions)[0].grid, [2112, 1, 1]);
        assert_eq!(scratch(&op, &[&inputs[0].parse().unwrap()], &[]), 2112 * 4 * 8);
        let inputs = [&inputs[..], &["f32[]"]].concat();
        let op = Op::CrossEntropyGrad { smoothing: 0.0, mixed: false };
        let actions = step(op, &inputs, &["bf16[8,512,512,150]"]).unwrap();
        assert_eq!(names(&actions), ["pixel_grad<float, bf16, 5>"]);
        let many = ["f32[2,4,4,1000]", "i32[2,4,4]", "f32[2,4,4]"];
        let op = Op::CrossEntropy { smoothing: 0.0, mixed: false };
        assert_eq!(names(&step(op, &many, &LOSS).unwrap())[0], "cross_entropy<float>");
    }

    #[test]
    fn mixed_labels_are_passed_on() {
        let inputs = [&PLAIN[..], &["i32[256]", "f32[256]", "f32[]"]].concat();
        let op = Op::CrossEntropyGrad { smoothing: 0.0, mixed: true };
        let actions = step(op, &inputs, &["bf16[256,1000]"]).unwrap();
        let at = |i: u64| Arg::Pointer((1 << 32) + (i << 20));
        assert_eq!(launches(&actions)[0].args[..6], [0, 1, 2, 3, 4, 5].map(at));
        let inputs = [&PLAIN[..], &["f32[]"]].concat();
        let op = Op::CrossEntropyGrad { smoothing: 0.0, mixed: false };
        let actions = step(op, &inputs, &["bf16[256,1000]"]).unwrap();
        assert_eq!(launches(&actions)[0].args[3..6], [Arg::Pointer(0), Arg::Pointer(0), at(3)]);
    }

    #[test]
    fn types_without_a_kernel_are_refused() {
        let op = Op::CrossEntropy { smoothing: 0.0, mixed: false };
        assert!(step(op.clone(), &["f64[4,5]", "i32[4]", "f32[4]"], &LOSS).is_err());
        assert!(step(op.clone(), &["f32[4,5]", "f32[4]", "f32[4]"], &LOSS).is_err());
        assert!(step(op, &["f32[4,5]", "i32[4]", "bf16[4]"], &LOSS).is_err());
    }

    #[test]
    fn the_seed_is_one_or_the_loss_scale() {
        let first = |inputs: &[&str]| {
            let actions = step(Op::Seed { dtype: DType::F32 }, inputs, &["f32[]"]).unwrap();
            launches(&actions)[0].args[0]
        };
        assert_eq!(first(&[]), Arg::Pointer(0));
        assert_eq!(first(&["f32[3]"]), Arg::Pointer(1 << 32));
    }
}
