#!/usr/bin/env python3
"""tuner_cache.py DIR...: prints the contents of src/tune/shipped_tuner.json: the times of all
candidates from the GPU results of `tandem bench` in DIR, and those of a candidate's variants
(fused, fused_cutlass) from the tuner's own file of the same run, DIR/cache/tuner.json."""
import json
import pathlib
import sys

from bench_results import candidates, load

SPLIT_OVER_RANKS = {"ag_gemm": "n", "gemm_rs": "k", "gemm_ar": "k"}
cache = {}
for file in sorted(f for folder in sys.argv[1:] for f in pathlib.Path(folder).glob("*.json")):
    for r in load(file.resolve()):
        split = SPLIT_OVER_RANKS.get(r["op"])
        if r["transport"] != "nccl" or split is None:
            continue
        sizes = {d: r[d] // (r["ranks"] if d == split else 1) for d in "mnk"}
        device = r["hardware"].split("x ", 1)[1]
        dtype = r["dtype"]
        if "scaling" in r:
            dtype += f' to bf16, a scale per {r["scaling"]}'
        key = (f'{device} | nccl | {r["link"]} x{r["ranks"]} | {r["op"]} m {sizes["m"]} '
               f'n {sizes["n"]} k {sizes["k"]} {dtype}')
        cache[key] = {"measured_us": {name: t["median"] for name, t in candidates(r).items()}}
for folder in sys.argv[1:]:
    tuned = pathlib.Path(folder) / "cache" / "tuner.json"
    for key, entry in (json.loads(tuned.read_text()) if tuned.exists() else {}).items():
        key = key.split(" | ", 2)[-1]  # without the machine's libraries and the build
        if " gemm_rs fused m " in key and next(iter(entry["measured_us"]))[0].isdigit():
            key = key.replace(" fused m ", " fused_cutlass m ")  # former names
        key = key.replace(" gemm_rs adding m ", " gemm_rs fused m ")
        of_case = key.replace(" fused m ", " m ").replace(" fused_cutlass m ", " m ")
        if of_case != key and of_case in cache:
            times = {name: round(us, 1) for name, us in entry["measured_us"].items()}
            cache[key] = {"measured_us": times}
lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in cache.items()]
print("{\n" + ",\n".join(lines) + "\n}")
