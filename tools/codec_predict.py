#!/usr/bin/env python3
"""codec_predict.py FILE: predicts the time of an all-reduce over a wire format on 4x H200 from
kernel times of one GPU (FILE: results of gpu_codec_bench) and the link; next to it NCCL's measured
time (bench/results/h200x4).

S elements in bf16 on N = 2 or 4 ranks, each of which owns S/N:
    wire  = 2 (N - 1) message(S/N) / LINK
    codec = encode((N - 1) S/N) + sum(S/N) + decode((N - 1) S/N)     by the elements of FILE's times
    tiles = S/N / (256 thread blocks of 7168 elements a tile), at least 1
    time  = max(wire, codec) + codec / tiles + 2 x 4 us
Other collectives (PARTS): half as many messages and one signal, and the codec work of each. LINK is
the measured rate at which one H200 sends by its own stores (NVLink): 345 GB/s to the three others
of four at once, 354 GB/s to one other. FILE's sum is over 4 ranks' messages; for N it is scaled by
its bytes, N messages and two elements of bf16. codec / tiles is the part that nothing overlaps: the
first tile's encoding, the last one's sum and decoding (src/collectives/cuda/encoded_pipeline.cuh).
4 us is the time of a signal after stores to a peer, rounded up; two follow each other. FILE's GPU
has slower memory than an H200."""
import argparse
import json

from bench_results import ROOT, load, markdown, size_name

RANKS, LATENCY_US, BLOCKS, TILE = 4, 4.0, 256, 7168
BYTES_PER_US = {2: 354e3, 4: 345e3}  # by ranks
NCCL = "bench/results/h200x4/all_reduce.json"
SIZES = (16, 64, 256)  # MiB
ASKED = {("int8", 16): 1.7, ("int4", 16): 2.2, **{(codec, mib): least for mib in (64, 256)
         for codec, least in (("int8", 1.8), ("int6", 2.3), ("int4", 3.0))}}


def parts(op, ranks):
    """Counts of shards: messages sent, encoded, summed, decoded; and of consecutive signals."""
    others = ranks - 1
    return {"all_reduce": (2 * others, others, 1, others, 2), "all_gather": (others, 1, 0, others, 1),
            "reduce_scatter": (others, others, 1, 0, 1), "all_to_all": (others, others, 0, others, 1)}[op]


def predicted(result, size, op="all_reduce", ranks=RANKS):
    """Predicted us by name from one object of gpu_codec_bench, for `size` bytes of bf16."""
    t, shard = result["time_us"], size / 2 / ranks
    share = shard / result["elements"]
    messages, encoded, summed, decoded, signals = parts(op, ranks)
    message = result["wire_bytes"] / result["elements"]
    whole_sum = t["sum"] * (ranks * message + 4) / (result["ranks"] * message + 4)
    wire = messages * result["wire_bytes"] * share / BYTES_PER_US[ranks]
    codec = share * (encoded * t["encode"] + summed * whole_sum + decoded * t["decode"])
    tiles = max(1, shard / (BLOCKS * TILE))
    return {"wire": wire, "codec": codec, "time": max(wire, codec) + codec / tiles + signals * LATENCY_US}


def predictions(file):
    """(codec, MiB, us by name, NCCL's us) of all requested cases."""
    measured = json.loads((ROOT / file).read_text())
    nccl = {r["m"] * r["n"] * 2 >> 20: r["time_us"]["nccl"] for r in load(NCCL) if r["dtype"] == "bf16"}
    for codec in ("int8", "int6", "int4"):
        result = next(r for r in measured["results"] if (r["codec"], r["dtype"]) == (codec, "bf16"))
        for mib in SIZES:
            yield codec, mib, predicted(result, mib << 20), nccl[mib]


def table(file):
    measured = json.loads((ROOT / file).read_text())
    rows = []
    for codec, mib, us, nccl in predictions(file):
        asked = ASKED.get((codec, mib))
        rows.append([f"`{codec}`", size_name(mib << 20), *(f"{us[key]:.0f}" for key in ("wire", "codec", "time")),
                     f"{nccl:.0f}", f'{nccl / us["time"]:.2f}×', f"{asked:.1f}×" if asked else "–"])
    heads = ["codec", "size", "wire", "codec's kernels", "all-reduce, predicted", "NCCL, measured", "NCCL over predicted",
             "asked for"]
    about = (f"**Predicted**, not measured: all-reduce of bf16 on {RANKS}x H200, by the formula of "
             f"`tools/codec_predict.py`; kernels of {measured['device']} at commit {measured['commit']}; us.")
    return about + "\n\n" + markdown(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    print(table(parser.parse_args().file))
