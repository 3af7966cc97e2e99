#!/usr/bin/env python3
"""Markdown tables of notice and recovery, for tools/tables.py. Run with a program, as in recovery_table.py build/bin/tandem
"two idle processors", it measures again, for about an hour, and writes bench/results/recovery.json."""
import datetime
import json
import subprocess
import sys
import tempfile

from bench_results import ROOT, markdown

RESULTS = "bench/results/recovery.json"
RUNS = [("fault_campaign.py", ["faults=1000", "seed=4000"]), ("launch_recovery_test.py", ["kills=60"]),
        ("launch_recovery_test.py", ["stops=30"]), ("launch_recovery_test.py", ["launchers=50"])]


def measure(program, machine):
    results = []
    for script, arguments in RUNS:
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run([sys.executable, ROOT / "tests/engine/launch" / script, program, *arguments, f"json={file.name}"], check=True)
            results.append({"script": script, "arguments": " ".join(arguments), "machine": machine,
                            "date": str(datetime.date.today()), **json.load(file)})
    (ROOT / RESULTS).write_text(json.dumps({"runs": results}, indent=1) + "\n")


def runs_of(file, script):
    return [run for run in json.loads((ROOT / file).read_text())["runs"] if run["script"] == script]


def lost_steps(lost):
    more = f', more than one in {lost["more_than_one"]} of {lost["recoveries"]}' if lost.get("more_than_one") else ""
    return f'{lost["mean"]:.1f} (mean), {lost["max"]} (max){more}'


def campaign(file):
    [run] = runs_of(file, "fault_campaign.py")
    rows = [[f"{name} ranks", f'{kind["count"]}, noticed within {kind["p50_ms"]:.3g} ms (median), {kind["p99_ms"]:.3g} ms (99 %)']
            for name, kind in (("killed", run["kill"]), ("stopped", run["hang"]))]
    losses = run["kill"]["count"] + run["hang"]["count"]
    rows.append(["right rank and cause named; false alarms", f'{run["right"]} of {losses}; {run["false_alarms"]}'])
    recovered = run["recovered"]
    rows.append(["recoveries", f'{recovered["count"]}, within {recovered["p50_ms"]:.3g} ms (median), {recovered["p95_ms"]:.3g} ms (95 %)'])
    rows += [[f'finished steps lost {lost["setting"]}', lost_steps(lost)] for lost in run["steps_lost"]]
    return markdown([f'`{run["arguments"]}`, {run["machine"]}', ""], rows)


def recoveries(file):
    runs = runs_of(file, "launch_recovery_test.py")
    rows = [[f'`{run["arguments"]}`: {name}', *(f'{times[key]:.3g}' for key in ("median_ms", "p95_ms", "max_ms"))]
            for run in runs for name, times in run["times"].items()]
    return markdown([f'four ranks, one host, snapshots or checkpoints in each step, {runs[0]["machine"]}; ms', "median", "95 %", "max"], rows)


if __name__ == "__main__":
    measure(*sys.argv[1:])
