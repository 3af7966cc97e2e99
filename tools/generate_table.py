"""The table of inference on GPUs (docs/results/generation.md), from results of tandem bench generate and bench/peers/torch_generate.py."""
import json

from bench_results import ROOT, markdown

FILES = (("H100", "h100x1"), ("H200", "h200x1"), ("H200", "h200x2"))


def peer_of(run, peers, is_prefill):
    """Time of PyTorch's run of the same sizes, in us: the row's own, or one of a list."""
    own = run.get("baseline", {}).get("time_us", {}).get("first_token" if is_prefill else "next_token")
    if own:
        return own
    for peer in peers:
        same = all(run[key] == peer[key] for key in ("model", "layers", "batch")) and run["tp"] == peer["ranks"]
        context = run["prompt"] + run["new"] // 2
        if same and (peer["prompt"] == run["prompt"] if is_prefill else not peer["prompt"] and peer["context"] == context):
            return peer["us"]
    return None


def table(_):
    rows = []
    for gpu, folder in FILES:
        results = json.loads((ROOT / "bench/results" / folder / "generate.json").read_text())
        for run in results["runs"]:
            has_own_gpus = run["hardware"].startswith(f'{run["tp"]}x')
            if run["model"] == "llama-1b" or not has_own_gpus:  # checks, not figures
                continue
            first, step = run["time_us"]["first_token"], run["time_us"]["token_step"]
            prefill = peer_of(run, results.get("peers", []), True) if run["batch"] == 1 else None
            decode = peer_of(run, results.get("peers", []), False)

            def ms(us):
                return f"{us / 1000:.2f}" if us else "–"
            rows.append([f'{run["tp"]} {gpu}', f'{run["model"]}, {run["layers"]} layers', run["weights"], str(run["batch"]), str(run["prompt"]),
                         ms(first) if run["batch"] == 1 else "–", ms(prefill), ms(step), ms(decode),
                         f'{run["step_bytes"] / step / 1e6 / run["tp"]:.2f}'])
    return markdown(["GPUs", "model", "weights", "texts", "prompt", "first token, ms", "PyTorch", "token step, ms", "PyTorch",
                     "TB/s a GPU"], rows)
