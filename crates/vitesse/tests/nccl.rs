//! NCCL between processes that share one GPU, each with an `NCCL_HOSTID` of its own: they train what one rank trains, and every fault
//! ends them. `scripts/gpu-test` runs it, on a machine with a GPU and NCCL; `VITESSE_NCCL` may name its library.
//!
//! Every case prints a line with its time, for the record.

mod common;

use common::launched::{Ranks, tells};
use common::{Folder, VITESSE, largest_difference, text};
use formats::tensors::Reader;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

/// Images of a micro-step, over all ranks.
const TOTAL: usize = 24;
/// Dropout, stochastic depth and mixing on; a partial last batch in every epoch.
const VIT: &str = "--model vit-nano/8 --image-size 16 --train-samples 450 --test-samples 61 --dropout 0.1 --attention-dropout 0.1 \
                   --drop-path 0.1 --mixup 0.8 --cutmix 1.0";
/// Batch norm, synchronised over ranks.
const UPERNET: &str =
    "--model swinv2-nano/w4+upernet --image-size 32 --train-samples 240 --test-samples 12 --drop-path 0.1";
/// The gradient is the momentum after one step.
const GRADIENT: &str = "--steps 1 --optimizer sgd --momentum 0.9 --weight-decay 0 --clip 0";
const STEPS: &str = "--steps 30 --lr 1e-3";
const GPU: &str = "--device cuda --deterministic";
/// Flags of the runs whose losses are compared: how fast they learn, and whether algorithms are measured.
const SURE: &str = "--steps 30 --lr 1e-3 --device cuda --deterministic";
const MEASURED: &str = "--steps 30 --lr 1e-3 --device cuda";
const LIMIT: Duration = Duration::from_secs(240);

fn words(texts: &[&str]) -> Vec<String> {
    texts.iter().flat_map(|text| text.split_whitespace()).map(str::to_string).collect()
}

/// One rank, alone.
fn alone(name: &str, flags: &[&str]) -> Folder {
    let folder = Folder::new(&format!("nccl-{name}"));
    let batch = format!("--batch-size {TOTAL} --seed 5 --out run");
    let words = words(&[&["train"], flags, &[&batch[..]]].concat());
    folder.run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    folder
}

/// A rank's command: to NCCL, it is on a host of its own.
fn rank_command(rank: usize, words: &[String]) -> Command {
    let mut command = Command::new(VITESSE);
    command.args(words).env("NCCL_HOSTID", format!("host-{rank}")).env("NCCL_SOCKET_IFNAME", "lo");
    command
}

fn launch(folder: Folder, ranks: usize, words: &[String]) -> Ranks {
    Ranks::launch(folder, ranks, |rank| rank_command(rank, words))
}

/// Many ranks, to their good end.
fn over(ranks: usize, name: &str, flags: &[&str]) -> Folder {
    let batch = format!("--comm nccl --batch-size {} --seed 5 --out run", TOTAL / ranks);
    run_over(
        Folder::new(&format!("nccl-{name}-{ranks}")),
        ranks,
        &[&["train"], flags, &[&batch[..]]].concat(),
    )
}

fn run_over(folder: Folder, ranks: usize, flags: &[&str]) -> Folder {
    let mut group = launch(folder, ranks, &words(flags));
    let printed = group.finish_within(LIMIT);
    let line = format!("{ranks} ranks share 1 GPU, each with an NCCL_HOSTID of its own");
    assert!(printed.contains("over NCCL") && printed.contains(&line), "{printed}");
    group.folder
}

type Tensors = BTreeMap<String, Vec<f64>>;

