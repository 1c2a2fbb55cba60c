"""PyTorch's training step on one GPU, as fast as its user could make it: one JSON line a case.

usage: gpu_peer.py CASE BATCH PRECISION HOW [SECONDS]
  CASE       vit-b/16 (224 px, 1000 classes), vit-ti/4 (32 px, 10 classes) or vit-s/16, vit-l/16, vit-h/14; a name of timm's, such as
             vit_small_patch14_reg4_dinov2 (224 px, 1000 classes); with @384 for other sizes of images; swinv2-b/w8+upernet (512 px,
             150 classes, transformers' own, with its auxiliary head)
  PRECISION  fp32, tf32, bf16 (autocast, fp32 parameters), pure (bf16 parameters)
  HOW        eager, a mode of torch.compile (default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs), or
             graph: compiled, and the whole step with the optimizer in one CUDA graph; MODE+cudnn: attention by cuDNN alone
Several at once compile beside each other and measure one after the other, if GPU_TURNS=FOLDER:COUNT says how many there are.
"""
import fcntl
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
import torchvision

SIZES = {"ti": (192, 12, 3, 768), "s": (384, 12, 6, 1536), "b": (768, 12, 12, 3072), "l": (1024, 24, 16, 4096), "h": (1280, 32, 16, 5120)}


def model(case):
    case, _, pixels = case.partition("@")
    if "_" in case:
        import timm
        image = int(pixels or 224)
        return timm.create_model(case, img_size=image, num_classes=1000).cuda().train(), image, 1000
    size, patch = case.removeprefix("vit-").split("/")
    width, depth, heads, mlp = SIZES[size]
    image, classes = (32, 10) if int(patch) < 8 else (224, 1000)
    image = int(pixels or image)
    net = torchvision.models.VisionTransformer(
        image_size=image, patch_size=int(patch), num_layers=depth, num_heads=heads, hidden_dim=width, mlp_dim=mlp,
        num_classes=classes)
    return net.cuda().train(), image, classes


class Segmenter(torch.nn.Module):
    """From images to the loss, which transformers' model takes of both heads."""

    def __init__(self, batch, image, classes):
        super().__init__()
        from transformers import Swinv2Config, UperNetConfig, UperNetForSemanticSegmentation
        backbone = Swinv2Config(
            image_size=image, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], window_size=8, drop_path_rate=0.3,
            out_features=["stage1", "stage2", "stage3", "stage4"])
        self.net = UperNetForSemanticSegmentation(UperNetConfig(
            backbone_config=backbone, num_labels=classes, hidden_size=512, auxiliary_in_channels=512))
        self.register_buffer("labels", torch.randint(0, classes, (batch, image, image)))

    def forward(self, x):
        return self.net(pixel_values=x, labels=self.labels).loss


def take_turn():
    """Waits until all others have compiled, then until none of them measures."""
    if "GPU_TURNS" not in os.environ:
        return None
    folder, count = os.environ["GPU_TURNS"].rsplit(":", 1)
    os.makedirs(folder, exist_ok=True)
    open(f"{folder}/{os.getpid()}.ready", "w").close()
    while sum(name.endswith(".ready") for name in os.listdir(folder)) < int(count):
        time.sleep(0.05)
    turn = open(f"{folder}/turn", "w")
    fcntl.flock(turn, fcntl.LOCK_EX)
    return turn


def measure(step, seconds):
    began = time.time()
    step()
    torch.cuda.synchronize()
    first = time.time() - began
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    turn = take_turn()
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    times, began = [], time.time()
    while len(times) < 20 or time.time() - began < seconds:
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        step()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    # Back to back, as a training loop that never waits would run them.
    count = max(10, min(200, int(2000 / (sorted(times)[len(times) // 2]))))
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(count):
        step()
    b.record()
    torch.cuda.synchronize()
    if turn:
        turn.close()
    return times, a.elapsed_time(b) / count, first


def main():
    case, batch, precision, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    seconds = float(sys.argv[5]) if len(sys.argv) > 5 else 3.0
    torch.manual_seed(0)
    tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if case == "swinv2-b/w8+upernet":
        image, classes = 512, 150
        net = Segmenter(batch, image, classes).cuda().train()
    else:
        net, image, classes = model(case)
    x = torch.randn(batch, 3, image, image, device="cuda")
    y = torch.randint(0, classes, (batch,), device="cuda")
    if precision == "pure":
        net, x = net.bfloat16(), x.bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True, capturable=how.startswith("graph"))
    mode, _, backend = how.partition("+")
    if backend == "cudnn":
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    compiled = net if mode == "eager" else torch.compile(net, mode="default" if mode == "graph" else mode)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            out = compiled(x)
            loss = out if isinstance(net, Segmenter) else F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=how != "graph")

    row = dict(program="pytorch", torch=torch.__version__, case=case, batch=batch, precision=precision, how=how)
    try:
        if how == "graph":
            began = time.time()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(5):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            row["capture_seconds"] = round(time.time() - began, 1)
            times, steady, first = measure(graph.replay, seconds)
        else:
            times, steady, first = measure(step, seconds)
        middle = sorted(times)[len(times) // 2]
        row.update(ms=round(middle, 3), steady_ms=round(steady, 3), images_per_second=round(batch / min(middle, steady) * 1e3, 1),
                   peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 3), first_step_seconds=round(first, 2),
                   samples=[round(t, 3) for t in times[:200]])
    except Exception as error:  # a mode that can't run is part of the record
        row["error"] = str(error)[:300]
        if "GPU_TURNS" in os.environ:  # nobody waits for this one
            folder = os.environ["GPU_TURNS"].rsplit(":", 1)[0]
            os.makedirs(folder, exist_ok=True)
            open(f"{folder}/{os.getpid()}.ready", "w").close()
    print(json.dumps(row), flush=True)


main()
