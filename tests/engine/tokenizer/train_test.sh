#!/usr/bin/env bash
# train_test.sh TANDEM SOURCE_DIR: a run on tokenized text resumes exactly, its model holds the tokenizer, and
# eval and generate use it; wrong tokenizers are refused.
set -u
tandem=$1 source=$2
data=$source/tests/engine/tokenizer/data
. "$source/tests/cli/expect.sh"
losses() { sed -E 's/.*"loss":([^,]*),.*/\1/' "$1/metrics.jsonl"; }

python3 - <<'PYTHON'
import json
with open("a.jsonl", "w") as out:
    for i in range(300):
        print(json.dumps({"text": f"Document {i}: caf\u00e9 \u4e2d\u6587 and a rank of {i * i} tokens.\n" * 3}), file=out)
PYTHON
small=(model.layers=1 train.batch=4 train.seq=32)
jsonl=(train "$source/configs/tiny.toml" --set "${small[@]}" 'data.paths=["a.jsonl"]' model.vocab=832)
expect 2 'model.vocab is 257: expected at least the 703 of data.tokenizer .*small_bytes.json$' \
  train "$source/configs/tiny.toml" --out x --set "${small[@]}" "data.tokenizer=$data/small_bytes.json"
expect 3 'none.json: cannot open' "${jsonl[@]}" data.tokenizer=none.json --out x
echo '{}' >broken.json
expect 2 'broken.json: decoder is null: expected a decoder|broken.json: model.vocab is null: expected an object' \
  "${jsonl[@]}" data.tokenizer=broken.json --out x
for kind in small_bytes.json small.model cl100k_small.tiktoken; do
  set=("data.tokenizer=$data/$kind" data.val_fraction=0.1 train.validate_every=4)
  expect 0 'Done at step 6' "${jsonl[@]}" "${set[@]}" train.steps=6 --out "whole-$kind"
  expect 0 'Done at step 3' "${jsonl[@]}" "${set[@]}" train.steps=6 train.tokens=384 --out "parts-$kind"
  expect 0 'Done at step 6' "${jsonl[@]}" "${set[@]}" train.steps=6 --out "parts-$kind" --resume
  [ "$(losses "whole-$kind")" = "$(losses "parts-$kind")" ] || fail "$kind: resumed with other losses"
  cmp -s "whole-$kind/final/model.safetensors" "parts-$kind/final/model.safetensors" ||
    fail "$kind: resumed to another model"
done
cmp "$data/small_bytes.json" whole-small_bytes.json/final/tokenizer.json || fail "final/ has no tokenizer.json"
cmp "$data/small.model" whole-small.model/final/tokenizer.model || fail "final/ has no tokenizer.model"
expect 2 'the hash of the training text is' "${jsonl[@]}" "data.tokenizer=$data/small.model" train.steps=7 \
  data.val_fraction=0.1 train.validate_every=4 --out whole-small_bytes.json --resume
expect 0 'Done at step 7' "${jsonl[@]}" data.tokenizer=whole-small_bytes.json/tokenizer.json train.steps=7 \
  data.val_fraction=0.1 train.validate_every=4 --out whole-small_bytes.json --resume

# Text, on two replicas as on one.
page=(train "$source/configs/tiny.toml" --set model.layers=1 train.seq=32 train.steps=3 model.vocab=832
  "data.paths=[\"$source/docs/reference/glossary.md\"]" "data.tokenizer=$data/small_fallback.json" checkpoint.every=2)
expect 0 'of text, [0-9]+ tokens' "${page[@]}" --out one
expect 0 'Done at step 3' "${page[@]}" --out two --dp 2
[ "$(head -1 one/metrics.jsonl | sed -E 's/.*"loss":([0-9.]{6}).*/\1/')" = \
  "$(head -1 two/metrics.jsonl | sed -E 's/.*"loss":([0-9.]{6}).*/\1/')" ] || fail "two replicas have another loss"

expect 0 '^[0-9.]+ bits per byte, perplexity [0-9.]+ of [0-9]+ tokens, over [0-9]+ bytes in 1 files' \
  eval one --data "$source/docs/reference/glossary.md"
"$tandem" eval one --data "$source/docs/reference/glossary.md" --json eval.json >/dev/null
"$tandem" tokenize one/final --json <"$source/docs/reference/glossary.md" >tokens.json
python3 - <<'PYTHON' || fail "eval's sums disagree"
import json, math
read, tokens = json.load(open("eval.json")), json.load(open("tokens.json"))["tokens"]
assert read["tokens"] == len(tokens), (read["tokens"], len(tokens))
assert abs(math.log(read["perplexity"]) * read["tokens"] / math.log(2) / read["bytes"] - read["bits_per_byte"]) < 1e-9
PYTHON
expect 0 'tokens: the first after' generate one --prompt 'Héllo wor' --max-tokens 8 --temperature 0
"$tandem" generate one --prompt 'Hello' --max-tokens 8 --temperature 1 --json - 2>/dev/null >generated.json
grep -q '"prompt_tokens": ' generated.json || fail "no prompt_tokens"
python3 -c 'import json; json.load(open("generated.json", encoding="utf-8"))' || fail "not UTF-8"
"$tandem" generate one --prompt Hello --max-tokens 8 --tp 2 --json - 2>/dev/null | grep '"text"' >tp2
"$tandem" generate one --prompt Hello --max-tokens 8 --json - 2>/dev/null | grep '"text"' | cmp -s - tp2 ||
  fail "two ranks wrote another text"
expect 0 'bits per byte, perplexity' eval one/checkpoints/step-00000002 --data "$source/docs/reference/glossary.md"
rm one/final/tokenizer.json
expect 2 'vocab_size = 832: expected 257 \(text is read as bytes\), or a tokenizer.json' generate one --prompt x
exit $((failures > 0))
