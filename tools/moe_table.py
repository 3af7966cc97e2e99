#!/usr/bin/env python3
"""The Markdown table of `tandem bench moe...` results in a folder (relative to the repository), for tools/tables.py."""
import sys

import cpu_table
from bench_results import markdown, percent


def row(r):
    t = r["time_us"]
    right = r["bitwise_equal_runs"] and r["error"]["max_rel"] <= r["error"]["bound"]
    times = [f"{t[key] / 1e3:.1f}" for key in ("gemm", "wire", "serial", "overlapped", "limit")]
    name = r["model"] + (f' / {r["hidden_scale"]}' if r["hidden_scale"] > 1 else "")
    return [r["op"], name, str(r["tokens"]), f'{r["ep"]} × {r["tp"]}', f'{r["imbalance"]:.2f}', *times,
            percent(r["efficiency"]), percent(cpu_table.fastest(r)), "yes" if right else "NO"]


def table(folder):
    found = cpu_table.results(folder)
    if not found:
        sys.exit(f"{folder}: no results")
    first = found[0]
    heads = ["operator", "layer / its widths divided by", "tokens", "EP × TP", "imbalance", "GEMM", "wire",
             "serial", "overlapped", "limit", "E", "E, fastest", "correct"]
    commits = ", ".join(sorted({r["commit"] for r in found}))
    about = (f'{first["hardware"]}, {first["ranks"]} ranks ({first["transport"]}), link {first["link"]}, '
             f'{first["dtype"]}, 1 thread a rank; commit {commits}, {first["date"][:10]}; ms, medians of '
             f'{first["repeats"]}, slowest rank.')
    return about + "\n\n" + markdown(heads, [row(r) for r in found])
