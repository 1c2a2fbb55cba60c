"""All the cores of a CPU: threads of one rank against ranks, separate programs and PyTorch's threads, in one run.

    python bench/cores.py --out bench/2026-11-16-h200-cores [--case ti4] [--cores 1,2,4,8,16] [--rounds 5]
        [--vitesse before=PATH --vitesse after=PATH] [--before-at 16]

Every core has the same number of images a step. For each number N of cores, programs hold a model ready and are asked in turn
for one step each, over and over, so that a noisy machine is noisy for all: one rank of N threads (of each binary), N ranks of
one thread and N programs that know nothing of each other (of the last binary), and PyTorch with N threads. Raw samples and peaks
of resident memory go to OUT/cores-CASE.json after every round, the reading to OUT/cores-CASE.md. `--before-at` names the numbers of
cores at which binaries other than the last run too; all of them, if it is not given.
"""
import argparse, json, os, statistics, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import Program, machine, torch_model as vit_model

CASES = {  # name: (vitesse model, pixels, images a core, classes)
    "ti4": ("vit-ti/4", 32, 32, 10),
    "s16": ("vit-s/16", 224, 4, 1000),
    "b16": ("vit-b/16", 224, 4, 1000),
    "swin": ("swinv2-ti/w8", 256, 4, 1000),
}


def torch_model(name, pixels, classes):
    if not name.startswith("swinv2-ti/"):
        return vit_model(name, pixels, classes)
    from torchvision.models import swin_transformer as swin

    # As torchvision's swin_v2_t, which can't be made without stochastic depth.
    return swin.SwinTransformer([4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [8, 8], stochastic_depth_prob=0.0, num_classes=classes,
                                block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)


def serve_torch(case, cores):
    """A training step for every line on standard input, answering with seconds."""
    import torch
    import torch.nn.functional as F

    name, pixels, images, classes = CASES[case]
    torch.set_num_threads(cores)
    torch.manual_seed(0)
    model = torch_model(name, pixels, classes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(images * cores, 3, pixels, pixels), torch.arange(images * cores) % classes
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        print(time.perf_counter() - start, flush=True)


class Apart:
    """Programs that are asked at the same time."""

    def __init__(self, programs):
        self.programs = programs

    def ask(self, line):
        for program in self.programs:
            program.process.stdin.write(line + "\n")
            program.process.stdin.flush()
        return [float(program.process.stdout.readline()) for program in self.programs], None

    def peak_resident(self):
        return sum(program.peak_resident() for program in self.programs)

    def close(self):
        for program in self.programs:
            program.close()


def vitesse(binary, case, images, threads, ranks=1):
    name, pixels, _, classes = CASES[case]
    return Program([binary, "bench", "--on-request", "--model", name, "--image-size", str(pixels), "--batch-size", str(images),
                    "--classes", str(classes), "--clip", "0", "--threads", str(threads), "--ranks", str(ranks)])


def programs(args, cores):
    images = CASES[args.case][2]
    binaries = args.binaries if args.before_at is None or cores in args.before_at else args.binaries[-1:]
    found = {f"{name}, threads": vitesse(path, args.case, images * cores, cores) for name, path in binaries}
    last = args.binaries[-1][1]
    if cores > 1 and not args.threads_only:
        found["ranks"] = vitesse(last, args.case, images, 1, cores)
        found["apart"] = Apart([vitesse(last, args.case, images, 1) for _ in range(cores)])
    if not args.no_torch:
        command = [sys.executable, __file__, "--serve", "--case", args.case, "--cores", str(cores)]
        found["PyTorch, threads"] = Program(command, {**os.environ, "OMP_NUM_THREADS": str(cores)})
    return found


def rates(images, cores, samples):
    """Images/s of every round: the sum, and for separate programs also N times the slowest."""
    found = {}
    for key, rounds in samples.items():
        if key == "apart":
            found["apart, sum"] = [sum(images / s for s in each) for each in rounds]
            found["apart, N × slowest"] = [images * cores / max(each) for each in rounds]
        else:
            found[key] = [images * cores / s for s in rounds]
    return found


def reading(case, samples, last):
    middle = {n: {key: statistics.median(x) for key, x in rates(CASES[case][2], int(n), of).items()} for n, of in samples.items()}
    keys = list(dict.fromkeys(key for of in middle.values() for key in of))
    cell = lambda of, key: f"{of[key]:.1f}" if key in of else "–"
    lines = ["| images/s | " + " | ".join(middle) + " |", "|---" * (len(middle) + 1) + "|"]
    lines += [f"| {key} | " + " | ".join(cell(of, key) for of in middle.values()) + " |" for key in keys]
    ours = f"{last}, threads"
    for key in (key for key in keys if key != ours):
        # Round by round, since a shared machine is another one every minute.
        share = lambda n: rates(CASES[case][2], int(n), samples[n])
        ratios = {n: [a / b for a, b in zip(share(n)[ours], share(n)[key])] for n in samples if key in middle[n]}
        cells = [f"{statistics.median(ratios[n]):.2f} ({min(ratios[n]):.2f}–{max(ratios[n]):.2f})" if n in ratios else "–" for n in samples]
        lines.append(f"| {ours} ÷ {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", default="ti4", choices=CASES)
    parser.add_argument("--cores", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vitesse", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--before-at", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--threads-only", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    if args.serve:
        return serve_torch(args.case, int(args.cores))
    args.binaries = [tuple(each.split("=", 1)) for each in args.vitesse] or [("vitesse", "target/release/vitesse")]
    args.out.mkdir(parents=True, exist_ok=True)
    samples, resident = {}, {}
    record = {"command": "python " + " ".join(sys.argv), "machine": machine(), "unit": "seconds a step",
              "images_per_core": CASES[args.case][2], "samples": samples, "peak_resident_bytes": resident}
    for cores in args.cores.split(","):
        all_programs = programs(args, int(cores))
        samples[cores] = {key: [] for key in all_programs}
        for number in range(args.rounds + 1):
            for key, program in all_programs.items():
                seconds, _ = program.ask("step")
                if number > 0:
                    samples[cores][key].append(seconds)
            resident[cores] = {key: program.peak_resident() for key, program in all_programs.items()}
            (args.out / f"cores-{args.case}.json").write_text(json.dumps(record))
        for program in all_programs.values():
            program.close()
    text = reading(args.case, samples, args.binaries[-1][0])
    print(text)
    name, pixels, images, _ = CASES[args.case]
    head = (f"# {name} at {pixels} px, {images} images a core, fp32\n\n`{record['command']}` on {record['machine']}. Medians of {args.rounds} "
            f"alternating rounds; ratios are medians of rounds, with their range; raw samples in cores-{args.case}.json.\n\n")
    (args.out / f"cores-{args.case}.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
