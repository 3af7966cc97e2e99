#!/usr/bin/env python3
"""python_gpu_overhead.py [FILE]: host overhead of a Python call on GPU tensors over the same call
from C++. One rank, small GEMMs, out given; CPU time of the calling thread over alternating rounds
of calls, with the GPU idle before each. The stream is either the framework's default one, which
each Python call orders with the rank's by two events, or the rank's own. FILE: JSON."""
import datetime
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

import tandem

SIZE, ROUNDS, CALLS = 128, 60, 200


def cupy_or_none():
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return None


def measure(comm, op, x, weight, out, synchronize):
    sides = {"cpp": lambda: op._repeat(x, weight, out, CALLS), "python": lambda: from_python(op, x, weight, out)}
    seconds = {side: [] for side in sides}
    for repeat in range(ROUNDS + 5):
        for side, call in sides.items():
            comm.synchronize()
            synchronize()
            took = call() / CALLS
            if repeat >= 5:
                seconds[side].append(took * 1e6)
    assert float(out[0, 0]) == SIZE
    cpp, python = (statistics.median(seconds[side]) for side in ("cpp", "python"))
    return {"cpp_us": round(cpp, 2), "python_us": round(python, 2), "overhead_us": round(python - cpp, 2),
            "least_us": round(min(seconds["python"]) - min(seconds["cpp"]), 2)}


def from_python(op, x, weight, out):
    begin = time.thread_time()
    for _ in range(CALLS):
        op(x, weight, out)
    return time.thread_time() - begin


def body(comm):
    rows, cupy = [], cupy_or_none()
    local = torch.cuda.ExternalStream(comm.stream)
    for name in ("AgGemm", "GemmRs", "GemmAr"):
        op = getattr(tandem, name)(comm, SIZE, SIZE, SIZE, "f32")
        for label, stream in (("torch", torch.cuda.current_stream()), ("torch, on the rank's stream", local)):
            with torch.cuda.stream(stream):
                tensors = [torch.ones(SIZE, SIZE, device=comm.device) for _ in range(3)]
                rows.append({"op": name, "framework": label, **measure(comm, op, *tensors, stream.synchronize)})
        if cupy:
            tensors = [cupy.ones((SIZE, SIZE), "f4") for _ in range(3)]
            synchronize = cupy.cuda.get_current_stream().synchronize
            rows.append({"op": name, "framework": "cupy", **measure(comm, op, *tensors, synchronize)})
    return rows


def main():
    rows = tandem.run(1, body, device="cuda")[0]
    for row in rows:
        print(row)
    if len(sys.argv) > 1:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        cupy = cupy_or_none()
        document = {
            "what": f"calls with out given, {SIZE}x{SIZE}x{SIZE} f32, one rank, median of {ROUNDS} rounds of "
                    f"{CALLS} calls, processor time of the calling thread",
            "results": rows, "hardware": torch.cuda.get_device_name(), "commit": commit.stdout.strip(),
            "date": datetime.date.today().isoformat(), "load": [round(each, 1) for each in os.getloadavg()],
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         **({"cupy": cupy.__version__} if cupy else {})},
        }
        with open(sys.argv[1], "w") as file:
            file.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
