#!/usr/bin/env python3
"""gpu_chart.py DIR [SUFFIX]: SVG of the results DIR/OPERATOR[SUFFIX].json (those of
tools/gpu_table.py): for each operator and shape, the time of a call relative to only its GEMM:
Tandem's choice, the fastest serial candidate, NCCL's, and the peers. 1 means that communication
costs nothing."""
import html
import math
import sys

from bench_results import chosen, fastest_peer, load, median, peers_of

OPERATORS = {"ag_gemm": "AG+GEMM", "gemm_rs": "GEMM+RS", "gemm_ar": "GEMM+AR, in a CUDA graph"}
# Each series has its own colour and shape, so that either one is enough to tell them apart.
SERIES = [("nccl", "cuBLASLt + NCCL", "#a9aeb6", "triangle"),
          ("serial", "fastest serial", "#6b7079", "bar"),
          ("torch", "PyTorch", "#d9822b", "diamond"),
          ("cublasmp", "cuBLASMp", "#5a9e3e", "square"),
          ("tandem", "Tandem", "#1f5fbf", "dot")]
ROW, HEAD, LABEL, PLOT, GAP, TOP, BOTTOM = 19, 26, 150, 250, 26, 62, 40
FONT = "font-family='Helvetica, Arial, sans-serif'"


def cases(folder, name):
    """(N, K), then for each case M and the times relative to the GEMM, by series."""
    file, groups = f"{folder}/{name}.json", {}
    peers = peers_of(file)
    for r in load(file):
        t = r["time_us"]
        at = r["m"], r["n"], r["k"]
        times = {"nccl": t["nccl"], "serial": t["serial"], "tandem": median(r, chosen(r))}
        times.update({"cublasmp" if peer.startswith("cuBLASMp") else "torch": fastest_peer(of_peer[at])[0]
                      for peer, of_peer in peers.items() if at in of_peer})
        groups.setdefault((r["n"], r["k"]), []).append(
            (r["m"], {series: us / t["gemm"] for series, us in times.items()}))
    return groups


def text(x, y, words, size=11, anchor="start", colour="#24292f", weight="normal"):
    return (f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' text-anchor='{anchor}' "
            f"fill='{colour}' font-weight='{weight}'>{html.escape(words)}</text>")


def mark(kind, x, y, colour, title=""):
    shape = {"dot": f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.6'",
             "bar": f"<rect x='{x - 1.5:.1f}' y='{y - 6:.1f}' width='3' height='12'",
             "square": f"<rect x='{x - 3.6:.1f}' y='{y - 3.6:.1f}' width='7.2' height='7.2'",
             "triangle": f"<path d='M{x:.1f} {y + 4.5:.1f} l-4.5 -8 h9 z'",
             "diamond": f"<path d='M{x:.1f} {y - 5:.1f} l5 5 l-5 5 l-5 -5 z'"}[kind]
    return f"{shape} fill='{colour}'><title>{html.escape(title)}</title></{shape[1:].split()[0]}>"


def panel(left, groups, name):
    """SVG of one operator, and its height."""
    values = [value for rows in groups.values() for _, times in rows for value in times.values()]
    step = 0.2 if max(values) <= 2.6 else 0.5
    # If the GEMM in chunks is faster than the whole one, a call takes less than only the GEMM.
    begin, end = min(1, math.floor(min(values) * 10) / 10), math.ceil(max(values) * 5) / 5
    scale = lambda value: left + LABEL + (value - begin) / (end - begin) * PLOT
    rows = sum(len(r) for r in groups.values())
    height = TOP + rows * ROW + len(groups) * HEAD
    parts = [text(left, TOP - 14, name, 14, weight="bold")]
    for i in range(int((end - 1) / step + 1.01)):
        value = 1 + i * step
        x = scale(value)
        parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{height}' "
                     f"stroke='{'#24292f' if i == 0 else '#e4e7eb'}'/>")
        parts.append(text(x, height + 14, f"{value:.1f}", 10, "middle", "#57606a"))
    y = TOP
    for (n, k), of_group in groups.items():
        y += HEAD
        parts.append(text(left, y - 6, f"N {n}, K {k}", 11, colour="#57606a"))
        for m, times in of_group:
            middle = y + ROW / 2
            parts.append(text(left + LABEL - 12, middle + 4, f"M {m}", 11, "end"))
            ends = sorted(scale(times[s]) for s in ("tandem", "serial"))
            parts.append(f"<line x1='{ends[0]:.1f}' x2='{ends[1]:.1f}' y1='{middle:.1f}' "
                         f"y2='{middle:.1f}' stroke='#c9d6ea' stroke-width='3'/>")
            for series, label, colour, kind in SERIES:
                if series in times:
                    about = f"{label}: {times[series]:.2f} x the GEMM alone"
                    parts.append(mark(kind, scale(times[series]), middle, colour, about))
            y += ROW
    return "\n".join(parts), height


def picture(folder, suffix=""):
    hardware = load(f"{folder}/ag_gemm{suffix}.json")[0]["hardware"]
    parts, left, height, shown = [], 20, 0, set()
    for operator, name in OPERATORS.items():
        groups = cases(folder, operator + suffix)
        drawn, of_panel = panel(left, groups, name)
        parts.append(drawn)
        height = max(height, of_panel)
        shown.update(series for rows in groups.values() for _, times in rows for series in times)
        left += LABEL + PLOT + GAP
    height += BOTTOM
    legend, x = [text(20, 24, f"Time over that of the GEMM alone, {hardware}, bf16, M x N x K whole", 13)], 620
    for _, label, colour, kind in [s for s in SERIES if s[0] in shown]:
        legend += [mark(kind, x, 20, colour), text(x + 10, 24, label)]
        x += 34 + 6.2 * len(label)
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {left} {height}' "
            f"width='{left}' height='{height}'>\n<rect width='100%' height='100%' fill='#ffffff'/>\n"
            + "\n".join(legend + parts) + "\n</svg>\n")


if __name__ == "__main__":
    sys.stdout.write(picture(*sys.argv[1:]))
