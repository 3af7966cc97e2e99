#!/usr/bin/env python3
"""What is committed under bench/results has the form of now, the tables and pictures are made of it, and the script
that rewrites old files does what it says, with the candidates that the library calls serial."""
import json
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))
import bench_results
import moe_predict
import rewrite_serial
import tables


def entry(us):
    return {"median": us, "min": us - 1, "max": us + 1, "host": us / 10, "host_burst": us / 20}


def old_result():
    """As it was written when only NCCL and the copy engine counted as serial."""
    ways = {"fused": entry(17.5), "one_shot": entry(21.7), "serial_nccl": entry(28.6), "two_shot": entry(25.3)}
    return {"op": "gemm_ar", "ranks": 4, "m": 1, "n": 8192, "k": 8192, "dtype": "bf16", "strategy": "overlapped",
            "config": {"serial": "serial_nccl", "overlapped": "fused", "ways_us": ways},
            "baseline": "serial_nccl", "time_us": {"gemm": 14.9, "serial": 28.6, "overlapped": 17.5},
            "spread_us": {"serial": [27.6, 29.6], "overlapped": [16.5, 18.5]},
            "ect_us": {"serial": 13.7, "overlapped": 2.6}, "efficiency": 0.8102, "efficiency_95": [0.8, 0.82],
            "host_us": 1.75, "host_burst_us": 0.875}


def check(condition, what):
    if not condition:
        sys.exit(f"results_test: {what}")


def serial_in_the_library():
    text = (ROOT / "src/overlap/cuda/ways.h").read_text()
    body = text[text.index("is_serial(Way way)"):]
    return set(re.findall(r"case Way::(\w+):", body[:body.index("return true")]))


def rewriting():
    once = rewrite_serial.rewritten(json.dumps(old_result()))
    check(rewrite_serial.rewritten(once) == once, "a second run changes what the first one wrote")
    r = json.loads(once)
    check(r["time_us"] == {"gemm": 14.9, "serial": 21.7, "nccl": 28.6, "overlapped": 17.5}, r["time_us"])
    check(r["ect_us"] == {"serial": 6.8, "overlapped": 2.6}, r["ect_us"])
    check(r["efficiency"] == 0.6176 and r["efficiency_95"] is None, "E")
    check(r["spread_us"]["serial"] == [20.7, 22.7] and r["config"]["serial"] == "one_shot", "spread, name")
    check(bench_results.chosen(r) == "fused" and abs(bench_results.hidden(r) - 0.6176) < 1e-3, "what is chosen")
    faster = old_result()
    faster["config"]["ways_us"]["fused"] = entry(22.0)
    r = json.loads(rewrite_serial.rewritten(json.dumps(faster)))
    check(r["strategy"] == "serial" and r["efficiency"] < 0, "overlapped that is slower than serial")
    check(bench_results.chosen(r) == "one_shot" and bench_results.hidden(r) == 0, "serial hides nothing")
    check(bench_results.capped_mean([1.2, 0.5]) == 0.75, "E counts as 100 % at most")


def committed():
    for file in (ROOT / "bench/results").rglob("*.json"):
        for r in bench_results.load(file):
            if not isinstance(r, dict) or not rewrite_serial.candidates(r) or r["ranks"] == 1 or \
                    r["time_us"]["gemm"] == 0:
                continue
            serial = min(t["median"] for t in bench_results.candidates(r).values() if t["form"] == "serial")
            check(r["time_us"]["serial"] == serial, f"{file}: serial is not the fastest that does not overlap")


def predicting():
    """Mixtral, 16384 tokens on four ranks. 1 - C(6, 2) / C(8, 2) = 13/28 of 4096 rows go to each of three ranks, 8 KiB
    each, at 345 GB/s: 135.468 us and 2 for the first signal."""
    times = {"route": 50, "place": 10, "in": 1000, "out": 100, "sum": 20, "products": 1100, "layer": 1190}
    r = {"model": "mixtral-8x7b", "tokens": 4096, "commit": "abc", "time_us": times}
    wire = 3 * 4096 * 13 / 28 * 8192 / 345e3 + 2
    p = moe_predict.predicted(r)
    check(abs(moe_predict.wire_us("mixtral-8x7b", 16384) - wire) < 1e-6 and abs(wire - 137.468) < 1e-3, f"wire {wire}")
    check(p["tokens"] == 16384 and p["products"] == 1100 and abs(p["serial"] - (1130 + 2 * wire)) < 1e-6, p)
    check(abs(p["limit"] - (p["serial"] - wire - 100)) < 1e-6, "out is shorter than the wire: that much is hidden")
    check(abs(p["overlapped"] - (p["serial"] - 0.8 * (wire + 100))) < 1e-6, p)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps(r) + "\n" + json.dumps({**r, "tokens": 64}) + "\n")
        file.flush()
        text = tables.KINDS["predict"](file.name)
    last = text.splitlines()[-1]
    check(text.startswith("**Predicted**") and "commit abc" in text and text.count("mixtral") == 1, text)
    check(last == f'| mixtral-8x7b | 16384 | 1100 | 275 | 1405 | 1215 | 1167 | 6026 | {6026 / p["overlapped"]:.2f} |', last)
    check(len(bench_results.load(moe_predict.PEERS)) == 12, moe_predict.PEERS)


check(serial_in_the_library() == rewrite_serial.SERIAL - {"product"}, "rewrite_serial.py and ways.h differ")
rewriting()
predicting()
committed()
sys.argv = ["rewrite_serial.py", "--check"]
check(rewrite_serial.main() == 0, "tools/rewrite_serial.py changes what is committed")
sys.argv = ["tables.py", "--check"]
check(tables.main() == 0, "tools/tables.py changes what is committed")
