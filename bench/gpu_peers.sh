#!/usr/bin/env bash
# PyTorch on one GPU in every way its user could try: usage: gpu_peers.sh OUT.jsonl PYTHON. Compiles several at once, measures one at a time.
set -uo pipefail
here="$(dirname "$0")" out="$1" python="${2:-python3}"
turns="$(mktemp -d)"
together() {   # each argument is a case for gpu_peer.py
    rm -f "$turns"/*
    for case in "$@"; do
        # shellcheck disable=SC2086
        GPU_TURNS="$turns:$#" timeout 280 "$python" "$here/gpu_peer.py" $case 2>/dev/null >> "$out" &
    done
    wait
}
together "vit-b/16 64 bf16 default 5" "vit-b/16 64 bf16 reduce-overhead 5" "vit-b/16 128 bf16 default 5" \
    "vit-b/16 128 bf16 reduce-overhead 5" "vit-b/16 256 bf16 default 5" "vit-b/16 256 bf16 reduce-overhead 5" \
    "vit-b/16 64 fp32 default 5" "vit-b/16 64 tf32 default 5" "vit-b/16 256 pure default 5"
together "vit-b/16 512 bf16 default 5" "vit-b/16 512 bf16 reduce-overhead 5" "vit-b/16 64 pure default 5" \
    "vit-b/16 128 pure default 5" "vit-b/16 64 tf32 reduce-overhead 5" "vit-ti/4 128 bf16 graph 5" "vit-ti/4 128 pure graph 5"
