#!/usr/bin/env python3
"""Writes the fixtures of families_test.cc and huggingface_test.sh: what transformers computes.

make.py models FILE: small models of all families whose weights are a function of their names and
positions (see `weights`), so that only configurations, tokens, logits and losses are stored.
make.py gradients FILE: gradients of some of those models, by tensor: their norm, and the product with `weights` of
the tensor's name + ".probe". Windows are given as a mask, as to transformers 4.44.
Models that FILE has are left as they are.
make.py folder DIR: a Llama as save_pretrained leaves it: bf16, in several files, with a tokenizer.

Needs torch and transformers; the committed fixtures are of 5.24 (and, in form "4", of 4.44).
"""
import json
import os
import sys

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

MAJOR = transformers.__version__.split(".")[0]
EXPERTS = {"experts_implementation": "eager"} if MAJOR == "5" else {}  # others have no f64
PROMPT = [256, 35, 105, 110, 99, 108, 117, 100, 101, 32, 60, 115, 116, 100, 105, 111, 46, 104, 62, 10]
NEW = 24
BASE = dict(vocab_size=257, hidden_size=32, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
            bos_token_id=256, eos_token_id=None, pad_token_id=None)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)

MODELS = {
    "llama": ("llama", dict(num_key_value_heads=8)),
    "llama3": ("llama", dict(rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=True)),
    "llama_linear": ("llama", dict(rope_scaling={"rope_type": "linear", "factor": 4.0})),
    "llama_dynamic": ("llama", dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0})),
    "mistral": ("mistral", dict(sliding_window=8)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2_window": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen2_moe": ("qwen2_moe", dict(MOE, shared_expert_intermediate_size=40, decoder_sparse_step=2)),
}
MODELS_5 = {
    "llama_wide_heads": ("llama", dict(head_dim=16, rms_norm_eps=1e-5)),
    "llama3_wide_heads": ("llama", dict(head_dim=16, rope_scaling=LLAMA3, rope_theta=500000.0)),
    "llama_yarn": ("llama", dict(head_dim=16, rope_scaling={"rope_type": "yarn", "factor": 4.0,
                                               "original_max_position_embeddings": 16})),
    "qwen2_yarn": ("qwen2", dict(head_dim=16, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16,
        "beta_slow": 2, "attention_factor": 1.25, "truncate": False})),
    "llama_mscale": ("llama", dict(rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 2.0,
        "mscale_all_dim": 0.5})),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "qwen3_moe": ("qwen3_moe", dict(MOE, head_dim=16, norm_topk_prob=True)),
    "llama_bias": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen3_bias": ("qwen3", dict(head_dim=16, attention_bias=True)),
    "smollm3": ("smollm3", dict(no_rope_layer_interval=2, tie_word_embeddings=True)),
    "phi3": ("phi3", dict(sliding_window=8)),
    "phi3_partial": ("phi3", dict(hidden_size=128, rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75})),
    "granite": ("granite", dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.4,
                                logits_scaling=4.0, tie_word_embeddings=True)),
    "ernie4_5": ("ernie4_5", dict(head_dim=16)),
    "olmo2": ("olmo2", dict()),
    "olmo2_bias": ("olmo2", dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4,
                                 rope_scaling=LLAMA3, rope_theta=500000.0)),
    "gemma2": ("gemma2", dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=8, attn_logit_softcapping=4.0,
                              final_logit_softcapping=6.0)),
    "gemma3": ("gemma3_text", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8, layer_types=[
        "sliding_attention", "sliding_attention", "full_attention"], rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=8, num_experts_per_tok=3, head_dim=8, sliding_window=8,
                                hidden_size=64, intermediate_size=64,
                                swiglu_limit=0.75, rope_parameters={
                                    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
                                    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16})),
    "ernie4_5_bias": ("ernie4_5", dict(head_dim=16, use_bias=True, tie_word_embeddings=False)),
}

# Norms of Gemma 2 and 3 without what else these have; the configuration stored is this one.


