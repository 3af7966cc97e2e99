"""Markdown tables of the savings of wire formats and chunks on a network, from a folder of `tandem
bench` results (relative to the repository), for tools/tables.py: `collectives` of collectives,
`prefill` of times to first token, `emulated` of collectives of ranks that share a GPU. Every row's
uncompressed candidate was timed in the same run."""
import json
import re

from bench_results import (ROOT, about, all_right, candidates, is_right, markdown, only, percent, matrix_bytes,
                           size_name, span)
from cpu_table import results


def ms(us):
    return f"{us / 1e3:.1f}"


def ratio(before, after):
    return f"{before / after:.2f}×"


def codec_name(r):
    return f'`{r["codec"]["text"]}`' if r["codec"] else "none"


def collective_row(r):
    t = r["time_us"]
    cells = [r["link"].removeprefix("tbf "), r["op"], r["dtype"], size_name(matrix_bytes(r)), codec_name(r), ms(t["serial"]),
             ms(t["overlapped"]), ratio(t["serial"], t["overlapped"])]
    if not r["codec"]:
        return cells + ["–"] * 5
    parts = [ms(t[key]) for key in ("wire_encoded", "codec", "transport")]
    return cells + [ratio(r["bytes"], r["wire_bytes"]), *parts, percent(t["limit"] / t["overlapped"])]


def collectives(folders):
    """Table of one folder or several."""
    found = sorted((r for folder in folders.split(",") for r in results(folder)),
                   key=lambda r: (r["link"], r["op"], r["dtype"] != "f32", matrix_bytes(r), r["codec"] is not None,
                                  -(r["codec"] or {}).get("bits_per_element", 0)))
    heads = ["link", "operation", "dtype", "size", "codec", "fastest uncompressed", "Tandem", "speed-up",
             "compression", "wire time", "codec", "transport", "limit / time"]
    return f"{about(found, folders)} {all_right(map(is_right, found)).capitalize()}.\n\n" + \
        markdown(heads, [collective_row(r) for r in found])


def link_us(r):
    """Time of the bytes sent by a rank, on an emulated link of the rate in its name."""
    rate, unit = re.match(r"emulated ([\d.e+-]+) ([kMG]?B)/s", r["link"]).groups()
    per_us = float(rate) * {"B": 1e-6, "kB": 1e-3, "MB": 1, "GB": 1e3}[unit]
    return (r["wire_bytes"] if r["codec"] else r["bytes"]) / per_us


def emulated_row(r):
    t = r["time_us"]
    us = t["overlapped"] if r["codec"] else t["serial"]
    return [r["op"], r["dtype"], size_name(matrix_bytes(r)), codec_name(r), f"{us / 1e3:.2f}", f"{link_us(r) / 1e3:.2f}",
            percent(link_us(r) / us), ratio(t["serial"], us), "yes" if is_right(r) else "NO"]


def emulated(folder):
    found = sorted(results(folder), key=lambda r: (r["op"], matrix_bytes(r), -link_us(r)))
    heads = ["operation", "dtype", "size", "codec", "ms", "wire time, ms", "wire / total",
             "over uncompressed", "correct"]
    return (f'{only(found, "hardware", folder)}, {only(found, "ranks", folder)} ranks that share it, link '
            f'**{only(found, "link", folder)}**; {span([r["date"][:10] for r in found], "{}")}; medians of '
            f'{only(found, "repeats", folder)}, slowest rank.\n\n' + markdown(heads, [emulated_row(r) for r in found]))


def prefill_row(r):
    times = {name: entry["median"] for name, entry in candidates(r).items()}
    plain = {name: us for name, us in times.items() if not candidates(r)[name].get("encoded")}
    encoded = {name: us for name, us in times.items() if name not in plain}
    serial, chosen = r["time_us"]["serial"], r["time_us"]["overlapped"]
    iso = plain["ISO"]
    with_codec = [next((us for name, us in encoded.items() if name.startswith(form)), None)
                  for form in ("one chunk", "ISO")]
    cells = [r["link"].removeprefix("tbf "), str(r["m"]), f'{r["layers"]} × {r["k"]}, MLP {r["n"]}', codec_name(r), ms(serial), ms(iso),
             *("–" if us is None else ms(us) for us in with_codec)]
    cells += [r["config"]["overlapped"], ratio(serial, chosen)]
    if not r["codec"]:
        return cells + ["–"] * 2
    return cells + [ratio(min(plain.values()), chosen), f'{100 * r["error"]["max_rel"]:.1f} %']


def prefill(folders):
    """Table of one folder or several."""
    found = sorted((r for folder in folders.split(",") for r in results(folder)),
                   key=lambda r: (r["link"], r["k"], r["m"], r["layers"], r["codec"] is not None,
                                  -(r["codec"] or {}).get("bits_per_element", 0)))
    heads = ["link", "tokens", "layers × hidden", "codec", "serial", "ISO", "serial, codec", "ISO, codec", "chosen",
             "over serial", "over the fastest uncompressed", "error of the logits"]
    return f"{about(found, folders)} {all_right(map(is_right, found)).capitalize()}.\n\n" + \
        markdown(heads, [prefill_row(r) for r in found])


def on_gpu(name):
    """Table of gpu_codec_bench: bandwidth of encoding, decoding and an owner's sum relative to a
    copy of the same number of bytes."""
    found = json.loads((ROOT / name).read_text())
    kernels, dtypes = ("encode", "decode", "sum"), ("bf16", "f32")
    by = {(r["codec"], r["dtype"]): r for r in found["results"]}
    rows = [[f"`{codec}`", *(f'{by[codec, dtype]["time_us"][key]:.0f} ({percent(by[codec, dtype]["share_of_copy"][key])})'
                             for dtype in dtypes for key in kernels),
             "yes" if all(by[codec, dtype]["cpu_bytes"] for dtype in dtypes) else "NO"]
            for codec in dict.fromkeys(r["codec"] for r in found["results"])]
    heads = ["codec", *(f"{dtype}: {key}" for dtype in dtypes for key in kernels), "same bytes as CPU"]
    first = found["results"][0]
    return (f'{found["device"]}, commit {found["commit"]}, {found["date"]}; {first["elements"]:,} elements, sums of '
            f'{first["ranks"]} ranks; µs, medians of {found["repeats"]}, and share of a copy\'s bandwidth.\n\n'
            + markdown(heads, rows))
