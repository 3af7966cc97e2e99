#!/usr/bin/env bash
# generate_test.sh TANDEM SOURCE_DIR: a model trained for a few steps continues a prompt with the same bytes
# for any number of ranks, and refuses bad arguments with the right exit code.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
export TANDEM_CACHE_DIR=$dir/cache
trap 'rm -rf "$dir"' EXIT

"$tandem" train "$source/configs/tiny.toml" --set train.steps=3 --out "$dir/out" >"$dir/log" 2>&1 ||
  { cat "$dir/log"; exit 1; }

generate() {
  "$tandem" generate "$dir/out" --prompt '#include <' --max-tokens 40 --seed 3 "$@"
}
generate --json "$dir/one.json" >"$dir/one" 2>/dev/null
# Through a file: Open MPI 5's launcher mixes standard output and standard error.
same_text() {
  [ "$(grep -E '"(prompt|text)":' "$1")" = "$(grep -E '"(prompt|text)":' "$dir/one.json")" ] ||
    { echo "another text:"; cat "$1" "$dir/one.json"; exit 1; }
}
[ "$(head -c 10 "$dir/one")" = '#include <' ] || { echo "the prompt is not repeated"; exit 1; }
generate --tp 2 >"$dir/two"
generate --tp 4 >"$dir/four"
cmp "$dir/one" "$dir/two"
cmp "$dir/one" "$dir/four"
if "$tandem" info | grep -q 'Open MPI'; then
  "$source/tools/mpirun.sh" 2 "$tandem" generate "$dir/out/final" --prompt '#include <' \
    --max-tokens 40 --seed 3 --json "$dir/mpi.json" >/dev/null
  same_text "$dir/mpi.json"
fi

# Codecs: all ranks write the same text, which lossless does not change.
generate --tp 2 --codec lossless >"$dir/lossless"
cmp "$dir/one" "$dir/lossless"
generate --tp 4 --codec attention=lossless >"$dir/lossless"
cmp "$dir/one" "$dir/lossless"
for ranks in 2 4; do
  generate --tp $ranks --codec int8 --json "$dir/int8-$ranks.json" >"$dir/int8" 2>/dev/null
  for key in '"codec": "int8"' "\"ranks\": $ranks" '"prompt_tokens": 11' '"tokens": 40' \
    '"load_s": [0-9]' '"loaded_bytes": [0-9]' '"first_token_s": [0-9]' '"tokens_per_s": [0-9]'; do
    grep -q "$key" "$dir/int8-$ranks.json" || { echo "no $key:"; cat "$dir/int8-$ranks.json"; exit 1; }
  done
  if "$tandem" info | grep -q 'Open MPI'; then
    "$source/tools/mpirun.sh" $ranks "$tandem" generate "$dir/out/final" --prompt '#include <' \
      --max-tokens 40 --seed 3 --codec int8 --json "$dir/mpi.json" >/dev/null
    [ "$(grep '"text":' "$dir/mpi.json")" = "$(grep '"text":' "$dir/int8-$ranks.json")" ] ||
      { echo "int8 writes another text under mpirun -n $ranks:"; cat "$dir/mpi.json"; exit 1; }
  fi
done

# A longer prompt gives the same text for any schedule, with a codec too.
long=$(head -c 150 "$source/configs/tiny.toml")
long() {
  "$tandem" generate "$dir/out" --prompt "$long" --max-tokens 20 --seed 3 "$@"
}
long >"$dir/alone"
for ranks in 2 4; do
  for prefill in serial iso automatic; do
    long --tp $ranks --prefill $prefill --json "$dir/json" >"$dir/form"
    cmp "$dir/alone" "$dir/form"
    [ $prefill != iso ] || grep -q '"prefill": "ISO"' "$dir/json" || { cat "$dir/json"; exit 1; }
  done
  long --tp $ranks --codec lossless --allow-uncompressed --json "$dir/json" >"$dir/form"
  cmp "$dir/alone" "$dir/form"
  grep -qE '"prefill": "(rows split|(one chunk|ISO)( as lossless)?)"' "$dir/json" || { cat "$dir/json"; exit 1; }
  TANDEM_TUNE=0 TANDEM_CACHE_DIR=$dir/empty long --tp $ranks --codec int8 --allow-uncompressed --json "$dir/json" >"$dir/form"
  grep -q '"prefill": "rows split"' "$dir/json" || { echo "not plain:"; cat "$dir/json"; exit 1; }
  long --tp $ranks --codec int4:g32 --prefill serial >"$dir/serial"
  long --tp $ranks --codec int4:g32 --prefill iso >"$dir/form"
  cmp "$dir/serial" "$dir/form"
done

