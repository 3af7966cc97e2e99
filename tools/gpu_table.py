#!/usr/bin/env python3
"""gpu_table.py DIR: Markdown tables of the GPU results of `tandem bench` in DIR, next to the peers'
in DIR/peers if there are any. `summary` has a row for each file and range of M instead.
(tools/tables.py puts them into the docs.)"""
import pathlib
import sys

import headline_table
from bench_results import (COLLECTIVES, all_right, bandwidth, capped_mean, chosen, fastest_peer, hidden, is_right, key,
                           load, markdown, median, peers_of, percent, matrix_bytes, shape_name, size_name, span, tflops)

# Descriptions of runs that a table could not distinguish, by suffix of the file name.
RUNS = {"again": "another run", "third": "a third run", "before": "before tiles were stored into their owner's memory",
        "small": "few rows"}

EARLIER = ("again", "third", "before")


def is_alone(r):
    """One rank: the operator is only its GEMM."""
    return r["ranks"] == 1


def peer_cell(r):
    return "–" if r is None else "{:.1f} ({})".format(*fastest_peer(r))


def efficiency_cell(r):
    """E of the chosen candidate, with half of the range that contains 95 of 100 draws of the
    rounds, if known."""
    low, high = r.get("efficiency_95") or (0, 0)
    if high <= low or chosen(r) != r["config"]["overlapped"]:
        return percent(hidden(r))
    return f"{hidden(r) * 100:.0f} ± {(high - low) * 50:.1f} %"


def rate(value):
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def alone_table(results):
    rows = [[shape_name(r), f'{r["time_us"]["gemm"]:.1f}', f'{r["time_us"]["serial"]:.1f}',
             f'{r["parity"] * 100:.1f} %', f'{tflops(r, r["time_us"]["serial"]):.0f}'] for r in results]
    return markdown(["M × N × K", "cuBLASLt", "operator", "parity", "TFLOP/s"], rows)


def collective_cell(r):
    """Times of NCCL and of the chosen candidate, speed-up, and the busbw of the latter."""
    name, nccl = chosen(r), r["time_us"]["nccl"]
    us = median(r, name)
    return f"{nccl:.1f} → {us:.1f} ({name}), {nccl / us:.2f}×, {bandwidth(r, us)[1]:.0f}"


def collectives_table(files):
    """Table of all collectives without a GEMM in one folder, by size; `files`: their results."""
    title_of = {}
    by = {}
    for results in files:
        first = results[0]
        name = f'{first["op"]}, {first["ranks"]} GPUs'
        rounds = " or ".join(str(n) for n in sorted({r["repeats"] for r in results}))
        title_of[name] = f'{name}: commit {" ".join(sorted({r["commit"] for r in results}))}, {first["date"][:10]}, medians of {rounds}'
        for r in results:
            by.setdefault(matrix_bytes(r), {})[name] = collective_cell(r)
    everything = [r for results in files for r in results]
    first = everything[0]
    about = (f'{first["hardware"]}, {first["link"]}, {first["dtype"]}, in CUDA graphs; {"; ".join(title_of.values())}; slowest '
             f"rank; {all_right(map(is_right, everything))}. NCCL → Tandem in µs, speed-up, busbw in GB/s.")
    rows = [[size_name(size), *(of.get(name, "–") for name in title_of)] for size, of in sorted(by.items())]
    return "### Collectives\n\n" + about + "\n\n" + markdown(["bytes", *title_of], rows) + "\n"


def operator_table(results, peers):
    rows = []
    for r in results:
        t, name = r["time_us"], chosen(r)
        cells = [shape_name(r), f'{t["gemm"]:.1f}', f'{t["wire"]:.1f}', f'{t["nccl"]:.1f}',
                 f'{t["serial"]:.1f} ({r["config"]["serial"]})', f"{median(r, name):.1f} ({name})",
                 f'{t["serial"] / median(r, name):.2f}×', efficiency_cell(r), rate(tflops(r, median(r, name)))]
        rows.append(cells + [peer_cell(of_peer.get(key(r))) for of_peer in peers.values()])
    heads = ["M × N × K", "GEMM", "wire time", "NCCL", "serial", "chosen", "speed-up", "E", "TFLOP/s", *peers]
    return markdown(heads, rows) + "\n\n" + average(results)


