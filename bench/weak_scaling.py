"""Weak scaling on the CPU: vitesse's ranks against PyTorch DDP over gloo, in one run.

    python bench/weak_scaling.py --out bench/2026-11-15-xeon-2vcpu-ranks [--rounds 10] [--ranks 2]

Every rank has 64 images of 32 px a step (ViT-Ti/4) and one thread. Programs hold a model ready and are asked in turn for one
step each, over and over, so that a noisy machine is noisy for all: one rank, N ranks, PyTorch alone, PyTorch DDP on N
processes; and N programs of one rank at the same time that know nothing of each other, which is what the machine itself
allows. Raw samples go to OUT/weak-scaling.json after every round, the reading to OUT/weak-scaling.md.
"""
import argparse, json, os, socket, statistics, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import Program, machine

BATCH, PIXELS, CLASSES = 64, 32, 10


def serve_torch():
    """A training step for every line on standard input of the first rank, answering with seconds."""
    import torch, torchvision, torch.distributed as dist
    import torch.nn.functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    model = torchvision.models.VisionTransformer(PIXELS, 4, 12, 3, 192, 768, num_classes=CLASSES).train()
    if ranks > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.arange(BATCH) % CLASSES
    go = torch.zeros(1)
    while True:
        if rank == 0:
            go[0] = 1.0 if sys.stdin.readline() else 0.0
        if ranks > 1:
            dist.broadcast(go, 0)
        if go[0] == 0:
            break
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if rank == 0:
            print(time.perf_counter() - start, flush=True)


def vitesse(binary, ranks):
    return [binary, "bench", "--on-request", "--model", "vit-ti/4", "--image-size", str(PIXELS), "--batch-size", str(BATCH),
            "--classes", str(CLASSES), "--threads", "1", "--clip", "0", "--ranks", str(ranks)]


def ddp(ranks):
    """The first of the processes; the others wait for it."""
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--serve"]
    others = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(1, ranks)]
    return Program(command, {**env, "RANK": "0"}), others


class Several:
    """Programs that are asked at the same time; the slowest counts."""

    def __init__(self, programs):
        self.programs = programs

    def ask(self, line):
        for program in self.programs:
            program.process.stdin.write(line + "\n")
            program.process.stdin.flush()
        return max(float(program.process.stdout.readline()) for program in self.programs), None

    def close(self):
        for program in self.programs:
            program.close()


def reading(samples, ranks):
    rate = {key: [BATCH * (1 if key.endswith("1 rank") else ranks) / s for s in values] for key, values in samples.items()}
    middle = {key: statistics.median(values) for key, values in rate.items()}
    lines = ["| | images/s | rounds | efficiency |", "|---|---|---|---|"]
    for key, values in rate.items():
        one = middle["PyTorch, 1 rank" if key.startswith("PyTorch") else "vitesse, 1 rank"]
        efficiency = "" if key.endswith("1 rank") else f"{middle[key] / (ranks * one):.3f}"
        lines.append(f"| {key} | {middle[key]:.1f} | {min(values):.1f}–{max(values):.1f} | {efficiency} |")
    ours, theirs = f"vitesse, {ranks} ranks", f"PyTorch DDP (gloo), {ranks} ranks"
    apart = f"vitesse, {ranks} apart"
    per_round = [a / b for a, b in zip(rate[ours], rate[theirs])]
    lines.append("")
    lines.append(f"vitesse on {ranks} ranks does {middle[ours] / middle[theirs]:.2f} times PyTorch's images/s (rounds "
                 f"{min(per_round):.2f}–{max(per_round):.2f}), and {middle[ours] / middle[apart]:.3f} of what {ranks} programs "
                 "that exchange nothing do at the same time.")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vitesse", default="target/release/vitesse")
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    if args.serve:
        return serve_torch()
    import torch
    args.out.mkdir(parents=True, exist_ok=True)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    peers, others = ddp(args.ranks)
    programs = {
        "vitesse, 1 rank": Program(vitesse(args.vitesse, 1)),
        f"vitesse, {args.ranks} ranks": Program(vitesse(args.vitesse, args.ranks)),
        f"vitesse, {args.ranks} apart": Several([Program(vitesse(args.vitesse, 1)) for _ in range(args.ranks)]),
        "PyTorch, 1 rank": Program([sys.executable, __file__, "--serve"], one_thread),
        f"PyTorch DDP (gloo), {args.ranks} ranks": peers,
    }
    samples = {key: [] for key in programs}
    record = {"command": "python " + " ".join(sys.argv), "machine": machine(), "torch": torch.__version__,
              "unit": "seconds a step", "batch_per_rank": BATCH, "samples": samples}
    for number in range(args.rounds + 2):
        for key, program in programs.items():
            seconds, _ = program.ask("step")
            if number >= 2:
                samples[key].append(seconds)
        (args.out / "weak-scaling.json").write_text(json.dumps(record, indent=1))
    for program in programs.values():
        program.close()
    for other in others:
        other.wait()
    text = reading(samples, args.ranks)
    print(text)
    head = (f"# Weak scaling, ViT-Ti/4, {BATCH} images of {PIXELS} px and one thread a rank\n\n`{record['command']}` on {record['machine']}; "
            f"PyTorch {record['torch']}, fp32, AdamW. Medians of {args.rounds} alternating rounds; raw samples in weak-scaling.json.\n\n")
    (args.out / "weak-scaling.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
