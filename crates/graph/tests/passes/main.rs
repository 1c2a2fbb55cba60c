//! Each pass alone, on graphs small enough to see through.

mod recompute;
mod states;
#[path = "../support/transformer.rs"]
mod transformer;

use graph::build::Linear;
use graph::graph::{At, Node, Phase};
use graph::op::Pooling;
use graph::passes::{Delivery, differentiate, fuse, late, narrow, peephole, place, prepare, schedule};
use graph::plan::{Key, Plan};
use graph::{Builder, DType, Graph, Init, Mesh, Model, Op, Role, Shape, StateId, Type, ValueId};
use transformer::{BATCH, WIDTH, forward};

const F32: DType = DType::F32;

fn layer(name: &str, out: usize) -> Linear<'_> {
    Linear { name, out, weight: Init::Zeros, bias: Init::Zeros }
}

fn ops(graph: &Graph) -> Vec<String> {
    let steps = graph.nodes.iter().filter(|n| !matches!(n.op, Op::Input | Op::Read { .. }));
    steps.map(|n| n.op.name()).collect()
}

fn node<'a>(graph: &'a Graph, op: &Op) -> &'a Node {
    graph.nodes.iter().find(|n| n.op == *op).unwrap_or_else(|| panic!("no {op:?}"))
}

fn names(graph: &Graph, values: &[ValueId]) -> Vec<String> {
    values.iter().map(|v| graph.name(*v).to_string()).collect()
}

/// Nothing yet, for two ranks.
fn among_two() -> Graph {
    let mut graph = Graph::default();
    graph.mesh = Mesh::of_data(2);
    graph
}

fn planned(graph: &Graph) -> Plan {
    graph.check().unwrap();
    let target = |_: &Graph, _: usize| 0;
    let plan = place(graph, &schedule(graph, &target), "test", Key::default(), &target);
    plan.check().unwrap_or_else(|e| panic!("{e}\n{plan}"));
    plan
}

// ---- prepare ---------------------------------------------------------------------------------------------------

/// (inputs, steps, states) of a graph.
fn outline(graph: &Graph) -> (Vec<String>, Vec<String>, Vec<String>) {
    let inputs = graph.nodes.iter().filter(|n| n.op == Op::Input).map(|n| n.layer.clone()).collect();
    (inputs, ops(graph), graph.states.iter().map(|s| s.name.clone()).collect())
}

fn patched(image: usize) -> Model {
    let mut b = Builder::new(F32, true);
    let images = b.input("images", F32, [4, 3, image, image]);
    b.input("labels", DType::I32, [4]);
    let y = b.patch_embedding(images, 4, layer("proj", 8));
    let graph = b.finish(&[y]).unwrap();
    Model { train: graph.clone(), eval: graph, key: Key::default() }
}

#[test]
fn a_model_can_begin_with_bytes() {
    let comes = Delivery { height: 32, width: 30, images: 6, resident: false, taps: Some([448, 5]) };
    let lies = Delivery { images: 1000, resident: true, taps: None, ..comes };
    let model = prepare(patched(16), Some(&comes), Some(&lies)).unwrap();
    let (inputs, steps, states) = outline(&model.train);
    assert_eq!(inputs, ["pixels", "choices", "labels"]);
    assert_eq!(steps, ["prepare", "patches", "linear"]);
    let tables = ["train.levels", "train.taps", "eval.levels", "eval.pixels"];
    assert_eq!(states, [&["proj.weight", "proj.bias"][..], &tables].concat());
    assert_eq!(model.train.states, model.eval.states);
    assert!(model.train.states[2..].iter().all(|s| s.role == Role::Resident));
    assert_eq!(model.train.states[3].ty, Type::new(DType::I32, [448, 5]));
    assert_eq!(model.eval.states[5].ty, Type::new(DType::U8, [1000, 32, 30, 3]));
    let (inputs, steps, _) = outline(&model.eval);
    assert_eq!((inputs, steps[0].as_str()), (vec!["choices".to_string(), "labels".into()], "prepare"));
    for graph in [&model.train, &model.eval] {
        let images = node(graph, &Op::Prepare { size: 16 });
        assert_eq!(names(graph, &images.outputs), ["images"]);
        let text = planned(graph).to_string();
        assert_eq!(text.parse::<Plan>().unwrap().to_string(), text);
    }
    // Of a set that lies there, a batch is read: bytes, choices, what they become, and the images.
    let plan = planned(&model.eval);
    assert_eq!(
        plan.cost_of(&plan.steps[0]).bytes,
        (4 * 32 * 30 * 3 + 4 * 34 * 4 + 3 * 256 * 4 + 4 * 3 * 256 * 4) as f64
    );
}

