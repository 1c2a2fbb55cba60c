//! Attention by Hopper's warpgroups over any number of tokens: `attention_flash*.cu`.
//!
//! Legend: T tokens, D head size. A tile is 64 queries in the forward pass; a block is 128 tokens in the backward pass.

use super::attention::{Sizes, Variant, drop_args};
use crate::action::{Address, Arg, Facts, HeadMap, Kernel, Launch, Operand, Source, StepContext, c_type};
use graph::DType;

/// Tokens of a block, and of one row of partial column sums: the kernels' `BLOCK`.
pub(super) const BLOCK: usize = 128;
/// Tokens up to which a short last block gets code of its own.
const MOST_LONE: usize = 640;
/// Rows that a warp has of a result.
const STORED: usize = 16;
/// Bytes that the heads of a group may have in the L2 cache: their queries, dO and f32 dQ.
const GROUP_BYTES: usize = 24 << 20;
/// Multiprocessors that copies of dQ are counted for: which GPU it will be isn't known when memory is planned.
pub(super) const PROCESSORS: usize = 132;
/// Bytes that copies of dQ may have.
const COPY_BYTES: usize = 64 << 20;
/// Bytes that more than two copies may have for each block of a head's keys: the last kernel reads all copies, and the main kernel takes
/// as long as it has blocks.
const COPY_BYTES_A_BLOCK: usize = 2 << 20;
/// Part of the multiprocessors' time that whole heads must fill.
const FILLED: f64 = 0.9;
/// Words before the turns, for the number of the next item.
const TURNS_FROM: usize = 32;

/// Tells whether these kernels support such heads.
pub(super) fn takes(sizes: &Sizes, dtype: DType, facts: &Facts) -> bool {
    facts.capability == (9, 0) && facts.shared_per_block >= 232_448 && takes_heads(sizes, dtype)
}

/// Tells whether these kernels support such heads, on a GPU that has them.
fn takes_heads(sizes: &Sizes, dtype: DType) -> bool {
    dtype.is_half() && sizes.head.is_multiple_of(8) && sizes.head <= 128
}

/// Rows of partial column sums for a sample.
pub(super) fn pieces(sizes: &Sizes) -> usize {
    sizes.tokens.div_ceil(BLOCK)
}

/// Warpgroups of a block of the forward pass where so few tiles are there that smaller blocks run all at once.
pub(super) fn few(sizes: &Sizes) -> Option<usize> {
    let tiles = sizes.tokens.div_ceil(64);
    [1, 2].into_iter().find(|groups| sizes.total() * tiles.div_ceil(*groups) <= PROCESSORS)
}

/// Tells whether blocks of threads that take whole heads are busy to the end.
fn fills(sizes: &Sizes) -> bool {
    let rounds = sizes.total().div_ceil(PROCESSORS);
    sizes.total() as f64 >= FILLED * (rounds * PROCESSORS) as f64
}

pub(super) fn strips(sizes: &Sizes) -> usize {
    sizes.head.div_ceil(64)
}

/// Queries, keys and values as (batch, tokens, 3·heads, head size), in boxes of `rows` tokens.
pub(super) fn map(operand: &Operand, sizes: &Sizes, heads: usize, rows: usize) -> Arg {
    let sizes = [sizes.batch, sizes.tokens, heads, sizes.head];
    Arg::Heads(HeadMap { address: operand.address, dtype: operand.dtype, sizes, rows: rows as u32 })
}

/// Tiling of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Forward {
    /// Warpgroups of a block, with a tile of queries each.
    groups: usize,
    /// Keys in a stage.
    keys: usize,
    stages: usize,
    /// True if a block of threads has all queries of a head.
    whole: bool,
}