# The same prompt from standard input; generation ends at the first stop text, which is not written.
printf '#include <' | "$tandem" generate "$dir/out" --prompt - --max-tokens 40 --seed 3 \
  --json "$dir/json" >"$dir/piped" 2>"$dir/speed"
cmp "$dir/one" "$dir/piped"
grep -qE '^Loaded [0-9.e-]+ GB of weights in [0-9.e-]+ s: [0-9.e+-]+ GB/s$' "$dir/speed" || { cat "$dir/speed"; exit 1; }
grep -qE '^40 tokens: .* with a prompt of 11, .* tokens/s$' "$dir/speed" || { cat "$dir/speed"; exit 1; }
grep -q '"ended_by": "max-tokens"' "$dir/json" && grep -q '"tokens_per_s": [0-9]' "$dir/json" ||
  { cat "$dir/json"; exit 1; }
stop=$(tail -c +31 "$dir/one" | head -c 2 | od -An -v -tx1 | tr -d ' \n')
whole=$(od -An -v -tx1 "$dir/one" | tr -d ' \n')
if [[ $stop != *00* ]]; then
  generate --stop "$(printf "\\x${stop:0:2}\\x${stop:2:2}")" >"$dir/stopped" 2>/dev/null
  got=$(od -An -v -tx1 "$dir/stopped" | tr -d ' \n')
  got=${got%0a}
  generated=${got:20}
  [[ $whole == "$got"* ]] && [[ $generated != *"$stop"* ]] && [ ${#got} -le 60 ] ||
    { echo "stopped at $stop: $got of $whole"; exit 1; }
fi
if "$tandem" info | grep -q 'Open MPI'; then
  printf '#include <' | "$source/tools/mpirun.sh" 2 "$tandem" generate "$dir/out/final" --prompt - \
    --max-tokens 40 --seed 3 --json "$dir/mpi.json" >/dev/null
  same_text "$dir/mpi.json"
fi

# Many prompts at once: each text is the one that it is with no other, for any batch and number of ranks.
python3 - "$dir/prompts" <<'END'
import json, sys
with open(sys.argv[1], "w") as file:
    for i in range(9):
        print(json.dumps({"prompt": "#include <" * (1 + i % 4), "max_tokens": 20 + 5 * i, "seed": i} |
                         ({"stop": ["e", "zz"], "log_probs": True} if i % 2 else {"temperature": 0})), file=file)
    print(json.dumps({"prompt": "#include <", "max_tokens": 40, "seed": 3}), file=file)
END
"$tandem" generate "$dir/out" --prompts "$dir/prompts" --batch 1 >"$dir/texts" 2>"$dir/speed"
grep -qE '^10 texts, [0-9]+ tokens in .* tokens/s\): [0-9]+ steps of ' "$dir/speed" || { cat "$dir/speed"; exit 1; }
python3 - "$dir/prompts" "$dir/texts" "$dir/one.json" <<'END'
import json, sys
prompts, texts = ([json.loads(line) for line in open(path)] for path in sys.argv[1:3])
assert len(texts) == len(prompts) == 10
for prompt, text in zip(prompts, texts):
    assert text["prompt_tokens"] == 1 + len(prompt["prompt"]), text
    assert text["tokens"] == len(text["token_ids"]) <= prompt["max_tokens"], text
    assert ("log_probs" in text) == ("log_probs" in prompt) and len(text.get("log_probs", [])) in (0, text["tokens"]), text
    assert all(stop not in text["text"] for stop in prompt.get("stop", [])), text
    assert all(value <= 0 for value in text.get("log_probs", [])), text
    if text["ended_by"] == "max-tokens": assert text["tokens"] == prompt["max_tokens"], text
one = json.load(open(sys.argv[3]))
assert texts[9]["text"] == one["text"] and texts[9]["token_ids"] == one["token_ids"], (texts[9], one)
assert {text["ended_by"] for text in texts} >= {"max-tokens"}
END
many() {  # OPTIONS...: texts of the prompts
  "$tandem" generate "$dir/out" --prompts "$dir/prompts" "$@" 2>/dev/null
}
many --batch 3 | cmp "$dir/texts"
without_log_probs() {  # sums of other ranks round differently
  sed 's/,"log_probs":.*//; s/}$//'
}
for ranks in 2 4; do
  many --tp $ranks --batch 1 >"$dir/texts-$ranks"
  cmp <(without_log_probs <"$dir/texts") <(without_log_probs <"$dir/texts-$ranks")
  many --tp $ranks --batch 5 --codec lossless | cmp "$dir/texts-$ranks"
done
for format in int8 e4m3; do
  many --weights $format --batch 1 >"$dir/$format-texts"
  many --weights $format --batch 6 | cmp "$dir/$format-texts"
  ! cmp -s "$dir/texts" "$dir/$format-texts" || { echo "weights in $format change nothing"; exit 1; }
done
! cmp -s "$dir/int8-texts" "$dir/e4m3-texts" || { echo "int8 is e4m3"; exit 1; }
many --weights none --batch 3 | cmp "$dir/texts"
: >"$dir/none"
[ -z "$("$tandem" generate "$dir/out" --prompts "$dir/none" 2>/dev/null)" ] || exit 1

# A prompt longer than the context: the dropped part is reported. The end that leaves room is kept.
long_prompt=$(printf 'A%.0s' $(seq 600))
"$tandem" generate "$dir/out" --prompt "$long_prompt" --max-tokens 4 --json "$dir/json" >/dev/null 2>"$dir/speed"
context=$(grep -oP '"max_position_embeddings": \K[0-9]+' "$dir/out/final/config.json")
dropped=$((601 - (context - 4)))
grep -qF "the first $dropped of the prompt's 601 were dropped" "$dir/speed" || { cat "$dir/speed"; exit 1; }
grep -q "\"dropped_prompt_tokens\": $dropped,\$" "$dir/json" && grep -q '"context_refills": 0,' "$dir/json" ||
  { cat "$dir/json"; exit 1; }

refuses() {  # EXIT_CODE TEXT ARGUMENTS...: one line on standard error that has the text
  local code=$1 text=$2 actual=0
  shift 2
  "$tandem" generate "$@" >/dev/null 2>"$dir/error" || actual=$?
  if [ "$actual" != "$code" ] || [ "$(wc -l <"$dir/error")" != 1 ] || ! grep -qF -- "$text" "$dir/error"; then
    echo "generate $*: exit $actual, expected $code with '$text':"
    cat "$dir/error"
    exit 1
  fi
}
refuses_line() {  # TEXT LINE: of a file with prompts, the second line
  printf '{"prompt": "x"}\n%s\n' "$2" >"$dir/lines"
  refuses 2 "$dir/lines:2: $1" "$dir/out" --prompts "$dir/lines"
}
refuses_line 'expected a JSON object' '["x"]'
refuses_line 'parse error at line 1, column 15' '{"prompt": "x"'
refuses_line 'expected a prompt, a string, or messages' '{}'
refuses_line "$dir/out/final: no tokenizer" '{"messages": []}'
refuses_line 'prompt = 3: expected a string' '{"prompt": 3}'
refuses_line 'temprature: expected one of prompt, messages, log_probs, top_log_probs, tools, tool_choice, max_tokens' '{"prompt": "x", "temprature": 1}'
refuses_line 'max_tokens 0: expected at least 1' '{"prompt": "x", "max_tokens": 0}'
refuses_line 'top_p = "a": expected a number' '{"prompt": "x", "top_p": "a"}'
refuses_line 'top_p 0' '{"prompt": "x", "top_p": 0}'
refuses_line 'min_p 2: expected 0 to 1' '{"prompt": "x", "min_p": 2}'
refuses_line 'logit_bias = {"a":1}: expected an object of' '{"prompt": "x", "logit_bias": {"a": 1}}'
refuses_line 'top_log_probs = 21: expected 0 to 20' '{"prompt": "x", "top_log_probs": 21}'
refuses_line 'stop = 3: expected a string or a list of up to 16 strings' '{"prompt": "x", "stop": 3}'
refuses_line "stop '': expected" '{"prompt": "x", "stop": [""]}'
refuses_line 'prompt of 601 tokens: expected fewer' "{\"prompt\": \"$(printf 'A%.0s' $(seq 600))\"}"
printf '{"prompt": "x"}\0{"prompt": "y"}\n' >"$dir/lines"
refuses 2 "$dir/lines:1: byte 16 is zero: expected a JSON object" "$dir/out" --prompts "$dir/lines"
refuses 3 "$dir/nowhere" "$dir/out" --prompts "$dir/nowhere"
refuses 2 "--prompts: '': expected the name of a file" "$dir/out" --prompts ''
refuses 2 '--seed: 18446744073709551616: expected an integer of 64 bits' "$dir/out" --prompt x --seed 18446744073709551616
refuses 2 '--temperature: nan: expected a number' "$dir/out" --prompt x --temperature nan
# A single prompt with weights in int8 is continued as in a batch.
echo '{"prompt": "#include <", "max_tokens": 40, "seed": 3}' >"$dir/single"
"$tandem" generate "$dir/out" --prompts "$dir/single" --weights int8 >"$dir/batch.json" 2>/dev/null
generate --weights int8 --json "$dir/single.json" >/dev/null 2>&1
python3 -c '
import json, sys
single, batch = (json.load(open(path))["token_ids"] for path in sys.argv[1:])
assert single == batch, (single, batch)' "$dir/single.json" "$dir/batch.json"
# Bits per byte of weights in 8 bits are close to those of f32, and not the same.
score() {
  "$tandem" eval "$dir/out" --data "$source/configs/tiny.toml" --json - "$@"
}
python3 -c '
import json, sys
f32, int8, e4m3 = (json.loads(text)["bits_per_byte"] for text in sys.argv[1:])
assert 0 < abs(int8 - f32) < 1e-3 * f32, (f32, int8)
assert 0 < abs(e4m3 - f32) < 1e-2 * f32 and e4m3 != int8, (f32, int8, e4m3)
' "$(score)" "$(score --weights int8)" "$(score --weights e4m3)"
! "$tandem" eval "$dir/out" --data "$source/configs/tiny.toml" --weights int8 --dtype bf16 2>"$dir/error" || exit 1
grep -qF -- '--weights int8 with --dtype bf16: expected f32' "$dir/error" || { cat "$dir/error"; exit 1; }
CUDA_VISIBLE_DEVICES='' refuses 4 '--device gpu: this build has no CUDA, or this machine no GPU' "$dir/out" --prompts "$dir/none" --weights int8 --device gpu
refuses 4 'weights in int8: heads x head_dim = ' "$dir/out" --prompts "$dir/none" --weights int8 --tp 4
refuses 2 '--batch 0: expected 1 to' "$dir/out" --prompts "$dir/none" --batch 0
echo '[]' >"$dir/messages"
refuses 2 'no tokenizer' "$dir/out" --chat "$dir/messages"
refuses 2 '--prompts' "$dir/out" --prompts "$dir/none" --prompt x
refuses 3 'config.json' "$dir/nowhere" --prompt x
refuses 2 'model.heads = 4: expected a multiple of tp = 3' "$dir/out" --prompt x --tp 3
refuses 2 'tp 0: expected at least 1' "$dir/out" --prompt x --ranks 0
refuses 2 'temperature -1' "$dir/out" --prompt x --temperature -1
refuses 2 "stop '': expected" "$dir/out" --prompt x --stop ''
refuses 2 'top_k -1' "$dir/out" --prompt x --top-k -1
refuses 2 'top_p 0' "$dir/out" --prompt x --top-p 0
refuses 2 "codec 'int9': expected one of none" "$dir/out" --prompt x --tp 2 --codec int9
refuses 2 "codec 'int8': one tensor-parallel rank" "$dir/out" --prompt x --codec int8
refuses 2 '--allow-uncompressed without a codec' "$dir/out" --prompt x --tp 2 --allow-uncompressed
refuses 2 "prefill 'iso' with one rank" "$dir/out" --prompt x --prefill iso
refuses 2 'dtype' "$dir/out" --prompt x --dtype f16
# One flipped bit of one weight: both commands name the tensor.
weights="$dir/out/final/model.safetensors"
cp "$weights" "$dir/whole"
size=$(stat -c %s "$weights")
byte=$(tail -c 1 "$weights" | od -An -tu1)
printf "\\x$(printf %02x $((byte ^ 1)))" | dd of="$weights" bs=1 seek=$((size - 1)) conv=notrunc status=none
refuses 3 "model.safetensors: tensor '" "$dir/out" --prompt x
code=0
"$tandem" eval "$dir/out" --data "$source/include" 2>"$dir/error" || code=$?
[ "$code" = 3 ] && grep -qF "model.safetensors: tensor '" "$dir/error" ||
  { echo "eval of damaged weights: exit $code"; cat "$dir/error"; exit 1; }
mv "$dir/whole" "$weights"
# Finite weights with non-finite results, in a model without hashes.
python3 - "$dir/out/final" "$dir/huge" <<'END'
import json, os, struct, sys
source, huge = sys.argv[1:]
os.mkdir(huge)
data = open(source + "/model.safetensors", "rb").read()
size = struct.unpack("<Q", data[:8])[0]
header, body = json.loads(data[8:8 + size]), bytearray(data[8 + size:])
del header["__metadata__"]
begin, end = header["model.norm.weight"]["data_offsets"]
body[begin:end] = struct.pack("<f", 3e38) * ((end - begin) // 4)
text = json.dumps(header).encode()
open(huge + "/model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + body)
open(huge + "/config.json", "w").write(open(source + "/config.json").read())
END
refuses 2 'logits after token' "$dir/huge" --prompt x --top-p 0.9
code=0
"$tandem" eval "$dir/huge" --data "$source/include" >"$dir/error" 2>&1 || code=$?
[ "$code" = 2 ] && grep -q 'bits per byte: expected a finite number' "$dir/error" ||
  { echo "eval of values out of range: exit $code"; cat "$dir/error"; exit 1; }
truncate -s -100 "$dir/out/final/model.safetensors"
refuses 3 'model.safetensors' "$dir/out" --prompt x
echo "the same bytes on 1, 2 and 4 ranks"
