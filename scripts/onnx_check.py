"""Compares ONNX files that vitesse writes with onnxruntime, and, where timm is installed, with timm's own model of the same weights.

Weights are random, of a size that no layer leaves idle; files without a word about themselves stand for timm's, files that `vitesse
export` wrote for ours.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from safetensors.numpy import load_file, save_file

VITESSE = sys.argv[1]
LIMIT = 1e-4
CLASSES = 100
# Model, timm's name of it, the size of its images, and another size.
CASES = [
    ("vit-ti/16", "vit_tiny_patch16_224", 224, 160),
    ("swinv2-ti/w8", "swinv2_tiny_window8_256", 256, 232),
    ("vit_small_patch14_reg4_dinov2", "vit_small_patch14_reg4_dinov2", 224, 126),
    ("deit3_small_patch16_224", "deit3_small_patch16_224", 224, 160),
]


def vitesse(*arguments):
    command = [VITESSE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def random_weights(folder, model, size):
    """A file with the model's names and shapes, but no metadata."""
    run = folder / "run"
    vitesse("train", "--model", model, "--image-size", size, "--steps", 1, "--batch-size", 2, "--train-samples", 2,
            "--test-samples", 2, "--classes", CLASSES, "--out", run)
    random = np.random.default_rng(7)
    tensors = {}
    for name, tensor in load_file(run / "weights.safetensors").items():
        values = random.standard_normal(tensor.shape, dtype=np.float32)
        if name.endswith("logit_scale"):
            # Some beyond the limit of ln 100.
            values = 2.3 + 2 * values
        elif tensor.ndim > 1:
            values *= (tensor.size / tensor.shape[0]) ** -0.5
        elif name.endswith("weight") or name.endswith("gamma"):
            values = 1 + 0.2 * values
        else:
            values *= 0.2
        tensors[name] = values
    path = folder / "theirs.safetensors"
    save_file(tensors, path)
    return path


def onnx_logits(path, images):
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    one = np.concatenate([session.run(["logits"], {"images": image[None]})[0] for image in images])
    (all_,) = session.run(["logits"], {"images": images})
    return one, all_


def timm_logits(name, size, weights, images):
    try:
        import timm
        import torch
    except ImportError:
        return None
    model = timm.create_model(name, pretrained=False, img_size=size, num_classes=CLASSES).eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    constants = ("relative_coords_table", "relative_position_index", "attn_mask")
    assert not unexpected and all(key.endswith(constants) for key in missing), (missing, unexpected)
    with torch.no_grad():
        return model(torch.from_numpy(images)).numpy()


def difference(ours, theirs):
    assert ours.shape == theirs.shape and np.isfinite(ours).all() and np.ptp(ours) > 0.1, (ours.shape, np.ptp(ours))
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


def main():
    worst = 0.0
    for model, timm_name, size, other in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            theirs = random_weights(folder, model, size)
            named = ["--model", model, "--image-size", size, "--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
            ours = folder / "ours.safetensors"
            vitesse("export", theirs, ours, *named)
            # Of our files, the size alone is said anew; of others, all that they don't say.
            for label, weights, arguments, side in [
                ("timm's names", theirs, named, size),
                ("our file", ours, [], size),
                ("our file", ours, ["--image-size", other], other),
            ]:
                path, dump = folder / "model.onnx", folder / "logits.safetensors"
                for written in (path, dump):
                    written.unlink(missing_ok=True)
                print(vitesse("export", weights, path, *arguments).splitlines()[0].split("model.onnx ")[1])
                vitesse("eval", "--weights", weights, *arguments, "--data", "synthetic", "--test-samples", 5, "--logits", dump)
                seen = load_file(dump)
                metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
                assert metadata["mean"] == "0.485,0.456,0.406" and metadata["image_size"] == str(side), metadata
                one, all_ = onnx_logits(path, seen["images"])
                found = {"batch 1": difference(seen["logits"], one), "batch 5": difference(seen["logits"], all_)}
                if side == size:
                    logits = timm_logits(timm_name, side, load_file(theirs), seen["images"])
                    if logits is not None:
                        found["timm"] = difference(logits, all_)
                print(f"{model} {side} px, {label}:", json.dumps({key: f"{value:.1e}" for key, value in found.items()}))
                worst = max(worst, *found.values())
    print(f"largest difference {worst:.1e}, limit {LIMIT:.0e}")
    sys.exit(worst > LIMIT)


main()
