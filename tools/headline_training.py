"""The README's table for training and inference engineers: every measurement that PyTorch has, too, and
two GPUs beside one."""
import json

from bench_results import ROOT, load as results_of, markdown
from generate_table import FILES, peer_of


def load(file):
    return json.loads((ROOT / "bench/results" / file).read_text())


def row(what, gpus, ms, peer_ms, mfu=None, peer_mfu=None):
    def cell(time, share):
        return f"{time:.1f} ms" + (f", MFU {100 * share:.0f} %" if share else "") if time else "–"
    return [what, gpus, cell(ms, mfu), cell(peer_ms, peer_mfu), f"{peer_ms / ms:.2f}×" if peer_ms else "–"]


def steps():
    one = load("h100x1/train_1b.json")
    peer = one["baseline"]
    what = f'step of {one["parameters"] / 1e9:.2f} B parameters, {one["tokens"]:,} tokens'
    yield row(what, "1 H100", one["step_ms"]["median"], peer["step_ms"], one["mfu"], peer["mfu"])
    alone, *others = load("h100x2/train_1b.json")["results"]
    for run in others:
        longer = run["step_ms"]["median"] / alone["step_ms"]["median"] - 1
        yield row(f'the same, {run["layout"]}, {run["samples"] // alone["samples"]} × the tokens: {100 * longer:+.1f} % over one GPU',
                  "2 H100", run["step_ms"]["median"], None, run["mfu"])


def layers():
    for run in load("h200x1/train_layers.json")["results"]:
        if "baseline" in run:
            peer = run["baseline"]
            yield row(f'{run["layers"]} layers of {run["model"]}, {run["batch"]} × {run["seq"]:,} tokens',
                      "1 H200", run["time_us"]["sustained"] / 1e3, peer["time_us"]["sustained"] / 1e3,
                      run["mfu_sustained"], peer["mfu_sustained"])


def experts():
    """Both passes, from expert ids to gradients; PyTorch's with NCCL."""
    folder = "h200x2/moe"
    peers = {(r["model"], r["tokens"]): r["time_us"]["both"] for r in load(f"{folder}/peers/moe.json")}
    for file in sorted((ROOT / "bench/results" / folder).glob("*-backward.json")):
        for run in results_of(file):
            fastest = min(run["time_us"]["serial"], run["time_us"]["overlapped"])
            yield row(f'experts of {run["model"]}, both passes of {run["tokens"]:,} tokens', "2 H200", fastest / 1e3,
                      peers[run["model"], run["tokens"]] / 1e3)


def tokens():
    for gpu, folder in FILES:
        results = load(f"{folder}/generate.json")
        for run in results["runs"]:
            gpus, sizes = f'{run["tp"]} {gpu}', f'{run["model"]}, {run["layers"]} layers'
            prefill = peer_of(run, results.get("peers", []), True) if run["batch"] == 1 else None
            decode = peer_of(run, results.get("peers", []), False)
            if prefill:
                yield row(f'first token of {run["prompt"]:,}, {sizes}', gpus, run["time_us"]["first_token"] / 1e3, prefill / 1e3)
            if decode:
                yield row(f'next token of {run["batch"]}, {sizes}', gpus, run["time_us"]["token_step"] / 1e3, decode / 1e3)


def table():
    return markdown(["bf16", "on", "Tandem", "PyTorch", "speed-up"], [*steps(), *layers(), *experts(), *tokens()])
