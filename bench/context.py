#!/usr/bin/env python3
"""context.py [--emulated] [--only TEXT] [--repeats N] [--tandem PROGRAM]: times context-parallel attention,
`tandem bench attention`, on links of 200 Mbit/s and 1 Gbit/s: between hosts of network namespaces (tools/netns_run.sh;
root), with --emulated between threads. Writes a JSON file a case to bench/results/netns-attention (with --emulated:
emulated-attention), and exits with 1 if a case ended wrong. The hosts share this machine's cores, one thread a rank:
measure on an idle machine, in which all cases take at most six minutes.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINKS = {"200mbit": "25MB/s,100us", "1gbit": "125MB/s,100us"}
MHA = "--heads 8 --kv-heads 8"
# Few heads, and narrow ones, of longer sequences: time, not its ratio to the link's, is less.
LONG_MHA, LONG_GQA, SHORT_GQA = ("--heads 2 --kv-heads 2", "--heads 2 --kv-heads 1 --head-dim 32",
                                 "--heads 4 --kv-heads 1 --head-dim 32")


def cases():
    """(name, rate, ranks, arguments, repeats)"""
    for rate in LINKS:
        for ranks in 2, 4:
            yield f"mha-1024-{ranks}-{rate}", rate, ranks, f"--seq 1024 {MHA}", 7
            yield f"gqa-1024-{ranks}-{rate}-backward", rate, ranks, f"--seq 1024 {SHORT_GQA} --backward", 7
        yield f"mha-1024-2-{rate}-backward", rate, 2, f"--seq 1024 {LONG_MHA} --backward", 7
        yield f"gqa-2048-2-{rate}", rate, 2, f"--seq 2048 {SHORT_GQA}", 7
        yield f"mha-2048-2-{rate}", rate, 2, f"--seq 2048 {LONG_MHA}", 7
    yield "mha-1024-4-200mbit-backward", "200mbit", 4, f"--seq 1024 {LONG_MHA} --backward", 7
    yield "gqa-2048-4-200mbit", "200mbit", 4, f"--seq 2048 {SHORT_GQA}", 7
    yield "mha-4096-2-200mbit", "200mbit", 2, f"--seq 4096 {LONG_MHA}", 3
    yield "gqa-4096-2-200mbit-backward", "200mbit", 2, f"--seq 4096 {LONG_GQA} --backward", 3
    yield "gqa-8192-2-200mbit", "200mbit", 2, f"--seq 8192 {LONG_GQA}", 3
    yield "mha-1024-2-200mbit-int8", "200mbit", 2, f"--seq 1024 {MHA} --codec int8:g64", 7
    # Keys : queries 8 : 1, 16 : 1 (LV-XAttn's) and 64 : 1.
    yield "cross-8-2-200mbit", "200mbit", 2, f"--cross --seq 256 --keys 2048 {MHA}", 7
    yield "cross-16-2-200mbit", "200mbit", 2, f"--cross --seq 64 --keys 1024 {MHA}", 15
    yield "cross-64-2-200mbit", "200mbit", 2, f"--cross --seq 128 --keys 8192 {MHA}", 5
    yield "gqa-2048-2-1gbit-contiguous", "1gbit", 2, f"--seq 2048 {SHORT_GQA} --contiguous", 7


def run(args, folder, cache, name, rate, ranks, arguments, repeats):
    bench = [args.tandem, "bench", "attention", *arguments.split(), "--repeats", str(args.repeats or repeats),
             "--json", f"{folder}/{name}.json"]
    if args.emulated:
        bench += ["--ranks", str(ranks), "--link", LINKS[rate]]
    else:
        bench = ["tools/netns_run.sh", "--hosts", str(ranks), "--rate", rate, *bench]
    load = round(os.getloadavg()[0], 1)
    # Times of one case do not decide the form of another.
    environment = os.environ | {"TANDEM_THREADS": "1", "TANDEM_CACHE_DIR": f"{cache}/{name}"}
    result = subprocess.run(bench, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    print(f"{name}: exit {result.returncode}\n{result.stdout}{result.stderr}", flush=True)
    if result.returncode != 0:
        return False
    file = ROOT / folder / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"load": load}, indent=1, ensure_ascii=False) + "\n")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="thread ranks on emulated links")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their names")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed rounds (default: 3 to 15 by case)")
    parser.add_argument("--tandem", default="build/bin/tandem", metavar="PROGRAM")
    args = parser.parse_args()
    folder = f"bench/results/{'emulated' if args.emulated else 'netns'}-attention"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    chosen = [case for case in cases() if args.only in case[0]]
    if not chosen:
        parser.error(f"--only {args.only}: expected text of one of {', '.join(case[0] for case in cases())}")
    with tempfile.TemporaryDirectory() as cache:
        wrong = [case[0] for case in chosen if not run(args, folder, cache, *case)]
    if wrong:
        sys.exit(f"context.py: ended wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
