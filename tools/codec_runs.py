"""Table of collectives over wire formats on GPUs, from a folder of `tandem bench` results
(tools/gpu_check.sh with GPU_CODECS), for tools/tables.py: each next to NCCL and the fastest
uncompressed candidate of the same rounds, and to the prediction made before the run
(tools/codec_predict.py, for two or four ranks with a GPU each)."""
import json

import codec_predict
from bench_results import ROOT, all_right, candidates, load, markdown, only, percent, shape_name, size_name, span

KERNELS = "bench/results/h100x1/gpu-codecs.json"


def uncompressed_us(r):
    return min(entry["median"] for entry in candidates(r).values() if not entry.get("encoded"))


def encoded_us(r):
    return min(entry["median"] for entry in candidates(r).values() if entry.get("encoded"))


def whole(r):
    return r["m"] * r["n"] * (4 if r["dtype"] == "f32" else 2)


def prediction(r, kernels):
    """us; None if nothing was predicted."""
    found = kernels.get((r["codec"]["text"], r["dtype"]))
    if found is None or r["ranks"] not in codec_predict.BYTES_PER_US or r["link"] == "same-gpu":
        return None
    return codec_predict.predicted(found, whole(r), r["op"], r["ranks"])["time"]


def row(results, sizes, kernels):
    """Row of one operation over one codec; `results`: by size."""
    cells = [next(iter(results.values()))["op"], f'`{next(iter(results.values()))["codec"]["text"]}`']
    for size in sizes:
        r = results.get(size)
        cells.append("–" if r is None else f"{encoded_us(r):.0f} ({uncompressed_us(r) / encoded_us(r):.2f}×)")
    largest = results[max(results)]
    over = [candidates(r)["nccl"]["median"] / encoded_us(r) for r in results.values() if "nccl" in candidates(r)]
    off = [encoded_us(r) / before - 1 for r in results.values() if (before := prediction(r, kernels)) is not None]
    link = codec_predict.BYTES_PER_US.get(largest["ranks"], max(codec_predict.BYTES_PER_US.values()))
    return cells + [span(over, unit="×") if over else "–", percent(largest["wire_bytes"] / encoded_us(largest) / link),
                    span([100 * o for o in off], "{:+.0f}", " %") if off else "–"]


def right(r):
    return r["bitwise_equal_runs"] and r["error"]["max_of_bound"] <= 1


def table(folder):
    found = [r for file in sorted((ROOT / folder).glob("*.json")) for r in load(file)]
    kernels = {(k["codec"], k["dtype"]): k for k in json.loads((ROOT / KERNELS).read_text())["results"]}
    found.sort(key=lambda r: (r["op"], -r["codec"]["bits_per_element"], whole(r)))
    sizes, by = sorted({whole(r) for r in found}), {}
    for r in found:
        by.setdefault((r["op"], r["codec"]["text"]), {})[whole(r)] = r
    heads = ["operation", "codec", *map(size_name, sizes), "over NCCL", "link use, largest size", "over prediction"]
    return (f'{only(found, "hardware", folder)}, {only(found, "ranks", folder)} ranks, link '
            f'{only(found, "link", folder)}; commit {", ".join(sorted({r["commit"] for r in found}))}, '
            f'{span([r["date"][:10] for r in found], "{}")}; medians of {span([r["repeats"] for r in found], "{:d}")}, '
            f"slowest rank; {all_right(map(right, found))}; µs (over the fastest uncompressed form).\n\n"
            + markdown(heads, [row(results, sizes, kernels) for results in by.values()]))


def operators(folder):
    """Operators over a wire format next to the uncompressed ones and only the GEMM, of the same
    rounds."""
    found = [r for file in sorted((ROOT / folder).glob("*.json")) for r in load(file)]
    found.sort(key=lambda r: (r["op"], r["m"], r["n"], r["codec"]["bits_per_element"]))

    def operator_row(r):
        uncompressed, encoded = r["compared"]["uncompressed"], r["compared"]["encoded"]
        return [r["op"], shape_name(r), f'`{r["codec"]["text"]}`', f'{r["time_us"]["gemm"]:.0f}',
                f'{uncompressed["us"]:.0f}', percent(uncompressed["efficiency"]), encoded["name"], f'{encoded["us"]:.0f}',
                f'{r["over_gemm"]["encoded"]:+.1%}', percent(encoded["efficiency"])]

    heads = ["operator", "M × N × K", "codec", "GEMM, µs", "uncompressed, µs", "E", "encoded candidate", "encoded, µs", "over the GEMM", "E"]
    return (f'{only(found, "hardware", folder)}, {only(found, "ranks", folder)} ranks, link '
            f'{only(found, "link", folder)}; commit {", ".join(sorted({r["commit"] for r in found}))}, '
            f'{span([r["date"][:10] for r in found], "{}")}; medians of {span([r["repeats"] for r in found], "{:d}")}, '
            f"slowest rank; {all_right(map(right, found))}.\n\n" + markdown(heads, [operator_row(r) for r in found]))
