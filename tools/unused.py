#!/usr/bin/env python3
"""unused.py < FILES: functions of the library that nothing but tests calls, in the files (relative
paths) named on standard input: those that a header of src/ declares and that are named nowhere else
than where they are declared and defined. Prints one line per finding and exits 1 if there is one.
Reads text, so it needs no build, and takes functions of one name for one."""
import re
import sys
from collections import defaultdict

CODE = (".h", ".cc", ".cu", ".cuh", ".in")
# Comments and literals. The space keeps words apart.
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|^[ \t]*#[ \t]*include[^\n]*', re.S | re.M)
NAME = re.compile(r"[A-Za-z_]\w*")
# A type, then a name and its parameters: a declaration or a definition. The name may be qualified.
DECLARED = re.compile(r"(?:^|[;{}]|\]\])\s*((?:[\w:<>,*&\[\]. ]|\n)*?[\w>*&]\s*[\s*&])((?:\w+::)*)(\w+)\(", re.M)
# An operator between two values, which is formatted unlike a reference or pointer.
OPERATOR = re.compile(r"\s(?:&&?|\*|<|>)\s")
CONSTANT = re.compile(r"(?:inline )?const \w+ $")  # with a constructor's arguments
# Words before a call, not a type.
STATEMENTS = {"return", "else", "throw", "case", "new", "delete", "co_return", "goto", "do", "and", "or", "not", "if",
              "while", "for", "switch", "using", "typename", "template", "operator", "requires", "decltype", "sizeof"}
# Called by another library's templates.
HOOKS = {"initial_work_tile_info", "is_last_tile", "load_auxiliary", "is_producer_load_needed"}  # CUTLASS
# For callers outside this repository, or for what only a test can need.
ALLOWED = {"add_whole_codec": "a codec that is not the library's own",
           "forget_tuned": "stands for a new process that reads the tuner's file"}


def functions(text):
    """Positions of the names of functions that `text` declares or defines."""
    for match in DECLARED.finditer(text):
        before = NAME.findall(match[1])
        if before and not CONSTANT.match(match[1]) and not STATEMENTS & set(before) - {"template", "typename"} and not OPERATOR.search(match[1]):
            yield match.start(3), match[3]


texts = {}
for path in sys.stdin.read().split():
    if path.endswith(CODE) and not path.startswith("tests/"):
        with open(path, encoding="utf-8") as file:
            texts[path] = NOISE.sub(lambda noise: "\n" * noise[0].count("\n") + " ", file.read())

declared = {}  # the place, by name
named = defaultdict(int)  # how often a name is neither declared nor defined
for path, text in texts.items():
    places = dict(functions(text))
    for position, name in places.items():
        if path.startswith("src/") and not path.startswith("src/bench/") and path.endswith((".h", ".cuh")):
            declared.setdefault(name, f"{path}:{text.count(chr(10), 0, position) + 1}")
    for match in NAME.finditer(text):
        if match.start() not in places:
            named[match[0]] += 1

unused = [f"{place}: {name}: no caller but tests" for name, place in declared.items()
          if not named[name] and name not in HOOKS and name not in ALLOWED and not name.startswith("__")]
unused += [f"tools/unused.py: {name}: has a caller" for name in ALLOWED if named[name]]
print("\n".join(unused), end="\n" if unused else "")
sys.exit(bool(unused))
