"""Values that the tables and pictures derive from results of `tandem bench`: candidates, Tandem's
choice among them, E, rates. The results themselves mark serial candidates (`form`)."""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# Order in which the tuner tries candidates (algorithms() of the operators), and the fraction of the first
# one's time by which it must be beaten (src/tune/margin.h).
ORDER = ("serial_nccl", "serial_copy", "chunked", "one_shot", "two_shot", "serial_kernels", "fused",
         "fused_cutlass")
OVER_FIRST = 0.02


# Former names in results, within the names of candidates and variants.
FORMER = (("own tiles", "local tiles"), (" pieces", " chunks"), ("sorted beside", "overlapped_sort"),
          ("sort beside", "overlap the sort"), ("1 part", "1 column group"), (" parts", " column groups"),
          (" plain, back", " uncompressed, back"), ("back plain", "back uncompressed"))
RENAMED = "2026-11-27"  # the first day whose results have no former names


def current_name(r, name):
    if name == "plain":
        return "serial_kernels" if r["op"] in ("ag_gemm", "gemm_rs") else "uncompressed"
    if r["op"] == "gemm_rs" and name in ("adding", "fused"):
        return "fused" if name == "adding" else "fused_cutlass"
    for before, now in FORMER:
        name = name.replace(before, now)
    return name


def current(r):
    """A result with the current names of candidates."""
    config = r.get("config") or {}
    times = config.get("candidates_us") or config.get("ways_us") or {}
    former = "ways_us" in config or {"plain", "adding"} & set(times) or r.get("date", RENAMED) < RENAMED
    if "op" not in r or not former or "fused_cutlass" in times:
        return r
    name = lambda text: current_name(r, text) if isinstance(text, str) else text
    config = {key: {name(one): us for one, us in value.items()} if value is times else
              name(value) if key in ("serial", "overlapped", "baseline") else value for key, value in config.items()}
    compared = {"uncompressed" if key == "plain" else key: one | {"name": name(one["name"])} if "name" in one else one
                for key, one in r.get("compared", {}).items()}
    over = {"uncompressed" if key == "plain" else key: share for key, share in r.get("over_gemm", {}).items()}
    changed = {"config": config, "compared": compared, "over_gemm": over, "detail": name(r.get("detail"))}
    return r | {key: value for key, value in changed.items() if key in r}


def load(file):
    file = ROOT / file
    content = json.loads(file.read_text()) if file.exists() else []
    return [current(r) if isinstance(r, dict) else r for r in (content if isinstance(content, list) else [content])]


def key(r):
    """Key of a case, in our and in the peers' results."""
    return r["m"] * r["n"] if r["op"] in COLLECTIVES else (r["m"], r["n"], r["k"])


def candidates(r):
    return r["config"].get("candidates_us") or r["config"]["ways_us"]


def median(r, name):
    return candidates(r)[name]["median"]


