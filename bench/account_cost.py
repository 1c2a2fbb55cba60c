"""What the account of time costs: steps with and without it, alternating in one process.

    python3 bench/account_cost.py --out bench/2026-11-15-xeon-2vcpu-ranks [--rounds 150]

vit-nano/4 with 16 images a rank on two ranks: small steps, on which measuring weighs most. The program is asked in turn for a step with
the account and one without; the order within a pair alternates, so that drift of the machine cancels.
"""
import argparse, json, statistics, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import Program, machine


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--vitesse", default="target/release/vitesse")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    program = Program([args.vitesse, "bench", "--on-request", "--model", "vit-nano/4", "--batch-size", "16", "--threads", "1", "--ranks", "2"])
    samples = {"step": [], "untimed": []}
    for number in range(args.rounds + 5):
        order = ("step", "untimed") if number % 2 else ("untimed", "step")
        pair = {key: program.ask(key)[0] for key in order}
        if number >= 5:
            for key, seconds in pair.items():
                samples[key].append(seconds)
    program.close()
    middle = {key: statistics.median(values) for key, values in samples.items()}
    pairs = sorted(a / b - 1 for a, b in zip(samples["step"], samples["untimed"]))
    quartiles = pairs[len(pairs) // 4], pairs[3 * len(pairs) // 4]
    text = (f"A step takes {1e3 * middle['step']:.3f} ms with the account and {1e3 * middle['untimed']:.3f} ms without (medians of {args.rounds} "
            f"alternating pairs): {100 * (middle['step'] / middle['untimed'] - 1):+.2f}%. The median pair differs by "
            f"{100 * statistics.median(pairs):+.2f}%, half of the pairs by {100 * quartiles[0]:+.2f}% to {100 * quartiles[1]:+.2f}%.")
    print(text)
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "unit": "seconds a step", "samples": samples}
    (args.out / "account-cost.json").write_text(json.dumps(record, indent=1))
    head = f"# What the account of time costs\n\n`{record['command']}` on {record['machine']}; vit-nano/4, 16 images a rank, two ranks.\n\n"
    (args.out / "account-cost.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
