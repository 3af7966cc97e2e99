#!/usr/bin/env python3
"""python_overhead.py [--table FILE] [pyperf's options]: overhead of a Python call over the same
call from C++: one rank, a GEMM so small that the call dominates, in processes and loops of pyperf.
CPU time of the calling thread, so other processes matter only through shared caches and cores; on a
busy machine the min (least_us) is more reliable. JAX arrays are immutable: there out is NumPy's.
Run with PYTHONPATH=build/python:.deps/python-test (tools/setup_python.sh fetches pyperf and JAX).
"""
import datetime
import functools
import importlib
import json
import os
import platform
import subprocess
import sys
import time

import numpy as np
import pyperf
from processors import cpu

import tandem

SIZE, PROCESSES, VALUES = 16, 6, 20
FRAMEWORKS, OPERATORS = ("numpy", "torch", "jax"), ("AgGemm", "GemmRs", "GemmAr")


def tensors(framework):
    arrays = [np.ones((SIZE, SIZE), "f4") for _ in range(3)]
    if framework == "torch":
        return list(map(importlib.import_module("torch").from_numpy, arrays))
    if framework == "jax":
        return [*map(importlib.import_module("jax.numpy").asarray, arrays[:2]), arrays[2]]
    return arrays


@functools.lru_cache(None)
def prepared(framework, name):
    """Runs only in the process that measures it, which has imported what it measures."""
    world = tandem.World(1)
    op = getattr(tandem, name)(world.comm(), SIZE, SIZE, SIZE, "f32", strategy="serial")
    return op, tensors(framework)


def from_cpp(loops, framework, name):
    op, (x, weight, out) = prepared(framework, name)
    return op._repeat(x, weight, out, loops)


def from_python(loops, framework, name):
    op, (x, weight, out) = prepared(framework, name)
    repeated = range(loops)
    begin = time.thread_time()
    for _ in repeated:
        op(x, weight, out)
    seconds = time.thread_time() - begin
    assert float(out[0][0]) == SIZE
    return seconds


def row(framework, name, native, python):
    microseconds = {"cpp_us": native.median(), "python_us": python.median(),
                    "overhead_us": python.median() - native.median(),
                    "least_us": min(python.get_values()) - min(native.get_values())}
    return {"op": name, "framework": framework,
            **{key: round(1e6 * value, 2) for key, value in microseconds.items()}}


def document(results):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    versions = {name: importlib.import_module(name).__version__ for name in FRAMEWORKS}
    return {
        "what": f"calls with out given, {SIZE}x{SIZE}x{SIZE} f32, one rank, median of {PROCESSES} processes of "
                f"{VALUES} values, processor time of the calling thread",
        "results": results, "hardware": cpu(), "commit": commit.stdout.strip(),
        "load": [round(each, 1) for each in os.getloadavg()],
        "versions": {"python": platform.python_version(), **versions},
        "command": "PYTHONPATH=build/python:.deps/python-test python3 " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
    }


def main():
    runner = pyperf.Runner(processes=PROCESSES, values=VALUES)
    runner.argparser.add_argument("--table", help="write what tools/tables.py reads")
    runner.argparser.set_defaults(inherit_environ=["PYTHONPATH", "TANDEM_CACHE_DIR"])
    results = []
    for framework in FRAMEWORKS:
        for name in OPERATORS:
            pair = [runner.bench_time_func(f"{framework} {name} from {side}", run, framework, name)
                    for side, run in (("C++", from_cpp), ("Python", from_python))]
            if None not in pair:  # a measuring process has only one value
                results.append(row(framework, name, *pair))
    if results and runner.args.table and not runner.args.worker:
        with open(runner.args.table, "w") as file:
            file.write(json.dumps(document(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