#[test]
fn what_is_only_evaluated_has_no_tables_for_training() {
    let comes = Delivery { height: 16, width: 16, images: 4, resident: false, taps: None };
    let model = prepare(patched(16), None, Some(&comes)).unwrap();
    assert_eq!(outline(&model.train).0, ["images", "labels"]);
    assert_eq!(outline(&model.eval).2, ["proj.weight", "proj.bias", "eval.levels"]);
}

// ---- fuse ------------------------------------------------------------------------------------------------------

#[test]
fn linear_and_gelu_fuse_and_keep_both_values() {
    let mut b = Builder::new(F32, true);
    let x = b.input("x", F32, [2, 4]);
    let pre = b.linear(x, layer("fc", 8));
    let y = b.gelu(pre);
    let graph = fuse(b.finish(&[y]).unwrap());
    assert_eq!(ops(&graph), ["linear"]);
    assert_eq!(node(&graph, &Op::Linear { bias: true, gelu: true }).outputs, [y, pre]);
}

#[test]
fn linear_and_gelu_stay_apart_when_the_value_between_is_used() {
    for as_output in [false, true] {
        let mut b = Builder::new(F32, true);
        let x = b.input("x", F32, [2, 4]);
        let pre = b.linear(x, layer("fc", 8));
        let y = b.gelu(pre);
        let outputs = if as_output { vec![y, pre] } else { vec![b.add(y, pre)] };
        let graph = fuse(b.finish(&outputs).unwrap());
        assert!(ops(&graph).starts_with(&["linear".into(), "gelu".into()]), "{:?}", ops(&graph));
    }
}

#[test]
fn residual_and_norm_fuse_and_later_users_see_the_sum() {
    let mut b = Builder::new(F32, true);
    let x = b.input("x", F32, [2, 4]);
    let r = b.input("r", F32, [2, 4]);
    let sum = b.add(x, r);
    let norm = b.layer_norm("norm", sum, 1e-6);
    let y = b.add(sum, norm);
    let graph = fuse(b.finish(&[y]).unwrap());
    assert_eq!(ops(&graph), ["layer_norm", "add"]);
    let fused = node(&graph, &Op::LayerNorm { eps: 1e-6, add: true });
    assert_eq!((&fused.inputs[..2], &fused.outputs[..2]), (&[x, r][..], &[sum, norm][..]));
    graph.check().unwrap();
}

#[test]
fn residual_and_norm_stay_apart_when_the_sum_is_used_before() {
    let mut b = Builder::new(F32, true);
    let x = b.input("x", F32, [2, 4]);
    let sum = b.add(x, x);
    let early = b.scale(sum, 2.0);
    let norm = b.layer_norm("norm", sum, 1e-6);
    let y = b.add(early, norm);
    let graph = fuse(b.finish(&[y]).unwrap());
    assert_eq!(ops(&graph), ["add", "scale", "layer_norm", "add"]);
}

// ---- late ------------------------------------------------------------------------------------------------------

