"""Attention, forward and backward: ours beside PyTorch's backends, on one GPU in one run.

    python bench/attention.py BINARY OUT [SHAPE ...]

BINARY is the example `attention` of crates/cuda, which says what a SHAPE is. Our own kernels, what the tuner chooses of them and cuDNN's, and PyTorch's are measured in turn, in several
rounds ($ROUNDS) of which medians are taken: a GPU that gets warm throttles, and what is measured first is ahead. Writes OUT/attention.jsonl, OUT/attention.md and OUT/attention.svg.
"""

import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}
CEILING = 790  # TFLOP/s of a large bf16 matmul on an H200
ROUNDS = int(os.environ.get("ROUNDS", 5))
SIDE = torch.cuda.Stream()
KEYS = ("forward_ms", "backward_ms", "deterministic_backward_ms")


class Window:
    """Some runs in a row; milliseconds of one. Short ones are captured, so that they don't wait for Python: runs, and what they need of
    runs before, belong on `SIDE` then."""

    SHORT = 0.4

    def __init__(self, run, ms=6.0):
        self.run, self.graph = run, None
        self.count = 1
        self.measure()
        alone = self.measure()
        self.count = max(1, min(100, int(ms / alone)))
        if alone < self.SHORT:
            SIDE.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=SIDE):
                for _ in range(self.count):
                    run()
            self.graph = graph

    def measure(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(SIDE):
            for timed in (False, True):
                if timed:
                    start.record()
                if self.graph:
                    self.graph.replay()
                else:
                    for _ in range(self.count if timed else 1):
                        self.run()
            end.record()
        SIDE.synchronize()
        return start.elapsed_time(end) / self.count


def parse(text):
    """Four numbers and words."""
    parts = text.split(",")
    return [int(n) for n in parts[:4]], parts[4:]


def windows(text, backend):
    """What is measured of a peer, by its key."""
    (batch, heads, tokens, head), words = parse(text)
    dtype = torch.float16 if "fp16" in words else torch.bfloat16
    rate = 0.1 if "drop" in words else 0.0
    torch.manual_seed(0)
    packed = torch.randn(batch, tokens, 3, heads, head, device="cuda", dtype=dtype)
    q, k, v = (x.detach().requires_grad_(True) for x in packed.permute(2, 0, 3, 1, 4).unbind(0))
    dout = torch.randn(batch, tokens, heads, head, device="cuda", dtype=dtype).transpose(1, 2)
    torch.cuda.synchronize()
    all = {}
    with sdpa_kernel(backend):

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate)

        with torch.no_grad():
            all["forward_ms"] = Window(forward)
        with torch.cuda.stream(SIDE):
            out = forward()

        def backward():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        def deterministic():
            torch.use_deterministic_algorithms(True)
            try:
                return backward()
            finally:
                torch.use_deterministic_algorithms(False)

        all["backward_ms"] = Window(backward)
        all["deterministic_backward_ms"] = Window(deterministic)
    return all


