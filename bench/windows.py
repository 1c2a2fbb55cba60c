"""Attention in shifted windows of Swin V2, forward and backward: ours beside PyTorch's, compiled, on one GPU in one run.

    python bench/windows.py BINARY OUT SHAPE ...

BINARY is the example `attention` of crates/cuda; a SHAPE is BATCH,SIDE,WINDOW,HEADS,window, heads of 32. The peer does what timm's and
torchvision's blocks do between their two matmuls, in bf16: rolls the map and cuts it into windows, cosine attention with a bias of
positions and a mask, and back; once by plain matmuls and softmax, once by scaled_dot_product_attention, each compiled. Measured in turn,
medians of several rounds ($ROUNDS). Writes OUT/windows.jsonl, OUT/windows.md and OUT/windows.svg.
With `compile` instead of BINARY and OUT, the peers of the shapes are compiled and left in PyTorch's cache: one process a shape takes a minute off the measurements.
"""

import json
import math
import os
import pathlib
import statistics
import sys

import torch
import torch.nn.functional as F

from attention import SIDE, Ours, Window, parse

ROUNDS = int(os.environ.get("ROUNDS", 5))
HEAD = 32


def cut(x, window):
    b, h, w, c = x.shape
    x = x.view(b, h // window, window, w // window, window, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, window * window, c)


def paste(x, window, side):
    n = side // window
    x = x.view(-1, n, n, window, window, x.shape[-1]).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, side, side, x.shape[-1])


def mask_of(side, window, shift):
    """0 within a part of the map, -100 across, for each window."""
    parts = torch.zeros(1, side, side, 1, device="cuda")
    cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for i, rows in enumerate(cuts):
        for j, columns in enumerate(cuts):
            parts[:, rows, columns, :] = 3 * i + j
    tokens = cut(parts, window).squeeze(-1)
    return torch.where(tokens[:, None, :] == tokens[:, :, None], 0.0, -100.0)


def attention(qkv, q_bias, v_bias, scale, bias, mask, window, shift, heads, fused):
    b, side = qkv.shape[:2]
    qkv = qkv + torch.cat([q_bias, torch.zeros_like(q_bias), v_bias]).to(qkv.dtype)
    if shift:
        qkv = torch.roll(qkv, (-shift, -shift), (1, 2))
    q, k, v = cut(qkv, window).view(-1, window * window, 3, heads, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
    scale = torch.clamp(scale, max=math.log(100.0)).exp()
    q, k = F.normalize(q.float(), dim=-1), F.normalize(k.float(), dim=-1)
    q = (q * scale).to(v.dtype)
    k = k.to(v.dtype)
    added = bias[None]
    if mask is not None:
        added = (added[:, None] + mask[None, :, None]).expand(b, *([-1] * 4)).flatten(0, 1)
    if fused:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=added.expand(q.shape[0], -1, -1, -1).to(q.dtype), scale=1.0)
    else:
        y = torch.softmax((q @ k.transpose(-2, -1)).float() + added, dim=-1).to(v.dtype) @ v
    y = paste(y.transpose(1, 2).reshape(-1, window * window, heads * HEAD), window, side)
    return torch.roll(y, (shift, shift), (1, 2)) if shift else y


