#!/usr/bin/env python3
"""What stages of ZeRO cost against plain data parallelism, on two CPU ranks of one thread each.

    python3 bench/zero_cost.py --out bench/2026-11-19-epyc-zero [--case ti4,ti4x4] [--rounds 60] [--seconds 240] [--vitesse target/release/vitesse]

One program for each stage holds the model ready (`vitesse bench --ranks 2 --zero S --on-request`). They are asked for a step in turn, in an
order that turns by one place and around with every round, so that a noisy machine is noisy for all. A round's ratio is a stage's seconds over
stage 0's of the same round; printed are medians with their 95% intervals (ranks of the sorted ratios by the binomial distribution). CPU time, which
says what waiting for a core hides, is compared alike. Raw samples go to OUT/zero-cost.json after every round, the reading to OUT/zero-cost.md.
"""
import argparse, json, math, statistics, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import Program, machine

CASES = {  # name: flags
    "ti4": "--model vit-ti/4 --image-size 32 --batch-size 32 --classes 10",
    "ti4x4": "--model vit-ti/4 --image-size 32 --batch-size 8 --accumulate 4 --classes 10",
    "s16": "--model vit-s/16 --image-size 224 --batch-size 4 --classes 1000",
    "s16x4": "--model vit-s/16 --image-size 224 --batch-size 2 --accumulate 4 --classes 1000",
}
STAGES = ["0", "1", "2", "3"]


def interval(ratios):
    """Median and a 95% interval that assumes nothing about how ratios are spread."""
    ordered, n = sorted(ratios), len(ratios)
    below, k = 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2**n
        if below > 0.025:
            break
        k += 1
    low = max(k - 1, 0)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def reading(record):
    lines = ["| | stage | rounds | step of stage 0 | time ÷ stage 0's (95%) | CPU time ÷ stage 0's (95%) |", "|---|---|---|---|---|---|"]
    for case, rounds in record["samples"].items():
        base = statistics.median(r["0"][0] for r in rounds)
        for stage in STAGES[1:]:
            wall, cpu = (interval([r[stage][at] / r["0"][at] for r in rounds]) for at in (0, 1))
            show = lambda x: f"**{x[0]:.3f}** ({x[1]:.3f}–{x[2]:.3f})"
            lines.append(f"| {case} | {stage} | {len(rounds)} | {1e3 * base:.0f} ms | {show(wall)} | {show(cpu)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", default="ti4,ti4x4")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--vitesse", default="target/release/vitesse")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "cases": CASES, "samples": {}}
    for case in args.case.split(","):
        flags = [*CASES[case].split(), "--ranks", "2", "--threads", "1"]
        programs = {s: Program([args.vitesse, "bench", "--on-request", *flags, "--zero", s]) for s in STAGES}
        began, rounds = time.monotonic(), []
        for number in range(-2, args.rounds):
            order = STAGES[number % 4 :] + STAGES[: number % 4]
            times = {s: programs[s].ask("step") for s in (order if number % 2 == 0 else order[::-1])}
            if number >= 0:
                rounds.append(times)
                record["samples"][case] = rounds
                (args.out / "zero-cost.json").write_text(json.dumps(record))
            if time.monotonic() - began > args.seconds and len(rounds) >= 15:
                break
        for program in programs.values():
            program.close()
    text = reading(record)
    print(text)
    (args.out / "zero-cost.md").write_text(f"# Stages of ZeRO on two CPU ranks\n\n`{record['command']}` on {record['machine']}.\n\n{text}\n")


if __name__ == "__main__":
    main()
