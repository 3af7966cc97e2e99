#!/usr/bin/env python3
"""paths_test.py SOURCE: the paths of docs/dev/architecture.md lead through the code: each file of a table exists and
has the name by which it leads to the next, which has that, too, or ends in it. Whatever else is named `src/…` there exists."""
import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])
PAGE = ROOT / "docs/dev/architecture.md"
STEP = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`|–) \|", re.M)


def text_of(name):
    file = ROOT / name
    return file.read_text() if file.is_file() else None


def faults(text):
    section = text.split("## Five paths\n", 1)[1].split("\n## ", 1)[0]
    paths = re.split(r"^### ", section, flags=re.M)[1:]
    if len(paths) != 5:
        yield f"{len(paths)} paths: expected 5"
    for path in paths:
        title, steps = path.split("\n", 1)[0], STEP.findall(path)
        if len(steps) < 3 or steps[-1][1]:
            yield f"{title}: expected 3 files or more, the last without a name"
        for (name, leads), (next_name, _) in zip(steps, [*steps[1:], (None, None)]):
            here = text_of(name)
            if here is None:
                yield f"{title}: {name}: no such file"
            elif leads and leads not in here:
                yield f"{title}: {name} does not name {leads}"
            elif leads and next_name and not next_name.endswith(leads) and leads not in (text_of(next_name) or leads):
                yield f"{title}: {next_name} does not have {leads}, by which {name} leads to it"
            elif not leads and next_name:
                yield f"{title}: {name} names nothing of {next_name}"
    for page in ROOT.glob("docs/dev/*.md"):
        for name in sorted(set(re.findall(r"`((?:src|include|python|tests|tools)/[\w./-]+)`", page.read_text()))):
            if "NAME" not in name and not (ROOT / name).exists():
                yield f"{page.relative_to(ROOT)}: {name}: no such file or folder"


found = list(faults(PAGE.read_text()))
print("\n".join(found) or "every step leads to the next")
sys.exit(1 if found else 0)
