//! Attention by Hopper's warpgroups over any number of tokens: `attention_flash*.cu`.
//!
//! Legend: T tokens, D head size. A tile is 64 queries in the forward pass; a block is 128 tokens in the backward pass.

use super::attention::{Sizes, drop_args};
use crate::action::{Address, Arg, Facts, HeadMap, Kernel, Launch, Operand, Source, StepContext, c_type};
use graph::DType;
use graph::op::AttentionDrop;

/// Tokens of a block, and of one row of partial column sums: the kernels' `BLOCK`.
pub(super) const BLOCK: usize = 128;
/// Tokens up to which a short last block gets code of its own.
const MOST_LONE: usize = 640;
/// Tokens up to which the copy engine adds up dQ: it signals later, which costs time where blocks are many.
const MOST_BULK: usize = 8192;
/// Rows that a warp has of a result.
const STORED: usize = 16;
/// Bytes that the heads of a group may have in the L2 cache: their queries, dO and f32 dQ.
const GROUP_BYTES: usize = 24 << 20;
/// Multiprocessors that copies of dQ are counted for: which GPU it will be isn't known when memory is planned.
const PROCESSORS: usize = 132;
/// Bytes that copies of dQ may have.
const COPY_BYTES: usize = 64 << 20;
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

fn strips(sizes: &Sizes) -> usize {
    sizes.head.div_ceil(64)
}

/// Queries, keys and values as (batch, tokens, 3·heads, head size), in boxes of `rows` tokens.
fn map(operand: &Operand, sizes: &Sizes, heads: usize, rows: usize) -> Arg {
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
}

impl Forward {
    /// Chosen by measurements on an H200: three warpgroups are a quarter faster than two, a tenth with large heads, if there are tiles for them.
    /// Draws of dropout want the registers of two with large heads.
    fn choose(sizes: &Sizes, drop: bool) -> Self {
        let tiles = sizes.tokens.div_ceil(64);
        let faster = if sizes.head <= 96 { 13 } else { 11 };
        let three = 10 * tiles.next_multiple_of(3) <= faster * tiles.next_multiple_of(2)
            && (!drop || sizes.head <= 96);
        let (groups, keys, stages) = match (sizes.head, three) {
            (..=64, true) => (3, 128, 2),
            (65..=80, true) => (3, 112, 2),
            (81..=96, true) => (3, 96, 2),
            (97.., true) => (3, 80, 3),
            // Wider stages where that makes them fewer.
            (97.., false) if !drop && sizes.tokens.div_ceil(160) < sizes.tokens.div_ceil(128) => (2, 160, 2),
            _ => (2, 128, 2),
        };
        Forward { groups, keys, stages }
    }

    /// Keys of the last stage, up to a multiple of 16.
    fn tail(&self, sizes: &Sizes) -> usize {
        ((sizes.tokens - 1) % self.keys + 1).next_multiple_of(16)
    }

    /// Bytes of shared memory, the kernel's `SHARED`: queries and results, keys and values.
    fn shared(&self, sizes: &Sizes) -> usize {
        let rows = 2 * self.groups * 64 + 2 * self.stages * self.keys;
        strips(sizes) * rows * 128 + 8 * (2 * self.groups + 4 * self.stages)
    }

    fn kernel(&self, element: &str, sizes: &Sizes, drop: bool) -> Kernel {
        let (Forward { groups, keys, stages }, Sizes { head, .. }) = (self, sizes);
        let tail = self.tail(sizes);
        Kernel::new(
            Source::AttentionFlash,
            format!("attention_flash<{element}, {head}, {groups}, {keys}, {tail}, {stages}, true, {drop}>"),
        )
    }
}

pub(super) fn forward(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    element: &str,
    drop: Option<AttentionDrop>,
) -> Launch {
    let cut = Forward::choose(sizes, drop.is_some());
    let items = sizes.total() * sizes.tokens.div_ceil(64 * cut.groups);
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
    /// True if registers suffice to compute dQ beside the next probabilities.
    later: bool,
    /// True if a last block of no more than 64 tokens has code of its own.
    lone: bool,
    /// True if a block of threads has all keys of a head.
    whole: bool,
    /// True if the copy engine adds up dQ.
    bulk: bool,
}