impl Forward {
    /// Chosen by measurements on an H200: three warpgroups are a quarter faster than two, a tenth with large heads, if there are tiles for them.
    /// Draws of dropout want the registers of two with large heads.
    fn choose(sizes: &Sizes, drop: bool) -> Self {
        let tiles = sizes.tokens.div_ceil(64);
        // Four tiles are two turns of two warpgroups, which need the same keys.
        if tiles == 4 && !drop && fills(sizes) {
            let keys = if sizes.tokens <= 2 * 112 { 112 } else { 128 };
            return Forward { groups: 2, keys, stages: 2, whole: true };
        }
        let few = few(sizes);
        let faster = if sizes.head <= 96 { 13 } else { 11 };
        let three = few.is_none()
            && 10 * tiles.next_multiple_of(3) <= faster * tiles.next_multiple_of(2)
            && (!drop || sizes.head <= 96);
        let (groups, keys, stages) = match (sizes.head, three) {
            _ if few == Some(1) => (1, 128, 2),
            (..=64, true) => (3, 128, 2),
            (65..=80, true) => (3, 112, 2),
            (81..=96, true) => (3, 96, 2),
            (97.., true) => (3, 80, 3),
            // Wider stages where that makes them fewer.
            (97.., false) if !drop && sizes.tokens.div_ceil(160) < sizes.tokens.div_ceil(128) => (2, 160, 2),
            _ => (2, 128, 2),
        };
        Forward { groups, keys, stages, whole: false }
    }

    /// Keys of the last stage, up to a multiple of 16.
    fn tail(&self, sizes: &Sizes) -> usize {
        ((sizes.tokens - 1) % self.keys + 1).next_multiple_of(16)
    }

    /// Bytes of shared memory, the kernel's `SHARED`: queries and results, keys and values.
    fn shared(&self, sizes: &Sizes) -> usize {
        let rows = 2 * self.groups * 64 + 2 * self.stages * self.keys;
        let sets = if self.whole { 2 } else { 1 };
        strips(sizes) * rows * 128 + 8 * (2 * sets * self.groups + 4 * self.stages)
    }

    fn kernel(&self, element: &str, sizes: &Sizes, drop: bool) -> Kernel {
        let (Forward { groups, keys, stages, whole }, Sizes { head, .. }) = (self, sizes);
        let tail = self.tail(sizes);
        Kernel::new(
            Source::AttentionFlash,
            format!(
                "attention_flash<{element}, {head}, {groups}, {keys}, {tail}, {stages}, {whole}, {drop}>"
            ),
        )
    }
}

pub(super) fn forward(cx: &StepContext<'_>, sizes: &Sizes, variant: Variant<'_>) -> Launch {
    let Variant { element, drop } = variant;
    let cut = Forward::choose(sizes, drop.is_some());
    let items = sizes.total() * if cut.whole { 1 } else { sizes.tokens.div_ceil(64 * cut.groups) };
    let heads = 3 * sizes.heads;
    let mut args = vec![
        map(cx.input(0), sizes, heads, 64),
        map(cx.input(0), sizes, heads, cut.keys),
        map(cx.output(0), sizes, sizes.heads, STORED),
        Arg::Pointer(cx.output(1).address),
        Arg::I32(sizes.tokens as i32),
        Arg::I32(sizes.heads as i32),
        Arg::I32(items as i32),
    ];
    args.extend(drop_args(cx, drop));
    Launch {
        kernel: cut.kernel(element, sizes, drop.is_some()),
        grid: [items.min(cx.facts.processors as usize) as u32, 1, 1],
        block: (128 * cut.groups + 128) as u32,
        shared: cut.shared(sizes) as u32,
        args,
    }
}

/// Tiling of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gradient {
    /// Number of 64-query halves of a tile.
    halves: usize,
    /// True if registers suffice to compute the next scores early.
    ahead: bool,
    /// True if dQ is computed beside the next probabilities: with one half, scores are then not computed early.
    later: bool,
    /// True if a last block of no more than 64 tokens has code of its own.
    lone: bool,
    /// True if a block of threads has all keys of a head.
    whole: bool,
}

impl Gradient {
    fn choose(sizes: &Sizes, drop: bool) -> Self {
        let halves = if sizes.head <= 64 { 2 } else { 1 };
        // As measured: what each block of keys reads and leaves costs more than one kernel for all, from some on.
        let most = if sizes.head <= 96 { 3 } else { 2 };
        let whole = halves == 1 && !drop && fills(sizes) && pieces(sizes) <= most;
        // With many blocks it costs more than it saves.
        let short = (sizes.tokens - 1) % BLOCK < 64 && sizes.tokens <= MOST_LONE;
        // Of two blocks a short one is a quarter of the work, of more it saves less than is gained otherwise.
        let later = halves == 2 || !drop && !whole && (pieces(sizes) > 2 || !short);
        let lone = short && (halves == 2 || !later);
        // With one tile of queries to a block, the next keys come too late for it.
        let ahead = halves == 2 || !later && sizes.head <= 112 && sizes.tokens > 64;
        Gradient { halves, ahead, later, lone, whole }
    }