def weights(name, shape):
    """Multiples of a power of two with 7 bits: the same in f32, bf16 and f16."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    count = int(np.prod(shape))
    x = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    k = ((x ^ (x >> np.uint64(31))) >> np.uint64(57)).astype(np.int64) - 64
    if name.endswith("norm.weight"):
        values = 1 + (k >> 1) / 64
    else:
        wide = any(text in name for text in ("embed_tokens", "lm_head", "gate.weight", ".bias"))
        values = k / (64 if wide else 256)
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def make_model(kind, options):
    settings = {**BASE, **options}
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    return model


def load(model, kind):
    """Weights by the names that save_pretrained writes."""
    import tempfile

    from safetensors import safe_open
    from safetensors.torch import save_file
    with tempfile.TemporaryDirectory() as folder:
        model.float().save_pretrained(folder)
        path = os.path.join(folder, "model.safetensors")
        with safe_open(path, "pt") as file:
            names = {name: file.get_slice(name).get_shape() for name in file.keys()}
        tensors = {name: weights(name, shape).float() for name, shape in names.items()}
        save_file(tensors, path, {"format": "pt"})
        loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager",
                                                      torch_dtype=torch.float32, **EXPERTS)
        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
    return loaded.double().eval(), config, {n: list(s) for n, s in names.items()}


def describe(kind, options):
    model, config, names = load(make_model(kind, options), kind)
    tokens, gap = list(PROMPT), 1e9
    with torch.no_grad():
        for i in range(NEW):
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
            if i == 0:
                first = logits
            best = torch.topk(logits, 2).values
            gap = min(gap, float(best[0] - best[1]))
            tokens.append(int(logits.argmax()))
        logits = model(torch.tensor([tokens])).logits[0].double()
        nll = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    assert gap > 1e-4, (kind, gap)
    return {"config": config, "tensors": len(names), "tokens": tokens[len(PROMPT):],
            "logits": [float(f"{x:.8g}") for x in first[::8]],
            "last_logits": [float(f"{x:.8g}") for x in logits[-1][::8]],
            "nll": float(f"{nll:.9g}")}


def make_models(path):
    found = json.load(open(path)) if os.path.exists(path) else {}
    torch.set_num_threads(1)
    for name, (kind, options) in {**MODELS, **(MODELS_5 if MAJOR == "5" else {})}.items():
        if MAJOR == "4" and "sliding_window" in options:
            continue  # 4.44 ignores windows here
        if f"{name}, form {MAJOR}" in found:
            continue
        found[f"{name}, form {MAJOR}"] = describe(kind, options)
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(m, sort_keys=True)}"
                                      for n, m in sorted(found.items())) + "\n}\n")


GRADIENTS = {"llama3, form 4": "llama3", "mistral, form 5": "mistral", "mixtral, form 4": "mixtral",
             "qwen2, form 4": "qwen2", "qwen2_moe, form 4": "qwen2_moe"}
GRADIENTS |= {f"{name}, form 5": name for name in (
    "llama_bias", "smollm3", "phi3", "phi3_partial", "granite", "ernie4_5", "olmo2", "gemma2", "gemma3", "gpt_oss")}


def window_mask(count, window):
    distance = torch.arange(count)[:, None] - torch.arange(count)[None]
    hidden = (distance < 0) | (distance >= (window or count))
    return torch.zeros(1, 1, count, count, dtype=torch.float64).masked_fill(hidden, -1e30)


def make_gradients(path):
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "models.json")) as file:
        cases = json.load(file)
    found = json.load(open(path)) if os.path.exists(path) else {}
    for name, model_name in GRADIENTS.items():
        if name in found:
            continue
        kind, options = {**MODELS, **MODELS_5}[model_name]
        model, _, names = load(make_model(kind, options), kind)
        tokens = PROMPT + cases[name]["tokens"]
        own_mask = "gemma" in kind or kind == "gpt_oss"
        mask = None if own_mask else window_mask(len(tokens), options.get("sliding_window"))
        logits = model(torch.tensor([tokens]), attention_mask=mask).logits[0].double()
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
        assert abs(loss.item() - cases[name]["nll"]) < 1e-5 * loss.item(), (name, loss, cases[name]["nll"])
        loss.backward()
        parameters = dict(model.named_parameters())
        found[name] = {tensor: [float(f"{x:.8g}") for x in (
            parameters[tensor].grad.norm(), (parameters[tensor].grad * weights(tensor + ".probe", shape)).sum())]
            for tensor, shape in names.items()}
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(m, sort_keys=True)}"
                                      for n, m in sorted(found.items())) + "\n}\n")


def make_folder(path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    os.makedirs(path, exist_ok=True)
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "..")
    texts = [open(os.path.join(root, "README.md")).read()]
    bpe = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(
        __import__("tokenizers").Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bpe.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    torch.manual_seed(7)
    model = make_model("llama", dict(
        vocab_size=320, head_dim=16, num_hidden_layers=2, num_attention_heads=4, hidden_size=32,
        rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=[1, 2], initializer_range=0.3)).to(torch.bfloat16)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(path, max_shard_size="30KB")
    with open(os.path.join(path, "tokenizer.json"), "w") as file:
        file.write(bpe.to_str(pretty=True) + "\n")
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    prompts = ["Tandem trains", "int main() {", "größer "]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([bpe.encode(prompt).ids])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=24)[0].tolist()
        new = out[ids.shape[1]:]
        while new and new[-1] in (1, 2):
            new.pop()
        expected.append({"prompt": prompt, "prompt_tokens": ids.shape[1], "token_ids": new})
    with open(os.path.join(path, "expected.json"), "w") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    {"models": make_models, "gradients": make_gradients, "folder": make_folder}[sys.argv[1]](sys.argv[2])
