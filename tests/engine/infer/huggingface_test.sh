#!/usr/bin/env bash
# huggingface_test.sh TANDEM SOURCE_DIR: a folder that save_pretrained wrote (bf16, several files, llama3
# scaling, a tokenizer) is continued with the tokens of transformers, by threads and by processes.
set -eu
tandem=$1 source=$2
model=$source/tests/engine/infer/families/llama3
dir=$(mktemp -d)
export TANDEM_CACHE_DIR=$dir/cache
trap 'rm -rf "$dir"' EXIT

# check FILE: tokens of the prompt and after it are the expected ones.
check() {
  python3 - "$model/expected.json" "$1" "$2" <<'END'
import json
import sys
expected = json.load(open(sys.argv[1]))[int(sys.argv[3])]
found = json.load(open(sys.argv[2]))
for key, value in expected.items():
    if found[key] != value:
        sys.exit(f"{key} is {found[key]}: expected {value}")
END
}
prompts=('Tandem trains' 'int main() {' 'größer ')
for i in 0 1 2; do
  for ranks in 1 2 4; do
    "$tandem" generate "$model" --prompt "${prompts[$i]}" --max-tokens 24 --tp $ranks \
      --json "$dir/json" >"$dir/text" 2>"$dir/speed"
    check "$dir/json" $i
  done
done
for ranks in 2 4; do
  "$source/tests/comm/processes/launch.sh" $ranks "$tandem" generate "$model" --prompt "${prompts[1]}" \
    --max-tokens 24 --json "$dir/json" >"$dir/text" 2>"$dir/speed" || { cat "$dir/speed"; exit 1; }
  check "$dir/json" 1
done

# A chat is written by the folder's template, whose tokens are those of its text, and answered as by --prompts.
cp -r "$model" "$dir/chat"
cat >"$dir/chat/chat_template.jinja" <<'END'
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '[' + message.role + '] ' + message.content | trim + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
END
echo '[{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "größer?"}]' >"$dir/messages"
echo "{\"messages\": $(cat "$dir/messages"), \"max_tokens\": 9}" >"$dir/lines"
"$tandem" generate "$dir/chat" --chat "$dir/messages" --max-tokens 9 --tp 2 --json "$dir/json" >"$dir/text" 2>/dev/null
"$tandem" generate "$dir/chat" --prompts "$dir/lines" >"$dir/texts" 2>/dev/null
python3 - "$dir/json" "$dir/texts" <<'END'
import json
import sys
one, line = (json.load(open(path)) for path in sys.argv[1:])
assert one["prompt"] == "[system] Be brief.\n[user] größer?\n[assistant]", one
for key in ("text", "token_ids", "prompt_tokens", "ended_by"):
    assert one[key] == line[key], (key, one, line)
END
[ "$(head -c 1 "$dir/text")" != '[' ] || { echo "the chat is written, too"; exit 1; }
refuses_chat() { # TEXT COMMAND...
  local code=0
  "$tandem" generate "$dir/chat" --chat "$dir/messages" >/dev/null 2>"$dir/errors" || code=$?
  [ $code = 2 ] && [ "$(wc -l <"$dir/errors")" = 1 ] && grep -qF "$1" "$dir/errors" ||
    { echo "exit $code, expected: $1"; cat "$dir/errors"; exit 1; }
}
echo '[{"content": "x"}]' >"$dir/messages"
refuses_chat 'messages: chat: message 1: expected an object with a role'
echo '{' >"$dir/messages"
refuses_chat 'messages: parse error at line'
echo '[{"role": "tool"}]' >"$dir/messages"
refuses_chat 'chat_template.jinja: line 2: the template refuses the messages: no tools'
echo '{% for %}' >"$dir/chat/chat_template.jinja"
refuses_chat "chat_template.jinja: line 1: unexpected the end of the tag"
rm "$dir/chat/chat_template.jinja"
refuses_chat 'no chat template: expected chat_template.jinja'

# The end of a text, and sampling, are as generation_config.json says.
cp -r "$model" "$dir/copy"
edit() {
  python3 - "$dir/copy/$1" "$2" <<'END'
import json
import sys
path, changes = sys.argv[1:]
root = json.load(open(path))
root.update(json.loads(changes))
json.dump(root, open(path, "w"))
END
}
generate() {
  "$tandem" generate "$dir/copy" --prompt 'int main() {' --max-tokens 24 --json "$dir/json" "$@" \
    >"$dir/text" 2>"$dir/errors"
}
edit generation_config.json '{"eos_token_id": [318]}'
generate
grep -q '"ended_by": "end of text"' "$dir/json" && grep -q '"tokens": 5,' "$dir/json" || { cat "$dir/json"; exit 1; }
edit generation_config.json '{"eos_token_id": 1, "do_sample": true, "temperature": 2.0, "top_k": 5,
  "top_p": 0.9, "no_repeat_ngram_size": 3}'
