"""Short tables of README.md and docs/results/performance.md, from the same results as the long ones of
docs/results."""
import headline_training
from bench_results import (capped_mean, chosen, efficiency_of, fastest_peer, hidden, key, load, median,
                           markdown, peers_of, percent, matrix_bytes, bandwidth, size_name, span, tflops)
from cpu_table import results

GPUS = "bench/results/h200x4"
MANY, SOME, FEW = "M ≥ 4096", "M 1024 and 2048", "M 64 and 512"
ROWS = {MANY: lambda m: m >= 4096, SOME: lambda m: 1024 <= m < 4096, FEW: lambda m: m < 1024,
        "M 512": lambda m: m == 512, "M 1 to 256": lambda m: m <= 256}
E4M3 = "e4m3, a scale per row"
# Title of a line, the files of its cases, and the range of GEMM rows that count.
FOUR = [("AG+GEMM", MANY, ["ag_gemm"]), ("AG+GEMM", SOME, ["ag_gemm"]),
        ("AG+GEMM", FEW, ["ag_gemm", "more/ag_gemm-small"]),
        ("GEMM+RS", MANY, ["gemm_rs"]), ("GEMM+RS", SOME, ["gemm_rs"]), ("GEMM+RS", "M 512", ["gemm_rs"]),
        ("GEMM+AR", "M 1 to 256", ["gemm_ar"]),
        ("GEMM+AR, residual and RMSNorm", "M 1 to 256", ["more/add_norm"])]
TWO = [("AG+GEMM", MANY, ["more/ag_gemm-world2"]), ("AG+GEMM", SOME, ["more/ag_gemm-world2"]),
       ("AG+GEMM", FEW, ["more/ag_gemm-world2-small"]),
       ("GEMM+RS", MANY, ["more/gemm_rs-world2"]), ("GEMM+RS", SOME, ["more/gemm_rs-world2"]),
       ("GEMM+RS", FEW, ["more/gemm_rs-world2-small"]),
       ("GEMM+AR", "M 1 to 256", ["more/gemm_ar-world2"]),
       (f"AG+GEMM, {E4M3}", MANY, ["more/ag_gemm-e4m3-rows-world2"]),
       (f"AG+GEMM, {E4M3}", SOME, ["more/ag_gemm-e4m3-rows-world2"]),
       (f"GEMM+RS, {E4M3}", MANY, ["more/gemm_rs-e4m3-rows-world2"]),
       (f"GEMM+RS, {E4M3}", SOME, ["more/gemm_rs-e4m3-rows-world2"])]


def cases(rows, files):
    """Results with those of the peers: {peer: result} each."""
    found = []
    for name in files:
        file = f"{GPUS}/{name}.json"
        peers = peers_of(file)
        for r in load(file):
            if ROWS[rows](r["m"]):
                found.append((r, {peer: by[key(r)] for peer, by in peers.items() if key(r) in by}))
    return found


def over(found, peer, with_efficiency):
    """Ratio of the peer's time to ours, and the peer's E."""
    pairs = [(r, fastest_peer(it)[0]) for r, peers in found for name, it in peers.items() if name.startswith(peer)]
    if not pairs:
        return "–"
    text = span([us / median(r, chosen(r)) for r, us in pairs], unit="×")
    if not with_efficiency:
        return text
    efficiencies = [e for r, us in pairs if (e := efficiency_of(r, us)) is not None]
    return f"{text}; hides {percent(capped_mean(efficiencies))}"


def hidden_cell(found):
    efficiencies = [e for r, _ in found if (e := hidden(r)) is not None]
    whole = [e * 100 for e in efficiencies]
    return f"{percent(capped_mean(efficiencies))} ({span(whole, '{:.0f}')})"


def operators(lines, peers, with_efficiency=False):
    rows = []
    for name, of_rows, files in lines:
        found = cases(of_rows, files)
        us = [(r["time_us"], median(r, chosen(r)), r) for r, _ in found]
        rows.append([f"{name}, {of_rows}", hidden_cell(found), span([t["serial"] / it for t, it, _ in us], unit="×"),
                     span([t["nccl"] / it for t, it, _ in us], unit="×"),
                     span([tflops(r, it) for _, it, r in us], "{:.0f}"),
                     *(over(found, peer, with_efficiency and of_rows in (MANY, SOME)) for peer in peers)])
    return markdown(["", "communication hidden: average (range)", "over the fastest serial form",
                     "over NCCL's serial form", "TFLOP/s a GPU",
                     *(f"over {name}" for name in peers.values())], rows)


def collectives():
    rows = []
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        for ranks, name in ((2, f"more/{op}-world2"), (4, op)):
            found = load(f"{GPUS}/{name}.json")
            small = [r for r in found if matrix_bytes(r) <= 1 << 20]
            large = [r for r in found if matrix_bytes(r) > 1 << 20]
            most = max(found, key=matrix_bytes)
            gain = [span([r["time_us"]["nccl"] / median(r, chosen(r)) for r in part], unit="×")
                    for part in (small, large)]
            busbw = [f"{bandwidth(most, us)[1]:.0f}" for us in (median(most, chosen(most)), most["time_us"]["nccl"])]
            rows.append([f"{op}, {ranks} GPUs", *gain, *busbw])
    largest = size_name(matrix_bytes(most))
    return markdown(["", "over NCCL, 16 KiB to 1 MiB", f"4 MiB to {largest}", f"busbw at {largest}, GB/s",
                     "NCCL's"], rows)


def network():
    rows = []
    for rate in ("200mbit", "500mbit", "1gbit"):
        found = results(f"bench/results/netns-{rate}")
        floor = load(f"bench/results/netns-floor/{rate}.json")[0]
        cells = [f'{rate.removesuffix("mbit").removesuffix("gbit")} {"G" if "g" in rate else "M"}bit/s']
        for op in ("ag_gemm", "gemm_rs"):
            of_op = [r for r in found if r["op"] == op]
            whole = span([r["efficiency"] * 100 for r in of_op], "{:.0f}")
            cells.append(f'{percent(capped_mean([r["efficiency"] for r in of_op]))} ({whole})')
        rows.append(cells + [percent(floor["efficiency_at_most"])])
    return markdown(["link", "AG+GEMM: communication hidden", "GEMM+RS", "at most, by bare sockets beside a bare matmul"],
                    rows)


def headline():
    rows = []
    for name, of_rows, files in FOUR[0], FOUR[3], FOUR[6]:
        found = cases(of_rows, files)
        gain = [span([r["time_us"][base] / median(r, chosen(r)) for r, _ in found], unit="×") for base in ("serial", "nccl")]
        rows.append([f"{name}, {of_rows}", percent(capped_mean([hidden(r) for r, _ in found])), *gain,
                     *(over(found, peer, False) for peer in PEERS)])
    return markdown(["4× H200, NVLink, bf16", "communication hidden", "over the fastest serial form", "over NCCL's",
                     *(f"over {name}" for name in PEERS.values())], rows)


PEERS = {"torch": "PyTorch", "cuBLASMp": "cuBLASMp"}
TABLES = {"headline": headline, "training": headline_training.table,
          "four-gpus": lambda: operators(FOUR, PEERS),
          "two-gpus": lambda: operators(TWO, {"cuBLASMp": "cuBLASMp, which hides"}, with_efficiency=True),
          "collectives": collectives, "network": network}
