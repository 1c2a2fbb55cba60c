//! Preparation of lists: kernels compiled and loaded, algorithms of matmuls chosen.
//!
//! A list is prepared when it is wanted, so that a run doesn't wait at its start for what it needs later or never.

use super::list::{List, MatmulRun, Preparer, ReadyWork, Streams};
use super::plans::{Base, Plans, REFRESH, kernels};
use crate::action::{Action, Address, Attention, Convolution, Matmul};
use crate::attention;
use crate::bind::Bound;
use crate::compile::{Arch, Compiling};
use crate::convolution;
use crate::driver::{Block, prepare_lock};
use crate::error::CudaError;
use crate::matmul::WORKSPACE;
use crate::tuner::Bench;
use graph::run::Startup;
use graph::{Lane, Plan, Program};
use std::time::Instant;

/// Number of compiling threads: one core is left for measuring matmuls meanwhile.
pub(super) fn compilers() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get()).saturating_sub(1).max(1)
}

impl Base<'_> {
    /// Prepares lists that aren't yet. `compiling` has most of their kernels, or all.
    pub fn prepare(
        &mut self,
        program: &Program,
        plans: &mut Plans,
        numbers: &[usize],
        compiling: Option<Compiling>,
        startup: &mut Startup,
    ) -> Result<(), CudaError> {
        let wanted: Vec<usize> =
            numbers.iter().copied().filter(|number| plans.waiting[*number].is_some()).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        let began = Instant::now();
        let _alone = prepare_lock();
        let matmuls = matmuls(plans, &wanted);
        let convolutions = convolutions(plans, &wanted);
        let attentions = attentions(plans, &wanted);
        let tries = |of: &Attention| self.tuner.may_try_library(of);
        let most =
            attentions.iter().filter(|of| tries(of)).map(|of| attention::workspace(&of.attended)).max();
        let trial_memory = TrialMemory::new(self, plans, &matmuls, &convolutions, most.unwrap_or(0))?;
        let measures = attentions.iter().any(|attention| self.tuner.must_measure_attention(attention))
            || matmuls.iter().any(|matmul| self.tuner.must_measure(matmul, self.libraries))
            || convolutions.iter().any(|conv| self.tuner.must_measure_convolution(conv, self.libraries));
        if measures {
            fill_with_noise(trial_memory.scratch(plans), self.streams)?;
            let Plans { modules, arena, .. } = &mut *plans;
            let mut bench = Bench {
                libraries: self.libraries,
                modules,
                stream: self.streams.compute(),
                scratch: trial_memory.larger.as_ref().unwrap_or(arena),
                workspace: &trial_memory.workspace,
            };
            matmuls.iter().try_for_each(|matmul| self.tuner.try_library(matmul, &mut bench))?;
            let began = startup.lap("measuring cuBLASLt's matmuls", began);
            convolutions.iter().try_for_each(|conv| self.tuner.convolution(conv, &bench).map(drop))?;
            startup.lap("measuring cuDNN's convolutions", began);
        }
        let began = Instant::now();
        self.load(plans, &wanted, compiling, startup, began)?;
        let began = Instant::now();
        for number in &wanted {
            let Some(bound) = plans.waiting[*number].take() else { continue };
            plans.lists[*number] = Some(self.list(program, plans, *number, bound, &trial_memory)?);
        }
        self.streams.synchronise("measuring matmuls")?;
        drop(trial_memory);
        self.libraries.provide(workspace(plans))?;
        self.tuner.save();
        startup.lap("choosing matmuls", began);
        startup.matmuls = self.tuner.tally;
        Ok(())
    }

    /// Compiles and loads the kernels of lists.
    fn load(
        &self,
        plans: &mut Plans,
        wanted: &[usize],
        compiling: Option<Compiling>,
        startup: &mut Startup,
        mut began: Instant,
    ) -> Result<(), CudaError> {
        if let Some(compiling) = compiling {
            let compiled = compiling.finish()?;
            startup.kernels += compiled.kernels();
            began = startup.lap("waiting for kernels", began);
            plans.modules.add(&compiled.images)?;
        }
        let known = |matmul: &Matmul| self.tuner.known.kernels(matmul);
        let mut missing = kernels(wanted.iter().filter_map(|number| plans.waiting[*number].as_ref()), known);
        missing.retain(|kernel| !plans.modules.has(kernel));
        if !missing.is_empty() {
            let compiled =
                Compiling::start(&missing, &Arch::of(self.facts.capability)?, compilers())?.finish()?;
            startup.kernels += compiled.kernels();
            began = startup.lap("waiting for kernels", began);
            plans.modules.add(&compiled.images)?;
        }
        startup.lap("loading kernels", began);
        Ok(())
    }

    fn list(
        &mut self,
        program: &Program,
        plans: &mut Plans,
        number: usize,
        bound: Bound,
        trial_memory: &TrialMemory,
    ) -> Result<List, CudaError> {
        let none = Plan::default();
        let (plan, name) = match number {
            REFRESH => (&none, "copies in half precision".to_string()),
            _ => {
                let plan = program.plans()[number];
                (plan, plan.name.clone())
            }
        };
        let Plans { modules, arena, host, behind, .. } = plans;
        let mut preparer = Preparer {
            context: self.context,
            modules,
            libraries: self.libraries,
            tuner: self.tuner,
            streams: self.streams,
            scratch: trial_memory.larger.as_ref().unwrap_or(arena),
            workspace: &trial_memory.workspace,
            host: host.as_ref(),
            behind,
        };
        preparer.prepare(plan, &name, bound)
    }
}

