"""docs/reference/keys.md and commands.md, from the help of the program."""
import re
import subprocess

TABLES = {"train": "The run", "model": "The model", "optimizer": "Optimizer and learning rate",
          "parallel": "Ranks and what they send", "sync": "Replicas far apart", "data": "Data", "trace": "Traces",
          "checkpoint": "Checkpoints", "check": "Checks of data in memory"}
KEY = re.compile(r"  (\w+)\.([\w.]+) +(\S.*)")
NOISE = re.compile(r"^  (-h, --help  |--help-all) .*\n", re.M)


def help_of(program, *command, topic=()):
    return subprocess.run([program, *command, "--help", *topic], check=True, capture_output=True, text=True).stdout


def keys(text):
    """(table, key, what it sets, type and range) of each key of the job file."""
    found = []
    for line in text.splitlines():
        match = KEY.fullmatch(line)
        if match:
            found.append(list(match.groups()))
        else:
            found[-1][2] += " " + line.strip()
    for table, key, help_text in found:
        begin = help_text.rindex(" (")
        yield table, key, help_text[:begin], help_text[begin + 2:-1]


def keys_page(program):
    parts = ["# Keys of a job file\n\n"
             "A job is a TOML file; `--set table.key=value` overrides a key. `tandem train --help TABLE` prints those of a table. "
             "[The guide](../guide/data.md) begins with a small job; `OUT/config.toml` has every key as a run used it."]
    rows = {}
    for table, key, what, kind in keys(help_of(program, "train", topic=["keys"])):
        rows.setdefault(table, []).append(f"| `{table}.{key}` | {what} | {kind} |".replace("*", "\\*"))
    for table, lines in rows.items():
        parts.append(f"## [{table}]: {TABLES.get(table, table).lower()}\n\n"
                     "| key | what it sets | type, default, range |\n| --- | --- | --- |\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def subcommands(text):
    found = re.search(r"^Subcommands:\n((?:  .*\n)+)", text, re.M)
    return re.findall(r"^  (\S+)", found[1], re.M) if found else []


def commands_page(program):
    top = help_of(program)
    footer = top[re.search(r"\n+Start here:", top).start():]
    parts = ["# Commands\n\nThe help of each command, as `tandem COMMAND --help` prints it.",
             "## tandem\n\n```text\n" + NOISE.sub("", top).strip() + "\n```"]

    def add(*command):
        text = help_of(program, *command)
        shown = NOISE.sub("", text.replace(footer, "\n"))
        shown = re.sub(r"\n{3,}", "\n\n", re.sub(r"^Options:\n(?=\n|$|\w)", "", shown, flags=re.M)).strip()
        what, _, rest = shown.partition("\n")
        note = "\n\nKeys of the job file: [Keys](keys.md)." if command == ("train",) else ""
        parts.append(f"{'#' * (1 + len(command))} tandem {' '.join(command)}\n\n{what}.{note}\n\n```text\n{rest.strip()}\n```")
        for name in subcommands(text):
            add(*command, name)

    for name in subcommands(top):
        add(name)
    return "\n\n".join(parts) + "\n"
