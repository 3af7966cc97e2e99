#!/usr/bin/env python3
"""live_test.py TANDEM short|long [SCREENSHOT]: the live page of runs that grow and of recorded
ones: numbers, clients that misbehave, and, if chromium is installed, the page itself at 4 and 64
ranks (long: 4,096), on a phone, in the dark, with keys."""
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from browser import Browser, expect
from http_clients import answer_of, send_malformed
from live_server import Server
from recorded_run import PHASES, Run, pack_ms

TANDEM, MODE = os.path.abspath(sys.argv[1]), sys.argv[2]
Server.program = TANDEM


def test_numbers_follow_the_files(folder):
    server = Server(folder + "/run")
    expect(json.loads(server.get("state.json"))["state"] == "waiting", "a run that has not begun")
    run = Run(folder + "/run", 2, 2, 1, slow=1)
    run.add(1, 60)
    state = server.await_state(lambda s: s["step"] == 60)
    expect(state["layout"].startswith("tp 2 dp 2"), state["layout"])
    expect(abs(state["share"] - 0.3) < 1e-9 and abs(state["eta_s"] - 140 * 0.125) < 1e-6, state)
    stream = server.connect()
    stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with open(folder + "/run/metrics.jsonl", "a") as file:  # the begin of a line is no line
        file.write('{"step": 61, "loss"')
        file.flush()
        time.sleep(1.5)
        file.write(': 1.0, "step_ms": 125}\nnot JSON\n')
    server.await_state(lambda s: s["step"] == 61)
    run.add_event()
    state = server.await_state(lambda s: s["events"])
    expect(state["event_counts"] == {"lost": 1} and state["events"][0]["rank"] == 1, state["events"])
    got = b""
    while b'"event_counts":{"lost":1}' not in got:
        block = stream.recv(1 << 16)
        expect(block, "the stream has ended")
        got += block
    ranks = json.loads(server.get("ranks.json"))
    expect(ranks["ranks"]["dp"] == [0, 0, 1, 1] and len(ranks["map"]["rows"]) == 4, ranks["ranks"])
    expect(ranks["ranks"]["work"][1] > 1.1 and ranks["phases"][ranks["ranks"]["phase"][1]] == "backward", ranks["ranks"])
    expect(len(ranks["map"]["slow"]) == 1 and "rank 1 " in ranks["map"]["slow"][0], ranks["map"]["slow"])
    metrics = server.get("metrics")
    for line in ("tandem_step 61\n", "tandem_ranks 4\n", 'tandem_events_total{event="lost"} 1\n', 'phase="backward"'):
        expect(line in metrics, metrics)
    for line in metrics.splitlines():
        expect(re.fullmatch(r'# (HELP|TYPE) tandem_\w+ .*|tandem_\w+(\{\w+="[^"]*"\})? [-+.e\d]+', line), line)
    # A resumed run writes the lines up to its checkpoint anew.
    lines = open(folder + "/run/metrics.jsonl").read().splitlines()[:50]
    with open(folder + "/run/new", "w") as file:
        file.write("\n".join(lines) + "\n")
    os.rename(folder + "/run/new", folder + "/run/metrics.jsonl")
    state = server.await_state(lambda s: s["step"] == 50)
    expect(len(state["series"]["step"]) == 50, state["series"]["step"])
    again = Run(folder + "/run", 2, 1, 1, slow=-1, began=2, begin=50)  # with fewer ranks
    again.add(51, 80)
    server.await_state(lambda s: s["step"] == 80)
    ranks = json.loads(server.get("ranks.json"))
    expect(ranks["ranks"]["rank"] == [0, 1] and ranks["map"]["last"] == 80, ranks["ranks"])
    with open(folder + "/run/ranks/9.from-50.records", "wb") as file:
        file.write(b"x" * 200)
    state = server.await_state(lambda s: s["problems"])
    expect("9.from-50.records: has another format" in state["problems"][0], state["problems"])
    server.stop()


def test_runs_that_end_by_time_are_done(folder):
    """Their steps add up to less than their seconds."""
    run = Run(folder + "/timed", 1, 2, 1, slow=0)
    with open(folder + "/timed/config.toml") as file:
        text = file.read().replace("steps = 200", "seconds = 30")
    with open(folder + "/timed/config.toml", "w") as file:
        file.write(text)
    run.add(1, 60)
    server = Server(folder + "/timed")
    server.await_state(lambda s: s["state"] == "running" and s["share"] == 60 * 0.125 / 30)
    os.mkdir(folder + "/timed/final")
    with open(folder + "/timed/final/config.json", "w") as file:
        file.write("{}")
    os.utime(folder + "/timed/metrics.jsonl", (10**9, 10**9))
    state = server.await_state(lambda s: s["state"] == "done")
    expect(state["share"] == 1 and state["eta_s"] == 0, (state["share"], state["eta_s"]))
    os.utime(folder + "/timed/final/config.json", (10**9, 10**9))
    run.add(61, 61)  # of a run that was resumed for longer
    server.await_state(lambda s: s["state"] == "running" and s["step"] == 61)
    server.stop()