/// The gradient of a class token is made when it is wanted, and not before.
#[test]
fn gradients_of_selected_tokens_are_late() {
    let graph = fuse(narrow(forward(2, true).unwrap()).unwrap());
    let loss = graph.find("loss").unwrap();
    let (graph, _) = differentiate(graph, loss, &|_| true).unwrap();
    let moved = late(graph.clone());
    moved.check().unwrap();
    let mut kept = 0;
    for (index, node) in moved.nodes.iter().enumerate().filter(|(_, n)| matches!(n.op, Op::PoolGrad { .. })) {
        let next = &moved.nodes[index + 1];
        let reads_it = next.inputs.iter().any(|value| node.outputs.contains(value));
        assert!(reads_it || matches!(next.op, Op::PoolGrad { .. }), "{} is made too early", node.layer);
        kept += 1;
    }
    assert!(kept > 0 && moved.nodes.len() == graph.nodes.len());
    assert_ne!(ops(&moved), ops(&graph));
    assert!(planned(&moved).arena <= planned(&graph).arena);
}

// ---- narrow ----------------------------------------------------------------------------------------------------

#[test]
fn only_the_class_token_of_the_last_mlp_is_computed() {
    let wide = forward(2, true).unwrap();
    let graph = narrow(wide.clone()).unwrap();
    graph.check().unwrap();
    let shape_of = |layer: &str| {
        let node =
            graph.nodes.iter().rfind(|n| n.layer == layer && !matches!(n.op, Op::Pool { .. })).unwrap();
        graph.ty(node.outputs[0]).shape.clone()
    };
    assert_eq!(shape_of("blocks.1.fc1"), Shape::from([BATCH, 4 * WIDTH]));
    assert_eq!(shape_of("blocks.1.norm2"), Shape::from([BATCH, WIDTH]));
    assert_eq!(shape_of("blocks.1.proj"), Shape::from([BATCH, WIDTH]));
    // Attention needs the keys and values of all tokens; so does everything before it.
    assert_eq!(shape_of("blocks.1.qkv"), Shape::from([BATCH, 17, 3 * WIDTH]));
    assert_eq!(shape_of("blocks.0.fc1"), Shape::from([BATCH, 17, 4 * WIDTH]));
    assert_eq!(names(&graph, &graph.outputs), names(&wide, &wide.outputs));
    assert_eq!(graph.states, wide.states);
}

#[test]
fn a_value_someone_else_reads_whole_stays_wide() {
    let build = |kind, as_output| {
        let mut b = Builder::new(F32, true);
        let x = b.input("x", F32, [2, 5, 4]);
        let wide = b.gelu(x);
        let first = b.pool(wide, kind);
        b.finish(&[first, wide][..if as_output { 2 } else { 1 }]).unwrap()
    };
    let narrowed = |kind, as_output| ops(&narrow(build(kind, as_output)).unwrap());
    assert_eq!(narrowed(Pooling::First, false), ["pool", "gelu"]);
    assert_eq!(narrowed(Pooling::First, true), ["gelu", "pool"]);
    assert_eq!(narrowed(Pooling::Mean, false), ["gelu", "pool"]);
}

// ---- differentiate ---------------------------------------------------------------------------------------------

/// x → fc → (gelu, scaled) → sum → head → loss, so that fc's result is used twice.
fn forked() -> (Graph, ValueId) {
    let mut b = Builder::new(F32, true);
    let x = b.input("x", F32, [2, 4]);
    let targets = b.targets([2], false);
    let fc = b.linear(x, layer("fc", 4));
    let curved = b.gelu(fc);
    let scaled = b.scale(fc, 2.0);
    let sum = b.add(curved, scaled);
    let logits = b.linear(sum, layer("head", 3));
    let (loss, stats) = b.cross_entropy(logits, targets, 0.0);
    (b.finish(&[loss, stats]).unwrap(), loss)
}

