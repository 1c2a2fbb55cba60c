//! `vitesse bench`.

mod inference;

use crate::args::BenchArgs;
use crate::table;
use anyhow::Context;
use config::settings::{self, BENCH, Setting};
use config::{Device, Raw, Resolved};
use devices::device::Seat;
use graph::Ceilings;
use graph::run::{KernelTime, Kernels, MatmulTuning, MemoryUse, StepTime};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::time::Instant;
use text::many;
use train::TrainError;
use train::bench::{StepBench, Turn};

pub fn run(args: BenchArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut raw = args.settings.0.clone();
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    raw.threads = raw.threads.or((args.ranks > 1).then_some((all / args.ranks.max(1)).max(1)));
    let mut run = raw.resolve_without_data(args.ranks)?;
    run.settle_shard_group(&(0..args.ranks).map(|rank| (rank, args.ranks)).collect::<Vec<_>>())?;
    let run = run;
    if args.kernels && run.accumulate > 1 {
        anyhow::bail!("--kernels lists those of one micro-step: leave out --accumulate {}", run.accumulate);
    }
    if args.inference {
        if args.ranks > 1 {
            anyhow::bail!("--ranks {}: inference is timed on one rank", args.ranks);
        }
        only_inference(&args.settings.0)?;
        return inference::run(&args, &run);
    }
    let options =
        comm::Options { comm: Some(comm::Backend::Threads), ranks: Some(args.ranks), timeout: None };
    let comm::Start::Threads(members) = comm::start(&options, |line| eprintln!("vitesse: {line}"))? else {
        anyhow::bail!("bench measures the ranks of one process; start it without a launcher")
    };
    let (first, others) = members.split_first().context("a benchmark has a rank")?;
    std::thread::scope(|scope| {
        // Ranks on GPUs open them together.
        let run = &run;
        let start = |member| scope.spawn(move || open(run, member).and_then(follow));
        let others: Vec<_> = others.iter().map(start).collect();
        let mut first = open(run, first)?;
        let measured = if args.on_request {
            serve(&mut first, run.device == Device::Cpu)
        } else {
            measure(&mut first, run, &args, began)
        };
        first.told(Turn::End)?;
        for other in others {
            other.join().map_err(|_| anyhow::anyhow!("a rank panicked"))??;
        }
        measured
    })
}

/// Refuses settings that only training steps have.
fn only_inference(raw: &Raw) -> anyhow::Result<()> {
    let training = |setting: &&Setting| {
        let rates = ["dropout", "attention-dropout", "drop-path", "label-smoothing", "recompute"];
        let gradients = ["bucket-size", "no-overlap", "reduce-every-micro-step", "comm-dtype"];
        let ranks = ["accumulate", "zero", "shard-group"].into_iter().chain(gradients).collect::<Vec<_>>();
        let name = setting.name;
        rates.contains(&name) || ranks.contains(&name) || setting.heading(BENCH) == "Optimizer"
    };
    for setting in settings::all().iter().filter(training) {
        if let Some(value) = setting.texts(raw).first() {
            let typed = format!("--{} {value}", setting.name);
            anyhow::bail!("{}: is for training steps, not for --inference", typed.trim_end());
        }
    }
    Ok(())
}

/// A rank's device; if it can't be opened, the others are not left waiting.
fn open(run: &Resolved, member: &comm::Member) -> Result<StepBench, TrainError> {
    StepBench::new(run, Seat::of(member)).inspect_err(|error| member.world.engine().abort(&error.to_string()))
}

/// Another rank than the first.
fn follow(mut bench: StepBench) -> Result<(), TrainError> {
    loop {
        let turn = bench.told(Turn::End)?;
        bench.take(turn)?;
        if turn == Turn::End {
            return Ok(());
        }
    }
}

/// A turn of all ranks, as the first one has it.
fn take(bench: &mut StepBench, turn: Turn) -> Result<f64, TrainError> {
    bench.told(turn)?;
    bench.take(turn)
}

