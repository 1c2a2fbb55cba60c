#!/bin/sh
# Fills corpus/ with small sound files, one folder for each target, from the fixtures of the crates' tests.
set -eu
cd "$(dirname "$0")"
data=../crates/data/tests/fixtures
config=../crates/config
formats=../crates/formats/tests/fixtures
mkdir -p corpus/pickle corpus/cifar corpus/image corpus/safetensors corpus/pth corpus/config

cp "$data"/pickle/*.pkl corpus/pickle/
cp "$data"/images/*.jpg "$data"/images/*.png "$data"/images/*.webp corpus/image/
cp "$formats"/pth/*.pth "$formats"/pth/*.zip corpus/pth/
cp "$config"/tests/fixtures/deepspeed/*.json corpus/config/

# A letter before a file of CIFAR says which one it is: see targets/cifar.rs.
with_letter() { { printf %s "$1"; cat "$2"; } >"corpus/cifar/$3"; }
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
for python in python2-numpy1 python3-numpy1 python3-numpy2; do
    cp "$data/cifar/$python/cifar-10-batches-py/batches.meta" "corpus/pickle/$python-meta.pkl"
    with_letter p "$data/cifar/$python/cifar-10-batches-py/test_batch" "$python-ten"
    with_letter q "$data/cifar/$python/cifar-100-python/test" "$python-fine"
    with_letter r "$data/cifar/$python/cifar-100-python/test" "$python-coarse"
done
pixels() { head -c 3072 /dev/zero; }
{ printf '\003'; pixels; } >"$work/test_batch.bin"
{ printf '\001\007'; pixels; } >"$work/test.bin"
printf 'a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n' >"$work/batches.meta.txt"
with_letter b "$work/test_batch.bin" binary-ten
with_letter f "$work/test.bin" binary-fine
with_letter c "$work/test.bin" binary-coarse
tar -C "$work" -cf "$work/ten.tar" batches.meta.txt test_batch.bin
tar -C "$data/cifar/python3-numpy2" -cf "$work/fine.tar" cifar-100-python/meta cifar-100-python/test
for set in a:ten d:fine; do
    with_letter "${set%:*}" "$work/${set#*:}.tar" "${set#*:}.tar"
    gzip -n "$work/${set#*:}.tar"
    with_letter "${set%:*}" "$work/${set#*:}.tar.gz" "${set#*:}.tar.gz"
done

# The length of the header (below 256) in eight bytes, the header, then the values.
safetensors() {
    printf "\\$(printf %o "${#2}")\0\0\0\0\0\0\0%s%s" "$2" "$3" >"corpus/safetensors/$1"
}
cp "$formats"/pth/*.safetensors corpus/safetensors/
safetensors halves '{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[],"data_offsets":[4,6]}}' 123456
safetensors double '{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}' 12345678
safetensors record '{"__metadata__":{"config":"{\"schema\":1,\"model\":\"vit\",\"class_names\":[]}"}}' ''
safetensors states '{"__metadata__":{"format":"vitesse-checkpoint-1"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a.ema":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' 12345678

cat >corpus/config/schedule <<'JSON'
{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "steps_per_print": 10,
"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8,
"weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3,
"warmup_num_steps": 10, "total_num_steps": 100}}, "zero_optimization": {"stage": 0}, "fp16": {"enabled": false}}
JSON

# Words of the configuration, for the target to put together.
grep -oh '"[A-Za-z_0-9.]*"' "$config"/src/deepspeed/keys.rs | tr -d '"' | tr . '\n' | sort -u | grep . |
    sed 's/.*/"\\"&\\""/' >corpus/config.dict
