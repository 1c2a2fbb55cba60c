//! Gradients against finite differences, element by element.

use super::{Draft, Rig, compiled, norm};
use graph::random::Sequence;
use graph::{DType, Graph, Recompute, ValueId};
use std::collections::BTreeSet;

/// Of a gradient, relative to its norm.
pub const TOLERANCE: f64 = 1e-6;
/// Rounding makes an error of about 1e-16/H, the next term of the series one of H⁴.
pub const H: f64 = 1e-3;
/// Elements of a parameter that are differentiated one by one.
pub const ELEMENTS: usize = 200;

pub fn rig(graph: &Graph) -> Rig<f64> {
    Rig::new(compiled(graph, Recompute::None, 1), 1)
}

/// All elements of a tensor, or a drawn selection.
fn selection(len: usize, most: usize, seed: u64) -> Vec<usize> {
    if len <= most {
        return (0..len).collect();
    }
    let mut random = Sequence::new(seed, 2);
    let drawn: BTreeSet<usize> = (0..most).map(|_| (random.uniform() * len as f64) as usize).collect();
    drawn.into_iter().collect()
}

/// Moves each element of each parameter and compares the loss's slope with the gradient.
pub fn check_elements(name: &str, rig: &mut Rig<f64>, most: usize) {
    let mut worst: (f64, String) = (0.0, String::new());
    for (state, id, gradient) in rig.parameter_gradients() {
        let count = state.ty.shape.count();
        let chosen = selection(count, most, u64::from(id.0));
        let slopes: Vec<f64> = chosen
            .iter()
            .map(|i| {
                let mut along = vec![0.0; count];
                along[*i] = 1.0;
                rig.slope(&[(id, along)], H)
            })
            .collect();
        let Some(gradient) = gradient else {
            assert!(norm(&slopes) < 1e-9, "{name}: {} has a slope but no gradient", state.name);
            continue;
        };
        let analytic: Vec<f64> = chosen.iter().map(|i| gradient[*i]).collect();
        let difference: Vec<f64> = analytic.iter().zip(&slopes).map(|(a, b)| a - b).collect();
        let error = norm(&difference) / norm(&analytic);
        assert!(error < TOLERANCE, "{name}: the gradient of {} is off by {error:.1e}", state.name);
        if error > worst.0 {
            worst = (error, state.name);
        }
    }
    assert!(worst.0 > 0.0, "{name}: nothing was compared");
    println!("{name}: {:.1e} at worst ({})", worst.0, worst.1);
}

/// A graph of batch 2 that `build` makes the body of, checked element by element.
pub fn check(name: &str, build: impl FnOnce(&mut Draft) -> ValueId) -> Rig<f64> {
    let mut draft = Draft::new(DType::F64, 2);
    let x = build(&mut draft);
    let mut rig = rig(&draft.finish(x));
    check_elements(name, &mut rig, ELEMENTS);
    rig
}