fn measure(bench: &mut StepBench, run: &Resolved, args: &BenchArgs, began: Instant) -> anyhow::Result<()> {
    let on_cpu = run.device == Device::Cpu;
    let mut ceilings = if on_cpu { Some(cpu::ceilings::measure(run.threads)?) } else { None };
    let (mut steps, mut products) = (vec![], vec![]);
    // Before those that count: enough for memory to be touched, and for every step that may be in flight.
    bench.told(Turn::Step)?;
    let step_began = Instant::now();
    bench.take_alone(Turn::Step)?;
    let startup = Startup::of(bench, began, step_began);
    let warm_up = bench.device().depth().max(2);
    let mut start = Instant::now();
    for round in 0.. {
        if round == warm_up {
            bench.reset_times();
            (steps, products) = (vec![], vec![]);
            start = Instant::now();
        }
        let enough = round >= warm_up + args.steps.unwrap_or(STEPS).max(1)
            && start.elapsed().as_secs_f64() >= args.seconds;
        if enough {
            break;
        }
        steps.push(take(bench, Turn::Step)?);
        if on_cpu {
            products.push(take(bench, Turn::Matmuls)?);
        }
    }
    bench.take(Turn::End)?;
    if !on_cpu {
        ceilings = bench.ceilings()?;
    }
    let kernels = if args.kernels { bench.profile(PROFILED)? } else { vec![] };
    let memory = bench.device().memory();
    let measured = Measured { steps, products, times: bench.times(), ceilings, startup, memory, kernels };
    let flops = bench.flops();
    if args.json {
        println!("{}", measured.json(run, flops));
    } else {
        measured.print(run, flops);
    }
    Ok(())
}

struct Measured {
    /// Seconds of each.
    steps: Vec<f64>,
    /// Of those of a step, alone, on the CPU.
    products: Vec<f64>,
    times: Vec<StepTime>,
    ceilings: Option<Ceilings>,
    startup: Startup,
    /// On a GPU.
    memory: Option<MemoryUse>,
    kernels: Vec<KernelTime>,
}

/// From the start of the program to the end of its first step.
struct Startup {
    seconds: f64,
    /// What was done one after the other; the parts sum to the whole.
    phases: Vec<(&'static str, f64)>,
    /// On a GPU: kernels, which are compiled beside all that, and products.
    gpu: Option<(Kernels, MatmulTuning)>,
}

impl Startup {
    /// The first step has just ended.
    fn of(bench: &StepBench, began: Instant, step_began: Instant) -> Self {
        let (seconds, step) = (began.elapsed().as_secs_f64(), step_began.elapsed().as_secs_f64());
        let mut phases = bench.startup();
        // Capturing is part of the first step.
        let captured: f64 = phases.iter().filter(|(name, _)| *name == "capturing").map(|(_, s)| s).sum();
        phases.push(("first step", (step - captured).max(0.0)));
        let told: f64 = phases.iter().map(|(_, seconds)| seconds).sum();
        phases.push(("else", (seconds - told).max(0.0)));
        let gpu = bench.device().startup().map(|startup| (startup.kernels, startup.matmuls));
        Startup { seconds, phases, gpu }
    }

    fn json(&self) -> Value {
        let phases: serde_json::Map<_, _> =
            self.phases.iter().map(|(name, seconds)| (name.to_string(), json!(seconds))).collect();
        let mut startup = json!({"seconds": self.seconds, "phases": phases});
        if let Some((kernels, products)) = &self.gpu {
            startup["kernels"] = json!(kernels);
            startup["products"] = json!(products);
        }
        startup
    }

    fn print(&self) {
        println!("the first step was done {:.2} s after the start:", self.seconds);
        let shown = self.phases.iter().filter(|(_, seconds)| *seconds >= 0.005);
        let parts: Vec<String> = shown.map(|(name, seconds)| format!("{name} {seconds:.2}")).collect();
        println!("  {}", parts.join(" · "));
        let Some((kernels, products)) = &self.gpu else { return };
        println!(
            "  beside that, kernels in {:.2} s: {} units compiled, {} found on disk; {} matmuls, {} of them measured in {} ways",
            kernels.seconds,
            kernels.compiled,
            kernels.found,
            products.matmuls,
            products.measured,
            products.tried
        );
    }
}

/// Timed steps, unless told otherwise.
const STEPS: usize = 10;

/// How often each kernel is timed by itself.
const PROFILED: usize = 5;

impl Measured {
    fn images_per_second(&self, run: &Resolved) -> f64 {
        run.global_batch() as f64 / median(&self.steps)
    }

