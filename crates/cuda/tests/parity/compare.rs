//! Comparison of gradients on the GPU with those of the CPU in double precision.

use crate::common::arithmetic::TOLERANCES;
use crate::common::{self, Tensors, distance};
use crate::rig::{self, Arithmetic, Gpu};
use crate::{Body, reference};
use cuda::CudaError;
use cuda::action::Kernel;
use cuda::compile::{Arch, compile_all};
use graph::{DType, Graph, Key, Model, Program, Recompute};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Outcome of comparisons.
#[derive(Default)]
struct Found {
    wrong: Vec<String>,
    /// Largest difference of each arithmetic.
    worst: [(f64, String); TOLERANCES.len()],
    compared: usize,
}

impl Found {
    fn note(&mut self, i: usize, name: &str, result: Result<(f64, String), CudaError>, tolerance: f64) {
        match result {
            Err(error) => self.wrong.push(format!("{name}: {error}")),
            Ok((error, tensor)) => {
                self.compared += 1;
                if error > self.worst[i].0 {
                    self.worst[i] = (error, format!("{tensor} of {name}"));
                }
                if error.is_nan() || error >= tolerance {
                    self.wrong.push(format!("{name}: {tensor} is off by {error:.1e}"));
                }
            }
        }
    }
}

pub fn gpu_program(graph: Graph, arithmetic: Arithmetic) -> Program {
    let model = Model { train: graph.clone(), eval: graph, key: Key::default() };
    rig::program(model, arithmetic, common::adamw(), Recompute::None)
}

/// Fills the cache of kernels, on all threads: almost all of the time goes into compiling them.
fn compile_ahead(cases: &[(String, Body)], arithmetics: &[Arithmetic]) {
    let facts = cuda::device(0).unwrap();
    let arch = Arch::of(facts.capability).unwrap();
    let programs: Vec<BTreeSet<Kernel>> = cases
        .iter()
        .flat_map(|(_, build)| arithmetics.iter().map(|a| (*a, build(DType::F32))))
        .filter_map(|(arithmetic, graph)| {
            cuda::kernels_of(&gpu_program(graph, arithmetic), &facts, arithmetic == Arithmetic::Tf32).ok()
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(kernels) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let _ = compile_all(kernels, &arch);
        }
    };
    std::thread::scope(|scope| (0..12).for_each(|_| drop(scope.spawn(work))));
}

/// Compares all cases, and reports every failure.
pub fn compare_all(cases: impl Iterator<Item = (String, Body)>, only: impl Fn(Arithmetic) -> bool + Sync) {
    compare_within(1.0, cases, only);
}

/// Compares with the tolerances of half precision times `factor`.
pub fn compare_within(
    factor: f64,
    cases: impl Iterator<Item = (String, Body)>,
    only: impl Fn(Arithmetic) -> bool + Sync,
) {
    let cases: Vec<(String, Body)> = cases.collect();
    let is_whole = |a: Arithmetic| matches!(a, Arithmetic::Fp32 | Arithmetic::Tf32);
    let tolerance = |(a, most): (Arithmetic, f64)| (a, if is_whole(a) { most } else { factor * most });
    let wanted = || TOLERANCES.map(tolerance).into_iter().enumerate().filter(|(_, t)| only(t.0));
    compile_ahead(&cases, &wanted().map(|(_, t)| t.0).collect::<Vec<_>>());
    let mut found = Found::default();
    for (name, build) in &cases {
        let want = reference(&build(DType::F64));
        for (i, (arithmetic, tolerance)) in wanted() {
            let got = Gpu::of_graph(&build(DType::F32), arithmetic).and_then(|mut gpu| gpu.gradients());
            let result = got.map(|got| distance_or_nan(&got, &want));
            found.note(i, &format!("{name} in {arithmetic:?}"), result, tolerance);
        }
    }
    let Found { wrong, worst, compared } = found;
    for ((arithmetic, tolerance), (error, what)) in TOLERANCES.map(tolerance).iter().zip(&worst) {
        println!("{arithmetic:?}: {error:.1e} at worst of {tolerance:.0e} ({what})");
    }
    println!("{compared} comparisons");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

pub fn distance_or_nan(got: &Tensors, want: &Tensors) -> (f64, String) {
    match got.iter().find(|(_, values)| values.iter().any(|x| !x.is_finite())) {
        Some((name, _)) => (f64::NAN, name.clone()),
        None => distance(got, want),
    }
}
