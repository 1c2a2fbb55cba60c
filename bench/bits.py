#!/usr/bin/env python3
"""Two vitesse binaries on the same small runs, on a CPU or a GPU: are losses and final states the same bits?

    python bench/bits.py BEFORE AFTER [--gpu] [--only WORDS] [--keep DIR] [--out FILE.json] [--list]

BEFORE and AFTER are paths of binaries. Each case below is a run of 20 optimizer steps on synthetic data, made by both binaries one after the
other. Compared are, for every step, the loss and the gradient norm of metrics.jsonl; the losses of evaluations; and every tensor of the
last checkpoint (parameters, moments, averages, running moments): its type, shape and bytes. A case is

    equal           everything is the same, bit for bit
    as allowed      only gradient norms of an fp64 run differ, by at most 1e-12 relative: the order of their sum is not fixed. With clipping
                    the norm scales the gradients, so that losses and states may differ as well, by the largest difference printed
    DIFFERENT       with the first step that differs, and how many tensors
    BOTH FAILED     neither binary made the run: nothing was compared (the last lines of both are printed)
    BEFORE FAILED, AFTER FAILED
    skipped         the case's launcher (mpirun) is not there, or neither binary is built with MPI

Exits with 0 only if all cases are equal, as allowed, or skipped, and with `--no-skips` only if none was skipped. `--only` takes comma-separated words; a case runs if
one of them is part of its name. `--keep` keeps the runs' folders and logs there. Flags are spelled so that both binaries know them: a
renamed flag gets a line in RENAMED. `--gpu` runs the cases of a GPU instead, with `--deterministic`. Only Python's standard library is needed. The whole list takes about a minute on two cores.

Engines: threads of one process (`--ranks N`); tcp, N processes with the environment that torchrun sets; mpi, N processes by mpirun.
"""
import argparse, array, json, math, os, shutil, socket, struct, subprocess, sys, tempfile, time
from pathlib import Path

STEPS = 20
TIMEOUT = 120  # seconds of a run

VIT = "--model vit-nano/4 --image-size 16 --train-samples 640 --test-samples 16"
SWIN = "--model swinv2-nano/w4 --image-size 32 --train-samples 320 --test-samples 8"
UPERNET = "--model swinv2-nano/w4+upernet --image-size 32 --train-samples 160 --test-samples 4"
LINEAR = "--task segment --model vit-nano/4+linear --image-size 16 --train-samples 160 --test-samples 4"
RANDOM = "--dropout 0.1 --attention-dropout 0.1 --drop-path 0.1 --mixup 0.8 --cutmix 1 --label-smoothing 0.1 --augment standard --ema 0.9"

