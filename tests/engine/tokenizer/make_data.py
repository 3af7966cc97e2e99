#!/usr/bin/env python3
"""Writes data/: small tokenizers of each kind of file, and expected.json: texts, their tokens and the text of
these, as tokenizers, sentencepiece and tiktoken have them. Needs these packages."""
import base64
import json
import pathlib
import random

import sentencepiece
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import generated
import texts

FOLDER = pathlib.Path(__file__).resolve().parent / "data"
ROOT = FOLDER.parent.parent.parent.parent
CORPUS = [(ROOT / "docs" / name).read_text() for name in ("training.md", "pipelines.md", "glossary.md")]
CORPUS += ["한국어 문장입니다. 中文文本，測試。 日本語のテキスト Привет мир ελληνικά עברית العربية é à ü café 123456 "] * 20


def byte_level():
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(generated.LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A",
                                      special_tokens=[("<|begin_of_text|>", begin)])])
    return tokenizer


def byte_fallback():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = generated.SPACE
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(space, "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=800, show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    root = json.loads(tokenizer.to_str())
    root["pre_tokenizer"] = None
    root["model"]["merges"] = [" ".join(merge) for merge in root["model"]["merges"]]
    return Tokenizer.from_str(json.dumps(root)), root


def ranks_of(tokenizer):
    """Byte strings in the order of their ids, single bytes first."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    mapped = {}
    for byte in range(256):
        printable = 0x20 < byte < 0x7f or (byte > 0xa0 and byte != 0xad)
        mapped[byte] = chr(byte) if printable else None
    free = iter(range(256, 512))
    by_character = {mapped[byte] or chr(next(free)): byte for byte in range(256)}
    assert set(by_character) == set(characters)
    vocab = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    tokens = [bytes(by_character[character] for character in text) for text, _ in vocab]
    return [token for token in tokens if len(token) == 1] + [token for token in tokens if len(token) > 1]


# Replacements of characters, in hexadecimal, as those of NFKC: several become one, one several or none.
RULES = ("41\t61", "42\t62", "61 301\te1", "65 301\te9", "301\t", "fb01\t66 69", "2f\t2215", "a0\t20", "9\t20", "a\t20",
         "d\t20", "3000\t20", "200d\t", "1100 1161\tac00", "1100\t3131", "b2\t32")


def unigram_files(lines, expected):
    """A SentencePiece model and a tokenizer.json of type unigram that replace characters."""
    rules = FOLDER / "rules.tsv"
    rules.write_text("\n".join(RULES) + "\n")
    corpus = FOLDER / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(FOLDER / "small_unigram"), model_type="unigram", vocab_size=800,
        byte_fallback=True, normalization_rule_tsv=str(rules), user_defined_symbols=["<tool>", "A/B"], minloglevel=2)
    for path in (rules, corpus, FOLDER / "small_unigram.vocab"):
        path.unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "small_unigram.model"))
    expected["small_unigram.model"] = [[line, pieces.encode(line)] for line in lines]
    tokenizer = generated.of_pieces(random.Random(2), CORPUS)
    characters = generated.map_of_model((FOLDER / "small_unigram.model").read_bytes())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(characters), normalizers.Strip(right=True),
                                                 normalizers.Replace(Regex(" {2,}"), generated.SPACE)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))])
    (FOLDER / "small_unigram.json").write_text(tokenizer.to_str() + "\n")
    expected["small_unigram.json"] = [[line, tokenizer.encode(line, add_special_tokens=False).ids] for line in lines]


def random_lines():
    chosen = random.Random(7)
    return [""] + [texts.random_text(chosen, ["<tool>", " <tool>\n", "<|begin_of_text|>"])[:120] for _ in range(60)]


def main():
    FOLDER.mkdir(exist_ok=True)
    lines = random_lines()
    expected = {}
    unigram_files(lines + ["ABáéA/B ﬁx/y\u200d <tool> ᄀ\u1161ᄀ²", " \t a\u0301  ﬁ\r\n"], expected)
    level = byte_level()
    (FOLDER / "small_bytes.json").write_text(level.to_str() + "\n")
    expected["small_bytes.json"] = [
        [line, level.encode(line, add_special_tokens=False).ids] for line in lines]
    fallback, root = byte_fallback()
    (FOLDER / "small_fallback.json").write_text(json.dumps(root) + "\n")
    expected["small_fallback.json"] = [
        [line, fallback.encode(line, add_special_tokens=False).ids] for line in lines]
    path = FOLDER / "corpus.txt"
    path.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path), model_prefix=str(FOLDER / "small"), model_type="bpe", vocab_size=800, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, user_defined_symbols=["<tool>"],
        minloglevel=2)
    path.unlink()
    (FOLDER / "small.vocab").unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "small.model"))
    expected["small.model"] = [[line, pieces.encode(line)] for line in lines]
    ranks = ranks_of(level)
    (FOLDER / "cl100k_small.tiktoken").write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)))
    known = {token: rank for rank, token in enumerate(ranks)}
    encoding = tiktoken.Encoding("small", pat_str=generated.LLAMA3, mergeable_ranks=known, special_tokens={})
    expected["cl100k_small.tiktoken"] = [[line, encoding.encode_ordinary(line)] for line in lines
                                         if "<|endoftext|>" not in line]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
             for rank, token in enumerate(ranks)]
    config = {"pattern": generated.O200K, "num_vocab_tokens": len(ranks), "default_vocab_size": 510,
              "default_num_special_tokens": 10, "version": "v3"}
    (FOLDER / "tekken_small.json").write_text(json.dumps({"config": config, "vocab": vocab}) + "\n")
    encoding = tiktoken.Encoding("small", pat_str=generated.O200K, special_tokens={},
                                 mergeable_ranks={token: rank for token, rank in known.items() if rank < 500})
    expected["tekken_small.json"] = [[line, [token + 10 for token in encoding.encode_ordinary(line)]]
                                     for line in lines]
    body = json.dumps(expected).replace("]], [", "]],\n[")
    (FOLDER / "expected.json").write_text(body + "\n")


if __name__ == "__main__":
    main()