generate --seed 3
grep -q 'generation_config.json: not applied: no_repeat_ngram_size' "$dir/errors" || { cat "$dir/errors"; exit 1; }
cp "$dir/json" "$dir/sampled"
"$tandem" generate "$model" --prompt 'int main() {' --max-tokens 24 --seed 3 --temperature 2 --top-k 5 \
  --top-p 0.9 --json "$dir/json" >"$dir/text" 2>"$dir/speed"
[ "$(grep '"text"' "$dir/json")" = "$(grep '"text"' "$dir/sampled")" ] || { echo 'another sample'; exit 1; }
generate --temperature 0
check "$dir/json" 1

# The end token of the tokenizer's files ends a text, too, and a repetition penalty is that of requests.
cp -r "$model" "$dir/side"
greedy() { "$tandem" generate "$dir/side" --max-tokens 12 --temperature 0 "$@" 2>"$dir/errors" || { cat "$dir/errors"; exit 1; }; }
greedy --prompt 'int main() {' --json "$dir/json" >"$dir/text"
python3 - "$dir" <<'END'
import json, sys
folder = sys.argv[1]
ids = json.load(open(folder + "/json"))["token_ids"]
texts = {id: text for text, id in json.load(open(folder + "/side/tokenizer.json"))["model"]["vocab"].items()}
end = next(i for i, id in enumerate(ids) if i and id not in ids[:i] and texts.get(id, "\u0120").isascii())
json.dump({"eos_token": {"content": texts[ids[end]]}}, open(folder + "/side/tokenizer_config.json", "w"))
json.dump(ids[:end], open(folder + "/expected", "w"))
END
greedy --prompt 'int main() {' --json "$dir/json" >"$dir/text"
python3 -c 'import json, sys; f = sys.argv[1]; j = json.load(open(f + "/json")); assert (j["token_ids"], j["ended_by"]) == (
  json.load(open(f + "/expected")), "end of text"), j' "$dir"
rm "$dir/side/tokenizer_config.json"
echo '{"prompt": "int main() {", "repetition_penalty": 1.7}' >"$dir/lines"
greedy --prompts "$dir/lines" >"$dir/penalty"
echo '{"eos_token_id": 1, "repetition_penalty": 1.7}' >"$dir/side/generation_config.json"
greedy --prompt 'int main() {' --json "$dir/json" >"$dir/text"
! grep -q 'not applied' "$dir/errors" || { cat "$dir/errors"; exit 1; }
python3 -c 'import json, sys; a, b = (json.load(open(sys.argv[1] + name))["token_ids"] for name in ("/json", "/penalty")); assert a == b, (a, b)' "$dir"

refused() {
  if generate --tp 2; then echo "accepted: $1"; exit 1; fi
  grep -qF "$1" "$dir/errors" || { echo "expected '$1':"; cat "$dir/errors"; exit 1; }
  [ "$(wc -l <"$dir/errors")" = 1 ] || { echo "more than one line:"; cat "$dir/errors"; exit 1; }
}
edit generation_config.json '{"top_p": 3, "no_repeat_ngram_size": null}'
refused 'generation_config.json: top_p 3: expected above 0 and at most 1'
edit generation_config.json '{"top_p": "x"}'
refused 'generation_config.json: top_p = "x": expected a number'
edit generation_config.json '{"top_p": 1, "eos_token_id": [-1]}'
refused 'generation_config.json: eos_token_id = -1: expected tokens from 0'
edit generation_config.json '{"eos_token_id": 1}'
edit config.json '{"attention_bias": true}'
refused "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"
edit config.json '{"attention_bias": false, "mlp_bias": 1}'
refused 'config.json: mlp_bias = 1: expected true or false'
edit config.json '{"mlp_bias": false, "rope_parameters": {"rope_type": "longrope"}}'
refused 'config.json: rope_parameters.rope_type = "longrope": expected default, linear, dynamic, llama3 or yarn'

# Trained further, it remains a model of its family.
shape=(model.vocab=320 model.hidden=32 model.layers=2 model.heads=4 model.kv_heads=2 model.head_dim=16
  model.ffn=48 model.max_seq=64 model.norm_eps=1e-6 model.rope_theta=500000 model.rope_type=llama3
  model.rope_factor=8 model.rope_original_max_seq=16 "data.paths=[\"$source/include\"]"
  "data.tokenizer=$model/tokenizer.json" train.seq=32 train.batch=4)