    fn tiles(&self, sizes: &Sizes) -> usize {
        sizes.tokens.div_ceil(64 * self.halves)
    }

    /// Bytes of shared memory, the kernel's `SHARED`; with `sums` the kernel sums dV.
    fn shared(&self, sizes: &Sizes, sums: bool) -> usize {
        let queries = 64 * self.halves;
        let rows = 4 * BLOCK + 4 * queries;
        let sums = if self.halves == 2 && sums { 8 * sizes.head * 4 } else { 0 };
        let scores = 2 * self.halves * BLOCK * 128;
        strips(sizes) * rows * 128 + scores + 2 * 2 * queries * 4 + 16 * 8 + 16 + sums
    }

    /// Bytes of one copy of dQ.
    fn dq_bytes(&self, sizes: &Sizes) -> usize {
        let heads = if self.whole { PROCESSORS } else { sizes.total() };
        4 * heads * self.tiles(sizes) * 64 * self.halves * sizes.head
    }

    /// Copies of dQ as a power of two: as many as items of a head may run at once, where memory allows it, and two rather than one.
    fn copies_log(&self, sizes: &Sizes) -> u32 {
        if self.whole {
            return 0;
        }
        let (pieces, one) = (pieces(sizes), self.dq_bytes(sizes));
        let at_once = PROCESSORS.div_ceil(sizes.total()).min(pieces);
        let fits = |log: &u32| {
            let copies = (1 << log).min(pieces);
            copies * one <= COPY_BYTES && (*log <= 1 || copies * one <= pieces * COPY_BYTES_A_BLOCK)
        };
        (0..=at_once.next_power_of_two().ilog2()).rev().find(fits).unwrap_or(0)
    }

    /// Number of copies.
    fn copies(&self, sizes: &Sizes) -> usize {
        (1 << self.copies_log(sizes)).min(pieces(sizes))
    }

    /// Heads whose items follow each other. With more of them an item waits less for the one before, with fewer their dQ stays in
    /// the L2 cache.
    fn group(&self, sizes: &Sizes) -> usize {
        let bytes = sizes.tokens * sizes.head * (2 + 2 + 4);
        (GROUP_BYTES / bytes).clamp(1, sizes.total())
    }

    fn kernels(&self, element: &str, sizes: &Sizes, drop: bool, sum: bool) -> [Kernel; 3] {
        let (Gradient { halves, ahead, later, lone, whole }, Sizes { head, .. }) = (self, sizes);
        let (ends, grad) = (Source::AttentionFlashEnds, Source::AttentionFlashGrad);
        let copies = self.copies(sizes) > 1;
        let sums = sum && (drop || *whole);
        let cut = format!("{halves}, {ahead}, {later}, {lone}, {copies}, {whole}, {drop}, {sums}");
        [
            start_kernel(element, sizes, BLOCK, sum),
            Kernel::new(grad, format!("flash_grad<{element}, {head}, {cut}>")),
            Kernel::new(ends, format!("flash_grad_end<{element}, {head}, {halves}, {sum}>")),
        ]
    }
}

/// Layout of the scratch memory, in bytes from its start.
struct Scratch {
    log_sums: usize,
    deltas: usize,
    dq: usize,
    end: usize,
    /// Words that must be zeros.
    turns: usize,
}

impl Scratch {
    fn of(sizes: &Sizes, drop: bool) -> Self {
        let cut = Gradient::choose(sizes, drop);
        let tiles = sizes.total() * cut.tiles(sizes);
        let copies = cut.copies(sizes);
        let turns = TURNS_FROM + copies * tiles;
        let rows = (4 * sizes.total() * pieces(sizes) * BLOCK).next_multiple_of(256);
        let log_sums = (4 * turns).next_multiple_of(256);
        let (deltas, dq) = (log_sums + rows, log_sums + 2 * rows);
        Scratch { log_sums, deltas, dq, end: dq + copies * cut.dq_bytes(sizes), turns }
    }
}

