"""Random texts that tokenizers are compared on, and a way to run `tandem tokenize` on many."""
import json
import subprocess

SNIPPETS = """'s 'S 'ſ 'll 'RE 123 1 ٣ ² Ⅷ 中文 ひらがな カタカナ 한 각 ᄀ ᅡ ᆨ ﬁ ß İ ſ K 👩‍👩‍👧 🇩🇪 def return
http://a.b/c?d=e <|endoftext|> <s> </s> <|im_start|> [INST] <0x41> Hello don't !!! ... — ¿ / // � ▁ ▁▁""".split()
SNIPPETS += ["\r\n", "\n\n", " ", "  ", "\t", "\u00a0", "\u3000", "e\u0301", "a\u0323\u0307", "\u1e9b\u0323",
             "\u200d", "\ufeff", "\0", "\u0085", "\u2028", " world", "x "]
BLOCKS = (0x300, 0x400, 0x590, 0x600, 0x900, 0xe00, 0x1100, 0x3040, 0x4e00, 0xac00, 0x1f300, 0x10000, 0x11000,
          0x1e000)


def random_text(random, extra=()):
    """Words, spaces, marks, any code points, and `extra` texts, up to about 60 parts."""
    parts = []
    for _ in range(random.choice((0, 1, 2, 3, 5, 8, 20, 60))):
        kind = random.random()
        if kind < .35:
            parts.append(random.choice(SNIPPETS + list(extra)))
        elif kind < .6:
            parts.append("".join(chr(random.randrange(32, 127)) for _ in range(random.randrange(1, 8))))
        elif kind < .75:
            parts.append(random.choice(" \n\t\r") * random.randrange(1, 6))
        elif kind < .9:
            code = random.randrange(0x110000)
            parts.append("A" if 0xd800 <= code < 0xe000 else chr(code))
        else:
            block = random.choice(BLOCKS)
            parts.append("".join(chr(block + random.randrange(200)) for _ in range(random.randrange(1, 6))))
    return "".join(parts)


def all_code_points():
    """Lines that hold every code point after a letter, itself, an apostrophe and before a digit."""
    codes = [chr(code) for code in range(0x110000) if not 0xd800 <= code < 0xe000]
    for begin in range(0, len(codes), 16):
        yield "".join(f"a{code}{code} '{code}1 " for code in codes[begin:begin + 16])


def tokenize(tandem, path, lines, *flags):
    """What `tandem tokenize --lines` prints for each line."""
    typed = "".join(json.dumps(line) + "\n" for line in lines)
    ran = subprocess.run([tandem, "tokenize", path, "--lines", *flags], input=typed, capture_output=True,
                         text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"tandem tokenize {path}: {ran.stderr}")
    return [json.loads(line) for line in ran.stdout.split("\n")[:-1]]