def chosen(r):
    """Choice of Strategy::automatic for these times: the rule of fastest() in src/tune/tuner.cc. Collectives
    choose by size, which is the fastest in every case of the tables."""
    us = {name: t["median"] for name, t in candidates(r).items()}
    if r["op"] in COLLECTIVES:
        return min(us, key=us.get)
    first, *others = sorted(us, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    best = first
    for name in others:
        if us[name] < us[best] * (1 - (OVER_FIRST if best == first else 0)):
            best = name
    return best


def efficiency_of(r, us):
    """E of a call that takes `us`, relative to the fastest serial candidate; None if that exposes
    nothing."""
    t = r["time_us"]
    exposed = t["serial"] - t["gemm"]
    return None if r["efficiency"] is None or exposed <= 0 else 1 - (us - t["gemm"]) / exposed


def hidden(r):
    """E of the chosen candidate. 0 for a serial candidate, which hides nothing."""
    name = chosen(r)
    if candidates(r)[name]["form"] == "serial":
        return None if r["efficiency"] is None else 0.0
    return efficiency_of(r, median(r, name))


def capped_mean(efficiencies):
    """Mean with each value capped at 100 %."""
    return sum(min(1, e) for e in efficiencies) / len(efficiencies)


def tflops(r, us):
    """TFLOP/s per rank."""
    return 2 * r["m"] * r["n"] * r["k"] / r["ranks"] / us / 1e6


def matrix_bytes(r):
    return r["m"] * r["n"] * {"f32": 4}.get(r["dtype"], 2)


def bandwidth(r, us):
    """algbw and busbw in GB/s, as defined by nccl-tests."""
    algbw = matrix_bytes(r) / us / 1e3
    others = (r["ranks"] - 1) / r["ranks"]
    factor = {"all_reduce": 2 * others, "broadcast": 1}.get(r["op"], others)
    return algbw, algbw * factor


def is_right(r):
    worst = r["error"].get("max_of_bound", r["error"]["max_rel"])  # null: infinite
    return r["bitwise_equal_runs"] and worst is not None and worst <= r["error"]["bound"]


def all_right(flags):
    """Text above a table, so that its rows need no column for it."""
    return "all correct" if all(flags) else "NOT ALL CORRECT"


def size_name(value):
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value} B"


def shape_name(r):
    return f'{r["m"]}×{r["n"]}×{r["k"]}'


def percent(share):
    return "–" if share is None else f"{share * 100:.0f} %"


def span(values, form="{:.2f}", unit=""):
    """Range of some values; a single value if they print alike."""
    low, high = form.format(min(values)), form.format(max(values))
    return f"{low}{unit}" if low == high else f"{low}–{high}{unit}"


def only(found, key, folder):
    """Value of `key` common to all results of a folder; a table of several would pass one off as
    another."""
    values = sorted({str(r[key]) for r in found})
    if len(values) != 1:
        sys.exit(f"{folder}: results of several {key}: {', '.join(values)}: expected one a folder")
    return values[0]


def about(found, folder):
    """Line above a table of CPU results: their common fields, and the ranges of the others."""
    repeats, dates = span([r["repeats"] for r in found], "{:d}"), span([r["date"][:10] for r in found], "{}")
    links = " and ".join(dict.fromkeys(r["link"] for r in found))
    commits = ", ".join(sorted({r["commit"] for r in found}))
    dtypes = " and ".join(sorted({r["dtype"] for r in found}, reverse=True))
    return (f'{only(found, "hardware", folder)}, {only(found, "ranks", folder)} ranks '
            f'({only(found, "transport", folder)}), link {links}, {dtypes}, 1 thread a rank; commit {commits}, '
            f"{dates}; ms, medians of {repeats}, slowest rank.")


def operator_name(r):
    """Operator with its modifiers: a backward pass, a wire format."""
    return r["op"] + (", forward and backward" if r.get("backward") else "") + \
        (f' as `{r["codec"]["text"]}`' if r.get("codec") else "")


def wire_us(r):
    """Wire time of the bytes that were sent: the measured one is that of the uncompressed bytes."""
    return r["time_us"]["wire"] * (r["wire_bytes"] / r["bytes"] if r.get("codec") and r["bytes"] else 1)


def peers_of(file):
    """Results by peer name, from the files peers/[…-]OP.json next to OP.json, each one's by
    case."""
    file, by_name = ROOT / file, {}
    for other in sorted((file.parent / "peers").glob(f"*{file.name}"), key=lambda f: (len(f.name), f.name)):
        if other.name == file.name or other.name.endswith("-" + file.name):
            for r in load(other):
                by_name.setdefault(r["peer"], {})[key(r)] = r
    return by_name


def fastest_peer(r):
    """Time and name of a peer's fastest candidate, excluding its GEMM."""
    return min((t, name) for name, t in r["time_us"].items() if name != "gemm")


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads)] + rows
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
