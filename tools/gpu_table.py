#!/usr/bin/env python3
"""gpu_table.py DIR [PAGE]: Markdown tables of the result files in DIR; with PAGE, written between
its <!-- results --> marks."""
import json
import pathlib
import sys


def name(value):
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value} B"


def row(r):
    t, c = r["time_us"], r["config"]
    chosen = min(t["serial"], t["overlapped"])
    way = c["overlapped"] if t["overlapped"] <= t["serial"] else c["serial"]
    shape = name(r["bytes"]) if r["op"] == "all_reduce" else f'{r["m"]} × {r["n"]} × {r["k"]}'
    cells = [shape]
    if r["op"] != "all_reduce":
        cells += [f'{t["gemm"]:.1f}', f'{t["wire"]:.1f}']
    cells += [f'{t["serial"]:.1f} ({c["serial"]})', f'{t["overlapped"]:.1f} ({c["overlapped"]})',
              way, f'{t["serial"] / chosen:.2f}×']
    if r["op"] != "all_reduce":
        cells.append(f'{r["efficiency"] * 100:.0f} %')
    right = r["bitwise_equal_runs"] and r["error"]["max_of_bound"] <= r["error"]["bound"]
    return cells + ["yes" if right else "NO"]


def table(results):
    first = results[0]
    heads = ["bytes" if first["op"] == "all_reduce" else "M × N × K"]
    if first["op"] != "all_reduce":
        heads += ["GEMM", "wire"]
    heads += ["serial", "best overlapped", "chosen", "speed-up"]
    if first["op"] != "all_reduce":
        heads.append("E overlapped")
    heads.append("correct")
    lines = [heads, ["---"] * len(heads)] + [row(r) for r in results]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    graph = ", in a CUDA graph" if first["config"]["cuda_graph"] else ""
    commits = " ".join(sorted({r["commit"] for r in results}))
    return (f'### `{first["op"]}`\n\n{first["hardware"]}, {first["link"]}, {first["dtype"]}{graph}; '
            f'commit {commits}, {first["date"]}; µs, medians, slowest rank.\n\n{text}\n')


def main():
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
    text = "\n".join(table(json.loads(file.read_text())) for file in files)
    if len(sys.argv) < 3:
        print(text)
        return
    page = pathlib.Path(sys.argv[2])
    mark = "<!-- results -->"
    before, _, after = page.read_text().split(mark)
    page.write_text(f"{before}{mark}\n{text}{mark}{after}")


main()
