#!/usr/bin/env python3
"""moe_backward.py [--repeats N] [--out FOLDER] [--tandem PROGRAM]: what the backward pass of a Mixture-of-Experts layer
on 2 and 4 CPU ranks hides of emulated links of 25 and 200 Mbit/s. `tandem bench moe --backward --chunks 1` runs all
forms after the same serial forward pass, in turn: a serial backward pass, its halves overlapped one by one, and the
whole. Writes RANKS-LINK.json to bench/results/emulated-moe-backward; tools/tables.py makes the table. Fails if the
faster overlapped form is slower than serial by more than the spread of both."""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import moe_table  # noqa: E402

LINKS = {"25mbit": "3.125MB/s,200us", "200mbit": "25MB/s,100us"}
TOKENS = {"25mbit": 64, "200mbit": 256}  # of a rank
LAYER = ["--experts", "8", "--top-k", "2", "--hidden", "256", "--ffn", "1792"]  # 25 Mbit/s and GEMMs take about as long


def run(args, ranks, link):
    file = args.out / f"{ranks}-{link}.json"
    subprocess.run([args.tandem, "bench", "moe", *LAYER, "--tokens", str(TOKENS[link] * ranks), "--ranks", str(ranks), "--ep",
                    str(ranks), "--backward", "--chunks", "1", "--link", LINKS[link], "--repeats", str(args.repeats),
                    "--json", file], check=True, stdout=subprocess.DEVNULL)
    found = json.loads(file.read_text())
    return found[0] if isinstance(found, list) else found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results/emulated-moe-backward"))
    parser.add_argument("--tandem", default=pathlib.Path("build/bin/tandem"), type=pathlib.Path)
    args = parser.parse_args()
    os.chdir(ROOT)  # results name their files from there
    args.out.mkdir(parents=True, exist_ok=True)
    slower = []
    for link in LINKS:
        for ranks in (2, 4):
            r = run(args, ranks, link)
            print(" | ".join(moe_table.backward_row(r)), flush=True)
            serial, halves, whole = moe_table.backward_forms(r)
            if min(halves["min"], whole["min"]) > serial["max"]:
                slower.append(f"{ranks} ranks, {link}")
    if slower:
        sys.exit(f"moe_backward: slower than serial: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
