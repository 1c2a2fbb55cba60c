"""A small ViT trained on CIFAR-10 on one GPU by vitesse and by PyTorch, the same recipe, several seeds each.

usage: cifar_gpu.py VITESSE CIFAR_DIR [SEEDS] [EPOCHS] [OUT.json]
CIFAR_DIR holds cifar-10-batches-bin. ViT-Ti/4 at 32 px, batch 256, AdamW 1e-3 with decay 0.05 on matrices, 5% warm-up, cosine to 0,
random crops after padding by 4, mirror images, gradient norm 1, bf16 with fp32 parameters. PyTorch: torch.compile, autocast, fused
AdamW, the whole step in a CUDA graph, the set and its augmentation on the GPU. Prints accuracies, the 95% interval of their difference, and the ratio of times.
"""
import json
import math
import subprocess
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import torchvision

BATCH, LR, DECAY, WARMUP = 256, 1e-3, 0.05, 0.05


def load(folder):
    def read(names):
        raw = np.concatenate([np.fromfile(f"{folder}/cifar-10-batches-bin/{n}.bin", np.uint8) for n in names]).reshape(-1, 3073)
        return torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32).copy()).cuda(), torch.from_numpy(raw[:, 0].astype(np.int64)).cuda()
    return read([f"data_batch_{i}" for i in range(1, 6)]), read(["test_batch"])


def augment(x, generator):
    n = x.shape[0]
    padded = F.pad(x, (4, 4, 4, 4))
    dy, dx = (torch.randint(0, 9, (n,), device="cuda", generator=generator) for _ in range(2))
    rows = dy[:, None] + torch.arange(32, device="cuda")
    cols = dx[:, None] + torch.arange(32, device="cuda")
    flip = torch.rand(n, device="cuda", generator=generator) < 0.5
    cols = torch.where(flip[:, None], cols.flip(1), cols)
    i = torch.arange(n, device="cuda")
    return padded[i[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


def normal(x):
    return x.float().div_(127.5).sub_(1.0)


def fresh():
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=4, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=10)


class PyTorch:
    """Compiled once, with the step of a whole batch as one CUDA graph; the smaller last batch of an epoch runs as it is."""

    def __init__(self, sets):
        self.sets = sets
        self.net = fresh().cuda().train()
        self.model = torch.compile(self.net)
        plain = lambda name, p: p.ndim <= 1 or "class_token" in name or "pos_embedding" in name
        named = list(self.net.named_parameters())
        self.rate = torch.tensor(0.0, device="cuda")
        self.optimizer = torch.optim.AdamW(
            [dict(params=[p for n, p in named if not plain(n, p)], weight_decay=DECAY),
             dict(params=[p for n, p in named if plain(n, p)], weight_decay=0.0)], lr=self.rate, fused=True, capturable=True)
        self.x = torch.zeros(BATCH, 3, 32, 32, device="cuda")
        self.y = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
        began = time.time()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(self.model, self.x, self.y)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(self.model, self.x, self.y)
        torch.cuda.synchronize()
        self.compile_seconds = time.time() - began

    def step(self, model, x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def reset(self, seed):
        torch.manual_seed(seed)
        self.net.load_state_dict(fresh().state_dict())
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def train(self, seed, epochs):
        (images, labels), (test_images, test_labels) = self.sets
        self.reset(seed)
        self.net.train()
        generator = torch.Generator("cuda").manual_seed(seed)
        steps = math.ceil(len(images) / BATCH) * epochs
        warm = max(1, round(WARMUP * steps))
        rate = lambda s: LR * ((s + 1) / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / max(1, steps - warm))))
        torch.cuda.synchronize()
        began, s = time.time(), 0
        for _ in range(epochs):
            order = torch.randperm(len(images), device="cuda", generator=generator)
            for chunk in order.split(BATCH):
                self.rate.fill_(rate(s))
                x, y = normal(augment(images[chunk], generator)), labels[chunk]
                if len(chunk) == BATCH:
                    self.x.copy_(x)
                    self.y.copy_(y)
                    self.graph.replay()
                else:
                    self.step(self.net, x, y)
                s += 1
        torch.cuda.synchronize()
        seconds = time.time() - began
        self.net.eval()
        hits = 0
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for x, y in zip(test_images.split(1000), test_labels.split(1000)):
                hits += (self.net(normal(x)).argmax(1) == y).sum().item()
        return dict(seed=seed, top1=hits / len(test_labels), training_seconds=seconds)


def vitesse(program, folder, seed, epochs):
    began = time.time()
    command = [program, "train", "--device", "cuda", "--model", "vit-ti/4", "--data", f"cifar10:{folder}", "--batch-size", str(BATCH),
               "--epochs", str(epochs), "--augment", "standard", "--seed", str(seed), "--lr", str(LR), "--weight-decay", str(DECAY),
               "--workers", "12", "--eval-every", str(epochs), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    run = json.loads(done.stdout.strip().splitlines()[-1])
    return dict(seed=seed, top1=run["eval_top1"], training_seconds=run["training_seconds"], wall_seconds=time.time() - began)


def interval(a, b):
    """95% interval of the difference of means, by Welch."""
    na, nb = len(a), len(b)
    va, vb = np.var(a, ddof=1) / na, np.var(b, ddof=1) / nb
    df = (va + vb) ** 2 / (va**2 / (na - 1) + vb**2 / (nb - 1))
    t = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}.get(int(df), 2.776 if df < 4 else 2.262)
    middle, half = np.mean(a) - np.mean(b), t * math.sqrt(va + vb)
    return middle - half, middle + half


def main():
    program, folder = sys.argv[1], sys.argv[2]
    seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    epochs = int(sys.argv[4]) if len(sys.argv) > 4 else 10
    sets = load(folder)
    peer = PyTorch(sets)
    print(f"PyTorch compiled in {peer.compile_seconds:.1f} s", flush=True)
    ours, theirs = [], []
    for seed in range(seeds):
        ours.append(vitesse(program, folder, seed, epochs))
        print("vitesse", json.dumps(ours[-1]), flush=True)
        theirs.append(peer.train(seed, epochs))
        print("pytorch", json.dumps(theirs[-1]), flush=True)
    a, b = [r["top1"] for r in ours], [r["top1"] for r in theirs]
    low, high = interval(a, b)
    times = [np.median([r["training_seconds"] for r in rows]) for rows in (ours, theirs)]
    print(f"top-1: vitesse {np.mean(a):.4f}, PyTorch {np.mean(b):.4f}; difference within [{low:+.4f}, {high:+.4f}] (95%)")
    print(f"training: vitesse {times[0]:.1f} s, PyTorch {times[1]:.1f} s: {times[1] / times[0]:.2f} times as fast")
    if len(sys.argv) > 5:
        json.dump(dict(vitesse=ours, pytorch=theirs, pytorch_compile_seconds=peer.compile_seconds, interval=[low, high], epochs=epochs), open(sys.argv[5], "w"), indent=1)


main()
