use super::super::testing::*;
use super::sums::{COLUMN_BLOCKS, SUM_BYTES};
use super::*;
use crate::action::Constants;

#[test]
fn a_cut_covers_every_row_and_column_once() {
    for rows in [1, 3, 128, 512, 513, 8320, 50432, 1_000_000] {
        for columns in [1, 10, 24, 96, 192, 576, 768, 1000, 1001, 1280, 2304, 3072, 20_000] {
            let cut = ColumnTiling::of(&Shape::from([rows, columns]));
            let once = |n: usize, of: usize, total: usize| (n - 1) * of < total && total <= n * of;
            assert!(once(cut.across, cut.span, columns), "{rows}×{columns}: {cut:?}");
            assert!(once(cut.parts, cut.per, rows), "{rows}×{columns}: {cut:?}");
            assert!(cut.across * cut.parts <= COLUMN_BLOCKS.max(cut.across), "{rows}×{columns}: {cut:?}");
            assert!(cut.span <= THREADS);
        }
    }
}

fn sums(actions: &[Action]) -> Vec<PartialSum> {
    let sum = |action: &Action| match action {
        Action::Sum(sum) => Some(*sum),
        _ => None,
    };
    actions.iter().filter_map(sum).collect()
}

#[test]
fn partial_sums_fit_their_memory() {
    let op = Op::ColumnSum { accumulate: false };
    let actions = step(op.clone(), &["bf16[50432,3072]"], &["f32[3072]"]).unwrap();
    assert_eq!(names(&actions), ["column_sum<bf16, 8, 32, 4>"]);
    assert_eq!(launches(&actions)[0].grid, [12, 44, 1]);
    let bytes = parts(&op, &operands(0, &["bf16[50432,3072]"]));
    assert_eq!(bytes, 4 * 44 * 3072);
    let (columns, out) = (3072, 2 << 32);
    let sum = PartialSum { parts: PARTIAL, rows: 44, stride: columns, columns, start: None, out };
    assert_eq!(sums(&actions), [sum]);
    assert_eq!(sum.range().end - PARTIAL, bytes as Address);

    for sum in [false, true] {
        let norm = Op::LayerNormGrad { add: false, sum, half: Some(DType::Bf16) };
        let inputs = ["f32[8320,192]", "f32[8320]", "f32[8320]", "f32[192]", "bf16[8320,192]"];
        let mut outputs = vec!["f32[8320,192]", "f32[192]", "f32[192]"];
        outputs.extend(sum.then_some("f32[192]"));
        outputs.push("bf16[8320,192]");
        let actions = step(norm.clone(), &inputs, &outputs).unwrap();
        assert_eq!(names(&actions), [format!("layer_norm_grad<float, bf16, bf16, 192, false, true, {sum}>")]);
        assert_eq!(launches(&actions)[0].grid, [264, 1, 1]);
        let copy = outputs.len() as Address - 1;
        assert_eq!(launches(&actions)[0].args[7], Arg::Pointer((2 << 32) + (copy << 20)));
        let made = sums(&actions);
        assert_eq!(made.len(), if sum { 3 } else { 2 });
        let end = parts(&norm, &operands(0, &inputs)) as Address + PARTIAL;
        assert_eq!(end - PARTIAL, 4 * 264 * 192 * made.len() as Address);
        for (i, sum) in made.iter().enumerate() {
            assert_eq!(sum.parts, PARTIAL + 4 * 192 * i as Address);
            assert_eq!(sum.out, (2 << 32) + ((1 + i as Address) << 20));
            assert!(sum.range().end <= end && (sum.rows, sum.stride) == (264, 192 * made.len()));
        }
    }
}

#[test]
fn few_rows_are_summed_by_one_launch() {
    for (x, out) in [("f32[256,1000]", "f32[1000]"), ("bf16[3,10]", "f32[10]")] {
        let op = Op::ColumnSum { accumulate: false };
        let actions = step(op.clone(), &[x], &[out]).unwrap();
        assert_eq!(actions.len(), 1, "{x}");
        assert_eq!(parts(&op, &operands(0, &[x])), 0);
        assert_eq!(launches(&actions)[0].args[5], Arg::Pointer(2 << 32));
    }
}

#[test]
fn sums_start_from_what_is_there_only_if_told() {
    let start = |accumulate| {
        let op = Op::ColumnSum { accumulate };
        let inputs = ["bf16[8320,768]", "f32[768]"];
        let actions = step(op, &inputs[..1 + usize::from(accumulate)], &["f32[768]"]).unwrap();
        assert_eq!(launches(&actions)[0].args[4], Arg::Pointer(0));
        sums(&actions)[0].start
    };
    assert_eq!((start(true), start(false)), (Some((1 << 32) + (1 << 20)), None));
}

#[test]
fn sums_are_told_by_a_table() {
    let sum = |columns: usize, start: Option<Address>| {
        let (parts, out) = (0x1000 + columns as Address, 0x2000 + columns as Address);
        PartialSum { parts, rows: 9, stride: 100 + columns, columns, start, out }
    };
    let mut constants = Constants::at(4096);
    let all = [sum(33, None), sum(64, Some(7)), sum(1, None)];
    let Action::Launch(made) = sum_parts(&all, &mut constants) else { panic!() };
    assert_eq!((made.grid, made.block), ([5, 1, 1], 1024));
    assert_eq!(made.args, [Arg::Pointer(4096), Arg::I32(3)]);
    let table = constants.bytes();
    assert_eq!(table.len(), 3 * SUM_BYTES);
    let word = |i: usize| u64::from_le_bytes(table[8 * i..8 * i + 8].try_into().unwrap());
    let pair = |low: u64, high: u64| low | high << 32;
    let second = [0x1040, 7, 0x2040, pair(9, 164), pair(64, 2)];
    assert_eq!([5, 6, 7, 8, 9].map(word), second);
    assert_eq!(word(14), pair(1, 4));
}