    fn json(&self, run: &Resolved, flops: f64) -> Value {
        let mut report = json!({
            "model": run.model, "image_size": run.network.image(), "batch_size": run.batch, "accumulate": run.accumulate, "threads": run.threads,
            "device": run.device, "precision": run.precision,
            "ranks": run.world, "step_seconds": self.steps, "flops": flops,
            "images_per_second": self.images_per_second(run), "first_step_seconds": self.startup.seconds,
            "startup": self.startup.json(),
            "steady_images_per_second":
                (run.global_batch() * self.steps.len()) as f64 / self.steps.iter().sum::<f64>(),
            "kinds": self.times.iter().map(kind_json).collect::<Vec<_>>(),
        });
        if !self.products.is_empty() {
            report["product_seconds"] = json!(self.products);
            report["products_share"] = json!(median(&self.products) / median(&self.steps));
        }
        if let Some(ceilings) = self.ceilings {
            report["ceiling_flops"] = json!(ceilings.flops);
            report["ceiling_bytes"] = json!(ceilings.bytes);
        }
        if let Some(memory) = self.memory {
            report["memory_bytes"] = json!(memory);
            report["memory_bytes"]["constant"] = json!(memory.constant());
        }
        if !self.kernels.is_empty() {
            report["kernels"] = self.kernels.iter().map(action_json).collect();
        }
        report
    }

    fn print(&self, run: &Resolved, flops: f64) {
        let step = median(&self.steps);
        let ranks = if run.world == 1 { String::new() } else { format!(" × {}", many(run.world, "rank")) };
        let micros = match run.accumulate {
            1 => String::new(),
            micros => format!(" × {}", many(micros, "micro-step")),
        };
        println!(
            "{} · batch {}{ranks}{micros} · {}: {:.1} ms per step, {:.1} images/s, {:.0} GFLOP/s",
            run.model,
            run.batch,
            table::device(run),
            1e3 * step,
            self.images_per_second(run),
            flops * run.world as f64 / step / 1e9
        );
        if !self.products.is_empty() {
            let product = median(&self.products);
            println!(
                "matmuls alone take {:.1} ms: the step runs at {:.1}% of their rate",
                1e3 * product,
                100.0 * product / step
            );
        }
        if let (Some(ceilings), Device::Cuda) = (self.ceilings, run.device) {
            println!(
                "ceilings of this GPU: {:.0} TFLOP/s for large matmuls, {:.0} GB/s copying memory; the step runs at {:.1}% of the first",
                ceilings.flops / 1e12,
                ceilings.bytes / 1e9,
                100.0 * flops / step / ceilings.flops
            );
        } else if let Some(ceilings) = self.ceilings {
            println!(
                "ceilings of this machine: {:.0} GFLOP/s for matmuls in cache, {:.1} GB/s copying memory",
                ceilings.flops / 1e9,
                ceilings.bytes / 1e9
            );
        }
        self.startup.print();
        if let Some(memory) = self.memory {
            let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            println!(
                "GPU memory: {:.2} GiB of activations, {:.2} of parameters and what belongs to them; beside, {:.1} MiB for batches, {:.1} \
                 for matmuls to work in, {:.1} of tables",
                gib(memory.arena),
                gib(memory.states),
                mib(memory.staging),
                mib(memory.workspace),
                mib(memory.tables)
            );
        }
        if !self.kernels.is_empty() {
            table::print_kernels(&self.kernels, self.ceilings);
            return;
        }
        if self.times.is_empty() {
            return;
        }
        let wall: f64 = self.steps.iter().sum();
        table::print_account(&table::account(&self.times, wall, 0.0), wall, self.ceilings);
    }
}

fn action_json(time: &KernelTime) -> Value {
    json!({"op": time.op, "layer": time.layer, "phase": time.phase.name(), "what": time.what, "seconds": time.seconds,
        "flops": time.flops, "bytes": time.bytes})
}

fn kind_json(time: &StepTime) -> Value {
    json!({"op": time.op, "phase": time.phase.name(), "seconds": time.seconds, "flops": time.flops, "bytes": time.bytes})
}

/// `step`, `untimed` (a step without the account of its time) and `matmuls` each run once and answer with seconds.
fn serve(bench: &mut StepBench, on_cpu: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let turn = match line?.trim() {
            "step" => Turn::Step,
            "untimed" => Turn::Untimed,
            "matmuls" | "products" if on_cpu => Turn::Matmuls,
            "matmuls" | "products" => anyhow::bail!("matmuls are measured alone on the CPU only"),
            other => anyhow::bail!("'{other}' is neither step, untimed nor matmuls"),
        };
        bench.told(turn)?;
        let seconds = bench.take_alone(turn)?;
        writeln!(out, "{seconds}")?;
        out.flush()?;
    }
    Ok(())
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
