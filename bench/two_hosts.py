"""Training over two hosts with a slow link between them: what communication costs, and what overlap hides.

    python3 bench/two_hosts.py --out bench/2026-11-15-xeon-2vcpu-ranks [--steps 12] [--delay 1ms] [--rounds 1] [--batches 48,64] [--stages 0,1,3]

Makes two hosts of network namespaces (scripts/hosts: 1 Gbit/s, 1 ms each way; needs root), trains ViT-Ti/4 with 32 images per rank over
them under mpirun, and removes them. Compares with two ranks in one process: the losses must be the same to the bit. Build with
`cargo build --release --features mpi`. With `--delay 0` nothing is between the hosts that takes a core. `--batches` adds other numbers of images,
with each stage of ZeRO; `--stages` leaves out all that is not plain data parallelism (0) or one of these stages. Of several rounds, each runs every case once.

"By the lanes" is what must be exposed, the median over steps: the lanes and waits that `vitesse plan` prints, replayed with how long each step and
each message took in the run's trace.
"""
import argparse, json, re, shutil, statistics, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "--model vit-ti/4".split()
TRAIN = [*"train --threads 1 --train-samples 4000 --test-samples 32 --seed 1 --json".split(), *MODEL]
BATCH = ["--batch-size", "32"]
MICRO = ["--accumulate", "4", "--batch-size", "8"]
CASES = {
    "one process": (False, BATCH),
    "two hosts": (True, BATCH),
    "two hosts, no overlap": (True, [*BATCH, "--no-overlap"]),
    "two hosts, bf16 communication": (True, [*BATCH, "--comm-dtype", "bf16"]),
    "two hosts, ZeRO 1": (True, [*BATCH, "--zero", "1"]),
    "two hosts, ZeRO 2": (True, [*BATCH, "--zero", "2"]),
    "two hosts, ZeRO 3": (True, [*BATCH, "--zero", "3"]),
    "two hosts, ZeRO 1, no overlap": (True, [*BATCH, "--zero", "1", "--no-overlap"]),
    "two hosts, 4 micro-steps": (True, MICRO),
    "two hosts, 4 micro-steps, ZeRO 1": (True, [*MICRO, "--zero", "1"]),
    "one process, 4 micro-steps": (False, MICRO),
}
STAGES = {"0": "", "1": ", ZeRO 1", "2": ", ZeRO 2", "3": ", ZeRO 3"}


def with_batches(cases, batches, stages):
    """Cases with other numbers of images per rank beside them."""
    added = {f"two hosts, {batch} images{STAGES[stage]}": (True, ["--batch-size", batch, "--zero", stage]) for batch in batches for stage in stages}
    alone = {f"one process, {batch} images": (False, ["--batch-size", batch]) for batch in batches}
    return {**cases, **alone, **added}


def plan(binary, which, more):
    """Steps of a plan: name, lane, numbers of the steps and names of the states that it waits for, states that it leaves under way."""
    text = subprocess.run([binary, "plan", *MODEL, "--threads", "1", "--ranks", "2", *more, "--which", which], capture_output=True, text=True, check=True).stdout
    steps = []
    for line in text.splitlines():
        if found := re.match(r"\d+ (\w+) (.*?) = (\w+)\((.*) ; (\w+) (.*) # ", line):
            lane, outputs, op, rest, phase, layer = found.groups()
            numbers = lambda key: re.search(rf" {key}=(\S+)", rest)
            waits = [int(n) for n in numbers("wait")[1].split(",")] if numbers("wait") else []
            after = numbers("after")[1].split(",") if numbers("after") else []
            left = re.findall(r"\$(\S+?)(?:,|$)", outputs) if rest.endswith(" left") else []
            name = layer if lane == "comm" and phase == "communication" else f"{phase} of {layer} ({op})"
            steps.append((name, lane, waits, after, left, op))
    return steps


def replay(plans):
    """Seconds of each plan in which the compute lane has nothing to do, of plans one after the other with the seconds of each step: by the rules
    of `graph::replay_all`, written again so that what Rust plans and measures is checked by something else."""
    began, ends, left, idle = 0.0, {}, {}, []
    for steps, seconds in plans:
        spans, busy = [], 0.0
        for (_, lane, waits, after, leaves, _), takes in zip(steps, seconds):
            start = max([began, ends.get(lane, 0.0)] + [spans[w][1] for w in waits] + [left.get(state, 0.0) for state in after])
            spans.append((start, start + takes, bool(leaves)))
            ends[lane] = start + takes
            left.update({state: start + takes for state in leaves})
            busy += takes if lane == "compute" else 0.0
        end = max(end for _, end, leaves in spans if not leaves)
        idle.append(end - began - busy)
        began = end
    return idle


