#!/usr/bin/env python3
"""rewrite_serial.py [--check] [DIR]: converts GPU results of `tandem bench` in DIR (bench/results)
to the current format: `serial` is the fastest candidate without overlap, including our own,
`overlapped` the fastest with overlap, `time_us.nccl` is NCCL's serial candidate, and every
candidate has its form. All of it follows from the medians in a file, so a second run changes
nothing. `efficiency_95` needs the rounds, which are not stored, and becomes null if its candidates
have changed. --check writes nothing, and fails if a file would change."""
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Serial candidates of src/overlap/*/cuda/. Not needed for results with the form of each
# candidate.
SERIAL = {"serial_nccl", "serial_copy", "serial_kernels", "one_shot", "two_shot", "product"}
FORMER = {"plain"}
NCCL = {"serial_nccl", "nccl"}


def candidates(result):
    """Times by name; empty for results that are not from GPUs."""
    config = result.get("config", {})
    return config.get("candidates_us") or config.get("ways_us") or {}


def fastest(times, form):
    """A serial candidate with encoded rows is no baseline."""
    of_form = [name for name, t in times.items() if t["form"] == form and not (form == "serial" and t.get("encoded"))]
    return min(of_form, key=lambda name: times[name]["median"], default=None)


def with_nccl(time_us, times):
    """Inserts NCCL's time after `serial`."""
    nccl = next((times[name]["median"] for name in times if name in NCCL), None)
    rest = {key: us for key, us in time_us.items() if key != "nccl"}
    if nccl is None:
        return rest
    rewritten = {}
    for key, us in rest.items():
        rewritten[key] = us
        if key == "serial":
            rewritten["nccl"] = nccl
    return rewritten


def rewrite(r):
    times = candidates(r)
    if not times:
        return
    r["time_us"] = with_nccl(r["time_us"], times)
    if r["time_us"].get("gemm", 0) == 0 or r["ranks"] == 1:
        return  # a collective other than the library's, attention, or only a GEMM
    for name, t in times.items():
        t.setdefault("form", "serial" if name in SERIAL | FORMER else "overlapped")
    config, us = r["config"], r["time_us"]
    before = config["serial"], config["overlapped"]
    serial = fastest(times, "serial")
    overlapped = fastest(times, "overlapped") or serial
    if r["op"] == "prefill":  # the choice among all candidates
        overlapped = min(times, key=lambda name: times[name]["median"])
    if (serial, overlapped) == before:
        return
    config["serial"], config["overlapped"], r["baseline"] = serial, overlapped, serial
    for form, name in (("serial", serial), ("overlapped", overlapped)):
        us[form] = times[name]["median"]
        r["spread_us"][form] = [times[name]["min"], times[name]["max"]]
        r["ect_us"][form] = round(us[form] - us["gemm"], 2)
    r["strategy"] = "overlapped" if us["overlapped"] <= us["serial"] else "serial"
    exposed = r["ect_us"]["serial"]
    known = r["efficiency"] is not None and exposed > 0
    r["efficiency"] = round(1 - r["ect_us"]["overlapped"] / exposed, 4) if known else None
    if "efficiency_95" in r:
        r["efficiency_95"] = None
    for key in ("host", "host_burst"):
        if f"{key}_us" in r:
            r[f"{key}_us"] = times[overlapped][key]


def rewritten(text):
    content = json.loads(text)
    for result in content if isinstance(content, list) else [content]:
        if "op" in result:
            rewrite(result)
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main():
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    folder = pathlib.Path(arguments[0]) if arguments else ROOT / "bench" / "results"
    changed = []
    for file in sorted(folder.rglob("*.json")):
        text = file.read_text()
        if '"config"' in text and rewritten(text) != text:
            changed.append(file)
            if "--check" not in sys.argv:
                file.write_text(rewritten(text))
    for file in changed:
        print(f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}: "
              + ("is not in the form of now" if "--check" in sys.argv else "rewritten"))
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
