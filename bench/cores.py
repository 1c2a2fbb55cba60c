"""All the cores of a CPU: threads of one rank against ranks, separate programs and PyTorch's threads, in one run.

    python bench/cores.py --out bench/2026-11-17-h200-cores [--case ti4,s16,swin] [--cores 2,4,8,16] [--rounds 5] [--seconds 90]
        [--vitesse before=PATH --vitesse after=PATH] [--before-at 16] [--torch-every 3]

Every core has the same number of images a step. Programs hold models ready for all numbers N of cores and are asked in turn for
one step each, over and over, in this order and the other way round, so that a noisy machine is noisy for all: one rank of N threads (of
each binary), N ranks of one thread and N programs that know nothing of each other (of the last binary), and PyTorch with N
threads. PyTorch and binaries other than the last take part in every third round (PyTorch as `--torch-every` says), separate programs in every fourth. Rounds end
after `--seconds` of a case, but no sooner than after `--rounds`. Raw samples, CPU time and peaks of resident memory go to
OUT/cores-CASE.json after every round, the reading to OUT/cores-CASE.md. `--before-at` names the numbers of cores at which
binaries other than the last run too; all of them, if it is not given.
"""
import argparse, json, os, statistics, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import Program, machine, torch_model as vit_model

CASES = {  # name: (vitesse model, pixels, images a core, classes)
    "ti4": ("vit-ti/4", 32, 32, 10),
    "s16": ("vit-s/16", 224, 4, 1000),
    "b16": ("vit-b/16", 224, 4, 1000),
    "swin": ("swinv2-ti/w8", 256, 2, 1000),
    "upernet": ("swinv2-ti/w8+upernet", 128, 2, 150),
}
APART_EVERY = 4  # rounds from one turn to the next


