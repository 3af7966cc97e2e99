#!/usr/bin/env python3
"""Markdown table of `tandem bench moe...` results in a folder (relative to the repository), for
tools/tables.py."""
import cpu_table
from bench_results import about, all_right, markdown, operator_name, percent


def row(r):
    name = r["model"] + (f' / {r["hidden_scale"]}' if r["hidden_scale"] > 1 else "")
    return [operator_name(r), name, str(r["tokens"]), f'{r["ep"]} × {r["tp"]}', f'{r["imbalance"]:.2f}',
            *cpu_table.times(r), percent(r["efficiency"]), percent(cpu_table.fastest(r))]


def table(folder):
    found = cpu_table.results(folder)
    heads = ["operator", "layer / width divisor", "tokens", "EP × TP", "imbalance", "GEMM", "wire time",
             "serial", "overlapped", "E", "E, fastest"]
    return f"{about(found, folder)} {all_right(map(cpu_table.right, found)).capitalize()}.\n\n" + markdown(heads, [row(r) for r in found])
