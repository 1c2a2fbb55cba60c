"""The first steps on the real CIFAR-10, in vitesse and in PyTorch: same initial weights, same samples, same losses.

    python bench/cifar_parity.py --vitesse target/release/vitesse --data DIR --out DIR

DIR of --data holds cifar-10-batches-bin. Needs torch, timm and safetensors. Writes losses.json into --out.
"""

import argparse
import json
import os
import subprocess

import numpy as np
import timm
import torch
from safetensors.torch import save_file

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key(parts):
    k = GOLDEN
    for part in parts:
        k = mix(((k + GOLDEN) & MASK) ^ mix((part + GOLDEN) & MASK))
    return k


def order(count, seed, epoch):
    """vitesse's order of an epoch (crates/data/src/sampler.rs)."""
    half = ((count - 1).bit_length() + 1) // 2
    mask, k = (1 << half) - 1, key([seed, epoch])

    def feistel(point):
        left, right = point >> half, point & mask
        for round_ in range(6):
            left, right = right, left ^ (mix(mix((k + round_) & MASK) ^ right) & mask)
        return left << half | right

    result = []
    for position in range(count):
        point = feistel(position)
        while point >= count:
            point = feistel(point)
        result.append(point)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vitesse", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)
    init = os.path.join(args.out, "init.safetensors")
    save_file(model.state_dict(), init, {"format": "pt"})

    run = os.path.join(args.out, "run")
    command = [args.vitesse, "train", "--data", f"cifar10:{args.data}", "--data-fraction", "0.1"]
    command += ["--model", "vit-ti/4", "--batch-size", str(args.batch), "--steps", str(args.steps)]
    command += ["--augment", "none", "--init", init, "--clip", "0", "--out", run]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in open(os.path.join(run, "metrics.jsonl"))]
    lines = [line for line in lines if "loss" in line]

    raw = [np.fromfile(os.path.join(args.data, "cifar-10-batches-bin", f"data_batch_{i}.bin"), np.uint8) for i in range(1, 6)]
    records = np.concatenate(raw).reshape(-1, 3073)
    records = records[: round(len(records) * 0.1)]
    images = torch.tensor(records[:, 1:].reshape(-1, 3, 32, 32)).float().div(255).sub(0.5).div(0.5)
    labels = torch.tensor(records[:, 0].astype(np.int64))
    decay = [p for p in model.parameters() if p.ndim >= 2 and p.shape[0] != 1]
    plain = [p for p in model.parameters() if not (p.ndim >= 2 and p.shape[0] != 1)]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    per_epoch = -(-len(records) // args.batch)
    worst, rows = 0.0, []
    for step, line in enumerate(lines):
        epoch, at = divmod(step, per_epoch)
        if at == 0:
            visits = order(len(records), 0, epoch)
        chosen = visits[at * args.batch : (at + 1) * args.batch]
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        error = abs(line["loss"] - loss.item()) / loss.item()
        worst = max(worst, error)
        rows.append({"step": step, "vitesse": line["loss"], "pytorch": loss.item(), "relative": error})
    json.dump({"command": command[1:], "worst": worst, "losses": rows}, open(os.path.join(args.out, "losses.json"), "w"), indent=1)
    print(f"{len(rows)} steps, worst relative difference {worst:.2e}, last losses {rows[-1]}")


if __name__ == "__main__":
    main()