# name: (engine, ranks, flags). What may differ of runs in fp64, with and without clipping, is said above.
CASES = {
    # The ViT with everything that draws random numbers.
    "vit fp32": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --clip 0"),
    "vit fp32 accumulate 4": ("threads", 1, f"{VIT} {RANDOM} --batch-size 4 --accumulate 4 --clip 0"),
    "vit fp32 clip": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --clip 0.5"),
    "vit fp32 accumulate 4 clip": ("threads", 1, f"{VIT} {RANDOM} --batch-size 4 --accumulate 4 --clip 0.5"),
    "vit fp64": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --clip 0 --precision fp64"),
    "vit fp64 accumulate 4": ("threads", 1, f"{VIT} {RANDOM} --batch-size 4 --accumulate 4 --clip 0 --precision fp64"),
    "vit clip fp64": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --clip 0.5 --precision fp64"),
    "vit fp32 2 threads": ("threads", 1, f"{VIT} {RANDOM} --batch-size 32 --clip 0 --threads 2"),
    "vit fp32 mean pool": ("threads", 1, f"{VIT} --batch-size 8 --pool mean"),
    # Optimizers, groups of parameters, recomputation.
    "vit lamb": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --optimizer lamb"),
    "vit sgd layer decay": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --optimizer sgd --layer-decay 0.75 --lr-scale head=2"),
    "vit frozen": ("threads", 1, f"{VIT} --batch-size 8 --lr-scale blocks.*=0 --ema 0.9"),
    "vit recompute gelu": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --recompute gelu"),
    "vit recompute full": ("threads", 1, f"{VIT} {RANDOM} --batch-size 8 --recompute full --accumulate 2"),
    # The other families.
    "swin fp32": ("threads", 1, f"{SWIN} --drop-path 0.1 --batch-size 4 --ema 0.9"),
    "swin fp64": ("threads", 1, f"{SWIN} --drop-path 0.1 --batch-size 4 --clip 0 --precision fp64"),
    "upernet fp32": ("threads", 1, f"{UPERNET} --batch-size 2 --ema 0.9"),
    "upernet fp32 accumulate 4": ("threads", 1, f"{UPERNET} --batch-size 2 --accumulate 4"),
    "upernet fp64": ("threads", 1, f"{UPERNET} --batch-size 2 --clip 0 --precision fp64"),
    "linear head for pixels fp32": ("threads", 1, f"{LINEAR} --batch-size 2"),
    # Ranks, over every engine.
    "vit 3 ranks threads fp32": ("threads", 3, f"{VIT} {RANDOM} --batch-size 4 --bucket-size 20000"),
    "vit 4 ranks threads fp32 accumulate 4": ("threads", 4, f"{VIT} {RANDOM} --batch-size 2 --accumulate 4 --bucket-size 20000"),
    "vit 4 ranks threads fp64": ("threads", 4, f"{VIT} {RANDOM} --batch-size 4 --clip 0 --precision fp64 --accumulate 2"),
    "vit 3 ranks threads no overlap": ("threads", 3, f"{VIT} --batch-size 4 --no-overlap"),
    "vit 3 ranks threads bf16 communication": ("threads", 3, f"{VIT} --batch-size 4 --wire bf16"),
    "swin 3 ranks threads fp32": ("threads", 3, f"{SWIN} --drop-path 0.1 --batch-size 2"),
    "upernet 3 ranks threads fp32": ("threads", 3, f"{UPERNET} --batch-size 2"),
    "vit 3 ranks tcp fp32": ("tcp", 3, f"{VIT} {RANDOM} --batch-size 4 --bucket-size 20000"),
    "vit 4 ranks tcp fp64": ("tcp", 4, f"{VIT} {RANDOM} --batch-size 4 --clip 0 --precision fp64 --accumulate 2"),
    "vit 4 ranks tcp lamb": ("tcp", 4, f"{VIT} {RANDOM} --batch-size 2 --optimizer lamb --bucket-size 20000"),
    "upernet 3 ranks tcp fp32": ("tcp", 3, f"{UPERNET} --batch-size 2"),
    "vit 3 ranks mpi fp32": ("mpi", 3, f"{VIT} {RANDOM} --batch-size 4 --bucket-size 20000"),
    "vit 4 ranks mpi fp64": ("mpi", 4, f"{VIT} {RANDOM} --batch-size 4 --clip 0 --precision fp64 --accumulate 2"),
    "upernet 3 ranks mpi fp32": ("mpi", 3, f"{UPERNET} --batch-size 2"),
}

TI4 = "--model vit-ti/4 --image-size 32 --train-samples 1280 --test-samples 64 --batch-size 32"
B16 = "--model vit-b/16 --image-size 224 --train-samples 160 --test-samples 8 --batch-size 8"
UPERNET_B = "--model swinv2-b/w8+upernet --image-size 512 --train-samples 40 --test-samples 2 --batch-size 2"
GPU_CASES = {
    f"{name} {precision}": ("threads", 1, f"{flags} --device cuda --deterministic --precision {precision}")
    for precision in ("bf16", "fp32")
    for name, flags in {
        "vit-ti/4": f"{TI4} {RANDOM} --clip 0",
        "vit-ti/4 clip": TI4,
        "vit-ti/4 accumulate 4": f"{TI4} {RANDOM} --accumulate 4 --clip 0",
        "vit-b/16": B16,
        "swinv2-b upernet": UPERNET_B,
    }.items()
} | {
    "vit-ti/4 fp16 sgd": ("threads", 1, f"{TI4} --device cuda --deterministic --precision fp16 --optimizer sgd"),
    "vit-ti/4 bf16 lamb": ("threads", 1, f"{TI4} --device cuda --deterministic --precision bf16 --optimizer lamb"),
}

