//! Tests of shapes that fit, of refusals and their messages, and of what is derived from descriptions.

use crate::flat::Flat;
use crate::op::slots::Class;
use crate::op::{CHOICES, Op, Sampling, Window};
use crate::types::{DType, Shape, Type};

fn f32s<const N: usize>(shape: [usize; N]) -> Type {
    Type::new(DType::F32, shape)
}

fn given(op: &Op, inputs: &[&Type]) -> Vec<Type> {
    op.infer(inputs).unwrap()
}

fn refused(op: &Op, inputs: &[&Type]) -> String {
    op.infer(inputs).unwrap_err()
}

const LINEAR: Op = Op::Linear { bias: false, gelu: false };

#[test]
fn a_patch_must_divide_the_image() {
    let error = refused(&Op::Patches { patch: 5 }, &[&f32s([1, 3, 32, 32])]);
    assert_eq!(error, "patch 5 doesn't divide the 32×32 image");
}

#[test]
fn a_letter_has_one_length() {
    assert_eq!(given(&LINEAR, &[&f32s([2, 4]), &f32s([5, 4])]), [f32s([2, 5])]);
    let error = refused(&LINEAR, &[&f32s([2, 3]), &f32s([5, 4])]);
    assert_eq!(error, "I is 3 in x f32[2,3], but 4 in weight f32[5,4]");
    // A patch embedding's weight is that of a convolution.
    assert_eq!(given(&LINEAR, &[&f32s([2, 9, 48]), &f32s([7, 3, 4, 4])]), [f32s([2, 9, 7])]);
    assert_eq!(refused(&Op::Add, &[&f32s([2, 3]), &f32s([3, 2])]), "y is f32[3,2], but x f32[2,3]");
    let attention = Op::Attention { heads: 5, drop: None };
    assert_eq!(refused(&attention, &[&f32s([1, 4, 7])]), "qkv is f32[1,4,7]: an axis of 7 is not 3C");
    assert_eq!(refused(&attention, &[&f32s([1, 4, 9])]), "3 channels are not 5 heads of a whole size");
    assert_eq!(refused(&attention, &[&f32s([4, 9])]), "qkv is f32[4,9], not (B,T,3C)");
}

#[test]
fn the_number_of_operands_is_checked_first() {
    assert_eq!(refused(&Op::Add, &[&f32s([1])]), "takes 2 operands, got 1");
    assert_eq!(refused(&Op::Read { state: crate::StateId(0) }, &[]), "takes its type from the graph");
}

#[test]
fn dtypes_go_together() {
    let (half, f64s) = (Type::new(DType::Bf16, [2, 4]), Type::new(DType::F64, [5, 4]));
    let single = f32s([5, 4]);
    let mixed = "needs operands of one dtype, but weight is f32[5,4]";
    assert_eq!(refused(&LINEAR, &[&half, &single]), mixed);
    assert_eq!(refused(&Op::Add, &[&half, &Type::new(DType::I32, [2, 4])]), "y can't be i32[2,4]");
    let error = refused(&Op::Add, &[&single, &f64s]);
    assert_eq!(error, "y is f64[5,4]: f64 goes with f64 alone");
    let accumulate = refused(&Op::Accumulate, &[&half, &half]);
    assert_eq!(accumulate, "sum so far can't be bf16[2,4]");
    // Sums over half precision are f32.
    let stats = given(&Op::Moments, &[&half]);
    assert_eq!(stats, [f32s([3, 4])]);
    // A declared dtype counts where a kernel may write it.
    let weight = Type::new(DType::Bf16, [5, 4]);
    let declared = |dtype| LINEAR.infer_as(&[&half, &weight], &[dtype]).unwrap()[0].dtype;
    assert_eq!(declared(DType::F32), DType::F32, "logits");
    assert_eq!(declared(DType::F16), DType::Bf16);
    assert_eq!(declared(DType::I32), DType::Bf16);
}

