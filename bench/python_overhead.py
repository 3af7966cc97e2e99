#!/usr/bin/env python3
"""python_overhead.py [FILE]: what a call from Python costs beyond the same call from C++: one rank, a
product so small that calling is most of it, the two interleaved; medians of many rounds. Processor time of
the calling thread, so that what else runs counts only by the caches and cores that it shares; where
much does, the fastest rounds (least_us) say more. Run with
PYTHONPATH=build/python."""
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

import tandem

SIZE, CALLS, ROUNDS = 16, 500, 200


def tensors(framework):
    arrays = [np.ones((SIZE, SIZE), "f4") for _ in range(3)]
    if framework == "numpy":
        return arrays
    import torch

    return [torch.from_numpy(array) for array in arrays]


def measure(comm, kind, framework):
    op = kind(comm, SIZE, SIZE, SIZE, "f32", strategy="serial")
    x, weight, out = tensors(framework)
    native, python = [], []
    for round_ in range(ROUNDS + 10):
        inside = op._repeat(x, weight, out, CALLS) / CALLS
        begin = time.thread_time()
        for _ in range(CALLS):
            op(x, weight, out)
        outside = (time.thread_time() - begin) / CALLS
        if round_ >= 10:  # warm
            native.append(inside)
            python.append(outside)
    extra = [b - a for a, b in zip(native, python)]
    assert float(out[0][0]) == SIZE
    row = {name: round(1e6 * statistics.median(times), 2)
           for name, times in (("cpp_us", native), ("python_us", python), ("overhead_us", extra))}
    return {**row, "least_us": round(1e6 * (min(python) - min(native)), 2)}


def cpu():
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{len(models)}x {models[0]}"


def main():
    results = []
    with tandem.World(1) as world:
        for framework in ("numpy", "torch"):
            for kind in (tandem.AgGemm, tandem.GemmRs, tandem.GemmAr):
                row = {"op": kind.__name__, "framework": framework,
                       **measure(world.comm(), kind, framework)}
                results.append(row)
                print(row)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    torch = sys.modules["torch"].__version__
    document = {
        "what": f"calls with out given, {SIZE}x{SIZE}x{SIZE} f32, one rank, median of {ROUNDS} rounds "
                f"of {CALLS} calls, processor time of the calling thread",
        "results": results, "hardware": cpu(), "commit": commit.stdout.strip(),
        "load": [round(each, 1) for each in os.getloadavg()],
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch},
        "command": "PYTHONPATH=build/python python3 " + " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
    }
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
