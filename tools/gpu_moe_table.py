"""Markdown tables of MoE layers on one GPU, from the output of gpu_moe_bench, which timed them, for
tools/tables.py."""
import json

from bench_results import ROOT, all_right, markdown
from moe_predict import FFN, MODELS

READ_BYTES_PER_US = 3.0e6  # reached by read-only kernels on an H100, out of 3.35 TB/s


def right(errors, same_bits, bound=2e-2):
    return same_bits and max(errors) < bound


def touched_bytes(r):
    """Bytes of the weights of all experts with rows: counted, or expected for random routing."""
    experts, top_k, hidden = MODELS[r["model"]]
    expected = experts * (1 - (1 - top_k / experts) ** r["tokens"])
    return r.get("touched_bytes", expected * 6 * hidden * FFN[r["model"]])


def row(results):
    """Row of one layer and number of tokens in each dtype; `results`: one per dtype."""
    cells = [results[0]["model"], str(results[0]["tokens"])]
    for r in results:
        us = r["time_us"]
        bound = f'{us["layer"] * READ_BYTES_PER_US / touched_bytes(r):.2f}' if r["tokens"] <= 256 else "–"
        cells += [f'{us["products"]:.0f}', f'{us["layer"]:.0f}', f'{r["layer_of_products"]:.2f}', bound,
                  str(r["tflops"]["layer"])]
    return cells


def backward_row(r):
    us, rate = r["time_us"], r["tflops"]
    return [r["model"], str(r["tokens"]), f'{us.get("d_act", us.get("dinner")) + us["dx"]:.0f}', f'{us["dw_in"] + us["dw_out"]:.0f}',
            f'{us["products"]:.0f}', f'{us["backward"]:.0f}', f'{r["backward_of_products"]:.2f}', str(rate["backward"])]


def title(result):
    commits = ", ".join(dict.fromkeys(r["commit"] for r in result["layers"]))
    dtypes = ", ".join(dict.fromkeys(r.get("dtype", "bf16") for r in result["layers"]))
    return f'{dtypes}: commit {commits}, {result["date"]}, medians of {result["repeats"]}'


def table(files):
    """Forward passes; `files`: one per dtype, of the same layers."""
    found = [json.loads((ROOT / file).read_text()) for file in files.split(",")]
    by = [{(r["model"], r["tokens"]): r for r in result["layers"]} for result in found]
    bounds = {"e4m3": 4e-2}
    flags = [right([r["worst_error"]], r["same_bits"], bounds.get(r.get("dtype"), 2e-2))
             for result in found for r in result["layers"]]
    heads = ["layer", "tokens"]
    for result in found:
        dtype = result["layers"][0].get("dtype", "bf16")
        heads += [f"{dtype}: GEMMs, µs", "layer, µs", "layer / GEMMs", "layer / weight read", "TFLOP/s"]
    return (f'{found[0]["hardware"]}, all experts on it; {"; ".join(map(title, found))}; L2 flushed, idle gaps; '
            f"{all_right(flags)}.\n\n"
            + markdown(heads, [row([of[case] for of in by]) for case in by[0] if all(case in of for of in by)]))


def backward_table(file):
    result = json.loads((ROOT / file).read_text())
    flags = [right(r["errors"].values(), r["same_bits"]) for r in result["layers"]]
    heads = ["layer", "tokens", "input gradients, µs", "weight gradients, µs", "four GEMMs, µs", "backward, µs",
             "backward / GEMMs", "TFLOP/s"]
    return (f'{result["hardware"]}, all experts on it; {title(result)}; L2 flushed, idle gaps; {all_right(flags)}.\n\n'
            + markdown(heads, [backward_row(r) for r in result["layers"]]))
