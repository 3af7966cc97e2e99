#!/usr/bin/env bash
# user_data_test.sh TANDEM CONFIG: files of users from the command line: what is refused with a command that works, eval
# of every format, steps and validation without targets, OUT/config.toml as a job, and a resumed run with other text.
set -u
tandem=$1 config=$2
here=$(cd "$(dirname "$0")" && pwd)
. "$here/expect.sh"
small=(model.layers=1 train.seq=16 train.batch=4 train.steps=3)

# The one line of Python, with pyarrow or a stand-in of the same calls.
if ! python3 -c 'import pyarrow.parquet' 2>/dev/null; then
  mkdir -p stand_in/pyarrow
  touch stand_in/pyarrow/__init__.py
  cat >stand_in/pyarrow/parquet.py <<'PY'
class Batch:
    def to_pylist(self): return [{"text": f"row {i} " * 9, "n": i} for i in range(40)]
class ParquetFile:
    def __init__(self, path): open(path, "rb").close()
    def iter_batches(self): return [Batch()]
PY
  export PYTHONPATH=$dir/stand_in
  printf 'PAR1\0\1PAR1' >"my rows.parquet"
else
  python3 -c 'import pyarrow as a, pyarrow.parquet as p
p.write_table(a.table({"text": [f"row {i} " * 9 for i in range(40)]}), "my rows.parquet")'
fi
expect 2 "my rows.parquet: Parquet: expected text, JSON Lines or token files: write JSON Lines: python3 -c" \
  train "$config" --out x --set 'data.paths=["my rows.parquet"]' "${small[@]}"
