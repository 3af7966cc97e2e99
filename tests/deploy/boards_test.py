#!/usr/bin/env python3
"""boards_test.py TANDEM MODEL SOURCE_DIR: the boards of deploy/grafana are valid, their queries name metrics that `tandem serve` and
the live page of a run have, and every metric of these is on a board."""
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request

SOURCE = os.path.abspath(sys.argv[3])
sys.path.insert(0, SOURCE + "/tests/engine/serve")
sys.dont_write_bytecode = True
from recorded_run import Run  # noqa: E402

TANDEM, MODEL = (os.path.abspath(path) for path in sys.argv[1:3])
SUFFIXES = re.compile("_(?:bucket|sum|count)$")


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def start(*words):
    process = subprocess.Popen([TANDEM, *words], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found:
            return process, found[0]
    raise AssertionError(f"no address of {words}")


def metrics(url):
    """Types by name."""
    with urllib.request.urlopen(url + "metrics", timeout=60) as answer:
        text = answer.read().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    named = {SUFFIXES.sub("", name) if SUFFIXES.sub("", name) in types else name for name in re.findall(r"^(tandem_\w+)", text, re.M)}
    expect(named == set(types), f"types and values differ: {named ^ set(types)}")
    return types


def check_board(board):
    """Names of metrics in its queries."""
    panels = board["panels"]
    expect(board["title"] and board["uid"] and board["schemaVersion"] >= 39, board["title"])
    expect(len({panel["id"] for panel in panels}) == len(panels), "panels share an id")
    cells = set()
    for panel in panels:
        box = panel["gridPos"]
        expect(0 <= box["x"] and box["x"] + box["w"] <= 24, f"{panel['title']}: outside of the board")
        covered = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        expect(not covered & cells, f"{panel['title']}: over another panel")
        cells |= covered
        expect(panel["targets"] and panel["datasource"]["uid"] == "prometheus", f"{panel['title']}: no query")
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for query in queries:
        expect(query.count("(") == query.count(")") and query.count("[") == query.count("]"), query)
    return queries


def check_queries(queries, types):
    used = set()
    for query in queries:
        for function, name in re.findall(r"(?:(rate|increase)\()?(tandem_\w+)", query):
            base = SUFFIXES.sub("", name) if SUFFIXES.sub("", name) in types else name
            expect(base in types, f"{query}: no metric {name}")
            counts = types[base] in ("counter", "histogram")
            expect(not function or counts, f"{query}: the {function} of a {types[base]}")
            used.add(base)
    expect(used == set(types), f"on no board: {sorted(set(types) - used)}")


def main():
    boards = {}
    for name in ("serve", "training"):
        with open(f"{SOURCE}/deploy/grafana/dashboards/{name}.json") as file:
            boards[name] = json.load(file)
    expect(len({board["uid"] for board in boards.values()}) == len(boards), "boards share a uid")
    processes = []
    with tempfile.TemporaryDirectory(prefix="tandem-boards-") as folder:
        os.environ["TANDEM_CACHE_DIR"] = folder + "/cache"
        run = Run(folder + "/run", 1, 4, 1, slow=1)
        run.add(1, 60)
        run.add_event()
        with open(run.folder + "/metrics.jsonl", "a") as file:
            file.write(json.dumps(run.metrics(61) | {"validation_loss": 1.5}) + "\n")
        try:
            for name, words in (("serve", ("serve", MODEL, "--port", "0")), ("training", ("report", run.folder, "--live", "0"))):
                process, url = start(*words)
                processes.append(process)
                check_queries(check_board(boards[name]), metrics(url))
        finally:
            for process in processes:
                process.kill()


main()
