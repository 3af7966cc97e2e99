#!/usr/bin/env python3
"""predicted_layouts.py TANDEM [COUNT [SEED]]: trains generated jobs on generated layouts and emulated
links, as many ranks as processors, and prints the self-check of each: predicted beside measured step
time, and their mean error. Times mean something only on a machine that does nothing else."""
import json
import os
import random
import subprocess
import sys
import tempfile

TANDEM = sys.argv[1]
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 30
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 1
CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../configs/tiny.toml")
RANKS = max(2, min(8, os.cpu_count() or 2))


def generate(rng):
    """Keys of a job and its layout."""
    tp, pp = rng.choice([(t, p) for t in (1, 2, 4) for p in (1, 2, 4) if RANKS % (t * p) == 0])
    dp = RANKS // (tp * pp)
    hidden, microbatch = rng.choice([128, 256]), rng.choice([1, 2])
    keys = {"model.hidden": hidden, "model.ffn": 11 * hidden // 4, "model.head_dim": hidden // 4, "model.layers": rng.choice([4, 8]),
            "parallel.tp": tp, "parallel.pp": pp, "parallel.dp": dp, "train.microbatch": microbatch,
            "train.batch": dp * microbatch * rng.choice([4, 8]), "train.seq": rng.choice([64, 128]), "train.steps": 24,
            "parallel.link": rng.choice(["200MB/s,50us", "1GB/s,20us", "5GB/s,5us"]),
            "train.recompute": rng.choice(["none", "none", "full"]), "parallel.zero": rng.choice([1, 2]) if dp > 1 and pp == 1 else 1}
    if pp > 1:
        keys["parallel.schedule"] = rng.choice(["1f1b", "gpipe", "zb-h1"])
    return keys


def run(keys, out):
    environment = {**os.environ, "TANDEM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [TANDEM, "train", CONFIG, "--out", out, "--set"] + [f"{key}={value}" for key, value in keys.items()]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr[-500:]}")
    with open(out + "/self_check.json") as file:
        return json.load(file)


def main():
    rng = random.Random(SEED)
    errors = []
    print("measured ms  predicted ms  error %  largest difference  layout")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(COUNT):
            keys = generate(rng)
            check = run(keys, f"{folder}/{number}")
            measured, predicted = check["measured_ms"], check["predicted_ms"]
            error = 100 * (predicted["step"] / measured["step"] - 1)
            errors.append(abs(error))
            term = max((name for name in measured if name != "step"), key=lambda name: abs(measured[name] - predicted[name]))
            layout = " ".join(f"{key.split('.')[1]} {value}" for key, value in keys.items() if key not in ("train.steps", "model.ffn", "model.head_dim"))
            print(f"{measured['step']:11.2f} {predicted['step']:13.2f} {error:8.1f}  {term:18}  {layout}", flush=True)
    print(f"{COUNT} layouts of {RANKS} ranks: mean error {sum(errors) / COUNT:.1f} %, median {sorted(errors)[COUNT // 2]:.1f} %, worst {max(errors):.1f} %")


main()
