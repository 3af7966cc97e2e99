#!/usr/bin/env bash
# finetune_test.sh TANDEM SOURCE_DIR: a fine-tune of a small model on chats chooses its keys, ends early, leaves
# the weights of the lowest held-out loss in final/, resumes, and prints the command that chats; what it cannot
# read ends with one line.
set -u
tandem=$1 source=$2
. "$(dirname "$0")/expect.sh"
cp -r "$source/examples/chat" chat
train=(train "$source/configs/tiny.toml" --out base --set data.tokenizer=chat data.paths=chat/chats.jsonl model.vocab=320
  model.max_seq=128 train.seq=128 train.batch=2 train.steps=12 optimizer.warmup=0 optimizer.schedule=constant)
expect 0 'the model is in base/final' "${train[@]}"
for i in $(seq 60); do echo "{\"instruction\": \"What is $i?\", \"output\": \"A number: $i.\"}"; done >chats.jsonl
for i in $(seq 90 99); do echo "{\"instruction\": \"What is $i?\", \"output\": \"A number: $i.\"}"; done >other.jsonl

# value FILE KEY: of a run's config.toml.
value() { sed -n "s/^$2 = //p" "$1/config.toml"; }
chosen() { # OUT KEY VALUE
  [ "$(value "$1" "$2")" = "$3" ] || fail "$1: $2 is $(value "$1" "$2"), expected $3"
}
expect 0 'Done at step .*the model is in tuned/final.*Next: tandem serve tuned ' finetune base --data chats.jsonl --out tuned
chosen tuned seq 64
chosen tuned batch 4
chosen tuned early_stop 3
chosen tuned save_best true
chosen tuned lr 0.001
chosen tuned packing "'best_fit'"
fraction=$(value tuned val_fraction)
[[ $fraction = 0.05* || $fraction = 0.1* ]] || fail "tuned: val_fraction is $fraction"

# lowest OUT: the step of final/ has the lowest validation loss of the run, which VALIDATION gets again.
lowest() { # OUT DATA
  "$tandem" eval "$1" --data "$2" --json score.json >/dev/null 2>log || fail "eval $1: $(cat log)"
  python3 - "$1" <<'PY' || fail "$1: final/ does not have the weights of the lowest loss"
import json, sys
out = sys.argv[1]
losses = {}
for line in open(out + "/metrics.jsonl"):
    step = json.loads(line)
    if "validation_loss" in step:
        losses[step["step"]] = step["validation_loss"]
best = min(losses, key=losses.get)
saved = json.load(open(out + "/final/state.json"))["step"]
score = json.load(open("score.json"))["nats_per_token"]
print(losses, saved, score)
assert saved == best and abs(score - losses[best]) < 1e-4 * score, (best, saved, score)
assert len(losses) > 1, losses
PY
}
expect 0 'Done at step' finetune base --data chats.jsonl --val other.jsonl --out valid --dp 2 --epochs 2
lowest valid other.jsonl
chosen valid val_fraction 0.0
chosen valid dp 2

# A learning rate that ruins the model: the run ends early, and its checkpoint, which is newer, is not read.
expect 0 'none of the last 3 validation losses is below.*broken/final has the weights with the lowest' \
  finetune base --data chats.jsonl --val other.jsonl --out broken --epochs 50 --set optimizer.lr=0.3 optimizer.schedule=constant
lowest broken other.jsonl
ls broken/checkpoints | grep -q . || fail 'broken has no checkpoint'

# Resuming continues the same run.
expect 0 'Done at step 3' finetune base --data chats.jsonl --val other.jsonl --out halves --set train.steps=3
expect 0 'Done at step 5' finetune base --data chats.jsonl --val other.jsonl --out halves --set train.steps=5 --resume
expect 0 'Nothing was left to do' finetune base --data chats.jsonl --val other.jsonl --out halves --set train.steps=5 --resume

# Without a run in OUT, --resume starts it from the model; of a run it continues no other model, data or validation data.
short=(finetune base --data chats.jsonl --epochs 1 --set train.steps=2)
expect 0 'Done at step 2' "${short[@]}" --out started
expect 0 'Done at step 2' "${short[@]}" --out resumed --resume
expect 0 'Done at step 2' train started/config.toml --out job --resume
for run in resumed job; do
  cmp -s started/final/model.safetensors $run/final/model.safetensors || fail "$run: --resume without a run starts from other weights"
done
# Epochs that give the run's steps are no note.
expect 0 'Nothing was left to do' finetune base --data chats.jsonl --val other.jsonl --out valid --dp 2 --epochs 2 --resume
! grep 'keeps its' <<<"$text" || fail "epochs of the run are noted as others"
expect 0 'started keeps its 2 steps.*Nothing was left to do' "${short[@]}" --out started --resume
expect 0 'Nothing was left to do' finetune ./base/ --data "$dir/chats.jsonl" --out started --resume
expect 2 'resume with MODEL tuned: expected that of the run in started: .*base' finetune tuned --data chats.jsonl --out started --resume
expect 2 'resume with --data other.jsonl: expected that of the run in started: .*chats.jsonl' \
  finetune base --data other.jsonl --out started --resume
