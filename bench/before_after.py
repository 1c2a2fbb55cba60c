#!/usr/bin/env python3
"""Two vitesse binaries on one GPU in turn: are steps as fast as before, and memory as small?

    python bench/before_after.py BEFORE AFTER --out FILE.json [--rounds 4] [--seconds 2] [--only WORDS]

Each case is `vitesse bench --device cuda` of either binary, one after the other, over and over, every second round the other way round. FILE.json has every
report's rate, first step and bytes; what is printed is the ratio of the rates, by round and its median, and that of the bytes. Only Python's
standard library is needed.
"""
import argparse, json, statistics, subprocess
from pathlib import Path

CASES = {
    "vit-b/16 64": "--model vit-b/16 --image-size 224 --batch-size 64",
    "vit-b/16 256": "--model vit-b/16 --image-size 224 --batch-size 256",
    "vit-ti/4 128": "--model vit-ti/4 --image-size 32 --batch-size 128",
    "swinv2-b upernet 8": "--model swinv2-b/w8+upernet --image-size 512 --batch-size 8",
}


def report(binary, flags, seconds):
    command = [binary, "bench", "--device", "cuda", *flags.split(), "--seconds", str(seconds), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--only", default="", help="words, comma-separated: run only cases with one of them in their name")
    options = parser.parse_args()
    words = [word for word in options.only.split(",") if word]
    rows = []
    for case, flags in CASES.items():
        if words and not any(word in case for word in words):
            continue
        ratios, bytes_of = [], {}
        for number in range(options.rounds):
            rates = {}
            for which in ("before", "after") if number % 2 == 0 else ("after", "before"):
                seen = report(getattr(options, which), flags, options.seconds)
                rates[which] = seen["images_per_second"]
                memory = seen["memory_bytes"]
                bytes_of[which] = sum(size for name, size in memory.items() if name != "constant") if isinstance(memory, dict) else memory
                rows.append({"case": case, "which": which, "round": number} | {
                    name: seen.get(name) for name in ("images_per_second", "steady_images_per_second", "first_step_seconds", "memory_bytes")})
                Path(options.out).write_text(json.dumps(rows, indent=0) + "\n")
            ratios.append(rates["after"] / rates["before"])
        print(f"{case:20} {rates['before']:10.1f} → {rates['after']:10.1f}  median {statistics.median(ratios):.4f} "
              f"({min(ratios):.4f}–{max(ratios):.4f}), memory {bytes_of['after'] / bytes_of['before'] - 1:+.3%}", flush=True)


if __name__ == "__main__":
    main()
