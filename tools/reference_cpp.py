"""docs/reference/cpp.md: a section for each public header with its opening comment, and each
declaration with its own."""
import re

ORDER = ["tandem", "overlap", "moe", "attention", "cross_attention", "collectives", "communicator", "world", "cuda", "tensor", "dtype", "codec",
         "quantize", "norm", "strategy", "error", "random", "version"]
SKIPPED = {"export"}  # macros of the library's visibility
NAME = re.compile(r"(?:class|struct|enum class|using|constexpr\s+\w+)\s+(?:TANDEM_API\s+)?(\w+)")
FUNCTION = re.compile(r"([~\w]+)\s*\(")


def prose(lines):
    """Paragraphs of comment lines, without slashes; indented lines stay as they are."""
    out, paragraph = [], []
    for line in [re.sub(r"^\s*//[/!]? ?", "", line) for line in lines] + [""]:
        if line.strip() and not line.startswith("  "):
            paragraph.append(line.strip())
            continue
        if paragraph:
            out.append(" ".join(paragraph))
            paragraph = []
        if line.startswith("  ") and line.strip():
            out.append("    " + line.strip())
    return "\n\n".join(escape(text) for text in out)


def escape(text):
    """Text of a comment as Markdown: <x> is no tag, a * b * c no emphasis."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)


def declarations(lines):
    """(comment, code) of each declaration of namespace tandem, in order. Those without a comment of
    their own are part of the one before."""
    comment, code, depth = [], [], 0
    found = []
    for line in lines:
        stripped = line.strip()
        if not depth and not code and (not stripped or stripped.startswith(("namespace", "TANDEM_API", "}", "#"))):
            if not stripped:
                comment = []
            continue
        if not depth and not code and stripped.startswith("//"):
            comment.append(line)
            continue
        code.append(line)
        body = re.sub(r"//.*|\"[^\"]*\"", "", line)
        depth += body.count("{") + body.count("(") - body.count("}") - body.count(")")
        if not depth and (body.rstrip().endswith((";", "}"))):
            if comment or not found or found[-1][1][-1].startswith(("class", "struct", "enum", "}")):
                found.append((comment, code))
            else:
                found[-1][1].extend(code)
            comment, code = [], []
    return found


def public(code):
    """A class without its private members."""
    out, hidden = [], False
    for line in code:
        if re.match(r"\s*(private|protected):", line):
            hidden = True
        elif re.match(r"\s*public:", line) or line.startswith("}"):
            hidden = False
        if not hidden:
            out.append(line)
    while len(out) > 1 and not out[-2].strip():
        del out[-2]
    return out


def section(name, text):
    lines = text.split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("#pragma once"))
    parts = [f"## tandem/{name}.h", prose(lines[:begin])]
    for comment, code in declarations(lines[begin + 1:]):
        head = " ".join(code)
        found = NAME.match(head.strip().removeprefix("template <typename T> ")) or FUNCTION.search(head)
        if not found or code[0].startswith(("class OverlapOperator", "struct ncclComm")) or re.fullmatch(
                r"(class|struct) \w+;.*", code[0]):
            continue
        parts += [f"### {found[1]}", prose(comment), "```cpp\n" + "\n".join(public(code)) + "\n```"]
    return "\n\n".join(part for part in parts if part)


def page(folder):
    names = {file.stem for file in folder.glob("*.h")} - SKIPPED
    ordered = [name for name in ORDER if name in names] + sorted(names - set(ORDER))
    return ("# C++ API\n\n"
            "`#include <tandem/tandem.h>` has all of it, in `namespace tandem`. [The guide](../guide/gpu.md) has "
            "examples for GPU ranks; [the tour](../start/tour.md) a whole program.\n\n"
            + "\n\n".join(section(name, (folder / f"{name}.h").read_text()) for name in ordered) + "\n")
