//! Small weight gradients in half precision on Hopper, several in one launch, by `weights.cu`. Each has too few tiles for all multiprocessors;
//! cuBLASLt would split its sums, use two launches, and leave the next one waiting.

use super::{hopper, linear};
use crate::action::{
    Action, Arg, Epilogue, Facts, Kernel, Launch, Matmul, Matrix, Source, StepContext, TensorMap, c_type,
};
use crate::error::CudaError;
use crate::matmul::sizes;
use graph::{Batching, DType};

/// Most matmuls of a launch.
pub const MOST: usize = 4;

/// Matmuls that are batched. Larger or longer ones fill a GPU one by one; rows are of whole units of 16 bytes, as the copy engine takes
/// them; and the chain beside them would wait for their memory, were it not left alone for a while.
pub const BATCHING: Batching = Batching {
    most: MOST,
    small: 16 * 192 * 192,
    short: 10_000_000_000,
    together: 48 * 192 * 192,
    unit: 8,
    stays: 8,
};
/// Depth of a stage, and columns of a copied box.
const DEPTH: usize = 64;
/// Most blocks that share a tile. Eight finish sooner, but slow down what runs beside them.
const CLUSTERS: [usize; 3] = [4, 2, 1];

/// Most blocks: seven eighths of an H200's multiprocessors, since clusters lie within parts of the GPU, and their multiprocessors are
/// seldom a multiple of a cluster's. The same number everywhere, so that sums are.
const ROOM: usize = 115;

/// Tiles of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// 64 rows for each warpgroup.
    groups: usize,
    columns: usize,
    stages: usize,
}

/// Widths of transformers are multiples of the one or the other.
const TILES: [Tile; 2] =
    [Tile { groups: 3, columns: 192, stages: 4 }, Tile { groups: 2, columns: 128, stages: 6 }];

impl Tile {
    fn rows(self) -> usize {
        64 * self.groups
    }

    fn count(self, result: &Matrix) -> usize {
        result.rows.div_ceil(self.rows()) * result.columns.div_ceil(self.columns)
    }

    fn name(self, dtype: DType, cluster: usize) -> Option<String> {
        let Tile { groups, columns, stages } = self;
        Some(format!("weights<{}, {groups}, {columns}, {stages}, {cluster}>", c_type(dtype)?))
    }

    /// Bytes of shared memory, the kernel's `Weights::SHARED`.
    fn shared(self) -> usize {
        self.stages * (self.rows() + self.columns) * DEPTH * 2 + 128
    }
}

