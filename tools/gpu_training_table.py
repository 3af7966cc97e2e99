"""The table of losses on GPUs (docs/training.md), from what tests/gpu/train_test.sh prints."""
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