# Flags that a binary may know under a later name: earlier → later. `spelled` asks the binary's help.
RENAMED = {"--wire": "--comm-dtype"}


class Failed(Exception):
    """A run that did not end as it should, with what it said last."""


def spelled(flags, help_text):
    return [RENAMED[flag] if flag in RENAMED and flag not in help_text else flag for flag in flags]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(binary, help_text, case, folder):
    """Runs a case with a binary, in `folder`; raises `Failed`."""
    engine, ranks, flags = CASES[case]
    command = [binary, "train", *spelled(flags.split(), help_text), "--steps", str(STEPS), "--out", str(folder / "run")]
    command += [] if "--threads" in flags or "--device cuda" in flags else ["--threads", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "SLURM_"))}
    environments = [environment]
    if engine == "threads":
        command += ["--ranks", str(ranks)]
    elif engine == "mpi":
        command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--allow-run-as-root", *command, "--comm", "mpi"]
    else:
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environments = [environment | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        command += ["--comm", "tcp"]
    logs = [open(folder / f"log-{number}.txt", "w+") for number in range(len(environments))]
    processes = [subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
                 for env, log in zip(environments, logs)]
    deadline = time.monotonic() + TIMEOUT
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(deadline - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(f"none after {TIMEOUT} s")
    if any(codes):
        said = []
        for code, log in zip(codes, logs):
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()]
            said += ([line for line in lines if line.startswith(("vitesse", "error"))] or lines[-2:])[:2] + [f"(exit {code})"]
        raise Failed(" / ".join(dict.fromkeys(said)))


def tensors(path):
    """Name → (type, shape, bytes) of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    start = 8 + length
    return {name: (entry["dtype"], entry["shape"], data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


def read(folder):
    """What a run left: its steps, its evaluations, its last checkpoint's tensors."""
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["loss"], line.get("grad_norm")) for line in lines if "lr" in line and "loss" in line]
    evaluations = [{name: value for name, value in line.items() if "loss" in name or name.startswith(("eval", "test", "top", "miou"))
                    and "seconds" not in name and "per_second" not in name} for line in lines if "lr" not in line]
    if len(steps) != STEPS or not all(isinstance(loss, float) and math.isfinite(loss) for loss, _ in steps):
        raise Failed(f"metrics.jsonl has {len(steps)} steps, not {STEPS} with a finite loss")
    checkpoints = sorted(run.glob("checkpoints/step-*.safetensors"))
    if not checkpoints:
        raise Failed("there is no checkpoint")
    return steps, evaluations, tensors(checkpoints[-1])


def relative(a, b):
    """The largest difference of two tensors, relative to the largest number of the first; None if they can't be compared."""
    code = {"F32": "f", "F64": "d"}.get(a[0])
    if code is None or a[:2] != b[:2]:
        return None
    a, b = array.array(code, a[2]), array.array(code, b[2])
    scale = max((abs(x) for x in a), default=0) or 1
    return max((abs(x - y) for x, y in zip(a, b)), default=0) / scale