/// Bytes of working memory for the gradient of heads that these kernels may take.
pub(super) fn scratch(sizes: &Sizes, dtype: DType, drop: bool) -> usize {
    if takes_heads(sizes, dtype) { Scratch::of(sizes, drop).end } else { 0 }
}

pub(super) fn start_kernel(element: &str, sizes: &Sizes, rows: usize, sum: bool) -> Kernel {
    let name = format!("flash_grad_start<{element}, {}, {rows}, {sum}>", sizes.head);
    Kernel::new(Source::AttentionFlashEnds, name)
}

/// The first launch: log-sum-exps and rowsum(dO ∘ O) for a multiple of `rows` tokens; some words become zeros.
pub(super) fn start(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    (element, rows, sum): (&str, usize, bool),
    [turns, log_sums, deltas]: [Arg; 3],
    zeros: usize,
) -> Launch {
    let number = |n: usize| Arg::I32(n as i32);
    let [out, lse, dout] = [1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address));
    let (tokens, heads, sums) = (number(sizes.tokens), number(sizes.heads), Arg::Pointer(cx.parts));
    Launch {
        kernel: start_kernel(element, sizes, rows, sum),
        grid: [(sizes.total() * sizes.tokens.div_ceil(rows)) as u32, 1, 1],
        block: 256 * strips(sizes) as u32,
        shared: 0,
        args: vec![out, dout, lse, turns, log_sums, deltas, sums, tokens, heads, number(zeros)],
    }
}

pub(super) fn gradient(cx: &StepContext<'_>, sizes: &Sizes, variant: Variant<'_>, sum: bool) -> Vec<Launch> {
    let Variant { element, drop } = variant;
    let cut = Gradient::choose(sizes, drop.is_some());
    let [_, main, end] = cut.kernels(element, sizes, drop.is_some(), sum);
    let parts = Scratch::of(sizes, drop.is_some());
    let number = |n: usize| Arg::I32(n as i32);
    let [tokens, heads, total] = [sizes.tokens, sizes.heads, sizes.total()].map(number);
    let [turns, log_sums, deltas, dq] = [0, parts.log_sums, parts.deltas, parts.dq]
        .map(|offset| Arg::Pointer(cx.scratch + offset as Address));
    let (dqkv, sums) = (Arg::Pointer(cx.output(0).address), Arg::Pointer(cx.parts));
    let queries = 64 * cut.halves;
    let blocks = sizes.total() * pieces(sizes);
    let items = if cut.whole { sizes.total().min(PROCESSORS) } else { blocks };
    let stride = cut.dq_bytes(sizes) / 4;
    let mut args = vec![
        map(cx.input(0), sizes, 3 * sizes.heads, BLOCK),
        map(cx.input(0), sizes, 3 * sizes.heads, queries),
        map(cx.input(3), sizes, sizes.heads, queries),
        map(cx.output(0), sizes, 3 * sizes.heads, STORED),
    ];
    args.extend([turns, log_sums, deltas, dq, tokens, heads, total]);
    args.extend([number(cut.group(sizes)), number(cut.copies_log(sizes) as usize), sums, dqkv]);
    args.extend(drop_args(cx, drop));
    let start = start(cx, sizes, (element, BLOCK, sum), [turns, log_sums, deltas], parts.turns);
    let main = Launch {
        kernel: main,
        grid: [items.min(cx.facts.processors as usize) as u32, 1, 1],
        block: 384,
        shared: cut.shared(sizes, drop.is_some() && sum) as u32,
        args,
    };
    let end = Launch {
        kernel: end,
        grid: [blocks as u32, 1, 1],
        block: 256,
        shared: 0,
        args: vec![dq, dqkv, sums, tokens, heads, number(cut.copies(sizes)), Arg::I64(stride as i64)],
    };
    if cut.whole { vec![start, main] } else { vec![start, main, end] }
}

