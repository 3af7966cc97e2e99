"""Table of the rates of checkpoints (docs/results/training.md), from what `tandem bench checkpoint --json` wrote."""
import json

from bench_results import ROOT, markdown


def table(folder):
    runs = [json.loads(file.read_text()) for file in sorted((ROOT / folder).glob("*.json"))]

    def row(r):
        us, rate = r["time_us"], r["gb_per_s_per_rank"]
        ranks = f'{r["ranks"]} {"GPU" if r["transport"] == "nccl" else "CPU"} rank{"s" if r["ranks"] > 1 else ""}, {r["hardware"]}'
        return [ranks, f'{r["bytes"] / 1e9:.1f}', f'{us["blocked"] / 1e3:,.1f}', f'{us["copied"] / 1e3:,.0f}', f'{us["saved"] / 1e6:.2f}',
                f'{rate["saved"]:.2f}', f'{rate["disk_write"]:.2f}', f'{100 * rate["saved"] / rate["disk_write"]:.0f} %',
                f'{rate["verified"]:.2f}', f'{rate["loaded"]:.2f}', f'{rate["disk_read"]:.2f}']
    return markdown(["ranks", "GB", "ms that a step waits", "ms until an update may follow", "s until verified on disk", "GB/s a rank", "raw writes and fsync", "of them",
                     "verified before a load", "loaded", "raw reads"], [row(r) for r in runs])