#[test]
fn images_are_made_of_bytes_and_choices() {
    let (pixels, choices) = (Type::new(DType::U8, [10, 32, 30, 3]), Type::new(DType::I32, [8, CHOICES]));
    let (levels, taps) = (f32s([3, 256]), Type::new(DType::I32, [448, 5]));
    let op = Op::Prepare { size: 224 };
    for inputs in [&[&pixels, &choices, &levels][..], &[&pixels, &choices, &levels, &taps]] {
        assert_eq!(given(&op, inputs), [f32s([8, 3, 224, 224])]);
    }
    let error = refused(&op, &[&pixels, &choices, &f32s([1, 256])]);
    assert_eq!(error, "ch is 3 in pixels u8[10,32,30,3], but 1 in levels f32[1,256]");
    assert!(op.infer(&[&pixels, &Type::new(DType::I32, [8, 4]), &levels]).is_err());
    assert!(op.infer(&[&f32s([10, 32, 30, 3]), &choices, &levels]).is_err());
    assert!(op.infer(&[&pixels, &choices, &levels, &Type::new(DType::I32, [448, 2])]).is_err());
}

#[test]
fn mixed_labels_come_with_partners_and_shares() {
    let (logits, labels, weights) = (f32s([4, 10]), Type::new(DType::I32, [4]), f32s([4]));
    let (dloss, wide) = (f32s([]), f32s([4, 1]));
    let plain = [&logits, &labels, &weights];
    let mixed = |partners, mix| [&plain[..], &[partners, mix]].concat();
    let op = Op::CrossEntropy { smoothing: 0.1, mixed: true };
    let grad = Op::CrossEntropyGrad { smoothing: 0.1, mixed: true };
    assert_eq!(given(&op, &mixed(&labels, &weights)), [f32s([]), f32s([4])]);
    assert_eq!(given(&grad, &[&mixed(&labels, &weights)[..], &[&dloss]].concat()), [f32s([4, 10])]);

    assert_eq!(refused(&op, &plain), "takes 5 operands, got 3");
    let three = Type::new(DType::I32, [3]);
    assert_eq!(refused(&op, &mixed(&three, &weights)), "partners is i32[3], but logits f32[4,10]");
    assert_eq!(refused(&op, &mixed(&weights, &weights)), "partners can't be f32[4]");
    assert_eq!(refused(&op, &mixed(&labels, &wide)), "shares is f32[4,1], but logits f32[4,10]");
    let plain_op = Op::CrossEntropy { smoothing: 0.1, mixed: false };
    assert_eq!(refused(&plain_op, &mixed(&labels, &weights)), "takes 3 operands, got 5");
}

#[test]
fn convolutions_name_what_does_not_fit() {
    let (x, w) = (f32s([2, 8, 6, 4]), f32s([16, 3, 3, 4]));
    let conv = |stride, pad| Op::Conv { window: Window { stride, pad }, bias: false };
    assert_eq!(given(&conv(1, 1), &[&x, &w]), [f32s([2, 8, 6, 16])]);
    assert_eq!(given(&conv(2, 1), &[&x, &w]), [f32s([2, 4, 3, 16])]);
    assert_eq!(refused(&conv(0, 1), &[&x, &w]), "can't step by 0");
    let wide = f32s([16, 9, 9, 4]);
    assert_eq!(refused(&conv(1, 0), &[&x, &wide]), "a kernel of 9 is larger than the padded input of 8");
    let other = f32s([16, 3, 3, 5]);
    let differ = "I is 4 in x f32[2,8,6,4], but 5 in weight f32[16,3,3,5]";
    assert_eq!(refused(&conv(1, 1), &[&x, &other]), differ);
    let biased = Op::Conv { window: Window { stride: 1, pad: 1 }, bias: true };
    let error = refused(&biased, &[&x, &w, &f32s([4])]);
    assert_eq!(error, "O is 16 in weight f32[16,3,3,4], but 4 in bias f32[4]");
    let (window, shape) = (Window { stride: 1, pad: 1 }, Shape::from([16, 3, 3, 4]));
    let grad = Op::ConvGradW { window, shape, accumulate: false };
    assert_eq!(given(&grad, &[&f32s([2, 8, 6, 16]), &x]), [w]);
    let error = refused(&grad, &[&f32s([2, 7, 6, 16]), &x]);
    assert_eq!(error, "dy f32[2,7,6,16] doesn't come from a map of 8×6");
}

