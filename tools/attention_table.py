#!/usr/bin/env python3
"""Markdown table of a folder of context-parallel attention's results, bench/context.py's (a path relative to the
repository; tools/tables.py puts it into the docs)."""
import re

from bench_results import ROOT, load, markdown, span

FORMS = ("gather", "ring", "heads", "queries")


def milliseconds(us):
    return f"{us / 1e3:.1f}"


def time_of(r, form):
    return r["config"]["candidates_us"][form]["median"]


def bytes_per_us(r):
    """Rate of a link, as its name states it: a token bucket lets the first 128 KB pass at once, so small transfers measure
    another."""
    number, unit = re.search(r"([\d.]+)(gbit|mbit|MB/s)", r["link"]).groups()
    return float(number) * {"gbit": 125, "mbit": .125, "MB/s": 1}[unit]


def wire_us(r, forms):
    """Time of the bytes of the form, of several that sends least, at the link's rate."""
    return min(r["bytes"][form] for form in forms) / bytes_per_us(r)


def hidden(r, forms, us):
    """Share that is hidden of the smaller of the computation and the forms' bytes."""
    compute, wire = r["time_us"]["compute"], wire_us(r, forms)
    return (compute + wire - us) / min(compute, wire)


def chosen_forms(r):
    return {r["config"]["chosen"], r["config"]["chosen_backward"] or r["config"]["chosen"]}


def case(r):
    shape = f'{r["seq"]}×{r["keys"]} cross' if r["mask"] == "cross" else str(r["seq"])
    heads = f'{r["heads"]}/{r["kv_heads"]}×{r["head_dim"]}'
    extra = [text for text, holds in (("contiguous", r["rows"] == "contiguous"), (r["codec"] and r["codec"]["text"], r["codec"]))
             if holds]
    return [r["link"].removeprefix("tbf "), str(r["ranks"]), " ".join([shape, *extra]), heads, r["passes"]]


def row(r):
    best = min(time_of(r, form) for form in r["config"]["candidates_us"])
    chosen, forms = r["time_us"]["chosen"], chosen_forms(r)
    times = [milliseconds(time_of(r, form)) if form in r["config"]["candidates_us"] else "–" for form in FORMS]
    return [*case(r), milliseconds(r["time_us"]["compute"]), milliseconds(wire_us(r, forms)), *times, milliseconds(chosen),
            ", ".join(sorted(forms)), f"{100 * (chosen / best - 1):+.1f} %", f"{100 * hidden(r, forms, chosen):.0f} %"]


def gains(found):
    """Times of ring over those of queries in cross-attention, and the same of the limits of their bytes and
    computation; of contiguous over balanced rows."""
    for r in found:
        if r["mask"] == "cross":
            limit = lambda form: max(r["time_us"]["compute"], wire_us(r, [form]))
            gain, predicted = time_of(r, "ring") / time_of(r, "queries"), limit("ring") / limit("queries")
            yield (f'- {r["keys"] // r["seq"]} keys a query: queries is {gain:.1f}× as fast as ring; by their limits '
                   f'{predicted:.1f}×, {100 * gain / predicted:.0f} % of it.')
    contiguous = [r for r in found if r["rows"] == "contiguous"]
    for r in contiguous:
        same = [b for b in found if b["rows"] == "balanced" and b["codec"] == r["codec"] and case(b)[:2] == case(r)[:2] and
                all(b[key] == r[key] for key in ("seq", "keys", "heads", "kv_heads", "head_dim", "passes", "mask"))]
        for balanced in same[:1]:
            yield (f'- Contiguous rows are {time_of(r, "ring") / time_of(balanced, "ring"):.2f}× as slow as balanced ones '
                   f'(ring, {r["seq"]} positions, {r["ranks"]} ranks).')


def table(folder):
    found = [r for file in sorted((ROOT / folder).glob("*.json")) for r in load(file)]
    found.sort(key=lambda r: (r["mask"], r["link"], r["ranks"], r["passes"], r["seq"], -r["kv_heads"]))
    right = all(r["error"]["max_of_bound"] <= 1 and r["bitwise_equal_runs"] and r["bytes_agree"] for r in found)
    about = (f'{found[0]["hardware"]}, one thread a rank, f32; commits {", ".join(sorted({r["commit"] for r in found}))}, '
             f'{max(r["date"] for r in found)[:10]}; ms, medians, slowest rank; '
             f'load of the machine {span([r["load"] for r in found], "{:.0f}")}. '
             f'{"All correct, with the bytes of the formulas." if right else "NOT ALL CORRECT."}')
    heads = ["link", "ranks", "positions", "heads/kv×dim", "passes", "compute", "wire", *FORMS, "chosen", "form",
             "over the best", "hidden"]
    return "\n".join([about, "", markdown(heads, [row(r) for r in found]), "", *gains(found)])
