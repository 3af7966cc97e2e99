#!/usr/bin/env python3
"""reference_pages.py [--check] [--keep] [TANDEM]: writes docs/reference/cpp.md from the headers of
include/tandem and, with the program TANDEM, keys.md and commands.md from its help; with the built
package on PYTHONPATH also python.md from its docstrings. With --check nothing is written; exit 1 if a
page differs, or if the package is missing (--keep: leave python.md as it is then)."""
import sys
from pathlib import Path

import reference_cpp
import reference_help
import reference_python

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by tools/reference_pages.py: edit {} and run it again. -->\n\n"


def pages(program, keep):
    yield "cpp.md", "the headers in include/tandem", reference_cpp.page(ROOT / "include/tandem")
    if not program:
        return
    yield "keys.md", "the keys' help in src/engine/config", reference_help.keys_page(program)
    yield "commands.md", "the commands in src/cli", reference_help.commands_page(program)
    try:
        import tandem
    except ImportError as error:
        if keep:
            return
        sys.exit(f"reference_pages: {error}: expected the built package on PYTHONPATH, or --keep")
    yield "python.md", "the docstrings in python/", reference_python.page(ROOT / "python/tandem", tandem)


def main():
    arguments = sys.argv[1:]
    check, keep = "--check" in arguments, "--keep" in arguments
    programs = [word for word in arguments if not word.startswith("--")]
    stale = 0
    for name, source, text in pages(programs[0] if programs else None, keep):
        title, body = text.split("\n", 1)
        text = title + "\n\n" + NOTE.format(source) + body.lstrip("\n")
        file = ROOT / "docs/reference" / name
        if file.exists() and file.read_text() == text:
            continue
        stale += 1
        if check:
            print(f"docs/reference/{name}: is not what {source} say: run tools/reference_pages.py TANDEM")
        else:
            file.write_text(text)
            print(f"docs/reference/{name}: written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
