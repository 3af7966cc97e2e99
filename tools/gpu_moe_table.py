"""Markdown table of Mixture-of-Experts layers on one GPU, out of what bench/gpu_moe_bench prints, for
tools/tables.py."""
import json

from bench_results import ROOT, markdown


def row(r):
    us, rate = r["time_us"], r["tflops"]
    right = r["same_bits"] and r["worst_error"] < 1e-2
    return [r["model"], str(r["tokens"]), *(f"{us[part]:.0f}" for part in ("in", "out", "products", "layer")),
            *(str(rate[part]) for part in ("in", "out", "layer")), f'{r["layer_of_products"]:.2f}',
            "yes" if right else "NO"]


def table(file):
    result = json.loads((ROOT / file).read_text())
    commits = ", ".join(dict.fromkeys(r["commit"] for r in result["layers"]))
    heads = ["layer", "tokens", "first product, µs", "second, µs", "both, µs", "layer, µs", "first, TFLOP/s",
             "second, TFLOP/s", "layer, TFLOP/s", "layer over both", "correct"]
    return (f'{result["hardware"]}, bf16, all experts on it; commit {commits}, {result["date"]}; medians of '
            f'{result["repeats"]}, L2 flushed, idle gaps.\n\n' + markdown(heads, [row(r) for r in result["layers"]]))
