//! Cross-entropy of pixels whose logits are resized on the way. Legend: results are the pixels that have labels.

use super::loss::summed;
use super::rows::{launch, pointer, singles, typed};
use crate::action::{Action, Arg, Kernel, Launch, Source, StepContext};
use crate::error::CudaError;
use graph::{DType, Op, Shape, Type};

/// Threads of a block, as in resized_loss.cu and resized_loss_cells.cu.
const THREADS: usize = 128;
/// Blocks of the forward pass at most, each with four partial sums: sixteen for each processor of an H200.
const PARTS: usize = 2112;
/// Classes that a warp has in registers, and a block in threads.
const CLASSES: usize = 1024;
/// Classes that a lane of the kernels for enlarged logits has in registers.
const CELLS_CLASSES: usize = 8 * 32;
/// Columns of results in a tile.
const TILE: usize = 64;
/// Dynamic shared memory that every GPU has for a block, less what the kernel has beside it.
const SHARED: usize = 48 * 1024 - 256;
/// Rows of cells that a block of the gradient has at most, a warp for each.
const ROWS: usize = 8;
/// Blocks of the gradient that fit a multiprocessor.
const RESIDENT: usize = 2;

pub fn actions(cx: &StepContext<'_>) -> Result<Vec<Action>, CudaError> {
    match *cx.op {
        Op::ResizedCrossEntropy { smoothing } => forward(cx, smoothing),
        Op::ResizedCrossEntropyGrad { smoothing } => backward(cx, smoothing),
        _ => Err(cx.no_kernel()),
    }
}

pub fn scratch(op: &Op, inputs: &[&Type]) -> usize {
    match op {
        Op::ResizedCrossEntropy { .. } => {
            let Some(sizes) = Sizes::of(&inputs[0].shape, &inputs[1].shape) else { return 0 };
            8 * 4 * sizes.tiles().map_or(sizes.parts(), |tiles| tiles.parts)
        }
        _ => 0,
    }
}

/// Logits (B,h,w,K) and labels (B,height,width).
#[derive(Clone, Copy)]
struct Sizes {
    samples: usize,
    h: usize,
    w: usize,
    height: usize,
    width: usize,
    classes: usize,
}

impl Sizes {
    fn of(logits: &Shape, labels: &Shape) -> Option<Self> {
        let ([samples, h, w, classes], [_, height, width]) = (&logits.0[..], &labels.0[..]) else {
            return None;
        };
        let [samples, h, w, height, width, classes] = [samples, h, w, height, width, classes].map(|n| *n);
        Some(Sizes { samples, h, w, height, width, classes })
    }

    /// Blocks of the plain kernel.
    fn parts(&self) -> usize {
        (self.samples * self.height * self.width).div_ceil(THREADS / 32).clamp(1, PARTS)
    }

    /// Tells whether logits are enlarged, for the kernels that go from cell to cell.
    fn are_enlarged(&self) -> bool {
        self.height >= self.h && self.width >= self.w && self.classes <= CELLS_CLASSES
    }

    /// Tiling of the forward pass, if its logits are enlarged and those of a tile fit into shared memory.
    fn tiles(&self) -> Option<Tiles> {
        let columns = (((TILE - 1) * self.w).div_ceil(self.width) + 2).min(self.w);
        // Where a cell has rows of results for both rows of a block's warps, one row of cells is enough.
        let most_cells = if self.height >= 8 * self.h { 1 } else { 2 };
        let of_pixel = (self.classes.div_ceil(4) | 1) * 16 + 8;
        let shared = |cells: usize| (cells + 1) * columns * of_pixel;
        let cells = (1..=most_cells).rev().find(|cells| shared(*cells) <= SHARED);
        let cells = cells.filter(|_| self.are_enlarged())?;
        let count = self.width.div_ceil(TILE) * self.h.div_ceil(cells) * self.samples;
        // Every block has about as many.
        let parts = count.div_ceil(count.div_ceil(PARTS).max(1)).max(1);
        let at_once = if self.height >= 3 * self.h { 4 } else { 2 };
        Some(Tiles { cells, columns, at_once, shared: shared(cells), parts })
    }

