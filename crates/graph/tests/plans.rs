//! Plans written by hand, one for each question the design had to answer, and what happens to each when a detail of
//! it is wrong. A file may hold several plans of one run; its comments say what to look for.

#[path = "support/simulator.rs"]
mod simulator;

use graph::Plan;
use graph::op::Lane;
use simulator::simulate;

const SYNC_BATCH_NORM: &str = include_str!("plans/sync-batch-norm.plan");
const ZERO2: &str = include_str!("plans/zero2-accumulation.plan");
const ZERO3: &str = include_str!("plans/zero3-recompute.plan");
const FP16: &str = include_str!("plans/fp16-skipped-step.plan");
const FP8: &str = include_str!("plans/fp8-linear.plan");
const PARTIAL_EVAL: &str = include_str!("plans/partial-eval-batch.plan");
const TWO_LOSSES: &str = include_str!("plans/two-losses-channels-last.plan");

fn plans(text: &str) -> Vec<Plan> {
    let starts = text.match_indices("\nplan ").map(|(at, _)| at + 1);
    let starts: Vec<usize> = starts.chain([text.len()]).collect();
    let parse = |w: &[usize]| text[w[0]..w[1]].parse().unwrap_or_else(|e| panic!("{e}"));
    starts.windows(2).map(parse).collect()
}

/// The file is what the program prints, comments and blank lines aside, and every plan in it can be run, whichever step
/// is slow; where it has two lanes, they do run side by side.
fn holds(text: &str) {
    let plans = plans(text);
    let written: Vec<&str> = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let printed: String = plans.iter().map(ToString::to_string).collect();
    assert_eq!(printed.lines().collect::<Vec<_>>(), written);
    assert!(text.starts_with("# "), "a plan says what it shows");
    for plan in plans {
        plan.check().unwrap_or_else(|e| panic!("{}: {e}", plan.name));
        let mut side_by_side = 0;
        for slow in 0..plan.steps.len() {
            let durations: Vec<u64> =
                (0..plan.steps.len()).map(|s| if s == slow { 1000 } else { 1 }).collect();
            let run = simulate(&plan, &durations).unwrap_or_else(|e| panic!("{}: {e}", plan.name));
            side_by_side += run.side_by_side;
        }
        assert_eq!(side_by_side > 0, plan.steps.iter().any(|s| s.lane == Lane::Comm), "{}", plan.name);
    }
}

/// With `from`, which stands in the text once, turned into `to`, the file is refused for the reason given.
fn refused(text: &str, from: &str, to: &str, why: &str) {
    assert_eq!(text.matches(from).count(), 1, "'{from}' should be there once");
    let error = plans(&text.replace(from, to)).iter().find_map(|plan| plan.check().err());
    let error = error.unwrap_or_else(|| panic!("'{from}' → '{to}' passes")).to_string();
    assert!(error.starts_with(why), "'{from}' → '{to}': {error}");
}

#[test]
fn sync_batch_norm() {
    holds(SYNC_BATCH_NORM);
    let refused = |from, to, why| refused(SYNC_BATCH_NORM, from, to, why);
    // Forward: the norm would use moments still on their way, or one rank's only.
    refused(
        "join_moments(bn1.moments.ranks) wait=2",
        "join_moments(bn1.moments.ranks)",
        "step 3 (join_moments, bn1): bn1.moments.ranks may not be",
    );
    refused(
        "batch_norm(conv1, bn1.moments.all,",
        "batch_norm(conv1, bn1.moments.ranks,",
        "step 5 (batch_norm, bn1): moments is f32[12,16]: an axis of 12 is not 3",
    );
    // Backward: the sums would be reduced in place while the gradients of γ and β are taken from them.
    refused(
        "d.bn1.sums.all f32[2,16] @78208",
        "d.bn1.sums.all f32[2,16] @78080",
        "step 16 (unpack, bn1): d.bn1.sums is not there",
    );
    refused("relu=true wait=15", "relu=true", "step 19 (batch_norm_grad, bn1): d.bn1.sums.all may not be");
    refused(
        "moments.all f32[3,16]",
        "moments.all f32[2,16]",
        "step 3 (join_moments, bn1): gives f32[3,16], not",
    );
    refused(
        "$bn1.weight.grad = accumulate($bn1.weight.grad,",
        "$bn1.bias.grad = accumulate($bn1.bias.grad,",
        "step 18 (accumulate, bn1): bn1.bias.grad is written a second time",
    );
    refused("2 comm bn1", "2 compute bn1", "step 2 (all_gather, bn1): runs on the comm lane");
    // The update would take over moments of another norm.
    refused(
        "commit(control, $bn1.running, $bn1.running.pending)",
        "commit(control, $bn1.running, $bn1.weight.grad)",
        "step 2 (commit, running): value after is f32[16], but needs the shape [3,16]",
    );
}

