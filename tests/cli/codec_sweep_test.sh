#!/usr/bin/env bash
# codec_sweep_test.sh TANDEM SOURCE_DIR: output of `tandem eval --codec-sweep`: every format, exact ones
# without a loss increase, how the model was trained, and a table of the results.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
fail() {
  echo "$1" >&2
  shift
  cat "$@" >&2
  exit 1
}
# Rows of whole blocks, so that the bytes are exactly the format's bits.
"$tandem" train "$source/configs/tiny.toml" --set train.steps=20 --set train.seed=7 \
  --set checkpoint.every=10 --set model.hidden=128 --set model.layers=1 --out out >log 2>&1 || fail 'training failed:' log
head -c 1500 "$source/include/tandem/codec.h" >text
sweep() { # NAME DIR
  "$tandem" eval "$2" --data text --tp 2 --codec-sweep "$1" >"$1.table" 2>log ||
    fail "eval --codec-sweep of $2:" log
}
sweep final out
sweep middle out/checkpoints/step-00000010/
"$tandem" eval out --data text --tp 2 --codec-sweep sums --sweep-sites attention,mlp >sums.table 2>log ||
  fail 'eval --sweep-sites:' log
refused() { # MESSAGE OPTION...
  said=$1
  shift
  "$tandem" eval out --data text --tp 2 "$@" >log 2>&1 && fail "$*: expected a refusal" log
  grep -qF -- "$said" log || fail "$*: expected '$said':" log
}
refused "site 'experts': expected one of attention, mlp, embeddings" --codec-sweep no --sweep-sites mlp,experts
refused '--sweep-sites without --codec-sweep: expected both' --sweep-sites mlp
cp -r out/final alone
sweep alone alone
# Weights of a step without a checkpoint: no other step's record is used for them.
rm -r out/checkpoints/step-00000020 out/final/state.json
sweep gone out
grep -q 'how it was trained is not known' log || fail 'nothing is said of an unknown training:' log

python3 - "$source" <<'END'
import json, sys
sys.path.insert(0, sys.argv[1] + "/tools")
import cpu_table

def check(holds, *what):
    if not holds:
        sys.exit(" ".join(map(str, what)))

lines = [json.loads(line) for line in open("out/metrics.jsonl")]
sums = json.load(open("sums.json"))
check(sums["sites"] == ["attention", "mlp"], sums["sites"])
for row in sums["sweep"]:
    if row["codec"] == "int8":
        check(row["bytes_per_token"] == (2 * 144 + 2 * 512) / 2, row)

for name, steps in ("final", 20), ("middle", 10), ("alone", 20), ("gone", None):
    found = json.load(open(name + ".json"))
    by_codec = {row["codec"]: row for row in found["sweep"]}
    check(len(by_codec) == len(found["sweep"]) >= 30, name, "formats:", *by_codec)
    for codec in "int8 int6 int5 int4 int3 int2 e4m3 e5m2 mxfp8 mxfp6 mxfp4".split():
        groups = [c for c in by_codec if c.split(":")[0] == codec]
        check(len(groups) >= (1 if codec[0] == "m" else 2), name, codec, groups)
        row = by_codec[codec]
        check(row["rise"] != 0, name, row, "was not encoded")
        check(row["bytes_per_token"] < by_codec["none"]["bytes_per_token"] / 3, name, row)
    check(by_codec["none"]["rise"] == 0 and by_codec["lossless"]["rise"] == 0, name, by_codec["lossless"])
    check(by_codec["lossless"]["bytes_per_token"] < by_codec["none"]["bytes_per_token"], name)
    check(found["sites"] == ["attention", "mlp", "embeddings"], found["sites"])
    # One layer: two sums, and a row at each end; a rank of two sends half of a row of 128.
    check(by_codec["int8"]["bytes_per_token"] == 4 * 144 / 2, name, by_codec["int8"])
    check("prove nothing" in found["caveat"], found["caveat"])
    training = found["training"]
    if steps is None:
        check(training is None, name, training)
    else:
        seen = None if name == "alone" else sum(line["tokens"] for line in lines if line["step"] <= steps)
        check((training["seed"], training["steps"], training["bytes_seen"]) == (7, steps, seen), name, training)
        check(training["command"].startswith("tandem train config.toml"), training)
        open(name + ".toml", "w").write(training["config.toml"])
    table = cpu_table.sweep_table(__import__("os").path.abspath(name + ".json"))
    share = by_codec["int4:g32"]["bytes_per_token"] / by_codec["none"]["bytes_per_token"]
    check(f"| `int4:g32` | 4.50 | {share * 100:.0f} % |" in table, table)
    check(any(line.startswith("| `lossless`") and line.endswith("| 0 |") for line in table.split("\n")), table)
    check(("seed 7 for 20 steps" in table) == (name in ("final", "alone")), table)
END
# The job that the record names gives the same weights.
"$tandem" train final.toml --out again >log 2>&1 || fail 'the recorded job is none:' log
cmp out/final/model.safetensors again/final/model.safetensors
