#!/usr/bin/env python3
"""gradient_codecs.py [--tandem PATH] [--steps N] [--seeds N] [--dp N] [--json FILE]: trains
configs/tiny.toml on this repository's text with uncompressed gradients and with encoded ones, with
and without error feedback, and compares losses at equal steps: the mean training loss of the last
50 steps, and the held-out loss. Every run is repeated with other seeds; each is compared with the
uncompressed run of its seed. Losses do not depend on timing: a busy machine gives the same values.
"""
import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import tempfile

from processors import cpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = ["src", "include", "tests", "docs"]
HELD_OUT, LAST = 0.05, 50
RUNS = [("none", True), ("gradients=int8", True), ("gradients=int8", False), ("gradients=int4", True),
        ("gradients=int4", False), ("gradients=int4:g32", True), ("gradients=int4:g32", False),
        ("gradients=int4:g32,weights=int8", True), ("gradients=int2", True), ("gradients=int2", False)]


def settings(args, codec, feedback, seed):
    table = {"parallel.dp": args.dp, "parallel.codec": json.dumps(codec),
             "parallel.error_feedback": str(feedback).lower(), "train.steps": args.steps, "train.batch": 16,
             "train.seed": seed, "train.validate_every": args.steps, "data.paths": json.dumps(TEXT),
             "data.val_fraction": HELD_OUT, "optimizer.lr": 1e-3, "optimizer.min_lr": 1e-4, "optimizer.warmup": 50}
    return [word for key, value in table.items() for word in ("--set", f"{key}={value}")]


def train(args, codec, feedback, seed):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([args.tandem, "train", ROOT / "configs/tiny.toml", "--out", folder + "/run",
                        *settings(args, codec, feedback, seed)], cwd=ROOT, check=True, capture_output=True, text=True)
        steps = [json.loads(line) for line in open(folder + "/run/metrics.jsonl")]
    return {"seed": seed, "loss": statistics.mean(step["loss"] for step in steps[-LAST:]),
            "validation_loss": steps[-1]["validation_loss"], "gradient_bytes": steps[-1]["gradient_bytes"],
            "weight_bytes": steps[-1]["weight_bytes"], "tokens": sum(step["tokens"] for step in steps)}


def compared(rows):
    uncompressed = {run["seed"]: run for run in rows[0]["runs"]}
    for row in rows:
        for key in ("loss", "validation_loss"):
            rises = [run[key] / uncompressed[run["seed"]][key] - 1 for run in row["runs"]]
            row[key + "_rise"] = {"mean": statistics.mean(rises), "min": min(rises), "max": max(rises)}
            row[key] = statistics.mean(run[key] for run in row["runs"])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--json")
    args = parser.parse_args()
    args.tandem = pathlib.Path(args.tandem).resolve()
    rows = []
    for codec, feedback in RUNS:
        rows.append({"codec": codec, "error_feedback": feedback,
                     "runs": [train(args, codec, feedback, seed + 1) for seed in range(args.seeds)]})
        row = compared(rows)[-1]
        print(f'{codec:32} {"feedback" if feedback else "none":9} loss {row["loss"]:.4f} '
              f'{row["loss_rise"]["mean"] * 100:+.2f} %  held out {row["validation_loss"]:.4f} '
              f'{row["validation_loss_rise"]["mean"] * 100:+.2f} %', flush=True)
    if not args.json:
        return
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    content = {"op": "gradient_codecs", "job": "configs/tiny.toml",
               "settings": settings(args, "CODEC", True, "SEED")[1::2], "text": TEXT, "steps": args.steps,
               "ranks": args.dp, "last": LAST, "rows": rows, "hardware": cpu(), "commit": commit.stdout.strip(),
               "command": f"bench/gradient_codecs.py --steps {args.steps} --seeds {args.seeds} --dp {args.dp}",
               "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    pathlib.Path(args.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