/// Evaluation normalises by the running moments, which hold mean, variance and a count of batches, where training has mean,
/// squares and a count of values.
#[test]
fn batch_norm_takes_running_moments() {
    let text = "plan eval batch=8 height=1 width=1 arena=1024\n\
        state bn.weight f32[16] {\"parameter\":\"ones\"}\n\
        state bn.bias f32[16] {\"parameter\":\"zeros\"}\n\
        state bn.running f32[3,16] \"running\"\n\
        input x f32[8,16] @0\n\
        0 compute bn f32[8,16] @512 = batch_norm(x, $bn.running, $bn.weight, $bn.bias) eps=1e-5 running=true ; forward bn\n\
        output bn\n";
    assert_eq!(text.parse::<Plan>().unwrap().check(), Ok(()));
    let eight = text.replace("f32[3,16]", "f32[3,8]").parse::<Plan>().unwrap().check().unwrap_err();
    let why = "step 0 (batch_norm, bn): C is 16 in x f32[8,16], but 8 in moments f32[3,8]";
    assert_eq!(eight.to_string(), why);
}

#[test]
fn zero2_accumulation() {
    holds(ZERO2);
    let refused = |from, to, why| refused(ZERO2, from, to, why);
    // A bucket on its way keeps its bytes, though its lane has gone on.
    refused(
        "d.fc1 bf16[16,64] @33664",
        "d.fc1 bf16[16,64] @9088",
        "step 10 (linear_grad_x, fc2): writes over bucket.0, which step 9 may still use",
    );
    refused(
        "group=\"data:2\" wait=8 ",
        "group=\"data:2\" ",
        "step 9 (reduce_scatter, bucket.0): bucket.0 may not be written yet",
    );
    refused(
        "bucket.0.shard) wait=9",
        "bucket.0.shard)",
        "step 15 (accumulate, bucket.0): bucket.0.shard may not be written",
    );
    refused("d.fc2.bias) align=4096", "d.fc2.bias) align=6", "step 8 (pack, bucket.0): gives f32[654], not");
    // The update: sums of squares on their way; a shard that is not one; pieces that the bucket has no place for.
    refused(
        "max_norm=1.0 wait=2",
        "max_norm=1.0",
        "step 3 (clip, control): stats.all may not be written yet",
    );
    refused(
        "clip(stats.all, squares.all)",
        "clip(stats.all, stats.all)",
        "step 3 (clip, control): sums of squares can't be f32[4]",
    );
    refused(
        "elements=4096 pieces=[[0,640,1.0,0.05],[640,10,1.0,0.0]]",
        "elements=6144 pieces=[[0,640,1.0,0.05],[640,10,1.0,0.0]]",
        "step 5 (adamw, bucket.0): n is 3072 in the op, but 2048 in parameter f32[2048]",
    );
    refused(
        "elements=4096 pieces=[[0,2048,1.0,0.05],[2048,64,1.0,0.0]]",
        "elements=4096 pieces=[[0,2048,1.0,0.05],[2000,64,1.0,0.0]]",
        "step 7 (adamw, bucket.1): 4096 elements have no place for piece 2000..2064",
    );
    refused(
        "$bucket.0.half = all_gather($bucket.0.shard.half) group=\"data:2\" wait=5",
        "$bucket.0.half = all_gather($bucket.0.shard.half) group=\"data:2\"",
        "step 6 (all_gather, bucket.0): bucket.0.shard.half may not be written yet",
    );
    refused(
        "8 comm $bucket.1.half",
        "8 comm $bucket.0.half",
        "step 8 (all_gather, bucket.1): bucket.0.half is written a second time",
    );
    refused(
        "6 comm $bucket.0.half",
        "6 copy $bucket.0.half",
        "step 6 (all_gather, bucket.0): runs on the comm",
    );
}

