#!/usr/bin/env python3
"""live_ranks_test.py TANDEM short|long: the live page's ranks in space and links, by keys and by pointer, at 4
and 64 ranks (long: 4,096), and what it says if there is nothing to show. Needs chromium."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

from browser import Browser, expect
from live_server import Server
from recorded_run import RecordedRun

Server.program = os.path.abspath(sys.argv[1])


def chosen(browser):
    return browser.value("lattice.data.ranks.rank[lattice.chosen]")


def fact(browser, name):
    return browser.value(f"[...document.querySelectorAll('#rank-facts dt')].find((dt) => dt.textContent === '{name}').nextSibling.textContent")


def lines(browser, table):
    return browser.value(f"[...document.querySelectorAll('#{table} tbody tr')].map((row) => [...row.children].map((cell) => cell.textContent))")


def test_ranks_in_space(folder, browser, tp, dp, pp, ep):
    """Turned and chosen by keys and by pointer, groups against coordinates, the table, links."""
    run = RecordedRun(f"{folder}/space-{tp * dp * pp}", tp, dp, pp, ep)
    run.add(1, 12)
    run.add_event(rank=run.slow, cause="signal 9")
    server = Server(run.folder)
    browser.problems.clear()
    browser.open(server.url, 1280)
    browser.await_true("document.getElementById('space-map')?.dataset.frameMs && lattice.data.map")
    is_folded = not browser.value("document.getElementById('groups-fold').open || document.getElementById('links-fold').open")
    expect(is_folded == (run.ranks < 8), f"{run.ranks} ranks: folded {is_folded}")
    if is_folded:
        for fold in ("groups-fold", "links-fold"):
            browser.value(f"document.querySelector('#{fold} > summary').focus()")
            browser.press("Enter", 13, "\r")
        browser.await_true("document.getElementById('space-map').clientWidth > 200")
    # Groups are those of the coordinates.
    rank = run.slow
    t, d, p = run.coordinates(rank)
    at = lambda t, d, p: (p * dp + d) * tp + t
    expected = {"tp": [at(i, d, p) for i in range(tp)], "ep": [at(t, d - d % ep + i, p) for i in range(ep)] if ep > 1 else [],
                "dp": [at(t, i, p) for i in range(dp)], "pp": [at(t, d, i) for i in range(pp)], "cp": [rank], "sync": [rank]}
    found = browser.value(f"lattice.groups({rank})")
    expect(found == {axis: [other for other in ranks if other != rank] for axis, ranks in expected.items()}, found)
    # Keys move along the axes, Shift turns, Enter shows the groups only.
    browser.value("document.getElementById('space-map').focus()")
    for key, count in zip((("ArrowDown", 40), ("ArrowRight", 39), ("PageDown", 34)), (t, d, p)):
        for _ in range(count):
            browser.press(*key)
    expect(chosen(browser) == rank, chosen(browser))
    said = browser.value("document.querySelector('#groups-rank[aria-live=polite]').textContent")
    expect(said.startswith(f"rank {rank}: tp {t}, dp {d}{f' (ep {d % ep})' if ep > 1 else ''}, pp {p}, host {run.host(rank)}"), said)
    expect(fact(browser, "host") == run.host(rank) and "signal 9" in fact(browser, "faults"), fact(browser, "faults"))
    expect(("TP wait" in fact(browser, "waits")) == (tp > 1) and "step wait" in fact(browser, "waits"), fact(browser, "waits"))
    expect(fact(browser, "longest phase").startswith("backward, "), fact(browser, "longest phase"))
    image = "document.getElementById('space-map').toDataURL().length + document.getElementById('space-map').toDataURL().slice(2000, 6000)"
    settle = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

    def picture():
        browser.call("Runtime.evaluate", expression=settle, awaitPromise=True)
        return browser.value(image)
    pictures = [picture()]
    for key, code, shift in (("ArrowLeft", 37, True), ("ArrowUp", 38, True), ("Enter", 13, False), ("Escape", 27, False)):
        before = browser.value("({ ...rankSpace.turn })")
        browser.press(key, code, shift=shift)
        expect(chosen(browser) == rank, f"{key} has moved the choice")
        expect((browser.value("({ ...rankSpace.turn })") != before) == shift, f"{key}: turned")
        expect(browser.value("lattice.isFocused") == (key == "Enter"), f"{key}: groups only")
        pictures.append(picture())
    expect(len(set(pictures[:4])) == (4 if max(tp * dp, tp * pp, dp * pp) > 2 else 3) and pictures[4] == pictures[2], "the picture does not follow the keys")
    # The pointer: a drag turns, a click chooses.
    browser.value("document.getElementById('space-map').scrollIntoView({ block: 'center' })")
    browser.value("rankSpace.paint()")
    x, y = browser.value("(() => { const box = document.getElementById('space-map').getBoundingClientRect(), [x, y] = rankSpace.spot(0); return [box.left + x, box.top + y]; })()")
    browser.pointer(x, y)
    expect(chosen(browser) == 0 and browser.value("lattice.isFocused"), chosen(browser))
    before = browser.value("rankSpace.turn.yaw")
    browser.pointer(x, y, x + 60, y)
    expect(browser.value("rankSpace.turn.yaw") > before and chosen(browser) == 0, "a drag does not turn, or chooses")
    browser.value("document.querySelector('#space-turns button').focus()")
    browser.press("Enter", 13, "\r")
    # All ranks are in the table, slowest first, and can be chosen there.
    browser.value("document.querySelector('#ranks-table-box summary').focus()")
    browser.press("Enter", 13, "\r")
    browser.await_true("document.querySelectorAll('#ranks-table tbody tr').length > 0")
    expect(lines(browser, "ranks-table")[0][0] == str(rank), lines(browser, "ranks-table")[0])
    browser.value("document.querySelector('#ranks-table tbody button').focus()")
    browser.press("Enter", 13, "\r")
    expect(chosen(browser) == rank and browser.value("document.activeElement.textContent") == str(rank), "not chosen in the table")
    seen = set()
    while True:
        seen |= {int(row[0]) for row in lines(browser, "ranks-table")}
        if browser.value("document.getElementById('ranks-after').disabled"):
            break
        browser.value("document.getElementById('ranks-after').click()")
    expect(seen == set(range(run.ranks)), f"{len(seen)} ranks in the table")
    browser.value("document.getElementById('groups-view').focus()")
    browser.press("ArrowDown", 40)
    expect(browser.value("lattice.shown != null && document.getElementById('groups-legend').textContent.includes(lattice.data.phases[lattice.shown])"), "no other colour")
    test_links(browser, run)
    # Steps that follow take neither the focus nor the choice, and are not read out.
    browser.value("document.querySelector('#links-pairs tbody button').focus()")
    before = browser.value("document.activeElement.textContent")
    run.add(13, 13)
    browser.await_true("lattice.data.ranks.step[0] === 13")
    expect(browser.value("document.activeElement.textContent") == before and chosen(browser) == rank, "a step takes the focus or the choice")
    browser.await_true("document.getElementById('groups-rank').textContent.includes('; step 13,')")
    expect(browser.value("document.getElementById('groups-rank').getAttribute('aria-live')") == "off", "each step is read out")
    frame_ms = browser.call("Runtime.evaluate", awaitPromise=True, returnByValue=True, expression="""(async () => {
        const times = [];
        for (let i = 0, last = performance.now(); i < 30; ++i) {
          rankSpace.rotate(0.05, 0);
          await new Promise((done) => requestAnimationFrame(done));
          times.push(performance.now() - last);
          last = performance.now();
        }
        return times.sort((a, b) => a - b); })()""")["result"]["value"]
    print(f"      {run.ranks} ranks turn with a frame every {frame_ms[15]:.1f} ms, median; {frame_ms[28]:.1f} ms, 95th percentile")
    expect(not browser.problems, browser.problems)
    browser.open("about:blank", 1280)  # before its source of events ends
    server.stop()


def test_links(browser, run):
    """Axes with their bytes and waits; the host with long waits for replicas is first."""
    sizes = {"TP": run.tp, "EP": run.ep, "DP": run.dp, "PP": run.pp}
    axes = {row[0][:2]: row for row in lines(browser, "links-axes")}
    expect(set(axes) == {axis for axis, size in sizes.items() if size > 1}, axes)
    sent = run.sent()
    if run.dp > 1:
        expect(axes["DP"][1] == f"{(sent['gradient_bytes'] + sent['weight_bytes']) / run.ranks / 1e6:.2f} MB", axes["DP"])
    waits = [float(row[2].split()[0]) for row in lines(browser, "links-axes")]
    expect(waits == sorted(waits, reverse=True), waits)
    pairs = lines(browser, "links-pairs")
    over = [float(row[4].rstrip("×")) for row in pairs]
    expect(over == sorted(over, reverse=True) and len(pairs) <= 20, over)
    hosts = (run.ranks + 7) // 8
    if hosts > 1:
        expect(pairs[0][1] == "DP" and run.far in pairs[0][0] and over[0] > 1.5, pairs[0])
    total = browser.value("lattice.AXES.flatMap(([name]) => lattice.size[name] > 1 ? linkTables.pairs(name) : []).reduce((sum, pair) => sum + pair.count, 0)")
    expected = sum(run.ranks // size * (size - 1) for size in (run.tp, run.dp, run.pp)) + run.ranks // run.ep * (run.ep - 1)
    expect(total == expected, f"{total} pairs of ranks, expected {expected}")


def test_empty_states(folder, browser):
    """A sentence for what is not there."""
    text = "document.getElementById('missing').hidden ? '' : document.getElementById('missing').innerText"
    server = Server(folder + "/nothing")
    browser.open(server.url, 1280)
    browser.await_true("document.getElementById('missing')?.hidden === false")
    found = browser.value(text)
    for sentence in ("no step has finished yet", "no records yet", "trace.ranks", "none so far", "--spares"):
        expect(sentence in found, (sentence, found))
    os.makedirs(folder + "/nothing/ranks")
    with open(folder + "/nothing/ranks/0.from-0.records", "wb") as file:
        file.write(b"of another program" * 20)
    browser.await_true("document.getElementById('missing').innerText.includes('not records of ranks that this version reads')")
    expect("0.from-0.records: has another format" in browser.value("document.getElementById('problems').textContent"), "not named")
    expect(browser.value("[...document.querySelectorAll('section')].filter((s) => !s.hidden).map((s) => s.id)") == ["missing"], "empty sections")
    browser.open("about:blank", 1280)  # before its source of events ends
    server.stop()


def train(folder, name, *more):
    """Lines of metrics.jsonl of a short training on an emulated link."""
    config = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../configs/tiny.toml")
    subprocess.run([Server.program, "train", config, "--tp=2", "--out", f"{folder}/{name}", "--set=train.steps=3", "--set=parallel.link=1GB/s,20us",
                    *[f"--set={key}" for key in more]], check=True, capture_output=True, env={**os.environ, "TANDEM_THREADS": "1", "TANDEM_TUNE": "0"})
    with open(f"{folder}/{name}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def test_bytes_of_a_training(folder, browser):
    """Bytes of layers grow with the batch, are the same in each step, and are on the page."""
    small, large = train(folder, "small", "train.batch=4", "parallel.dp=2"), train(folder, "large", "train.batch=8", "parallel.dp=2")
    for lines_of in small, large:
        expect(len({line["tp_bytes"] for line in lines_of}) == 1 and "expert_bytes" not in lines_of[0], lines_of)
    # Both layers gather and scatter rows of 64 features twice forward and twice backward; each rank sends half of them.
    rows, ranks = 4 * 64, 4
    expect(small[0]["tp_bytes"] >= ranks // 2 * 2 * 8 * rows // 2 * 64 * 4 // 2, small[0]["tp_bytes"])
    ratio = large[0]["tp_bytes"] / small[0]["tp_bytes"]
    expect(1.8 < ratio < 2.001, f"{ratio} times the bytes for twice the batch")
    moe = train(folder, "experts", "model.experts=4", "model.top_k=2", "model.expert_ffn=32", "parallel.dp=2", "parallel.ep=2")
    expect(moe[0]["expert_bytes"] > 0, moe[0])
    server = Server(folder + "/small")
    browser.problems.clear()
    browser.open(server.url, 1280)
    browser.await_true("document.querySelectorAll('#links-axes tbody tr').length === 2")
    axes = {row[0][:2]: row for row in lines(browser, "links-axes")}
    expect(axes["TP"][1] == f"{small[-1]['tp_bytes'] / 4e3:.1f} kB" or axes["TP"][1] == f"{small[-1]['tp_bytes'] / 4e6:.2f} MB", axes)
    expect(axes["TP"][-1].endswith(" %") and "1.00 GB/s, 20 µs" in browser.value("document.getElementById('links-lead').textContent"), axes)
    expect(not browser.problems, browser.problems)
    browser.open("about:blank", 1280)  # before its source of events ends
    server.stop()


def test_learners(folder, browser):
    """Learners are an axis of their own: their ranks are no replicas of each other, and bytes are of the last exchange."""
    rows = train(folder, "learners", "train.batch=4", "parallel.dp=2", "sync.method=local", "sync.learners=2", "sync.every=2")
    sent = [line["sent_bytes"]["sync"] for line in rows]
    expect(sent[0] == 0 < sent[1], sent)
    server = Server(folder + "/learners")
    browser.problems.clear()
    browser.open(server.url, 1280)
    browser.await_true("document.querySelectorAll('#links-axes tbody tr').length === 2")
    axes = {row[0][:4]: row for row in lines(browser, "links-axes")}
    expect(axes["sync"][1] in (f"{sent[1] / 1e3:.1f} kB", f"{sent[1] / 1e6:.2f} MB"), axes)
    expect(browser.value("lattice.groups(0)") == {"tp": [1], "cp": [], "ep": [], "dp": [], "pp": [], "sync": [2]}, browser.value("lattice.groups(0)"))
    expect(browser.value("lattice.coordinates(2)").startswith("learner 1, tp 0, dp 1"), browser.value("lattice.coordinates(2)"))
    expect(not browser.problems, browser.problems)
    browser.open("about:blank", 1280)  # before its source of events ends
    server.stop()


def test_context(folder, browser):
    """Context-parallel ranks are an axis of their own: no replicas of each other, with their bytes and waits."""
    sent = train(folder, "context", "parallel.cp=2", "parallel.dp=2", "train.batch=4")[-1]["sent_bytes"]["cp"]
    server = Server(folder + "/context")
    browser.problems.clear()
    browser.open(server.url, 1280)
    browser.await_true("document.querySelectorAll('#links-axes tbody tr').length === 3")
    axes = {row[0][:2]: row for row in lines(browser, "links-axes")}
    expect(sent > 0 and axes["CP"][1] in (f"{sent / 1e3:.1f} kB", f"{sent / 1e6:.2f} MB"), (axes, sent))
    expect(browser.value("lattice.groups(0)") == {"tp": [1], "cp": [2], "ep": [], "dp": [4], "pp": [], "sync": []}, browser.value("lattice.groups(0)"))
    expect(browser.value("lattice.coordinates(6)") == "tp 0, cp 1, dp 1, pp 0", browser.value("lattice.coordinates(6)"))
    pairs = browser.value("['cp', 'dp'].map((axis) => linkTables.pairs(axis).map(({ text }) => text.split(',')[0]))")
    expect(pairs == [["ranks 0 and 2", "ranks 1 and 3", "ranks 4 and 6", "ranks 5 and 7"], ["ranks 0 and 4", "ranks 1 and 5", "ranks 2 and 6", "ranks 3 and 7"]], pairs)
    expect(not browser.problems, browser.problems)
    browser.open("about:blank", 1280)  # before its source of events ends
    server.stop()


def main():
    if not shutil.which("chromium"):
        print("chromium is not installed: pages not opened")
        return
    folder = tempfile.mkdtemp(prefix="tandem-live-ranks-")
    browser = Browser(folder + "/profile")
    try:
        if sys.argv[2] == "short":
            test_empty_states(folder, browser)
            test_bytes_of_a_training(folder, browser)
            test_learners(folder, browser)
            test_context(folder, browser)
        for layout in ([(2, 2, 1, 1), (4, 8, 2, 2)] if sys.argv[2] == "short" else [(8, 64, 8, 8)]):
            test_ranks_in_space(folder, browser, *layout)
    finally:
        browser.close()
        for process in Server.started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


main()
