//! Examples at the end of each command's help.

pub const TRAIN: &str = "\
Examples:
  vitesse train
  vitesse train --model vit-ti/4 --batch-size 32 --accumulate 2 --out runs/first
  vitesse train --init runs/first/weights.safetensors --model vit-ti/4 --lr 1e-4 --steps 100
  vitesse train --config deepspeed.json --precision fp32
  vitesse train --task segment
  vitesse train --data ade20k:ADEChallengeData2016 --model swinv2-b/w8+upernet --iterations 160000 --device cuda --out runs/ade20k
  vitesse train --ranks 4 --out runs/four --max-restarts 2
  vitesse train --model vit-s/16 --data folder:photos --out runs/photos --resume auto
  mpirun -n 4 vitesse train --out runs/four";
pub const STUDY: &str = "\
Examples:
  vitesse study quick
  vitesse study plan strong --ranks 1,2,4 --model vit-ti/4 --data cifar10:data
  vitesse study weak --ranks 1,2,4,8 --data cifar100:data --data-fraction 0.1 --out studies/weak
  vitesse study fixed-per-rank --ranks 1,2,4 --batch-sizes 8 --steps 160 --repeats 10
  vitesse study nodes --ranks 1,2,4 --hosts a,b,c,d --batch-sizes 64
  vitesse study strong --ranks 8,16,32 --nodes 1 --launcher 'srun -n {ranks}' -- --augment standard
  vitesse study experiments.toml
  vitesse study --resume studies/weak";
pub const COMPARE: &str = "\
Examples:
  vitesse compare studies/before studies/after
  vitesse compare studies/quick/results.json elsewhere/results.json --json";
pub const LAUNCH: &str = "\
Examples:
  vitesse launch --with mpirun --nodes 2 --per-node 4 --hosts a,b -- --model vit-b/16 --data folder:imagenet --out runs/b16
  vitesse launch --with slurm --nodes 4 --per-node 8 --gpus --time 12:00:00 --out job.sh -- --config deepspeed.json --out runs/b16";
pub const EVAL: &str = "\
Examples:
  vitesse eval --weights runs/first
  vitesse eval --weights runs/first/checkpoints/best.safetensors --data folder:photos --logits logits.safetensors
  vitesse eval --weights runs/ade20k --masks predicted --eval-mode slide
  vitesse eval --weights vit_b_16.pth --data folder:imagenet --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --eval-resize 256";
pub const CLASSIFY: &str = "\
Examples:
  vitesse classify cat.jpg --weights runs/first
  vitesse classify photos/*.jpg --weights runs/first --grid answers.png";
pub const SEGMENT: &str = "\
Examples:
  vitesse segment street.jpg --weights runs/ade20k
  vitesse segment photos/*.jpg --weights runs/ade20k --out answers --eval-mode slide";
pub const EXPORT: &str = "\
Examples:
  vitesse export runs/first best.safetensors --to timm
  vitesse export runs/first best.onnx
  vitesse export vit_b_16.pth vit_b_16.safetensors --to huggingface --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225";
pub const GET: &str = "\
Examples:
  vitesse data get cifar10 data
  vitesse train --data cifar10:data --model vit-ti/4 --augment standard --out runs/cifar10";
pub const MAKE: &str = "\
Examples:
  vitesse data make photos
  vitesse data make --task segment streets";
pub const INSPECT: &str = "\
Examples:
  vitesse data inspect --data cifar10:data
  vitesse data inspect --data folder:photos --augment strong --sheet sheet.png
  vitesse data inspect --data ade20k:ADEChallengeData2016 --augment strong --sheet sheet.png";
pub const PLAN: &str = "\
Examples:
  vitesse plan --model vit-b/16 --image-size 224 --batch-size 4
  vitesse plan --recompute full --which last --json
  vitesse plan --model vit-l/16 --image-size 224 --ranks 8 --diff '--zero 2'
  vitesse plan --model vit-b/16 --image-size 224 --device cuda --precision bf16 --which last";
pub const BENCH: &str = "\
Examples:
  vitesse bench --model vit-ti/4 --batch-size 64 --threads 1
  vitesse bench --model vit-b/16 --image-size 224 --batch-size 4 --classes 1000 --json
  vitesse bench --model vit_base_patch16_224 --inference --batch-size 32
  vitesse bench --model swinv2-b/w8+upernet --device cuda";
pub const REPORT: &str = "\
Examples:
  vitesse report studies/a100
  vitesse report studies/a100 studies/v100 --out studies/both
  vitesse report studies/a100 --figures svg --figures-dir paper/figures
  vitesse report studies/a100 --figures pdf --width 85mm --font-size 8 --no-title";
pub const SERVE: &str = "\
Examples:
  vitesse serve runs
  vitesse serve runs --address 9999
  ssh -L 9000:localhost:8420 gpu-node    # then open the URL that `vitesse serve` printed there, with localhost:9000 for its host and port";
pub const EXPLAIN: &str = "\
Examples:
  vitesse config explain --task segment --ranks 4
  vitesse config explain run.toml
  vitesse config explain deepspeed.json
  vitesse config explain deepspeed.json --ranks 2 --precision fp32 --batch-size 16";