#[test]
fn zero3_recompute() {
    holds(ZERO3);
    let refused = |from, to, why| refused(ZERO3, from, to, why);
    // The wait that is there for memory alone.
    refused(
        "group=\"data:2\" wait=10",
        "group=\"data:2\"",
        "step 11 (all_gather, block.0): writes over memory, which step 1 may still use",
    );
    refused(
        "group=\"data:2\" wait=10",
        "group=\"data:2\" wait=9",
        "step 11 (all_gather, block.0): writes over d.block.1, which step 10 may still use",
    );
    refused(
        "group=\"data:2\" wait=10",
        "group=\"data:2\" wait=12",
        "step 11 (all_gather, block.0): waits for step 12, which comes",
    );
    // The parameters gathered for forward are gone by the time backward wants them.
    refused(
        "unpack(again.block.0.flat)",
        "unpack(block.0.flat)",
        "step 16 (unpack, block.0): block.0.flat is not",
    );
    refused("wait=11", "wait=2", "step 16 (unpack, block.0): again.block.0.flat may not be written yet");
    refused(
        "block.1.flat bf16[4096] @37632",
        "block.1.flat bf16[4096] @20992",
        "step 2 (all_gather, block.1): writes over block.0.weight, which step 1 may still use",
    );
    refused(
        "block.0.flat bf16[4096] @4352 = all_gather($block.0.shard.half) group=\"data:2\" ; forward",
        "block.0.flat bf16[2048] @4352 = all_gather($block.0.shard.half) group=\"data:2\" ; forward",
        "step 0 (all_gather, block.0): gives",
    );
    refused(
        "$block.0.grad = accumulate($block.0.grad,",
        "$block.1.grad = accumulate($block.1.grad,",
        "step 23 (accumulate, block.0): block.1.grad is written a second time",
    );
    refused(
        "0 comm block.0.flat",
        "0 compute block.0.flat",
        "step 0 (all_gather, block.0): runs on the comm lane",
    );
}

#[test]
fn fp16_skipped_step() {
    holds(FP16);
    let refused = |from, to, why| refused(FP16, from, to, why);
    // A scale without its count of good steps.
    refused(
        "state loss_scale f32[3] {\"loss_scale\":{\"initial\":65536.0}} own@128\n0",
        "state loss_scale f32[1] {\"loss_scale\":{\"initial\":65536.0}} own@128\n0",
        "step 1 (clip, control): loss scale is f32[1]: an axis of 1 is not 3",
    );
    // A copy that is none: of another shape, or of another parameter's type.
    refused(
        "$applied, $bucket.0.half) beta1",
        "$applied, $fc.bias.half) beta1",
        "step 3 (adamw, fc.weight … fc.bias): n is 2112 in the op, but 64 in copy f16[64]",
    );
    refused(
        "$applied, $bucket.0.half) beta1",
        "$applied, $bucket.0.m) beta1",
        "step 3 (adamw, fc.weight … fc.bias): copy can't be f32[2112]",
    );
    refused(
        "$loss_scale = loss_scale($loss_scale, control) window=1000 hysteresis=2 min=1.0",
        "$applied = advance($applied, control)",
        "step 4 (advance, loss_scale): applied is written a second time",
    );
    // Over what it reads next; off the grid of its type; past the end of the arena.
    refused("control f32[3] @128", "control f32[3] @130", "step 1 (clip, control): control is f32[3]");
    refused("control f32[3] @128", "control f32[3] @248", "step 1 (clip, control): reaches");
    // Halves mix with singles, but not with whole numbers, and shapes are checked as ever.
    refused("d.fc f16[16,64]", "d.fc i32[16,64]", "step 4 (cross_entropy_grad, loss): gives f16[16,64]");
    refused("fc f16[16,64] @1280", "fc f16[16,32] @1280", "step 0 (linear, fc): gives f16[16,64]");
    refused(
        "loss f32[] @3328, ",
        "loss f16[] @3328, ",
        "step 1 (cross_entropy, loss): gives f32[], f32[4], not",
    );
    refused(
        "4 compute $loss_scale",
        "4 copy $loss_scale",
        "step 4 (loss_scale, loss_scale): runs on the compute lane",
    );
}

