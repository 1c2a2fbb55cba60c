"""Images per second of torchvision on one core, to compare with the example decode_bench of the crate data.

    taskset -c 0 python bench/loader_peer.py FOLDER [ROUNDS]

FOLDER holds one folder for each class. Same work: decode, RandomResizedCrop(224), flip, ToTensor, Normalize. Loads in this
process (num_workers=0) and in one worker; on one core the better of the two is the figure to compare with. Rates are of CPU
time, of this process and its worker, so that other programs on the same core don't count.
"""

import os
import sys

import torch
import torchvision
from torchvision import transforms


def busy_seconds():
    """CPU time of this process and of workers that have ended."""
    return sum(os.times()[:4])


def main():
    folder, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    torch.set_num_threads(1)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    images = torchvision.datasets.ImageFolder(folder, transform)
    decoded = torchvision.datasets.ImageFolder(folder)
    print(f"{len(images)} images, torchvision {torchvision.__version__}")
    for _ in range(rounds):
        start = busy_seconds()
        for i in range(len(decoded)):
            decoded[i]
        line = f"decode {len(decoded) / (busy_seconds() - start):7.1f} images/s"
        for workers in (0, 1):
            loader = torch.utils.data.DataLoader(images, batch_size=64, num_workers=workers)
            start = busy_seconds()
            for _ in loader:
                pass
            del loader
            line += f"    {workers} workers {len(images) / (busy_seconds() - start):7.1f} images/s"
        print(line, flush=True)


main()
