"""Training over two hosts with a slow link between them: what communication costs, and what overlap hides.

    python3 bench/two_hosts.py --out bench/2026-11-15-xeon-2vcpu-ranks [--steps 12]

Makes two hosts of network namespaces (scripts/hosts: 1 Gbit/s, 1 ms each way; needs root), trains ViT-Ti/4 with 32 images per rank over
them under mpirun, and removes them. Compares with two ranks in one process: the losses must be the same to the bit. Build with
`cargo build --release --features mpi`.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "train --model vit-ti/4 --threads 1 --train-samples 4000 --test-samples 32 --seed 1 --json".split()
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


def run(case, steps, folder, binary):
    remote, more = CASES[case]
    out = folder / case.replace(" ", "-").replace(",", "")
    words = [binary, *TRAIN, "--steps", str(steps), "--out", str(out), *more]
    command = [str(ROOT / "scripts/hosts"), "mpirun", "-n", "2", *words] if remote else [*words, "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{case}: {done.stderr}")
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
    steps = [line for line in lines if "loss" in line]
    return {"losses": [s["loss"] for s in steps], "steps": steps, "ranks": summary["ranks"], "exchanged": summary["exchanged"]}


def reading(samples):
    lines = ["| | images/s | step | compute | communication exposed | hidden | wait | sent per rank | losses |", "|---|---|---|---|---|---|---|---|---|"]
    for case, sample in samples.items():
        # The first steps touch memory and connections for the first time.
        middle = lambda key: statistics.median(s[key] for s in sample["steps"][2:])
        # Of a whole message a rank of two sends half to reduce it and half to gather it; gathers count what a rank brings.
        sent = sum(e["bytes"] * e["times"] * (0.5 if e["kind"] == "reduce_scatter" else 1) for e in sample["exchanged"]) / len(sample["steps"])
        alike = "one process, 4 micro-steps" if "4 micro" in case else "one process"
        same = "the same bits" if sample["losses"] == samples.get(alike, sample)["losses"] else \
            f"within {max(abs(a - b) / b for a, b in zip(sample['losses'], samples[alike]['losses'])):.0e}"
        ms = lambda key: f"{1e3 * middle(key):.0f} ms"
        lines.append(f"| {case} | {middle('images_per_second'):.1f} | {ms('seconds')} | {ms('compute_seconds')} | {ms('exchange_seconds')} | "
                     f"{ms('hidden_exchange_seconds')} | {ms('wait_seconds')} | {sent / 1e6:.1f} MB | {same} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--vitesse", default=str(ROOT / "target/release/vitesse"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parent))
    from compare import machine
    hosts = subprocess.run([ROOT / "scripts/hosts", "up", "2", "1gbit", "1ms"], capture_output=True, text=True)
    if hosts.returncode != 0:
        sys.exit(hosts.stderr)
    samples = {}
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "hosts": hosts.stdout.strip(), "samples": samples}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for case in sorted(CASES, key=lambda case: CASES[case][0]):
                samples[case] = run(case, args.steps, Path(folder), args.vitesse)
                (args.out / "two-hosts.json").write_text(json.dumps(record, indent=1))
    finally:
        subprocess.run([ROOT / "scripts/hosts", "down"])
    text = reading(samples)
    print(text)
    head = (f"# Two hosts, ViT-Ti/4, 32 images and one thread per rank\n\n`{record['command']}` on {record['machine']}: {record['hosts']}. "
            f"Medians of {args.steps - 2} steps; two-hosts.json has them all.\n\n")
    (args.out / "two-hosts.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