class Ours:
    def __init__(self, binary, tuned):
        self.tuned = tuned
        self.process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, text):
        text += ",tuned" if self.tuned and text != "again" else ""
        print(text, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def compare(text, ours, tuned):
    record = {"shape": text, "ours": ours.measure(text), "tuned": tuned.measure(text)}
    if "error" in record["ours"] or "error" in record["tuned"]:
        return record
    peers = {}
    for name, backend in BACKENDS.items():
        try:
            peers[name] = windows(text, backend)
        except RuntimeError as error:
            print(f"{name}, {text}: {str(error)[:300]}", file=sys.stderr)
            torch.cuda.synchronize()
    rounds = []
    for _ in range(ROUNDS):
        rounds.append({"ours": ours.measure("again"), "tuned": tuned.measure("again")})
        for name, all in peers.items():
            rounds[-1][name] = {key: window.measure() for key, window in all.items()}
    for mine in ("ours", "tuned"):
        for key in KEYS[:2]:
            record[mine][key] = statistics.median(r[mine][key] for r in rounds)
    for name, all in peers.items():
        record[name] = {key: statistics.median(r[name][key] for r in rounds) for key in all}
    return record


def best(record, key):
    return min((record[n][key] for n in BACKENDS if key in record.get(n, {})), default=math.inf)


def flops(text, key):
    (batch, heads, tokens, head), _ = parse(text)
    return (4 if key.startswith("forward") else 10) * batch * heads * tokens * tokens * head


def table(records):
    lines = [
        f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}. Milliseconds a",
        "layer, forward / backward; in brackets the deterministic backward. Ours is always deterministic.",
        "",
        "| batch, heads, tokens, head size | ours | of the ceiling | " + " | ".join(BACKENDS) + " | against the better | tuner's pick | against the better |",
        "|---|---|---|" + "---|" * len(BACKENDS) + "---|---|---|",
    ]
    for record in records:
        mine, text = record["ours"], record["shape"]
        pick = record["tuned"]
        if "error" in mine or "error" in pick:
            lines.append(f"| {text} | {mine.get('error') or pick['error']} |")
            continue
        cells = []
        for name in BACKENDS:
            p = record.get(name, {})
            cell = [f"{p[key]:.3f}" if key in p else "–" for key in KEYS]
            cells.append(f"{cell[0]} / {cell[1]} ({cell[2]})")
        ratios = [best(record, key) / mine[own] for key, own in zip(KEYS, (*KEYS[:2], KEYS[1]))]
        picked = [best(record, key) / pick[own] for key, own in zip(KEYS, (*KEYS[:2], KEYS[1]))]
        by = "/".join("cuDNN" if "cuDNN" in what else "ours" for what in pick["kernels"])
        rates = [flops(text, key) / mine[key] / 1e9 / CEILING for key in KEYS[:2]]
        lines.append(
            f"| {text.replace(',', ', ')} | {mine['forward_ms']:.3f} / {mine['backward_ms']:.3f} "
            f"| {rates[0]:.0%} / {rates[1]:.0%} | {' | '.join(cells)} "
            f"| {ratios[0]:.2f}× / {ratios[1]:.2f}× ({ratios[2]:.2f}×) "
            f"| {by} {pick['forward_ms']:.3f} / {pick['backward_ms']:.3f} | {picked[0]:.2f}× / {picked[1]:.2f}× ({picked[2]:.2f}×) |"
        )
    return "\n".join(lines) + "\n"


def figure(records):
    """TFLOP/s over length, one panel for each head size and pass; of each length what has most of work."""
    most = {}
    for r in records:
        (b, h, t, d), words = parse(r["shape"])
        if not words and "error" not in r["ours"]:
            most[d, t] = max(most.get((d, t), (0, None)), (b * h, r), key=lambda pair: pair[0])
    sizes = [d for d, _ in most]
    heads = sorted({d for d in sizes if sizes.count(d) > 3})
    width, height, gap = 330, 220, 50
    names = ["ours", *BACKENDS]
    colours = dict(zip(names, ["#c0392b", "#2c7fb8", "#7f8c8d"]))
    size = (len(heads) * (width + gap) + gap, 2 * (height + gap) + 40)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="11">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for column, head in enumerate(heads):
        some = [(t, r) for (d, t), (_, r) in sorted(most.items()) if d == head]
        low, high = some[0][0], some[-1][0]
        for row, name in enumerate(("forward", "backward")):
            left, top = gap + column * (width + gap), 30 + row * (height + gap)

            def x(tokens):
                return left + width * math.log(tokens / low) / max(math.log(high / low), 1e-9)

            def y(rate):
                return top + height * (1 - rate / CEILING)

            out.append(f'<text x="{left}" y="{top - 8}">{name}, head size {head}: TFLOP/s over tokens</text>')
            out.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>')
            for rate in range(0, CEILING, 200):
                out.append(f'<text x="{left - 4}" y="{y(rate) + 4:.0f}" text-anchor="end">{rate}</text>')
                out.append(f'<path d="M{left} {y(rate):.0f}h{width}" stroke="#ddd"/>')
            for t, _ in some:
                out.append(
                    f'<text x="{x(t):.0f}" y="{top + height + 13}" text-anchor="middle" font-size="9">{t}</text>'
                )
            for which in names:
                points = []
                for t, r in some:
                    ms = r.get(which, {}).get(f"{name}_ms", math.inf)
                    points.append(f"{x(t):.1f},{y(flops(r['shape'], name) / ms / 1e9):.1f}")
                out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colours[which]}" stroke-width="1.8"/>')
    for i, which in enumerate(names):
        out.append(f'<text x="{gap + 140 * i}" y="{size[1] - 8}" fill="{colours[which]}">{which}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(binary, target, *texts):
    target, ours, tuned = pathlib.Path(target), Ours(binary, False), Ours(binary, True)
    records = []
    with open(target / "attention.jsonl", "w") as lines:
        for text in texts:
            records.append(compare(text, ours, tuned))
            print(json.dumps(records[-1]), file=lines, flush=True)
            torch.cuda.empty_cache()
    (target / "attention.md").write_text(table(records))
    (target / "attention.svg").write_text(figure(records))
    print(table(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