    /// Tiling of the gradient, if its logits are enlarged.
    fn cells(&self, processors: usize) -> Option<Cells> {
        let warps = self.h.clamp(1, ROWS);
        let bands = (self.h - 1).div_ceil((warps - 1).max(1)).max(1);
        let segments = |steps: usize| (self.w - 1).div_ceil(steps).max(1);
        // A warp goes through one cell more than it has pixels to write: long ways are best, but for processors that have nothing to do.
        let rounds = |steps: usize| (self.samples * bands * segments(steps)).div_ceil(RESIDENT * processors);
        let steps = [2, 4, 8, 16, 32].into_iter().min_by_key(|steps| rounds(*steps) * (steps + 1))?;
        // Results of a row that are read together: those of a cell.
        let shift = (self.width.div_ceil(self.w).next_power_of_two().ilog2() as usize).clamp(1, 5);
        let grid = [segments(steps), bands, self.samples];
        let fits = grid[1..].iter().all(|n| *n <= 65_535);
        (self.are_enlarged() && fits).then_some(Cells { steps, shift, warps, grid })
    }
}

/// A tile is of so many rows of cells, and of TILE columns of results, which are made of up to `columns` of pixels. A thread has
/// `at_once` results of a column.
#[derive(Debug, PartialEq)]
struct Tiles {
    cells: usize,
    columns: usize,
    at_once: usize,
    shared: usize,
    parts: usize,
}

/// A warp goes through steps + 1 cells, and reads 1 << shift results of a row together.
#[derive(Debug, PartialEq)]
struct Cells {
    steps: usize,
    shift: usize,
    warps: usize,
    grid: [usize; 3],
}

/// The sizes, and as arguments height, width, those of the results, classes, smoothing.
fn sizes(cx: &StepContext<'_>, smoothing: f64) -> Result<(Sizes, Vec<Arg>), CudaError> {
    let (logits, labels) = (cx.input(0), cx.input(1));
    let fits = labels.dtype == DType::I32 && i32::try_from(labels.shape.count()).is_ok();
    let sizes = Sizes::of(&logits.shape, &labels.shape).filter(|sizes| fits && sizes.classes <= CLASSES);
    let sizes = sizes.ok_or_else(|| cx.no_kernel())?;
    let Sizes { h, w, height, width, classes, .. } = sizes;
    let mut args = [h, w, height, width, classes].map(|n| Arg::I32(n as i32)).to_vec();
    args.push(Arg::F32(smoothing as f32));
    Ok((sizes, args))
}

fn forward(cx: &StepContext<'_>, smoothing: f64) -> Result<Vec<Action>, CudaError> {
    singles(cx, &cx.inputs[2..])?;
    singles(cx, cx.outputs)?;
    let (sizes, more) = sizes(cx, smoothing)?;
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.extend([pointer(cx.output(2)), Arg::Pointer(cx.scratch), Arg::I32(sizes.samples as i32)]);
    args.extend(more);
    let (element, lanes) = (typed(cx, cx.input(0))?, sizes.classes.div_ceil(32));
    let Some(Tiles { cells, columns, at_once, shared, parts }) = sizes.tiles() else {
        let (name, parts) = (format!("resized_loss<{element}, {lanes}>"), sizes.parts());
        let loss = launch(Source::ResizedLoss, name, [parts, 1, 1], THREADS, args);
        return Ok(vec![loss, summed(cx, parts)]);
    };
    args.extend([cells, columns].map(|n| Arg::I32(n as i32)));
    let name = format!("resized_loss_tiles<{element}, {lanes}, {at_once}>");
    let kernel = Kernel::new(Source::ResizedLossCells, name);
    let (grid, block) = ([parts as u32, 1, 1], THREADS as u32);
    let loss = Launch { kernel, grid, block, shared: shared as u32, args };
    Ok(vec![Action::Launch(loss), summed(cx, parts)])
}

