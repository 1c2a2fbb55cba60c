use super::*;
use crate::action::Operand;
use crate::steps::testing::{all_facts, facts};
use std::collections::HashSet;

/// A map (B,h,w), heads and their size, the windows.
type Case = ([usize; 3], usize, usize, Windows);

fn windows(size: [usize; 2], shift: [usize; 2]) -> Windows {
    Windows { size, shift }
}

fn run(facts: &Facts, dtype: DType, case: Case, backward: bool) -> Result<(Vec<Action>, usize), CudaError> {
    let ([b, h, w], heads, head, windows) = case;
    let (c, t) = (heads * head, windows.tokens());
    let mut next = 0;
    let mut operand = |dtype: DType, shape: &[usize]| {
        next += 1 << 32;
        Operand { address: next, dtype, shape: Shape(shape.to_vec()) }
    };
    let (qkv, f32) = (operand(dtype, &[b, h, w, 3 * c]), DType::F32);
    let parameters = [&[c][..], &[c], &[heads, 1, 1], &[heads, t, t]];
    let mut inputs: Vec<Operand> =
        [qkv].into_iter().chain(parameters.map(|shape| operand(f32, shape))).collect();
    let out = [operand(dtype, &[b, h, w, c]), operand(f32, &[b, windows.count([h, w]), heads, t])];
    let (op, outputs) = if backward {
        inputs.extend(out);
        inputs.push(operand(dtype, &[b, h, w, c]));
        let mut outputs = vec![operand(dtype, &[b, h, w, 3 * c])];
        outputs.extend(parameters.map(|shape| operand(f32, shape)));
        (Op::WindowAttentionGrad { heads, windows }, outputs)
    } else {
        (Op::WindowAttention { heads, windows }, out.to_vec())
    };
    let (layer, tf32, scratch, partial, header) = ("block", false, 1 << 50, 1 << 51, 1 << 52);
    let bytes = parts(&op, &inputs, facts);
    let (op, inputs, outputs) = (&op, &inputs[..], &outputs[..]);
    let cx = StepContext { op, layer, inputs, outputs, scratch, parts: partial, header, tf32, facts };
    actions(&cx).map(|actions| (actions, bytes))
}

fn launched(facts: &Facts, dtype: DType, case: Case, backward: bool) -> Vec<Launch> {
    let (actions, _) = run(facts, dtype, case, backward).unwrap();
    let launch = |action: Action| match action {
        Action::Launch(launch) => Some(launch),
        _ => None,
    };
    actions.into_iter().filter_map(launch).collect()
}

/// The first stage of Swin V2-B over 512 px.
const STAGE: Case = ([8, 128, 128], 4, 32, Windows { size: [8, 8], shift: [4, 4] });

#[test]
fn swin_b_on_an_h200() {
    let forward = &launched(&Facts::h200(), DType::Bf16, STAGE, false)[0];
    assert_eq!(forward.kernel.name, "window_attention<bf16, 8, 8, 32>");
    assert_eq!((forward.grid, forward.block, forward.shared), ([4, 256, 1], 128, 6 * 4096 + 256));
    assert_eq!(forward.args[7..], [4, 2048, 8, 128, 128, 4, 4].map(Arg::I32));
    let backward = &launched(&Facts::h200(), DType::Bf16, STAGE, true)[0];
    assert_eq!(backward.kernel.name, "window_attention_grad<bf16, 8, 8, 32, 2, 3>");
    // What the processors hold at once.
    assert_eq!((backward.grid, backward.block), ([4, 98, 1], 128));
    assert!(3 * (backward.shared + 1024) <= Facts::h200().shared_per_block);
}

#[test]
fn wide_windows_are_several_squares() {
    let case = ([2, 50, 76], 3, 32, windows([16, 16], [8, 8]));
    let forward = &launched(&Facts::h200(), DType::F16, case, false)[0];
    assert_eq!((forward.kernel.name.as_str(), forward.grid[2]), ("window_attention<f16, 16, 16, 32>", 4));
    let backward = launched(&Facts::h200(), DType::F16, case, true);
    let names: Vec<&str> = backward.iter().map(|launch| launch.kernel.name.as_str()).collect();
    assert_eq!(names, ["window_grad_queries<f16, 16, 16, 32>", "window_grad_keys<f16, 16, 16, 32>"]);
    assert!(backward.iter().all(|launch| launch.block == 128 && launch.grid[2] == 4));
}

