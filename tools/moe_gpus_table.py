#!/usr/bin/env python3
"""moe_gpus_table.py FOLDER: Markdown table of `tandem bench moe` on GPU ranks, from
tools/gpu_check.sh (moe-*.json), next to moe_predict.py's prediction for two or four of them, made
before the run, and to the time of torch's grouped GEMM with NCCL (FOLDER/peers/moe.json). Results
over a wire format have a table of their own. Also for tools/tables.py, as `emulated` for ranks that
share a GPU, on an emulated link."""
import pathlib
import sys

import moe_predict
from bench_results import ROOT, all_right, candidates, is_right, load, markdown, percent

MEASURED_ON_ONE = ("bench/results/h100x1/designs/moe_layer-6e06cff.json",
                   "bench/results/h100x1/designs/moe_backward-1dfca1d.json")


def results(folder):
    """All cases, as often as each was measured in its last run."""
    return [r for file in sorted((ROOT / folder).glob("moe-*.json")) for r in load(file)]


def row(r, predictions, peers):
    us = r["time_us"]
    even = r["imbalance"] < 1.2  # as the peer's routing
    spread = r["tp"] == 1 and even and r["link"] != "same-gpu"
    said = predictions.get((r["model"], r["tokens"], r["backward"])) if spread and moe_predict.HARDWARE in r["hardware"] else None
    peer = peers.get((r["model"], r["ep"], r["tp"], r["tokens"]), {}).get("both" if r["backward"] else "total") if even else None
    fastest = min(us["serial"], us["overlapped"])
    off = f'{(fastest / said["overlapped"] - 1) * 100:+.0f} %' if said else "–"
    return [r["model"], f'{r["ep"]} × {r["tp"]}', str(r["tokens"]), "both" if r["backward"] else "forward",
            f'{r["imbalance"]:.2f}', *(f"{us[name]:.0f}" for name in ("gemm", "wire", "serial", "overlapped")),
            percent(r["efficiency"]), percent((us["serial"] - us["overlapped"]) / us["wire"]) if us["wire"] else "",
            off, f"{peer / fastest:.2f}" if peer else "–"]


def places(found):
    ran = ", ".join(dict.fromkeys(f'{r["hardware"]}, {r["ranks"]} ranks, link {r["link"]}' for r in found))
    commits = ", ".join(sorted({r["commit"] for r in found}))
    return f'{ran}, {" and ".join(sorted({r["dtype"] for r in found}))}; commit {commits}; µs, medians, slowest rank; {all_right(map(is_right, found))}.'


def fastest_by_kind(r):
    """Time of the fastest candidate by form and encoding; None if there is none."""
    us = {}
    for c in candidates(r).values():
        kind = c["form"], c.get("encoded", False)
        us[kind] = min(c["median"], us.get(kind, c["median"]))
    return [us.get((form, encoded)) for encoded in (False, True) for form in ("serial", "overlapped")]


def encoded_row(r):
    serial, fused, *encoded = fastest_by_kind(r)
    times = [serial, fused, *encoded]
    plain, over_wire = ([us for us in of if us is not None] for of in ((serial, fused), encoded))
    return [r["model"], f'{r["ep"]} × {r["tp"]}', str(r["tokens"]), f'`{r["codec"]["text"]}`', f'{r["imbalance"]:.2f}',
            f'{r["time_us"]["gemm"]:.0f}', *("" if us is None else f"{us:.0f}" for us in times),
            f"{min(plain) / min(over_wire):.2f}" if plain and over_wire else "",
            f'{r["wire_bytes"] / r["bytes"] * 100:.0f} %' if r["bytes"] else ""]


def encoded_table(found):
    heads = ["layer", "EP × TP", "tokens", "wire format", "imbalance", "GEMMs", "serial", "fused", "serial, encoded",
             "fused, encoded", "uncompressed / encoded", "bytes sent"]
    return places(found) + "\n\n" + markdown(heads, [encoded_row(r) for r in found])


