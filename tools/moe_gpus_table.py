#!/usr/bin/env python3
"""moe_gpus_table.py FOLDER: the Markdown table of `tandem bench moe` on GPU ranks, as tools/gpu_check.sh leaves it
(moe-*.json), beside what moe_predict.py said of two or four of them before they ran, and what torch's grouped GEMM
with NCCL took (FOLDER/peers/moe.json). Also for tools/tables.py."""
import pathlib
import sys

import moe_predict
from bench_results import ROOT, is_right, load, markdown, percent

MEASURED_ON_ONE = ("bench/results/h100x1/moe_layer.json", "bench/results/h100x1/moe_backward.json")


def results(folder):
    """The cases, each as often as it was run last."""
    return [r for file in sorted((ROOT / folder).glob("moe-*.json")) for r in load(file)]


def row(r, predictions, peers):
    us = r["time_us"]
    spread = r["tp"] == 1 and r["imbalance"] < 1.2 and r["link"] != "same-gpu"
    said = predictions.get((r["model"], r["tokens"], r["backward"])) if spread else None
    peer = peers.get((r["model"], r["ep"], r["tp"], r["tokens"])) if not r["backward"] else None
    fastest = min(us["serial"], us["overlapped"])
    predicted = [f'{said["overlapped"]:.0f}', f'{(fastest / said["overlapped"] - 1) * 100:+.0f} %'] if said else ["", ""]
    return [r["model"], f'{r["ep"]} × {r["tp"]}', str(r["tokens"]), "both" if r["backward"] else "forward",
            f'{r["imbalance"]:.2f}', *(f"{us[name]:.0f}" for name in ("gemm", "wire", "serial", "overlapped")),
            percent(r["efficiency"]), *predicted, *([f"{peer:.0f}", f"{peer / fastest:.2f}"] if peer else ["", ""]),
            "yes" if is_right(r) else "NO"]


def table(folder):
    found = results(folder)
    if not found:
        sys.exit(f"{folder}: expected moe-*.json of tandem bench moe")
    peers = {(r["model"], r["ep"], r["tp"], r["tokens"]): r["time_us"]["total"]
             for r in load(pathlib.Path(folder) / "peers/moe.json")}
    ranks = {r["ranks"] for r in found}
    predictions = (moe_predict.by_size(*MEASURED_ON_ONE, *ranks)
                   if len(ranks) == 1 and ranks <= set(moe_predict.BYTES_PER_US) else {})
    heads = ["layer", "EP × TP", "tokens", "passes", "imbalance", "products", "wire", "serial", "overlapped", "E",
             "predicted before", "off by", "torch + NCCL", "torch over ours", "correct"]
    places = ", ".join(dict.fromkeys(f'{r["hardware"]}, {r["ranks"]} ranks, link {r["link"]}' for r in found))
    commits = ", ".join(sorted({r["commit"] for r in found}))
    dtypes = " and ".join(sorted({r["dtype"] for r in found}))
    return (f"{places}, {dtypes}; commit {commits}; us, medians, slowest rank.\n\n"
            + markdown(heads, [row(r, predictions, peers) for r in found]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(table(sys.argv[1]))
