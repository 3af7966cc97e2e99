#!/usr/bin/env bash
# plan_question_test.sh TANDEM SOURCE_DIR: `tandem plan MODEL --gpus N --hardware GPU` answers with tokens/s, MFU, days,
# cost and an error bar, for some of the models and GPUs that it names.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
fail() {
  echo "$1" >&2
  shift
  [ $# = 0 ] || cat "$@" >&2
  exit 1
}
refused() { # CODE TEXT ARG...
  code=$1 text=$2
  shift 2
  status=0
  "$tandem" plan "$@" >log 2>&1 || status=$?
  [ "$status" = "$code" ] || fail "plan $*: exit $status, expected $code" log
  grep -qF -- "$text" log || fail "plan $*: expected '$text':" log
  [ "$(wc -l <log)" = 1 ] || fail "plan $*: expected one line:" log
}

# The answer agrees with itself, and the written job has its layout and only keys that differ.
"$tandem" plan llama-3-8b --gpus 64 --hardware h100 --tokens 15e12 --price 2 --out planned.toml --json plan.json >log
for word in 'tokens/s   ' 'MFU        ' 'step       ' 'run        ' 'error bar  ' 'untested   '; do
  [ "$(grep -c "^$word" log)" = 1 ] || fail "plan llama-3-8b: expected one line '$word':" log
done
[ "$(grep -c '^| [0-9]' log)" = 10 ] || fail 'plan llama-3-8b: expected ten layouts:' log
python3 - <<'END'
import json, tomllib
found, job = json.load(open("plan.json")), tomllib.load(open("planned.toml", "rb"))
answer, best = found["answer"], found["best"]
assert answer["step_s"] == best["predicted_s"] and answer["gpus"] == 64 == best["tp"] * best["pp"] * best["dp"]
assert abs(answer["tokens_per_s"] - answer["step_tokens"] / answer["step_s"]) < 1
assert abs(answer["mfu"] - answer["tokens_per_s"] * answer["flops_per_token"] / 64 / answer["peak_flops"]) < 1e-9
# 6 x 7.50e9 weights of GEMMs, and 6 x 32 layers x 4096 columns x 4096 tokens
assert abs(answer["flops_per_token"] / (6 * 7.504e9 + 6 * 32 * 4096 * 4096) - 1) < 1e-3, answer
assert .3 < answer["mfu"] < .65, answer
assert abs(answer["days"] - 15e12 / answer["tokens_per_s"] / 86400) < 1e-6
assert abs(answer["cost"] - answer["days"] * 24 * 64 * 2) < 1e-3
assert .02 < answer["error_share"] < .5 and answer["error_runs"] > 50 and "4 H100" in answer["untested"], answer
assert job["train"]["tokens"] == 15 * 10**12 and job["train"]["seq"] * job["train"]["batch"] == answer["step_tokens"]
assert job["model"]["hidden"] == 4096 and "data" not in job and "optimizer" not in job, job
assert all(job["parallel"].get(key, 1) == best[key] for key in ("tp", "pp", "dp", "zero")), job
END
grep -qxF 'Wrote planned.toml, whose data.paths is to be set' log || fail 'plan --out: expected a note:' log
"$tandem" plan placements planned.toml --set data.paths=. >log || fail 'the planned job:' log
"$tandem" plan llama-3-8b --gpus 64 --hardware h100 --all >log
[ "$(grep -c '^| tp ' log)" = 2 ] && [ "$(grep -c '^| [0-9]' log)" -gt 10 ] || fail 'plan --all: expected two tables:' log

# Twice the price costs twice as much; a faster GPU takes fewer days.
plan() { # NAME ARG...: JSON to NAME.json
  name=$1
  shift
  "$tandem" plan "$@" --tokens 1e12 --json "$name.json" >log || fail "plan $*:" log
}
plan h100 llama-3-8b --gpus 64 --hardware h100 --price 2
plan price llama-3-8b --gpus 64 --hardware H100 --price 4
plan b200 llama-3-8b --gpus 64 --hardware b200 --price 2
plan more llama-3-8b --gpus 128 --hardware h100 --price 2
# A folder of a model, and a job file with the same sizes, on a described GPU.
mkdir model
python3 -c 'import json; json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
  "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
  "intermediate_size": 14336, "max_position_embeddings": 8192, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
  "tie_word_embeddings": False}, open("model/config.json", "w"))'
