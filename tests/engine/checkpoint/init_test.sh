#!/usr/bin/env bash
# init_test.sh TANDEM SOURCE_DIR: a run that starts from a model's folder has its shape, tokenizer and side files
# without a key of them in the job, resumes so, and leaves a model that chats; contradictions are refused by name.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
export TANDEM_CACHE_DIR=$dir/cache
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cp -r "$source/tests/engine/infer/families/llama3" model
echo '{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}{% endfor %}' >model/chat_template.jinja
python3 - <<'END'
import json
tokenizer = json.load(open("model/tokenizer.json"))
names = [token["content"] for token in tokenizer["added_tokens"]]
json.dump({"bos_token": names[0], "eos_token": names[-1], "chat_template": "unread"},
          open("model/tokenizer_config.json", "w"))
json.dump({"bos_token": names[0]}, open("model/special_tokens_map.json", "w"))
END
cat >job.toml <<'END'
[train]
steps = 40
batch = 2
seq = 32
dtype = "f32"
[checkpoint]
every = 2
END
paths="data.paths=[\"$source/docs/reference/glossary.md\"]"
fail() { echo "$1"; cat log errors; exit 1; }
train() { # options, then keys
  local options=() keys=("$paths")
  for argument in "$@"; do
    if [[ $argument == *=* ]]; then keys+=("$argument"); else options+=("$argument"); fi
  done
  "$tandem" train job.toml "${options[@]}" --set "${keys[@]}" >log 2>errors
}
refused() { # TEXT ARGUMENTS...
  local text=$1
  shift
  if train "$@"; then fail "accepted: $text"; fi
  grep -qF "$text" errors || fail "expected '$text'"
  [ "$(wc -l <errors)" = 1 ] || fail "more than one line"
}

train --init model --out out train.steps=2 || fail 'train --init'
expect_keys() { # FOLDER KEYS
  python3 - "$@" <<'END' || fail "keys of $1"
import json, sys, tomllib
found = tomllib.load(open(sys.argv[1] + "/config.toml", "rb"))
for key, value in json.loads(sys.argv[2]).items():
    table, name = key.split(".")
    assert found[table][name] == value, (key, found[table][name], value)
END
}
expect_keys out '{"optimizer.lr": 2e-5, "optimizer.min_lr": 2e-6, "optimizer.warmup": 1, "model.vocab": 320,
  "model.max_seq": 64, "model.rope_type": "llama3"}'
for name in tokenizer.json tokenizer_config.json special_tokens_map.json generation_config.json chat_template.jinja; do
  cmp "model/$name" "out/final/$name"
done
python3 - <<'END'
import json
config = json.load(open("out/final/config.json"))
assert config["vocab_size"] == 320 and config["eos_token_id"] is not None, config
END
echo '[{"role": "user", "content": "int"}]' >messages
for folder in out out/final out/checkpoints/step-00000002; do
  "$tandem" generate $folder --chat messages --max-tokens 4 --json - >text 2>errors || fail "generate $folder --chat"
  grep -q '"prompt": ".*user:int"' text || { cat text; fail "$folder has another template"; }
done

# Resumed without a word of the model; the job's own keys hold.
train --resume --out out train.steps=4 || fail '--resume'
expect_keys out '{"optimizer.lr": 2e-5, "optimizer.warmup": 1, "model.vocab": 320, "train.steps": 4}'
train --init model --out lr train.steps=2 optimizer.lr=1e-4 optimizer.warmup=2 || fail 'with keys'
expect_keys lr '{"optimizer.lr": 1e-4, "optimizer.min_lr": 2e-6, "optimizer.warmup": 2}'
train --out key train.steps=1 "train.init=$dir/model" || fail 'train.init'
cmp out/final/tokenizer.json key/final/tokenizer.json
# A layout is checked, placed and planned with the folder's shape, given or in the job.
"$tandem" check-layout job.toml --init model --tp 2 --set "$paths" train.batch=4 >log 2>errors || fail 'check-layout --init'
grep -q '^The layout computes what one rank does.$' log || fail 'check-layout --init'
{ cat job.toml; printf '[data]\npaths = ["%s"]\n' "$source/docs/glossary.md"; } >data.toml
sed "s|^\[train\]|&\ninit = \"$dir/model\"|" data.toml >init.toml
for job in 'data.toml --init model' init.toml; do
  # shellcheck disable=SC2086
  "$tandem" plan placements $job --tp 2 --json placed >log 2>errors || fail "plan placements $job"
  if ! grep -q 'layers\.1\.' placed || grep -q 'layers\.2\.' placed; then fail "plan placements $job: not 2 layers"; fi
