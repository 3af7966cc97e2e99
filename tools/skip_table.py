"""Tables of bench/skip.py's files: `varco` of examples/python/graph_sage.py, `training` of `[sync]`; of
bench/slow_link.py's: `slow_link`. (tools/tables.py puts them into the docs.)"""
import json
import statistics

from bench_results import ROOT


def cases(file):
    """(first line, chosen cases): of a grid the point that all seeds ran with."""
    content = json.loads((ROOT / file).read_text())
    most = max(len(case["runs"]) for case in content["cases"])
    chosen = [case for case in content["cases"] if len(case["runs"]) == most]
    about = f'Means of {most} seeds (least … most); {content["hardware"]}, commit {content["commit"]}, {content["date"][:10]}.'
    return about, chosen


def mean_of(case, key):
    return statistics.mean(run[key] for run in case["runs"])


def spread(case, key, digits, scale=1.0):
    values = [scale * run[key] for run in case["runs"]]
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


def varco(file):
    about, chosen = cases(file)
    full = mean_of(chosen[0], "bytes_sent")
    lines = [about, "", "| exchange of boundaries | bytes | accuracy, % |", "| --- | --- | --- |"]
    lines += [f'| {case["name"]} | {mean_of(case, "bytes_sent") / full:.0%} | {spread(case, "accuracy", 1, 100)} |'
              for case in chosen]
    return "\n".join(lines)


def training(file):
    about, chosen = cases(file)
    base = chosen[0]
    lines = [about, "", "| replicas exchange | chosen | held-out loss | against the first row | bytes a rank | fewer |",
             "|" + " --- |" * 6]
    for case in chosen:
        settings = case["settings"]
        point = ", ".join(f'{key.removeprefix("optimizer.").removeprefix("sync.")} {settings[key]:g}'
                          for key in ("optimizer.lr", "sync.outer.lr") if key in settings)
        rise = mean_of(case, "validation_loss") / mean_of(base, "validation_loss") - 1
        sent = mean_of(case, "bytes_sent")
        lines.append(f'| {case["name"]} | {point} | {spread(case, "validation_loss", 3)} | {rise:+.1%} | {sent / 1e6:.2f} MB | '
                     f'{mean_of(base, "bytes_sent") / sent:.0f}× |' if sent else
                     f'| {case["name"]} | {point} | {spread(case, "validation_loss", 3)} | {rise:+.1%} | 0 | – |')
    return "\n".join(lines)


def slow_link(file):
    content = json.loads((ROOT / file).read_text())
    median = lambda case, key: statistics.median(run[key] for run in case["runs"])
    base = content["cases"][0]
    loads = [run["load"] for case in content["cases"] for run in case["runs"]]
    lines = [f'{content["hardware"]} for all four hosts, with other work (load {min(loads):.0f} to {max(loads):.0f}); medians of '
             f'{len(base["runs"])} runs; commit {content["commit"]}, {content["date"][:10]}.', "",
             "| replicas exchange | tokens/s | over every step | waits | kB a step and rank |", "|" + " --- |" * 5]
    for case in content["cases"]:
        lines.append(f'| {case["name"]} | {median(case, "tokens_per_s"):.0f} | '
                     f'{median(case, "tokens_per_s") / median(base, "tokens_per_s"):.1f}× | {median(case, "exposed"):.1%} | '
                     f'{median(case, "bytes_a_step") / 1e3:.1f} |')
    return "\n".join(lines)
