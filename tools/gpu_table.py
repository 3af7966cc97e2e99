#!/usr/bin/env python3
"""gpu_table.py DIR [PAGE [MARK]]: Markdown tables of the result files in DIR, beside the peers' in
DIR/peers where there are any; with PAGE, written between its two <!-- MARK --> (results)."""
import json
import pathlib
import sys


def name(value):
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value} B"


def is_plain(r):
    """A plain collective: it has a size, no product."""
    return r["op"] in ("all_reduce", "all_gather", "reduce_scatter")


def key(r):
    return r["m"] * r["n"] if is_plain(r) else (r["m"], r["n"], r["k"])


def fastest_peer(r):
    """The fastest way of the peer but for its GEMM alone."""
    if r is None:
        return "–"
    us, way = min((t, w) for w, t in r["time_us"].items() if w != "gemm")
    return f"{us:.1f} ({way})"


def is_alone(r):
    """One rank: the operator is its product."""
    return r["ranks"] == 1


def row(r, peers):
    """`peers`: of each peer, its results by case."""
    t, c = r["time_us"], r["config"]
    chosen = min(t["serial"], t["overlapped"])
    way = c["overlapped"] if t["overlapped"] <= t["serial"] else c["serial"]
    size = {"f32": 4}.get(r["dtype"], 2)
    shape = (name(r["m"] * r["n"] * size) if is_plain(r)
             else f'{r["m"]} × {r["n"]} × {r["k"]}')
    cells = [shape]
    worst = r["error"]["max_of_bound"]  # null: infinite
    right = r["bitwise_equal_runs"] and worst is not None and worst <= r["error"]["bound"]
    if is_alone(r):
        return cells + [f'{t["gemm"]:.1f}', f'{t["serial"]:.1f}', f'{r["parity"] * 100:.1f} %',
                        "yes" if right else "NO"]
    if not is_plain(r):
        cells += [f'{t["gemm"]:.1f}', f'{t["wire"]:.1f}']
    cells += [f'{t["serial"]:.1f} ({c["serial"]})', f'{t["overlapped"]:.1f} ({c["overlapped"]})',
              way, f'{t["serial"] / chosen:.2f}×']
    if not is_plain(r):
        cells.append(efficiency(r))
    cells += [fastest_peer(of_peer.get(key(r))) for of_peer in peers.values()]
    return cells + ["yes" if right else "NO"]


def efficiency(r):
    """With half of the range that 95 of 100 draws of the rounds lie in, where the file has it."""
    if r["efficiency"] is None:
        return "–"
    low, high = r.get("efficiency_95") or (0, 0)
    noise = f" ± {(high - low) * 50:.1f}" if high > low else ""
    return f'{r["efficiency"] * 100:.0f}{noise} %'


# What the names of files say of runs that a table alone would not tell apart.
RUNS = {"again": "another run", "third": "a third run", "before": "before tiles were stored into their owner's memory",
        "small": "few rows"}


def title(results, name):
    """Of a table; `name`: of the file."""
    first = results[0]
    gpus = "1 GPU" if is_alone(first) else f'{first["ranks"]} GPUs'
    words = [f'`{first["op"]}`']
    words += ["residual and RMSNorm"] if first.get("add_norm") else []
    words += [gpus, first["dtype"]]
    words += [f'a scale per {first["scaling"]}'] if "scaling" in first else []
    words += [run for mark, run in RUNS.items() if name.endswith("-" + mark)]
    return "### " + ", ".join(words)


def table(results, peers, name):
    first = results[0]
    heads = ["bytes" if is_plain(first) else "M × N × K"]
    if not is_plain(first):
        heads += ["GEMM", "wire"]
    heads += ["serial", "best overlapped", "chosen", "speed-up"]
    if not is_plain(first):
        heads.append("E overlapped")
    heads += [*peers, "correct"]
    if is_alone(first):
        heads = ["M × N × K", "bare product", "operator", "parity", "correct"]
    lines = [heads, ["---"] * len(heads)] + [row(r, peers) for r in results]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    graph = ", in a CUDA graph" if first["config"]["cuda_graph"] else ""
    commits = " ".join(sorted({r["commit"] for r in results}))
    return (f'{title(results, name)}\n\n{first["hardware"]}, {first["link"]}{graph}; '
            f'commit {commits}, {first["date"][:10]}; µs, medians, slowest rank.\n\n{text}\n')


def load(file):
    content = json.loads(file.read_text()) if file.exists() else []
    return content if isinstance(content, list) else [content]


def peers_of(file):
    """By name, of the files peers/[…-]OP.json beside OP.json."""
    by_name = {}
    for other in sorted((file.parent / "peers").glob(f"*{file.name}"), key=lambda f: len(f.name)):
        if other.name == file.name or other.name.endswith("-" + file.name):
            for r in load(other):
                by_name.setdefault(r["peer"], {})[key(r)] = r
    return by_name


def main():
    folder = pathlib.Path(sys.argv[1])
    text = "\n".join(table(load(file), peers_of(file), file.stem) for file in sorted(folder.glob("*.json")))
    if len(sys.argv) < 3:
        print(text)
        return
    page = pathlib.Path(sys.argv[2])
    mark = f"<!-- {sys.argv[3] if len(sys.argv) > 3 else 'results'} -->"
    before, _, after = page.read_text().split(mark)
    page.write_text(f"{before}{mark}\n{text}{mark}{after}")


main()
