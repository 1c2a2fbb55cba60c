//! Half-precision matmuls for Hopper, by `matmul.cu`: plain ones where they are faster than cuBLASLt's, which `tuner.rs` measures,
//! and those with a fused exact GELU. cuBLASLt's GELU is the tanh form, and separate kernels cost memory traffic.

use crate::action::{
    Action, Address, Arg, Epilogue, Facts, Kernel, Launch, Matmul, Matrix, Operand, PartialSum, Source,
    TensorMap, c_type,
};
use crate::matmul::sizes;
use graph::DType;

/// Rows of a tile, of most, and of one row of partial column sums.
const TILE_ROWS: usize = 128;
const THREADS: u32 = 384;
/// Depth of a stage.
const DEPTH: u32 = 64;
/// Rows and columns of a copied box.
const PIECE: u32 = 64;

/// Tiling of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Rows and columns of a tile.
    rows: usize,
    columns: usize,
    stages: usize,
    /// Blocks that share the right operand's tiles.
    cluster: usize,
    /// Rows of tiles (of clusters) that are walked column by column.
    group: usize,
}

const fn cut(columns: usize, stages: usize, cluster: usize, group: usize) -> Tiling {
    Tiling { rows: TILE_ROWS, columns, stages, cluster, group }
}

/// Tiles of half the rows, the first of which are finished sooner.
const fn low(columns: usize, stages: usize) -> Tiling {
    Tiling { rows: TILE_ROWS / 2, ..cut(columns, stages, 1, 1) }
}

/// Tilings tried for plain matmuls: wide tiles read each operand less often, narrow ones fit more widths.
const WIDE: [Tiling; 3] = [cut(192, 4, 1, 1), cut(192, 4, 1, 8), cut(192, 4, 2, 8)];
const NARROW: [Tiling; 2] = [cut(128, 6, 1, 1), cut(128, 6, 1, 8)];
/// Tilings for results of few tiles.
const LOW: [Tiling; 2] = [low(192, 6), Tiling { cluster: 2, ..low(192, 6) }];

/// Tilings with a GELU, with the cost of an element where the matmul dominates, and where the epilogue does. Measured on an H200, with
/// 50432 × 3072 results of depth 768 and 8320 × 768 of 192; except low tiles where the matmul dominates: they read the
/// right operand twice as often, and were not tried there.
const GELU: [(Tiling, usize, usize); 3] =
    [(cut(192, 4, 1, 1), 100, 100), (cut(128, 5, 1, 1), 103, 103), (low(192, 5), 115, 99)];
const GELU_GRAD: [(Tiling, usize, usize); 2] = [(cut(192, 4, 1, 1), 103, 103), (cut(128, 5, 1, 1), 100, 100)];

/// Depth from which on, and rounds of tiles above which, wide tiles with a GELU's gradient are faster: measured in steps of ViT-H/14, whose
/// results are 16448 × 5120 of depth 1280.
const DEEP: (usize, usize) = (1280, 4);

/// Time of a warpgroup's epilogue of a tile with a GELU, as the depth of matmul that takes as long.
const FINISH: usize = 640;

/// Operation fused after a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FusedOp {
    /// Nothing, or a bias. Of a right side that lies as (K,N), or as (N,K).
    Plain {
        right_rows: bool,
    },
    Gelu,
    GeluGrad,
}

impl FusedOp {
    fn right_rows(self) -> bool {
        match self {
            FusedOp::Plain { right_rows } => right_rows,
            FusedOp::Gelu => false,
            FusedOp::GeluGrad => true,
        }
    }
}

impl Tiling {
    /// The tiling whose last tiles are done first. A block's two warpgroups alternate matmuls and epilogues of their tiles beside each
    /// other.
    fn best(cuts: &[(Tiling, usize, usize)], sizes: [usize; 3], facts: &Facts) -> Option<Self> {
        let [rows, columns, depth] = sizes;
        let time = |(cut, multiplying, finishing): &&(Tiling, usize, usize)| {
            let rounds = cut.rounds(rows, columns, facts);
            let turns = rounds.div_ceil(2) * (depth + FINISH);
            (rounds * depth * multiplying).max(turns * finishing) * cut.rows * cut.columns
        };
        cuts.iter().min_by_key(time).map(|c| c.0)
    }

