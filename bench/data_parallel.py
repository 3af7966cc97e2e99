#!/usr/bin/env python3
"""data_parallel.py [--tandem PATH] [--before PATH] [--cases CASE...] [--steps N] [--rounds N] [--set KEY=VALUE...]
[--json FILE]: how much of the communication between data-parallel ranks a training step exposes, on links that need as
long for a step's bytes as a rank computes. Cases: emulated-2 and emulated-4, ranks that are threads with an emulated
link, whose bandwidth is chosen; netns-2, two hosts in network namespaces at 200 Mbit/s (tools/netns_run.sh, as root),
where the batch is.

Every rank has one kernel thread. Rows: alone, as many jobs of one rank at once as there are ranks, each with a rank's
batch; no link (emulated cases); no overlap, one bucket, whose gradients leave after the backward pass and whose weights
arrive before the forward pass; overlapped; and with --before the same of another build. Each row is trained once a
round, in turns, and steps of all rounds are pooled; the first ones are left out. Exposed is the part of a step that is
longer than alone. Fails if losses differ: bit for bit between rounds and with and without a link, by more than rounding
without overlap, where the gradient norm is summed in another order."""
import argparse
import datetime
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from processors import cpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_STEPS = 3
RATE, RATE_BYTES = "200mbit", 200e6 / 8
ROUNDING = 1e-4
JOB = {"model.hidden": 192, "model.layers": 24, "model.heads": 3, "model.kv_heads": 3, "model.head_dim": 64,
       "model.ffn": 512, "model.max_seq": 256, "train.seq": 256, "train.dtype": "bf16", "optimizer.warmup": 4,
       "data.paths": ["src", "include", "tests", "docs"]}
RANKS = {"emulated-2": 2, "emulated-4": 4, "netns-2": 2}
SEQUENCES = 4  # of a rank; with netns to find out how many there are to be


def words(keys):
    return [f"{key}={json.dumps(value) if isinstance(value, (bool, list)) else value}" for key, value in keys.items()]