#[test]
fn fp8_linear() {
    holds(FP8);
    let refused = |from, to, why| refused(FP8, from, to, why);
    // Matmuls read both operands along the sum: the copy that is not transposed is none for backward.
    refused(
        "scaled_matmul(d8, w8.t,",
        "scaled_matmul(d8, w8,",
        "step 8 (scaled_matmul, fc): K is 64 in a e5m2[16,64], but 32 in b e4m3[64,32]",
    );
    refused(
        "scaled_matmul(d8.t, x8.t,",
        "scaled_matmul(d8.t, x8,",
        "step 9 (scaled_matmul, fc): K is 16 in a e5m2[64,16], but 32 in b e4m3[16,32]",
    );
    // What backward needs is still there, and what it doesn't is not.
    refused(
        "d.x bf16[16,32] @6400",
        "d.x bf16[16,32] @1280",
        "step 9 (scaled_matmul, fc): x8.t is not there",
    );
    refused(
        "x8.t e4m3[32,16] @1792",
        "x8.t e4m3[16,32] @1792",
        "step 0 (quantize, fc): gives e4m3[16,32], e4m3[32,16], f32[1], not",
    );
    // Numbers of 8 bits are no operands of other ops, and other numbers none of theirs.
    refused(
        "column_sum(d.fc, $fc.bias.grad)",
        "column_sum(d8, $fc.bias.grad)",
        "step 10 (column_sum, fc): x can't be e5m2[16,64]",
    );
    refused(
        "scaled_matmul(x8, w8, $fc.x.scale",
        "scaled_matmul(x, w8, $fc.x.scale",
        "step 2 (scaled_matmul, fc): a can't be bf16[16,32]",
    );
    refused(
        "quantize(d.fc, $d.fc.scale, $d.fc.largest) to=\"e5m2\"",
        "quantize(d.fc, $d.fc.scale, $d.fc.largest) to=\"bf16\"",
        "step 7 (quantize, fc): scales numbers of 8 bits, not bf16",
    );
    refused(
        "$fc.weight.grad) to=\"f32\"",
        "$fc.weight.grad) to=\"bf16\"",
        "step 9 (scaled_matmul, fc): can't add up in bf16",
    );
    // A scale without a history, and one that follows another's values.
    refused(
        "rescale($d.fc.scale, $d.fc.largest)",
        "rescale($applied, $d.fc.largest)",
        "step 6 (rescale, fc): needs a scale and the largest values",
    );
    refused(
        "$fc.weight.scale = rescale($fc.weight.scale, $fc.weight.largest)",
        "$fc.x.scale = rescale($fc.weight.scale, $fc.weight.largest)",
        "step 5 (rescale, fc): fc.x.scale is written a second time",
    );
}