    fn tiles(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.rows) * columns.div_ceil(self.columns)
    }

    /// Most tiles of a block.
    fn rounds(self, rows: usize, columns: usize, facts: &Facts) -> usize {
        let clusters = rows.div_ceil(self.rows * self.cluster) * columns.div_ceil(self.columns);
        clusters.div_ceil((facts.processors as usize / self.cluster).max(1))
    }

    fn name(self, dtype: DType, then: FusedOp) -> Option<String> {
        let epilogue = match then {
            FusedOp::Plain { .. } => "PLAIN",
            FusedOp::Gelu => "GELU",
            FusedOp::GeluGrad => "GELU_GRAD",
        };
        let (Tiling { columns, stages, cluster, .. }, right_rows) = (self, then.right_rows());
        let (element, halves) = (c_type(dtype)?, self.rows / 64);
        Some(format!(
            "matmul<{element}, {epilogue}, {right_rows}, true, {halves}, {columns}, {stages}, {cluster}>"
        ))
    }

    /// Bytes of shared memory, the kernel's `Matmul::SHARED`: stages, boxes, a row for each warpgroup, barriers.
    fn shared(self, then: FusedOp) -> u32 {
        let stage = (self.rows + self.columns) * DEPTH as usize * 2;
        let pieces = if matches!(then, FusedOp::Plain { .. }) { 2 } else { 4 };
        (self.stages * stage + 2 * pieces * (PIECE * PIECE * 2) as usize + 2048 + 256) as u32
    }

    /// Rows and columns of the right side's boxes.
    fn right_box(self, then: FusedOp) -> (u32, u32) {
        match then.right_rows() {
            true => (DEPTH / self.cluster as u32, PIECE),
            false => ((self.columns / self.cluster) as u32, DEPTH),
        }
    }

    /// Text to keep, such as `128x192x4 2 8`.
    pub fn text(self) -> String {
        let Tiling { rows, columns, stages, cluster, group } = self;
        format!("{rows}x{columns}x{stages} {cluster} {group}")
    }
}

/// Tilings of our kernel for a matmul; none where this GPU, or these types or sizes, have no such kernel, or where
/// most of the GPU would be idle.
pub fn candidates(matmul: &Matmul, facts: &Facts) -> Vec<Tiling> {
    let (rows, columns, _) = sizes(matmul);
    let ([wide, ..], [narrow, ..]) = (WIDE, NARROW);
    if !takes(matmul, facts) || 2 * narrow.tiles(rows, columns) < facts.processors as usize {
        return Vec::new();
    }
    let padded = |cut: Tiling| columns.next_multiple_of(cut.columns);
    let mut cuts = WIDE.to_vec();
    if padded(narrow) < padded(wide) || wide.tiles(rows, columns) < facts.processors as usize {
        cuts.extend(NARROW);
    }
    if wide.tiles(rows, columns) < 2 * facts.processors as usize {
        cuts.extend(LOW);
    }
    cuts
}

/// Launch of our kernel for a matmul, if it supports it.
pub fn plain(matmul: &Matmul, cut: Tiling, facts: &Facts) -> Option<Launch> {
    if !takes(matmul, facts) {
        return None;
    }
    let then = FusedOp::Plain { right_rows: !matmul.right_transposed };
    let bias = match matmul.epilogue {
        Epilogue::None => 0,
        Epilogue::Bias(address) => address,
    };
    let (rows, columns, depth) = sizes(matmul);
    let sides = [matmul.left, matmul.right, matmul.result, matmul.result];
    launch(cut, then, sides, [bias, 0], [rows, columns, depth], facts)
}

fn takes(matmul: &Matmul, facts: &Facts) -> bool {
    let Matmul { left, right, result, .. } = matmul;
    fits(&[left, right, result], facts) && !matmul.left_transposed && !matmul.accumulate
}

