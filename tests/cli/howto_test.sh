#!/usr/bin/env bash
# howto_test.sh TANDEM SOURCE_DIR PYTHON: the blocks of docs/guide/howto.md that are marked sh run line by line, one after another, in a
# folder with a small job, model and data; those marked python where PyTorch and the package are there.
set -u
tandem=$1 source=$2 python=$3
. "$(dirname "$0")/expect.sh"
PATH=$dir/bin:$PATH
mkdir bin && ln -s "$tandem" bin/tandem && ln -s "$source/configs" configs
sed -E "s/^(hidden|head_dim|ffn|batch|seq|steps) = .*/\1 = SMALL_\1/
  s/SMALL_hidden/32/; s/SMALL_head_dim/8/; s/SMALL_ffn/32/; s/SMALL_batch/4/; s/SMALL_seq/32/; s/SMALL_steps/8/
  s|\"../include\"|\"$source/include/tandem\"|" "$source/configs/tiny.toml" >job.toml
grep -q SMALL_ job.toml && fail 'configs/tiny.toml has other keys'
for i in $(seq 30); do echo "{\"body\": \"text $i\"}"; done >data.jsonl
for i in $(seq 30); do echo "{\"instruction\": \"What is $i?\", \"output\": \"A number: $i.\"}"; done >chats.jsonl
echo '[{"role": "user", "content": "What is 7?"}]' >question.json
tandem train job.toml --out base --set "data.tokenizer=$source/examples/chat" "data.paths=$source/examples/chat/chats.jsonl" \
  model.vocab=320 train.seq=128 train.batch=2 train.steps=2 >log 2>&1 || fail "the model: $(cat log)"
mv base/final model

# blocks LANGUAGE: lines of the page in its blocks.
blocks() { awk -v mark="\`\`\`$1" '$0 == mark {on = 1; next} /^```/ {on = 0} on' "$source/docs/guide/howto.md"; }
count=0
while IFS= read -r line; do
  count=$((count + 1))
  eval "$line" >log 2>&1 </dev/null || fail "$line: $(cat log)"
done < <(blocks sh)
[ "$count" -ge 10 ] || fail "$count lines"
[ -f planned.toml ] && [ -f out/tuned/final/config.json ] || fail 'a result is missing'

cat >wandb.py <<'PY'
import json
class Logged:
    steps = {}
    def log(self, values, step): self.steps[step] = values
    def finish(self): json.dump(self.steps, open("logged.json", "w"))
def init(project, mode): return Logged()
PY
"$python" - <(blocks python) <<'PY' || fail 'the blocks of Python'
import json, os, sys
text = open(sys.argv[1]).read()
begin = text.index("import json")
sys.path.insert(0, os.getcwd())
exec(compile(text[begin:], "howto.md", "exec"))
logged = json.load(open("logged.json"))
assert len(logged) == 12 and all("loss" in step for step in logged.values()), logged
try:
    import tandem.torch
except ImportError as missing:
    print(f"howto_test: {missing}: the block of PyTorch is not run", file=sys.stderr)
else:
    exec(compile(text[:begin], "howto.md", "exec"))
PY
[ "$failures" = 0 ]
