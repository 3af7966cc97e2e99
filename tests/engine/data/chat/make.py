#!/usr/bin/env python3
"""make.py > cases.json: chats as data sets hold them, the tokens and the mask of answers that transformers makes of them
with each template, and the loss and the norm of its gradients of small models on them (AdamW, three steps, f64).

Writes examples/chat/tokenizer.json, too. Answers are found by rendering the messages before each one, or where a template marks them
by apply_chat_template(return_assistant_tokens_mask=True). Needs torch and transformers; the committed file is of 4.44."""
import json
import os
import random
import sys

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..", "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tests", "engine", "infer", "families"))
import make as families  # noqa: E402

CHATML = ("{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
          "{%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
          "{%- for message in messages %}{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}BEGIN"
          "{{- message.content + '<|im_end|>' }}END{{- '\\n' }}"
          "{%- elif not (message.role == 'system' and loop.first) %}"
          "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
          "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")
TEMPLATES = {
    "chatml": CHATML.replace("BEGIN", "").replace("END", ""),
    "marked": CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}"),
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
              "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}"
              "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
               "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
               "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
               "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
               "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
}
MODELS = {"chatml": ("qwen2", dict(tie_word_embeddings=True)), "marked": None,
          "llama3": ("llama", dict(rope_scaling=families.LLAMA3, rope_theta=500000.0)),
          "mistral": ("mistral", dict(sliding_window=None))}
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>"]
WORDS = ("rank waits for the other one; größer? 漢字 🙂 a+b = 12345 don't It's  two\nlines\tand \" quotes\\ "
         "Tandem trains fast [INST] <tool> é").split(" ")


def make_tokenizer():
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator([open(os.path.join(ROOT, "README.md")).read()], trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bpe.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    with open(os.path.join(ROOT, "examples", "chat", "tokenizer.json"), "w") as file:
        file.write(bpe.to_str(pretty=True) + "\n")


def text(rng, most):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def make_chat(rng, name):
    """A line, and the messages that it stands for."""
    form, system = rng.randrange(4), text(rng, 5) if name != "mistral" and rng.random() < 0.5 else ""
    messages = [{"role": "system", "content": system}] if system else []
    if form == 0:
        line = {"instruction": text(rng, 8), "output": text(rng, 12)}
        if rng.random() < 0.5:
            line["input"] = rng.choice(["", text(rng, 6)])
        question = line["instruction"] + ("\n\n" + line["input"] if line.get("input") else "")
        if system:
            line["system"] = system
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": line["output"]}]
        return line, messages
    for _ in range(rng.randint(1, 3)):
        messages += [{"role": "user", "content": text(rng, 7)}, {"role": "assistant", "content": text(rng, 9)}]
    if form == 1:
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages]
        if not system:
            return {"conversations": turns, "id": "x"}, messages
        return {"system": system, "conversations": turns[1:]}, messages
    return {"messages": messages}, messages


def open_tokenizer(name):
    file = os.path.join(ROOT, "examples", "chat", "tokenizer.json")
    tokens = dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    if name == "mistral":
        file = os.path.join(ROOT, "tests", "engine", "tokenizer", "data", "small_fallback.json")
        tokens = dict(bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=TEMPLATES[name], **tokens)


def mask_of(tokenizer, name, messages):
    full = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True,
                                         return_assistant_tokens_mask=name == "marked")
    if name == "marked":
        return full["input_ids"], full["assistant_masks"]
    render = lambda count, prompt: tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
    whole = render(len(messages), False)
    encoded = tokenizer(whole, add_special_tokens=False)
    mask = [0] * len(encoded["input_ids"])
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, answered = render(i, True), render(i + 1, False)
        assert whole.startswith(answered) and answered.startswith(prompt)
        first, last = encoded.char_to_token(len(prompt)), encoded.char_to_token(len(answered) - 1)
        mask[first:last + 1] = [1] * (last + 1 - first)
    assert full["input_ids"] == encoded["input_ids"]
    return encoded["input_ids"], mask


def train(name, vocab, chats):
    kind, options = MODELS[name]
    model, config, _ = families.load(families.make_model(
        kind, dict(options, vocab_size=vocab, max_position_embeddings=256, num_hidden_layers=2)), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0)
    losses, norms = [], []
    count = sum(sum(mask[1:]) for _, mask in chats)
    for _ in range(3):
        optimizer.zero_grad()
        loss = 0
        for tokens, mask in chats:
            ids = torch.tensor([tokens])
            labels = torch.where(torch.tensor([mask]) == 1, ids, -100)
            # The mean over the chat's answers, and thereby over those of all.
            part = model(ids, labels=labels).loss * (sum(mask[1:]) / count)
            part.backward()
            loss += part.item()
        losses.append(loss)
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        optimizer.step()
    return {"config": config, "losses": losses, "grad_norms": norms}


def main():
    torch.set_num_threads(1)
    make_tokenizer()
    cases = {}
    for name, template in TEMPLATES.items():
        rng, tokenizer = random.Random(7), open_tokenizer(name)
        made = [make_chat(rng, name) for _ in range(24)]
        chats = [mask_of(tokenizer, name, messages) for _, messages in made]
        cases[name] = {"template": template, "bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token,
                       "chats": [{"line": line, "tokens": tokens, "mask": "".join(map(str, mask))}
                                 for (line, _), (tokens, mask) in zip(made, chats)]}
        if MODELS[name]:
            cases[name].update(train(name, len(tokenizer), chats))
    rows = []
    for name, case in cases.items():
        chats = ",\n".join(json.dumps(chat, ensure_ascii=False) for chat in case.pop("chats"))
        rows.append(f'"{name}": {json.dumps(case, ensure_ascii=False)[:-1]}, "chats": [\n{chats}]}}')
    print("{\n" + ",\n".join(rows) + "\n}")


if __name__ == "__main__":
    main()
