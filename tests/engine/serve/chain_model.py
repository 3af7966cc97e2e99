"""Folders of small models whose next token depends on the last one only, for the tests of serving."""
import array
import json
import os
import struct

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTERS = {byte: chr(byte) for byte in PRINTABLE} | {  # of GPT-2's byte-level tokens
    byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in PRINTABLE)}


def characters(text):
    return "".join(CHARACTERS[byte] for byte in text.encode())


def save_weights(folder, vocab, follows):
    width = (vocab + 15) // 16 * 16
    embed, head = (array.array("f", bytes(4 * vocab * width)) for _ in range(2))
    for token in range(vocab):
        embed[token * width + token] = 1
        head[follows.get(token, 0) * width + token] = 8
    layer = "model.layers.0."
    tensors = {"model.embed_tokens.weight": ([vocab, width], embed), "lm_head.weight": ([vocab, width], head)}
    for name in "model.norm", layer + "input_layernorm", layer + "post_attention_layernorm":
        tensors[name + ".weight"] = [width], array.array("f", [1] * width)
    for name, shape in [(f"self_attn.{k}_proj", [32, width]) for k in "qkv"] + [
            ("self_attn.o_proj", [width, 32]), ("mlp.gate_proj", [32, width]), ("mlp.up_proj", [32, width]), ("mlp.down_proj", [width, 32])]:
        tensors[f"{layer}{name}.weight"] = shape, array.array("f", bytes(4 * shape[0] * shape[1]))
    header, at = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * len(values)]}
        at += 4 * len(values)
    text = json.dumps(header).encode()
    with open(folder + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for _, values in tensors.values()))
    return width


def chain_model(folder, says, special, template):
    """A model that writes `says`, texts of tokens, after a line break, then the last of `special`, which ends it."""
    os.makedirs(folder)
    vocab = {character: byte for byte, character in CHARACTERS.items()}
    for text in says:
        if text not in special:
            vocab.setdefault(characters(text), len(vocab))
    ids = {text: len(vocab) + i for i, text in enumerate(special)}
    follows, last = {}, ord("\n")
    for text in [*says, special[-1]]:
        token = ids[text] if text in ids else vocab[characters(text)]
        follows[last] = last = token
    added = [{"id": number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for text, number in ids.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    size = len(vocab) + len(special)
    width = save_weights(folder, size, follows)
    files = {"tokenizer.json": {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "post_processor": None,
                                "decoder": level, "model": {"type": "BPE", "vocab": vocab, "merges": []}},
             "tokenizer_config.json": {"eos_token": special[-1], "chat_template": template},
             "config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": width,
                             "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                             "intermediate_size": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
                             "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": ids[special[-1]]}}
    for name, content in files.items():
        with open(f"{folder}/{name}", "w") as file:
            json.dump(content, file)
    return folder
