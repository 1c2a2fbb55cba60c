"""Makes JPEGs of ImageNet's usual sizes out of smaller ones, for decode_bench and loader_peer.py.

    python bench/loader_images.py SOURCE OUT [QUALITY]

Four pictures side by side, enlarged by an eighth and cut: sharp enough to take as many bytes as photographs do.
"""

import pathlib
import random
import sys

from PIL import Image

SIZES = [(500, 375), (500, 375), (500, 333), (375, 500), (500, 400)]
COUNT = 300


def main():
    source, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]) / "all"
    quality = int(sys.argv[3]) if len(sys.argv) > 3 else 92
    random.seed(1)
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    out.mkdir(parents=True, exist_ok=True)
    for i in range(COUNT):
        mosaic = Image.new("RGB", (448, 448))
        for corner in ((0, 0), (0, 224), (224, 0), (224, 224)):
            picture = Image.open(random.choice(files)).convert("RGB").resize((224, 224), Image.BICUBIC)
            mosaic.paste(picture, corner)
        width, height = random.choice(SIZES)
        mosaic = mosaic.resize((504, 504), Image.BICUBIC).crop((0, 0, width, height))
        mosaic.save(out / f"{i:04}.jpg", quality=quality, subsampling="4:2:0")


main()
