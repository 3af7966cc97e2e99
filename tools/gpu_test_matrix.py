#!/usr/bin/env python3
"""gpu_test_matrix.py FILE --hardware NAME --commit HASH --date DATE LOG...: collects the outcomes
in logs of gpu_test and gpu_comm_test (their standard output) into FILE, a JSON under bench/results.
A suite at a number of ranks replaces its previous entry in FILE; a suite that a log has only in
part is stored as such.

As a module: the table of docs/results/gpu-tests.md, for tools/tables.py."""
import argparse
import collections
import json
import pathlib
import re

from bench_results import ROOT, markdown

LINE = re.compile(r"\[ +(OK|FAILED|SKIPPED|RUN) +\] (\S+)(?:,.*)? ?(?:\(\d+ ms\))?$")


# Suites under their former names in results.
RENAMED = {"Adding": "FusedGemmRs", "LostParts": "LostShardCollectives", "MoeLine": "MoeLinkPacing",
           "MoeLineTimes": "MoeLinkTimes", "Parts": "ShardCollectives"}


def stored(path):
    """Rows of FILE by suite and number of ranks."""
    rows = {}
    for r in json.loads(path.read_text()):
        suite = RENAMED.get(r["suite"], r["suite"])
        failed = [name.replace(f'{r["suite"]}.', f"{suite}.") for name in r["failed"]]
        rows[suite, r["ranks"]] = r | {"suite": suite, "failed": failed}
    return rows


def suite_of(name):
    """(suite, ranks) from a test's full name: Gpu/Operators.AnyShape/gpus2,
    Ranks/Collectives.AllReduce/3."""
    suite = re.search(r"(?:^|/)(\w+)\.", name)[1]
    ranks = re.search(r"/(?:gpus)?(\d+)$", name)
    return suite, int(ranks[1]) if ranks else 1


def read(text):
    """{(suite, ranks): {test: outcome}}; a test that started and did not end is "cut off"."""
    found = collections.defaultdict(dict)
    for line in text.splitlines():
        if match := LINE.match(line.strip()):
            outcome, name = match[1], match[2].rstrip(",")
            if outcome == "RUN" or name in found[suite_of(name)]:
                found[suite_of(name)][name] = "cut off" if outcome == "RUN" else outcome
    return found


def add(file, logs, hardware, commit, date):
    path = pathlib.Path(file)
    rows = stored(path) if path.exists() else {}
    fresh = collections.defaultdict(dict)
    for log in logs:
        for key, tests in read(pathlib.Path(log).read_text(errors="replace")).items():
            fresh[key].update(tests)
    for (suite, ranks), tests in fresh.items():
        count = collections.Counter(tests.values())
        rows[suite, ranks] = {
            "suite": suite, "ranks": ranks, "hardware": hardware, "commit": commit, "date": date,
            "passed": count["OK"], "skipped": count["SKIPPED"],
            "failed": sorted(name for name, outcome in tests.items() if outcome in ("FAILED", "cut off"))}
    path.write_text("[\n" + ",\n".join(json.dumps(rows[key]) for key in sorted(rows)) + "\n]\n")


def cell(row, common):
    """Passed tests of a suite; its commit unless that is `common`."""
    if row is None:
        return ""
    ran = row["passed"] + len(row["failed"])
    text = f'**{row["passed"]} of {ran}**' if row["failed"] else str(ran) if ran else "skipped"
    commit = row["commit"][:7]
    return text if commit == common else f"{text} ({commit})"


def table(file):
    rows = stored(ROOT / file)
    worlds = sorted({ranks for _, ranks in rows})
    suites = sorted({suite for suite, _ in rows})
    hardware = ", ".join(sorted({r["hardware"] for r in rows.values()}))
    (common, _), = collections.Counter(r["commit"][:7] for r in rows.values()).most_common(1)
    failed = [f"- `{name}`" for r in rows.values() for name in r["failed"]]
    return (f"{hardware}; tests passed at commit {common}, or at the one in parentheses. Bold: some failed or were cut off.\n\n"
            + markdown(["suite", *(f"{n} rank" + "s" * (n > 1) for n in worlds)],
                       [[f"`{suite}`", *(cell(rows.get((suite, n)), common) for n in worlds)] for suite in suites])
            + ("\n\nFailed or cut off:\n\n" + "\n".join(failed) if failed else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    for name in ("hardware", "commit", "date"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("logs", nargs="+")
    a = parser.parse_args()
    add(a.file, a.logs, a.hardware, a.commit, a.date)


if __name__ == "__main__":
    main()