#[test]
fn what_matrix_units_do_not_take_is_computed_without() {
    let plain = |facts: &Facts, dtype, head| {
        let case = ([2, 8, 8], 2, head, windows([4, 4], [2, 2]));
        let launches = [launched(facts, dtype, case, false), launched(facts, dtype, case, true)].concat();
        let sources: HashSet<Source> = launches.iter().map(|launch| launch.kernel.source).collect();
        sources == HashSet::from([Source::WindowsPlain])
    };
    assert!(plain(&Facts::h200(), DType::F32, 32) && plain(&Facts::h200(), DType::Bf16, 24));
    assert!(plain(&facts((7, 5), 65_536), DType::Bf16, 32));
    assert!(!plain(&facts((7, 5), 65_536), DType::F16, 32) && !plain(&Facts::h200(), DType::Bf16, 32));
}

/// Windows that follow each other are shared out without a gap, parts lie within their memory and apart, and shared memory suffices.
#[test]
fn parts_and_shares_cover_all_windows_once() {
    for facts in all_facts() {
        for (dtype, head) in
            [(DType::F32, 32), (DType::Bf16, 32), (DType::F16, 32), (DType::Bf16, 64), (DType::F16, 20)]
        {
            for size in [[8, 8], [16, 16], [6, 8], [12, 12], [3, 5], [1, 1], [24, 24]] {
                let case = ([3, 50, 76], 4, head, windows(size, [size[0] / 2, size[1] / 2]));
                let (actions, bytes) = run(&facts, dtype, case, true).unwrap();
                let total = 3 * case.3.count([50, 76]);
                let mut sums = Vec::new();
                for action in &actions {
                    match action {
                        Action::Launch(launch) => {
                            assert!(launch.shared <= facts.shared_per_block, "{launch:?}")
                        }
                        Action::Sum(sum) => sums.push(sum),
                        other => panic!("{other:?}"),
                    }
                }
                let Action::Launch(first) = &actions[0] else { panic!() };
                let Some([Arg::I32(_), Arg::I32(all), Arg::I32(per), ..]) = first.args.last_chunk::<7>()
                else {
                    panic!()
                };
                let (all, per, shares) = (*all as usize, *per as usize, first.grid[1] as usize);
                assert_eq!(all, total);
                assert!((shares - 1) * per < total && total <= shares * per, "{size:?} {shares}×{per}");
                let [dq_bias, dv_bias, scale, bias] = sums[..] else { panic!("four sums") };
                assert_eq!((bias.rows, bias.columns), (shares, 4 * case.3.tokens().pow(2)));
                assert_eq!((dq_bias.columns, dv_bias.columns, scale.columns), (4 * head, 4 * head, 4));
                assert_eq!(scale.rows, shares * first.grid[2] as usize);
                assert_eq!(dq_bias.parts, bias.range().end, "side by side");
                assert_eq!(scale.range().end, (1 << 51) + bytes as Address, "to the last byte");
            }
        }
    }
}

#[test]
fn mixed_types_and_heads_that_no_kernel_takes_are_refused() {
    let case = ([1, 8, 8], 1, 1024, windows([8, 8], [0, 0]));
    let error = run(&facts((7, 5), 65_536), DType::F32, case, true).unwrap_err().to_string();
    assert!(error.contains("1024 channels a head in windows of 8×8") && error.contains("7.5"), "{error}");
}

#[test]
fn instances_that_stand_for_all_are_listed_once() {
    for facts in all_facts() {
        let listed = kernels(&facts);
        let names: HashSet<&str> = listed.iter().map(|(kernel, _)| kernel.name.as_str()).collect();
        assert!(names.len() == listed.len() && names.len() == 5, "{names:?}");
    }
}
