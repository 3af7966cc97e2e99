#!/usr/bin/env python3
"""Writes unicode_tables.cc, nfc_tables.cc, compatibility_*.cc and case_tables.cc of src/engine/tokenizer/unicode.

Needs the packages unicodedata2 16.0.0 and tokenizers 0.23.3, from which the last three are taken. Hugging Face's tokenizers classifies characters by Unicode 16
but normalizes by Unicode 9, so normalization ignores characters that were assigned later."""
import pathlib

import unicodedata2 as unicode
from tokenizers import normalizers, pre_tokenizers

VERSION = "16.0.0"
CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn "
              "Space").split()
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "src/engine/tokenizer/unicode"
# Characters with a combining class that Unicode 9 lacks.
LATER_MARKS = """7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1df9 1dfa a82c 10d24-10d27
10d69-10d6d 10eab-10eac 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 113ce-113d0 1145e 11839-1183a
1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1612f 16ff0-16ff1 1e08f
1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef"""
# Characters with a canonical decomposition that Unicode 9 lacks.
LATER_COMPOSED = """105c9 105e4 11383 11385 1138e 11391 113c5 113c7 113c8 11938 16121-16128
16d68-16d6a"""


def members(ranges):
    for text in ranges.split():
        first, _, last = text.partition("-")
        yield from range(int(first, 16), int(last or first, 16) + 1)


def category(code):
    if 9 <= code <= 13 or code == 0x85:
        return CATEGORIES.index("Space")
    return CATEGORIES.index(unicode.category(chr(code)))


def runs(value):
    """(first code point, value) of every run of equal values."""
    last = None
    for code in range(0x110000):
        if value(code) != last:
            last = value(code)
            yield code, last


def lines(items):
    line = ""
    for item in items:
        if len(line) + len(item) > 97:
            yield " " + line
            line = ""
        line += f" {item},"
    yield " " + line


def write(name, body):
    head = f"// Unicode {VERSION}, written by tools/unicode_tables.py.\n// clang-format off\n"
    text = head + '#include "engine/tokenizer/unicode/unicode_tables.h"\n\nnamespace tandem::unicode {\n\n'
    (FOLDER / name).write_text(text + body + "\n}  // namespace tandem::unicode\n")


def array(declaration, items):
    return f"{declaration} = {{\n" + "\n".join(lines(items)) + "\n};\n"


def decompositions():
    later = set(members(LATER_COMPOSED))
    for code in range(0x110000):
        text = unicode.decomposition(chr(code))
        if text and not text.startswith("<") and code not in later:
            yield code, [int(part, 16) for part in text.split()]


CODES = [code for code in range(0x110000) if not 0xd800 <= code < 0xe000]


def ranges(codes):
    found = []
    for code in codes:
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def braces(rows):
    return ["{" + ",".join(str(value) for value in row) + "}" for row in rows]


def counted(declaration, name, items):
    return array(f"const {declaration} k{name}[]", items) + f"const size_t kNum{name} = {len(items)};\n"


def compatibility():
    """Runs of single characters (code, count, target, step), and (code, text) of the others."""
    compatible, canonical = normalizers.NFKD(), normalizers.NFD()
    runs_found, texts = [], []
    for code in CODES:
        text = compatible.normalize_str(chr(code))
        if text == canonical.normalize_str(chr(code)):
            continue
        if len(text) > 1:
            texts.append((code, text))
            continue
        last = runs_found[-1] if runs_found else None
        if last and last[0] + last[1] == code:
            step = ord(text) - last[2] if last[1] == 1 else last[3]
            if step in (0, 1) and ord(text) == last[2] + last[1] * step:
                last[1], last[3] = last[1] + 1, step
                continue
        runs_found.append([code, 1, ord(text), 0])
    return runs_found, texts


def lower_runs():
    lower, found = normalizers.Lowercase(), []
    for code in CODES:
        text = lower.normalize_str(chr(code))
        if len(text) != 1 or text == chr(code):
            continue
        delta, last = ord(text) - code, found[-1] if found else None
        if last and last[3] == delta and code - last[1] in ((1, 2) if last[0] == last[1] else (last[2],)):
            last[1], last[2] = code, code - last[1]
        else:
            found.append([code, code, 1, delta])
    return found


def write_tokenizers():
    single, texts = compatibility()
    write("compatibility_runs.cc", counted("CompatibilityRun", "CompatibilityRuns", braces(single)))
    numbers = [f"0x{number:x}" for code, text in texts for number in [code << 5 | len(text), *map(ord, text)]]
    write("compatibility_texts.cc", counted("uint32_t", "CompatibilityTexts", numbers))
    strip, split = normalizers.StripAccents(), pre_tokenizers.Punctuation()
    accents = [code for code in CODES if strip.normalize_str("a" + chr(code)) == "a"]
    marks = [code for code in CODES if len(split.pre_tokenize_str(f"a{chr(code)}a")) == 3]
    write("case_tables.cc", counted("LowerRun", "LowerRuns", braces(lower_runs())) + "\n" +
          counted("CodeRange", "Accents", braces(ranges(accents))) + "\n" +
          counted("CodeRange", "Punctuation", braces(ranges(marks))))


def main():
    if unicode.unidata_version != VERSION:
        raise SystemExit(f"unicodedata2 has Unicode {unicode.unidata_version}: expected {VERSION}")
    coded = [f"0x{code << 8 | value:x}" for code, value in runs(category)]
    write("unicode_tables.cc", array("const uint32_t kCategoryRuns[]", coded) +
          f"const size_t kNumCategoryRuns = {len(coded)};\n")
    later = set(members(LATER_MARKS))
    marks = [f"0x{code << 8 | value:x}"
             for code, value in runs(lambda c: 0 if c in later else unicode.combining(chr(c)))]
    found = list(decompositions())
    pairs = ["{" + ",".join(str(value) for value in [code] + parts) + "}" for code, parts in found]
    excluded = [f"0x{code:x}" for code, parts in found
                if len(parts) == 2 and unicode.normalize("NFC", chr(code)) != chr(code)]
    write("nfc_tables.cc", array("const uint32_t kCombiningRuns[]", marks) +
          f"const size_t kNumCombiningRuns = {len(marks)};\n\n" +
          array("const Decomposition kDecompositions[]", pairs) +
          f"const size_t kNumDecompositions = {len(pairs)};\n\n" +
          array("const uint32_t kNotComposed[]", excluded) +
          f"const size_t kNumNotComposed = {len(excluded)};\n")
    write_tokenizers()


if __name__ == "__main__":
    main()
