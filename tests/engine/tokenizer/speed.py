#!/usr/bin/env python3
"""Speed of `tandem tokenize` beside Hugging Face's tokenizers, each on one thread: the same documents, whose
tokens must be equal, in turns; the best of several. Needs tokenizers."""
import argparse
import json
import os
import re
import subprocess
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tandem", required=True)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-mb", type=float, default=8)
    parser.add_argument("files", nargs="+", help="a document each")
    arguments = parser.parse_args()
    documents, size = [], 0
    for path in arguments.files:
        with open(path, encoding="utf-8", errors="replace") as file:
            documents.append(file.read())
        size += len(documents[-1].encode())
        if size > arguments.max_mb * 1e6:
            break
    typed = "".join(json.dumps(document) + "\n" for document in documents)
    theirs = tokenizers.Tokenizer.from_file(arguments.tokenizer)
    best = {}
    for _ in range(arguments.repeats):
        begin = time.perf_counter()
        encoded = [one.ids for one in theirs.encode_batch_fast(documents, add_special_tokens=False)]
        best["tokenizers"] = min(best.get("tokenizers", 1e9), time.perf_counter() - begin)
        ran = subprocess.run([arguments.tandem, "tokenize", arguments.tokenizer, "--lines", "--time"], input=typed,
                             capture_output=True, text=True, check=True)
        if [json.loads(line) for line in ran.stdout.split("\n")[:-1]] != encoded:
            raise SystemExit("the tokens differ")
        best["tandem"] = min(best.get("tandem", 1e9), float(re.search(r" in ([0-9.]+) s", ran.stderr)[1]))
    tokens = sum(map(len, encoded))
    print(f"{len(documents)} documents, {size / 1e6:.2f} MB, {tokens} tokens (equal)")
    for name, seconds in best.items():
        print(f"{name}: {size / 1e6 / seconds:.2f} MB/s")


if __name__ == "__main__":
    main()