#[test]
fn channels_join_and_part() {
    let (a, b) = (f32s([2, 3, 3, 4]), f32s([2, 3, 3, 6]));
    assert_eq!(given(&Op::Concat, &[&a, &b]), [f32s([2, 3, 3, 10])]);
    let differ = "map is f32[2,3,2,6], but map f32[2,3,3,4]";
    assert_eq!(refused(&Op::Concat, &[&a, &f32s([2, 3, 2, 6])]), differ);
    let beyond = "f32[2,3,3,6] has no channels 4 to 8";
    assert_eq!(refused(&Op::Slice { start: 4, channels: 4 }, &[&b]), beyond);
    let none = Op::Resize { height: 0, width: 2, sampling: Sampling::Bilinear };
    assert_eq!(refused(&none, &[&a]), "can't resize f32[2,3,3,4] to 0×2");
    let few = "9 tokens are too few for a grid of 3×4";
    assert_eq!(refused(&Op::Grid { height: 3, width: 4 }, &[&f32s([2, 9, 4])]), few);
}

#[test]
fn a_commit_has_each_value_twice() {
    let (control, a, b) = (f32s([3]), f32s([3, 4]), f32s([3, 5]));
    assert_eq!(given(&Op::Commit, &[&control, &a, &b, &a, &b]), [a.clone(), b.clone()]);
    let error = "value after is f32[3,5], but needs the shape [3,4]";
    assert_eq!(refused(&Op::Commit, &[&control, &a, &b]), error);
    assert_eq!(refused(&Op::Commit, &[&control, &a, &b, &a]), "takes 3 operands, got 4");
}

/// Pairs of which the result may lie where the operand lay, and the names of results.
#[test]
fn places_and_names_follow() {
    let adam = Op::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, flat: Flat::default() };
    let pairs = |op: &Op, inputs| op.in_place(inputs).collect::<Vec<_>>();
    assert_eq!(pairs(&adam, 6), [(0, 0), (2, 1), (3, 2)]);
    assert_eq!(pairs(&adam, 7), [(0, 0), (2, 1), (3, 2), (6, 3)]);
    assert_eq!(pairs(&Op::Commit, 5), [(1, 0), (2, 1)]);
    assert_eq!(pairs(&Op::RunningMoments { momentum: 0.1 }, 2), [(0, 0)]);
    let unpack = |over| Op::Unpack { shapes: vec![Shape::from([2]), Shape::from([3])], to: None, over };
    assert_eq!(pairs(&unpack(true), 3), [(1, 0), (2, 1)]);
    assert_eq!(pairs(&unpack(false), 1), []);

    let names =
        |op: &Op, inputs, count| (0..count).map(|i| op.output_name(inputs, "x", i)).collect::<Vec<_>>();
    assert_eq!(names(&adam, 7, 4), ["x", "x.m", "x.v", "x.half"]);
    assert_eq!(names(&unpack(false), 1, 2), ["x", "x.1"]);
    let norm = Op::LayerNormGrad { add: false, sum: false, half: Some(DType::Bf16) };
    assert_eq!(names(&norm, 5, 4), ["x.x", "x.weight", "x.bias", "x.half"]);
}

/// A class that speaks of an operand speaks of one that is there.
#[test]
fn classes_point_at_operands() {
    let shape = Shape::from([2, 3]);
    let ops = [
        (Op::Unpack { shapes: vec![shape.clone()], to: None, over: true }, 2),
        (Op::LayerNormGrad { add: true, sum: true, half: None }, 6),
        (Op::Sgd { momentum: 0.9, nesterov: false, flat: Flat::default() }, 6),
        (Op::Reshape { shape }, 1),
    ];
    for (op, inputs) in ops {
        let description = op.describe(inputs);
        assert_eq!(description.operands.len(), inputs, "{}", op.name());
        for slot in description.operands.iter().chain(&description.results) {
            assert!(slot.over.is_none_or(|operand| operand < inputs), "{}", op.name());
            assert!(!matches!(slot.class, Class::Like(operand) if operand >= inputs), "{}", op.name());
        }
    }
}