plan folder model/ --gpus 64 --hardware h100 --price 2
cat >job.toml <<'END'
[model]
vocab = 128256
hidden = 4096
layers = 32
heads = 32
kv_heads = 8
head_dim = 128
ffn = 14336
max_seq = 8192
tie_word_embeddings = false
[train]
batch = 1024
seq = 4096
[optimizer]
lr = 1e-3
END
printf 'gpu = "h100"\ngpus_per_host = 8\n[link]\nhost = 450\nnetwork = 50\n' >h100.toml
plan file job.toml --gpus 64 --hardware h100.toml --price 2 --out again.toml
python3 - <<'END'
import json, tomllib
read = lambda name: json.load(open(name + ".json"))["answer"]
h100, price, b200, more, folder, file = map(read, ("h100", "price", "b200", "more", "folder", "file"))
assert price["days"] == h100["days"] and abs(price["cost"] - 2 * h100["cost"]) < 1e-3
assert b200["days"] < .7 * h100["days"] and "B200" in b200["untested"]
assert .5 < more["days"] / h100["days"] < .6, (more, h100)
assert folder["days"] == h100["days"] == file["days"], (folder, h100, file)
assert (folder["model"], file["model"]) == ("model", "job.toml")
job = tomllib.load(open("again.toml", "rb"))
assert job["optimizer"] == {"lr": 1e-3} and set(job) == {"model", "optimizer", "parallel", "train"}, job
END

# Some of the models and GPUs that errors name have an answer.
refused 2 'lama-3-8b: did you mean llama-3-8b? expected a job file' lama-3-8b --gpus 8 --hardware h100
models=$(sed 's/.*one of //;s/,//g' log)
refused 2 '--hardware h1000: expected a TOML file, or one of a100' llama-3-8b --gpus 8 --hardware h1000
hardware=$(sed 's/.*one of //;s/,//g' log)
[ "$(echo "$models" | wc -w)" -ge 20 ] && [ "$(echo "$hardware" | wc -w)" -ge 10 ] || fail "$models; $hardware"
for model in $(echo "$models" | tr ' ' '\n' | sed -n '8~5p'); do plan answer "$model" --gpus 1024 --hardware h200; done
for gpu in $(echo "$hardware" | tr ' ' '\n' | sed -n '1~4p'); do plan answer llama-3.2-1b --gpus 8 --hardware "$gpu"; done
refused 2 'llama-3-70b: no layout fits 8 GPUs: the smallest needs' llama-3-70b --gpus 8 --hardware rtx-4090
refused 2 '--batch with a job file: expected train.batch in job.toml' job.toml --gpus 8 --hardware h100 --batch 8
refused 2 '--init without a job file' llama-3-8b --gpus 8 --hardware h100 --init model
refused 3 'nothing.toml: cannot open' nothing.toml --gpus 8 --hardware h100
refused 2 '--price: Value 0 not in range' llama-3-8b --gpus 8 --hardware h100 --price 0
refused 2 '--tokens: Value -1 not in range' llama-3-8b --gpus 8 --hardware h100 --tokens -1
refused 2 '--gpus is missing' llama-3-8b --hardware h100
refused 2 '--out and --json: both same: expected two files' llama-3-8b --gpus 8 --hardware h100 --out same --json same
refused 2 '--json and --page: both same: expected two files' llama-3-8b --gpus 8 --hardware h100 --json same --page same
refused 3 'File name too long' "$(printf 'm%.0s' {1..5000})" --gpus 8 --hardware h100
[ ! -e same ] || fail 'a refused plan has written'

# Runs of one source give no error bar, and the rest of the answer.
{ head -n 1 "$source/bench/published/runs.csv"; grep ',mosaic-mpt,' "$source/bench/published/runs.csv"; } >one.csv
"$tandem" plan llama-3-8b --gpus 64 --hardware h100 --fit one.csv --json one.json >log || fail 'plan --fit with one group:' log
grep -q '^error bar  none: ' log && grep -q '^tokens/s   [0-9,]* ([0-9,]* a GPU)$' log || fail 'plan --fit with one group:' log
# A long run of a large model has numbers without exponents; --tokens replaces a job's seconds.
"$tandem" plan llama-3-70b --gpus 64 --hardware a100 --tokens 1e15 >log
grep -q '^run  *[0-9,]*,[0-9]* days' log && ! grep -q 'e+.* days\|e+.* GFLOP' log || fail 'plan of a long run:' log
sed 's/^seq = 4096/&\nseconds = 60/' job.toml >timed.toml
"$tandem" plan timed.toml --gpus 64 --hardware h100 --tokens 1e9 --out planned.toml >log || fail 'plan of a timed job:' log
"$tandem" plan placements planned.toml --set data.paths=. >log || fail 'the planned job of a timed one:' log
python3 - <<'END'
import json, tomllib
answer, train = json.load(open("one.json"))["answer"], tomllib.load(open("planned.toml", "rb"))["train"]
assert answer["error_share"] is answer["error_runs"] is answer["error_of"] is None and answer["tokens_per_s"] > 0, answer
assert train["tokens"] == 10**9 and not train.get("seconds"), train
END
