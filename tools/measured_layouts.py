#!/usr/bin/env python3
"""measured_layouts.py TANDEM [--ranks 2|4] [--repetitions 5] [--steps 40] [--link 1GB/s,20us] [--json FILE]: trains one job in
every layout of a small grid on CPU ranks. The planner picks the layout whose step its cost model predicts to be shortest, from
costs that the first repetition measures (self_check.json); all layouts are measured in the others, one after the other in each,
so that slow minutes of the machine meet all of them. Prints whether the pick is within 3 % of the best measured layout. Times
mean something only on a machine that does nothing else."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../configs/tiny.toml")
JOB = {"model.hidden": 128, "model.ffn": 352, "model.head_dim": 32, "model.layers": 4, "train.batch": 16, "train.seq": 128,
       "train.dtype": "f32"}
WARM_STEPS = 4


def grid(ranks):
    """Layouts: keys of the job file."""
    found = []
    for tp, pp in ((t, p) for t in (1, 2, 4) for p in (1, 2, 4) if ranks % (t * p) == 0):
        dp = ranks // (tp * pp)
        base = {"parallel.tp": tp, "parallel.pp": pp, "parallel.dp": dp}
        if pp == 1:
            found += [base | {"train.microbatch": size} for size in ((2, 8) if ranks == 2 else (4,))]
            if dp > 1:
                found.append(base | {"train.microbatch": 4, "parallel.zero": 2})
        else:
            found += [base | {"train.microbatch": 1 if dp == 1 else 2, "parallel.schedule": schedule}
                      for schedule in ("1f1b", "zb-h1")]
            if ranks == 2:
                found += [base | {"train.microbatch": 4, "parallel.schedule": "1f1b"}]
    return found


def name(layout):
    return " ".join(f"{key.split('.')[1]} {value}" for key, value in layout.items())


def run(tandem, layout, link, steps, out):
    """Predicted step in ms, and the measured ones."""
    keys = JOB | layout | {"train.steps": steps, "parallel.link": link}
    environment = {**os.environ, "TANDEM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [tandem, "train", CONFIG, "--out", out, "--set", *(f"{key}={value}" for key, value in keys.items())]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr[-500:]}")
    with open(out + "/self_check.json") as file:
        predicted = json.load(file)["predicted_ms"]["step"]
    with open(out + "/metrics.jsonl") as file:
        return predicted, [json.loads(line)["step_ms"] for line in file][WARM_STEPS:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tandem")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--link", default="1GB/s,20us")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.repetitions < 2 or options.steps < 22:
        parser.error("expected at least 2 repetitions, one of them to predict, of at least 22 steps")
    layouts = [{"layout": layout, "predicted_ms": None, "measured_ms": []} for layout in grid(options.ranks)]
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(options.repetitions):
            for i, entry in enumerate(layouts):
                out = f"{folder}/{repetition}-{i}"
                predicted, steps = run(options.tandem, entry["layout"], options.link, options.steps, out)
                if repetition == 0:
                    entry["predicted_ms"] = predicted
                else:
                    entry["measured_ms"].append(statistics.median(steps))
    for entry in layouts:
        entry["median_ms"] = statistics.median(entry["measured_ms"])
    layouts.sort(key=lambda entry: entry["median_ms"])
    best, pick = layouts[0], min(layouts, key=lambda entry: entry["predicted_ms"])
    # Of each repetition, in which both met the same minutes.
    losses = [100 * (a / b - 1) for a, b in zip(pick["measured_ms"], best["measured_ms"])]
    loss = statistics.median(losses)
    print("measured ms  predicted ms  layout")
    for entry in layouts:
        mark = "  <- picked" if entry is pick else ""
        print(f"{entry['median_ms']:11.2f} {entry['predicted_ms']:13.2f}  {name(entry['layout'])}{mark}")
    print(f"the pick takes {loss:.1f} % longer than the best of {len(layouts)} (in repetitions {min(losses):.1f} to {max(losses):.1f} %): "
          f"{'within' if loss <= 3 else 'not within'} 3 %; {time.time() - begin:.0f} s, load {os.getloadavg()[2]:.1f} "
          f"on {os.cpu_count()} processors")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"ranks": options.ranks, "link": options.link, "job": JOB, "repetitions": options.repetitions,
                       "steps": options.steps, "pick": pick["layout"], "best": best["layout"], "loss_percent": loss,
                       "losses_percent": losses, "within_3_percent": loss <= 3, "seconds": time.time() - begin,
                       "load": os.getloadavg()[2], "processors": os.cpu_count(), "layouts": layouts}, file, indent=1)


main()
