#!/usr/bin/env bash
# ablation_test.sh TANDEM SOURCE: bench/ablation.py on a small job: the rows of its file and of the table made from
# it, and wrong options.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_TUNE=0
small=(model.hidden=32 model.head_dim=8 model.ffn=64 train.seq=64 model.sliding_window=16)
python3 -B "$source/bench/ablation.py" --tandem "$tandem" --steps 6 --rounds 2 --link 1GB/s,10us \
  --set "${small[@]}" --json "$dir/ablation.json"
python3 -B - "$source" "$dir/ablation.json" <<'END_OF_CHECK'
import json
import sys
source, file = sys.argv[1:]
sys.path.insert(0, source + "/tools")
import cpu_table
content = json.load(open(file))
rows = content["rows"]
assert len(rows) == 8 and rows[0]["speed_up"] == 1, rows
for row in rows:
    assert row["steps"] * row["batch"] == 48 and len(row["losses"]) == row["steps"], row
    assert row["tokens"] == rows[0]["tokens"], row
    assert row["step_ms_quartiles"][0] <= row["step_ms"] <= row["step_ms_quartiles"][1], row
table = cpu_table.ablation_table(file).split("\n")
assert len(table) == 4 + len(rows), table
for row, line in zip(rows, table[4:]):
    assert line.startswith(f'| {row["name"]} | {row["batch"]} | '), line
    assert line.endswith(f'| {row["loss"]:.4f} |'), line
END_OF_CHECK
if python3 -B "$source/bench/ablation.py" --steps 7 2>"$dir/error"; then exit 1; fi
grep -q 'expected a multiple of 2 from 6 on' "$dir/error"
if python3 -B "$source/bench/ablation.py" --tandem "$tandem" --steps 6 --set model.heads=3 2>"$dir/error"; then exit 1; fi
grep -q 'error: .*heads' "$dir/error"