def train(args, tandem, keys, steps, jobs=1, launch=()):
    """Metrics of each job's steps, and the model's parameters."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TANDEM_THREADS": "1", "TANDEM_CACHE_DIR": folder}
        start = [*launch, tandem, "train", ROOT / "configs/tiny.toml"]
        settings = ["--set", *words({**JOB, **keys, "train.steps": steps}), *args.set]
        running = [subprocess.Popen([*start, "--out", f"{folder}/{i}", *settings], cwd=ROOT, env=env, text=True,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for i in range(jobs)]
        errors = [job.communicate()[1] for job in running]
        if any(job.returncode for job in running):
            sys.exit(errors[0])
        metrics = [[json.loads(line) for line in open(f"{folder}/{i}/metrics.jsonl")] for i in range(jobs)]
    return metrics, float(re.search(r"([\d.]+) M parameters", errors[0])[1]) * 1e6


def timed(metrics):
    return [step for job in metrics for step in job[WARM_STEPS:]]


def median(steps, key):
    return statistics.median(step[key] for step in steps)


def wire_bytes(parameters, ranks):
    """Sent by a rank in a step: gradients in f32 and weights in bf16, of all shards but its own."""
    return (4 + 2) * parameters * (ranks - 1) / ranks


def rows_of(args, case, sequences, link):
    """Name, program, keys, concurrent jobs, launcher."""
    ranks = RANKS[case]
    launch = (ROOT / "tools/netns_run.sh", "--hosts", str(ranks), "--rate", RATE) if case.startswith("netns") else ()
    of_rank = {"train.batch": sequences, "train.microbatch": sequences}
    replicas = {**of_rank, "train.batch": ranks * sequences, "parallel.dp": ranks}
    linked = replicas if launch else {**replicas, "parallel.link": link}
    rows = [("alone", args.tandem, of_rank, ranks, ())]
    if not launch:
        rows.append(("no link", args.tandem, replicas, 1, ()))
    rows.append(("no overlap", args.tandem, {**linked, "parallel.dp_bucket_mib": 1024}, 1, launch))
    if args.before:
        rows.append(("before", args.before, linked, 1, launch))
    rows.append(("overlapped", args.tandem, linked, 1, launch))
    return rows


def check_losses(case, losses):
    for name, rounds in losses.items():
        if any(of_round != rounds[0] for of_round in rounds):
            sys.exit(f"{case}, {name}: the rounds' losses differ")
    expected = losses["overlapped"][0]
    if "no link" in losses and losses["no link"][0] != expected:
        sys.exit(f"{case}: losses with and without a link differ")
    for name in ("no overlap", "before"):
        found = losses.get(name, [expected])[0]
        if any(not math.isclose(a, b, rel_tol=ROUNDING) for a, b in zip(found, expected)):
            sys.exit(f"{case}, {name}: losses differ by more than {ROUNDING} from those of overlapped")


def measure(args, case):
    ranks, sequences, link = RANKS[case], SEQUENCES, ""
    first, parameters = train(args, args.tandem, {"train.batch": sequences, "train.microbatch": sequences},
                              WARM_STEPS + 3, ranks)
    alone_s = median(timed(first), "step_ms") * 1e-3
    sent = wire_bytes(parameters, ranks)
    if case.startswith("netns"):
        sequences = max(1, round(sequences * sent / RATE_BYTES / alone_s))
        bytes_per_s = RATE_BYTES
    else:
        link = f"{sent / alone_s * 1e-6:.3g}MB/s,20us"
        bytes_per_s = float(link.split("MB")[0]) * 1e6
    rows = rows_of(args, case, sequences, link)
    rounds = {name: [] for name, *_ in rows}
    for _ in range(args.rounds):
        for name, tandem, keys, jobs, launch in rows:
            rounds[name].append(train(args, tandem, keys, args.steps, jobs, launch)[0])
    check_losses(case, {name: [[step["loss"] for step in of_round[0]] for of_round in of_row]
                        for name, of_row in rounds.items()})
    results = []
    alone_ms = 0
    for name, _, keys, jobs, _ in rows:
        steps = [step for of_round in rounds[name] for step in timed(of_round)]
        times = [step["step_ms"] for step in steps]
        quartiles = statistics.quantiles(times, n=4)
        alone_ms = alone_ms or quartiles[1]
        results.append({"name": name, "keys": keys, "jobs": jobs, "step_ms": quartiles[1],
                        "step_ms_quartiles": [quartiles[0], quartiles[2]],
                        "compute_ms": median(steps, "compute_ms"), "waited_ms": median(steps, "exposed_comm_ms"),
                        "exposed": (quartiles[1] - alone_ms) / quartiles[1],
                        "losses": [step["loss"] for step in rounds[name][0][0]]})
        print(f'{case:11} {name:11} step {quartiles[1]:7.1f} ms ({quartiles[0]:.1f}-{quartiles[2]:.1f})  exposed '
              f'{100 * results[-1]["exposed"]:5.1f} %  waited {results[-1]["waited_ms"]:6.1f} ms', flush=True)
    return {"case": case, "ranks": ranks, "link": f"tbf {RATE}" if case.startswith("netns") else f"emulated {link}",
            "sequences_a_rank": sequences, "parameters": parameters, "sent_bytes": sent,
            "wire_ms": 1e3 * sent / bytes_per_s, "rows": results}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    parser.add_argument("--before", help="another build of tandem, measured in the same rounds")
    parser.add_argument("--cases", nargs="+", default=list(RANKS), choices=list(RANKS), metavar="CASE")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of all jobs")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.steps <= WARM_STEPS + 1 or args.rounds < 1:
        parser.error(f"--steps {args.steps} --rounds {args.rounds}: expected at least {WARM_STEPS + 2} and 1")
    args.tandem = pathlib.Path(args.tandem).resolve()
    args.before = pathlib.Path(args.before).resolve() if args.before else None
    load = os.getloadavg()[0]
    cases = [measure(args, case) for case in args.cases]
    if not args.json:
        return
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    content = {"op": "data_parallel", "settings": [*words(JOB), *args.set], "steps": args.steps, "rounds": args.rounds,
               "cases": cases, "hardware": cpu(), "load_before": round(load, 2), "commit": commit.stdout.strip(),
               "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "command": " ".join(["bench/data_parallel.py", "--cases", *args.cases, "--steps", str(args.steps),
                                     "--rounds", str(args.rounds), *(["--before", "PATH"] if args.before else []),
                                     *(["--set", *args.set] if args.set else [])])}
    pathlib.Path(args.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
