"""vitesse against PyTorch on the same training step, in one run.

    python bench/compare.py --out bench/2026-11-15-xeon2 [--rounds 10] [--cases ti4-1,ti4-2,b16-1,b16-2]

For every case it starts three programs that hold a model ready (`vitesse bench --on-request`, PyTorch eager, PyTorch
with torch.compile) and asks them in turn for one step each, over and over, so that a noisy machine is noisy for all.
vitesse is also asked for the step's matrix products alone, in a turn of their own. Raw samples go to OUT/samples.json after every round; the
reading goes to OUT/README.md. Needs torch, torchvision and timm; vitesse is built with `cargo build --release`.
"""
import argparse, json, os, platform, statistics, subprocess, sys, time
from pathlib import Path

CASES = {  # name: (vitesse model, pixels, batch, classes, threads)
    "ti4-1": ("vit-ti/4", 32, 64, 10, 1),
    "ti4-2": ("vit-ti/4", 32, 64, 10, 2),
    "b16-1": ("vit-b/16", 224, 4, 1000, 1),
    "b16-2": ("vit-b/16", 224, 4, 1000, 2),
    "swin-1": ("swinv2-ti/w8", 256, 4, 1000, 1),
    "swin-2": ("swinv2-ti/w8", 256, 4, 1000, 2),
}
SIZES = {"vit-ti": (192, 12, 3, 768), "vit-s": (384, 12, 6, 1536), "vit-b": (768, 12, 12, 3072)}


def torch_model(name, pixels, classes):
    size, patch = name.split("/")
    if size == "swinv2-ti":
        from timm.models.swin_transformer_v2 import SwinTransformerV2

        window = int(patch.removeprefix("w"))
        return SwinTransformerV2(pixels, window_size=window, num_classes=classes, drop_path_rate=0.0)
    import torchvision

    width, depth, heads, mlp = SIZES[size]
    return torchvision.models.VisionTransformer(pixels, int(patch), depth, heads, width, mlp, num_classes=classes)


def serve_torch(case, mode):
    """The peer: one training step for every line on standard input, answering with seconds."""
    import torch
    import torch.nn.functional as F

    name, pixels, batch, classes, threads = CASES[case]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = torch_model(name, pixels, classes)
    model.train()
    step_model = torch.compile(model) if mode == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(batch, 3, pixels, pixels), torch.arange(batch) % classes
    for line in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(step_model(x), y).backward()
        optimizer.step()
        print(time.perf_counter() - start, flush=True)


class Program:
    """A program that answers each line with seconds."""

    def __init__(self, command, env=None):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, line):
        """Seconds by the program's clock, and seconds that its threads ran."""
        before = self.cpu_seconds()
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        wall = float(self.process.stdout.readline())
        return wall, self.cpu_seconds() - before

    def cpu_seconds(self):
        """What all threads ran so far. On a machine that others use, it says what waiting for a core hides."""
        total = 0
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                total += int((thread / "schedstat").read_text().split()[0])
            except FileNotFoundError:  # it has ended
                continue
        return total / 1e9

    def peak_resident(self):
        """Largest resident size so far, in bytes."""
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def vitesse_command(binary, case):
    name, pixels, batch, classes, threads = CASES[case]
    # No clipping, as in the peer.
    return [binary, "bench", "--on-request", "--model", name, "--image-size", str(pixels), "--batch-size", str(batch),
            "--classes", str(classes), "--threads", str(threads), "--clip", "0"]


def measure(case, binary, rounds, modes, save):
    env = {**os.environ, "OMP_NUM_THREADS": str(CASES[case][4])}
    programs = {"vitesse": Program(vitesse_command(binary, case))}
    for mode in modes:
        programs[mode] = Program([sys.executable, __file__, "--serve", case, mode], env)
    samples = {key: [] for key in [*programs, "products"]}
    samples["cpu"] = {key: [] for key in programs}
    for warmup in range(2):
        for program in programs.values():
            program.ask("step")
    # vitesse is asked twice a round, and never twice in a row: whoever goes finds the caches as another program left them.
    for number in range(rounds):
        for place, (key, program) in enumerate(programs.items()):
            wall, cpu = program.ask("step")
            samples[key].append(wall)
            samples["cpu"][key].append(cpu)
            if place == 1:
                samples["products"].append(programs["vitesse"].ask("products")[0])
        save(case, samples)
    samples["resident"] = {key: program.peak_resident() for key, program in programs.items()}
    for program in programs.values():
        program.close()
    save(case, samples)
    return samples


def reading(all_samples):
    lines = ["| case | vitesse | PyTorch eager | PyTorch compile | ratio to the better | ratio of CPU time | products alone | share of their rate | resident memory (vitesse / eager) |",
             "|---|---|---|---|---|---|---|---|---|"]
    for case, samples in all_samples.items():
        name, pixels, batch, classes, threads = CASES[case]
        middle = {k: statistics.median(v) for k, v in samples.items() if isinstance(v, list) and v}
        peers = [middle[m] for m in ("eager", "compile") if m in middle]
        rounds = [min(p) / v for v, *p in zip(samples["vitesse"], *[samples[m] for m in ("eager", "compile") if m in samples])]
        show = lambda key: f"{1e3 * middle[key]:.0f} ms" if key in middle else "–"
        resident, cpu = samples.get("resident", {}), {k: statistics.median(v) for k, v in samples.get("cpu", {}).items() if v}
        of_cpu = f"{min(v for k, v in cpu.items() if k != 'vitesse') / cpu['vitesse']:.2f}×" if len(cpu) > 1 else "–"
        memory = f"{resident['vitesse'] / 2**20:.0f} / {resident['eager'] / 2**20:.0f} MiB" if "eager" in resident else "–"
        lines.append(f"| {name} {pixels} px, batch {batch}, {threads} thread{'s' * (threads > 1)} | {show('vitesse')} | {show('eager')} | "
                     f"{show('compile')} | {min(peers) / middle['vitesse']:.2f}× (rounds {min(rounds):.2f}–{max(rounds):.2f}) | {of_cpu} | "
                     f"{show('products')} | {100 * middle['products'] / middle['vitesse']:.1f}% | {memory} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--vitesse", default="target/release/vitesse")
    parser.add_argument("--serve", nargs=2)
    args = parser.parse_args()
    if args.serve:
        return serve_torch(*args.serve)
    import torch, torchvision
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"command": "python " + " ".join(sys.argv), "machine": machine(), "torch": torch.__version__,
              "torchvision": torchvision.__version__, "unit": "seconds a step", "samples": {}}

    def save(case, samples):
        record["samples"][case] = samples
        (args.out / "samples.json").write_text(json.dumps(record, indent=1))

    for case in args.cases.split(","):
        measure(case, args.vitesse, args.rounds, args.modes.split(","), save)
        print(reading(record["samples"]).splitlines()[-1], flush=True)
    text = f"# {args.out.name}\n\n`{record['command']}` on {record['machine']}; PyTorch {record['torch']}, fp32, AdamW. Medians of {args.rounds} alternating rounds; raw samples in samples.json.\n\n"
    (args.out / "README.md").write_text(text + reading(record["samples"]) + "\n")


def machine():
    model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} × {model}"


if __name__ == "__main__":
    main()
