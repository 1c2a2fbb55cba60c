"""Four ranks, one of them at half speed: with equal shares, and with --balance.

    python3 bench/straggler.py --out bench/2026-11-15-xeon-2vcpu-ranks [--steps 60]

Four ranks share two cores, so every rank is slowed down (VITESSE_FAULT=slow) to what fits beside the others, and one of them twice as
much. A perfect division would give 3.5 / 4 of the rate of four equal ranks. The three runs are made in turn, several times.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import machine

TRAIN = "train --model vit-nano/4 --batch-size 32 --threads 1 --ranks 4 --train-samples 20000 --test-samples 32 --seed 1".split()
EQUAL, SLOW = "slow:rank=all:factor=3", "slow:rank=all:factor=3,slow:rank=2:factor=6"
CASES = {"four equal ranks": (EQUAL, []), "one at half speed": (SLOW, []), "one at half speed, --balance": (SLOW, ["--balance"])}


def run(case, steps, binary):
    fault, more = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        words = [binary, *TRAIN, "--steps", str(steps), "--out", f"{folder}/run", *more]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "VITESSE_FAULT": fault})
        if done.returncode != 0:
            sys.exit(done.stderr)
        lines = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    said = [line for line in done.stdout.splitlines() if "is slow" in line or "divided" in line]
    return {"seconds": [line["seconds"] for line in lines if "loss" in line], "said": said}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vitesse", default="target/release/vitesse")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    samples = {case: [] for case in CASES}
    for _ in range(args.rounds):
        for case in CASES:
            samples[case].append(run(case, args.steps, args.vitesse))
    # The first half is for noticing and dividing.
    rate = {case: statistics.median(128 / s for one in runs for s in one["seconds"][args.steps // 2:]) for case, runs in samples.items()}
    perfect = rate["four equal ranks"] * 3.5 / 4
    lines = ["| | images/s | of a perfect division |", "|---|---|---|"]
    lines += [f"| {case} | {value:.0f} | {'' if case == 'four equal ranks' else f'{value / perfect:.2f}'} |" for case, value in rate.items()]
    said = [line for case in CASES for line in samples[case][0]["said"]]
    text = "\n".join(lines) + "\n\nWhat the runs said of it:\n\n" + "\n".join(f"    {line}" for line in said)
    print(text)
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "unit": "seconds a step of 128 images", "samples": samples}
    (args.out / "straggler.json").write_text(json.dumps(record, indent=1))
    head = f"# A straggler among four ranks\n\n`{record['command']}` on {record['machine']}; vit-nano/4, 32 images a rank.\n\n"
    (args.out / "straggler.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
