//! Products of halves with an exact GELU on the way out, for Hopper: `product.cu`.
//!
//! cuBLASLt multiplies as fast, but its GELU is the tanh form, and passes of their own cost memory traffic.

use crate::action::{
    Action, Address, Arg, Facts, Kernel, Launch, Matrix, Operand, Source, TensorMap, c_type,
};
use graph::DType;

/// Rows of a tile, and of one row of partial column sums.
const TILE_ROWS: usize = 128;
/// Blocks that share the right operand's tiles.
const CLUSTER: usize = 2;
/// Rows of tiles (of clusters) that are walked column by column.
const GROUP: i32 = 8;
const THREADS: u32 = 384;
/// Of the sum in a stage.
const DEPTH: u32 = 64;
/// Rows and columns of what leaves or enters at once.
const PIECE: u32 = 64;

/// What lies beside a tile's width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    columns: usize,
    stages: usize,
}

/// Wide tiles read each operand less often; narrow ones fit more widths.
const CUTS: [(Cut, usize); 2] =
    [(Cut { columns: 192, stages: 4 }, 100), (Cut { columns: 128, stages: 5 }, 112)];

impl Cut {
    /// The one whose last round of tiles ends first.
    fn best(rows: usize, columns: usize, facts: &Facts) -> Self {
        let clusters = facts.processors as usize / CLUSTER;
        let time = |(cut, cost): &(Cut, usize)| {
            let tiles = rows.div_ceil(TILE_ROWS * CLUSTER) * columns.div_ceil(cut.columns);
            tiles.div_ceil(clusters) * cut.columns * cost
        };
        CUTS.iter().min_by_key(|c| time(c)).map_or(CUTS[0].0, |c| c.0)
    }

    fn name(self, dtype: DType, epilogue: Epilogue) -> Option<String> {
        let (epilogue, right_rows) = match epilogue {
            Epilogue::Gelu => ("GELU", false),
            Epilogue::GeluGrad => ("GELU_GRAD", true),
        };
        let Cut { columns, stages } = self;
        Some(format!(
            "product<{}, {epilogue}, {right_rows}, true, 2, {columns}, {stages}, {CLUSTER}>",
            c_type(dtype)?
        ))
    }

