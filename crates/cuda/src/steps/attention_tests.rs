use super::*;
use crate::action::Operand;
use crate::steps::testing::{all_facts, facts};

fn operand(dtype: DType, shape: &[usize]) -> Operand {
    Operand { address: 256, dtype, shape: Shape(shape.to_vec()) }
}

const DROP: Option<AttentionDrop> = Some(AttentionDrop { rate: 0.1, site: 3 });

fn run(facts: &Facts, dtype: DType, sizes: [usize; 4], backward: bool) -> Result<Launch, CudaError> {
    run_with(facts, dtype, sizes, backward, if backward { DROP } else { None })
}

fn run_with(
    facts: &Facts,
    dtype: DType,
    [b, t, h, d]: [usize; 4],
    backward: bool,
    drop: Option<AttentionDrop>,
) -> Result<Launch, CudaError> {
    let (qkv, out) = (operand(dtype, &[b, t, 3 * h * d]), operand(dtype, &[b, t, h * d]));
    let lse = operand(DType::F32, &[b, h, t]);
    let (op, inputs, outputs) = if backward {
        let inputs = vec![qkv.clone(), out.clone(), lse, out];
        let sums = operand(DType::F32, &[3 * h * d]);
        (Op::AttentionGrad { heads: h, drop, sum: true }, inputs, vec![qkv, sums])
    } else {
        (Op::Attention { heads: h, drop }, vec![qkv], vec![out, lse])
    };
    let (layer, tf32) = ("block", false);
    let (op, inputs, outputs) = (&op, &inputs[..], &outputs[..]);
    let (scratch, parts, header) = (512, 768, 1024);
    let cx = StepContext { op, layer, inputs, outputs, scratch, parts, header, tf32, facts };
    match actions(&cx)?.remove(0) {
        Action::Launch(launch) => Ok(launch),
        Action::Attention(attention) => Ok(attention.own.into_iter().next().unwrap()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn vit_b_on_an_h200() {
    let vit_b =
        |backward, drop| run_with(&Facts::h200(), DType::Bf16, [256, 197, 12, 64], backward, drop).unwrap();
    let forward = vit_b(false, None);
    assert_eq!(forward.kernel.name, "attention_hopper<bf16, 197, 64, 1, 2, 3>");
    assert_eq!((forward.grid, forward.block, forward.shared), ([3072, 1, 1], 128, (2 * 208 + 128) * 128));
    let backward = vit_b(true, None);
    assert_eq!(backward.kernel.name, "attention_grad_hopper<bf16, 197, 64, 2, 2, true, 1, true>");
    assert_eq!((backward.grid, backward.block, backward.shared), ([132, 1, 1], 256, 217_984));
    // With dropout, as heads of any length.
    assert_eq!(vit_b(false, DROP).kernel.name, "attention_flash<bf16, 64, 2, 128, 80, 2, false, true>");
    assert_eq!(vit_b(true, DROP).kernel.name, "flash_grad_start<bf16, 64, 128, true>");
}

#[test]
fn newer_gpus_take_the_portable_kernels() {
    let newer = Facts { capability: (10, 0), ..Facts::h200() };
    for drop in [None, DROP] {
        for backward in [false, true] {
            let launch = run_with(&newer, DType::Bf16, [2, 257, 2, 80], backward, drop).unwrap();
            assert_eq!(launch.kernel.source, Source::Attention, "{}", launch.kernel.name);
        }
    }
}

#[test]
fn any_length_and_head_size_is_taken_by_hopper() {
    let launches = |batch, tokens, head, dtype, backward| {
        let launch = run_with(&Facts::h200(), dtype, [batch, tokens, 3, head], backward, None).unwrap();
        (launch.kernel.name, launch.grid[0], launch.block)
    };
    let named =
        |(cut, grid, block): (&str, u32, u32)| (format!("attention_flash<{cut}, false>"), grid, block);
    for ((batch, tokens, head, dtype), expected) in [
        ((100, 577, 64, DType::Bf16), ("bf16, 64, 3, 128, 80, 2, false", 132, 512)),
        ((2, 4097, 64, DType::F16), ("f16, 64, 3, 128, 16, 2, false", 132, 512)),
        ((100, 257, 80, DType::Bf16), ("bf16, 80, 3, 112, 48, 2, false", 132, 512)),
        ((100, 1025, 128, DType::Bf16), ("bf16, 128, 3, 80, 80, 3, false", 132, 512)),
        ((100, 577, 128, DType::Bf16), ("bf16, 128, 2, 160, 112, 2, false", 132, 384)),
        ((44, 197, 8, DType::F16), ("f16, 8, 2, 112, 96, 2, true", 132, 384)),
        // Few heads, also of those that others would take.
        ((2, 577, 64, DType::Bf16), ("bf16, 64, 1, 128, 80, 2, false", 60, 256)),
        ((4, 1025, 128, DType::Bf16), ("bf16, 128, 2, 160, 80, 2, false", 108, 384)),
        ((2, 197, 64, DType::Bf16), ("bf16, 64, 1, 128, 80, 2, false", 24, 256)),
    ] {
        assert_eq!(launches(batch, tokens, head, dtype, false), named(expected), "{tokens} {head}");
    }
    let backward = launches(2, 577, 64, DType::Bf16, true);
    assert_eq!(backward, ("flash_grad_start<bf16, 64, 64, true>".to_string(), 6 * 10, 256));
}

#[test]
fn shared_memory_and_scratch_suffice_everywhere() {
    for facts in all_facts() {
        for head in (8..=128).step_by(8) {
            for tokens in [1, 5, 16, 50, 64, 65, 145, 196, 197, 257, 577, 1025, 4097] {
                let sizes = Sizes { batch: 100, tokens, heads: 3, head };
                let forward = Forward::choose(&sizes, &facts).unwrap();
                assert!(forward.shared <= facts.shared_per_block as usize, "{facts:?} {sizes:?} {forward:?}");
                assert!((1..=16).contains(&forward.warps), "{sizes:?} {forward:?}");
                let gradient = Gradient::choose(&sizes, &facts).unwrap();
                assert!(
                    gradient.shared <= facts.shared_per_block as usize,
                    "{facts:?} {sizes:?} {gradient:?}"
                );
                assert!(gradient.squares * gradient.warps >= sizes.tiles());
                let ty = Type { dtype: DType::Bf16, shape: Shape(vec![100, tokens, 9 * head]) };
                let asked = scratch(&Op::AttentionGrad { heads: 3, drop: None, sum: false }, &[&ty], &[]);
                let needed = gradient.scratch(gradient.blocks(&sizes, &facts), &sizes);
                assert!(needed <= asked, "{facts:?} {sizes:?} {gradient:?}: {needed} > {asked}");
            }
        }
    }
}

#[test]
fn what_matrix_units_do_not_take_is_computed_without() {
    let odd = run(&Facts::h200(), DType::Bf16, [2, 33, 2, 20], false).unwrap();
    assert_eq!(odd.kernel.name, "plain_attention<bf16, 33, 20, 32, false>");
    assert_eq!((odd.grid, odd.block), ([4, 2, 1], 64));
    let turing = facts((7, 5), 65_536);
    let old = run(&turing, DType::Bf16, [2, 17, 2, 32], true).unwrap();
    assert_eq!(old.kernel.name, "plain_attention_grad_queries<bf16, 17, 32, 32, true, true>");
    assert!(
        run(&turing, DType::F16, [2, 17, 2, 32], true).unwrap().kernel.name.starts_with("attention_grad<f16")
    );
    let full = run(&Facts::h200(), DType::F32, [2, 17, 2, 32], false).unwrap();
    assert_eq!(full.kernel.name, "plain_attention<float, 17, 32, 32, false>");
}

#[test]
fn sums_of_every_way_fit_their_memory() {
    for (facts, dtype) in all_facts().iter().zip([DType::F32, DType::Bf16].into_iter().cycle()) {
        for tokens in [1, 5, 64, 65, 197, 257, 577, 1025] {
            let sizes = Sizes { batch: 4, tokens, heads: 3, head: 64 };
            let [most, tf32] = [false, true]
                .map(|tf32| sizes.sums(KernelFamily::of(&sizes, dtype, tf32, false, true, facts), facts));
            assert!((4..=most).contains(&tf32), "{sizes:?} {facts:?}");
            let op = Op::AttentionGrad { heads: 3, drop: None, sum: true };
            assert_eq!(parts(&op, &[operand(dtype, &[4, tokens, 576])], facts), 4 * 576 * most);
        }
    }
}

#[test]
fn heads_that_no_kernel_takes_are_named() {
    let error = run(&facts((7, 5), 65_536), DType::F32, [2, 17, 2, 512], false).unwrap_err().to_string();
    assert!(error.contains("block") && error.contains("512 channels a head"), "{error}");
    assert!(error.contains("f32") && error.contains("7.5"), "{error}");
}

#[test]
fn every_instance_is_listed_once() {
    for facts in all_facts() {
        let listed = kernels(&facts);
        let mut names: Vec<_> = listed.iter().map(|(kernel, _)| &kernel.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), listed.len());
    }
}

/// The actions of attention without dropout, on an H200 unless another GPU is named.
fn made(facts: &Facts, dtype: DType, [b, t, h, d]: [usize; 4], backward: bool) -> Vec<Action> {
    let at = |address, operand: Operand| Operand { address, ..operand };
    let (qkv, out) = (operand(dtype, &[b, t, 3 * h * d]), operand(dtype, &[b, t, h * d]));
    let lse = operand(DType::F32, &[b, h, t]);
    let sums = operand(DType::F32, &[3 * h * d]);
    let (op, inputs, outputs) = if backward {
        let inputs = [at(1 << 12, qkv.clone()), at(2 << 12, out.clone()), at(3 << 12, lse), at(4 << 12, out)];
        let op = Op::AttentionGrad { heads: h, drop: None, sum: true };
        (op, inputs.to_vec(), vec![at(5 << 12, qkv), at(6 << 12, sums)])
    } else {
        (Op::Attention { heads: h, drop: None }, vec![qkv], vec![out, lse])
    };
    let (layer, tf32, op) = ("block", false, &op);
    let (scratch, parts, header) = (7 << 12, 8 << 12, 9 << 12);
    let cx =
        StepContext { op, layer, inputs: &inputs, outputs: &outputs, scratch, parts, header, tf32, facts };
    actions(&cx).unwrap()
}

#[test]
fn cudnn_is_given_the_same_heads() {
    let actions = made(&Facts::h200(), DType::Bf16, [1, 1025, 12, 64], true);
    let [Action::Attention(attention), Action::Sum(sum)] = &actions[..] else { panic!("{actions:?}") };
    let Attention { attended, own, after } = &**attention;
    assert_eq!((attended.qkv, attended.out, attended.log_sums), (1 << 12, 2 << 12, 3 << 12));
    let gradient = AttentionBackward { dout: 4 << 12, dqkv: 5 << 12, deltas: 7 << 12 };
    assert_eq!(attended.gradient, Some(gradient));
    assert_eq!(own.len(), 2);
    // Its sums go where ours do: a row for every 64 tokens.
    let after = after.as_ref().unwrap();
    assert_eq!(after.kernel.name, "attention_sums<bf16>");
    assert_eq!((after.grid, sum.rows, sum.columns), ([17, 12, 1], 17, 3 * 768));
    assert_eq!(after.args[2], Arg::Pointer(sum.parts));
    // Heads that are wholly in shared memory leave one row for each sample.
    let actions = made(&Facts::h200(), DType::F16, [8, 197, 12, 64], true);
    let [Action::Attention(attention), Action::Sum(sum)] = &actions[..] else { panic!("{actions:?}") };
    let after = attention.after.as_ref().unwrap();
    assert_eq!((after.grid[0], sum.rows), (8, 8));
    assert_eq!(after.args[5], Arg::I32(197));
}

#[test]
fn cudnn_is_no_candidate_where_it_takes_too_much_or_nothing() {
    let is_one = |facts: &Facts, dtype, sizes, backward| {
        matches!(made(facts, dtype, sizes, backward)[0], Action::Attention(_))
    };
    let h200 = Facts::h200();
    assert!(is_one(&h200, DType::Bf16, [8, 4097, 12, 64], false));
    // The gradient's working memory grows with the square of the tokens.
    assert!(!is_one(&h200, DType::Bf16, [8, 4097, 12, 64], true));
    assert!(is_one(&h200, DType::Bf16, [1, 4097, 12, 64], true));
    assert!(!is_one(&h200, DType::Bf16, [1, 16_385, 12, 64], true));
    // Heads that fill a Hopper GPU; others' kernels are the portable ones.
    assert!(!is_one(&h200, DType::Bf16, [11, 197, 12, 64], true));
    assert!(is_one(&h200, DType::Bf16, [11, 197, 12, 64], false));
    assert!(is_one(&facts((10, 0), 232_448), DType::Bf16, [11, 197, 12, 64], true));
    assert!(!is_one(&h200, DType::F32, [2, 65, 3, 64], false));
    assert!(!is_one(&h200, DType::Bf16, [2, 65, 3, 20], false));
    assert!(!is_one(&facts((7, 5), 65_536), DType::F16, [2, 65, 3, 64], false));
    assert!(is_one(&facts((10, 0), 232_448), DType::F16, [2, 65, 3, 64], true));
}

/// Memory for a number of each query, which cuDNN writes.
#[test]
fn working_memory_suffices_for_cudnn() {
    for (batch, tokens, heads) in [(1, 5, 1), (256, 197, 12), (1, 1025, 12), (2, 64, 3)] {
        let ty = Type { dtype: DType::Bf16, shape: Shape(vec![batch, tokens, 3 * 64 * heads]) };
        let asked = scratch(&Op::AttentionGrad { heads, drop: None, sum: false }, &[&ty], &[]);
        assert!(asked >= 4 * batch * tokens * heads);
    }
}
