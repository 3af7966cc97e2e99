#!/usr/bin/env python3
"""fp8.py [--tandem PATH] [--config FILE] [--device gpu|cpu] [--control] [--steps N] [--seeds N] [--set KEY=VALUE...]
[--json FILE]: losses and times of a job in bf16, in fp8, and in fp8 with weight gradients in bf16, on one GPU or CPU
rank, with the same seeds and text. A run's loss is the mean of its last tenth of steps. Fails if a loss exceeds that
in bf16 by more than 0.5 %. --control, on a CPU: also fp8 without scales, whose loss must exceed it by more."""
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
BOUND = 0.005
RECIPES = {"bf16": {"train.dtype": "bf16"},
           "fp8": {"train.dtype": "fp8"},
           "fp8, weight gradients in bf16": {"train.dtype": "fp8", "train.fp8_weight_gradients": "false"}}
CONTROL = "fp8 without scales"


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit():
    try:
        return output("git", "rev-parse", "--short=8", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TANDEM_COMMIT", "unknown")


def hardware(args):
    if args.device == "gpu":
        return "1x " + output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0")
    return cpu()


def train(args, keys, seed):
    settings = [f"{key}={value}" for key, value in {**keys, "train.seed": seed, "train.steps": args.steps}.items()]
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([args.tandem, "train", args.config, "--device", args.device, "--out", f"{folder}/run",
                              "--set", *settings, *args.set], cwd=ROOT, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)
        if run.returncode:
            sys.exit(run.stderr)
        steps = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    last = steps[-max(1, len(steps) // 10):]
    return {"seed": seed, "loss": statistics.mean(step["loss"] for step in last),
            "step_ms": statistics.median(step["step_ms"] for step in steps),
            "losses": [round(step["loss"], 5) for step in steps[::max(1, len(steps) // 100)]]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=ROOT / "build/bin/tandem", type=pathlib.Path)
    parser.add_argument("--config", default=ROOT / "configs/gpu-100m.toml", type=pathlib.Path)
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--steps", default=1000, type=int)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--set", default=[], nargs="+", metavar="KEY=VALUE")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.tandem = args.tandem.resolve()
    args.config = args.config.resolve()
    if args.control and args.device == "gpu":
        parser.error("--control: expected --device cpu")
    recipes = {**RECIPES, **({CONTROL: {"train.dtype": "fp8", "train.fp8_scales": "false"}} if args.control else {})}
    result = {"op": "train_fp8", "hardware": hardware(args),
              "commit": commit(), "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "command": " ".join(["bench/fp8.py", *sys.argv[1:]]), "config": os.path.relpath(args.config, ROOT),
              "steps": args.steps, "bound": BOUND, "runs": []}
    worst, control = 0, []
    for seed in range(1, args.seeds + 1):
        of_seed = {}
        for recipe, keys in recipes.items():
            run = {"recipe": recipe, **train(args, keys, seed)}
            of_seed[recipe] = run
            run["difference"] = run["loss"] / of_seed["bf16"]["loss"] - 1
            if recipe == CONTROL:
                control.append(run["difference"])
            else:
                worst = max(worst, run["difference"])
            result["runs"].append(run)
            print(f'{recipe:30} seed {seed}: loss {run["loss"]:.4f} ({100 * run["difference"]:+.2f} %), '
                  f'{run["step_ms"]:.1f} ms a step', flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    if worst > BOUND:
        sys.exit(f"fp8: a loss is {100 * worst:.2f} % above that in bf16: expected at most {100 * BOUND} %")
    if args.control and not min(control) > BOUND:
        sys.exit(f"fp8: a loss without scales is {100 * min(control):.2f} % above that in bf16: expected more than "
                 f"{100 * BOUND} %")


if __name__ == "__main__":
    main()