def by_rows(results):
    """Groups results that have an E by the rows of the GEMM, as few and many rows have little in
    common."""
    groups = {}
    for r in results:
        if hidden(r) is not None:
            where = ("M ≥ 4096" if r["m"] >= 4096 else "M 1024 and 2048" if r["m"] >= 1024
                     else "M 512" if r["m"] >= 512 else "M ≤ 256")
            groups.setdefault(where, []).append(r)
    return groups


def average(results):
    parts = {where: [hidden(r) for r in group] for where, group in by_rows(results).items()}
    return "Mean E, each capped at 100 %: " + "; ".join(
        f"{percent(capped_mean(efficiencies))} at {where}" for where, efficiencies in parts.items()) + "."


def title(results, name):
    """Title of a table; `name`: of the file."""
    first = results[0]
    words = [f'`{first["op"]}`']
    words += ["residual and RMSNorm"] if first.get("add_norm") else []
    words += ["1 GPU" if is_alone(first) else f'{first["ranks"]} GPUs', first["dtype"]]
    words += ["call overhead over cuBLASLt"] if is_alone(first) else []
    words += [f'a scale per {first["scaling"]}'] if "scaling" in first else []
    words += [run for mark, run in RUNS.items() if name.endswith("-" + mark)]
    return "### " + ", ".join(words)


def table(results, peers, name):
    first = results[0]
    text = alone_table(results) if is_alone(first) else operator_table(results, peers)
    graph = ", in a CUDA graph" if first["config"]["cuda_graph"] else ""
    commits = " ".join(sorted({r["commit"] for r in results}))
    rounds = " or ".join(str(n) for n in sorted({r["repeats"] for r in results}))
    return (f'{title(results, name)}\n\n{first["hardware"]}, {first["link"]}{graph}; '
            f'commit {commits}, {first["date"][:10]}; µs, medians of {rounds}, slowest rank; {all_right(map(is_right, results))}.\n\n{text}\n')


def summary_row(results):
    """Summary of operators on several GPUs."""
    us = [(r, median(r, chosen(r))) for r in results]
    efficiencies = [hidden(r) for r in results]
    return [f'{percent(capped_mean(efficiencies))} ({span([e * 100 for e in efficiencies], "{:.0f}")})',
            *(span([r["time_us"][form] / t for r, t in us], unit="×") for form in ("serial", "nccl")),
            span([tflops(r, t) for r, t in us], "{:.0f}")]


def alone_row(results):
    return ["parity " + span([r["parity"] * 100 for r in results], "{:.1f}", " %"), "–", "–",
            span([tflops(r, r["time_us"]["serial"]) for r in results], "{:.0f}")]


def summary(folder):
    """A row for each file and range of M, without earlier runs and the contents of the short tables
    (headline_table.py)."""
    short = {name.removeprefix("more/") for *_, names in headline_table.FOUR + headline_table.TWO for name in names}
    rows, flags = [], []
    for file in sorted(pathlib.Path(folder).glob("*.json")):
        results = load(file.resolve())
        if results[0]["op"] in COLLECTIVES or file.stem in short or file.stem.rsplit("-", 1)[-1] in EARLIER:
            continue
        alone = is_alone(results[0])
        for where, group in ({"any": results} if alone else by_rows(results)).items():
            rows.append([title(results, "").removeprefix("### "), where.removeprefix("M "), str(len(group)),
                         *(alone_row if alone else summary_row)(group), group[0]["commit"][:7]])
            flags += map(is_right, group)
    return (f"Medians, slowest rank; {all_right(flags)}.\n\n"
            + markdown(["", "M", "shapes", "E (range)", "over serial", "over NCCL", "TFLOP/s", "commit"], rows))


def tables(folder):
    """Operators by shape, then collectives by size."""
    loaded = {file: load(file.resolve()) for file in sorted(pathlib.Path(folder).glob("*.json"))}
    made = [table(results, peers_of(file.resolve()), file.stem) for file, results in loaded.items()
            if results[0]["op"] not in COLLECTIVES]
    collectives = [results for results in loaded.values() if results[0]["op"] in COLLECTIVES]
    return "\n".join(made + ([collectives_table(collectives)] if collectives else []))


if __name__ == "__main__":
    print(tables(sys.argv[1]))
