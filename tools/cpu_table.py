#!/usr/bin/env python3
"""cpu_table.py PAGE: fills PAGE's <!-- results DIR --> ... <!-- end --> marks with a Markdown table
of the `tandem bench` results in DIR (relative to the repository)."""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def results(folder):
    found = []
    for file in sorted((ROOT / folder).glob("*.json")):
        content = json.loads(file.read_text())
        found += content if isinstance(content, list) else [content]
    return [r for r in found if "time_us" in r]


def row(r):
    t = r["time_us"]
    right = r["bitwise_equal_runs"] and r["error"]["max_rel"] <= r["error"]["bound"]
    times = [f"{t[key] / 1e3:.1f}" for key in ("gemm", "wire", "serial", "overlapped", "limit")]
    shape = f'{r["m"]} × {r["n"]} × {r["k"]}'
    e = r["efficiency"]
    return [r["op"], shape, *times, "–" if e is None else f"{e * 100:.0f} %",
            str(r["config"]["chunks"]), "yes" if right else "NO"]


def table(folder):
    found = results(folder)
    if not found:
        sys.exit(f"cpu_table.py: {folder}: no results")
    first = found[0]
    heads = ["operator", "M × N × K", "GEMM", "wire", "serial", "overlapped", "limit", "E",
             "chunks", "correct"]
    commits = ", ".join(sorted({r["commit"] for r in found}))
    lines = [f'{first["hardware"]}, {first["ranks"]} ranks ({first["transport"]}), link '
             f'{first["link"]}, {first["dtype"]}, 1 thread a rank; commit {commits}, '
             f'{first["date"][:10]}; ms, medians of {first["repeats"]}, slowest rank.', "",
             "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row(r)) + " |" for r in found])


page = pathlib.Path(sys.argv[1])
mark = re.compile(r"<!-- results (\S+) -->.*?<!-- end -->", re.S)
page.write_text(mark.sub(lambda m: f"<!-- results {m[1]} -->\n{table(m[1])}\n<!-- end -->",
                         page.read_text()))
