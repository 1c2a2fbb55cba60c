//! Ranks that share one GPU compute what one rank does; and NCCL's calls, in a group of one, captured.
//!
//! What is run here on the CPU shows that the comparison itself is right. The rest needs a GPU, so it is ignored by default:
//! `scripts/gpu-test` runs it. For NCCL, `VITESSE_NCCL` names its library.

mod collectives;
#[path = "../../../cpu/tests/common/mod.rs"]
mod common;
mod processes;
mod rank;
mod zero;

use comm::{Communicator, ExitReport, Member, Start};
use common::{Tensors, adamw, compiled_with, distance, settings, small_vit, smoothed, with_drawn_head};
use graph::{DType, Header, Program, Settings};
use models::vit::Vit;
use rank::{OnCpu, OnGpu, Part, Rank};

/// Samples of a step, however they are divided.
const SAMPLES: usize = 16;
const STEPS: u64 = 20;

#[derive(Clone, Copy)]
struct Division {
    ranks: usize,
    micros: usize,
    wire: Option<DType>,
    overlap: bool,
}

const ALONE: Division = Division { ranks: 1, micros: 1, wire: None, overlap: true };

fn program(division: Division, target: &dyn graph::Target) -> Program {
    let Division { ranks, micros, wire, overlap } = division;
    let vit = Vit { width: 48, heads: 3, mlp: 96, ..small_vit(0.1) };
    let batch = SAMPLES / ranks / micros;
    let model = with_drawn_head(vit.build(batch, smoothed(), DType::F32).unwrap());
    let communication = graph::Communication { bucket: 4000, overlap, dtype: wire, each_micro_step: false };
    let mesh = graph::Mesh::of_data(ranks);
    compiled_with(
        model,
        &Settings { optimizer: adamw(), mesh, communication, accumulates: micros > 1, ..settings(target) },
    )
}

fn on_gpu(division: Division) -> Program {
    program(division, &cuda::Target::of(0, false))
}

fn on_cpu(division: Division) -> Program {
    program(division, &cpu::Target { threads: 1 })
}

pub fn members(ranks: usize) -> Vec<Member> {
    let options = comm::Options { comm: Some(comm::Backend::Threads), ranks: Some(ranks), timeout: None };
    let Ok(Start::Threads(members)) = comm::start(&options, |_| {}) else { panic!("threads") };
    members
}

/// Does `work` on every rank, each a thread.
pub fn on_each<R: Send>(
    ranks: usize,
    work: impl Fn(&Member) -> Result<R, String> + Sync,
) -> Vec<Result<R, ExitReport>> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |member: Member| scope.spawn(move || member.run(|member| work(member)));
        let threads: Vec<_> = members(ranks).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn header(step: u64) -> Header {
    let (seed, nominal, learning_rate) = (5, SAMPLES as f64, 2e-4);
    Header { seed, step, first_sample: 0, learning_rate, nominal }
}

/// The gradients of the first step, and the loss of every one.
fn trained(rank: &mut dyn Rank, number: usize, division: Division, steps: u64) -> (Tensors, Vec<f64>) {
    let Division { ranks, micros, .. } = division;
    let batch = SAMPLES / ranks / micros;
    let (mut gradients, mut losses) = (vec![], vec![]);
    for step in 0..steps {
        // Ten batches, over and over.
        let first = (step % 10) * SAMPLES as u64;
        for micro in 0..micros {
            let first_sample = first + (micro * ranks * batch + number * batch) as u64;
            let part = Program::micro_step(micro, micros);
            rank.run(part, &Header { first_sample, ..header(step) });
        }
        if step == 0 {
            gradients = rank.sums();
        }
        rank.run(Part::Update, &header(step));
        let stats = rank.tensors(&|state| state.name == "stats");
        losses.push(stats[0].1[0] / SAMPLES as f64);
    }
    (gradients, losses)
}

/// All ranks have the same bits; returns what the first has.
fn together<N: Rank>(
    division: Division,
    compile: impl Fn(Division) -> Program + Sync,
    rank: impl Fn(Program, Option<Communicator>) -> N + Sync,
) -> (Tensors, Vec<f64>) {
    let ends = on_each(division.ranks, |member| {
        let world = (division.ranks > 1).then(|| member.world.clone());
        let mut one = rank(compile(division), world);
        Ok(trained(&mut one, member.place.rank, division, STEPS))
    });
    let mut all: Vec<_> = ends.into_iter().map(Result::unwrap).collect();
    assert!(all.iter().all(|rank| *rank == all[0]), "every rank has the same bits");
    all.swap_remove(0)
}

fn apart(one: &[f64], other: &[f64]) -> f64 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f64::max)
}