def peers(text):
    (batch, side, window, heads), _ = parse(text)
    # Maps that windows don't cut evenly are padded, as the models do it; the padding isn't measured.
    side = math.ceil(side / window) * window
    shift, tokens, c = window // 2 if window < side else 0, window * window, heads * HEAD
    mask = mask_of(side, window, shift) if shift else None
    torch.manual_seed(0)

    def leaf(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(True)

    qkv = leaf(batch, side, side, 3 * c, dtype=torch.bfloat16)
    inputs = [qkv, leaf(c), leaf(c), leaf(heads, 1, 1), leaf(heads, tokens, tokens)]
    dout = torch.randn(batch, side, side, c, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    all = {}
    for name, fused in (("matmuls", False), ("scaled_dot_product_attention", True)):
        # PyTorch 2.11 accesses memory that isn't its own with such masks, and the process is lost.
        if fused and tokens % 8:
            continue
        torch._dynamo.reset()
        compiled = torch.compile(attention, dynamic=False)

        def forward():
            return compiled(*inputs, mask, window, shift, heads, fused)

        try:
            with torch.no_grad():
                windows = {"forward_ms": Window(forward)}
            with torch.cuda.stream(SIDE):
                out = forward()
            windows["backward_ms"] = Window(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
            all[name] = windows
        except RuntimeError as error:
            print(f"{name}, {text}: {str(error)[:300]}", file=sys.stderr)
    return all


def compare(text, ours):
    record = {"shape": text, "ours": ours.measure(text)}
    all = peers(text)
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({"ours": ours.measure("again")})
        for name, windows in all.items():
            rounds[-1][name] = {key: window.measure() for key, window in windows.items()}
    for name in ["ours", *all]:
        medians = {key: statistics.median(r[name][key] for r in rounds) for key in ("forward_ms", "backward_ms")}
        record.setdefault(name, {}).update(medians)
    return record


def table(records):
    names = ("matmuls", "scaled_dot_product_attention")
    lines = [
        f"PyTorch {torch.__version__}, torch.compile, {torch.cuda.get_device_name()}. Milliseconds a layer, forward / backward.",
        "",
        "| batch, side of the map, of a window, heads | ours | by matmuls | by scaled_dot_product_attention | against the better |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        cells = [
            f"{record[n]['forward_ms']:.3f} / {record[n]['backward_ms']:.3f}" if n in record else "–" for n in ("ours", *names)
        ]
        ratios = [
            min(record[n][key] for n in names if n in record) / record["ours"][key] for key in ("forward_ms", "backward_ms")
        ]
        shape = record["shape"].removesuffix(",window").replace(",", ", ")
        lines.append(f"| {shape} | {' | '.join(cells)} | {ratios[0]:.2f}× / {ratios[1]:.2f}× |")
    return "\n".join(lines) + "\n"


def figure(records):
    """TFLOP/s over a window's tokens, a panel for each pass: of each window what has most of them."""
    best = {}
    for record in records:
        (batch, side, window, heads), _ = parse(record["shape"])
        pairs = batch * math.ceil(side / window) ** 2 * window**4 * heads * HEAD
        best[window] = max(best.get(window, (0, None)), (pairs, record), key=lambda pair: pair[0])
    some = sorted(best.items())
    colours = {"ours": "#c0392b", "matmuls": "#2c7fb8", "scaled_dot_product_attention": "#7f8c8d"}
    width, height, gap = 360, 220, 50
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (width + gap) + gap} {height + 2 * gap + 20}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{2 * (width + gap) + gap}" height="{height + 2 * gap + 20}" fill="white"/>',
    ]
    for column, (name, flops) in enumerate((("forward", 4), ("backward", 10))):
        rates = {
            which: [(w, flops * p / r[which][f"{name}_ms"] / 1e9) for w, (p, r) in some if which in r] for which in colours
        }
        top = 1.1 * max(rate for points in rates.values() for _, rate in points)
        left = gap + column * (width + gap)
        out.append(f'<text x="{left}" y="{gap - 10}">{name}: TFLOP/s over the side of a window</text>')
        out.append(f'<rect x="{left}" y="{gap}" width="{width}" height="{height}" fill="none" stroke="#999"/>')
        x = {w: left + width * (i + 0.5) / len(some) for i, (w, _) in enumerate(some)}
        for w, at in x.items():
            out.append(f'<text x="{at:.0f}" y="{gap + height + 14}" text-anchor="middle">{w}</text>')
        step = 10 ** math.floor(math.log10(top))
        for i in range(int(top / step) + 1):
            y = gap + height * (1 - i * step / top)
            out.append(f'<text x="{left - 4}" y="{y + 4:.0f}" text-anchor="end">{i * step:.0f}</text>')
            out.append(f'<path d="M{left} {y:.0f}h{width}" stroke="#ddd"/>')
        for which, points in rates.items():
            line = " ".join(f"{x[w]:.1f},{gap + height * (1 - rate / top):.1f}" for w, rate in points)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colours[which]}" stroke-width="1.8"/>')
    for i, (which, colour) in enumerate(colours.items()):
        out.append(f'<text x="{gap + 140 * i}" y="{height + 2 * gap + 8}" fill="{colour}">{which}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(binary, target, *texts):
    target, ours = pathlib.Path(target), Ours(binary, False)
    records = []
    with open(target / "windows.jsonl", "w") as lines:
        for text in texts:
            try:
                records.append(compare(text, ours))
            except Exception as error:
                print(f"{text}: {str(error)[:500]}", file=sys.stderr)
                continue
            print(json.dumps(records[-1]), file=lines, flush=True)
            torch.cuda.empty_cache()
    (target / "windows.md").write_text(table(records))
    (target / "windows.svg").write_text(figure(records))
    print(table(records))


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        for shape in sys.argv[2:]:
            peers(shape)
    else:
        main(*sys.argv[1:])
