#!/usr/bin/env python3
"""Markdown table of splits on which `tandem plan --fit` was judged, for tools/tables.py. Run with a program, as in
planner_table.py build/bin/tandem, it judges again and writes bench/results/planner.json."""
import csv
import datetime
import json
import shlex
import subprocess
import sys

from bench_results import ROOT, markdown

RUNS, MEGASCALE = "bench/published/runs.csv", "bench/published/megascale.csv"
RESULTS = "bench/results/planner.json"


def unseen_models(conditions):
    return ["--fit", RUNS, "--leave-out", "model", "--where", conditions]


SPLITS = [
    ("unseen models, H100, FSDP (Mosaic MPT)", unseen_models("group=mosaic-mpt,gpu=H100,precision=bf16")),
    ("unseen models, A100, FSDP (Mosaic MPT)", unseen_models("group=mosaic-mpt,gpu=A100")),
    ("unseen models, H100, bf16 (NVIDIA recipes, dense)",
     unseen_models("group=nvidia-recipes-h100,precision=bf16,model!=Grok")),
    ("unseen models, H100, fp8 (NVIDIA recipes, dense)",
     unseen_models("group=nvidia-recipes-h100,precision=fp8,model!=Grok")),
    ("unseen models, B200 (SimuMax's runs of Megatron, Llama)", unseen_models("group=simumax,model=Llama")),
    ("unseen models, H100, fp8 (Megatron-Bridge, Llama)", unseen_models("group=megatron-bridge,model=Llama")),
    ("unseen models, H100, fp8 (NeMo 24.07)", unseen_models("group=nemo-24.07")),
    ("unseen models, H100, up to 6,144 GPUs (Megatron-Core, weak scaling)", unseen_models("group=megatron-h100-weak")),
    ("unseen MoE model (Grok-1)", unseen_models("group=nvidia-recipes-h100,model=Grok")),
    ("unseen MoE models (Megatron-Bridge)", unseen_models("group=megatron-bridge,model!=Llama")),
    ("unseen MoE model (Megatron-Core's Qwen3-235B, five layouts)", unseen_models("group=megatron-moe-zoo")),
    ("unseen models, H100 of 500 W, eager and compiled (torchtitan)", unseen_models("group=torchtitan-h100")),
    ("unseen models with context parallelism, 8,192 to 131,072 tokens", unseen_models("cp>1")),
    ("unseen models with cp 4 and 8, 32,768 and 131,072 tokens", unseen_models("cp>2")),
    ("175B on 3,072-12,288 GPUs from at most 1,024 (MegaScale's Table 2)",
     ["--fit", MEGASCALE, "--fit-where", "model=GPT-175B,gpus<=1024", "--where", "model=GPT-175B,gpus>1024"]),
    ("530B from 175B (MegaScale)", ["--fit", MEGASCALE, "--fit-where", "model=GPT-175B", "--where", "model=GPT-530B"]),
    ("530B from 175B on at most 1,024 GPUs (MegaScale)",
     ["--fit", MEGASCALE, "--fit-where", "model=GPT-175B,gpus<=1024", "--where", "model=GPT-530B"]),
]
KEYS = ("mape", "worst", "constant_flops_mape", "constant_flops_worst", "line_mape", "line_worst", "line_rows",
        "memory_mape", "memory_worst")


# Runs whose errors the page explains: splits, and what their rows of runs.csv or megascale.csv hold.
BRIDGE_MOE, GROK, ZOO = (unseen_models(where) for where in (
    "group=megatron-bridge,model!=Llama", "group=nvidia-recipes-h100,model=Grok", "group=megatron-moe-zoo"))
LARGER = ["--fit", MEGASCALE, "--fit-where", "model=GPT-175B", "--where", "model=GPT-530B"]
EXPLAINED = [
    ("Megatron-Core's weak scaling, 32B on 384 GPUs", [unseen_models("group=megatron-h100-weak")], {"model": "GPT-32B"}),
    ("MoE models of three sources", [GROK, BRIDGE_MOE, ZOO], {}),
    ("Qwen3-30B in Megatron-Bridge 25.11", [BRIDGE_MOE], {"model": "Qwen3_30B", "software": "25.11"}),
    ("Qwen3-235B in Megatron-Bridge 25.09", [BRIDGE_MOE], {"model": "Qwen3_235B", "software": "25.09"}),
    ("530B by MegaScale, from 175B", [LARGER], {"software": "MegaScale"}),
    ("530B by Megatron-LM, from 175B", [LARGER], {"software": "Megatron-LM"}),
]


