#!/usr/bin/env python3
"""Markdown table of `tandem bench moe...` results in a folder (relative to the repository), for
tools/tables.py."""
import cpu_table
from bench_results import about, all_right, candidates, markdown, operator_name, percent


def row(r):
    name = r["model"] + (f' / {r["hidden_scale"]}' if r["hidden_scale"] > 1 else "")
    return [operator_name(r), name, str(r["tokens"]), f'{r["ep"]} × {r["tp"]}', f'{r["imbalance"]:.2f}',
            *cpu_table.times(r), percent(r["efficiency"]), percent(cpu_table.fastest(r))]


def table(folder):
    found = cpu_table.results(folder)
    heads = ["operator", "layer / width divisor", "tokens", "EP × TP", "imbalance", "GEMM", "wire time",
             "serial", "overlapped", "E", "E, fastest"]
    return f"{about(found, folder)} {all_right(map(cpu_table.right, found)).capitalize()}.\n\n" + markdown(heads, [row(r) for r in found])


def backward_forms(r):
    """Candidates after a serial forward pass: the backward pass serial, by halves, and as a whole."""
    us = candidates(r)
    return [next(us[name] for name in us if name.startswith(form)) for form in ("serial", "backward by halves", "backward as a whole")]


def backward_row(r):
    """Half of the bytes are the backward pass's."""
    serial, *overlapped = (form["median"] for form in backward_forms(r))
    wire = cpu_table.wire_us(r) / 2
    hidden = [percent((serial - us) / wire) for us in overlapped]
    return [r["link"].removeprefix("emulated "), str(r["ranks"]), str(r["tokens"]),
            *(f"{us / 1e3:.1f}" for us in (r["time_us"]["gemm"], wire, serial, *overlapped)), *hidden]


def backward(folder):
    found = cpu_table.results(folder)
    heads = ["link", "ranks", "tokens", "GEMMs", "wire time of backward", "serial", "by halves", "as a whole",
             "hidden by halves", "hidden as a whole"]
    r, commits = found[0], " and ".join(sorted({r["commit"] for r in found}))
    ran = (f'{r["hardware"]}, EP over all ranks (threads), **emulated** links, {r["experts"]} experts, top-{r["top_k"]}, hidden {r["k"]}, '
           f'ffn {r["n"]}, {r["dtype"]}; commit {commits}; ms, medians of {r["repeats"]}, slowest rank, with a serial forward pass.')
    return (f"{ran} {all_right(map(cpu_table.right, found)).capitalize()}.\n\n"
            + markdown(heads, [backward_row(r) for r in found]))
