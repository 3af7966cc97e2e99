#!/usr/bin/env python3
"""what_if_test.py TANDEM [long|SCREENSHOT]: the planner's page against `tandem plan` for generated links,
memory, accuracy and GPUs; its knobs on a screen and a phone, in the dark, with keys."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

from browser import Browser, expect

TANDEM = os.path.abspath(sys.argv[1])
DENSE = {"vocab": 32768, "hidden": 4096, "layers": 12, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 11264,
         "max_seq": 4096, "tie_word_embeddings": False}
JOBS = {"dense": DENSE, "experts": DENSE | {"layers": 8, "experts": 8, "top_k": 2, "expert_ffn": 4096}}
# Keys with these values are not in a planned job.
DEFAULTS = {"tp = 1", "pp = 1", "dp = 1", "ep = 1", "zero = 1", "virtual_stages = 1", "schedule = '1f1b'",
            "recompute = 'none'", "codec = 'none'"}


def write_job(path, model):
    lines = [f"{key} = {json.dumps(value)}" for key, value in model.items()]
    with open(path, "w") as file:
        file.write("[model]\n" + "\n".join(lines) + "\n[train]\nbatch = 96\nseq = 4096\n[data]\npaths = [\"x\"]\n")


def plan(folder, job, gpus, host, network, memory_gib, accuracy, *more):
    with open(folder + "/hardware.toml", "w") as file:
        file.write(f'gpu = "H100"\ngpus_per_host = 8\nmemory_gib = {memory_gib!r}\n'
                   f"[link]\nhost = {host!r}\nnetwork = {network!r}\n")
    return subprocess.run([TANDEM, "plan", job, "--gpus", str(gpus), "--hardware", folder + "/hardware.toml", "--accuracy",
                           accuracy, "--json", folder + "/plan.json", "--out", folder + "/planned.toml", *more],
                          capture_output=True, text=True, check=False)


def close(a, b):
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b)) + 1e-12


def expect_same(found, expected, what):
    expect(len(found) == len(expected), f"{what}: {len(found)} layouts, expected {len(expected)}")
    for layout, other in zip(found, expected):
        for key, of_plan in (("step_s", "predicted_s"), ("memory_gib", "predicted_memory_gib"), ("error", "error")):
            expect(close(layout[key], other[of_plan]), f"{what}: {key} {layout[key]}, expected {other[of_plan]}")
        for term, seconds in layout["terms"].items():
            expect(close(seconds, other["terms_s"][term]), f"{what}: {term} {seconds}, expected {other['terms_s'][term]}")
        expect(close(sum(layout["terms"].values()), layout["step_s"]), f"{what}: terms do not add up")


def check_numbers(folder, browser, job, random_cases, *more):
    """Searches of the page and of the program, both with the options `more`."""
    path = f"{folder}/{job}.toml"
    write_job(path, JOBS[job])
    done = plan(folder, path, 16, 450, 50, 80, "lossless", "--page", f"{folder}/{job}.html", *more)
    expect(done.returncode == 0, done.stderr)
    browser.problems.clear()
    browser.open(f"file://{folder}/{job}.html", 1280)
    browser.await_true("typeof whatIf === 'object' && whatIf.state.found.length > 0")
    errors = browser.value("whatIf.model.formats.map(({ name, error }) => [name, error])")
    fitted = sums = 0
    for i in range(random_cases):
        gpus = random.choice([4, 8, 16, 32])
        host, network, memory = (round(base * 2 ** random.uniform(-3, 2), 3) for base in (450, 50, 80))
        name, error = random.choice([("lossless", 0), *errors[1:]])
        what = f"{job} {i}: {gpus} GPUs, {host} and {network} GB/s, {memory} GiB, {name}"
        done = plan(folder, path, gpus, host, network, memory, name, *more)
        knobs = {"gpus": gpus, "host": host, "network": network, "memory_gib": memory, "error": error}
        got = browser.value(f"(() => {{ const found = whatIf.model.search({json.dumps(knobs)});"
                            "return { found: found.slice(0, 10), front: whatIf.model.front(found), "
                            "keys: found.length ? whatIf.model.jobKeys(found[0]) : '' }; })()")
        if done.returncode != 0:
            expect("no layout fits" in done.stderr and not got["found"], f"{what}: {done.stderr}")
            continue
        fitted += 1
        with open(folder + "/plan.json") as file:
            planned = json.load(file)
        expect_same(got["found"], planned["fastest"], what + ", fastest")
        expect_same(got["front"], planned["pareto"], what + ", front")
        with open(folder + "/planned.toml") as file:
            keys = set(file.read().splitlines())
        missing = [line for line in got["keys"].splitlines() if line and line not in keys | DEFAULTS]
        expect(not missing, f"{what}: keys {missing} are not in the job file")
        sums += any(site in planned["best"]["codec"] for site in ("gradients=", "weights="))
    expect(fitted >= random_cases / 2, f"{job}: {fitted} of {random_cases} cases fit")
    expect((sums > 0) == ("--dp-formats" in more), f"{job} {more}: {sums} cases have formats of gradients or weights")


def check_page(folder, browser, screenshot):
    """Knobs, keys, themes and widths."""
    for width, dark in ((1280, False), (390, True)):
        browser.problems.clear()
        browser.open("about:blank", width)
        browser.open(f"file://{folder}/experts.html", width, dark=dark)
        browser.await_true("typeof whatIf === 'object' && whatIf.state.found.length > 0")
        expect(browser.value("document.documentElement.dataset.theme") == ("dark" if dark else "light"), "theme")
        expect(browser.value("document.documentElement.scrollWidth") <= width, f"the page scrolls sideways at {width}")
        expect(browser.value("Chart.getChart('step').options.scales.x.title.text") == "step, ms", "the axis' unit")
        drawn = browser.value("['step', 'memory', 'front'].every((id) => Chart.getChart(id).width > 100)")
        expect(drawn, "charts have no size")
        sums = browser.value("Chart.getChart('step').data.datasets.reduce((sum, set) => sum + set.data[0], 0)")
        expect(close(sums, 1e3 * browser.value("whatIf.state.found[0].step_s")), "bars are not the step")
        # A knob by keys: the next accuracy, then fewer layouts, then all of them again.
        before = browser.value("whatIf.state.found[0].step_s")
        browser.value("document.getElementById('network-range').focus()")
        for _ in range(3):
            browser.press("ArrowLeft", 37)
        expect(browser.value("whatIf.state.knobs.network < whatIf.model.defaults.network"), "a slider without a mouse")
        expect(browser.value("whatIf.state.found[0].step_s") >= before, "a slower network is faster")
        browser.value("document.getElementById('tp').focus()")
        browser.press("ArrowDown", 40)
        expect(browser.value("whatIf.state.found.every(({ row }) => row.tp === 1)"), "TP was not chosen")
        browser.value("document.querySelector('#fastest button').focus()")
        browser.press("ArrowDown", 40)
        expect(browser.value("whatIf.state.selected") == 1, "no second layout by key")
        expect(browser.value("document.activeElement.textContent") == "2", "the focus is lost")
        keys = browser.value("document.getElementById('keys').textContent")
        expect(keys == browser.value("whatIf.model.jobKeys(whatIf.state.found[1])"), keys)
        moves = browser.value("whatIf.moves().map(({ label, best }) => [label, best?.step_s])")
        expect(len(moves) >= 10 and re.search("GPUs", str(moves)), moves)
        rows = browser.value("[...document.querySelectorAll('#moves tbody tr')].length")
        expect(rows == len(moves), f"{rows} rows of moves, expected {len(moves)}")
        browser.value("document.getElementById('reset').click()")
        expect(browser.value("whatIf.state.found[0].step_s") == before, "reset")
        browser.value("whatIf.set({ memory_gib: 0.5 })")
        expect(browser.value("!document.getElementById('none').hidden"), "no word if nothing fits")
        browser.value("document.getElementById('reset').click()")
        browser.value("whatIf.set({ network: 0.5, error: 1 }); whatIf.choose('tp', 2); whatIf.choose('pp', 2)")
        expect("stages=" in browser.value("document.getElementById('keys').textContent"), "no wire format of several sites")
        expect(browser.value("document.documentElement.scrollWidth") <= width, f"wire formats are wider than {width}")
        browser.value("document.getElementById('reset').click()")
        expect(not browser.problems, browser.problems)
        if screenshot and not dark:
            browser.save(screenshot)


def main():
    if not shutil.which("chromium"):
        print("chromium is not installed: page not opened")
        return
    random.seed(7)
    folder = tempfile.mkdtemp(prefix="tandem-what-if-")
    browser = None
    try:
        browser = Browser(folder + "/profile")
        is_long = sys.argv[2:] == ["long"]
        for job in JOBS:
            check_numbers(folder, browser, job, 12 if is_long else 5, "--dp-formats")
            check_numbers(folder, browser, job, 20 if is_long else 4)
        if not is_long:
            check_page(folder, browser, sys.argv[2] if len(sys.argv) > 2 else None)
    finally:
        if browser:
            browser.close()
        shutil.rmtree(folder, ignore_errors=True)


main()
