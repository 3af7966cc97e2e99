#!/usr/bin/env python3
"""Markdown tables of CPU results (paths are relative to the repository): `table` of a folder of
`tandem bench` results, `operators_table` of operators_bench's file, `codec_table` of codec_bench's,
`sweep_table` of `tandem eval --codec-sweep`'s, `sweep_aims` of its targets, `gradients_table` of
gradient_codecs.py's, `floor_table` of netns_floor.py's folder. (tools/tables.py puts them into the
docs.)"""
import collections
import json
import re
import statistics
import sys

from bench_results import ROOT, about, all_right, load, markdown, operator_name, percent, shape_name, tflops, wire_us


def results(folder):
    found = [r for file in sorted((ROOT / folder).glob("*.json")) for r in load(file)]
    found = [r for r in found if "time_us" in r]
    return found or sys.exit(f"{folder}: no results")


def times(r):
    """GEMM, wire, serial and overlapped, in ms."""
    t = r["time_us"]
    return [f"{us / 1e3:.1f}" for us in (t["gemm"], wire_us(r), t["serial"], t["overlapped"])]


def row(r):
    return [r["link"].removeprefix("tbf "), operator_name(r), shape_name(r), *times(r), percent(r["efficiency"]),
            percent(fastest(r)), f'{tflops(r, r["time_us"]["overlapped"]) * 1e3:.0f}']


def right(r):
    return r["bitwise_equal_runs"] and r["error"]["max_rel"] <= r["error"]["bound"]


def fastest(r):
    """E of the fastest call of each kind, as on an idle machine."""
    least = {key: spread[0] for key, spread in r["spread_us"].items()}
    if r["efficiency"] is None:
        return None
    return 1 - (least["overlapped"] - least["gemm"]) / (least["serial"] - least["gemm"])


def table(folders):
    """Table of one folder or several."""
    found = [r for folder in folders.split(",") for r in results(folder)]
    heads = ["link", "operator", "M × N × K", "GEMM", "wire time", "serial", "overlapped", "E", "E, fastest", "GFLOP/s"]
    return f"{about(found, folders)} {all_right(map(right, found)).capitalize()}.\n\n" + markdown(heads, [row(r) for r in found])