/// Bytes for the partial column sums of a result.
pub fn parts(rows: usize, columns: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * columns * DType::F32.bytes()
}

/// Forward with GELU: pre (M,N) = x (M,K)·wᵀ + bias, y = GELU(pre), w (N,K). The GELU is of the unrounded pre.
///
/// `None` if this GPU, or these types or sizes, have no such kernel.
pub fn linear_gelu(
    x: &Operand,
    w: &Operand,
    bias: Option<&Operand>,
    pre: &Operand,
    y: &Operand,
    facts: &Facts,
) -> Option<Vec<Action>> {
    let (rows, columns, depth) = (x.shape.rows(), w.shape.rows(), x.shape.last());
    let sides = [matrix(x), matrix(w), matrix(pre), matrix(y)];
    if !fits(&sides.each_ref(), facts) || bias.is_some_and(|b| b.dtype != x.dtype) || w.shape.last() != depth
    {
        return None;
    }
    let cut = Tiling::best(&GELU, [rows, columns, depth], facts)?;
    let bias = bias.map_or(0, |b| b.address);
    Some(vec![Action::Launch(launch(cut, FusedOp::Gelu, sides, [bias, 0], [rows, columns, depth], facts)?)])
}

/// dpre (M,N) = dy (M,K)·w ∘ GELU'(pre), w (K,N); sums (N), f32, its column sums. `parts` has [`parts`] bytes.
///
/// `None` if this GPU, or these types or sizes, have no such kernel.
pub fn gelu_grad_matmul(
    dy: &Operand,
    w: &Operand,
    pre: &Operand,
    dpre: &Operand,
    sums: Address,
    parts: Address,
    facts: &Facts,
) -> Option<Vec<Action>> {
    let (rows, columns, depth) = (dy.shape.rows(), w.shape.last(), dy.shape.last());
    let sides = [matrix(dy), matrix(w), matrix(pre), matrix(dpre)];
    if !fits(&sides.each_ref(), facts) || w.shape.rows() != depth {
        return None;
    }
    let [(wide, ..), _] = GELU_GRAD;
    let is_deep = depth >= DEEP.0 && wide.rounds(rows, columns, facts) > DEEP.1;
    let cut = if is_deep { wide } else { Tiling::best(&GELU_GRAD, [rows, columns, depth], facts)? };
    let matmul = launch(cut, FusedOp::GeluGrad, sides, [0, parts], [rows, columns, depth], facts)?;
    let rows = rows.div_ceil(cut.rows);
    let sum = PartialSum { parts, rows, stride: columns, columns, start: None, out: sums };
    Some(vec![Action::Launch(matmul), Action::Sum(sum)])
}

/// Every kernel here, with the only compute capability it is for.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut all = Vec::new();
    let plain = WIDE.iter().chain(&NARROW).chain(&LOW);
    let ways = plain.flat_map(|cut| [false, true].map(|right_rows| (*cut, FusedOp::Plain { right_rows })));
    let gelu = GELU.iter().map(|(cut, ..)| (*cut, FusedOp::Gelu));
    let grad = GELU_GRAD.iter().map(|(cut, ..)| (*cut, FusedOp::GeluGrad));
    for (cut, then) in ways.chain(gelu).chain(grad) {
        let names = [DType::Bf16, DType::F16].into_iter().filter_map(|dtype| cut.name(dtype, then));
        all.extend(names.map(|name| (Kernel::new(Source::Matmul, name), 90)));
    }
    all
}

/// Tells whether a matmul is in half precision of one type, on Hopper; the copy engine needs addresses and rows in multiples of 16 bytes.
pub(super) fn fits(sides: &[&Matrix], facts: &Facts) -> bool {
    let dtype = sides[0].dtype;
    facts.capability == (9, 0)
        && facts.processors >= 2
        && facts.shared_per_block >= 232_448
        && dtype.is_half()
        && sides.iter().all(|side| {
            side.dtype == dtype
                && side.address % 16 == 0
                && side.stride % 8 == 0
                && (1..=1 << 30).contains(&side.columns)
                && side.columns % 8 == 0
                && (1..=1 << 30).contains(&side.rows)
        })
}

