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


def varco_cases():
    """(name, arguments of graph_sage.py)."""
    yield "full", ["--exchange", "full"]
    for slope in 2, 3, 4, 5:
        yield f"VARCO, slope {slope}", ["--exchange", "varco", "--slope", str(slope)]
        yield f"reversed, slope {slope}", ["--exchange", "reversed", "--slope", str(slope)]
    for ratio in 1.25, 1.5, 2, 4, 16:
        yield f"fixed ratio {ratio}", ["--exchange", "fixed", "--ratio", str(ratio)]
    yield "none", ["--exchange", "none"]


def run_varco(arguments, seed, folder):
    graph = ROOT / "out/packages.npz"
    if not graph.exists():
        graph.parent.mkdir(exist_ok=True)
        subprocess.run([PYTHON, ROOT / "examples/python/package_graph.py", graph], check=True)
    subprocess.run([PYTHON, ROOT / "examples/python/graph_sage.py", "--data", graph, *arguments, "--seed", str(seed),
                    "--json", folder / "run.json"], check=True, capture_output=True,
                   env={"PYTHONPATH": str(ROOT / "build/python"), "PATH": "/usr/bin:/bin", "TANDEM_TUNE": "0"})
    result = json.loads((folder / "run.json").read_text())
    return {key: result[key] for key in ("accuracy", "bytes_sent", "loss")}


GROUPS = {"varco": (varco_cases, run_varco)}


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def load(file):
    if file.exists():
        return json.loads(file.read_text())
    return {"hardware": cpu(), "commit": git("describe", "--always", "--dirty"), "cases": []}


def run_group(name, seeds, end):
    cases, run = GROUPS[name]
    file = RESULTS / f"{name}.json"
    content = load(file)
    for case, arguments in cases():
        entry = next((entry for entry in content["cases"] if entry["arguments"] == arguments), None)
        if entry is None:
            entry = {"name": case, "arguments": arguments, "runs": []}
            content["cases"].append(entry)
        for seed in range(1, seeds + 1):
            if any(one["seed"] == seed for one in entry["runs"]):
                continue
            if time.monotonic() > end:
                sys.exit("time is up: call again to go on")
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                result = run(arguments, seed, pathlib.Path(folder))
            entry["runs"].append({"seed": seed, "seconds": round(time.monotonic() - begin, 1), **result})
            content |= {"command": f"bench/skip.py --only {name} --seeds {seeds}",
                        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content, indent=1) + "\n")
            print(f"{name}: {case}, seed {seed}: {result}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(GROUPS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=3)
    args = parser.parse_args()
    end = time.monotonic() + args.hours * 3600
    for name in [args.only] if args.only else GROUPS:
        run_group(name, args.seeds, end)


if __name__ == "__main__":
    main()
