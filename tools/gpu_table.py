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


# In the order in which the tuner goes through them (ways() of the operators), and by how much of its
# time the first one must be beaten (src/overlap/margin.h).
WAYS = ("serial_nccl", "serial_copy", "chunked", "one_shot", "two_shot", "plain", "adding", "fused")
OVER_SERIAL = 0.02


def taken(r):
    """The way that Strategy::automatic takes by these times: the rule of src/overlap/tuner.cc. Plain
    collectives take theirs by size, which is the fastest in every case of the tables."""
    us = {way: t["median"] for way, t in r["config"]["ways_us"].items()}
    if is_plain(r):
        return min(us, key=us.get)
    first, *others = sorted(us, key=lambda way: WAYS.index(way) if way in WAYS else len(WAYS))
    best = first
    for way in others:
        if us[way] < us[best] * (1 - (OVER_SERIAL if best == first else 0)):
            best = way
    return best


def row(r, peers):
    """`peers`: of each peer, its results by case."""
    t, c = r["time_us"], r["config"]
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
    way = taken(r)
    cells += [f'{t["serial"]:.1f} ({c["serial"]})', f'{t["overlapped"]:.1f} ({c["overlapped"]})',
              way, f'{t["serial"] / c["ways_us"][way]["median"]:.2f}×']
    if not is_plain(r):
        cells.append(efficiency(r, way))
    cells += [fastest_peer(of_peer.get(key(r))) for of_peer in peers.values()]
    return cells + ["yes" if right else "NO"]


def efficiency(r, way):
    """Of `way`. With half of the range that 95 of 100 draws of the rounds lie in, where the file has it."""
    if r["efficiency"] is None:
        return "–"
    if way != r["config"]["overlapped"]:
        t = r["time_us"]
        exposed = r["config"]["ways_us"][way]["median"] - t["gemm"]
        return f'{(1 - exposed / (t["serial"] - t["gemm"])) * 100:.0f} %'
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
    words += ["what a call adds to cuBLASLt's product"] if is_alone(first) else []
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
        heads.append("E")
    heads += [*peers, "correct"]
    if is_alone(first):
        heads = ["M × N × K", "bare product", "operator", "parity", "correct"]
    lines = [heads, ["---"] * len(heads)] + [row(r, peers) for r in results]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    graph = ", in a CUDA graph" if first["config"]["cuda_graph"] else ""
    commits = " ".join(sorted({r["commit"] for r in results}))
    rounds = " or ".join(str(n) for n in sorted({r["repeats"] for r in results}))
    return (f'{title(results, name)}\n\n{first["hardware"]}, {first["link"]}{graph}; '
            f'commit {commits}, {first["date"][:10]}; µs, medians of {rounds}, slowest rank.\n\n{text}\n')


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


if __name__ == "__main__":
    main()
