"""Markdown tables of what wire formats and chunks save on a network, out of a folder of `tandem bench` results
(relative to the repository), for tools/tables.py: `collectives` of plain collectives, `prefill` of times to first
token. Every row's plain form was timed in the same run."""
from bench_results import about, bandwidth, candidates, is_right, markdown, percent, plain_bytes, size_name
from cpu_table import results


def ms(us):
    return f"{us / 1e3:.1f}"


def ratio(before, after):
    return f"{before / after:.2f}×"


def codec_name(r):
    return f'`{r["codec"]["text"]}`' if r["codec"] else "none"


def collective_row(r):
    t = r["time_us"]
    cells = [r["op"], r["dtype"], size_name(plain_bytes(r)), codec_name(r), r["config"]["serial"], ms(t["serial"]),
             f'{bandwidth(r, t["serial"])[0]:.3f}', ms(t["overlapped"]), f'{bandwidth(r, t["overlapped"])[0]:.3f}',
             ratio(t["serial"], t["overlapped"])]
    if not r["codec"]:
        return cells + ["–"] * 5 + ["yes" if is_right(r) else "NO"]
    parts = [ms(t[key]) for key in ("wire_encoded", "codec", "transport")]
    return cells + [ratio(r["bytes"], r["wire_bytes"]), *parts, percent(t["limit"] / t["overlapped"]),
                    "yes" if is_right(r) else "NO"]


def collectives(folder):
    found = sorted(results(folder), key=lambda r: (r["op"], r["dtype"] != "f32", plain_bytes(r),
                                                   r["codec"] is not None,
                                                   -(r["codec"] or {}).get("bits_per_element", 0)))
    heads = ["operation", "dtype", "size", "codec", "fastest plain form", "its ms", "its algbw, GB/s", "Tandem, ms",
             "algbw, GB/s", "over plain", "bytes, plain over sent", "wire", "codec", "transport", "of the limit",
             "correct"]
    return about(found, folder) + "\n\n" + markdown(heads, [collective_row(r) for r in found])


def prefill_row(r):
    times = {name: entry["median"] for name, entry in candidates(r).items()}
    plain = {name: us for name, us in times.items() if not candidates(r)[name].get("encoded")}
    encoded = {name: us for name, us in times.items() if name not in plain}
    serial, chosen = r["time_us"]["serial"], r["time_us"]["overlapped"]
    iso = plain["ISO"]
    with_codec = [next((us for name, us in encoded.items() if name.startswith(form)), None)
                  for form in ("one chunk", "ISO")]
    cells = [str(r["m"]), f'{r["layers"]} × {r["k"]}, MLP {r["n"]}', r["dtype"], codec_name(r), ms(serial), ms(iso),
             *("–" if us is None else ms(us) for us in with_codec), ratio(serial, iso)]
    best = min((us for us in with_codec if us is not None), default=None)
    return cells + ["–" if best is None else ratio(serial, best), r["config"]["overlapped"], ratio(serial, chosen),
                    "yes" if is_right(r) else "NO"]


def prefill(folder):
    found = sorted(results(folder), key=lambda r: (r["k"], r["m"], r["layers"], r["codec"] is not None,
                                                   -(r["codec"] or {}).get("bits_per_element", 0)))
    heads = ["tokens", "layers × hidden", "dtype", "codec", "serial", "ISO", "serial, codec", "ISO, codec",
             "ISO over serial", "best with the codec over serial", "chosen", "over serial", "correct"]
    return about(found, folder) + "\n\n" + markdown(heads, [prefill_row(r) for r in found])
