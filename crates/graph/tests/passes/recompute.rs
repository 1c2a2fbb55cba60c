//! Recomputation of activations.

use super::transformer::forward;
use super::*;
use graph::Recompute;
use graph::passes::recompute;

fn recomputed(depth: usize) -> Graph {
    recomputed_by(depth, Recompute::Full)
}

fn recomputed_by(depth: usize, policy: Recompute) -> Graph {
    let graph = fuse(narrow(forward(depth, true).unwrap()).unwrap());
    let loss = graph.find("loss").unwrap();
    let (mut graph, gradients) = differentiate(graph, loss, &|_| true).unwrap();
    graph.outputs.extend(gradients.iter().map(|(_, value)| *value));
    recompute(graph, policy).unwrap()
}

#[test]
fn what_a_gelu_makes_is_made_again_of_what_it_was_made_of() {
    let graph = recomputed_by(3, Recompute::Gelu);
    graph.check().unwrap();
    let makers = graph.producers();
    let again: Vec<&Node> = graph.nodes.iter().filter(|n| n.phase == Phase::Recompute).collect();
    assert_eq!(again.len(), 3);
    for node in again {
        let product = &graph.nodes[makers[node.inputs[0].index()].unwrap()];
        assert!(node.op == Op::Gelu && matches!(product.op, Op::Linear { gelu: true, .. }));
        assert_eq!(product.outputs[1], node.inputs[0]);
        // Nobody keeps the first.
        let read = |n: &&Node| n.phase == Phase::Backward && n.inputs.contains(&product.outputs[0]);
        assert_eq!(graph.nodes.iter().filter(read).count(), 0);
    }
}

#[test]
fn backward_uses_no_activation_of_a_block_but_its_borders() {
    let graph = recomputed(3);
    graph.check().unwrap();
    let makers = graph.producers();
    let mut borders = 0;
    for user in graph.nodes.iter().filter(|n| matches!(n.phase, Phase::Backward | Phase::Recompute)) {
        for input in &user.inputs {
            let maker = &graph.nodes[makers[input.index()].unwrap()];
            let activation =
                maker.phase == Phase::Forward && !matches!(maker.op, Op::Input | Op::Read { .. });
            // The last block, narrowed to its class token, is kept: its backward follows at once.
            if activation && maker.layer.starts_with("blocks.") && !maker.layer.starts_with("blocks.2.") {
                assert!(graph.borders.contains(input), "{} uses {}", user.layer, graph.name(*input));
                borders += 1;
            }
        }
    }
    assert!(borders > 0);
    let again =
        |block: &str| graph.nodes.iter().any(|n| n.phase == Phase::Recompute && n.layer.starts_with(block));
    assert_eq!(["blocks.0.", "blocks.1.", "blocks.2."].map(again), [true, true, false]);
}

#[test]
fn copies_of_random_ops_draw_what_the_originals_drew() {
    let graph = recomputed(3);
    let random = |phase: Phase| {
        let drawn = |n: &&Node| {
            n.phase == phase && matches!(n.op, Op::Drop { .. } | Op::Attention { drop: Some(_), .. })
        };
        graph.nodes.iter().filter(drawn).map(|n| format!("{:?}", n.op)).collect::<Vec<_>>()
    };
    let (forward, again) = (random(Phase::Forward), random(Phase::Recompute));
    assert!(!again.is_empty() && again.iter().all(|op| forward.contains(op)), "{forward:?}, {again:?}");
}

/// What ZeRO-3 relies on: a gather inside a block is an op like any other, and is repeated for backward.
#[test]
fn a_parameter_gathered_in_a_block_is_gathered_again() {
    let mut graph = among_two();
    let shard = parameter(&mut graph, "shard", [8]);
    let x = parameter(&mut graph, "x", [2, 4]);
    let at = At::new("block", Phase::Forward);
    let first = graph.push(Op::Gelu, &[x], &at).unwrap()[0];
    let flat =
        graph.push(Op::AllGather { group: Mesh::of_data(2).world(), views: None }, &[shard], &at).unwrap()[0];
    let shapes = vec![Shape::from([4, 4])];
    let weight = graph.push(Op::Unpack { shapes, to: None, over: false }, &[flat], &at).unwrap()[0];
    let y = graph.push(Op::Linear { bias: false, gelu: false }, &[first, weight], &at).unwrap()[0];
    let dx = graph
        .push(Op::LinearGradX { gelu: false }, &[y, weight], &At::new("block", Phase::Backward))
        .unwrap()[0];
    (graph.outputs, graph.borders) = (vec![dx], [first, y].into());
    let graph = recompute(graph, Recompute::Full).unwrap();
    let steps: Vec<_> = graph.nodes.iter().map(|n| (n.op.name(), n.phase)).collect();
    let again =
        [("all_gather", Phase::Recompute), ("unpack", Phase::Recompute), ("linear_grad_x", Phase::Backward)];
    assert_eq!(steps[steps.len() - 3..], again.map(|(name, phase)| (name.to_string(), phase)));
    // The weight is free between its two gathers.
    planned(&graph);
}