#[test]
fn a_sum_goes_on_from_the_one_so_far() {
    let (inputs, outputs) = (operands(1 << 32, &["f32[3,5]"; 2]), operands(2 << 32, &["f32[3,5]"]));
    assert_eq!(names(&step_on(Op::Accumulate, &inputs, &outputs).unwrap()), ["add<float, float, float>"]);
}

#[test]
fn a_layer_norm_has_threads_for_every_row() {
    for (columns, ahead, back) in
        [(10, 64, 64), (24, 64, 64), (96, 32, 32), (192, 16, 16), (768, 4, 8), (1024, 4, 4), (1280, 2, 4)]
    {
        assert_eq!(
            (norm_rows(columns, FORWARD), norm_rows(columns, backward(columns))),
            (ahead, back),
            "{columns}"
        );
        // The backward pass keeps a row of every group in shared memory.
        assert!(4 * back * columns <= 48 << 10);
    }
    assert_eq!(norm_rows(NORM_COLUMNS, backward(NORM_COLUMNS)), 1);
    let op = Op::LayerNorm { eps: 1e-6, add: true };
    let inputs = ["f32[3,7,768]", "bf16[3,7,768]", "f32[768]", "f32[768]"];
    let outputs = ["f32[3,7,768]", "bf16[3,7,768]", "f32[3,7]", "f32[3,7]"];
    let actions = step(op, &inputs, &outputs).unwrap();
    assert_eq!(names(&actions), ["layer_norm<float, bf16, bf16, 768, true>"]);
    assert_eq!(launches(&actions)[0].grid, [6, 1, 1]);
}

#[test]
fn types_without_a_kernel_are_refused() {
    let refused = |op, inputs: &[&str], outputs: &[&str]| step(op, inputs, outputs).unwrap_err();
    let error = refused(Op::Gelu, &["f64[4,8]"], &["f64[4,8]"]).to_string();
    assert_eq!(error, "blocks.0: the CUDA executor has no kernel for gelu of f64");
    refused(Op::Gelu, &["f32[4,8]"], &["bf16[4,8]"]);
    refused(Op::Accumulate, &["bf16[4]", "bf16[4]"], &["bf16[4]"]);
    refused(Op::Cast { to: DType::I32 }, &["f32[4]"], &["i32[4]"]);
    refused(Op::ColumnSum { accumulate: false }, &["bf16[4,8]"], &["bf16[8]"]);
    let norm = Op::LayerNorm { eps: 1e-6, add: false };
    refused(norm.clone(), &["f32[4,8]", "bf16[8]", "f32[8]"], &["f32[4,8]", "f32[4]", "f32[4]"]);
    let wide = ["f32[4,99999]", "f32[99999]", "f32[99999]"];
    refused(norm, &wide, &["f32[4,99999]", "f32[4]", "f32[4]"]);
}

#[test]
fn packed_values_lie_end_to_end() {
    let op = Op::Pack { align: 8, to: Some(DType::Bf16) };
    let actions = step(op, &["f32[3]", "f32[2,4]"], &["bf16[16]"]).unwrap();
    // The second starts at 6 bytes, where vectors can't be written.
    assert_eq!(names(&actions), ["cast<float, bf16, 4>", "cast<float, bf16, 1>"]);
    assert_eq!(launches(&actions)[1].args[1], Arg::Pointer((2 << 32) + 6));
    assert_eq!(actions[2], Action::Zero { at: (2 << 32) + 22, bytes: 10 });

    let op = Op::Unpack { shapes: vec![Shape::from([3]), Shape::from([4])], to: None, over: false };
    let actions = step(op, &["f32[8]"], &["f32[3]", "f32[4]"]).unwrap();
    let second = Action::Copy { from: (1 << 32) + 12, to: (2 << 32) + (1 << 20), bytes: 16 };
    assert_eq!(actions[1], second);
}

#[test]
fn draws_are_by_sample_and_token() {
    let op = Op::Drop { rate: 0.5, site: 3, per: Per::Element };
    let actions = step(op.clone(), &["bf16[2,65,192]"], &["bf16[2,65,192]"]).unwrap();
    assert_eq!(names(&actions), ["drop_elements<bf16, bf16, 192>"]);
    assert_eq!(launches(&actions)[0].args[3..5], [Arg::I64(130), Arg::I32(65)]);
    let actions = step(op, &["bf16[6,10]"], &["bf16[6,10]"]).unwrap();
    assert_eq!(launches(&actions)[0].args[3..5], [Arg::I64(6), Arg::I32(1)]);
    let op = Op::Drop { rate: 0.25, site: 3, per: Per::Sample };
    let actions = step(op, &["f32[2,65,192]"], &["f32[2,65,192]"]).unwrap();
    assert_eq!(launches(&actions)[0].grid, [2, 13, 1]);
    let draw = [Arg::U32(3), Arg::U32(1 << 30), Arg::F32(1.0 / 0.75)];
    assert_eq!(launches(&actions)[0].args[4..], draw);
}
