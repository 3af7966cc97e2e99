"""The table of a Transformer's memory-bound kernels (docs/results/gpu-kernels.md), from gpu_kernels_bench's results."""
import json

from bench_results import ROOT, markdown

# Bytes per second of a device-to-device copy, read and written, in GB/s.
COPY = {"h100x1": 2810, "h200x1": 4300}


def table(_):
    runs = {name: json.loads((ROOT / "bench/results" / name / "model_kernels.json").read_text()) for name in COPY}
    ops = [row["op"] for row in runs["h100x1"]["kernels"]]
    by = {name: {row["op"]: row for row in run["kernels"]} for name, run in runs.items()}

    def cells(op):
        for name, copy in COPY.items():
            row = by[name].get(op)
            if not row:
                yield from ("–",) * 3
                continue
            yield from (f'{row["us"]:.0f}', f'{row["gb_per_s"] / 1000:.2f}', f'{100 * row["gb_per_s"] / copy:.0f} %')
    heads = [f"{unit}, {name[:4].upper()}" for name in COPY for unit in ("µs", "TB/s", "of a copy")]
    return markdown(["kernel", *heads], [[f"`{op}`", *cells(op)] for op in ops])


def attention(file):
    rows = json.loads((ROOT / file).read_text())["attention"]
    times = {(row["op"].removeprefix("attention_"), row["seq"], row["form"]): row for row in rows}
    forms = {"simple": "simple", "hopper": "own, Hopper", "cudnn": "cuDNN", "cudnn_unordered": "cuDNN, not deterministic"}

    def cell(direction, seq, form):
        row = times.get((direction, seq, form))
        return f'{row["us"]:.0f} µs, {row["tflops"]:.0f} TFLOP/s' if row else "–"
    return markdown(["", *forms.values()], [[f"{direction}, {seq} tokens a sequence", *(cell(direction, seq, form) for form in forms)]
                                            for direction in ("forward", "backward") for seq in sorted({key[1] for key in times})])
