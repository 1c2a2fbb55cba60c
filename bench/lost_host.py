"""Losing one of three hosts: how soon the run goes on, and what it learns then.

    python3 bench/lost_host.py --out bench/2026-11-18-lost-host

Makes three hosts of network namespaces (scripts/hosts; needs root), trains ViT-nano/8 over them with --max-restarts and --min-ranks, cuts the
link of one that has not rank 0, and compares the losses with those of three ranks and of one that nothing disturbed. Build with
`cargo build --release --features mpi`.
"""
import argparse, json, os, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("--model vit-nano/8 --train-samples 2400 --test-samples 40 --threads 1 --seed 4 --steps 90 --checkpoint-every 3 "
         "--no-breakdown").split()
# Batch of a rank, the host that is lost, settings beside.
CASES = {
    "defaults": (8, 2, []),
    "--timeout 3": (8, 1, ["--timeout", "3"]),
    "unequal shares": (7, 2, ["--timeout", "3"]),
    "unequal shares, fp64": (7, 2, ["--timeout", "3", "--precision", "fp64"]),
}
ENV = {**os.environ, "VITESSE_HOSTS": "lost", "VITESSE_NET": "10.86.0"}


def hosts(*words):
    return subprocess.run([ROOT / "scripts/hosts", *words], env=ENV, capture_output=True, text=True)


def losses(run):
    lines = [json.loads(line) for line in open(run / "metrics.jsonl")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def newest(run):
    return max((int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("step-*.safetensors")), default=0)


def lose(vitesse, folder, case):
    batch, host, more = CASES[case]
    made = hosts("up", "3", "1gbit", "1ms")
    if made.returncode:
        sys.exit(made.stderr)
    (folder / "hosts").write_text("".join(f"10.86.0.{i} slots=1\n" for i in (1, 2, 3)))
    words = [vitesse, "train", *TRAIN, "--batch-size", str(batch), "--ranks", "3", "--comm", "mpi", "--hostfile", "hosts", "--out", "run",
             "--max-restarts", "2", "--min-ranks", "2", *more]
    child = subprocess.Popen([ROOT / "scripts/hosts", "on", "0", *words], env=ENV, cwd=folder, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
    while newest(folder / "run") < 30:
        if child.poll() is not None:
            sys.exit(child.stdout.read())
        time.sleep(0.01)
    hosts("cut", str(host))
    cut, last = time.monotonic(), newest(folder / "run")
    lines, stepped = [], None
    for line in child.stdout:
        after = time.monotonic() - cut
        if line.startswith(("vitesse: ", "a step has ", "going on")):
            lines.append(f"{after:6.1f} s  {line.rstrip()}")
        if line.startswith("going on"):
            stepped = after
    code = child.wait()
    hosts("down")
    if code:
        sys.exit("\n".join(lines))
    return {"host": host, "batch": batch, "last_checkpoint": last, "goes_on_after_seconds": round(stepped, 1), "lines": lines,
            "losses": losses(folder / "run")}


def apart(a, b, steps):
    return max(abs(a[step] - b[step]) / b[step] for step in steps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vitesse", default=str(ROOT / "target/release/vitesse"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parent))
    from compare import machine
    record = {"command": "python3 " + " ".join(sys.argv), "machine": machine(), "cases": {}}
    hosts("down")
    text = ["| | host lost | last checkpoint | goes on after | 30 steps after the loss, against 3 ranks | to the end | 1 rank against 3, from the first step |",
            "|---|---|---|---|---|---|---|"]
    for case, (batch, _, more) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            found = lose(args.vitesse, folder, case)
            for ranks, each in ((3, batch), (1, 3 * batch)):
                words = [args.vitesse, "train", *TRAIN, "--batch-size", str(each), "--ranks", str(ranks), "--out", folder / f"plain-{ranks}", *more]
                subprocess.run(words, check=True, capture_output=True)
                found[f"losses_of_{ranks}"] = losses(folder / f"plain-{ranks}")
            since = found["last_checkpoint"]
            found["apart"] = apart(found["losses"], found["losses_of_3"], range(since, since + 30))
            found["apart_to_the_end"] = apart(found["losses"], found["losses_of_3"], range(since, 90))
            found["one_rank_apart"] = apart(found["losses_of_1"], found["losses_of_3"], range(90))
            record["cases"][case] = found
            text.append(f"| {case}, batch {batch} a rank | {found['host']} | step {since} | {found['goes_on_after_seconds']} s | "
                        f"within {found['apart']:.1e} | {found['apart_to_the_end']:.1e} | {found['one_rank_apart']:.1e} |")
            (args.out / "lost-host.json").write_text(json.dumps(record, indent=1))
    head = (f"# One of three hosts is lost\n\n`{record['command']}` on {record['machine']}: ViT-nano/8 over three network namespaces, 1 Gbit/s, "
            "1 ms each way, 90 steps, a checkpoint every 3. The link is cut; losses are relative differences.\n\n")
    logs = "\n\n".join(f"{case}:\n\n```text\n" + "\n".join(found["lines"]) + "\n```" for case, found in record["cases"].items())
    (args.out / "README.md").write_text(head + "\n".join(text) + "\n\nSeconds since the cut, and what was printed:\n\n" + logs + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
