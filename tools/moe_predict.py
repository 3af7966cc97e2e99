#!/usr/bin/env python3
"""moe_predict.py FILE: predicts the time of one MoE layer on 4x H200 with its experts spread over
them, from kernel times of one GPU (FILE: output of gpu_moe_bench, as "layers") and the link; next
to it the measured time of torch's grouped GEMM with NCCL (bench/results/h200x4/peers/moe.json).
tools/tables.py makes the table.

A layer of M tokens over R = 2 or 4 ranks, top-k of E experts, hidden features h in bf16, rows
routed evenly. Every rank has M/R tokens and computes M k/R rows: as many as one GPU that has all
experts and M/R tokens. That GPU's times are used,
    permute, in, out, sum  us: row positions (and sorting rows, if the GPU did that first), the GEMMs into and
                           out of the experts, weighted sums
(not route, the router: torch's time excludes it), although it reads the weights of E experts and a
rank those of E/R: they are too long rather than too short. A row is sent once to each other rank
that has one of its experts, and returns as one partial sum, so each way
    p = 1 - C(E - E/R, k) / C(E, k)    of all rows are sent to a given rank,
    wire = (M/R) (R - 1) p  2 h bytes / LINK + 2 us.
LINK is the measured rate at which one H200 sends by its own stores (NVLink): 345 GB/s to the three
others of four at once, 354 GB/s to one other. 2 us is the time of the first signal, rounded up.
Then
    serial     = permute + wire + in + out + wire + sum
    limit      = serial - (min(in, wire) + min(out, wire))         everything that can be hidden is hidden
    overlapped = serial - 0.8 (min(in, wire) + min(out, wire))     E = 80 %, the target
A backward pass sends gradients and sums as often; its sums overlap the GEMMs of the weight
gradients:
    backward   = permute + wire + gather + d_act + gate + dx + max(wire, dw_in + dw_out) + sum
with the times of `gpu_moe_bench --backward`, whose weight gradients are those of R times as many
experts as a rank has. With few rows an expert they are bound by adding all weight gradients to
memory, which is divided by R, but not below the time of their arithmetic at 600 TFLOP/s. These are
predictions, and are printed as such."""
import json
import math
import sys

from bench_results import ROOT, load, markdown

RANKS, LATENCY_US, HIDDEN_SHARE = 4, 2.0, 0.8
HARDWARE = "H100"
BYTES_PER_US = {2: 354e3, 4: 345e3}  # by ranks
FLOPS_PER_US = 600e6  # weight gradients with many rows an expert
PEERS = "bench/results/h200x4/peers/moe.json"
# Experts, top-k, hidden features: those of gpu_moe_bench.
MODELS = {"mixtral-8x7b": (8, 2, 4096), "qwen2-moe-2.7b": (64, 4, 2048), "phi3.5-moe": (16, 2, 4096),
          "qwen3-30b": (128, 8, 2048), "deepseek-v3": (256, 8, 7168)}
FFN = {"mixtral-8x7b": 14336, "qwen2-moe-2.7b": 1408, "phi3.5-moe": 6400, "qwen3-30b": 768, "deepseek-v3": 2048}


def wire_us(model, tokens, ranks=RANKS):
    """One way, for `tokens` over all ranks."""
    experts, top_k, hidden = MODELS[model]
    share = 1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k)
    return tokens / ranks * (ranks - 1) * share * 2 * hidden / BYTES_PER_US[ranks] + LATENCY_US


def predicted(result, ranks=RANKS):
    """Predicted us by name from one object of gpu_moe_bench, for its tokens times the number of
    ranks."""
    t, tokens = result["time_us"], result["tokens"] * ranks
    wire = wire_us(result["model"], tokens, ranks)
    permute = t.get("permute", t.get("place")) + (t["gather"] if result.get("sorts_first") else 0)  # "place": former name
    serial = permute + t["in"] + t["out"] + t["sum"] + 2 * wire
    hidable = min(t["in"], wire) + min(t["out"], wire)
    return {"tokens": tokens, "permute": permute, "products": t["in"] + t["out"], "wire": 2 * wire, "serial": serial,
            "overlapped": serial - HIDDEN_SHARE * hidable, "limit": serial - hidable}


def predicted_backward(result, forward, ranks=RANKS):
    """Predicted us from one object of gpu_moe_bench --backward and the forward prediction of
    `predicted`: forward and backward together."""
    t, wire = result["time_us"], forward["wire"] / 2
    _, top_k, hidden = MODELS[result["model"]]
    flops = 2 * result["tokens"] * top_k * hidden * FFN[result["model"]]  # dw_out's
    weights = sum(max(t[name] / ranks, products * flops / FLOPS_PER_US)
                  for name, products in (("dw_in", 2), ("dw_out", 1)))
    back = forward["permute"] + wire + t["gather"] + t.get("d_act", t.get("dinner")) + t["gate"] + t["dx"] + max(wire, weights) + t["sum"]
    return {"serial": forward["serial"] + back, "overlapped": forward["overlapped"] + back}


def by_size(file, backward_file, ranks=RANKS):
    """Predictions in us, by model, tokens over all ranks, and whether there is a backward pass."""
    found = {}
    for r in load(file)[0]["layers"]:
        p = predicted(r, ranks)
        found[r["model"], p["tokens"], False] = p
    for r in (load(backward_file) or [{"layers": []}])[0]["layers"]:
        forward = found.get((r["model"], r["tokens"] * ranks, False))
        if forward:
            found[r["model"], r["tokens"] * ranks, True] = predicted_backward(r, forward, ranks)
    return found


def table(file):
    result = json.loads((ROOT / file).read_text())
    measured = result["layers"]
    torch = {(r["model"], r["tokens"]): r["time_us"]["total"] for r in load(PEERS)}
    rows = []
    for r in measured:
        p = predicted(r)
        peer = torch.get((r["model"], p["tokens"]))
        if peer is None:
            continue
        times = [f"{p[name]:.0f}" for name in ("products", "wire", "serial", "overlapped", "limit")]
        rows.append([r["model"], str(p["tokens"]), *times, f"{peer:.0f}", f'{peer / p["overlapped"]:.2f}'])
    if not rows:
        sys.exit(f"{file}: nothing of a size that {PEERS} has")
    heads = ["model", "tokens", "products", "wire, both ways", "serial", "overlapped", "limit", "torch + NCCL, measured",
             "torch over overlapped"]
    commits = ", ".join(dict.fromkeys(r["commit"] for r in measured))
    about = (f"**Predicted**, not measured: one layer forward, bf16, EP {RANKS} on {RANKS}x H200, by the formula of "
             f"`tools/moe_predict.py`; kernels of {result['hardware']} at commit {commits}; us.")
    return about + "\n\n" + markdown(heads, rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(table(sys.argv[1]))