done
printf 'gpu = "H100"\ngpus_per_host = 2\n[link]\nhost = 450\nnetwork = 50\n' >hardware.toml
"$tandem" plan data.toml --init model --gpus 2 --hardware hardware.toml --out planned.toml >log 2>errors || fail 'plan --init'
"$tandem" plan placements planned.toml --json planned >log 2>errors || fail 'plan --init: the planned job'
grep -q 'layers\.1\.' planned && ! grep -q 'layers\.2\.' planned || fail 'plan --init: the planned job has another shape'

# From what train left, and from a checkpoint.
train --init out --out more train.steps=1 || fail '--init out'
train --init out/checkpoints/step-00000004 --out most train.steps=1 || fail '--init of a checkpoint'
cmp model/chat_template.jinja most/final/chat_template.jinja

refused 'model.hidden is 32 in this model: expected 64' --init model --out x model.hidden=64
refused 'model.vocab is 320 in this model: expected 257' --init model --out x model.vocab=257
cp -r model bare
rm bare/tokenizer*
refused 'bare/config.json: vocab_size = 320: expected 257 (text is read as bytes), or a tokenizer.json' --init bare --out x
train --out bytes train.steps=1 model.vocab=320 model.layers=1 || fail 'bytes'
grep -q 'text is read as bytes: 257 of the 320 tokens of model.vocab are used' errors || fail 'no note of bytes'
train --init bytes --out more-bytes train.steps=1 || fail '--init of a model of bytes'
"$tandem" generate bytes --prompt int --max-tokens 2 >text 2>errors || fail 'generate of bytes'
[ ! -e x ] || fail 'a refused run left a folder'
mkdir adapter bin gguf
printf 'GGUF\3\0\0\0' >gguf/model-q4.gguf
for path in gguf gguf/model-q4.gguf; do
  if "$tandem" generate $path --prompt x >text 2>errors; then fail "accepted: $path"; fi
  grep -q 'holds GGUF (model-q4.gguf): expected a folder of config.json and safetensors: .* gguf model-q4.gguf gguf/safetensors writes' errors ||
    fail "$path: the line"
done
if "$tandem" generate model/config.json --prompt x >text 2>errors; then fail 'accepted: a file'; fi
grep -q 'model/config.json: a file: expected the folder of a model' errors || fail 'a file: the line'
echo '{}' >adapter/adapter_config.json
cp model/config.json bin
touch bin/pytorch_model.bin
refused 'adapter: holds an adapter (adapter_config.json): expected the whole model' --init adapter --out x
if "$tandem" generate bin --prompt x >text 2>errors; then fail 'accepted: pytorch_model.bin'; fi
grep -q 'bin: holds pytorch_model.bin: expected model.safetensors, which python3 -c .* writes' errors || fail 'the line'

# End tokens that only config.json names stand in final/, and each ends a text.
cp -r model ends
rm ends/generation_config.json
token() { "$tandem" generate "$1" --prompt "$2" --max-tokens 1 --temperature 0 --json - | python3 -c '
import json, sys
print(json.load(sys.stdin)["token_ids"][0])'; }
first=$(token model int) second=$(token model zzz)
python3 - $first $second <<'END'
import json, sys
config = json.load(open("ends/config.json"))
config["eos_token_id"] = [int(token) for token in sys.argv[1:]] + [319]
json.dump(config, open("ends/config.json", "w"))
END
train --init ends --out ended train.steps=1 optimizer.lr=1e-30 optimizer.min_lr=0 || fail '--init ends'
for name in config generation_config; do
  python3 - ended/final/$name.json $first $second <<'END' || fail "$name.json has other end tokens"
import json, sys
assert json.load(open(sys.argv[1]))["eos_token_id"] == [int(token) for token in sys.argv[2:]] + [319]
END
done

# Keys without effect are named in one line; one with an effect is refused.
edit() { python3 -c "
import json, sys
path, changes = sys.argv[1:]
config = {**json.load(open(path)), **json.loads(changes)}
json.dump(config, open(path, 'w'))" "$1" "$2"; }
edit model/config.json '{"tokenizer_class": "X", "unsloth_version": "1", "attention_dropout": 0.1, "hidden_act": "swish",
  "sliding_window": null, "_attn": 1, "new_switch": false}'
"$tandem" generate model --prompt int --max-tokens 1 >text 2>errors || fail 'keys without effect'
[ "$(grep -c 'config.json: keys without effect: attention_dropout, tokenizer_class, unsloth_version, sliding_window, _attn, new_switch' errors)" = 1 ] ||
  fail 'the line of keys'
edit model/config.json '{"logit_softcap": 30.0}'
if "$tandem" generate model --prompt int --max-tokens 1 >text 2>errors; then fail 'accepted: logit_softcap'; fi
grep -q 'unknown key logit_softcap' errors || fail 'expected logit_softcap'
