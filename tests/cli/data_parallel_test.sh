#!/usr/bin/env bash
# data_parallel_test.sh TANDEM SOURCE: bench/data_parallel.py on a small job: the rows of its file and of the table made
# from it, and wrong options.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_TUNE=0
python3 -B "$source/bench/data_parallel.py" --tandem "$tandem" --cases emulated-2 --steps 5 --rounds 2 \
  --set model.hidden=48 model.head_dim=16 model.ffn=64 model.layers=2 train.seq=64 --json "$dir/exposed.json"
python3 -B - "$source" "$dir/exposed.json" <<'END_OF_CHECK'
import json
import sys
source, file = sys.argv[1:]
sys.path.insert(0, source + "/tools")
import cpu_table
case, = json.load(open(file))["cases"]
assert [row["name"] for row in case["rows"]] == ["alone", "no link", "no overlap", "overlapped"], case
assert case["sent_bytes"] == 3 * case["parameters"], case
for row in case["rows"]:
    assert row["step_ms_quartiles"][0] <= row["step_ms"] <= row["step_ms_quartiles"][1], row
    assert len(row["losses"]) == 5, row
table = cpu_table.exposed_table(file).split("\n")
assert len(table) == 4 + len(case["rows"]), table
assert table[4].startswith("| 2 | emulated ") and table[4].endswith("| – |"), table
END_OF_CHECK
if python3 -B "$source/bench/data_parallel.py" --steps 4 2>"$dir/error"; then exit 1; fi
grep -q 'expected at least 5 and 1' "$dir/error"
