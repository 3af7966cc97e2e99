#!/usr/bin/env python3
"""unity_groups.py FILE... [-- FILE...]...: prints `GROUP FILE` for each source of each program, for CMake's
UNITY_GROUP. Two files of a group do not disturb each other: neither mentions a name that the other defines outside
of functions and classes, as helpers of tests often have the same names. Recognizes definitions by our format: they
are not indented."""
import re
import sys
from pathlib import Path

MAX_LINES = 2000  # of a group: takes as long to compile as the largest groups of the library
NO_CODE = re.compile(r'R"(\w*)\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
NO_DEFINITION = re.compile(r"[A-Z_]+\(|static_assert|template <|using [\w:]+;|using namespace|namespace ([\w:]+ )?\{")
KEYWORDS = set("auto bool char const constexpr delete double float int new noexcept operator override private "
               "protected public void".split())


def definitions(text):
    """Names, each with its alias if it is one: the same alias may be defined twice."""
    names = dict.fromkeys(re.findall(r"^#\s*define\s+(\w+)", text, re.M))
    for statement in re.findall(r"^(?:inline |static )*const(?:expr)? .*?;", text, re.M | re.S):
        names.update(dict.fromkeys(re.findall(r"\b(k[A-Z]\w*)\W", statement)))
    for line in re.findall(r"^[A-Za-z_].*", text, re.M):
        if NO_DEFINITION.match(line):
            continue
        if alias := re.match(r"(?:using|namespace)\s+(\w+) = (.*)", line):
            names[alias[1]] = alias[2]
        elif type_name := re.match(r"(?:struct|class|enum class|enum|union)\s+(\w+)", line):
            names[type_name[1]] = None
        else:
            head = re.split(r"[({=;\[]", line, maxsplit=1)[0]
            names.update(dict.fromkeys(re.findall(r"(?<!:)\b(\w+)(?!\w|\s*::)", head)[-1:]))
    return {name: alias for name, alias in names.items() if name not in KEYWORDS}


class Source:
    def __init__(self, path):
        text = NO_CODE.sub(" ", path.read_text())
        self.path, self.lines = path, text.count("\n")
        self.defined, self.mentioned = definitions(text), set(re.findall(r"\w+", text))

    def changes(self, other):
        return any(name in other.mentioned and not (alias and other.defined.get(name) == alias)
                   for name, alias in self.defined.items())

    def disturbs(self, other):
        return self.changes(other) or other.changes(self)


def grouped(sources):
    groups = []
    for source in sorted(sources, key=lambda s: -s.lines):
        for group in groups:
            if sum(s.lines for s in group) + source.lines <= MAX_LINES and not any(map(source.disturbs, group)):
                group.append(source)
                break
        else:
            groups.append([source])
    return groups


programs = [[]]
for argument in sys.argv[1:]:
    if argument == "--":
        programs.append([])
    else:
        programs[-1].append(Source(Path(argument)))
for number, program in enumerate(programs):
    for index, group in enumerate(grouped(program)):
        for source in group:
            print(f"{number}_{index} {source.path}")
