#!/usr/bin/env python3
"""ablation.py [--tandem PATH] [--steps N] [--rounds N] [--link LINK] [--set KEY=VALUE...] [--json FILE]: trains one job on CPU thread
ranks with an emulated link, with features switched on one after another, each on top of those before, and
compares time per sequence and losses. All rows train on the same samples: the last has a larger batch and fewer
steps. Each row is trained once per round, and steps of all rounds are pooled; the first steps of each are left
out. Fails if a row's rounds differ in any loss, or if a row's loss changes by more than the bound of its feature.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from processors import cpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = ["src", "include", "tests", "docs"]
WARM_STEPS, LAST = 2, 4  # steps that are not timed; steps that the loss is the mean of
BATCH, LARGER = 8, 2     # sequences; factor of the last row
BASE = {"model.hidden": 128, "model.layers": 4, "model.heads": 4, "model.kv_heads": 4, "model.head_dim": 32,
        "model.ffn": 352, "model.max_seq": 256, "train.seq": 256, "train.batch": BATCH, "train.microbatch": 1,
        "train.dtype": "f32", "optimizer.name": "adamw", "optimizer.lr": 3e-3, "optimizer.min_lr": 3e-3,
        "optimizer.warmup": 4, "parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 2, "parallel.virtual_stages": 1,
        "parallel.schedule": "1f1b", "parallel.strategy": "serial", "parallel.dp_bucket_mib": 1024,
        "parallel.codec": "none", "model.parallel_block": False, "model.sliding_window": 0}
# Name, keys, and by how much the loss may differ from that of the row before: by rounding where only the order of
# sums changes, freely (None) where the model or the batch changes.
ROWS = [("baseline", {}, None),
        ("parallel block", {"model.parallel_block": True}, None),
        ("sliding window of 64 tokens", {"model.sliding_window": 64}, None),
        ("overlapped operators", {"parallel.strategy": "overlapped"}, 1e-3),
        ("gradients reduced in buckets during backward", {"parallel.dp_bucket_mib": 0.25}, 1e-3),
        ("schedule zb-v", {"parallel.schedule": "zb-v", "parallel.virtual_stages": 2}, 1e-3),
        ("wire formats: int8, weights lossless", {"parallel.codec": "attention=int8,mlp=int8,gradients=int8,stages=int8,weights=lossless"}, 2e-2),
        (f"LAMB with {LARGER} times the batch", {"optimizer.name": "lamb", "train.batch": LARGER * BATCH,
                                                 "optimizer.lr": 4e-2, "optimizer.min_lr": 4e-2,
                                                 "optimizer.warmup": 2}, None)]


def words(keys):
    return [f"{key}={json.dumps(value) if isinstance(value, (bool, list)) else value}" for key, value in keys.items()]


def train(args, keys):
    job = {**keys, "train.steps": args.steps * BATCH // keys["train.batch"], "data.paths": TEXT,
           "parallel.link": args.link}
    overrides = [*words(job), *args.set]  # the last of a key counts
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([args.tandem, "train", ROOT / "configs/tiny.toml", "--out", folder + "/run",
                              "--set", *overrides], cwd=ROOT, capture_output=True, text=True,
                             env={**os.environ, "TANDEM_THREADS": "1", "TANDEM_CACHE_DIR": folder})
        if run.returncode:
            sys.exit(run.stderr)
        return [json.loads(line) for line in open(folder + "/run/metrics.jsonl")]


def summarize(name, changed, bound, keys, rounds):
    losses = [[step["loss"] for step in steps] for steps in rounds]
    if any(of_round != losses[0] for of_round in losses):
        sys.exit(f"{name}: the rounds' losses differ")
    times = sorted(step["step_ms"] for steps in rounds for step in steps[WARM_STEPS:])
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"name": name, "keys": changed, "max_change": bound, "batch": keys["train.batch"], "steps": len(losses[0]),
            "tokens": sum(step["tokens"] for step in rounds[0]), "step_ms": quartiles[1],
            "step_ms_quartiles": [quartiles[0], quartiles[2]],
            "ms_per_sequence": quartiles[1] / keys["train.batch"],
            "loss": statistics.mean(losses[0][-LAST:]), "losses": losses[0]}


def measure(args):
    jobs, keys = [], dict(BASE)
    for name, changed, bound in ROWS:
        keys = {**keys, **changed}
        jobs.append((name, changed, bound, keys))
    rounds = [[] for _ in jobs]
    for _ in range(args.rounds):
        for job, of_job in zip(jobs, rounds):
            of_job.append(train(args, job[3]))
    rows = [summarize(*job, of_job) for job, of_job in zip(jobs, rounds)]
    for before, row in zip([None, *rows], rows):
        row["speed_up"] = rows[0]["ms_per_sequence"] / row["ms_per_sequence"]
        row["loss_change"] = row["loss"] / before["loss"] - 1 if before else 0
        if row["max_change"] is not None and abs(row["loss_change"]) > row["max_change"]:
            sys.exit(f'{row["name"]}: loss {row["loss"]:.4f}, {before["loss"]:.4f} before it: expected a change of at '
                     f'most {100 * row["max_change"]:g} %')
        low, high = row["step_ms_quartiles"]
        print(f'{row["name"]:46} batch {row["batch"]:3}  step {row["step_ms"]:7.1f} ms ({low:.1f}-{high:.1f})  '
              f'{row["speed_up"]:.2f}x  loss {row["loss"]:.4f} after {row["steps"]} steps', flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    parser.add_argument("--steps", type=int, default=24, help=f"of {BATCH} sequences; a multiple of {LARGER}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--link", default="20MB/s,50us", help="emulated, of every rank")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of all rows' jobs")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.steps < LARGER * (WARM_STEPS + 1) or args.steps % LARGER or args.rounds < 1:
        parser.error(f"--steps {args.steps} --rounds {args.rounds}: expected a multiple of {LARGER} from "
                     f"{LARGER * (WARM_STEPS + 1)} on, and at least 1 round")
    args.tandem = pathlib.Path(args.tandem).resolve()
    load = os.getloadavg()[0]
    rows = measure(args)
    if not args.json:
        return
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    content = {"op": "ablation", "settings": [*words(BASE), *args.set], "text": TEXT, "rounds": args.rounds,
               "ranks": BASE["parallel.tp"] * BASE["parallel.dp"] * BASE["parallel.pp"], "link": args.link,
               "rows": rows, "hardware": cpu(), "load_before": round(load, 2), "commit": commit.stdout.strip(),
               "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "command": " ".join(["bench/ablation.py", "--steps", str(args.steps), "--rounds", str(args.rounds), "--link",
                                     args.link, *(["--set", *args.set] if args.set else [])])}
    pathlib.Path(args.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