def test_clients_cannot_hurt_it(folder):
    run = Run(folder + "/hostile", 1, 4, 1, slow=2)
    run.add(1, 100)
    server = Server(folder + "/hostile")
    expect(server.status("GET", "nothing") == 404, "an unknown path")
    expect(server.status("DELETE", "") == 405, "another method")
    expect(server.status("HEAD", "") == 200, "HEAD")
    expect(server.status("POST", "", b"x" * 200000) == 405, "a method with a body")
    expect(server.status("GET", "state.json", Host="127.0.0.2") == 200, "another address of the loopback")
    expect(server.status("GET", "../../etc/passwd") == 404, "a path above")
    expect(server.status("GET", "state.json", Host="evil.example") == 403, "another site's name")
    before = server.memory_mb()
    send_malformed(server.connect)
    two_hosts = b"GET /state.json HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
    expect(answer_of(server.connect, two_hosts).startswith(b"HTTP/1.1 400 "), "two hosts")
    silent = [server.connect() for _ in range(20)]
    deaf = []  # listeners that never read
    for _ in range(30):
        client = server.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deaf.append(client)
    for step in range(101, 106):
        run.add(step, step)
        server.await_state(lambda s: s["step"] == step)
    many = [server.connect() for _ in range(80)]  # more than are served: they make room for one that asks
    for _ in range(5):
        begin = time.time()
        expect(server.status("GET", "state.json") == 200, "a request next to silent clients")
        expect(time.time() - begin < 10, "a request waits for silent clients")
    for client in silent + many:
        client.close()
    server.await_state(lambda s: s["step"] == 105)
    for client in deaf:
        client.close()
    expect(server.memory_mb() < before + 60, f"memory: {before} to {server.memory_mb()} MB")
    server.stop()


def test_memory_is_bounded(folder):
    run = Run(folder + "/grown", 1, 2, 1, slow=0)
    with open(folder + "/grown/metrics.jsonl", "w") as file:
        for step in range(1, 100001):
            file.write(f'{{"step": {step}, "loss": {1 / step}, "step_ms": 100}}\n')
        file.write("x" * (5 << 20) + "\n" + '{"step": 100001, "loss": 0, "step_ms": 100}\n')
    for path in run.files:
        with open(path, "ab") as file:
            for step in range(1, 50001):
                file.write(struct.pack("<IHH11H", step, 1, pack_ms(100), *[pack_ms(5)] * PHASES))
    server = Server(folder + "/grown")
    state = server.await_state(lambda s: s["step"] == 100001)
    expect(512 <= len(state["series"]["step"]) <= 1024, len(state["series"]["step"]))
    steps = state["series"]["step"]
    expect(steps == sorted(steps) and steps[-1] == 100001, steps[-3:])
    ranks = json.loads(server.get("ranks.json"))
    expect(24 <= len(ranks["map"]["steps"]) <= 128 and ranks["map"]["last"] > 49000, ranks["map"]["last"])
    expect(server.memory_mb() < 120, server.memory_mb())
    server.stop()


def test_training_starts_it(folder):
    """The page of `tandem train --live` ends with the run, however that ends."""
    config = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../configs/tiny.toml")
    for end in (None, signal.SIGKILL):
        out = f"{folder}/trained-{end}"
        process = subprocess.Popen([TANDEM, "train", config, "--tp=2", "--out", out, "--live=0", "--set",
                                    "train.steps=" + ("60" if end is None else "1000000")], stderr=subprocess.PIPE, text=True)
        port = None
        for line in process.stderr:
            found = re.search(r"Live page of .*: http://127\.0\.0\.1:(\d+)/", line)
            port = int(found[1]) if found else port
            if end and line.startswith("step "):
                break
        expect(port, "no page")
        if end:
            limit, layout = time.time() + 20, None
            while not layout:  # the page reads the run's files at intervals
                expect(time.time() < limit, "no layout")
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/state.json", timeout=20) as answer:
                    layout = json.loads(answer.read())["layout"]
                time.sleep(0.05)
            expect(layout.startswith("tp 2"), layout)
            process.send_signal(end)
        process.communicate()
        expect(process.returncode == (0 if end is None else -end), process.returncode)
        limit = time.time() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
            except ConnectionError:
                break
            expect(time.time() < limit, "the page outlives its run")
            time.sleep(0.2)