fn compare<N: Rank>(
    compile: impl Fn(Division) -> Program + Sync,
    rank: impl Fn(Program, Option<Communicator>) -> N + Sync,
) {
    let (gradients, losses) = together(ALONE, &compile, &rank);
    assert!(losses[STEPS as usize - 1] < losses[0] - 0.05, "it learns: {losses:?}");
    for (ranks, micros, wire, overlap) in [
        (1, 2, None, true),
        (2, 1, None, true),
        (2, 2, None, true),
        (2, 2, None, false),
        (2, 1, Some(DType::Bf16), true),
        (2, 2, Some(DType::Bf16), true),
        (4, 2, None, true),
    ] {
        let division = Division { ranks, micros, wire, overlap };
        let (theirs, their_losses) = together(division, &compile, &rank);
        let (error, tensor) = distance(&theirs, &gradients);
        let worst = apart(&their_losses, &losses);
        let case = format!("{ranks} ranks, {micros} micro-steps, wire {wire:?}, overlap {overlap}");
        println!("{case}: gradients {error:.1e} ({tensor}), losses {worst:.1e} apart");
        let (of_gradients, of_losses) = if wire.is_some() { (6e-3, 5e-3) } else { (1e-5, 1e-5) };
        assert!(error < of_gradients, "{case}: {tensor} is off by {error:.1e}");
        assert!(worst < of_losses, "{case}: losses are {worst:.1e} apart");
        assert!(wire.is_none() || theirs != gradients, "{case}: the wire was used");
    }
}

#[test]
fn ranks_on_the_cpu_compute_what_one_does() {
    compare(on_cpu, OnCpu::new);
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_that_share_a_gpu_compute_what_one_does() {
    compare(on_gpu, OnGpu::new);
}

/// Buckets and overlap are only about when things travel; and looking at every value changes none.
#[test]
#[ignore = "needs a GPU"]
fn however_it_is_run_the_bits_are_the_same() {
    let two = Division { ranks: 2, ..ALONE };
    let sums = |how: &(dyn Fn(&mut OnGpu, &Header) + Sync)| {
        let ends = on_each(2, |member| {
            let mut rank = OnGpu::new(on_gpu(two), Some(member.world.clone()));
            let first_sample = (member.place.rank * SAMPLES / 2) as u64;
            rank.fill(cuda::Which::Last, first_sample);
            how(&mut rank, &Header { first_sample, ..header(0) });
            Ok(rank.sums())
        });
        ends.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let last = cuda::Which::Last;
    let plain = sums(&|rank, header| rank.executor.run(last, header).unwrap());
    assert!(plain[0] == plain[1]);
    let eager = sums(&|rank, header| rank.executor.run_eagerly(last, header).unwrap());
    assert!(eager == plain, "action by action");
    let checked = sums(&|rank, header| {
        assert_eq!(rank.executor.run_checked(last, header).unwrap(), None);
    });
    assert!(checked == plain, "checked");
    let twice = sums(&|rank, header| {
        rank.executor.run(last, header).unwrap();
        rank.fill(last, header.first_sample);
        rank.executor.run(last, header).unwrap();
    });
    assert!(twice == plain, "a second time, from the graphs of the first");
}

#[test]
#[ignore = "needs a GPU"]
fn the_time_of_every_collective_is_known() {
    let two = Division { ranks: 2, ..ALONE };
    let ends = on_each(2, |member| {
        let mut rank = OnGpu::new(on_gpu(two), Some(member.world.clone()));
        let mut tickets = vec![];
        for step in 0..3 {
            rank.run(Part::Last, &header(step));
            rank.run(Part::Update, &header(step));
            tickets.push(rank.executor.begin_readback().unwrap());
        }
        for ticket in tickets {
            let numbers = rank.executor.readback(ticket).unwrap();
            assert_eq!(numbers.stats[1], SAMPLES as f32);
            let (times, calls) = (rank.executor.collective_times(), rank.executor.collectives());
            println!("rank {}: {times:?}", member.place.rank);
            assert_eq!(times.calls.len(), calls.len());
            assert!(calls.len() > 3 && calls.iter().all(|call| call.bytes > 0 && call.ranks == 2));
            // Gradients are reduced in `last`, which one micro-step runs, and norms in `update`.
            assert!(times.calls.iter().all(|call| call.calls == 1));
            assert!(times.calls.iter().all(|call| call.seconds > 0.0 && call.exposed <= call.seconds));
            let total: f64 = times.calls.iter().map(|call| call.seconds).sum();
            assert!(times.exposed > 0.0 && times.exposed < 10.0 && times.hidden <= total);
        }
        Ok(())
    });
    ends.into_iter().for_each(Result::unwrap);
}

/// A rank that ends takes the others with it, with its own words.
#[test]
#[ignore = "needs a GPU"]
fn a_lost_rank_frees_the_others() {
    let two = Division { ranks: 2, ..ALONE };
    let began = std::time::Instant::now();
    let ends = on_each(2, |member| {
        let mut rank = OnGpu::new(on_gpu(two), Some(member.world.clone()));
        for step in 0..5 {
            if step == 2 && member.place.rank == 1 {
                return Err("had enough".to_string());
            }
            rank.fill(cuda::Which::Last, 0);
            rank.executor.run(cuda::Which::Last, &header(step)).map_err(|error| error.to_string())?;
            rank.executor.run(cuda::Which::Update, &header(step)).map_err(|error| error.to_string())?;
        }
        Ok(())
    });
    let lines: Vec<String> = ends.into_iter().filter_map(|end| end.unwrap_err().line).collect();
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("had enough"), "{lines:?}");
    assert!(began.elapsed().as_secs() < 60, "nobody waits for the one that is gone");
}
