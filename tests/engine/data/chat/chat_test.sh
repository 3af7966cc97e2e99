#!/usr/bin/env bash
# chat_test.sh TANDEM SOURCE_DIR: a model is trained on the example's chats, stopped and resumed, checked,
# evaluated and talked to; bad lines end the run with one line.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
export TANDEM_CACHE_DIR=$dir/cache TANDEM_THREADS=1
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cp -r "$source/examples/chat" chat
fails() { echo "$1"; shift; for file in "$@"; do cat "$file"; done; exit 1; }
train() {  # OUT KEYS...
  local out=$1
  shift
  "$tandem" train "$source/configs/tiny.toml" --out "$out" --set data.tokenizer=chat data.paths=chat/chats.jsonl \
    model.vocab=320 train.seq=128 train.batch=2 train.steps=12 optimizer.warmup=0 optimizer.schedule=constant "$@" >log 2>&1
}

train whole || fails 'training failed' log
for text in '18 documents' 'of them in answers'; do
  grep -q "$text" log || fails "expected '$text'" log
done
grep -q "format = 'chat'" whole/config.toml || fails 'no data.format' whole/config.toml
train halves train.steps=5 checkpoint.every=5 && train halves --resume --dp 2 || fails 'resuming failed' log
"$tandem" data check halves --rehash 0 >checked || fails 'the ledger is damaged' checked
losses() { python3 -c 'import json, sys
for line in open(sys.argv[1]): print(json.loads(line)["step"], round(json.loads(line)["loss"], 4))' "$1/metrics.jsonl"; }
[ "$(losses whole)" = "$(losses halves)" ] || fails 'other losses after --resume' halves/metrics.jsonl

# Validation and evaluation score answers only, and the same: the final model's loss on the same chats.
train valid 'data.val_paths=["chat/chats.jsonl"]' train.validate_every=12 --tp 2 || fails 'validation failed' log
"$tandem" eval valid --data chat/chats.jsonl --json score.json >score || fails 'evaluation failed' score
grep -q 'tokens of answers in 18 chats' score || fails 'no score' score
"$tandem" eval valid --data chat/chats.jsonl --tp 2 --batch 3 --json score2.json >/dev/null
python3 - <<'PY'
import json
score, other = (json.load(open(name)) for name in ("score.json", "score2.json"))
steps = [json.loads(line) for line in open("valid/metrics.jsonl")]
validated = [step["validation_loss"] for step in steps if "validation_loss" in step][-1]
for nats in (other["nats_per_token"], validated):
    assert abs(score["nats_per_token"] - nats) < 1e-5 * nats, (score, other, validated)
assert steps[-1]["loss"] < steps[0]["loss"], steps
PY

# The template is in final/, so that the model chats.
echo '[{"role": "user", "content": "What is TP?"}]' >messages
"$tandem" generate whole --chat messages --max-tokens 3 >answer 2>log || fails 'no answer' log

refused() {  # EXIT TEXT KEYS...
  local expected=$1 text=$2 code=0
  shift 2
  train bad "$@" || code=$?
  [ $code = $expected ] && [ "$(wc -l <log)" = 1 ] && grep -qF "$text" log || fails "exit $code, expected: $text" log
}
echo '{"messages": [{"role": "bot", "content": "x"}]}' >>chat/chats.jsonl
refused 3 'chats.jsonl:19: message 1: role = "bot": expected system'
refused 3 'chats.jsonl:19: message 1' parallel.tp=2
code=0
"$tandem" eval whole --data chat/chats.jsonl >log 2>&1 || code=$?
[ $code = 3 ] && [ "$(wc -l <log)" = 1 ] && grep -qF 'chats.jsonl:19: message 1' log || fails "exit $code" log
cp "$source/examples/chat/chats.jsonl" chat
refused 3 'tokens: expected at most 33, one more than the context' train.seq=32
rm chat/chat_template.jinja
refused 2 'no chat template'