def operators_table(file):
    content = json.loads((ROOT / file).read_text())
    rates = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in content["benchmarks"]:
        if run["run_type"] != "iteration":
            continue
        op, m, n, k, bf16 = re.match(r"(\w+)/m:(\d+)/n:(\d+)/k:(\d+)/bf16:(\d)", run["name"]).groups()
        rates["bf16" if bf16 == "1" else "f32", int(m), int(n), int(k)][op].append(
            run["items_per_second"] / 1e9)
    repeats = len(next(iter(rates.values()))["bare"])
    lines = [f'{content["context"]["hardware"]}, 1 thread; commit {content["context"]["commit"]}, '
             f'{content["context"]["date"][:10]}; GFLOP/s of a bare oneDNN matmul, medians of '
             f"{repeats} in random order, and the operators' share of it.", "",
             "| dtype | M × N × K | oneDNN | AG+GEMM | GEMM+RS | GEMM+AR |", "|" + " --- |" * 6]
    for (dtype, m, n, k), of in sorted(rates.items(), reverse=True):
        bare = statistics.median(of["bare"])
        shares = [f"{statistics.median(of[op]) / bare * 100:.0f} %"
                  for op in ("ag_gemm", "gemm_rs", "gemm_ar")]
        lines.append(f"| {dtype} | {m}×{n}×{k} | {bare:.0f} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def python_table(file):
    content = json.loads((ROOT / file).read_text())
    versions = content["versions"]
    names = {"python": "Python", "numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "cupy": "CuPy"}
    named = ", ".join(f"{names[key]} {version}" for key, version in versions.items())
    by = {}
    for r in content["results"]:
        by.setdefault(r["framework"], {})[r["op"]] = f'{r["overhead_us"]:.1f} ({r["least_us"]:.1f})'
    ops = list(dict.fromkeys(r["op"] for r in content["results"]))
    least, most = (pick(r["cpp_us"] for r in content["results"]) for pick in (min, max))
    return (f'{content["hardware"]}, commit {content["commit"]}, {content["date"]}; {content["what"]}; {named}; '
            f'load average {content["load"][0]}. µs more than the {least:.1f} to {most:.1f} of the call from C++ (in the '
            f"fastest rounds).\n\n"
            + markdown(["tensors", *ops], [[name, *(of.get(op, "–") for op in ops)] for name, of in by.items()]))


def codec_table(file):
    """codec_bench's file: cost of encoding and decoding relative to memcpy."""
    content = json.loads((ROOT / file).read_text())
    rates = collections.defaultdict(list)
    bits = {}
    for run in content["benchmarks"]:
        if run["run_type"] == "iteration":
            rates[run["run_name"]].append(run["bytes_per_second"] / 1e9)
            bits[run["run_name"]] = run["bits"]
    copy = statistics.median(rates["memcpy"])
    lines = [f'{content["context"]["hardware"]}, one core; commit {content["context"]["commit"]}, '
             f'{content["context"]["date"][:10]}; 64 MiB of f32 (lossless: of bf16) from memory, processor time, '
             f'medians of {len(rates["memcpy"])} in random order; memcpy: {copy:.1f} GB/s.', "",
             "| codec | bits per element | encode / memcpy | decode / memcpy |", "|" + " --- |" * 4]
    for name in rates:
        if not name.startswith("encode/"):
            continue
        cells = [f"{statistics.median(rates[kind + name[6:]]) / copy:.2f}×"
                 for kind in ("encode", "decode")]
        lines.append(f"| `{name[7:]}` | {bits[name]:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_table(files):
    """Cost of codecs to a model in bits per byte; `files`: one or more sweeps of the same codecs at
    other sites."""
    sweeps = [json.loads((ROOT / file).read_text()) for file in files.split(",")]
    r, trained = sweeps[0], "how it was trained is not known"
    model, training = r["model"], r["training"]
    if training:
        seen = training["bytes_seen"]
        trained = (f'trained with seed {training["seed"]} for {training["steps"]} steps'
                   + ("" if seen is None else f" on {seen / 1e6:.3g} MB"))
    sites = [" and ".join(s["sites"]) for s in sweeps]
    lines = [f'{model["layers"]} layers of {model["hidden"]}, {trained}; {r["dtype"]}, {r["ranks"]} tensor-parallel ranks; '
             f'{r["bytes"]} bytes of held-out text, {r["sweep"][0]["bits_per_byte"]:.4f} bits per byte; '
             f'commit {r["commit"]}, {r["date"][:10]}.', ""]
    rows = []
    for same in zip(*(s["sweep"] for s in sweeps), strict=True):
        if len({p["codec"] for p in same}) != 1:
            sys.exit(f"{files}: sweeps of several codecs: expected the same in each")
        cells = [f'`{same[0]["codec"]}`', f'{same[0]["bits_per_element"]:.2f}']
        for sweep, p in zip(sweeps, same):
            cells += [f'{p["bytes_per_token"] / sweep["sweep"][0]["bytes_per_token"] * 100:.0f} %',
                      f'{p["rise"] * 100:+.3f} %' if p["rise"] else "0"]
        rows.append(cells)
    heads = ["codec", "bits per element", *(head for name in sites for head in (f"bytes: {name}", "rise"))]
    return "\n".join(lines) + "\n" + markdown(heads, rows) + "\n\n" + r["caveat"]


SWEEP_AIMS = {"lossless": 0, "int8": 0.1, "int6": 0.3, "int4:g32": 1.5}  # rises in percent


def sweep_aims(file):
    """Targets of a sweep: rises from the sums over ranks only."""
    rises = {p["codec"]: 100 * p["rise"] for p in json.loads((ROOT / file).read_text())["sweep"]}
    lines = ["| codec | rise | target | |", "|" + " --- |" * 4]
    for codec, most in SWEEP_AIMS.items():
        lines.append(f'| `{codec}` | {rises[codec]:.3f} % | {most:g} % | {"met" if rises[codec] <= most else "missed"} |')
    return "\n".join(lines)


def gradients_table(file):
    """bench/gradient_codecs.py's file: effect of encoded gradients on training."""
    content = json.loads((ROOT / file).read_text())
    plain = content["rows"][0]["runs"][0]
    seeds = len(content["rows"][0]["runs"])
    lines = [f'`{content["job"]}`, {content["ranks"]} data-parallel ranks, {content["steps"]} steps, '
             f'{plain["tokens"] / 1e6:.1f} M tokens; means of {seeds} seeds, each against the uncompressed run of its seed '
             f'(min … max rise); commit {content["commit"]}, {content["date"][:10]}.', "",
             "| codec | error feedback | bytes of gradients | loss, last steps | rise | held-out loss | rise |",
             "|" + " --- |" * 7]
    for row in content["rows"]:
        lossy = row["codec"] != "none"
        cells = [f'`{row["codec"]}`' if lossy else "none", ("yes" if row["error_feedback"] else "no") if lossy else "–",
                 f'{row["runs"][0]["gradient_bytes"] / plain["gradient_bytes"] * 100:.1f} %']
        for key in ("loss", "validation_loss"):
            rise = row[key + "_rise"]
            cells += [f"{row[key]:.4f}", f'{rise["mean"] * 100:+.2f} % ({rise["min"] * 100:+.2f} … '
                      f'{rise["max"] * 100:+.2f})' if lossy else "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablation_table(file):
    """bench/ablation.py's file: a job with features switched on one after another."""
    content = json.loads((ROOT / file).read_text())
    ranks = {key.split(".")[1]: value for key, value in (word.split("=") for word in content["settings"])
             if key in ("parallel.tp", "parallel.dp", "parallel.pp")}
    busy = f'; **the machine was busy** (load {content["load_before"]:.0f})' if content["load_before"] > 1 else ""
    lines = [f'{content["hardware"]}, {content["ranks"]} CPU thread ranks '
             f'(tp {ranks["tp"]} × dp {ranks["dp"]} × pp {ranks["pp"]}) with an **emulated** link of {content["link"]}; '
             f'commit {content["commit"]}, {content["date"][:10]}{busy}.', "",
             "| switched on, in addition to the rows above | batch | step, ms: median (quartiles) | ms per sequence | speed-up "
             "| over the row above | steps | loss, last steps |", "|" + " --- |" * 8]
    before = None
    for row in content["rows"]:
        low, high = row["step_ms_quartiles"]
        over = f'{before["ms_per_sequence"] / row["ms_per_sequence"]:.2f}×' if before else "–"
        lines.append("| " + " | ".join([row["name"], str(row["batch"]), f'{row["step_ms"]:.0f} ({low:.0f}–{high:.0f})',
                                        f'{row["ms_per_sequence"]:.1f}', f'{row["speed_up"]:.2f}×', over,
                                        str(row["steps"]), f'{row["loss"]:.4f}']) + " |")
        before = row
    return "\n".join(lines)


def exposed_table(file):
    """bench/data_parallel.py's file: steps of replicas on links that take as long as their computation."""
    content = json.loads((ROOT / file).read_text())
    busy = f'; **the machine was busy** (load {content["load_before"]:.0f})' if content["load_before"] > 1 else ""
    lines = [f'{content["hardware"]}, one kernel thread a rank; commit {content["commit"]}, {content["date"][:10]}{busy}.', "",
             "| replicas | link | its time for what a rank sends in a step, ms | job | step, ms: median (quartiles) | exposed: part of the step longer "
             "than alone |", "|" + " --- |" * 6]
    for case in content["cases"]:
        for row in case["rows"]:
            low, high = row["step_ms_quartiles"]
            exposed = "–" if row["name"] == "alone" else f'{100 * row["exposed"]:.1f} %'
            lines.append("| " + " | ".join([str(case["ranks"]), case["link"], f'{case["wire_ms"]:.0f}', row["name"],
                                            f'{row["step_ms"]:.0f} ({low:.0f}–{high:.0f})', exposed]) + " |")
    return "\n".join(lines)


def floor_table(folder):
    found = [json.loads(f.read_text()) for f in (ROOT / folder).glob("*.json")]
    found.sort(key=lambda r: -r["slowdown"])
    lines = [f'{found[0]["hardware"]}, a core a host; commit {found[0]["commit"]}, '
             f'{found[0]["date"][:10]}; medians of {found[0]["rounds"]} rounds.', "",
             "| link | received, Mbit/s | bare matmul, ms | slower by, host 0 / host 1 | both | max E |",
             "|" + " --- |" * 6]
    for r in found:
        median = {key: [statistics.median(h[key]) for h in r["hosts"]] for key in r["hosts"][0]}
        cells = [r["link"], " / ".join(f"{x:.0f}" for x in median["mbit_per_s"]),
                 " / ".join(f"{x * 1e3:.1f}" for x in median["matmul_s"]),
                 " / ".join(f"{x * 100:.0f} %" for x in median["slowdown"]),
                 percent(r["slowdown"]), percent(r["efficiency_at_most"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def network_share_table(sources):
    """FLOOR,COLLECTIVES: time for which only the network keeps a core busy with the bytes of
    encoded collectives, from the share of a core that plain sockets take from a GEMM at that rate
    (netns_floor.py)."""
    floor_folder, folder = sources.split(",")
    floor, = (json.loads(f.read_text()) for f in (ROOT / floor_folder).glob("*.json"))
    share = floor["slowdown"] / (1 + floor["slowdown"])
    rate = statistics.mean(statistics.median(host["mbit_per_s"]) for host in floor["hosts"])
    lines = [f'Estimate from two runs: sockets that move {rate:.0f} Mbit/s each way take {share * 100:.0f} % of a core '
             f'from a matmul ({floor["link"]}).', "",
             "| operation | codec | sent each way, MB | network, core ms | codec, core ms | both | measured, ms "
             "| both / measured |", "|" + " --- |" * 8]
    for f in sorted((ROOT / folder).glob("*.json")):
        r = json.loads(f.read_text())
        each = r["wire_bytes"] / 1e6
        network, codec, took = each * 8 / rate * 1e3 * share, r["time_us"]["codec"] / 1e3, r["time_us"]["overlapped"] / 1e3
        lines.append(f'| {r["op"]} | `{r["codec"]["text"]}` | {each:.1f} | {network:.1f} | {codec:.1f} | {network + codec:.1f} '
                     f'| {took:.1f} | {(network + codec) / took * 100:.0f} % |')
    return "\n".join(lines)


def windows_table(file):
    content = json.loads((ROOT / file).read_text())
    times = collections.defaultdict(dict)
    for run in content["benchmarks"]:
        if run.get("aggregate_name") != "median":
            continue
        kind, window = re.match(r"(\w+)/window:(\d+)", run["name"]).groups()
        times[kind][int(window)] = run["real_time"]
    windows = list(times["forward"])
    lines = [f'{content["context"]["hardware"]}, 1 thread; commit {content["context"]["commit"]}; ms, medians of '
             f'{content["benchmarks"][0]["repetitions"]}.', "",
             "| window | " + " | ".join(f"{w:,}" if w else "none" for w in windows) + " |", "|" + " --- |" * (len(windows) + 1)]
    lines += [f"| {kind} | " + " | ".join(f"{of[w]:.0f}" for w in windows) + " |" for kind, of in times.items()]
    return "\n".join(lines)