#[test]
fn gradients_of_a_value_used_twice_add_last_user_first() {
    let (graph, loss) = forked();
    let (graph, _) = differentiate(graph, loss, &|_| true).unwrap();
    graph.check().unwrap();
    let sum = graph.nodes.iter().find(|n| n.op == Op::Add && n.phase == Phase::Backward).unwrap();
    let makers = graph.producers();
    let maker = |v: ValueId| graph.nodes[makers[v.index()].unwrap()].op.name();
    assert_eq!(sum.inputs.iter().map(|v| maker(*v)).collect::<Vec<_>>(), ["scale", "gelu_grad"]);
    assert_eq!(graph.nodes.iter().filter(|n| matches!(n.op, Op::LinearGradW { .. })).count(), 2);
}

#[test]
fn gradients_come_in_the_order_they_are_ready() {
    let (graph, loss) = forked();
    let (graph, gradients) = differentiate(graph, loss, &|_| true).unwrap();
    let order: Vec<&str> = gradients.iter().map(|(s, _)| &graph.states[s.index()].name[..]).collect();
    assert_eq!(order, ["head.weight", "head.bias", "fc.weight", "fc.bias"]);
    let makers = graph.producers();
    assert!(gradients.is_sorted_by_key(|(_, value)| makers[value.index()]));
    for (state, gradient) in &gradients {
        assert_eq!(graph.ty(*gradient), graph.state_type(*state));
    }
}

#[test]
fn an_op_without_a_backward_rule_is_named_with_its_layer() {
    let mut graph = Graph::default();
    let w = parameter(&mut graph, "w", [8]);
    let at = At::new("half", Phase::Forward);
    let loss = graph.push(Op::Cast { to: DType::F16 }, &[w], &at).unwrap()[0];
    let error = differentiate(graph, loss, &|_| true).unwrap_err();
    assert_eq!(error.to_string(), "half: cast has no backward rule");
}

fn parameter<const N: usize>(graph: &mut Graph, name: &str, shape: [usize; N]) -> ValueId {
    let state = graph.add_state(name, Type::new(F32, shape), Role::Parameter(Init::Zeros));
    graph.read(state)
}

fn state<const N: usize>(graph: &mut Graph, name: &str, shape: [usize; N]) -> (StateId, ValueId) {
    let state = graph.add_state(name, Type::new(F32, shape), Role::Gradient);
    (state, graph.read(state))
}

// ---- peephole --------------------------------------------------------------------------------------------------

/// dy, x → dw, added to a state; `dw` is an output too if `also_output`.
fn accumulated(also_output: bool) -> Graph {
    let mut graph = Graph::default();
    let (dy, x) = (parameter(&mut graph, "dy", [5, 3]), parameter(&mut graph, "x", [5, 4]));
    let (sum, so_far) = state(&mut graph, "sum", [3, 4]);
    let at = At::new("fc", Phase::Backward);
    let op = Op::LinearGradW { shape: Shape::from([3, 4]), accumulate: false };
    let dw = graph.push(op, &[dy, x], &at).unwrap()[0];
    let total = graph.push(Op::Accumulate, &[so_far, dw], &at).unwrap()[0];
    graph.assign(sum, total, Phase::Backward).unwrap();
    graph.outputs.extend(also_output.then_some(dw));
    graph
}

#[test]
fn adding_to_the_gradient_so_far_folds_into_the_product() {
    let graph = peephole(accumulated(false));
    assert_eq!(ops(&graph), ["linear_grad_w", "assign"]);
    let product = node(&graph, &Op::LinearGradW { shape: Shape::from([3, 4]), accumulate: true });
    assert_eq!(names(&graph, &product.inputs), ["dy", "x", "sum"]);
    assert_eq!(planned(&graph).steps.len(), 1);
}

#[test]
fn a_gradient_someone_else_wants_is_not_folded() {
    let graph = peephole(accumulated(true));
    assert_eq!(ops(&graph), ["linear_grad_w", "accumulate", "assign"]);
}