impl Gradient {
    fn choose(sizes: &Sizes, drop: bool) -> Self {
        let halves = if sizes.head <= 64 { 2 } else { 1 };
        // With many blocks it costs more than it saves.
        let lone = (sizes.tokens - 1) % BLOCK < 64 && sizes.tokens <= MOST_LONE;
        // With one tile of queries to a block, the next keys come too late for it.
        let ahead = halves == 2 || sizes.head <= 112 && sizes.tokens > 64;
        let rounds = sizes.total().div_ceil(PROCESSORS);
        let fills = sizes.total() as f64 >= FILLED * (rounds * PROCESSORS) as f64;
        // As measured: what each block of keys reads and leaves costs more than one kernel for all, from some on.
        let most = if sizes.head <= 112 { 3 } else { 2 };
        let whole = halves == 1 && !drop && fills && pieces(sizes) <= most;
        let bulk = sizes.head > 112 && !drop && (MOST_LONE + 1..=MOST_BULK).contains(&sizes.tokens);
        Gradient { halves, ahead, later: halves == 2, lone, whole, bulk }
    }

    fn tiles(&self, sizes: &Sizes) -> usize {
        sizes.tokens.div_ceil(64 * self.halves)
    }

    /// Bytes of shared memory, the kernel's `SHARED`; with `sums` the kernel sums dV.
    fn shared(&self, sizes: &Sizes, sums: bool) -> usize {
        let queries = 64 * self.halves;
        let rows = if self.bulk { 2 } else { 4 } * BLOCK + 4 * queries;
        let staged = if self.bulk { 2 * 64 * 64 * 4 } else { 0 };
        let sums = if self.later && sums { 8 * sizes.head * 4 } else { 0 };
        let scores = 2 * self.halves * BLOCK * 128;
        strips(sizes) * rows * 128 + scores + staged + 2 * 2 * queries * 4 + 16 * 8 + 16 + sums
    }

    /// Bytes of one copy of dQ.
    fn dq_bytes(&self, sizes: &Sizes) -> usize {
        let heads = if self.whole { PROCESSORS } else { sizes.total() };
        4 * heads * self.tiles(sizes) * 64 * self.halves * sizes.head
    }