def ask(program, arguments):
    return json.loads(subprocess.run([program, "plan", *arguments, "--json", "-"], check=True, capture_output=True, text=True).stdout)


def explain(program):
    """Signed errors of the runs in EXPLAINED."""
    published = {row["id"]: row for file in (RUNS, MEGASCALE) for row in csv.DictReader((ROOT / file).open())}
    explained = []
    for name, splits, same in EXPLAINED:
        errors = [row["error_percent"] for arguments in splits for row in ask(program, arguments)["rows"]
                  if row["step_s"] is not None and all(value in published[row["id"]][key] for key, value in same.items())]
        if not errors:
            raise ValueError(f"{name}: no run")
        explained.append({"runs": name, "errors_percent": errors})
    return explained


def judge(program, arguments):
    found = ask(program, arguments)
    rows = [r for r in found["rows"] if r["step_s"] is not None]
    return {"rows": len(rows), **{key: found[key] for key in KEYS},
            "effective_parameters": max(fit["effective_parameters"] for fit in found["fits"].values())}


def measure(program):
    results = [{"split": name, "command": shlex.join(["tandem", "plan", *arguments]), **judge(program, arguments)}
               for name, arguments in SPLITS]
    (ROOT / RESULTS).write_text(json.dumps({"date": str(datetime.date.today()), "splits": results, "explained": explain(program)}, indent=1) + "\n")


def percent(mean, worst):
    return "" if mean is None else f"{mean:.1f} ({worst:.1f})"


def own_runs(file):
    """Runs of Tandem itself on CPU ranks, as the self-check, the search and the doctor judged them."""
    runs = json.loads((ROOT / file).read_text())
    errors = sorted(100 * abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in runs["predicted"]["layouts"])
    pick, slow = runs["pick"], runs["slow_ranks"]
    mean, median = sum(errors) / len(errors), (errors[len(errors) // 2 - 1] + errors[len(errors) // 2]) / 2
    return markdown(["what", "result", "command"], [
        [f"predicted step times of {len(errors)} generated layouts on 2 ranks",
         f"mean error {mean:.1f} %, median {median:.1f} %, worst {errors[-1]:.1f} %", f'`{runs["predicted"]["command"]}`'],
        [f'the picked layout beside all {len(pick["layouts"])} of a grid, 2 ranks',
         f'{pick["loss_percent"]:.1f} % longer than the best', f'`{pick["command"]}`'],
        [f'{slow["trials"]} runs of 2 ranks, {slow["slow"]} with one slowed by {slow["percent"]} %',
         f'{slow["named"]} named with the phase, {slow["alarms"]} of {slow["even"]} others with a false alarm',
         f'`{slow["command"]}`']])


def table(file):
    splits = json.loads((ROOT / file).read_text())["splits"]
    rows = [[s["split"], str(s["rows"]), f'**{percent(s["mape"], s["worst"])}**',
             percent(s["constant_flops_mape"], s["constant_flops_worst"]),
             percent(s["line_mape"], s["line_worst"]) if s["line_rows"] == s["rows"] else "",
             f'{s["effective_parameters"]:.1f}'] for s in splits]
    commands = "\n".join(s["command"] for s in splits)
    return (markdown(["split", "runs", "planner, %", "constant FLOP/s, %", "line, %", "parameters"], rows)
            + f"\n\nCommands, in the order of the rows:\n\n```\n{commands}\n```")


def explained(file):
    """Runs whose errors the page explains."""
    return markdown(["runs", "number", "mean error, %", "signed, least to largest, %"], [
        [each["runs"], str(len(each["errors_percent"])), f'{sum(map(abs, each["errors_percent"])) / len(each["errors_percent"]):.1f}',
         f'{min(each["errors_percent"]):+.1f} to {max(each["errors_percent"]):+.1f}' if len(each["errors_percent"]) > 1
         else f'{each["errors_percent"][0]:+.1f}'] for each in json.loads((ROOT / file).read_text())["explained"]])


def memory(file):
    split = next(s for s in json.loads((ROOT / file).read_text())["splits"] if s["memory_mape"] is not None)
    return f'Mean error {split["memory_mape"]:.1f} %, worst {split["memory_worst"]:.1f} %, on Llama runs of one host.'


if __name__ == "__main__":
    measure(sys.argv[1])