tune() {
  "$tandem" train "$source/configs/tiny.toml" --init "$model" --set "${shape[@]}" "$@" >"$dir/log" 2>"$dir/errors"
}
tune train.steps=2 checkpoint.export_dtype=bf16 --out "$dir/tuned" || { cat "$dir/errors"; exit 1; }
grep -q '"rope_type": "llama3"' "$dir/tuned/final/config.json" &&
  grep -q '"model_type": "llama"' "$dir/tuned/final/config.json" || { cat "$dir/tuned/final/config.json"; exit 1; }
"$tandem" generate "$dir/tuned" --prompt 'int main() {' --max-tokens 4 --tp 4 >"$dir/text" 2>"$dir/errors" ||
  { cat "$dir/errors"; exit 1; }
if tune model.rope_factor=4 --out "$dir/other"; then echo 'accepted: another scaling'; exit 1; fi
grep -q 'model.rope_factor is 8 in this model: expected 4' "$dir/errors" || { cat "$dir/errors"; exit 1; }

# A model with biases is trained as a Qwen2, by any number of ranks.
for layout in parallel.tp=1 parallel.tp=2 'parallel.dp=2'; do
  "$tandem" train "$source/configs/tiny.toml" --set model.qkv_bias=true model.kv_heads=2 train.steps=3 $layout \
    "data.paths=[\"$source/include/tandem\"]" --out "$dir/$layout" >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
  grep -q '"model_type": "qwen2"' "$dir/$layout/final/config.json" || { cat "$dir/$layout/final/config.json"; exit 1; }
  "$tandem" eval "$dir/$layout" --data "$source/include/tandem/dtype.h" --tp 4 >"$dir/score-$layout"
  cmp "$dir/score-parallel.tp=1" "$dir/score-$layout"
done

# One with norms of the heads of q and k as a Qwen3, and one with a gated shared expert as a Qwen2-MoE.
train_family() {  # family, layouts, keys
  local family=$1 layouts=$2
  shift 2
  for layout in $layouts; do
    "$tandem" train "$source/configs/tiny.toml" --set "$@" train.steps=3 "$layout" \
      "data.paths=[\"$source/include/tandem\"]" --out "$dir/$family-$layout" >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }
    grep -q "\"model_type\": \"$family\"" "$dir/$family-$layout/final/config.json" ||
      { cat "$dir/$family-$layout/final/config.json"; exit 1; }
    "$tandem" eval "$dir/$family-$layout" --data "$source/include/tandem/dtype.h" --tp 4 >"$dir/score-$layout"
    cmp "$dir/score-parallel.tp=1" "$dir/score-$layout"
  done
}
train_family qwen3 'parallel.tp=1 parallel.tp=4 parallel.dp=2' model.qk_norm=true
train_family phi3 'parallel.tp=1 parallel.tp=2' model.fused_projections=true model.rotary_dim=8
train_family granite 'parallel.tp=1 parallel.tp=2' model.out_bias=true model.qkv_bias=true \
  model.embedding_multiplier=12 model.residual_multiplier=0.22 model.logits_scaling=4
train_family olmo2 'parallel.tp=1 parallel.tp=2' model.qk_norm=true model.qk_norm_all_heads=true \
  model.norm_position=post
gemma='model.norm_position=both model.zero_centered_norms=true model.embedding_multiplier=8
  model.mlp_activation=gelu_pytorch_tanh model.logits_softcap=30 model.sliding_window=8'
train_family gemma2 'parallel.tp=1 parallel.tp=2' $gemma model.attention_softcap=50 model.full_attention_freq=2
train_family gemma3_text 'parallel.tp=1 parallel.tp=2' $gemma model.qk_norm=true model.rope_local_theta=1000
train_family gpt_oss 'parallel.tp=1 parallel.tp=2 parallel.dp=2' model.experts=4 model.swiglu_limit=1 model.expert_bias=true \
  model.router_logit_bias=true model.fused_experts=true model.qkv_bias=true model.out_bias=true \
  model.attention_sinks=true model.sliding_window=8 model.full_attention_freq=2
train_family qwen2_moe 'parallel.tp=1 parallel.tp=2' model.qkv_bias=true model.experts=4 model.expert_ffn=32 \
  model.shared_ffn=64 model.shared_expert_gate=true