/// Actions of weight gradients that may run at the same time: batched if possible, or one by one.
pub fn actions(steps: &[StepContext<'_>]) -> Result<Vec<Action>, CudaError> {
    let mut each = steps.iter().map(linear::actions).collect::<Result<Vec<_>, _>>()?.concat();
    let matmuls: Vec<Matmul> = each.iter().filter_map(matmul).collect();
    if let Some(launch) = steps.first().and_then(|cx| together(&matmuls, cx.facts)) {
        each.retain(|action| matmul(action).is_none());
        each.push(Action::Launch(launch));
    }
    Ok(each)
}

fn matmul(action: &Action) -> Option<Matmul> {
    match action {
        Action::Matmul(matmul) => Some(*matmul),
        _ => None,
    }
}

/// Matmuls of one depth in one launch. `None` if this GPU has no such kernel, or if they fill it one by one.
pub(crate) fn together(matmuls: &[Matmul], facts: &Facts) -> Option<Launch> {
    let (first, others) = matmuls.split_first()?;
    let (dtype, (_, _, depth)) = (first.left.dtype, sizes(first));
    let alike = |matmul: &Matmul| matmul.left.dtype == dtype && sizes(matmul).2 == depth;
    if !(1..MOST).contains(&others.len())
        || !others.iter().all(alike)
        || !matmuls.iter().all(|p| takes(p, facts))
    {
        return None;
    }
    let tiles = |tile: Tile| matmuls.iter().map(|p| tile.count(&p.result)).sum::<usize>();
    let tile = TILES.into_iter().min_by_key(|tile| tiles(*tile) * tile.rows() * tile.columns)?;
    let room = ROOM / tiles(tile);
    let cluster = CLUSTERS.into_iter().find(|c| *c <= room && *c <= depth.div_ceil(DEPTH))?;
    if room < 2 || tiles(tile) * cluster > facts.processors as usize {
        return None;
    }
    // Those there are not have no rows.
    let absent =
        Matmul { result: Matrix { rows: 0, address: 0, ..first.result }, accumulate: false, ..*first };
    let all: [Matmul; MOST] = std::array::from_fn(|i| matmuls.get(i).copied().unwrap_or(absent));
    let map = |matrix| {
        let (box_rows, box_columns) = (DEPTH as u32, DEPTH as u32);
        Arg::Tensor(TensorMap { matrix, box_rows, box_columns, swizzled: true })
    };
    let mut args: Vec<Arg> = all.iter().flat_map(|p| [map(p.left), map(p.right)]).collect();
    args.extend(all.iter().map(|p| Arg::Pointer(p.result.address)));
    args.extend(all.iter().map(|p| Arg::I32(p.result.rows as i32)));
    args.extend(all.iter().map(|p| Arg::I32(p.result.columns as i32)));
    let adds = all.iter().enumerate().map(|(i, p)| i32::from(p.accumulate) << i).sum();
    args.extend([Arg::I32(depth as i32), Arg::I32(adds)]);
    Some(Launch {
        kernel: Kernel::new(Source::Weights, tile.name(dtype, cluster)?),
        grid: [(tiles(tile) * cluster) as u32, 1, 1],
        block: 128 * (tile.groups as u32 + 1),
        shared: tile.shared() as u32,
        args,
    })
}

/// Tells whether it is a matmul of half precision to f32 with a transposed left side.
fn takes(matmul: &Matmul, facts: &Facts) -> bool {
    let Matmul { left, left_transposed, right, right_transposed, result, epilogue, .. } = matmul;
    hopper::fits(&[left, right], facts)
        && (*left_transposed, *right_transposed, *epilogue) == (true, false, Epilogue::None)
        && result.dtype == DType::F32
        && result.address % 8 == 0
        && result.stride == result.columns
}

/// Every kernel here, with the only compute capability it is for.
pub fn kernels() -> Vec<(Kernel, u32)> {
    let mut all = Vec::new();
    for (tile, cluster) in TILES.into_iter().flat_map(|tile| CLUSTERS.map(|cluster| (tile, cluster))) {
        let names = [DType::Bf16, DType::F16].into_iter().filter_map(|dtype| tile.name(dtype, cluster));
        all.extend(names.map(|name| (Kernel::new(Source::Weights, name), 90)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matmul(rows: usize, columns: usize, depth: usize) -> Matmul {
        let half = |rows, columns| Matrix::new(4096, DType::Bf16, rows, columns);
        Matmul {
            left: half(depth, rows),
            left_transposed: true,
            right: half(depth, columns),
            right_transposed: false,
            result: Matrix::new(1 << 20, DType::F32, rows, columns),
            accumulate: false,
            epilogue: Epilogue::None,
            tf32: false,
        }
    }

    /// The weights of a block.
    fn block(width: usize, depth: usize) -> Vec<Matmul> {
        let sizes = [(width, 4 * width), (4 * width, width), (width, width), (3 * width, width)];
        sizes.map(|(rows, columns)| matmul(rows, columns, depth)).to_vec()
    }

    #[test]
    fn the_weights_of_a_small_block_are_one_launch() {
        let facts = Facts::h200();
        let of = |matmuls: &[Matmul]| {
            let launch = together(matmuls, &facts)?;
            assert!(launch.shared <= facts.shared_per_block && launch.grid[0] <= facts.processors);
            assert!(kernels().contains(&(launch.kernel.clone(), 90)));
            Some((launch.kernel.name, launch.grid[0]))
        };
        let named = |name: &str, blocks| Some((format!("weights<bf16, {name}>"), blocks));
        assert_eq!(of(&block(192, 8320)), named("3, 192, 4, 4", 48));
        assert_eq!(of(&block(384, 12608)), named("3, 192, 4, 2", 96));
        assert_eq!(of(&block(128, 8192)), named("2, 128, 6, 4", 48));
        // No longer than the sums are.
        assert_eq!(of(&block(192, 128)), named("3, 192, 4, 2", 24));
        assert_eq!(of(&block(192, 8)), named("3, 192, 4, 1", 12));
        assert_eq!(of(&block(192, 8320)[..3]), named("3, 192, 4, 4", 36));
    }

    #[test]
    fn what_is_not_there_has_no_rows() {
        let mut matmuls = block(192, 8320);
        matmuls.truncate(2);
        matmuls[1].accumulate = true;
        let args = together(&matmuls, &Facts::h200()).expect("fits").args;
        let tensors = args.iter().filter(|arg| matches!(arg, Arg::Tensor(_))).count();
        assert_eq!(tensors, 2 * MOST);
        let numbers = [192, 768, 0, 0, 768, 192, 768, 768, 8320, 2].map(Arg::I32);
        assert_eq!(args[3 * MOST..], numbers);
    }

    #[test]
    fn others_are_made_one_by_one() {
        let hopper = Facts::h200();
        let all = block(192, 8320);
        let changed = |change: &dyn Fn(&mut Matmul)| {
            let mut all = all.clone();
            change(&mut all[2]);
            all
        };
        let cases = [
            vec![],
            all[..1].to_vec(),
            [&all[..], &all[..1]].concat(),
            block(768, 50432),
            changed(&|p| p.left.rows = 128),
            changed(&|p| p.left.dtype = DType::F16),
            changed(&|p| p.left.stride = 10),
            changed(&|p| p.right.dtype = DType::F32),
            changed(&|p| p.result.dtype = DType::Bf16),
            changed(&|p| p.left_transposed = false),
            changed(&|p| p.epilogue = Epilogue::Bias(64)),
        ];
        for matmuls in cases {
            assert_eq!(together(&matmuls, &hopper), None, "{matmuls:?}");
        }
        assert!(together(&all, &hopper).is_some());
        assert_eq!(together(&all, &Facts { processors: 40, ..hopper.clone() }), None);
        assert_eq!(together(&all, &Facts { capability: (10, 0), ..hopper }), None);
    }
}