    /// As `Product::SHARED`: stages, pieces, a row for each warpgroup, barriers.
    fn shared(self) -> u32 {
        let stage = (TILE_ROWS + self.columns) * DEPTH as usize * 2;
        let pieces = 2 * 4 * (PIECE * PIECE * 2) as usize;
        (self.stages * stage + pieces + 2048 + 256) as u32
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Epilogue {
    Gelu,
    GeluGrad,
}

/// Bytes for the partial column sums of a result.
pub fn scratch(rows: usize, columns: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * columns * DType::F32.bytes()
}

/// pre (M,N) = x (M,K)·wᵀ + bias, y = GELU(pre), w (N,K). The GELU sees pre before it is rounded.
///
/// None where this GPU, or these types or sizes, have no such kernel.
pub fn linear_gelu(
    x: &Operand,
    w: &Operand,
    bias: Option<&Operand>,
    pre: &Operand,
    y: &Operand,
    facts: &Facts,
) -> Option<Vec<Action>> {
    let (rows, columns, depth) = (x.shape.rows(), w.shape.rows(), x.shape.last());
    if !fits(&[x, w, pre, y], facts) || bias.is_some_and(|b| b.dtype != x.dtype) || w.shape.last() != depth {
        return None;
    }
    let cut = Cut::best(rows, columns, facts);
    let right = map(w, columns, depth, (cut.columns / CLUSTER) as u32, DEPTH);
    let outputs = [pre, y].map(|o| map(o, rows, columns, PIECE, PIECE));
    let bias = bias.map_or(0, |b| b.address);
    let sizes = [rows, columns, depth];
    Some(vec![launch(cut, Epilogue::Gelu, x, right, outputs, bias, 0, sizes, facts)?])
}

/// dpre (M,N) = dy (M,K)·w ∘ GELU'(pre), w (K,N); sums (N), f32, its column sums. `scratch` has [`scratch`] bytes.
///
/// None where this GPU, or these types or sizes, have no such kernel.
pub fn gelu_grad_product(
    dy: &Operand,
    w: &Operand,
    pre: &Operand,
    dpre: &Operand,
    sums: Address,
    scratch: Address,
    facts: &Facts,
) -> Option<Vec<Action>> {
    let (rows, columns, depth) = (dy.shape.rows(), w.shape.last(), dy.shape.last());
    if !fits(&[dy, w, pre, dpre], facts) || w.shape.rows() != depth {
        return None;
    }
    let cut = Cut::best(rows, columns, facts);
    let right = map(w, depth, columns, DEPTH / CLUSTER as u32, PIECE);
    let pieces = [pre, dpre].map(|o| map(o, rows, columns, PIECE, PIECE));
    let product =
        launch(cut, Epilogue::GeluGrad, dy, right, pieces, 0, scratch, [rows, columns, depth], facts)?;
    let partial_rows = rows.div_ceil(TILE_ROWS) as i32;
    let add = Launch {
        kernel: add_partial(),
        grid: [columns.div_ceil(32) as u32, 1, 1],
        block: 1024,
        shared: 0,
        args: vec![
            Arg::Pointer(scratch),
            Arg::Pointer(sums),
            Arg::I32(partial_rows),
            Arg::I32(columns as i32),
        ],
    };
    Some(vec![product, Action::Launch(add)])
}

/// Every kernel here, with the capability it is for: that one only.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut all = vec![(add_partial(), 90)];
    for dtype in [DType::Bf16, DType::F16] {
        for epilogue in [Epilogue::Gelu, Epilogue::GeluGrad] {
            let names = CUTS.iter().filter_map(|(cut, _)| cut.name(dtype, epilogue));
            all.extend(names.map(|name| (Kernel::new(Source::Product, name), 90)));
        }
    }
    all
}

fn add_partial() -> Kernel {
    Kernel::new(Source::Product, "add_partial")
}

/// One type of halves, on Hopper; the copy engine wants addresses and rows in multiples of 16 bytes.
fn fits(operands: &[&Operand], facts: &Facts) -> bool {
    let dtype = operands[0].dtype;
    facts.capability == (9, 0)
        && facts.processors as usize >= CLUSTER
        && facts.shared_per_block >= 232_448
        && dtype.is_half()
        && operands.iter().all(|o| {
            o.dtype == dtype
                && o.address % 16 == 0
                && o.shape.last() > 0
                && o.shape.last() % 8 == 0
                && o.shape.rows() > 0
                && o.shape.rows() <= 1 << 30
        })
}

fn map(operand: &Operand, rows: usize, columns: usize, box_rows: u32, box_columns: u32) -> TensorMap {
    let matrix = Matrix::new(operand.address, operand.dtype, rows, columns);
    TensorMap { matrix, box_rows, box_columns, swizzled: true }
}

#[allow(clippy::too_many_arguments)] // What the kernel takes.
fn launch(
    cut: Cut,
    epilogue: Epilogue,
    left: &Operand,
    right: TensorMap,
    [first, second]: [TensorMap; 2],
    bias: Address,
    partial: Address,
    [rows, columns, depth]: [usize; 3],
    facts: &Facts,
) -> Option<Action> {
    let blocks = facts.processors as usize / CLUSTER * CLUSTER;
    Some(Action::Launch(Launch {
        kernel: Kernel::new(Source::Product, cut.name(left.dtype, epilogue)?),
        grid: [blocks as u32, 1, 1],
        block: THREADS,
        shared: cut.shared(),
        args: vec![
            Arg::Tensor(map(left, rows, depth, TILE_ROWS as u32, DEPTH)),
            Arg::Tensor(right),
            Arg::Tensor(first),
            Arg::Tensor(second),
            Arg::Pointer(bias),
            Arg::Pointer(partial),
            Arg::I32(rows as i32),
            Arg::I32(columns as i32),
            Arg::I32(depth as i32),
            Arg::I32(GROUP),
        ],
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::Shape;

    fn operand(address: Address, shape: [usize; 2]) -> Operand {
        Operand { address, dtype: DType::Bf16, shape: Shape::from(shape) }
    }

    fn first(actions: &[Action]) -> &Launch {
        match &actions[0] {
            Action::Launch(launch) => launch,
            other => panic!("{other:?}"),
        }
    }

    fn boxes(launch: &Launch) -> Vec<(usize, usize, u32, u32)> {
        let tensor = |arg: &Arg| match arg {
            Arg::Tensor(t) => Some((t.matrix.rows, t.matrix.columns, t.box_rows, t.box_columns)),
            _ => None,
        };
        launch.args.iter().filter_map(tensor).collect()
    }

    #[test]
    fn boxes_are_what_the_kernel_loads() {
        let facts = Facts::h200();
        let (x, w) = (operand(4096, [50432, 768]), operand(8192, [3072, 768]));
        let (pre, y) = (operand(1 << 20, [50432, 3072]), operand(2 << 20, [50432, 3072]));
        let forward = linear_gelu(&x, &w, None, &pre, &y, &facts).expect("fits");
        let launch = first(&forward);
        assert_eq!(launch.kernel.name, "product<bf16, GELU, false, true, 2, 192, 4, 2>");
        assert_eq!((launch.grid[0], launch.shared), (132, 231_680));
        let piece = (50432, 3072, 64, 64);
        assert_eq!(boxes(launch), [(50432, 768, 128, 64), (3072, 768, 96, 64), piece, piece]);

        let (dy, w) = (operand(4096, [50432, 768]), operand(8192, [768, 3072]));
        let back = gelu_grad_product(&dy, &w, &pre, &y, 256, 512, &facts).expect("fits");
        assert_eq!(back.len(), 2);
        assert_eq!(boxes(first(&back)), [(50432, 768, 128, 64), (768, 3072, 32, 64), piece, piece]);
        assert_eq!(scratch(50432, 3072), 394 * 3072 * 4);
    }

    #[test]
    fn every_launch_is_of_a_listed_kernel() {
        let facts = Facts::h200();
        let listed = kernels();
        for (rows, columns, depth) in
            [(50432, 3072, 768), (8320, 768, 192), (50432, 4096, 1024), (8, 8, 8), (130, 72, 200)]
        {
            let (x, w) = (operand(0, [rows, depth]), operand(0, [columns, depth]));
            let (pre, back) = (operand(0, [rows, columns]), operand(0, [depth, columns]));
            let mut actions = linear_gelu(&x, &w, None, &pre, &pre, &facts).expect("fits");
            actions.extend(gelu_grad_product(&x, &back, &pre, &pre, 0, 0, &facts).expect("fits"));
            for action in &actions {
                let launch = first(std::slice::from_ref(action));
                assert!(listed.iter().any(|(k, capability)| *k == launch.kernel && *capability == 90));
                assert!(launch.shared <= facts.shared_per_block);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_left_to_others() {
        let hopper = Facts::h200();
        let (x, w, y) = (operand(0, [64, 64]), operand(0, [32, 64]), operand(0, [64, 32]));
        assert!(linear_gelu(&x, &w, None, &y, &y, &hopper).is_some());
        let older = Facts { capability: (8, 0), ..hopper.clone() };
        assert!(linear_gelu(&x, &w, None, &y, &y, &older).is_none());
        let odd = operand(0, [12, 64]);
        assert!(linear_gelu(&x, &odd, None, &operand(0, [64, 12]), &y, &hopper).is_none());
        let wide = Operand { dtype: DType::F32, ..x.clone() };
        assert!(linear_gelu(&wide, &w, None, &y, &y, &hopper).is_none());
        let askew = Operand { address: 8, ..x };
        assert!(linear_gelu(&askew, &w, None, &y, &y, &hopper).is_none());
    }
}
