"""The table of serving under load (docs/results/generation.md), from results of tandem bench serve."""
import json

from bench_results import ROOT, markdown

FILES = (("1 H200", "h200x1"),)


def length(value):
    return str(value) if isinstance(value, int) else f'as in chats, median {value["median"]:.0f}'


def table(_):
    rows = []
    for gpus, folder in FILES:
        for run in json.loads((ROOT / "bench/results" / folder / "serve.json").read_text()):
            load = f'{run["concurrency"]} clients' if run["concurrency"] else f'{run["rate"]:.0f} requests/s'
            rows.append([gpus, f'{run["model"]}, {run["layers"]} layers', load, length(run["prompt"]), length(run["new"]),
                         f'{100 * run["prefix_hit"]:.0f} %', f'{run["tokens_per_s"]:,.0f}',
                         *(f'{run[key][p]:.1f}' for key in ("ttft_ms", "itl_ms") for p in ("p50", "p99"))])
    return markdown(["GPUs", "model", "load", "prompt", "text", "prompts cached", "tokens/s", "first token, ms: p50", "p99",
                     "next token, ms: p50", "p99"], rows)
