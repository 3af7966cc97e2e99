#!/usr/bin/env python3
"""slow_link.py [--repeats N] [--only NAME] [--tandem PROGRAM]: tokens a second of `tandem train` with four learners of one rank, each
on a host whose link has 20 Mbit/s (tools/netns_run.sh; root), and of data parallelism on the same link. Writes
bench/results/netns-20mbit-learners/training.json: of each run the steps after the first ones, tokens a second of
learner 0, the share of its time that waits for others took, and bytes a rank. The hosts share this machine's cores.
"""
import argparse
import datetime
import json
import os
import subprocess
import tempfile

from processors import cpu
from skip import ROOT, built_commit

RATE = "20mbit"
RESULTS = ROOT / f"bench/results/netns-{RATE}-learners/training.json"
LEARNERS = 4
# 0.9 M parameters, sizes that 64 divides; 128 tokens a learner and step.
JOB = {"model.vocab": 320, "model.hidden": 128, "model.layers": 4, "model.head_dim": 32, "model.ffn": 384, "train.seq": 64,
       "train.batch": 8, "train.dtype": "f32", "parallel.dp": LEARNERS, "optimizer.lr": 1e-3}
EVERY = 30


def cases():
    """(name, first step that counts, last one, keys). Learners' steps are two whole rounds of exchanges."""
    local = {"sync.method": "local", "sync.learners": LEARNERS, "sync.every": EVERY}
    hidden = {"sync.fragments": 4, "sync.delay": 5}
    int4, sparse = {"sync.codec": "int4:g32"}, {"sync.topk": 1 / 64}
    yield "every step", 3, 8, {}
    yield "every 30, int4", EVERY + 1, 3 * EVERY, local | int4
    yield "every 30, int4, 4 fragments, delay 5", EVERY + 1, 3 * EVERY, local | int4 | hidden
    yield "every 30, 1 of 64, 2 bits", EVERY + 1, 3 * EVERY, local | sparse
    yield "every 30, 1 of 64, 2 bits, 4 fragments, delay 5", EVERY + 1, 3 * EVERY, local | sparse | hidden
    yield "demo, 32 of each 4096", 3, 32, {"sync.method": "demo", "sync.learners": LEARNERS, "optimizer.lr": 1e-4,
                                          "optimizer.min_lr": 1e-5}


def run(args, first, last, keys):
    with tempfile.TemporaryDirectory() as folder:
        words = [word for key, value in (JOB | keys | {"train.steps": last}).items()
                 for word in ("--set", f"{key}={json.dumps(value)}")]
        subprocess.run([ROOT / "tools/netns_run.sh", "--hosts", str(LEARNERS), "--rate", RATE, args.tandem, "train",
                        ROOT / "configs/tiny.toml", "--device", "cpu", "--out", f"{folder}/run", *words],
                       cwd=ROOT, check=True, capture_output=True, timeout=300, env=os.environ | {"TANDEM_THREADS": "1"})
        with open(f"{folder}/run/metrics.jsonl") as file:
            steps = [json.loads(line) for line in file]
    counted = [step for step in steps if first <= step["step"] <= last]
    seconds = sum(step["step_ms"] for step in counted) / 1e3
    return {"steps": len(counted), "seconds": round(seconds, 3),
            "tokens_per_s": round(sum(step["tokens"] for step in counted) / seconds, 1),
            "exposed": round(sum(sum(step["exposed_ms"].values()) for step in counted) / 1e3 / seconds, 4),
            "bytes_a_step": round(sum(sum(step["sent_bytes"].values()) for step in counted) / len(counted)),
            "load": round(os.getloadavg()[0], 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only")
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    args = parser.parse_args()
    chosen = [case for case in cases() if args.only in (None, case[0])]
    content = {"hardware": cpu(), "link": f"tbf {RATE}, {LEARNERS} hosts of this machine", "commit": built_commit(args.tandem),
               "command": f"bench/slow_link.py --repeats {args.repeats}", "job": JOB,
               "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "cases": [{"name": name, "settings": keys, "runs": []} for name, _, _, keys in chosen]}
    for _ in range(args.repeats):
        for case, (name, first, last, keys) in zip(content["cases"], chosen):
            case["runs"].append(run(args, first, last, keys))
            print(f"{name}: {case['runs'][-1]}", flush=True)
    if args.only is None:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