def test_launcher_shows_faults(folder, browser, hosts):
    """The page of `tandem launch --live` outlives rank 0, and shows its loss, its recovery and the last step."""
    config = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../configs/tiny.toml")
    out = f"{folder}/launched-{hosts}"
    options = ["-n", "2", "--restarts", "1", "--live", "0", "--inject", folder + "/kill.toml"]
    if hosts:  # of which each is this machine
        with open(folder + "/hosts.txt", "w") as file:
            file.write("a\nb\n")
        with open(folder + "/shell", "w") as file:
            file.write('#!/bin/sh\nexec sh -c "$2"\n')
        os.chmod(folder + "/shell", 0o755)
        options += ["--hosts", folder + "/hosts.txt", "--remote-shell", folder + "/shell"]
    with open(folder + "/kill.toml", "w") as file:
        file.write('[[fault]]\nkind = "kill"\nrank = 0\nstep = 15\n')
    small = [f"--set=model.{key}" for key in ("hidden=16", "layers=1", "head_dim=4", "ffn=32")]
    process = subprocess.Popen([TANDEM, "launch", *options, "--", TANDEM, "train", config, "--tp=2", "--out", out, "--set=train.steps=1000000",
                                "--set=checkpoint.every=5", *small], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TANDEM_THREADS": "1", "TANDEM_TUNE": "0"})
    Server.started.append(process)
    found = None
    while not found:
        line = process.stderr.readline()
        expect(line, "no page")
        found = re.search(r"Live page of .*: (http://127\.0\.0\.1:\d+/)", line)
    log = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr))
    reader.start()
    browser.problems.clear()
    browser.open(found[1], 1280)
    rows = "[...document.querySelectorAll('#events-table tbody tr')].map((r) => [...r.children].map((c) => c.textContent))"
    browser.await_true(f"{rows}.some((row) => row[0] === 'recovered')")
    limit = time.time() + 60
    while True:  # steps after the one that was lost
        with urllib.request.urlopen(found[1] + "state.json", timeout=20) as answer:
            if json.loads(answer.read())["step"] > 15:
                break
        expect(time.time() < limit, "no step after the recovery")
        time.sleep(0.1)
    shown = {row[0]: row[1:] for row in browser.value(rows)}
    expect(shown["lost"][0] == shown["recovered"][0] == "0" and "signal 9" in shown["lost"][4], shown)
    expect(shown["lost"][2].endswith(" ms") and shown["recovered"][3].endswith(" ms"), shown)
    process.send_signal(signal.SIGTERM)
    reader.join()
    process.wait()
    browser.await_true("document.getElementById('state').textContent === 'not connected'")
    with open(out + "/metrics.jsonl") as file:
        last = json.loads(file.readlines()[-1])["step"]
    step = re.sub(r"\D", "", browser.value("document.getElementById('eta').textContent").split(" of ")[0])
    expect(int(step) == last > 15, (step, last, log))
    expect(not [p for p in browser.problems if "exceptionDetails" in p], browser.problems)


def test_bad_addresses(folder):
    for address in ("x", "70000", "-1", "a:b:1", ":80", "1.2.3.4:", "80 "):
        result = subprocess.run([TANDEM, "report", folder, f"--live={address}"], capture_output=True, text=True, timeout=20)
        expect(result.returncode != 0 and len(result.stderr.splitlines()) == 1 and "expected [HOST:]PORT" in result.stderr,
               (address, result))
    for words, text in ((["--live=x", "--", "tandem", "train", "--out=a"], "expected [HOST:]PORT"),
                        (["--live=0", "--", "true"], "command true: expected tandem train … --out OUT"),
                        (["--live=0", "--out=b", "--", "tandem", "train", "--out=a"], "--out b: expected none, or that of tandem train, a")):
        result = subprocess.run([TANDEM, "launch", "-n", "1", *words], capture_output=True, text=True, timeout=20, cwd=folder)
        expect(result.returncode != 0 and len(result.stderr.splitlines()) == 1 and text in result.stderr, (words, result))
    server = Server(folder)
    result = subprocess.run([TANDEM, "report", folder, "--live", str(server.port)], capture_output=True, text=True, timeout=20)
    expect(result.returncode != 0 and "cannot listen: Address already in use" in result.stderr, result)
    server.stop()