/// Memory for trial runs of matmuls, freed afterwards.
struct TrialMemory {
    workspace: Block,
    /// Memory for results that are larger than the arena.
    larger: Option<Block>,
}

impl TrialMemory {
    fn new(
        base: &Base<'_>,
        plans: &Plans,
        matmuls: &[Matmul],
        convolutions: &[Convolution],
        attention: usize,
    ) -> Result<Self, CudaError> {
        let bytes = if convolutions.is_empty() { WORKSPACE } else { convolution::WORKSPACE }.max(attention);
        let workspace = Block::new(base.context, bytes, "measuring matmuls")?;
        let result = |p: &Matmul| p.result.rows * p.result.stride * p.result.dtype.bytes();
        let results = matmuls.iter().map(result).chain(convolutions.iter().map(|conv| conv.result().1));
        let most = results.max().unwrap_or(0);
        let larger = (most > plans.arena.bytes).then(|| Block::new(base.context, most, "measuring matmuls"));
        Ok(TrialMemory { workspace, larger: larger.transpose()? })
    }

    fn scratch<'a>(&'a self, plans: &'a Plans) -> &'a Block {
        self.larger.as_ref().unwrap_or(&plans.arena)
    }
}

/// The actions of lists that are not prepared yet.
fn actions<'a>(plans: &'a Plans, numbers: &'a [usize]) -> impl Iterator<Item = &'a Action> {
    let lists = numbers.iter().filter_map(|number| plans.waiting[*number].as_ref());
    lists.flat_map(|bound| bound.actions.iter().map(|placed| &placed.action))
}

fn matmuls(plans: &Plans, numbers: &[usize]) -> Vec<Matmul> {
    let matmul = |action: &Action| match action {
        Action::Matmul(matmul) => Some(*matmul),
        _ => None,
    };
    actions(plans, numbers).filter_map(matmul).collect()
}

fn convolutions(plans: &Plans, numbers: &[usize]) -> Vec<Convolution> {
    let convolution = |action: &Action| match action {
        Action::Convolution(conv) => Some(*conv),
        _ => None,
    };
    actions(plans, numbers).filter_map(convolution).collect()
}

fn attentions(plans: &Plans, numbers: &[usize]) -> Vec<Attention> {
    let attention = |action: &Action| match action {
        Action::Attention(attention) => Some((**attention).clone()),
        _ => None,
    };
    actions(plans, numbers).filter_map(attention).collect()
}

/// Bytes of workspace that the chosen algorithms need, in the compute lane and in others.
fn workspace(plans: &Plans) -> [usize; 2] {
    let mut most = [0; 2];
    for action in plans.lists.iter().flatten().flat_map(|list| &list.actions) {
        let bytes = match &action.work {
            ReadyWork::Matmul(_, MatmulRun::Library(algorithm)) => algorithm.workspace,
            ReadyWork::Convolution(_, algorithm) => algorithm.workspace,
            ReadyWork::Attention(Some((_, algorithm)), _) => algorithm.workspace,
            _ => 0,
        };
        let lane = &mut most[usize::from(action.lane != Lane::Compute)];
        *lane = bytes.max(*lane);
    }
    most
}

/// Numbers between -2 and 2 as bf16, and so as f32 and f16: matmuls of zeros are faster than others, and would mislead.
pub(super) fn fill_with_noise(block: &Block, streams: &Streams) -> Result<(), CudaError> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let word = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Sign, exponent 123 to 126 or 127, some of the fraction.
        let random = (state >> 40) as u16;
        (random & 0x80ff) | 0x3e00 | (random & 0x0100)
    };
    let bytes: Vec<u8> = (0..1 << 20).map(word).flat_map(u16::to_le_bytes).collect();
    let mut filled = bytes.len().min(block.bytes);
    streams.compute().send_now(&bytes[..filled], block.address)?;
    while filled < block.bytes {
        let more = filled.min(block.bytes - filled);
        streams.compute().copy(block.address, block.address + filled as Address, more)?;
        filled += more;
    }
    Ok(())
}