def plain_table(found, folder):
    peers = {(r["model"], r["ep"], r["tp"], r["tokens"]): r["time_us"]
             for r in load(pathlib.Path(folder) / "peers/moe.json")}
    ranks = {r["ranks"] for r in found}
    predictions = (moe_predict.by_size(*MEASURED_ON_ONE, *ranks)
                   if len(ranks) == 1 and ranks <= set(moe_predict.BYTES_PER_US) else {})
    heads = ["layer", "EP × TP", "tokens", "passes", "imbalance", "GEMMs", "wire time", "serial", "overlapped", "E",
             "saved / wire time", "over prediction", "torch + NCCL / Tandem"]
    return places(found) + "\n\n" + markdown(heads, [row(r, predictions, peers) for r in found])


def emulated_rows(r, taken):
    """Row for the uncompressed candidates, or for the encoded ones if there are any. `taken`: the
    fastest of them with evenly routed rows, by layer."""
    over_wire = bool(r["codec"])
    us = {name: c["median"] for name, c in candidates(r).items() if c.get("encoded", False) == over_wire}
    serial, overlapped = fastest_by_kind(r)[2 * over_wire:][:2]
    gemm, wire = r["time_us"]["gemm"], r["time_us"]["wire"] * (r["wire_bytes"] / r["bytes"] if over_wire else 1)
    exposed = serial - gemm
    hidden = [percent(1 - (time - gemm) / exposed) for time in (overlapped, max(gemm, wire))] if exposed > 0 else ["", ""]
    name = taken.get(layer_of(r))
    return [r["link"].removesuffix(" same-gpu"), r["model"], str(r["tokens"]), f'`{r["codec"]["text"]}`' if over_wire else "–",
            f'{r["imbalance"]:.2f}', *(f"{time:.0f}" for time in (gemm, wire, serial, overlapped)), *hidden,
            f"{us[name] / serial:.2f}" if name in us else "", "yes" if is_right(r) else "NO"]


def layer_of(r):
    return r["link"], r["model"], r["ep"], r["tp"], r["tokens"], (r["codec"] or {}).get("text")


def fastest_by_layer(found):
    """The layer's choice for evenly routed rows."""
    taken = {}
    for r in found:
        if r["imbalance"] < 1.2:
            us = {name: c["median"] for name, c in candidates(r).items() if c.get("encoded", False) == bool(r["codec"])}
            taken[layer_of(r)] = min(us, key=us.get)
    return taken


def emulated(folder):
    found = sorted(results(folder), key=lambda r: (r["model"], r["link"], r["tokens"], bool(r["codec"]), r["imbalance"]))
    if not found:
        sys.exit(f"{folder}: expected moe-*.json of tandem bench moe")
    if not all(r["link"].startswith("emulated ") for r in found):
        sys.exit(f"{folder}: expected an emulated link in all results")
    taken = fastest_by_layer(found)
    ran = ", ".join(dict.fromkeys(f'{r["hardware"]}, {r["ranks"]} ranks that share it' for r in found))
    commits = ", ".join(sorted({r["commit"] for r in found}))
    heads = ["link", "layer", "tokens", "wire format", "imbalance", "GEMMs", "wire time", "serial", "overlapped", "E",
             "max E", "tuned for imbalance 1 / serial", "correct"]
    return (f"{ran}, on **emulated** links, EP {only_ep(found)}, bf16; commit {commits}; µs, medians, slowest rank.\n\n"
            + markdown(heads, [emulated_rows(r, taken) for r in found]))


def only_ep(found):
    return " and ".join(sorted({f'{r["ep"]} × TP {r["tp"]}' for r in found}))


def table(folder):
    found = results(folder)
    if not found:
        sys.exit(f"{folder}: expected moe-*.json of tandem bench moe")
    plain, encoded = ([r for r in found if bool(r["codec"]) == over_wire] for over_wire in (False, True))
    tables = ([plain_table(plain, folder)] if plain else []) + ([encoded_table(encoded)] if encoded else [])
    return "\n\n".join(tables)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(table(sys.argv[1]))
