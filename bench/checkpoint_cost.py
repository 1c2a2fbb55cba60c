"""What checkpoints cost the steps beside which they are written, against a run that saves nothing.

    python3 bench/checkpoint_cost.py --out bench/2026-11-19-h200-checkpoints [--model vit-l/16] [--batches 64:200,256:60] [--checkpoints 4]
        [--pairs 2] [--vitesse target/release/vitesse] [--work FOLDER] [-- FLAGS OF vitesse train]

Each case is a batch and the steps between checkpoints: `64:200`. Two runs take turns, with checkpoints and, over two of these spans, without;
the work folder needs room for three of them. Give as many `--workers` as prepare images faster than steps take them: "waited for data" shows
what a step waited at most. A checkpoint's steps are those that end between its copy and its name, which is looked for every 5 ms; the first
of them is the one whose update waits for the copy. Times are those of metrics.jsonl, of the steps after the first tenth. What is
written goes to OUT/checkpoint-cost.json, the reading to OUT/checkpoint-cost.md.
"""
import argparse, json, os, re, shutil, statistics, subprocess, sys, tempfile, threading, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import machine

EVERY_MS = 5


class Watch(threading.Thread):
    """Notes when each checkpoint began to be written and when it got its name."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.seconds, self.began, self.ended = folder, {}, {}, False

    def run(self):
        while not self.ended:
            now = time.monotonic()
            names = os.listdir(self.folder) if self.folder.is_dir() else []
            for name in names:
                found = re.fullmatch(r"(\.?)step-(\d+)\.safetensors(\.tmp)?", name)
                if not found:
                    continue
                step = int(found[2])
                if found[1]:
                    self.began.setdefault(step, now)
                elif step in self.began:
                    self.seconds.setdefault(step, now - self.began[step])
            time.sleep(EVERY_MS / 1e3)


def train(args, batch, every, saves, folder):
    """Metrics of the steps of a run, and how long each checkpoint took."""
    run, steps = folder / "run", every * (args.checkpoints + 1 if saves else 2)
    shutil.rmtree(run, ignore_errors=True)
    command = [args.vitesse, "train", "--model", args.model, "--batch-size", str(batch), "--train-samples", str(8 * batch), "--test-samples",
               str(batch), "--steps", str(steps), "--eval-every", str(steps), "--seed", "1", "--no-breakdown", "--out", str(run)] + args.flags
    command += ["--checkpoint-every", str(every), "--keep", "1"] if saves else ["--no-checkpoints"]
    watch = Watch(run / "checkpoints")
    watch.start()
    done = subprocess.run(command, capture_output=True, text=True)
    watch.ended = True
    watch.join()
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    size = max((path.stat().st_size for path in run.glob("checkpoints/*.safetensors")), default=0)
    shutil.rmtree(run)
    notes = [line for line in done.stdout.splitlines() if "waits for checkpoints" in line]
    times = [line["seconds"] for line in lines if "seconds" in line]
    waited = {line["step"]: line["checkpoint_seconds"] for line in lines if line.get("checkpoint_seconds")}
    data = [line["data_seconds"] for line in lines if "seconds" in line]
    return {"saves": saves, "seconds": times, "data_seconds": data, "checkpoint_seconds": waited, "written_in": watch.seconds, "bytes": size, "notes": notes,
            "command": command}


def affected(run, every, first):
    """Times of the steps beside which a checkpoint was written, apart from that at the end: of the first of each, and of all."""
    seconds, firsts, every_one = run["seconds"], [], []
    for step, took in run["written_in"].items():
        # The states after so many steps are copied when the next step, of this number, is under way.
        if step >= len(seconds) or step < first:
            continue
        firsts.append(seconds[step])
        spent = 0.0
        for later in seconds[step:step + every]:
            every_one.append(later)
            spent += later
            if spent > took:
                break
    return firsts, every_one


def reading(batch, every, runs):
    first = max(len(run["seconds"]) for run in runs) // 10
    quiet = [time for run in runs if not run["saves"] for time in run["seconds"][first:]]
    pairs = [affected(run, every, first) for run in runs if run["saves"]]
    firsts, beside = [t for pair in pairs for t in pair[0]], [t for pair in pairs for t in pair[1]]
    base = statistics.median(quiet)
    took = [took for run in runs for took in run["written_in"].values()]
    waited = [waited for run in runs for waited in run["checkpoint_seconds"].values()]
    ranked = sorted(quiet)
    return {
        "batch": batch, "steps_quiet": len(quiet), "steps_beside": len(beside), "checkpoints": len(firsts),
        "bytes": max(run["bytes"] for run in runs), "written_in": statistics.median(took) if took else None,
        "step": base, "quiet_p99": ranked[int(0.99 * (len(ranked) - 1))] / base, "quiet_worst": ranked[-1] / base,
        "median": statistics.median(beside) / base if beside else None, "worst": max(beside) / base if beside else None,
        "first_median": statistics.median(firsts) / base if firsts else None, "first_worst": max(firsts) / base if firsts else None,
        "data_waited": max(waited for run in runs for waited in run["data_seconds"][first:]),
        "host_waited": max(waited, default=0.0), "notes": sorted({note for run in runs for note in run["notes"]}),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="vit-l/16")
    parser.add_argument("--batches", default="64:200,256:60", help="BATCH:STEPS between checkpoints, with commas")
    parser.add_argument("--checkpoints", type=int, default=4, help="of each run, beside the last")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--vitesse", default="target/release/vitesse")
    parser.add_argument("--work", type=Path, help="folder for runs; a temporary one if it isn't given")
    parser.add_argument("flags", nargs="*", help="flags of vitesse train, after --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-cost-", dir=args.work))
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "unit": "seconds", "cases": []}
    rows = ["| batch | checkpoint | written in | step | quiet: p99, worst | beside: median, worst | first step: median, worst | host waited | waited for data |",
            "|---|---|---|---|---|---|---|---|---|"]
    try:
        for case in args.batches.split(","):
            batch, every = map(int, case.split(":"))
            runs = []
            for pair in range(args.pairs):
                for saves in ((False, True) if pair % 2 == 0 else (True, False)):
                    runs.append(train(args, batch, every, saves, folder))
                read = reading(batch, every, runs)
            record["cases"].append({"reading": read, "runs": runs})
            (args.out / "checkpoint-cost.json").write_text(json.dumps(record, indent=1))
            times = lambda one, other: "–" if read[one] is None else f"{read[one]:.3f}×, {read[other]:.3f}×"
            took = "–" if read["written_in"] is None else f"{read['written_in']:.2f} s"
            rows.append(f"| {batch} | {read['bytes'] / 1e9:.2f} GB | {took} | {1e3 * read['step']:.1f} ms | {times('quiet_p99', 'quiet_worst')} "
                        f"| {times('median', 'worst')} ({read['steps_beside']} steps) | {times('first_median', 'first_worst')} "
                        f"({read['checkpoints']}) | {1e3 * read['host_waited']:.1f} ms | {1e3 * read['data_waited']:.1f} ms |")
            print("\n".join(rows + read["notes"]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    head = f"# What checkpoints cost beside the training\n\n`{record['command']}` on {record['machine']}.\n\n"
    tail = ("\n\nTimes of steps are against the median step of runs that save nothing; beside: all steps from the copy of the states until the "
            "checkpoint has its name.\n")
    (args.out / "checkpoint-cost.md").write_text(head + "\n".join(rows) + tail)


if __name__ == "__main__":
    main()
