"""Tables of training on GPUs (docs/results/training.md), from what tests/gpu/train_test.sh prints."""
import json

from bench_results import ROOT, markdown


def table(file):
    run = json.loads((ROOT / file).read_text())
    return markdown([f'`gpu-tiny.toml`, {run["steps"]} steps on', "largest difference of a step's loss to f32 on a CPU"],
                    [[name, f"{value:.4f}"] for name, value in run["largest_difference"].items()])


def step(file):
    run = json.loads((ROOT / file).read_text())
    torch = run["baseline"]
    return markdown(["", "ms a step", "tokens/s", "MFU"],
                    [["`tandem train configs/gpu-1b.toml --device gpu`", f'{run["step_ms"]["median"]:.1f}', f'{run["tokens_per_s"]:,.0f}', f'{100 * run["mfu"]:.1f} %'],
                     [f'{torch["name"].replace("torch", "PyTorch").split("+")[0]}, `bench/peers/torch_train.py`', f'{torch["step_ms"]:.1f}', f'{torch["tokens_per_s"]:,.0f}',
                      f'{100 * torch["mfu"]:.1f} %']])


def two_gpus(file):
    run = json.loads((ROOT / file).read_text())
    return markdown([f'`configs/gpu-1b.toml` on {run["hardware"]}', "samples", "ms a step", "longer than the first", "tokens/s", "MFU"],
                    [[r["layout"], str(r["samples"]), f'{r["step_ms"]["median"]:.1f}', f'{100 * (r["step_ms"]["median"] / run["results"][0]["step_ms"]["median"] - 1):+.1f} %', f'{r["tokens_per_s"]:,.0f}', f'{100 * r["mfu"]:.1f} %']
                     for r in run["results"]])


def pipelines(file):
    run = json.loads((ROOT / file).read_text())
    one = run["results"][0]["step_ms"]["median"]
    def row(r):
        median, gpus = r["step_ms"]["median"], r["gpus"]
        return [r["layout"], f"{median:.1f}", f"{one / median:.2f}×", f'{gpus * (1 - r["formula_bubble"]):.2f}×', f'{100 * r["mfu"]:.1f} %',
                f'{r["memory_bytes"] / 1e9:.1f}', f'{r["stage_bytes"] / 1e6:,.0f}' if r["stage_bytes"] else ""]
    return markdown([f'`configs/gpu-1b.toml`, 16 samples, on {run["hardware"]}', "ms a step", "speed-up", "by the bubble of equal stages", "MFU", "GB a GPU", "MB between stages"],
                    [row(r) for r in run["results"]])


def layers(file):
    def times(r):
        return [f'{r["time_us"][kind] / 1e3:.1f} ms, {100 * mfu:.1f} %' for kind, mfu in (("step", r["mfu"]), ("sustained", r["mfu_sustained"]))]
    rows = []
    for r in json.loads((ROOT / file).read_text())["results"]:
        name = ["tandem", "deterministic" if r["deterministic"] else "not deterministic"]
        name += ["gradients in bf16"] * (r.get("gradient_dtype") == "bf16") + [r["dtype"]] * (r["dtype"] != "bf16")
        rows.append([f'{r["batch"]} × {r["seq"]:,}', r["machine"], ", ".join(name), *times(r)])
        if "baseline" in r:
            rows.append([f'{r["batch"]} × {r["seq"]:,}', r["machine"], r["baseline"]["name"].replace("torch", "PyTorch").split("+")[0], *times(r["baseline"])])
    rows.sort(key=lambda row: int(row[0].split("×")[1].replace(",", "")))
    return markdown(["tokens", "machine", "", "after an idle gap", "sustained"], rows)


def windows(file):
    run = json.loads((ROOT / file).read_text())
    r = run["results"][0]
    return markdown([f'{r["layers"]} layers of {r["model"]}, {r["batch"]} × {r["seq"]:,} tokens, {run["hardware"]}', "after an idle gap, ms", "sustained, ms", "MFU"],
                    [[f'window {r["window"]:,}' if r["window"] else "no window", f'{r["time_us"]["step"] / 1e3:.1f}', f'{r["time_us"]["sustained"] / 1e3:.1f}', f'{100 * r["mfu"]:.1f} %']
                     for r in run["results"]])


def documents(file):
    run = json.loads((ROOT / file).read_text())
    r = run["results"][0]
    name = lambda r: (f'documents, mean {r["documents"]:,}' if r["documents"] else "whole sequences") + (
        f', by {r["attention"]}, in a call at {r["commit"]}' if "attention" in r else "")
    return markdown([f'{r["layers"]} layers of {r["model"]}, {r["batch"]} × {r["seq"]:,} tokens, {run["hardware"]}', "after an idle gap, ms", "sustained, ms", "MFU", "GB in use"],
                    [[name(r), f'{r["time_us"]["step"] / 1e3:.1f}', f'{r["time_us"]["sustained"] / 1e3:.1f}', f'{100 * r["mfu"]:.1f} %', f'{r["memory_bytes"] / 1e9:.1f}']
                     for r in run["results"]])


def recompute(file):
    run = json.loads((ROOT / file).read_text())
    r = run["results"][0]
    return markdown([f'{r["layers"]} layers of {r["model"]}, {r["batch"]} × {r["seq"]:,} tokens, {run["hardware"]}', "after an idle gap, ms", "sustained, ms", "MFU", "activations, GB"],
                    [[f'`{r.get("recompute", "none")}`', f'{r["time_us"]["step"] / 1e3:.1f}', f'{r["time_us"]["sustained"] / 1e3:.1f}', f'{100 * r["mfu"]:.1f} %', f'{r["activation_bytes"] / 1e9:.2f}']
                     for r in run["results"]])


def snapshots(file):
    run = json.loads((ROOT / file).read_text())
    plain = {r["samples"]: r["step_ms"]["median"] for r in run["results"] if not r["every"]}
    return markdown([f'`configs/gpu-1b.toml` on {run["hardware"]}, {run["snapshot_bytes"] / 1e9:.1f} GB a snapshot', "ms of a step", "of the step after a snapshot", "longer"],
                    [[f'{r["samples"]} samples, `checkpoint.every = {r["every"]}`', f'{plain[r["samples"]]:.1f}', f'{r["step_ms"]["median"]:.1f}', f'{r["step_ms"]["median"] - plain[r["samples"]]:+.1f}']
                     for r in run["results"] if r["every"]])


def layers_tp(file):
    r = json.loads((ROOT / file).read_text())
    us = r["time_us"]
    return markdown([f'{r["layers"]} layers of {r["model"]}, {r["batch"]} × {r["seq"]:,} tokens, tp {r["tp"]}', "ms", "MFU"],
                    [[name, f"{us[key] / 1e3:.2f}", f'{100 * r["mfu"] * us["step"] / us[key]:.1f} %']
                     for name, key in (("overlapped", "step"), ("overlapped, sustained", "sustained"), ("serial", "serial"), ("a rank's shards alone", "alone"))]
                    + [["*E*", f'{100 * r["efficiency"]:.1f} %', ""]])