command=${text#*write JSON Lines: }
bash -c "${command%%$'\n'*}" || fail "the command for Parquet fails: $command"
[ "$(wc -l <data.jsonl)" = 40 ] || fail "data.jsonl has not 40 lines"
expect 0 '1 file of JSON Lines, 40 documents' train "$config" --out x --set 'data.paths=["data.jsonl"]' "${small[@]}"
printf '%%PDF-1.7\n' >a.pdf
expect 2 'a.pdf: a PDF document: expected text, JSON Lines or token files' train "$config" --out y --set 'data.paths=["a.pdf"]'
[[ $text =~ files:\ *$ ]] && fail "a.pdf: an empty command"
printf '[{"text": "one"}, {"text": "two"}]' >a.json
expect 2 'a.json: JSON that is not one object a line' train "$config" --out y --set 'data.paths=["a.json"]'
command=${text#*write JSON Lines: }
bash -c "${command%% (or read*}" && [ "$(wc -l <data.jsonl)" = 2 ] || fail "the command for JSON fails: $command"

# Text is the same compressed, in eval, too.
python3 - <<'PY'
import gzip, json, random, struct
r = random.Random(1)
text = "".join(r.choice(["tile ", "rank ", "sums\n"]) for _ in range(3000))
open("a.txt", "w").write(text)
gzip.open("a.txt.gz", "wt").write(text)
open("a.jsonl", "w").write("".join(json.dumps({"body": line}) + "\n" for line in text.split("\n") if line))
words = [r.randrange(2, 257) for _ in range(2000)]
open("t.bin", "wb").write(struct.pack("<2000H", *words))
open("v.bin", "wb").write(struct.pack("<400I", *words[:400]))
def documents(name, sizes):
    n, at = len(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    open(name + ".bin", "wb").write(struct.pack(f"<{sum(sizes)}H", *words[:sum(sizes)]))
    open(name + ".idx", "wb").write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, n, n + 1) + struct.pack(f"<{n}i", *sizes)
        + struct.pack(f"<{n}q", *[2 * a for a in at]) + struct.pack(f"<{n + 1}q", *range(n + 1)))
documents("single", [1] * 200 + [100])
documents("none", [1] * 300)
PY
expect 0 'Done at step 3' train "$config" --out text --set 'data.paths=["a.txt"]' "${small[@]}"
expect 0 'unpacks 1 gzip and 0 zstd files' train "$config" --out gz --set 'data.paths=["a.txt.gz"]' "${small[@]}"
losses() { grep -o '"loss":[^,]*' "$1/metrics.jsonl"; }
[ "$(losses text)" = "$(losses gz)" ] || fail "compressed text has other losses"
[ "$("$tandem" eval text --data a.txt)" = "$("$tandem" eval text --data a.txt.gz)" ] || fail "eval differs"
expect 0 '[0-9.]+ bits per byte over 13959 bytes in 1 files' eval text --data a.jsonl --text-key body
expect 3 'a.jsonl:1: .*expected ."text": "..."' eval text --data a.jsonl

# Token files: eval is the validation loss; a last step that is no multiple is validated.
expect 0 'Done at step 3' train "$config" --out tokens --set 'data.paths=["t.bin"]' 'data.val_paths=["v.bin"]' \
  train.validate_every=2 train.validate_bytes=0 "${small[@]}"
[ "$(grep -c validation_loss tokens/metrics.jsonl)" = 2 ] || fail "expected validation after steps 2 and 3"
loss=$(tail -n 1 tokens/metrics.jsonl | sed 's/.*"validation_loss":\([0-9.]*\).*/\1/')
expect 0 "$(printf %.3f "${loss:-0}")[0-9]* nats per token, perplexity [0-9.]+ over 399 tokens in 1 files" \
  eval tokens --data v.bin
expect 2 'v.bin: tokens: expected text or JSON Lines, of which bits per byte are known' eval tokens --data v.bin --tp 2 --codec-sweep c

# Steps without targets are skipped in every layout; validation and data without any are refused.
masked=('data.paths=["single"]' data.document_mask=true train.steps=12 model.layers=2 train.seq=16)
for layout in "--tp 1" "--tp 2" "--pp 2" "--dp 2" "--dp 2 --set parallel.zero=2"; do
  batch=1
  [[ $layout == --dp* ]] && batch=2
  # shellcheck disable=SC2086
  expect 0 'it has no targets: all are masked: dropped' train "$config" --out "m$layout" $layout --set "${masked[@]}" train.batch=$batch
  # Not mfu, which is null where a loaded machine measured a lower peak than steps have.
  [ "$(grep -c '"loss":[-0-9.e]*,.*"grad_norm":[-0-9.e]*,' "m$layout/metrics.jsonl")" = 12 ] || fail "$layout: a loss is no number"
done
expect 2 'no document has two tokens' train "$config" --out n --set 'data.paths=["none"]' data.document_mask=true
expect 2 'data.val_paths .*none have no targets' train "$config" --out n --set "${masked[@]}" train.batch=1 \
  'data.val_paths=["none"]' train.validate_every=1

# OUT/config.toml is a job from any folder; other text is named when a run is resumed.
mkdir -p job/data elsewhere
cp a.txt job/data/a.txt
cp a.txt job/data/b.txt
cp "$config" job/job.toml
expect 0 'Done at step 3' train job/job.toml --out run --set 'data.paths=["job/data"]' "${small[@]}"
(cd elsewhere && "$tandem" train ../run/config.toml --out again >/dev/null 2>&1) || fail "config.toml is no job"
[ "$(losses run)" = "$(losses elsewhere/again)" ] || fail "config.toml trains otherwise"
echo more >>job/data/b.txt
expect 2 'hash of the training text .*job/data/b.txt holds [0-9]+ bytes: expected' \
  train job/job.toml --out run --resume --set 'data.paths=["job/data"]' "${small[@]}" train.steps=4
mv job/data/b.txt job/data/c.txt
expect 2 'c.txt is new; .*b.txt is gone' \
  train job/job.toml --out run --resume --set 'data.paths=["job/data"]' "${small[@]}" train.steps=4
# So is it of a stream, whose files are not read before they are reached.
mkdir lines
for i in 1 2 3; do cp a.jsonl lines/$i.jsonl; done
stream=(train "$config" --out stream --set 'data.paths=["lines"]' data.text_key=body data.order=stream "${small[@]}")
expect 0 'Done at step 3' "${stream[@]}"
touch -d '2001-01-01' lines/2.jsonl
expect 1 'lines/2.jsonl: was written to: its bytes were not recorded' data verify stream/data.json
expect 0 'lines/2.jsonl was written to after stream/data.json was made; its size is the same' "${stream[@]}" train.steps=4 --resume
echo '{"body": "more"}' >>lines/3.jsonl
expect 2 'hash of the training text .*lines/3.jsonl holds [0-9]+ bytes: expected [0-9]+' "${stream[@]}" train.steps=5 --resume

# Bytes are not taken for a larger vocabulary's tokens where the data are documents of JSON Lines.
vocabulary=(train "$config" --out bytes --set 'data.paths=["a.jsonl"]' data.text_key=body model.vocab=320 "${small[@]}")
expect 2 'model.vocab is 320, and JSON Lines are read as bytes without data.tokenizer: expected data.tokenizer, model.vocab = 257, or data.format = "jsonl"' \
  "${vocabulary[@]}"
expect 0 'text is read as bytes: 257 of the 320 tokens' "${vocabulary[@]}" data.format=jsonl
exit $((failures > 0))
