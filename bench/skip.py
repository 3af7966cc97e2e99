#!/usr/bin/env python3
"""skip.py [--only GROUP] [--seeds N] [--hours H]: runs what docs/guide/skip.md compares, each case with several
seeds, into bench/results/cpu/skip/GROUP.json. Runs that the file has are not repeated, so it may be interrupted
and called again. Results do not depend on timing; seconds do.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from processors import cpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/cpu/skip"
PYTHON = "/usr/bin/python3"


TEXT = ["src", "include", "tests", "docs"]
PIECE = 16384  # bytes of a file of the learners' text: every twentieth is held out
SIZES = {"model.vocab": 320, "model.ffn": 192}  # which 64 divides: whole tiles of cosines


def varco_cases():
    """(name, arguments of graph_sage.py): full, and for each number of bytes the schedule, its reverse and a
    fixed ratio. No grid: all take the example's learning rate."""
    steps = 60
    yield "full exchange", [{"exchange": "full", "steps": steps}]
    for slope in 1.25, 1.5, 2, 3:
        ratios = [max(1, 128 - slope * 127 / steps * step) for step in range(steps)]
        share = sum(1 / ratio for ratio in ratios) / steps
        yield f"VARCO, slope {slope}", [{"exchange": "varco", "slope": slope, "steps": steps}]
        yield f"reversed, slope {slope}", [{"exchange": "reversed", "slope": slope, "steps": steps}]
        yield f"fixed ratio {1 / share:.2f}", [{"exchange": "fixed", "ratio": round(1 / share, 2), "steps": steps}]
    yield "no exchange", [{"exchange": "none", "steps": steps}]


def run_varco(args, settings, seed, folder):
    graph = ROOT / "out/packages.npz"
    if not graph.exists():
        graph.parent.mkdir(exist_ok=True)
        subprocess.run([PYTHON, ROOT / "examples/python/package_graph.py", graph], check=True)
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    subprocess.run([PYTHON, ROOT / "examples/python/graph_sage.py", "--data", graph, *words, "--seed", str(seed),
                    "--json", folder / "run.json"], check=True, capture_output=True,
                   env={"PYTHONPATH": str(ROOT / "build/python"), "PATH": "/usr/bin:/bin", "TANDEM_TUNE": "0"})
    result = json.loads((folder / "run.json").read_text())
    return {key: result[key] for key in ("accuracy", "bytes_sent", "loss")}


def training_cases():
    """(name, grid of settings): the grid's best at the first seed runs with all seeds."""
    lrs = 1e-3, 2e-3, 4e-3, 8e-3

    def grid(**settings):
        """Every combination of the learning rates and of settings with several values."""
        points = [{"optimizer.lr": lr, "optimizer.min_lr": lr / 10} for lr in lrs]
        for key, values in settings.items():
            key = key.replace("__", ".")
            values = values if isinstance(values, tuple) else (values,)
            points = [{**point, key: value} for point in points for value in values]
        return points

    local = {"sync__method": "local", "sync__learners": 4}
    yield "AdamW, every step", grid()
    yield "local, int4", grid(**local, sync__every=30, sync__outer__lr=(0.4, 0.7, 1.0), sync__codec="int4:g32")
    yield "local, 1 of 64, 2 bits", grid(**local, sync__every=30, sync__topk=1 / 64, sync__outer__lr=(0.4, 0.7, 1.0))
    yield "demo, 16 of each 4096", [{"sync.method": "demo", "sync.learners": 4, "sync.topk": 16, "optimizer.lr": lr,
                                     "optimizer.min_lr": lr / 10} for lr in (3e-4, 6e-4, 1.2e-3, 2.4e-3)]
    yield "local, every 200", grid(**local, sync__every=200, sync__outer__lr=(0.4, 0.7, 1.0))
    yield "averages, every 200", grid(**local, sync__every=200, sync__outer__lr=1.0, sync__outer__momentum=0.0)
    yield "never", grid(**local, sync__every=1000000)
    yield "local, f32", grid(**local, sync__every=30, sync__outer__lr=(0.4, 0.7, 1.0))


def write_text(folder):
    """The repository's own text, cut in pieces, so that what is held out is like the rest."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    text = b"".join((ROOT / name).read_bytes() for name in git("ls-files", *TEXT).split())
    for begin in range(0, len(text), PIECE):
        (folder / f"{begin // PIECE:04}.txt").write_bytes(text[begin:begin + PIECE])


def run_training(args, settings, seed, folder):
    write_text(ROOT / "out/skip_text")
    table = {**SIZES, "parallel.dp": 4, "train.steps": 1800, "train.batch": 16, "train.seed": seed, "train.validate_every": 1800,
             "data.paths": ["out/skip_text"], "data.val_fraction": 0.05, "optimizer.warmup": 50, **settings}
    words = [word for key, value in table.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    subprocess.run([args.tandem, "train", ROOT / "configs/tiny.toml", "--out", folder / "run", *words], cwd=ROOT,
                   check=True, capture_output=True)
    steps = [json.loads(line) for line in open(folder / "run/metrics.jsonl")]
    return {"validation_loss": steps[-1]["validation_loss"],
            "bytes_sent": sum(sum(step["sent_bytes"].values()) for step in steps)}


# By name: cases, what runs one of them, and which key of a result a grid is chosen by (the least).
GROUPS = {"varco": (varco_cases, run_varco, None), "training": (training_cases, run_training, "validation_loss")}


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def load(file):
    if file.exists():
        return json.loads(file.read_text())
    return {"hardware": cpu(), "cases": []}


class Group:
    def __init__(self, args, name, end):
        self.args, self.name, self.end = args, name, end
        self.cases, self.run, self.chosen_by = GROUPS[name]
        self.file = RESULTS / f"{name}.json"
        self.content = load(self.file)

    def result(self, case, settings, seed):
        """Of the file, or of a run."""
        entry = next((entry for entry in self.content["cases"]
                      if entry["name"] == case and entry["settings"] == settings), None)
        if entry is None:
            entry = {"name": case, "settings": settings, "runs": []}
            self.content["cases"].append(entry)
        known = next((run for run in entry["runs"] if run["seed"] == seed), None)
        if known:
            return known
        if time.monotonic() > self.end:
            sys.exit("time is up: call again to go on")
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = self.run(self.args, settings, seed, pathlib.Path(folder))
        entry["runs"].append({"seed": seed, "commit": git("describe", "--always", "--dirty"), "seconds": round(time.monotonic() - begin, 1), **result})
        self.content |= {"commit": git("describe", "--always", "--dirty"), "command": f"bench/skip.py --only {self.name} --seeds {self.args.seeds}",
                         "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")
        print(f"{self.name}: {case}, {settings}, seed {seed}: {result}", flush=True)
        return entry["runs"][-1]

    def run_all(self):
        for case, grid in self.cases():
            best = grid[0]
            if len(grid) > 1:
                best = min(grid, key=lambda point: self.result(case, point, 1)[self.chosen_by])
            for seed in range(1, self.args.seeds + 1):
                self.result(case, best, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(GROUPS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=3)
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    args = parser.parse_args()
    end = time.monotonic() + args.hours * 3600
    for name in [args.only] if args.only else GROUPS:
        Group(args, name, end).run_all()


if __name__ == "__main__":
    main()