def by_the_lanes(binary, trace, more):
    """What the lanes have exposed of each training step but the first two, the mean over ranks: each step with its own durations, as a
    message that takes longer once is exposed once."""
    micro = int(more[more.index("--accumulate") + 1]) if "--accumulate" in more else 1
    order = (["first"] + ["micro"] * (micro - 2) + ["last"] if micro > 1 else ["last"]) + ["update"]
    plans = {which: plan(binary, which, more) for which in set(order)}
    events = [e for e in json.load(open(trace))["traceEvents"] if e["ph"] == "X"]
    rows = {e["tid"]: e["args"]["name"] for e in json.load(open(trace))["traceEvents"] if e["name"] == "thread_name"}
    exposed = []
    for rank in sorted({e["pid"] for e in events}):
        queues = {lane: [e for e in events if e["pid"] == rank and rows[e["tid"]] == lane and not e["name"].startswith("waiting for ")]
                  for lane in ("compute", "comm")}
        steps = []
        # What the last update left under way is not in the trace.
        while queues["compute"] and len(queues["comm"]) >= sum(step[1] == "comm" for which in order for step in plans[which]):
            for which in order:
                seconds = []
                for name, lane, *_ in plans[which]:
                    event = queues[lane].pop(0)
                    if lane == "compute" and event["name"] != name:
                        sys.exit(f"{trace}: {event['name']} where the plan has {name}")
                    seconds.append(1e-6 * event["dur"])
                steps.append((which, seconds))
        idle = replay([(plans[which], seconds) for which, seconds in steps])
        exposed.append([sum(idle[at:at + len(order)]) for at in range(2 * len(order), len(idle), len(order))])
    return [statistics.mean(ranks) for ranks in zip(*exposed)]


def run(cases, case, steps, folder, binary):
    remote, more = cases[case]
    out = folder / case.replace(" ", "-").replace(",", "")
    trace = folder / f"{out.name}.json"
    shutil.rmtree(out, ignore_errors=True)
    words = [binary, *TRAIN, "--steps", str(steps), "--out", str(out), "--trace", str(trace), "--trace-steps", str(steps), "--force", *more]
    command = [str(ROOT / "scripts/hosts"), "mpirun", "-n", "2", *words] if remote else [*words, "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{case}: {done.stderr}")
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    steps = [line for line in lines if "loss" in line]
    return {"losses": [s["loss"] for s in steps], "steps": steps, "ranks": summary["ranks"], "exchanged": summary["exchanged"],
            "by_the_lanes": by_the_lanes(binary, trace, more)}


def together(rounds):
    """A case's rounds as one: the steps of all but the first two of each, which touch memory and connections for the first time."""
    lanes = [exposed for r in rounds for exposed in r["by_the_lanes"]]
    return {**rounds[0], "steps": [step for r in rounds for step in r["steps"][2:]], "by_the_lanes": statistics.median(lanes),
            "same_in_all": all(r["losses"] == rounds[0]["losses"] for r in rounds), "steps_of_one": len(rounds[0]["steps"])}


def reading(samples):
    lines = ["| | images/s | step | compute | communication | wait for ranks | both, exposed | by the lanes | hidden | sent per rank | losses |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
    samples = {case: together(rounds) for case, rounds in samples.items()}
    for case, sample in samples.items():
        middle = lambda key: statistics.median(s[key] for s in sample["steps"])
        # Of a whole message a rank of two sends half to reduce it and half to gather it; gathers count what a rank brings.
        sent = sum(e["bytes"] * e["times"] * (0.5 if e["kind"] == "reduce_scatter" else 1) for e in sample["exchanged"]) / sample["steps_of_one"]
        images = re.search(r", \d+ images", case)
        alike = "one process, 4 micro-steps" if "4 micro" in case else "one process" + (images[0] if images else "")
        same = "the same bits" if sample["same_in_all"] and sample["losses"] == samples.get(alike, sample)["losses"] else \
            f"within {max(abs(a - b) / b for a, b in zip(sample['losses'], samples[alike]['losses'])):.0e}"
        both = statistics.median(s["exchange_seconds"] + s["wait_seconds"] for s in sample["steps"])
        ms = lambda key: f"{1e3 * middle(key):.0f} ms"
        lines.append(f"| {case} | {middle('images_per_second'):.1f} | {ms('seconds')} | {ms('compute_seconds')} | {ms('exchange_seconds')} | "
                     f"{ms('wait_seconds')} | {1e3 * both:.0f} ms | {1e3 * sample['by_the_lanes']:.0f} ms | {ms('hidden_exchange_seconds')} | {sent / 1e6:.1f} MB | {same} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--delay", default="1ms", help="of the link, each way")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batches", default="", help="more numbers of images per rank, with commas")
    parser.add_argument("--stages", help="these alone, with commas")
    parser.add_argument("--vitesse", default=str(ROOT / "target/release/vitesse"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parent))
    from compare import machine
    hosts = subprocess.run([ROOT / "scripts/hosts", "up", "2", "1gbit", args.delay], capture_output=True, text=True)
    if hosts.returncode != 0:
        sys.exit(hosts.stderr)
    stages = (args.stages or "0,1,2,3").split(",")
    cases = with_batches(CASES, [batch for batch in args.batches.split(",") if batch], stages)
    if args.stages:
        kept = ["one process", *(f"two hosts{STAGES[stage]}" for stage in stages)]
        cases = {case: of for case, of in cases.items() if case in kept or "images" in case}
    samples = {case: [] for case in sorted(cases, key=lambda case: cases[case][0])}
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "hosts": hosts.stdout.strip(), "samples": samples}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for case in list(samples) * args.rounds:
                samples[case].append(run(cases, case, args.steps, Path(folder), args.vitesse))
                (args.out / "two-hosts.json").write_text(json.dumps(record, indent=1))
    finally:
        subprocess.run([ROOT / "scripts/hosts", "down"])
    text = reading(samples)
    print(text)
    head = (f"# Two hosts, ViT-Ti/4, 32 images and one thread per rank\n\n`{record['command']}` on {record['machine']}: {record['hosts']}. "
            f"Medians of {args.rounds * (args.steps - 2)} steps; two-hosts.json has them all.\n\n")
    (args.out / "two-hosts.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
