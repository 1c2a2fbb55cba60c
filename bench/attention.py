"""Attention in bf16, forward and backward: ours beside PyTorch's backends, on one GPU in one run.

    python bench/attention.py BINARY OUT [BATCH,HEADS,TOKENS,HEAD ...]

BINARY is the example `attention` of crates/cuda. Writes OUT/attention.jsonl, OUT/attention.md and OUT/attention.svg.
"""

import json
import pathlib
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}
CEILING = 790  # TFLOP/s of a large bf16 matmul on an H200


def shortest(run, windows=5, ms=20):
    """Milliseconds of one run: the best window of several, the queue never empty."""
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times, count = [], 1
    for window in range(windows + 1):
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / count)
        count = max(3, min(200, int(ms / times[-1])))
    return min(times[1:])


def peer(shape, backend):
    batch, heads, tokens, head = shape
    torch.manual_seed(0)
    packed = torch.randn(batch, tokens, 3, heads, head, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.detach().requires_grad_(True) for x in packed.permute(2, 0, 3, 1, 4).unbind(0))
    dout = torch.randn(batch, tokens, heads, head, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with sdpa_kernel(backend):

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        with torch.no_grad():
            times = {"forward_ms": shortest(forward)}
        out = forward()

        def backward():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        times["backward_ms"] = shortest(backward)
        torch.use_deterministic_algorithms(True)
        try:
            times["deterministic_backward_ms"] = shortest(backward)
        except RuntimeError as error:
            # No such algorithm: never the better one.
            times["deterministic_backward_ms"] = float("inf")
            print(f"{backend}, {shape}: {error}", file=sys.stderr)
        torch.use_deterministic_algorithms(False)
    return times


def ours(binary, shapes):
    texts = [",".join(map(str, shape)) for shape in shapes]
    out = subprocess.run([binary, *texts], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def table(records):
    lines = [
        f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}. Milliseconds a",
        "layer, forward / backward; in brackets the deterministic backward. Ours is always deterministic.",
        "",
        "| batch, heads, tokens, head size | ours | of the ceiling | " + " | ".join(BACKENDS) + " | against the better |",
        "|---|---|---|" + "---|" * len(BACKENDS) + "---|",
    ]
    for record in records:
        mine = record["ours"]
        cells = []
        for name in BACKENDS:
            p = record[name]
            cells.append(f"{p['forward_ms']:.3f} / {p['backward_ms']:.3f} ({p['deterministic_backward_ms']:.3f})")
        best = [min(record[n][k] for n in BACKENDS) for k in ("forward_ms", "backward_ms", "deterministic_backward_ms")]
        ratios = (best[0] / mine["forward_ms"], best[1] / mine["backward_ms"], best[2] / mine["backward_ms"])
        rates = (mine["forward_tflops"] / CEILING, mine["backward_tflops"] / CEILING)
        lines.append(
            f"| {', '.join(map(str, record['shape']))} | {mine['forward_ms']:.3f} / {mine['backward_ms']:.3f} "
            f"| {rates[0]:.0%} / {rates[1]:.0%} | {' | '.join(cells)} "
            f"| {ratios[0]:.2f}× / {ratios[1]:.2f}× ({ratios[2]:.2f}×) |"
        )
    return "\n".join(lines) + "\n"


def figure(records):
    """TFLOP/s over length, one panel for each head size and pass."""
    heads = sorted({r["shape"][3] for r in records if sum(o["shape"][3] == r["shape"][3] for o in records) > 2})
    width, height, gap = 330, 220, 50
    names = ["ours", *BACKENDS]
    colours = dict(zip(names, ["#c0392b", "#2c7fb8", "#7f8c8d"]))
    size = (len(heads) * (width + gap) + gap, 2 * (height + gap) + 40)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="11">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for column, head in enumerate(heads):
        some = sorted((r for r in records if r["shape"][3] == head), key=lambda r: r["shape"][2])
        low, high = some[0]["shape"][2], some[-1]["shape"][2]
        for row, (name, flops) in enumerate((("forward", 4), ("backward", 10))):
            left, top = gap + column * (width + gap), 30 + row * (height + gap)

            def x(tokens):
                import math

                return left + width * math.log(tokens / low) / max(math.log(high / low), 1e-9)

            def y(rate):
                return top + height * (1 - rate / CEILING)

            out.append(f'<text x="{left}" y="{top - 8}">{name}, head size {head}: TFLOP/s over tokens</text>')
            out.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>')
            for rate in range(0, CEILING, 200):
                out.append(f'<text x="{left - 4}" y="{y(rate) + 4:.0f}" text-anchor="end">{rate}</text>')
                out.append(f'<path d="M{left} {y(rate):.0f}h{width}" stroke="#ddd"/>')
            for r in some:
                out.append(
                    f'<text x="{x(r["shape"][2]):.0f}" y="{top + height + 13}" text-anchor="middle" font-size="9">'
                    f'{r["shape"][2]}</text>'
                )
            for which in names:
                points = []
                for r in some:
                    b, h, t, d = r["shape"]
                    ms = r[which][f"{name}_ms"]
                    points.append(f"{x(t):.1f},{y(flops * b * h * t * t * d / ms / 1e9):.1f}")
                out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colours[which]}" stroke-width="1.8"/>')
    for i, which in enumerate(names):
        out.append(f'<text x="{gap + 140 * i}" y="{size[1] - 8}" fill="{colours[which]}">{which}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(binary, target, *texts):
    target = pathlib.Path(target)
    shapes = [[int(n) for n in text.split(",")] for text in texts]
    records = []
    with open(target / "attention.jsonl", "w") as lines:
        for shape, mine in zip(shapes, ours(binary, shapes), strict=True):
            record = {"shape": shape, "ours": mine, **{name: peer(shape, b) for name, b in BACKENDS.items()}}
            records.append(record)
            print(json.dumps(record), file=lines, flush=True)
            torch.cuda.empty_cache()
    (target / "attention.md").write_text(table(records))
    (target / "attention.svg").write_text(figure(records))
    print(table(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