fn matrix(operand: &Operand) -> Matrix {
    Matrix::new(operand.address, operand.dtype, operand.shape.rows(), operand.shape.last())
}

fn launch(
    cut: Tiling,
    then: FusedOp,
    [left, right, first, second]: [Matrix; 4],
    [bias, partial]: [Address; 2],
    [rows, columns, depth]: [usize; 3],
    facts: &Facts,
) -> Option<Launch> {
    let blocks = facts.processors as usize / cut.cluster * cut.cluster;
    let map = |matrix, (box_rows, box_columns)| {
        Arg::Tensor(TensorMap { matrix, box_rows, box_columns, swizzled: true })
    };
    Some(Launch {
        kernel: Kernel::new(Source::Matmul, cut.name(left.dtype, then)?),
        grid: [blocks as u32, 1, 1],
        block: THREADS,
        shared: cut.shared(then),
        args: vec![
            map(left, (cut.rows as u32, DEPTH)),
            map(right, cut.right_box(then)),
            map(first, (PIECE, PIECE)),
            map(second, (PIECE, PIECE)),
            Arg::Pointer(bias),
            Arg::Pointer(partial),
            Arg::I32(rows as i32),
            Arg::I32(columns as i32),
            Arg::I32(depth as i32),
            Arg::I32(cut.group as i32),
        ],
    })
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
        assert_eq!(launch.kernel.name, "matmul<bf16, GELU, false, true, 2, 192, 4, 1>");
        assert_eq!((launch.grid[0], launch.shared), (132, 231_680));
        let piece = (50432, 3072, 64, 64);
        assert_eq!(boxes(launch), [(50432, 768, 128, 64), (3072, 768, 192, 64), piece, piece]);

        let (dy, w) = (operand(4096, [50432, 768]), operand(8192, [768, 3072]));
        let back = gelu_grad_matmul(&dy, &w, &pre, &y, 256, 512, &facts).expect("fits");
        assert_eq!(back.len(), 2);
        assert_eq!(first(&back).kernel.name, "matmul<bf16, GELU_GRAD, true, true, 2, 128, 5, 1>");
        assert_eq!(boxes(first(&back)), [(50432, 768, 128, 64), (768, 3072, 64, 64), piece, piece]);
        assert_eq!(parts(50432, 3072), 394 * 3072 * 4);
    }

    /// Small results are cut so that both warpgroups have as much to finish; large ones as before.
    #[test]
    fn tiles_suit_the_size() {
        let facts = Facts::h200();
        let names = |rows, columns, depth| {
            let (x, w) = (operand(0, [rows, depth]), operand(0, [columns, depth]));
            let (pre, back) = (operand(0, [rows, columns]), operand(0, [depth, columns]));
            let forward = linear_gelu(&x, &w, None, &pre, &pre, &facts).expect("fits");
            let backward = gelu_grad_matmul(&x, &back, &pre, &pre, 0, 0, &facts).expect("fits");
            [first(&forward).kernel.name.clone(), first(&backward).kernel.name.clone()]
        };
        let named = |[forward, backward]: [&str; 2]| {
            [
                format!("matmul<bf16, GELU, false, true, {forward}, 1>"),
                format!("matmul<bf16, GELU_GRAD, true, true, {backward}, 1>"),
            ]
        };
        // ViT-Ti/4 at batch 128, ViT-B/16 at 64 to 512.
        assert_eq!(names(8320, 768, 192), named(["1, 192, 5", "2, 192, 4"]));
        for batch in [64, 128, 256, 512] {
            assert_eq!(names(197 * batch, 3072, 768), named(["2, 192, 4", "2, 128, 5"]), "{batch}");
        }
        // ViT-H/14 at 64, and its class tokens alone.
        assert_eq!(names(16_448, 5120, 1280), named(["2, 192, 4", "2, 192, 4"]));
        assert_eq!(names(64, 5120, 1280), named(["1, 192, 5", "2, 128, 5"]));
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
            actions.extend(gelu_grad_matmul(&x, &back, &pre, &pre, 0, 0, &facts).expect("fits"));
            for action in actions.iter().filter(|action| !matches!(action, Action::Sum(_))) {
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
    /// (M,K)·(K,N), the right side as (N,K) if `transposed`.
    fn matmul([m, n, k]: [usize; 3], transposed: bool) -> Matmul {
        let matrix = |rows, columns| Matrix::new(4096, DType::Bf16, rows, columns);
        Matmul {
            left: matrix(m, k),
            left_transposed: false,
            right: if transposed { matrix(n, k) } else { matrix(k, n) },
            right_transposed: transposed,
            result: matrix(m, n),
            accumulate: false,
            epilogue: Epilogue::Bias(256),
            tf32: false,
        }
    }

    #[test]
    fn plain_matmuls_are_tried_in_a_handful_of_ways() {
        let facts = Facts::h200();
        let names = |matmul: &Matmul| -> std::collections::BTreeSet<String> {
            let cuts = candidates(matmul, &facts);
            cuts.iter().map(|cut| plain(matmul, *cut, &facts).expect("fits").kernel.name).collect()
        };
        let mut all = std::collections::BTreeSet::new();
        for width in [768, 2304, 3072] {
            all.extend(names(&matmul([50432, width, 768], true)));
            all.extend(names(&matmul([50432, 768, width], false)));
        }
        // The head: too small.
        assert_eq!(candidates(&matmul([256, 1000, 768], true), &facts), []);
        assert_eq!(all.len(), 4);
        let listed = kernels();
        assert!(all.iter().all(|name| listed.iter().any(|(kernel, _)| kernel.name == *name)));
        // 1024 is no multiple of 192; 65 wide tiles leave half of the GPU idle, and are low enough for others.
        let ways = |sizes| candidates(&matmul(sizes, true), &facts);
        assert_eq!(ways([50432, 1024, 1024]), [&WIDE[..], &NARROW].concat());
        assert_eq!(ways([8320, 192, 768]), [&WIDE[..], &NARROW, &LOW].concat());
        assert_eq!(ways([8320, 576, 192]), [&WIDE[..], &LOW].concat());
    }

    #[test]
    fn plain_boxes_follow_the_layout_and_the_cluster() {
        let facts = Facts::h200();
        let [alone, .., shared] = WIDE;
        let forward = plain(&matmul([50432, 2304, 768], true), alone, &facts).expect("fits");
        let piece = (50432, 2304, 64, 64);
        assert_eq!(boxes(&forward), [(50432, 768, 128, 64), (2304, 768, 192, 64), piece, piece]);
        assert_eq!(
            forward.args[4..],
            [Arg::Pointer(256), Arg::Pointer(0), Arg::I32(50432), Arg::I32(2304), Arg::I32(768), Arg::I32(1),]
        );
        let back = plain(&matmul([50432, 768, 2304], false), shared, &facts).expect("fits");
        let piece = (50432, 768, 64, 64);
        assert_eq!(boxes(&back), [(50432, 2304, 128, 64), (2304, 768, 32, 64), piece, piece]);
        assert_eq!(back.kernel.name, "matmul<bf16, PLAIN, true, true, 2, 192, 4, 2>");
        for cut in WIDE.into_iter().chain(NARROW) {
            assert!(cut.shared(FusedOp::Plain { right_rows: true }) <= facts.shared_per_block);
        }
    }

    #[test]
    fn other_matmuls_are_not_tried() {
        let facts = Facts::h200();
        let base = matmul([50432, 768, 768], true);
        let wide = Matrix { dtype: DType::F32, ..base.result };
        let askew = Matrix { address: 8, ..base.left };
        for other in [
            Matmul { accumulate: true, ..base },
            Matmul { left_transposed: true, ..base },
            Matmul { result: wide, ..base },
            Matmul { left: askew, ..base },
            matmul([50432, 768, 12], true),
        ] {
            assert_eq!(candidates(&other, &facts), []);
            assert_eq!(plain(&other, WIDE[0], &facts), None);
        }
        let other = Facts { capability: (10, 0), ..facts };
        assert_eq!(candidates(&base, &other), []);
    }
}
