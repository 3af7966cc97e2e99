"""Table of bench/results/cpu/fit: runs of `tandem fit` by bench/fit.py."""
import json
import statistics

from bench_results import ROOT

TITLES = {"convex": "16 clients, κ 100, to 1e-10", "shuffled": "the same, --shuffle", "steep": "16 clients, κ 300, to 1e-10", "many": "128 clients, κ 100, to 1e-6", "gossip": "gossip of 16 clients, κ 30, to 1e-10",
          "sparse": "L1, 8 clients", "walk": "api-bcd, 16 clients, κ 10, to 1e-8 of its target",
          "uneven": "api-bcd, 16 uneven clients on 4 ranks, κ 10, to 1e-3", "link": "4 ranks, 20 Mbit/s, 10 ms, κ 100, to 1e-6"}


def spread(values, show):
    values = sorted(values)
    return show(statistics.median(values)) + (f" ({show(values[0])} to {show(values[-1])})" if values[0] != values[-1] else "")


def row(entry, case):
    runs = entry["runs"]
    name = entry["method"] + "".join(f", {key} {value}" for key, value in entry.get("point", {}).items())
    return [name, spread([run["rounds"] for run in runs], "{:.0f}".format),
            *([] if case == "uneven" else [spread([run["floats_up"] / 1e3 for run in runs], "{:.1f} k".format)]),
            "{:.1f} MB".format(statistics.median(run["bytes_sent"] for run in runs) / 1e6),
            *([] if case == "sparse" else [distance(runs)])]


def distance(runs):
    if any(run["distance"] is None or run["distance"] > 1e3 for run in runs):
        return "diverged"
    return f"{max(run['distance'] for run in runs):.1e}"


def table(folder):
    text = []
    for case, title in TITLES.items():
        path = ROOT / folder / f"{case}.json"
        if not path.exists():
            continue
        extra = {"link": ["seconds"], "sparse": ["nonzeros", "accuracy", "objective over the optimum"], "walk": ["bias"], "uneven": ["rounds to 1 %", "seconds to 1 %"]}.get(case, [])
        head = [title, "rounds", *([] if case == "uneven" else ["floats up"]), "bytes sent", *([] if case == "sparse" else ["distance"]), *extra]
        text += ["", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
        for entry in json.loads(path.read_text())["methods"]:
            cells, run = row(entry, case), entry["runs"][0]
            if case == "link":
                cells.append(f"{run['seconds']:.1f}")
            if case == "walk":
                cells.append(f"{run['bias']:.2g}")
            if case == "uneven":
                ends = [each["to_one_percent"] for each in entry["runs"]]
                cells += [spread([end["rounds"] for end in ends], "{:.0f}".format), spread([end["seconds"] for end in ends], "{:.2f}".format)]
            if case == "sparse":
                is_exact = entry["method"].startswith("exact")
                over = run["objective"] and run["objective"] / run["optimum"] - 1
                cells += [str(run["optimal_nonzeros" if is_exact else "nonzeros"]),
                          f"{100 * run['optimal_accuracy' if is_exact else 'accuracy']:.2f} %" if "accuracy" in run else "–",
                          "–" if is_exact else "diverged" if over is None else f"{100 * over:+.2f} %"]
            text.append("| " + " | ".join(cells) + " |")
    kappa = ROOT / folder / "kappa.json"
    if kappa.exists():
        fits = [f"{entry['method']} as κ^{entry['exponent']:.2f}" for entry in json.loads(kappa.read_text())["methods"]]
        text += ["", f"Rounds to 1e-8 grow over κ 30 to 3,000: {', '.join(fits)}."]
    return "\n".join(text[1:])