/// Instances that occur on a Hopper GPU, for `sm_90a` only; none for others.
pub fn kernels(facts: &Facts) -> Vec<(Kernel, u32)> {
    let mut kernels = Vec::new();
    // Few heads and many, whole and cut; of one half and of two.
    let few = [(1, 577, 64), (1, 50, 40), (1, 257, 88), (1, 1025, 128)];
    let many = [(64, 577, 64), (32, 257, 88), (128, 197, 128), (128, 257, 112)];
    let lengths = few.into_iter().chain(many);
    for (batch, tokens, head) in lengths {
        let sizes = Sizes { batch, tokens, heads: 12, head };
        for dtype in [DType::Bf16, DType::F16].into_iter().filter(|d| *d == DType::Bf16 || tokens == 577) {
            let Some(element) = c_type(dtype).filter(|_| takes(&sizes, dtype, facts)) else { continue };
            let drop = [(1, 577, 64), (1, 257, 88)].contains(&(batch, tokens, head)) && dtype == DType::Bf16;
            for drop in [false, true].into_iter().filter(|with| !with || drop) {
                kernels.push((Forward::choose(&sizes, drop).kernel(element, &sizes, drop), 90));
                let grad = Gradient::choose(&sizes, drop).kernels(element, &sizes, drop, true);
                kernels.extend(
                    grad.map(|kernel| (kernel, 90))
                        .into_iter()
                        .filter(|(k, _)| !drop || k.name.contains("flash_grad<")),
                );
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_fits_an_h200() {
        for head in (8..=128).step_by(8) {
            for tokens in (1..=600).chain([1025, 4097, 16_385, 65_537]) {
                let sizes = Sizes { batch: if tokens % 2 == 0 { 44 } else { 3 }, tokens, heads: 12, head };
                assert!(takes(&sizes, DType::Bf16, &Facts::h200()));
                for drop in [false, true] {
                    let gradient = Gradient::choose(&sizes, drop);
                    assert!(gradient.shared(&sizes, true) <= 232_448, "{sizes:?} {gradient:?}");
                    assert!((1..=sizes.total()).contains(&gradient.group(&sizes)));
                    let forward = Forward::choose(&sizes, drop);
                    assert!(forward.shared(&sizes) <= 232_448, "{sizes:?} {forward:?}");
                    let tail = forward.tail(&sizes);
                    let whole = tokens.div_ceil(forward.keys) - 1;
                    assert!(
                        tail <= forward.keys
                            && (!forward.whole || whole < forward.stages)
                            && (0..16).contains(&(whole * forward.keys + tail - tokens))
                    );
                }
            }
        }
    }

    #[test]
    fn a_short_last_block_has_code_of_its_own_among_few() {
        let lone = |tokens| Gradient::choose(&Sizes { batch: 1, tokens, heads: 1, head: 64 }, false).lone;
        assert_eq!([1, 64, 129, 192, 257, 576].map(lone), [true; 6]);
        assert_eq!([65, 128, 193, 256, 577].map(lone), [false; 5]);
        assert_eq!([641, 1025, 4097].map(lone), [false; 3]);
    }

    #[test]
    fn few_heads_have_copies_of_their_sums() {
        let copies = |batch, heads, tokens, head| {
            let sizes = Sizes { batch, tokens, heads, head };
            Gradient::choose(&sizes, false).copies(&sizes)
        };
        // One for each block of keys; fewer where the last kernel would take long, or memory or heads forbid it; one where heads fill the GPU.
        assert_eq!([copies(1, 12, 577, 64), copies(1, 16, 257, 80)], [5, 3]);
        assert_eq!([copies(1, 12, 1025, 64), copies(1, 12, 1025, 128), copies(4, 12, 1025, 64)], [4, 2, 2]);
        assert_eq!([copies(1, 12, 4097, 64), copies(8, 12, 4097, 64), copies(64, 12, 577, 64)], [4, 1, 1]);
    }

    #[test]
    fn short_heads_are_whole_and_dq_of_others_runs_beside_the_next_probabilities() {
        let cut = |batch, heads, tokens, head, drop| {
            let cut = Gradient::choose(&Sizes { batch, tokens, heads, head }, drop);
            assert!(!cut.later || !(cut.whole || cut.lone || cut.ahead));
            (cut.whole, cut.later)
        };
        let (whole, later, neither) = ((true, false), (false, true), (false, false));
        assert_eq!(cut(128, 12, 197, 128, false), whole);
        assert_eq!(cut(32, 16, 257, 88, false), whole);
        // Too many blocks of keys; few heads, or some left over in the end.
        assert_eq!([cut(128, 12, 257, 128, false), cut(32, 16, 257, 112, false)], [later; 2]);
        assert_eq!([cut(56, 16, 577, 80, false), cut(2, 12, 16_385, 128, false)], [later; 2]);
        assert_eq!([cut(1, 16, 257, 88, false), cut(12, 12, 257, 88, false)], [later; 2]);
        assert_eq!([cut(1, 16, 128, 88, false), cut(1, 16, 200, 88, false)], [later; 2]);
        // A short last block of two; draws.
        assert_eq!([cut(1, 16, 50, 88, false), cut(1, 16, 150, 88, false)], [neither; 2]);
        assert_eq!([cut(32, 16, 257, 88, true), cut(8, 12, 4097, 128, true)], [neither; 2]);
        // A block of threads has memory for dQ of one head.
        let sizes = Sizes { batch: 128, tokens: 197, heads: 12, head: 128 };
        let heads = |drop| scratch(&sizes, DType::Bf16, drop) / (256 * 128 * 4);
        assert!((132..160).contains(&heads(false)) && heads(true) >= 1536);
    }

    #[test]
    fn forward_blocks_are_smaller_where_all_run_at_once_and_have_heads_that_fill_the_gpu() {
        let cut = |batch, heads, tokens, head, drop| {
            let Forward { groups, keys, whole, .. } =
                Forward::choose(&Sizes { batch, tokens, heads, head }, drop);
            (groups, keys, whole)
        };
        assert_eq!([cut(1, 12, 197, 64, false), cut(1, 16, 257, 80, true)], [(1, 128, false); 2]);
        assert_eq!([cut(1, 12, 1025, 64, false), cut(1, 12, 1025, 128, true)], [(2, 128, false); 2]);
        assert_eq!(cut(1, 12, 1025, 128, false), (2, 160, false));
        assert_eq!(cut(64, 12, 577, 64, false), (3, 128, false));
        assert_eq!([cut(128, 12, 197, 128, false), cut(64, 16, 224, 72, false)], [(2, 112, true); 2]);
        assert_eq!(cut(64, 16, 225, 72, false), (2, 128, true));
        // Draws; heads left over in the end; one turn of three warpgroups.
        assert_eq!([cut(64, 16, 197, 72, true), cut(12, 12, 197, 72, false)], [(2, 128, false); 2]);
        assert_eq!(cut(64, 16, 192, 72, false), (3, 112, false));
    }

    /// Checks that with dropout the main kernel sums dV itself, in shared memory of its own where it computes dQ later.
    #[test]
    fn what_is_dropped_is_drawn_and_summed_by_the_main_kernel() {
        let main = |batch, head, drop, sum| {
            let sizes = Sizes { batch, tokens: 577, heads: 12, head };
            Gradient::choose(&sizes, drop).kernels("bf16", &sizes, drop, sum)[1].name.clone()
        };
        let expected = "flash_grad<bf16, 64, 2, true, true, false, false, false, false, false>";
        assert_eq!(main(64, 64, false, true), expected);
        let expected = "flash_grad<bf16, 64, 2, true, true, false, false, false, true, true>";
        assert_eq!(main(64, 64, true, true), expected);
        let expected = "flash_grad<bf16, 128, 1, false, false, false, true, false, true, false>";
        assert_eq!(main(1, 128, true, false), expected);
        let shared = |head, sums| {
            let sizes = Sizes { batch: 64, tokens: 577, heads: 12, head };
            Gradient::choose(&sizes, true).shared(&sizes, sums)
        };
        assert_eq!([64, 128].map(|head| shared(head, true) - shared(head, false)), [8 * 64 * 4, 0]);
    }

    #[test]
    fn working_memory_grows_with_the_tokens_alone() {
        let bytes = |tokens| scratch(&Sizes { batch: 2, tokens, heads: 12, head: 64 }, DType::Bf16, false);
        // f32 dQ, and two numbers a token.
        let whole = 24 * 16_384 * (64 + 2) * 4;
        assert!((whole..whole + whole / 100).contains(&bytes(16_384)), "{}", bytes(16_384));
        assert!(bytes(32_768) <= 2 * bytes(16_384));
    }

    #[test]
    fn other_gpus_have_none() {
        assert!(kernels(&Facts { capability: (10, 0), ..Facts::h200() }).is_empty());
        assert_eq!(kernels(&Facts::h200()).len(), 44);
    }
}
