#!/usr/bin/env python3
"""tables.py [--check]: writes every table and picture made from bench/results: the text between
<!-- KIND SOURCE --> and <!-- end --> in README.md and the pages of docs/, and docs/images/gpu*.svg.
With --check nothing is written; it fails if one does not match the results, or if a link of a page
is broken."""
import re
import sys

import attention_table
import checkpoint_table
import codec_runs
import codec_tables
import cpu_table
import drop_in_table
import fit_table
import generate_table
import gpu_chart
import gpu_moe_table
import gpu_table
import gpu_test_matrix
import gpu_training_table
import headline_table
import model_kernels_table
import moe_gpus_table
import moe_table
import pipelines_table
import planner_table
import recovery_table
import serve_table
import skip_table
from bench_results import ROOT

KINDS = {"results": cpu_table.table, "operators": cpu_table.operators_table, "floor": cpu_table.floor_table,
         "python": cpu_table.python_table, "codecs": cpu_table.codec_table, "gpu_codecs": codec_tables.on_gpu,
         "sweep": cpu_table.sweep_table, "sweep_aims": cpu_table.sweep_aims, "network_share": cpu_table.network_share_table, "gradients": cpu_table.gradients_table, "windows": cpu_table.windows_table,
         "context": attention_table.table, "drop_in_calls": drop_in_table.calls, "drop_in_layers": drop_in_table.layers, "drop_in_megatron": drop_in_table.megatron, "fit": fit_table.table, "ablation": cpu_table.ablation_table, "exposed": cpu_table.exposed_table,
         "gpu": lambda folder: gpu_table.tables(ROOT / folder).rstrip("\n"),
         "gpu_summary": lambda folder: gpu_table.summary(ROOT / folder),
         "moe": moe_table.table, "moe_backward": moe_table.backward, "layer": gpu_moe_table.table,
         "layer_backward": gpu_moe_table.backward_table,
         "codec_runs": codec_runs.table, "codec_operators": codec_runs.operators,
         "moe_gpus": moe_gpus_table.table, "emulated_moe": moe_gpus_table.emulated,
         "collectives": codec_tables.collectives, "prefill": codec_tables.prefill,
         "emulated": codec_tables.emulated,
         "gpu_tests": gpu_test_matrix.table, "model_kernels": model_kernels_table.table, "generate": generate_table.table, "serve": serve_table.table,
         "attention": model_kernels_table.attention,
         "gpu_training": gpu_training_table.table, "gpu_step": gpu_training_table.step,
         "gpu_two": gpu_training_table.two_gpus, "gpu_pipelines": gpu_training_table.pipelines, "gpu_windows": gpu_training_table.windows, "gpu_documents": gpu_training_table.documents, "gpu_snapshots": gpu_training_table.snapshots, "gpu_recompute": gpu_training_table.recompute, "gpu_layers": gpu_training_table.layers, "gpu_layers_tp": gpu_training_table.layers_tp,
         "pipelines": pipelines_table.table, "checkpoints": checkpoint_table.table,
         "planner": planner_table.table, "planner_memory": planner_table.memory, "planner_explained": planner_table.explained,
         "own_runs": planner_table.own_runs,
         "varco": skip_table.varco, "learners": skip_table.training, "slow_link": skip_table.slow_link,
         "recovery_campaign": recovery_table.campaign, "recovery": recovery_table.recoveries,
         "measured": lambda name: headline_table.TABLES[name]()}
PAGES = ("README.md", *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*.md"))))
PICTURES = {"docs/images/gpu.svg": ("bench/results/h200x4", ""),
            "docs/images/gpu-world2.svg": ("bench/results/h200x4/more", "-world2")}
MARK = re.compile(r"<!-- (\w+) (\S+) -->.*?<!-- end -->", re.S)


def filled(text):
    return MARK.sub(lambda m: f"<!-- {m[1]} {m[2]} -->\n{KINDS[m[1]](m[2])}\n<!-- end -->", text)


def anchors(text):
    """Anchors as GitHub derives them from headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", text):
            file = (ROOT / page).parent / target if target else ROOT / page
            if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
                yield f"{page}: link to {target}{'#' + anchor if anchor else ''}: leads nowhere"


def main():
    made = {page: filled((ROOT / page).read_text()) for page in PAGES}
    made.update({file: gpu_chart.picture(*source) for file, source in PICTURES.items()})
    stale = [file for file, text in made.items() if (ROOT / file).read_text() != text]
    for file in stale:
        if "--check" in sys.argv:
            print(f"{file}: is not what bench/results says: run tools/tables.py")
        else:
            (ROOT / file).write_text(made[file])
            print(f"{file}: written")
    broken = list(broken_links())
    for line in broken:
        print(line)
    return 1 if broken or (stale and "--check" in sys.argv) else 0


if __name__ == "__main__":
    sys.exit(main())