#[test]
fn the_bias_gradient_folds_into_the_gelu() {
    let mut graph = Graph::default();
    let (pre, dy) = (parameter(&mut graph, "pre", [5, 3]), parameter(&mut graph, "dy", [5, 3]));
    let at = At::new("fc", Phase::Backward);
    let dpre = graph.push(Op::GeluGrad { bias: false }, &[pre, dy], &at).unwrap()[0];
    let db = graph.push(Op::ColumnSum { accumulate: false }, &[dpre], &at).unwrap()[0];
    graph.outputs = vec![dpre, db];
    let graph = peephole(graph);
    assert_eq!(ops(&graph), ["gelu_grad"]);
    assert_eq!(node(&graph, &Op::GeluGrad { bias: true }).outputs, [dpre, db]);
}

#[test]
fn the_bias_gradient_folds_into_norms_and_attention() {
    let mut graph = Graph::default();
    let at = At::new("block", Phase::Backward);
    let [x, dy] = ["x", "dy"].map(|name| parameter(&mut graph, name, [2, 3, 4]));
    let [mean, rstd] = ["mean", "rstd"].map(|name| parameter(&mut graph, name, [2, 3]));
    let gamma = parameter(&mut graph, "gamma", [4]);
    let norm = |sum| Op::LayerNormGrad { add: false, sum, half: None };
    let made = graph.push(norm(false), &[x, mean, rstd, gamma, dy], &at).unwrap();
    let sum = |graph: &mut Graph, of| graph.push(Op::ColumnSum { accumulate: false }, &[of], &at).unwrap()[0];
    // Of what else it makes nobody asks for sums; a second sum of the same is made for itself.
    let (first, second) = (sum(&mut graph, made[0]), sum(&mut graph, made[0]));
    let qkv = parameter(&mut graph, "qkv", [2, 3, 12]);
    let lse = parameter(&mut graph, "lse", [2, 2, 3]);
    let attention = |sum| Op::AttentionGrad { heads: 2, drop: None, sum };
    let dqkv = graph.push(attention(false), &[qkv, x, lse, made[0]], &at).unwrap()[0];
    let third = sum(&mut graph, dqkv);
    graph.outputs = vec![made[1], made[2], first, second, third];
    let graph = peephole(graph);
    graph.check().unwrap();
    assert_eq!(ops(&graph), ["layer_norm_grad", "column_sum", "attention_grad"]);
    assert_eq!(node(&graph, &norm(true)).outputs, [&made[..], &[first]].concat());
    assert_eq!(node(&graph, &attention(true)).outputs, [dqkv, third]);
    planned(&graph).check().unwrap();
}

#[test]
fn a_gradient_that_passes_a_norm_by_is_added_by_the_norm() {
    let build = |late: bool| {
        let mut graph = Graph::default();
        let at = At::new("block", Phase::Backward);
        let [x, dy] = ["x", "dy"].map(|name| parameter(&mut graph, name, [2, 3, 4]));
        let [mean, rstd] = ["mean", "rstd"].map(|name| parameter(&mut graph, name, [2, 3]));
        let gamma = parameter(&mut graph, "gamma", [4]);
        let norm = Op::LayerNormGrad { add: false, sum: false, half: None };
        let other = |graph: &mut Graph| graph.push(Op::Gelu, &[x], &at).unwrap()[0];
        let before = (!late).then(|| other(&mut graph));
        let dx = graph.push(norm, &[x, mean, rstd, gamma, dy], &at).unwrap()[0];
        let other = before.unwrap_or_else(|| other(&mut graph));
        let sum = graph.push(Op::Add, &[other, dx], &at).unwrap()[0];
        graph.outputs = vec![sum];
        (peephole(graph), sum, other)
    };
    let (graph, sum, other) = build(false);
    graph.check().unwrap();
    assert_eq!(ops(&graph), ["gelu", "layer_norm_grad"]);
    let norm = node(&graph, &Op::LayerNormGrad { add: true, sum: false, half: None });
    assert_eq!((norm.outputs[0], norm.inputs[5]), (sum, other));
    planned(&graph).check().unwrap();
    // What is made only later can't be.
    assert_eq!(ops(&build(true).0), ["layer_norm_grad", "gelu", "add"]);
}
