"""The table of losses on GPUs (docs/training.md), from what tests/gpu/train_test.sh prints."""
import json

from bench_results import ROOT, markdown


def table(file):
    run = json.loads((ROOT / file).read_text())
    return markdown([f'`gpu-tiny.toml`, {run["steps"]} steps on', "largest difference of a step's loss to f32 on a CPU"],
                    [[name, f"{value:.4f}"] for name, value in run["largest_difference"].items()])