def test_page(folder, browser, tp, dp, pp, screenshot):
    os.chdir(folder)
    run = Run(f"ranks-{tp * dp * pp}", tp, dp, pp, slow=tp * dp * pp // 2 + 1)
    run.add(1, 120)
    run.write_check()
    server = Server(run.folder)
    for width, dark in ((1280, False), (390, True)):
        browser.problems.clear()
        browser.open(server.url, width, dark=dark)
        browser.await_true("document.getElementById('groups') && !document.getElementById('groups').hidden")
        expect(browser.value("document.documentElement.dataset.theme") == ("dark" if dark else "light"), "theme")
        expect(browser.value("document.documentElement.scrollWidth <= innerWidth"), f"the page scrolls sideways at {width}")
        for fold in ("groups-fold", "links-fold"):
            expect(browser.value(f"document.getElementById('{fold}').open") == (tp * dp * pp >= 8), f"{fold} of {tp * dp * pp} ranks")
            browser.value(f"document.getElementById('{fold}').open = true")
        browser.await_true("document.getElementById('space-map').clientWidth > 200")
        hidden = browser.value("[...document.querySelectorAll('section')].filter((s) => s.hidden).map((s) => s.id)")
        expect(hidden == ["events"], hidden)
        expect(browser.value("[...document.querySelectorAll('#missing li')].map((li) => li.textContent.split(':')[0])") ==
               ["Faults and recoveries"], "what is not shown")
        colors = browser.value("""['loss', 'speed', 'steps', 'step-time', 'ranks-map', 'groups-map', 'space-map'].map((id) => {
          const canvas = document.getElementById(id), seen = new Set();
          const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
          return seen.size; })""")
        expect(min(colors) >= 3, colors)
        expect(browser.value("Chart.getChart('loss').options.scales.y.title.text") == "nats per token", "the axis' unit")
        slow = browser.value("document.getElementById('ranks-slow').textContent")
        expect(f"rank {run.slow} " in slow and "backward" in slow, slow)
        # Keys alone lead to the slow rank.
        browser.value("document.getElementById('groups-map').focus()")
        slow_at = (run.slow % tp, run.slow // tp % dp, run.slow // tp // dp)
        for key, count in zip(("ArrowDown", "ArrowRight", "PageDown"), slow_at):
            for _ in range(count):
                browser.key(key)
        text = browser.value("document.getElementById('groups-rank').textContent")
        expect(text.startswith(f"rank {run.slow}: tp {slow_at[0]}, dp {slow_at[1]}, pp {slow_at[2]}, host node{run.slow // 8}"), text)
        expect(", longest over it in backward." in text, text)
        expect(re.search(r"own work 1\.1\d×", text), text)
        # A click on its neighbour in the first stage, which is where it is drawn.
        spot = browser.value("""(() => { const c = document.getElementById('groups-map').getBoundingClientRect();
          return [c.left + 3, c.top + 3]; })()""")
        browser.value("document.getElementById('groups-map').scrollIntoView({ block: 'center' })")
        spot = browser.value("""(() => { const c = document.getElementById('groups-map').getBoundingClientRect();
          return [c.left + 3, c.top + 3]; })()""")
        for kind in ("mousePressed", "mouseReleased"):
            browser.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)
        text = browser.value("document.getElementById('groups-rank').textContent")
        expect(text.startswith("rank 0: "), text)
        # The page before may ask its own server, which has ended, once more.
        problems = [each for each in browser.problems if "REFUSED" not in str(each) or server.url in str(each)]
        expect(not problems, problems)
    step = browser.value("document.getElementById('eta').textContent")
    expect(step.startswith("step 120 of 200"), step)
    run.add(121, 130)
    run.add_event()
    browser.await_true("document.getElementById('eta').textContent.startsWith('step 130 of 200')")
    browser.await_true("!document.getElementById('events').hidden")
    expect(browser.value("document.images.length") == 0, "a cause became an element")
    if screenshot:
        browser.open(server.url, 1280)
        browser.await_true("document.getElementById('groups') && !document.getElementById('groups').hidden")
        browser.save(screenshot)
    server.process.terminate()
    server.process.wait()
    browser.await_true("document.getElementById('state').textContent === 'not connected'")


def timed(test, *arguments):
    begin = time.time()
    test(*arguments)
    print(f"{time.time() - begin:5.1f} s {test.__name__}")


def main():
    folder = tempfile.mkdtemp(prefix="tandem-live-")
    try:
        if MODE == "short":
            timed(test_bad_addresses, folder)
            timed(test_training_starts_it, folder)
            timed(test_numbers_follow_the_files, folder)
            timed(test_runs_that_end_by_time_are_done, folder)
            timed(test_clients_cannot_hurt_it, folder)
            timed(test_memory_is_bounded, folder)
        if not shutil.which("chromium"):
            print("chromium is not installed: pages not opened")
            return
        browser = Browser(folder + "/profile")
        try:
            if MODE == "short":
                for hosts in (False, True):
                    timed(test_launcher_shows_faults, folder, browser, hosts)
            for layout in ([(1, 4, 1), (4, 8, 2)] if MODE == "short" else [(8, 64, 8)]):
                timed(test_page, folder, browser, *layout, sys.argv[3] if len(sys.argv) > 3 else None)
        finally:
            browser.close()
    finally:
        for process in Server.started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


main()
