"""Markdown tables of Mixture-of-Experts layers on one GPU, out of what bench/gpu_moe_bench prints, for
tools/tables.py."""
import json

from bench_results import ROOT, markdown
from moe_predict import FFN, MODELS

READ_BYTES_PER_US = 3.0e6  # of 3.35 TB/s: what kernels that only read reach on an H100


def right(errors, same_bits, bound=2e-2):
    return "yes" if same_bits and max(errors) < bound else "NO"


def touched_bytes(r):
    """Of the weights of the experts that any row chose: counted, or expected of rows that choose at random."""
    experts, top_k, hidden = MODELS[r["model"]]
    expected = experts * (1 - (1 - top_k / experts) ** r["tokens"])
    return r.get("touched_bytes", expected * 6 * hidden * FFN[r["model"]])


def form(r):
    """How the products have their rows, and whether the blocks of sorted rows' products work in pairs."""
    how = "sorted beside" if r.get("sorting_blocks") else "sorted" if r.get("sorts_first") else "gathered"
    return how + (", pairs" if r.get("pairs") else "")


def row(r):
    us, rate = r["time_us"], r["tflops"]
    read = touched_bytes(r) / READ_BYTES_PER_US
    bound = [f"{read:.0f}", f'{us["layer"] / read:.2f}'] if r["tokens"] <= 256 else ["", ""]
    return [r["model"], str(r["tokens"]), form(r), *(f"{us[part]:.0f}" for part in ("in", "out", "products", "layer")), *bound,
            *(str(rate[part]) for part in ("in", "out", "layer")), f'{r["layer_of_products"]:.2f}',
            right([r["worst_error"]], r["same_bits"], 4e-2 if r.get("dtype") == "e4m3" else 2e-2)]


def backward_row(r):
    us, rate = r["time_us"], r["tflops"]
    parts = ("dinner", "dx", "dw_in", "dw_out", "products", "gather", "gate", "sum", "backward")
    return [r["model"], str(r["tokens"]), *(f"{us[part]:.0f}" for part in parts), f'{r["backward_of_products"]:.2f}',
            str(rate["products"]), str(rate["backward"]), right(r["errors"].values(), r["same_bits"])]


def titled(file, heads, make_row):
    result = json.loads((ROOT / file).read_text())
    commits = ", ".join(dict.fromkeys(r["commit"] for r in result["layers"]))
    dtypes = ", ".join(dict.fromkeys(r.get("dtype", "bf16") for r in result["layers"]))
    return (f'{result["hardware"]}, {dtypes}, all experts on it; commit {commits}, {result["date"]}; medians of '
            f'{result["repeats"]}, L2 flushed, idle gaps.\n\n' + markdown(heads, [make_row(r) for r in result["layers"]]))


def table(file):
    return titled(file, ["layer", "tokens", "rows", "first product, µs", "second, µs", "both, µs", "layer, µs",
                         "reading weights, µs", "layer over that", "first, TFLOP/s", "second, TFLOP/s",
                         "layer, TFLOP/s", "layer over both", "correct"], row)


def backward_table(file):
    return titled(file, ["layer", "tokens", "to inner, µs", "to x, µs", "dW in, µs", "dW out, µs", "all four, µs",
                         "gather, µs", "gate, µs", "sum, µs", "backward, µs", "backward over four",
                         "four, TFLOP/s", "backward, TFLOP/s", "correct"], backward_row)
