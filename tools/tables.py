#!/usr/bin/env python3
"""tables.py [--check]: writes every table and picture that is made of bench/results: the text between
<!-- KIND SOURCE --> and <!-- end --> in README.md and docs/performance.md, and docs/gpu*.svg. With --check nothing
is written; it fails where one is not what the results say."""
import re
import sys

import cpu_table
import gpu_chart
import gpu_table
import headline_table
from bench_results import ROOT

KINDS = {"results": cpu_table.table, "operators": cpu_table.operators_table, "floor": cpu_table.floor_table,
         "gpu": lambda folder: gpu_table.tables(ROOT / folder).rstrip("\n"),
         "measured": lambda name: headline_table.TABLES[name]()}
PAGES = ("README.md", "docs/performance.md")
PICTURES = {"docs/gpu.svg": ("bench/results/h200x4", ""),
            "docs/gpu-world2.svg": ("bench/results/h200x4/more", "-world2")}
MARK = re.compile(r"<!-- (\w+) (\S+) -->.*?<!-- end -->", re.S)


def filled(text):
    return MARK.sub(lambda m: f"<!-- {m[1]} {m[2]} -->\n{KINDS[m[1]](m[2])}\n<!-- end -->", text)


def main():
    made = {page: filled((ROOT / page).read_text()) for page in PAGES}
    made.update({file: gpu_chart.picture(*source) for file, source in PICTURES.items()})
    stale = [file for file, text in made.items() if (ROOT / file).read_text() != text]
    for file in stale:
        if "--check" in sys.argv:
            print(f"{file}: is not what bench/results says: run tools/tables.py")
        else:
            (ROOT / file).write_text(made[file])
            print(f"{file}: written")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