/// Gradients of the first step, without key biases, whose gradient is rounding.
fn gradients(folder: &Folder) -> Tensors {
    let path = folder.0.join("run/checkpoints/step-00000001.safetensors");
    let mut found = Tensors::new();
    Reader::open(&path)
        .unwrap()
        .each(|name, _, values: Vec<f64>| {
            if let Some(name) = name.strip_suffix(".momentum") {
                found.insert(name.to_string(), values);
            }
        })
        .unwrap();
    for (name, values) in &mut found {
        // Of no gradient but rounding.
        if name.ends_with("attn.qkv.bias") {
            let width = values.len() / 3;
            values[width..2 * width].fill(0.0);
        }
    }
    assert!(found.len() > 20, "{:?}", found.keys());
    found
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

/// Removes gradients that are zero in exact arithmetic, as of a bias before a batch norm; key biases are zeroed in all already.
fn without_rounding(mut gradients: Tensors, exact: &Tensors) -> Tensors {
    let least = 1e-12 * norm(exact.values().flatten().copied());
    gradients.retain(|name, _| {
        let size = norm(exact[name].iter().copied());
        size == 0.0 || size > least
    });
    gradients
}

/// Norm of the difference of a tensor, relative to the tensor's, at the worst of all tensors; and of all taken as one.
fn apart(ours: &Tensors, theirs: &Tensors) -> (f64, String, f64) {
    assert!(ours.keys().eq(theirs.keys()));
    let (mut worst, mut name) = (0.0, String::new());
    let (mut off, mut whole) = (0.0, 0.0);
    for ((tensor, a), b) in ours.iter().zip(theirs.values()) {
        let (d, n) = (norm(a.iter().zip(b).map(|(a, b)| a - b)), norm(b.iter().copied()));
        assert!(n > 0.0 || d == 0.0, "{tensor} has a gradient, and should have none");
        if n > 0.0 && d / n > worst {
            (worst, name) = (d / n, tensor.clone());
        }
        off += d * d;
        whole += n * n;
    }
    (worst, name, (off / whole).sqrt())
}

fn gradients_of_ranks_are_those_of_one(name: &str, model: &str) {
    let one = gradients(&alone(&format!("gradient-{name}"), &[model, GRADIENT, GPU, "--precision fp32"]));
    let exact = alone(&format!("exact-{name}"), &[model, GRADIENT, "--device cpu --precision fp64"]);
    let all = gradients(&exact);
    let exact = without_rounding(all.clone(), &all);
    assert!(all.len() - exact.len() <= 1, "of {}, {} have a gradient", all.len(), exact.len());
    let one = without_rounding(one, &all);
    let (_, _, ours) = apart(&one, &exact);
    for ranks in [2, 3, 4] {
        let began = Instant::now();
        let folder = over(ranks, &format!("gradient-{name}"), &[model, GRADIENT, GPU, "--precision fp32"]);
        let many = without_rounding(gradients(&folder), &all);
        let (worst, tensor, _) = apart(&many, &one);
        let (_, _, theirs) = apart(&many, &exact);
        println!(
            "gradients of {name}, {ranks} ranks: {worst:.1e} of one rank's at most ({tensor}); of f64's {theirs:.1e}, one rank's are {ours:.1e}; {:.1} s",
            began.elapsed().as_secs_f64()
        );
        assert!(worst < 1e-5, "{tensor} is {worst:e} off");
        assert!(theirs <= 2.0 * ours, "{theirs:e} and {ours:e}");
    }
}

#[test]
#[ignore = "needs a GPU and NCCL"]
fn gradients_of_a_vit() {
    gradients_of_ranks_are_those_of_one("vit", VIT);
}

#[test]
#[ignore = "needs a GPU and NCCL"]
fn gradients_of_a_swin_with_upernet() {
    gradients_of_ranks_are_those_of_one("upernet", UPERNET);
}

/// Losses of 30 steps and of the evaluation, over ranks and on one.
fn losses_of_ranks_are_those_of_one(name: &str, flags: &[&str], cases: &[(usize, &str)], tolerance: f64) {
    let one = alone(&format!("losses-{name}"), flags);
    let losses = one.losses("run");
    assert!(losses.len() == 30 && losses[29] < losses[0], "it learns: {losses:?}");
    for (number, (ranks, more)) in cases.iter().enumerate() {
        let began = Instant::now();
        let many = over(*ranks, &format!("losses-{name}-{number}"), &[flags, &[more]].concat());
        let training = largest_difference(&many.losses("run"), &losses);
        let evaluation = largest_difference(&evaluated(&many), &evaluated(&one));
        println!(
            "losses of {name}, {ranks} ranks{}{more}: {training:.1e} apart over 30 steps, {evaluation:.1e} when evaluated; {:.1} s",
            if more.is_empty() { "" } else { ", " },
            began.elapsed().as_secs_f64()
        );
        assert!(training < tolerance, "losses are {training:e} apart");
        assert!(evaluation < tolerance, "evaluations are {evaluation:e} apart");
    }
}

fn evaluated(folder: &Folder) -> Vec<f64> {
    let text = std::fs::read_to_string(folder.0.join("run/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let losses: Vec<f64> = lines.filter_map(|line| line["eval_loss"].as_f64()).collect();
    assert!(!losses.is_empty());
    losses
}

#[test]
#[ignore = "needs a GPU and NCCL"]
fn losses_of_a_vit_in_fp32() {
    let cases = [(2, ""), (3, ""), (4, ""), (3, "--no-overlap"), (2, "--bucket-size 2000")];
    losses_of_ranks_are_those_of_one("vit-fp32", &[VIT, "--precision fp32", SURE], &cases, 2e-4);
    // It measures.
    let measured = &[VIT, "--precision fp32", MEASURED];
    losses_of_ranks_are_those_of_one("vit-balanced", measured, &[(3, "--balance")], 2e-4);
}

#[test]
#[ignore = "needs a GPU and NCCL"]
fn losses_of_a_vit_with_accumulation() {
    let flags = &[VIT, "--precision fp32 --accumulate 2 --ema 0.9", SURE];
    let cases = [(2, ""), (4, "--no-overlap")];
    losses_of_ranks_are_those_of_one("vit-accumulated", flags, &cases, 2e-4);
    let lamb = &[VIT, "--precision fp32 --optimizer lamb --steps 30 --lr 2e-2", GPU];
    losses_of_ranks_are_those_of_one("vit-lamb", lamb, &[(2, "")], 2e-4);
}

#[test]
#[ignore = "needs a GPU and NCCL"]
fn losses_of_a_vit_in_bf16() {
    let cases = [(2, ""), (4, ""), (2, "--comm-dtype bf16"), (2, "--no-overlap")];
    losses_of_ranks_are_those_of_one("vit-bf16", &[VIT, "--precision bf16", SURE], &cases, 1e-2);
}

#[test]
#[ignore = "needs a GPU and NCCL"]
fn losses_of_a_swin_with_upernet() {
    let cases = [(2, ""), (3, ""), (4, "--no-overlap")];
    // So slowly that rounding doesn't grow into other weights from step to step, which evaluation by running moments would show.
    let slowly = "--steps 30 --lr 1e-4";
    losses_of_ranks_are_those_of_one(
        "upernet-fp32",
        &[UPERNET, "--precision fp32", slowly, GPU],
        &cases,
        2e-4,
    );
    losses_of_ranks_are_those_of_one(
        "upernet-bf16",
        &[UPERNET, "--precision bf16", slowly, GPU],
        &[(2, "")],
        2e-2,
    );
}

/// Two runs over the same ranks have the same bits, with overlap and without.
#[test]
#[ignore = "needs a GPU and NCCL"]
fn runs_over_the_same_ranks_have_the_same_bits() {
    let began = Instant::now();
    for precision in ["--precision fp32", "--precision bf16"] {
        let run = |name: &str, more: &str| {
            over(3, &format!("bits-{name}-{}", &precision[12..]), &[VIT, STEPS, GPU, precision, more])
                .losses("run")
        };
        let first = run("first", "");
        assert_eq!(run("second", ""), first, "{precision}");
        assert_eq!(run("apart", "--no-overlap"), first, "{precision}");
    }
    println!(
        "the same bits in runs over 3 ranks, overlap on and off, fp32 and bf16; {:.1} s",
        began.elapsed().as_secs_f64()
    );
}

/// A run that loses a rank goes on over another number of ranks, and ends as an undisturbed one.
#[test]
#[ignore = "needs a GPU and NCCL"]
fn a_run_goes_on_over_other_ranks() {
    let began = Instant::now();
    let flags = [VIT, STEPS, GPU, "--precision fp32 --checkpoint-every 5"];
    let whole = alone("undisturbed", &flags).losses("run");
    let batch = format!("--comm nccl --batch-size {} --seed 5 --out run", TOTAL / 4);
    let all = words(&[&["train"], &flags[..], &[&batch[..]]].concat());
    let mut lost = Ranks::launch(Folder::new("nccl-resumed"), 4, |rank| {
        let mut command = rank_command(rank, &all);
        command.env("VITESSE_FAULT", "panic:rank=2:step=12");
        command
    });
    tells(&lost.end_within(LIMIT, &[]), &["rank 2", "panicked"]);
    assert_eq!(lost.folder.last_step(), Some(10));
    let folder = run_over(lost.folder, 2, &["train --resume run --min-ranks 1"]);
    let apart = largest_difference(&folder.losses("run"), &whole);
    println!(
        "4 ranks, lost at step 12, resumed over 2: losses {apart:.1e} from one rank's; {:.1} s",
        began.elapsed().as_secs_f64()
    );
    assert!(apart < 2e-4);
}

// ---- faults ----------------------------------------------------------------------------------------------------------

/// Longer than any test lets it run.
const LONG: &str = "train --model vit-nano/4 --train-samples 4000 --test-samples 40 --batch-size 8 --epochs 1000 --workers 1 \
                    --checkpoint-every 3 --seed 2 --timeout 3 --comm nccl --out run";
const TIMEOUT: Duration = Duration::from_secs(3);
const GRACE: Duration = Duration::from_secs(10);

/// Memory that is used on the GPU, in MiB.
fn memory_used() -> u64 {
    let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"];
    let output = Command::new("nvidia-smi").args(query).output().expect("nvidia-smi");
    let text = text(&output);
    text.lines().next().and_then(|line| line.trim().parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// Cuts every connection of a process to others, as a broken link would.
fn cut_sockets(pid: u32) {
    let mut cut = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if !target.to_string_lossy().starts_with("socket:") {
            continue;
        }
        let number: i32 = entry.file_name().to_string_lossy().parse().unwrap();
        // SAFETY: calls on descriptors made here, of a process this test started.
        unsafe {
            let process = libc::syscall(libc::SYS_pidfd_open, pid, 0) as i32;
            let socket = libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) as i32;
            assert!(process >= 0 && socket >= 0, "{}", std::io::Error::last_os_error());
            let mut kind: libc::sockaddr_storage = std::mem::zeroed();
            let mut len = size_of::<libc::sockaddr_storage>() as u32;
            let peer = libc::getpeername(socket, (&raw mut kind).cast(), &raw mut len);
            let is_tcp = peer == 0 && [libc::AF_INET, libc::AF_INET6].contains(&i32::from(kind.ss_family));
            if is_tcp && libc::shutdown(socket, libc::SHUT_RDWR) == 0 {
                cut += 1;
            }
            libc::close(socket);
            libc::close(process);
        }
    }
    assert!(cut > 2, "{cut} connections");
}

/// What happens to rank 1.
enum Suffering {
    Fault(&'static str),
    Signal(i32),
    Cut,
    /// More flags.
    Flags(&'static str),
}

/// Three ranks, of which one suffers: all end in time, one line names it, and the last checkpoint is whole.
fn suffers(name: &str, suffering: Suffering, named: &[&str]) {
    let began = Instant::now();
    let free = memory_used();
    let mut ranks = Ranks::launch(Folder::new(&format!("nccl-fault-{name}")), 3, |rank| {
        let mut all = words(&[LONG, GPU]);
        if let (1, Suffering::Flags(more)) = (rank, &suffering) {
            all.extend(words(&[more]));
        }
        let mut command = rank_command(rank, &all);
        if let Suffering::Fault(fault) = suffering {
            command.env("VITESSE_FAULT", fault);
        }
        command
    });
    let starts = !matches!(suffering, Suffering::Flags(_));
    let cut = matches!(suffering, Suffering::Cut);
    if starts {
        ranks.folder.wait_for_step(3);
    }
    let at = Instant::now();
    let mut limit = TIMEOUT + GRACE;
    let mut except = vec![];
    match suffering {
        Suffering::Signal(signal) => {
            ranks.signal(1, signal);
            if signal == libc::SIGSTOP {
                except.push(1);
            }
        }
        Suffering::Cut => cut_sockets(ranks.pid(1)),
        // It comes when it comes.
        Suffering::Fault(_) | Suffering::Flags(_) => limit += Duration::from_secs(60),
    }
    let text = ranks.end_within(limit, &except);
    let after = at.elapsed().as_secs_f64();
    if cut {
        // Those on either side of a cut name who is beyond it.
        let (here, there): (Vec<_>, Vec<_>) = text
            .lines()
            .filter(|line| line.starts_with("vitesse: "))
            .partition(|line| line.contains("vitesse: rank 1"));
        assert!(here.len() == 1 && there.len() <= 1, "{text}");
    } else {
        tells(&text, named);
    }
    if !except.is_empty() {
        ranks.signal(1, libc::SIGCONT);
        ranks.end_within(GRACE, &[0, 2]);
    }
    // The driver takes a moment to free what a killed process had.
    let deadline = Instant::now() + Duration::from_secs(5);
    while memory_used() > free + 64 {
        assert!(Instant::now() < deadline, "{name}: {} MiB are used, {free} before", memory_used());
        std::thread::sleep(Duration::from_millis(50));
    }
    if starts {
        ranks.folder.can_go_on();
    }
    println!("fault, {name}: all ended {after:.1} s after it; {:.1} s", began.elapsed().as_secs_f64());
}

/// One after the other, since each looks at the GPU's memory.
#[test]
#[ignore = "needs a GPU and NCCL, alone"]
fn every_fault_ends_all_ranks() {
    suffers("killed", Suffering::Signal(libc::SIGKILL), &["rank 1"]);
    suffers("stopped", Suffering::Signal(libc::SIGSTOP), &["rank 1"]);
    suffers("sockets cut", Suffering::Cut, &[]);
    suffers("panic", Suffering::Fault("panic:rank=1:step=7"), &["rank 1", "panicked"]);
    suffers("hung on the host", Suffering::Fault("hang:rank=1:step=7"), &["rank 1"]);
    suffers("hung in a kernel", Suffering::Fault("spin:rank=1:step=7"), &["progress for 3 s"]);
    suffers("GPU lost", Suffering::Fault("gpu:rank=1:step=7"), &["rank 1", "lost GPU 0"]);
    suffers("a collective out of order", Suffering::Fault("order:rank=1:step=7"), &["rank 1", "barrier"]);
    suffers(
        "another configuration",
        Suffering::Flags("--lr 0.5"),
        &["rank 1", "another configuration", "0.5"],
    );
}

/// Ranks that together want more memory than the GPU has: one of them finds too little, and all end.
#[test]
#[ignore = "needs a GPU and NCCL, alone"]
fn a_rank_out_of_memory_ends_all() {
    let began = Instant::now();
    let output = Command::new("nvidia-smi")
        .args(["--query-gpu=memory.total", "--format=csv,noheader,nounits"])
        .output();
    let text = text(&output.expect("nvidia-smi"));
    let total: f64 = text.trim().parse().unwrap_or_else(|_| panic!("{text}"));
    // A ViT-B/16 takes about 66 MB for each image in bf16: two thirds of the GPU for each of two ranks.
    let batch = (total * 1.048576 * 0.64 / 66.0) as usize;
    let flags = format!(
        "train --model vit-b/16 --image-size 224 --batch-size {batch} --train-samples {} --test-samples 8 --steps 2 --comm nccl --out run",
        4 * batch
    );
    let mut ranks = launch(Folder::new("nccl-fault-memory"), 2, &words(&[&flags, GPU, "--timeout 30"]));
    let text = ranks.end_within(Duration::from_secs(200), &[]);
    tells(&text, &["memory"]);
    println!("fault, out of memory: {:.1} s", began.elapsed().as_secs_f64());
}
