#!/usr/bin/env python3
"""Markdown table of `tandem bench pipeline` results in a folder (relative to the repository), for tools/tables.py."""
import sys

from bench_results import ROOT, load, markdown, only, span

MAX_DIFFERENCE = 0.05  # of measured and simulated bubbles, as in src/bench/engine/bench_pipeline.h
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def percent(share):
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # not -0.0


def results(folder):
    found = [r for file in sorted((ROOT / folder).glob("*.json")) for r in load(file) if r["op"] == "pipeline"]
    return sorted(found, key=lambda r: (r["pp"], r["microbatches"], SCHEDULES.index(r["schedule"])))


def costs(r):
    """Milliseconds of the passes of a rank's layers."""
    return ", ".join(f'{r["virtual"] * r["costs_us"][name] / 1e3:g}'
                     for name in ("forward", "backward_input", "backward_weight"))


def check(r, folder):
    if abs(r["bubble"] - r["simulated_bubble"]) > MAX_DIFFERENCE:
        sys.exit(f'{folder}: {r["schedule"]}, p {r["pp"]}, m {r["microbatches"]}: bubble {percent(r["bubble"])}, '
                 f'simulated {percent(r["simulated_bubble"])}')


def row(r):
    return [str(r["pp"]), str(r["microbatches"]), f'`{r["schedule"]}`', f'{r["time_us"]["step"] / 1e3:.1f}',
            percent(r["bubble"]), percent(r["simulated_bubble"]), percent(r["exposed"]), percent(r["simulated_exposed"]),
            percent(r["steady_exposed"]), percent(r["simulated_steady_exposed"])]


def table(folder):
    found = results(folder)
    if not found:
        sys.exit(f"{folder}: no results")
    for r in found:
        check(r, folder)
    passes, = {costs(r) for r in found}
    heads = ["p", "m", "schedule", "step, ms", "bubble", "simulated", "exposed", "simulated", "exposed in steady state",
             "simulated"]
    return (f'{only(found, "hardware", folder)}, CPU thread ranks with **emulated** passes and an **emulated** link; '
            f'{span([r["date"][:10] for r in found], "{}")}; passes of a rank\'s layers F, B, W: {passes} ms; fastest of '
            f'{span([r["repeats"] for r in found], "{:d}")} steps.\n\n' + markdown(heads, [row(r) for r in found]))