expect 2 'resume with --val chats.jsonl: expected that of the run in halves: .*other.jsonl' \
  finetune base --data chats.jsonl --val chats.jsonl --out halves --resume
# A run whose first checkpoint is gone begins again from the model.
rm -r job/checkpoints job/final
expect 0 'Done at step 2' train started/config.toml --out job --resume
cmp -s started/final/model.safetensors job/final/model.safetensors || fail 'a run without checkpoints resumes from other weights'

# Keys set to 0 leave out those that depend on them.
expect 0 'Done at step 1' finetune base --data chats.jsonl --out low --set optimizer.lr=1e-5 train.steps=1
python3 -c 'import tomllib; o = tomllib.load(open("low/config.toml", "rb"))["optimizer"]; assert abs(o["min_lr"] - 1e-6) < 1e-12, o' ||
  fail 'low: min_lr is no tenth of lr'
for key in train.validate_every data.val_fraction; do
  rm -rf whole
  expect 0 'Done at step 1' finetune base --data chats.jsonl --out whole --set $key=0 train.steps=1
  chosen whole early_stop 0
  chosen whole save_best false
  chosen whole val_fraction 0.0
done
# Steps of three ranks, and a batch of the user's: no more at once than 8,192 tokens a rank, or a sequence.
expect 0 'Done at step 1' finetune base --data chats.jsonl --out three --dp 3 --set train.steps=1
chosen three batch 6
expect 0 'Done at step 1' finetune base --data chats.jsonl --out large --set train.steps=1 train.batch=192
chosen large microbatch 96

# The printed command serves a chat.
python3 - "$tandem" <<'PY' || fail 'the fine-tuned model does not chat'
import json, re, subprocess, sys, urllib.request
server = subprocess.Popen([sys.argv[1], "serve", "tuned", "--port", "0"], stderr=subprocess.PIPE, text=True)
try:
    url = next(found[0] for found in (re.search(r"http://[\d.:]+/", line) for line in server.stderr) if found)
    body = {"messages": [{"role": "user", "content": "What is 7?"}], "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(url + "v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    assert answer["choices"][0]["message"]["role"] == "assistant", answer
    assert answer["usage"]["completion_tokens"] > 0, answer
finally:
    server.kill()
PY

# Text, and too little to hold some of it out.
mkdir notes && cp "$source"/include/tandem/{norm,random}.h notes/
expect 0 'tandem generate text' finetune base --data notes --out text --set train.steps=2
head -n 4 chats.jsonl >few.jsonl
expect 0 'note: .*too little to hold some of it out.*--val' finetune base --data few.jsonl --out few --epochs 1
chosen few validate_every 0
head -c 400 chats.jsonl | head -n 3 | sed 's/"instruction"/"text"/' >stream.jsonl
stream=(finetune base --data stream.jsonl --out streamed --set data.order=stream data.format=jsonl)
expect 2 'data.order is stream, .*expected train.steps' "${stream[@]}"
expect 0 'Done at step 2' "${stream[@]}" train.steps=2

# refuses CODE 'PATTERN' ARG...: one line.
refuses() {
  expect "$@"
  [ "$(wc -l <<<"$text")" = 1 ] || fail "more than one line: $text"
}
refuses 3 '/nowhere: no config.json' finetune /nowhere --data chats.jsonl --out x
refuses 3 '/nowhere: no such file' finetune base --data /nowhere --out x
printf 'PAR1%040d' 0 >table.parquet
refuses 2 'table.parquet.*Parquet.*write JSON Lines' finetune base --data table.parquet --out x
echo '{"instruction": "no answer"}' >>few.jsonl
refuses 3 'few.jsonl:5: ' finetune base --data few.jsonl --out x
echo "{\"instruction\": \"long\", \"output\": \"$(printf 'x%.0s' {1..300})\"}" >long.jsonl
refuses 3 'long.jsonl:1: 321 tokens: expected at most 129' finetune base --data long.jsonl --out x
cp -r base/final bare && rm bare/chat_template.jinja
refuses 2 'chat template' finetune bare --data chats.jsonl --out x
refuses 2 'epochs' finetune base --data chats.jsonl --out x --epochs 0
refuses 2 'train.seq is 100000: expected' finetune base --data chats.jsonl --out x --set train.seq=100000
expect 2 'tuned: already holds a run' finetune base --data chats.jsonl --out tuned
[ -e x ] && fail 'a refused run has left a folder'
[ "$failures" = 0 ]
