#!/usr/bin/env python3
"""package_data.py [--rows N] [--words N] [--held-out FILE] OUT: LIBSVM file of Debian's packages, from `apt-cache
dumpavail`: the words of the short descriptions, rows of length 1; label 1 if the section is of libraries or of a
language, else -1. Rows are in the order of names, so that consecutive ones are alike. --rows takes every n-th
package; --words the most frequent words; --held-out writes a fifth of the rows to another file."""
import argparse
import collections
import math
import re
import subprocess
import zlib

LIBRARIES = set("libs libdevel python perl haskell rust golang javascript java ruby gnu-r php ocaml".split())
MIN_PACKAGES = 3  # that a word is in


def packages():
    """(name, section, words of the short description) of each."""
    text = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    for entry in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Description): (.*)", entry, re.M))
        if len(fields) == 3:
            words = set(re.findall(r"[a-z][a-z0-9+]+", fields["Description"].lower()))
            yield fields["Package"], fields["Section"].split("/")[-1], words


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--words", type=int)
    parser.add_argument("--held-out")
    parser.add_argument("out")
    options = parser.parse_args()
    found = sorted(packages())
    counts = collections.Counter(word for _, _, words in found for word in words)
    frequent = [word for word, count in counts.most_common(options.words) if count >= MIN_PACKAGES]
    index = {word: i for i, word in enumerate(sorted(frequent), 1)}
    if options.rows:
        found = [found[i * len(found) // options.rows] for i in range(min(options.rows, len(found)))]
    files = {False: open(options.out, "w"), True: open(options.held_out or "/dev/null", "w")}
    sizes = collections.Counter()
    for name, section, words in found:
        columns = sorted(index[word] for word in words if word in index)
        held_out = options.held_out is not None and zlib.crc32(name.encode()) % 5 == 0
        value = f"{1 / math.sqrt(max(1, len(columns))):.9g}"
        files[held_out].write(" ".join(["1" if section in LIBRARIES else "-1"] + [f"{c}:{value}" for c in columns]) + "\n")
        sizes[held_out] += 1
    print(f"{options.out}: {sizes[False]} rows, {len(index)} words" + (f"; {options.held_out}: {sizes[True]} rows" if options.held_out else ""))


if __name__ == "__main__":
    main()