    /// Copies of dQ as a power of two: as many as items of a head may run at once, where memory allows it.
    fn copies_log(&self, sizes: &Sizes) -> u32 {
        if self.whole {
            return 0;
        }
        let at_once = PROCESSORS.div_ceil(sizes.total()).min(pieces(sizes));
        let fits = |log: &u32| (1 << log).min(pieces(sizes)) * self.dq_bytes(sizes) <= COPY_BYTES;
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
        let (Gradient { halves, ahead, later, lone, whole, bulk }, Sizes { head, .. }) = (self, sizes);
        let (ends, grad) = (Source::AttentionFlashEnds, Source::AttentionFlashGrad);
        let copies = self.copies(sizes) > 1;
        let sums = sum && (drop || *whole);
        let cut = format!("{halves}, {ahead}, {later}, {lone}, {copies}, {whole}, {bulk}, {drop}, {sums}");
        [
            Kernel::new(ends, format!("flash_grad_start<{element}, {head}, {sum}>")),
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

pub(super) fn gradient(
    cx: &StepContext<'_>,
    sizes: &Sizes,
    element: &str,
    drop: Option<AttentionDrop>,
    sum: bool,
) -> Vec<Launch> {
    let cut = Gradient::choose(sizes, drop.is_some());
    let [start, main, end] = cut.kernels(element, sizes, drop.is_some(), sum);
    let parts = Scratch::of(sizes, drop.is_some());
    let number = |n: usize| Arg::I32(n as i32);
    let [tokens, heads, total] = [sizes.tokens, sizes.heads, sizes.total()].map(number);
    let [out, lse, dout] = [1, 2, 3].map(|i| Arg::Pointer(cx.input(i).address));
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
    let start = Launch {
        kernel: start,
        grid: [blocks as u32, 1, 1],
        block: 256 * strips(sizes) as u32,
        shared: 0,
        args: vec![out, dout, lse, turns, log_sums, deltas, sums, tokens, heads, number(parts.turns)],
    };
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
    let lengths = [(1, 577, 64), (1, 50, 40), (1, 257, 88), (1, 1025, 128), (32, 257, 88), (128, 197, 128)];
    for (batch, tokens, head) in lengths {
        let sizes = Sizes { batch, tokens, heads: 12, head };
        for dtype in [DType::Bf16, DType::F16].into_iter().filter(|d| *d == DType::Bf16 || tokens == 577) {
            let Some(element) = c_type(dtype).filter(|_| takes(&sizes, dtype, facts)) else { continue };
            let drop = [(577, 64), (257, 88)].contains(&(tokens, head)) && dtype == DType::Bf16;
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
                let sizes = Sizes { batch: 3, tokens, heads: 5, head };
                assert!(takes(&sizes, DType::Bf16, &Facts::h200()));
                for drop in [false, true] {
                    let gradient = Gradient::choose(&sizes, drop);
                    assert!(gradient.shared(&sizes, true) <= 232_448, "{sizes:?} {gradient:?}");
                    assert!((1..=15).contains(&gradient.group(&sizes)));
                    let forward = Forward::choose(&sizes, drop);
                    assert!(forward.shared(&sizes) <= 232_448, "{sizes:?} {forward:?}");
                    let tail = forward.tail(&sizes);
                    let whole = tokens.div_ceil(forward.keys) - 1;
                    assert!(
                        tail <= forward.keys && (0..16).contains(&(whole * forward.keys + tail - tokens))
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
        // One for each block of keys; fewer where memory or heads forbid it; one where heads fill the GPU.
        assert_eq!([copies(1, 12, 1025, 64), copies(1, 16, 257, 80)], [9, 3]);
        assert_eq!([copies(1, 12, 4097, 64), copies(4, 12, 1025, 64)], [4, 4]);
        assert_eq!([copies(64, 12, 577, 64), copies(8, 12, 4097, 64)], [1, 1]);
    }

    #[test]
    fn short_heads_are_whole_and_long_ones_are_added_up_by_the_copy_engine() {
        let cut = |batch, heads, tokens, head, drop| {
            let cut = Gradient::choose(&Sizes { batch, tokens, heads, head }, drop);
            assert!(!(cut.whole && cut.bulk));
            (cut.whole, cut.bulk)
        };
        let (whole, bulk, neither) = ((true, false), (false, true), (false, false));
        assert_eq!(cut(128, 12, 197, 128, false), whole);
        assert_eq!(cut(32, 16, 257, 88, false), whole);
        // Too many blocks of keys; draws; few heads, or some left over in the end; heads of two halves.
        assert_eq!(cut(128, 12, 257, 128, false), neither);
        assert_eq!(cut(56, 16, 577, 80, false), neither);
        assert_eq!(cut(32, 16, 257, 88, true), neither);
        assert_eq!(cut(1, 16, 257, 88, false), neither);
        assert_eq!(cut(12, 12, 257, 88, false), neither);
        assert_eq!(cut(128, 12, 197, 64, false), neither);
        assert_eq!(cut(8, 12, 4097, 128, false), bulk);
        assert_eq!([cut(8, 12, 4097, 128, true), cut(8, 12, 4097, 112, false)], [neither; 2]);
        assert_eq!([cut(2, 12, 16_385, 128, false), cut(56, 12, 577, 128, false)], [neither; 2]);
        // A block of threads has memory for dQ of one head.
        let sizes = Sizes { batch: 128, tokens: 197, heads: 12, head: 128 };
        let heads = |drop| scratch(&sizes, DType::Bf16, drop) / (256 * 128 * 4);
        assert!((132..160).contains(&heads(false)) && heads(true) >= 1536);
    }

    /// Checks that with dropout the main kernel sums dV itself, in shared memory of its own where it computes dQ later.
    #[test]
    fn what_is_dropped_is_drawn_and_summed_by_the_main_kernel() {
        let main = |batch, head, drop, sum| {
            let sizes = Sizes { batch, tokens: 577, heads: 12, head };
            Gradient::choose(&sizes, drop).kernels("bf16", &sizes, drop, sum)[1].name.clone()
        };
        assert_eq!(
            main(64, 64, false, true),
            "flash_grad<bf16, 64, 2, true, true, false, false, false, false, false, false>"
        );
        assert_eq!(
            main(64, 64, true, true),
            "flash_grad<bf16, 64, 2, true, true, false, false, false, false, true, true>"
        );
        assert_eq!(
            main(1, 128, true, false),
            "flash_grad<bf16, 128, 1, false, false, false, true, false, false, true, false>"
        );
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
        assert_eq!(kernels(&Facts::h200()).len(), 34);
    }
}