fn backward(cx: &StepContext<'_>, smoothing: f64) -> Result<Vec<Action>, CudaError> {
    let (logits, dlogits) = (cx.input(0), cx.output(0));
    singles(cx, &cx.inputs[2..])?;
    let (sizes, more) = sizes(cx, smoothing)?;
    let mut args: Vec<Arg> = cx.inputs.iter().map(pointer).collect();
    args.extend([Arg::Pointer(cx.header), pointer(dlogits)]);
    args.extend(more);
    let types = format!("{}, {}", typed(cx, logits)?, typed(cx, dlogits)?);
    let Some(Cells { steps, shift, warps, grid }) = sizes.cells(cx.facts.processors as usize) else {
        let (pixels, block) = (logits.shape.rows(), sizes.classes.next_multiple_of(32));
        let name = format!("resized_loss_grad<{types}>");
        return Ok(vec![launch(Source::ResizedLoss, name, [pixels, 1, 1], block, args)]);
    };
    args.extend([steps, shift].map(|n| Arg::I32(n as i32)));
    let name = format!("resized_loss_grad_cells<{types}, {}>", sizes.classes.div_ceil(32));
    Ok(vec![launch(Source::ResizedLossCells, name, grid, 32 * warps, args)])
}

/// Representative instances, each with the compute capability that it needs.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let plain = [
        "resized_loss<float, 5>",
        "resized_loss<bf16, 32>",
        "resized_loss_grad<float, float>",
        "resized_loss_grad<float, bf16>",
        "resized_loss_grad<float, f16>",
    ];
    let of_cells = [
        "resized_loss_tiles<float, 1, 2>",
        "resized_loss_tiles<float, 5, 4>",
        "resized_loss_tiles<bf16, 8, 4>",
        "resized_loss_grad_cells<float, float, 1>",
        "resized_loss_grad_cells<float, bf16, 5>",
        "resized_loss_grad_cells<float, f16, 5>",
        "resized_loss_grad_cells<float, bf16, 8>",
    ];
    let plain = plain.map(|name| Kernel::new(Source::ResizedLoss, name));
    let of_cells = of_cells.map(|name| Kernel::new(Source::ResizedLossCells, name));
    plain.into_iter().chain(of_cells).map(|kernel| (kernel, 75)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    fn sizes([samples, h, w]: [usize; 3], [height, width]: [usize; 2], classes: usize) -> Sizes {
        Sizes { samples, h, w, height, width, classes }
    }

    #[test]
    fn nothing_is_as_large_as_the_resized_logits() {
        let inputs = ["f32[8,128,128,150]", "i32[8,512,512]", "f32[8,512,512]"];
        let outputs = ["f32[]", "f32[4]", "f32[8,512,512]"];
        let op = Op::ResizedCrossEntropy { smoothing: 0.0 };
        let actions = step(op.clone(), &inputs, &outputs).unwrap();
        assert_eq!(names(&actions), ["resized_loss_tiles<float, 5, 4>", "cross_entropy_sums"]);
        let loss = launches(&actions)[0];
        assert_eq!((loss.grid, loss.shared), ([2048, 1, 1], 34_128));
        assert_eq!(loss.args[3], Arg::Pointer((2 << 32) + (2 << 20)));
        let types = inputs.map(|t| t.parse::<Type>().unwrap());
        assert_eq!(scratch(&op, &types.iter().collect::<Vec<_>>()), 2048 * 4 * 8);
        let inputs = [&inputs[..], &["f32[8,512,512]", "f32[]"]].concat();
        let op = Op::ResizedCrossEntropyGrad { smoothing: 0.0 };
        let actions = step(op, &inputs, &["bf16[8,128,128,150]"]).unwrap();
        assert_eq!(names(&actions), ["resized_loss_grad_cells<float, bf16, 5>"]);
        assert_eq!((launches(&actions)[0].grid, launches(&actions)[0].block), ([8, 19, 8], 256));
    }

    #[test]
    fn what_is_made_smaller_or_has_many_classes_goes_the_plain_way() {
        let names_of = |logits: &str, labels: &str| {
            let of_labels = [format!("i32{labels}"), format!("f32{labels}")];
            let inputs = [logits, &of_labels[0], &of_labels[1]];
            let op = Op::ResizedCrossEntropy { smoothing: 0.0 };
            let forward = step(op.clone(), &inputs, &["f32[]", "f32[4]", &of_labels[1]]).unwrap();
            let types = inputs.map(|t| t.parse::<Type>().unwrap());
            let parts = launches(&forward)[0].grid[0] as usize;
            assert_eq!(scratch(&op, &types.iter().collect::<Vec<_>>()), parts * 4 * 8);
            let inputs = [&inputs[..], &[&of_labels[1], "f32[]"]].concat();
            let op = Op::ResizedCrossEntropyGrad { smoothing: 0.0 };
            let backward = step(op, &inputs, &[logits]).unwrap();
            [names(&forward)[0].to_string(), names(&backward)[0].to_string()]
        };
        let plain =
            |lanes| [format!("resized_loss<float, {lanes}>"), "resized_loss_grad<float, float>".into()];
        assert_eq!(names_of("f32[1,8,8,19]", "[1,7,16]"), plain(1));
        assert_eq!(names_of("f32[1,8,8,257]", "[1,32,32]"), plain(9));
        // Of so many pixels in a row, the classes don't fit into shared memory.
        let wide = ["resized_loss<float, 8>", "resized_loss_grad_cells<float, float, 8>"];
        assert_eq!(names_of("f32[1,64,64,256]", "[1,128,128]"), wide);
    }

    #[test]
    fn tiles_have_the_pixels_that_their_results_are_made_of() {
        let first = |o: usize, len: usize, out: usize| {
            ((2 * o + 1) * len).saturating_sub(out).min(2 * out * (len - 1)) / (2 * out)
        };
        for (w, width) in [(128, 512), (32, 512), (19, 38), (9, 131), (64, 64), (37, 100), (1, 7), (2, 333)] {
            let Tiles { columns, .. } = sizes([1, w, w], [width, width], 19).tiles().unwrap();
            for start in (0..width).step_by(TILE) {
                let last = (start + TILE).min(width) - 1;
                let next = (first(last, w, width) + 1).min(w - 1);
                assert!(next + 1 - first(start, w, width) <= columns, "{w} to {width} at {start}");
            }
        }
    }

    #[test]
    fn the_gradient_fills_the_processors() {
        let auxiliary = sizes([8, 32, 32], [512, 512], 150);
        let cells = auxiliary.cells(132).unwrap();
        assert_eq!(cells, Cells { steps: 2, shift: 4, warps: 8, grid: [16, 5, 8] });
        // One pixel, and one row.
        let cells = sizes([2, 1, 1], [32, 16], 40).cells(132).unwrap();
        assert_eq!((cells.shift, cells.warps, cells.grid), (4, 1, [1, 1, 2]));
        let cells = sizes([1, 1, 30], [50, 120], 3).cells(132).unwrap();
        assert_eq!((cells.shift, cells.warps, cells.grid[1]), (2, 1, 1));
    }

    #[test]
    fn too_many_classes_are_refused() {
        let inputs = ["f32[1,2,2,1025]", "i32[1,4,4]", "f32[1,4,4]"];
        let op = Op::ResizedCrossEntropy { smoothing: 0.0 };
        assert!(step(op, &inputs, &["f32[]", "f32[4]", "f32[1,4,4]"]).is_err());
    }
}
