#!/usr/bin/env python3
"""Random tokenizers and texts: tokens and decoded texts of `tandem tokenize` equal those of Hugging Face's
tokenizers and of sentencepiece. Exits with 77 if these packages are not installed.

With --file FILE: a tokenizer.json or SentencePiece .model to compare instead of random ones."""
import argparse
import pathlib
import random
import sys
import tempfile

try:
    import sentencepiece
    import tokenizers

    import generated
except ImportError as failed:
    print(f"skipped: {failed}")
    sys.exit(77)
import texts


class HuggingFace:
    def __init__(self, path):
        self.path = path
        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()][:50]
        self.size = self.tokenizer.get_vocab_size()

    def encode(self, text, adds):
        return self.tokenizer.encode(text, add_special_tokens=adds).ids

    def decode(self, tokens, skips):
        return self.tokenizer.decode(tokens, skip_special_tokens=skips)


class SentencePiece:
    def __init__(self, path):
        self.path = path
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=path)
        self.size = self.pieces.vocab_size()
        ids = range(self.size)
        self.added = [self.pieces.id_to_piece(id) for id in ids if self.pieces.is_control(id)][:50]

    def encode(self, text, adds):
        return self.pieces.encode(text, add_bos=adds)

    def decode(self, tokens, skips):
        return self.pieces.decode(tokens)


def compare(tandem, oracle, lines):
    """Number of differences; prints the first."""
    differences = 0

    def check(what, got, expected):
        nonlocal differences
        for line, ours, theirs in zip(lines, got, expected):
            if ours != theirs:
                differences += 1
                if differences == 1:
                    print(f"{oracle.path}: {what} of {line!a}:\n  {ours!a}\nexpected\n  {theirs!a}")

    encoded = [oracle.encode(line, False) for line in lines]
    check("tokens", texts.tokenize(tandem, oracle.path, lines), encoded)
    some = lines[:len(lines) // 10 + 1]
    check("tokens with special ones", texts.tokenize(tandem, oracle.path, some, "--add-special"),
          [oracle.encode(line, True) for line in some])
    for flags in ([], ["--skip-special"]):
        check("the text of the tokens " + " ".join(flags),
              texts.tokenize(tandem, oracle.path, encoded, "--decode", *flags),
              [oracle.decode(tokens, bool(flags)) for tokens in encoded])
    return differences


def train_sentencepiece(chosen, corpus, folder, kind):
    path = pathlib.Path(folder) / "corpus.txt"
    path.write_text("\n".join(corpus))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path), model_prefix=f"{folder}/pieces", model_type=kind, vocab_size=chosen.choice((500, 900)),
        byte_fallback=chosen.random() < .7, hard_vocab_limit=False,
        normalization_rule_name=chosen.choice(("identity", "nmt_nfkc", "nmt_nfkc_cf", "nfkc")),
        remove_extra_whitespaces=chosen.random() < .5, add_dummy_prefix=chosen.random() < .7,
        treat_whitespace_as_suffix=chosen.random() < .3, split_by_whitespace=chosen.random() < .7,
        user_defined_symbols=chosen.choice(([], ["<tool>", "[X]", "ﬁ", "the"])), character_coverage=.99,
        minloglevel=2)
    return f"{folder}/pieces.model"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--corpus", help="folder of *.md files to train on")
    parser.add_argument("--file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizers", type=int, default=3)
    parser.add_argument("--texts", type=int, default=300, help="for each tokenizer")
    parser.add_argument("--all-code-points", action="store_true")
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    differences = compared = 0

    def run(oracle, code_points):
        nonlocal differences, compared
        lines = [texts.random_text(chosen, oracle.added) for _ in range(arguments.texts)]
        lines += texts.all_code_points() if code_points else []
        differences += compare(arguments.tandem, oracle, lines)
        compared += len(lines)

    if arguments.file:
        oracle = HuggingFace if arguments.file.endswith(".json") else SentencePiece
        run(oracle(arguments.file), arguments.all_code_points)
    else:
        corpus = [path.read_text() for path in sorted(pathlib.Path(arguments.corpus).glob("*.md"))[:6]]
        corpus += ["한국어 中文文本，測試。 日本語 Привет мир עברית العربية é à café 123456 ١٢٣ "] * 20
        with tempfile.TemporaryDirectory() as folder:
            for index in range(arguments.tokenizers):
                code_points = arguments.all_code_points and index < 4
                path = pathlib.Path(folder) / f"{index}.json"
                path.write_text(generated.make_json(chosen, corpus)[0])
                run(HuggingFace(str(path)), code_points)
                kind = ("bpe", "unigram")[index % 2]
                run(SentencePiece(train_sentencepiece(chosen, corpus, folder, kind)), code_points)
    print(f"{compared} texts, {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