def torch_model(name, pixels, classes):
    if not name.startswith("swinv2-ti/"):
        return vit_model(name, pixels, classes)
    from torchvision.models import swin_transformer as swin

    # As torchvision's swin_v2_t, which can't be made without stochastic depth.
    return swin.SwinTransformer([4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [8, 8], stochastic_depth_prob=0.0, num_classes=classes,
                                block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)


def serve_torch(case):
    """A training step with so many threads for every "step THREADS" on standard input, answering with seconds."""
    import torch
    import torch.nn.functional as F

    name, pixels, images, classes = CASES[case]
    torch.manual_seed(0)
    model = torch_model(name, pixels, classes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for line in sys.stdin:
        cores = int(line.split()[1])
        torch.set_num_threads(cores)
        x, y = torch.randn(images * cores, 3, pixels, pixels), torch.arange(images * cores) % classes
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        print(time.perf_counter() - start, flush=True)


class Torch:
    """PyTorch with so many threads; one program for all numbers of threads."""

    def __init__(self, program, cores):
        self.program, self.cores = program, cores

    def ask(self, _):
        before = self.cpu_seconds()
        wall, _ = self.program.ask(f"step {self.cores}")
        return wall, self.cpu_seconds() - before

    def cpu_seconds(self):
        """With threads that have ended: fewer of them are asked for from one step to the next."""
        fields = Path(f"/proc/{self.program.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_resident(self):
        return self.program.peak_resident()


class Apart:
    """Programs that are asked at the same time."""

    def __init__(self, programs):
        self.programs = programs

    def ask(self, line):
        before = sum(program.cpu_seconds() for program in self.programs)
        for program in self.programs:
            program.process.stdin.write(line + "\n")
            program.process.stdin.flush()
        walls = [float(program.process.stdout.readline()) for program in self.programs]
        return walls, sum(program.cpu_seconds() for program in self.programs) - before

    def peak_resident(self):
        return sum(program.peak_resident() for program in self.programs)


def vitesse(binary, case, images, threads, ranks=1):
    name, pixels, _, classes = CASES[case]
    return Program([binary, "bench", "--on-request", "--model", name, "--image-size", str(pixels), "--batch-size", str(images),
                    "--classes", str(classes), "--clip", "0", "--threads", str(threads), "--ranks", str(ranks)])


class Programs:
    """All that take part in a case: for each number of cores, by name."""

    def __init__(self, args, case):
        images, most = CASES[case][2], max(args.cores)
        self.started = []
        start = lambda program: self.started.append(program) or program
        last = args.binaries[-1][1]
        torch = None
        if not args.no_torch:
            command = [sys.executable, __file__, "--serve", "--case", case]
            torch = start(Program(command, {**os.environ, "OMP_NUM_THREADS": str(most)}))
        apart = [] if args.threads_only else [start(vitesse(last, case, images, 1)) for _ in range(most)]
        self.of = {}
        for cores in args.cores:
            asked = args.before_at is None or cores in args.before_at
            binaries = args.binaries if asked else args.binaries[-1:]
            of = {f"{name}, threads": start(vitesse(path, case, images * cores, cores)) for name, path in binaries}
            if cores > 1 and not args.threads_only:
                of["ranks"] = start(vitesse(last, case, images, 1, cores))
                of["apart"] = Apart(apart[:cores])
            if torch:
                of["PyTorch, threads"] = Torch(torch, cores)
            self.of[str(cores)] = of
        self.last = f"{args.binaries[-1][0]}, threads"
        self.every = {"apart": APART_EVERY, "PyTorch, threads": args.torch_every, self.last: 1, "ranks": 1}

    def turns(self, number):
        """Who is asked in a round; all in round 0, which warms up."""
        for cores, of in self.of.items():
            for key in list(of) if number % 2 == 0 else list(of)[::-1]:
                every = self.every.get(key, 3)
                if number == 0 or number % every == 1 % every:
                    yield cores, key, of[key]

    def close(self):
        for program in self.started:
            program.close()


def rates(images, cores, samples):
    """Images/s of every round by its number: the sum, and for separate programs also N times the slowest."""
    found = {}
    for key, rounds in samples.items():
        if key == "apart":
            found["apart, sum"] = {n: sum(images / s for s in each) for n, each in rounds.items()}
            found["apart, N × slowest"] = {n: images * cores / max(each) for n, each in rounds.items()}
        else:
            found[key] = {n: images * cores / s for n, s in rounds.items()}
    return found


def reading(case, samples, ours):
    of = {n: rates(CASES[case][2], int(n), of) for n, of in samples.items()}
    keys = list(dict.fromkeys(key for rates in of.values() for key in rates))
    spread = lambda x: f"{statistics.median(x):.{2 if max(x) < 10 else 1}f} ({min(x):.2f}–{max(x):.2f})" if x else "–"
    cell = lambda n, key: spread(list(of[n].get(key, {}).values()))
    lines = ["| images/s | " + " | ".join(of) + " |", "|---" * (len(of) + 1) + "|"]
    lines += [f"| {key} | " + " | ".join(cell(n, key) for n in of) + " |" for key in keys]
    for key in (key for key in keys if key != ours):
        # Round by round, since a shared machine is another one every minute.
        ratios = lambda n: [of[n][ours][number] / rate for number, rate in of[n].get(key, {}).items()]
        lines.append(f"| {ours} ÷ {key} | " + " | ".join(spread(ratios(n)) for n in of) + " |")
    return "\n".join(lines)


def measure(args, case):
    programs = Programs(args, case)
    samples, cpu, resident = ({n: {key: {} for key in of} for n, of in programs.of.items()} for _ in range(3))
    record = {"command": "python " + " ".join(sys.argv), "machine": machine(), "unit": "seconds a step, by number of round",
              "images_per_core": CASES[case][2], "samples": samples, "cpu_seconds": cpu, "peak_resident_bytes": resident}
    number, end = 0, None
    while number <= args.rounds or time.monotonic() < end:
        for cores, key, program in programs.turns(number):
            wall, ran = program.ask("step")
            resident[cores][key] = program.peak_resident()
            if number > 0:
                samples[cores][key][number], cpu[cores][key][number] = wall, ran
        if number == 0:
            end = time.monotonic() + args.seconds
        number += 1
        (args.out / f"cores-{case}.json").write_text(json.dumps(record))
    programs.close()
    text = reading(case, samples, programs.last)
    name, pixels, images, _ = CASES[case]
    head = f"# {name} at {pixels} px, {images} images a core, fp32\n\n"
    print(head + text, flush=True)
    how = (f"`{record['command']}` on {record['machine']}. Medians of {number - 1} alternating rounds (some programs take part in every "
           f"third or fourth), with their range; ratios are of the same round; raw samples in cores-{case}.json.\n\n")
    (args.out / f"cores-{case}.md").write_text(head + how + text + "\n")


def main():
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", default="ti4")
    parser.add_argument("--cores", default="1,2,4,8,16", type=numbers)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--vitesse", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--before-at", type=numbers)
    parser.add_argument("--threads-only", action="store_true")
    parser.add_argument("--torch-every", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    if args.serve:
        return serve_torch(args.case)
    args.binaries = [tuple(each.split("=", 1)) for each in args.vitesse] or [("vitesse", "target/release/vitesse")]
    args.out.mkdir(parents=True, exist_ok=True)
    for case in args.case.split(","):
        measure(args, case)


if __name__ == "__main__":
    main()