def compared(case, before, after):
    """(verdict, what was seen) of two runs that both ended."""
    flags = CASES[case][2]
    norm_may_differ, clips = "--precision fp64" in flags, "--clip 0 " not in flags + " "
    (steps_b, evaluations_b, states_b), (steps_a, evaluations_a, states_a) = before, after
    losses = [i for i, (b, a) in enumerate(zip(steps_b, steps_a)) if b[0] != a[0]]
    norms = [i for i, (b, a) in enumerate(zip(steps_b, steps_a)) if b[1] != a[1]]
    names = sorted(set(states_b) ^ set(states_a))
    states = [name for name in states_b if name in states_a and states_b[name] != states_a[name]]
    seen = f"{STEPS} losses, {sum(step[1] is not None for step in steps_a)} norms, {len(evaluations_a)} evaluations, {len(states_a)} tensors"
    if not (losses or norms or names or states or evaluations_b != evaluations_a):
        return "equal", seen
    gap = max((abs(b[1] - a[1]) / abs(b[1]) for b, a in zip(steps_b, steps_a) if b[1]), default=0)
    loss_gap = max(abs(b[0] - a[0]) / abs(b[0]) for b, a in zip(steps_b, steps_a))
    far = [relative(states_b[name], states_a[name]) for name in states]
    what = f"{len(losses)} losses (first at step {losses[0] if losses else '-'}, {loss_gap:.1e}), {len(norms)} norms (first at step {norms[0] if norms else '-'}, {gap:.1e}), "
    what += f"{len(states)} of {len(states_b)} tensors (" + ("types or shapes" if None in far else f"{max(far, default=0):.1e}") + ")"
    what += ", evaluations" * (evaluations_b != evaluations_a) + f", names {names[:4]}" * bool(names)
    if norm_may_differ and norms and gap <= 1e-12 and not names and None not in far:
        # What differs must follow from a norm: with clipping, and after the first norm that differs.
        if not (losses or states or evaluations_b != evaluations_a) or clips and (not losses or losses[0] > norms[0]):
            return "as allowed", what
    return "DIFFERENT", what


def attempt(binary, help_text, case, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        run(binary, help_text, case, folder)
        return read(folder), None
    except (Failed, OSError, KeyError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def verdict(case, binaries, root):
    engine, _, _ = CASES[case]
    if engine == "mpi" and not shutil.which("mpirun"):
        return "skipped", "mpirun is not installed"
    results, errors = {}, {}
    for which, (binary, help_text) in binaries.items():
        results[which], errors[which] = attempt(binary, help_text, case, root / case.replace(" ", "-") / which)
    if engine == "mpi" and all(error and "built without MPI" in error for error in errors.values()):
        return "skipped", "neither binary is built with MPI"
    failed = [which for which in binaries if errors[which]]
    if failed:
        both = len(failed) == 2
        return ("BOTH FAILED" if both else f"{failed[0].upper()} FAILED"), "; ".join(f"{which}: {errors[which]}" for which in failed)
    return compared(case, results["before"], results["after"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", default="", help="words, comma-separated: run only cases with one of them in their name")
    parser.add_argument("--keep", help="folder for runs and logs [default: a temporary one, removed]")
    parser.add_argument("--out", help="file for the table as JSON")
    parser.add_argument("--no-skips", action="store_true", help="count a skipped case as a failure")
    parser.add_argument("--list", action="store_true", help="print the cases and their flags, run nothing")
    parser.add_argument("--gpu", action="store_true", help="run the cases of a GPU")
    options = parser.parse_args()
    if options.gpu:
        CASES.clear()
        CASES.update(GPU_CASES)
    words = [word.strip() for word in options.only.split(",") if word.strip()]
    cases = [case for case in CASES if not words or any(word in case for word in words)]
    if not cases:
        sys.exit(f"no case has one of {words} in its name")
    if options.list:
        for case in cases:
            engine, ranks, flags = CASES[case]
            print(f"{case:40} {engine:8} {ranks} {flags}")
        return
    binaries = {}
    for which in ("before", "after"):
        binary = str(Path(getattr(options, which)).resolve())
        binaries[which] = (binary, subprocess.run([binary, "train", "--help"], capture_output=True, text=True, check=True).stdout)
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        for case in cases:
            start = time.monotonic()
            outcome, what = verdict(case, binaries, Path(options.keep or temporary))
            rows.append({"case": case, "engine": CASES[case][0], "ranks": CASES[case][1], "flags": CASES[case][2], "outcome": outcome, "compared": what})
            print(f"{case:40} {outcome:14} {what}  [{time.monotonic() - start:.1f} s]", flush=True)
            if options.out:
                Path(options.out).write_text(json.dumps(rows, indent=1) + "\n")
    fine = {"equal", "as allowed"} | (set() if options.no_skips else {"skipped"})
    bad = [row["case"] for row in rows if row["outcome"] not in fine]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in dict.fromkeys(row["outcome"] for row in rows)}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f"; {time.monotonic() - began:.0f} s")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
