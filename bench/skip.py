#!/usr/bin/env python3
"""skip.py [--only GROUP] [--seeds N] [--hours H] [--jobs N]: runs what docs/guide/skip.md compares, each case with
several seeds, into bench/results/cpu/skip/GROUP.json. Runs that the file has are not repeated, so it may be
interrupted and called again. Results do not depend on timing, nor on --jobs, the runs at a time; seconds do.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
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
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = subprocess.run(["git", "ls-files", *TEXT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    text = b"".join((ROOT / name).read_bytes() for name in files.split())
    for begin in range(0, len(text), PIECE):
        (partial / f"{begin // PIECE:04}.txt").write_bytes(text[begin:begin + PIECE])
    partial.rename(folder)


def run_training(args, settings, seed, folder):
    table = {**SIZES, "parallel.dp": 4, "train.steps": 1800, "train.batch": 16, "train.seed": seed, "train.validate_every": 1800,
             "data.paths": ["out/skip_text"], "data.val_fraction": 0.05, "optimizer.warmup": 50, **settings}
    words = [word for key, value in table.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    threads = {} if args.jobs == 1 else {"OMP_NUM_THREADS": "1"}
    subprocess.run([args.tandem, "train", ROOT / "configs/tiny.toml", "--device", "cpu", "--out", folder / "run", *words],
                   cwd=ROOT, check=True, capture_output=True, env=os.environ | threads)
    steps = [json.loads(line) for line in open(folder / "run/metrics.jsonl")]
    return {"validation_loss": steps[-1]["validation_loss"],
            "bytes_sent": sum(sum(step["sent_bytes"].values()) for step in steps)}


# By name: cases, what runs one of them, and which key of a result a grid is chosen by (the least).
GROUPS = {"varco": (varco_cases, run_varco, None), "training": (training_cases, run_training, "validation_loss")}


def built_commit(tandem):
    version = subprocess.run([tandem, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"\((.*)\)", version)[1]


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
        self.lock = threading.Lock()

    def entry(self, case, settings):
        """Of the file; the caller holds the lock."""
        entry = next((entry for entry in self.content["cases"]
                      if entry["name"] == case and entry["settings"] == settings), None)
        if entry is None:
            entry = {"name": case, "settings": settings, "runs": []}
            self.content["cases"].append(entry)
        return entry

    def result(self, case, settings, seed):
        """Of the file, or of a run; None if time was up before it began."""
        with self.lock:
            known = next((run for run in self.entry(case, settings)["runs"] if run["seed"] == seed), None)
        if known or time.monotonic() > self.end:
            return known
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = self.run(self.args, settings, seed, pathlib.Path(folder))
        commit = built_commit(self.args.tandem)
        run = {"seed": seed, "commit": commit, "seconds": round(time.monotonic() - begin, 1), **result}
        with self.lock:
            runs = self.entry(case, settings)["runs"]
            runs.append(run)
            runs.sort(key=lambda run: run["seed"])
            self.content |= {"commit": commit, "command": f"bench/skip.py --only {self.name} --seeds {self.args.seeds}",
                             "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.content, indent=1) + "\n")
            print(f"{self.name}: {case}, {settings}, seed {seed}: {result}", flush=True)
        return run

    def run_all(self):
        """The grids with the first seed, then their best points with all seeds. Returns whether all have run."""
        with self.lock:
            for case, grid in self.cases():
                for settings in grid:
                    self.entry(case, settings)
        with concurrent.futures.ThreadPoolExecutor(self.args.jobs) as pool:
            grids = [(case, grid, [pool.submit(self.result, case, point, 1) for point in grid] if len(grid) > 1 else [])
                     for case, grid in self.cases()]
            chosen = []
            for case, grid, futures in grids:
                results = [future.result() for future in futures]
                if None in results:
                    return False
                best = min(range(len(results)), key=lambda i: results[i][self.chosen_by]) if results else 0
                chosen.append((case, grid[best]))
            futures = [pool.submit(self.result, case, point, seed)
                       for case, point in chosen for seed in range(1, self.args.seeds + 1)]
            return all([future.result() for future in futures])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(GROUPS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    args = parser.parse_args()
    end = time.monotonic() + args.hours * 3600
    write_text(ROOT / "out/skip_text")
    for name in [args.only] if args.only else GROUPS:
        if not Group(args, name, end).run_all():
            raise SystemExit("time is up: call again to go on")


if __name__ == "__main__":
    main()