#[test]
fn partial_eval_batch() {
    holds(PARTIAL_EVAL);
    let refused = |from, to, why| refused(PARTIAL_EVAL, from, to, why);
    // A weight for each of eight samples, real or not.
    refused(
        "weights f32[8]",
        "weights f32[5]",
        "step 6 (cross_entropy, loss): weights is f32[5], but logits f32[8,10]",
    );
    refused("labels i32[8]", "labels f32[8]", "step 6 (cross_entropy, loss): labels can't be f32[8]");
    refused(
        "loss.stats f32[4]",
        "loss.stats f32[8]",
        "step 6 (cross_entropy, loss): gives f32[], f32[4], not",
    );
    refused("weights f32[8] @6272", "weights f32[8] @6160", "input weights: lies over labels");
    refused("weights f32[8] @6272", "weights f32[8] @14568", "input weights: reaches byte 14600 of an arena");
    refused("head f32[8,10] @0", "head f32[8,10] @6144", "step 6 (cross_entropy, loss): labels is not there");
    refused(
        "loss f32[] @384",
        "loss f32[] @316",
        "step 6 (cross_entropy, loss): writes over head, which step 6",
    );
    refused("5 compute head", "5 comm head", "step 5 (linear, head): runs on the compute lane");
}

#[test]
fn two_losses_channels_last() {
    holds(TWO_LOSSES);
    let refused = |from, to, why| refused(TWO_LOSSES, from, to, why);
    // One weight per pixel, not per image.
    refused(
        "weights f32[2,16,16]",
        "weights f32[2]",
        "step 5 (cross_entropy, main.loss): weights is f32[2], but logits",
    );
    refused(
        "head.full f32[2,16,16,6] @23552",
        "head.full f32[2,6,16,16] @23552",
        "step 2 (resize, head): gives",
    );
    // The first gradient to arrive must stay until the second is there.
    refused(
        "d.feat.head f32[2,8,8,16] @26624",
        "d.feat.head f32[2,8,8,16] @49152",
        "step 22 (add, conv): d.feat.aux is not there",
    );
    refused(
        "d.head f32[2,8,8,6] @23552",
        "d.head f32[2,8,8,6] @18432",
        "step 19 (linear_grad_w, head): feat is not",
    );
    refused(
        "(d.feat, images) window={\"stride\":2,\"pad\":1}",
        "(d.feat, images) window={\"stride\":1,\"pad\":1}",
        "step 23 (conv_grad_w, conv): dy f32[2,8,8,16] doesn't come from a map of 16×16",
    );
    refused(
        "$head.bias.grad = column_sum(d.head, $head.bias.grad)",
        "$aux.bias.grad = column_sum(d.head, $aux.bias.grad)",
        "step 20 (column_sum, head): aux.bias.grad is written a second time",
    );
    refused("8 compute loss", "8 comm loss", "step 8 (add, loss): runs on the compute lane");
}

/// A tensor in a flat buffer is some of its bytes: whoever writes the one writes the other.
#[test]
fn a_view_is_overwritten_with_its_buffer() {
    let plan = |steps: &str| -> Result<(), String> {
        let text = format!(
            "plan update batch=1 height=1 width=1 arena=512\n\
            state b f32[64] \"flat\" own@0\n\
            state w f32[8] {{\"parameter\":\"zeros\"}} own@128\n\
            state g f32[64] \"flat\" own@256\n{steps}"
        );
        text.parse::<Plan>().unwrap().check().map_err(|error| error.to_string())
    };
    let (write, read) =
        ("compute $b = accumulate($b, $g) ; update b", "compute y f32[8] @0 = gelu($w) ; update y");
    assert_eq!(plan(&format!("0 {read}\n1 {write}\noutput y\n")), Ok(()));
    let late = plan(&format!("0 {write}\n1 {read}\noutput y\n"));
    assert_eq!(late, Err("step 1 (gelu, y): w is not there, or overwritten by now".into()));
    let beside = read.replace("compute", "side");
    let early = plan(&format!("0 {beside}\n1 {write}\noutput y\n"));
    assert_eq!(early, Err("step 1 (accumulate, b): writes over w, which step 0 may still use".into()));
    let waits = write.replace(" ;", " wait=0 ;");
    assert_eq!(plan(&format!("0 {beside}\n1 {waits}\noutput y\n")), Ok(()));
    // Beside it, nothing is in the way.
    let apart = beside.replace("$w", "$g").replace("f32[8] @0", "f32[64] @0");
    assert_eq!(plan(&format!("0 {apart}\n1 {write}\noutput y\n")), Ok(()));
}
