"""PyTorch's side of `cargo run --release -p cpu --example dense`: a 3x3 convolution of 512 channels, channels-last,
forward and backward, by the clock and by the processors' time. `python bench/conv_peer.py [threads [side]]`."""

import sys
import time

import torch

threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
torch.set_num_threads(threads)
print(f"torch {torch.__version__}, {threads} threads")
C = 512
for side in [int(a) for a in sys.argv[2:]] or (32, 64, 128):
    conv = torch.nn.Conv2d(C, C, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    x = torch.randn(1, C, side, side).to(memory_format=torch.channels_last).requires_grad_()
    w, flops = conv.weight, 2 * side * side * C * C * 9
    dy = torch.randn(1, C, side, side).to(memory_format=torch.channels_last)

    def backward(mask):
        args = (dy, x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, mask)
        return lambda: torch.ops.aten.convolution_backward(*args)

    cases = {
        "conv": lambda: conv(x),
        "conv_grad_x": backward((True, False, False)),
        "conv_grad_w": backward((False, True, False)),
    }
    for name, run in cases.items():
        best, best_cpu = float("inf"), float("inf")
        with torch.no_grad():
            run()
            for _ in range(5):
                start, cpu = time.perf_counter(), time.process_time()
                run()
                best = min(best, time.perf_counter() - start)
                best_cpu = min(best_cpu, (time.process_time() - cpu) / threads)
        print(f"{side * side:>9} {name:<28} {best * 1e3:>9.2f} {flops / best / 1e9:>9.1f} {flops / best_cpu / 1e9:>9.1f}")
