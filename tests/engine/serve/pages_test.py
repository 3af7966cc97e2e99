#!/usr/bin/env python3
"""pages_test.py TANDEM MODEL: the pages of live, report, plan and serve have one head: style, light and dark,
phone, keys, nothing from elsewhere."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

from browser import Browser, contrast, expect
from recorded_run import Run

TANDEM, MODEL = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
STARTED = []


def start(*words):
    """Address that a server of the program prints."""
    process = subprocess.Popen([TANDEM, *words], stderr=subprocess.PIPE, text=True)
    STARTED.append(process)
    for line in process.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found:
            return found[0]
    raise AssertionError(f"no address of {words}")


def write_pages(folder):
    """Addresses by title."""
    run = Run(folder + "/run", 1, 4, 1, slow=1)
    run.add(1, 60)
    subprocess.run([TANDEM, "report", run.folder], check=True, stdout=subprocess.DEVNULL)
    with open(folder + "/hardware.toml", "w") as file:
        file.write('gpu = "H100"\ngpus_per_host = 8\nmemory_gib = 80\n[link]\nhost = 450\nnetwork = 50\n')
    with open(folder + "/job.toml", "w") as file:
        file.write("[model]\nvocab = 32768\nhidden = 4096\nlayers = 8\nheads = 32\nkv_heads = 8\nhead_dim = 128\nffn = 11264\nmax_seq = 4096\n"
                   "[train]\nbatch = 96\nseq = 4096\n[data]\npaths = [\"x\"]\n")
    subprocess.run([TANDEM, "plan", "job.toml", "--gpus", "8", "--hardware", "hardware.toml", "--out", "planned.toml", "--page", "plan.html"],
                   check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return {"Tandem live": start("report", run.folder, "--live", "0"), "Tandem report": f"file://{run.folder}/report.html",
            "Tandem plan": f"file://{folder}/plan.html", "Tandem serve": start("serve", MODEL, "--port", "0")}


def read(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_one_head(pages):
    """Styles differ by what is added to the common one; nothing is loaded from elsewhere."""
    heads = {title: read(url).split("<main>")[0] for title, url in pages.items()}
    style = re.search(r"<style>.*</style>", heads["Tandem live"], re.S)[0].removesuffix("</style>").rstrip()
    for title, head in heads.items():
        expect(f"<title>{title}</title>" in head and f'<h1 id="title">{title}</h1>' in head, f"{title}: the title")
        expect(style in head, f"{title}: another style")
        expect(head.count("<style>") == 1 and 'name="viewport"' in head and '<html lang="en">' in head, f"{title}: {head[:300]}")
        page = read(pages[title])
        expect(not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page) and "@import" not in page, f"{title} loads something")
        expect(not re.search("@[A-Z]+@", page), f"{title}: a mark remains")


def test_readers(browser, pages):
    for title, url in pages.items():
        for width, dark in ((1280, False), (390, True)):
            what = f"{title}, {width} wide"
            browser.problems.clear()
            browser.open("about:blank", width)
            browser.open(url, width, dark=dark)
            browser.await_true("document.documentElement?.dataset.theme")
            theme = "document.documentElement.dataset.theme"
            expect(browser.value(theme) == ("dark" if dark else "light"), f"{what}: theme")
            expect(browser.value("document.documentElement.scrollWidth <= innerWidth"), f"{what}: scrolls sideways")
            ink, paper = (browser.value(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
            expect(contrast(ink, paper) >= 7, f"{what}: {ink} on {paper}")
            # The first stop of the Tab key switches the theme, with a visible focus.
            browser.value("document.activeElement.blur()")
            browser.press("Tab", 9)
            expect(browser.value("document.activeElement.id") == "theme" or title == "Tandem serve", f"{what}: first stop")
            browser.value("document.getElementById('theme').focus()")
            expect(browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", f"{what}: no visible focus")
            browser.press("Enter", 13, "\r")
            expect(browser.value(theme) == ("light" if dark else "dark"), f"{what}: theme by key")
            expect(not browser.problems, (what, browser.problems))


def charted(browser, what):
    return browser.value(f"page.charts.map(({{ scales }}) => scales.x.{what})")


def test_curves(browser, folder):
    """Two runs in one report: zoom, axes and smoothing of all charts, names that hide a run, settings that differ."""
    runs = [Run(f"{folder}/{name}", 1, 2, 1, slow=1) for name in ("first", "second")]
    for i, run in enumerate(runs):
        run.add(1, 40 + 20 * i)
    with open(runs[1].folder + "/config.toml", "a") as file:
        file.write("[optimizer]\nlr = 0.25\n")
    subprocess.run([TANDEM, "report", *(run.folder for run in runs)], check=True, stdout=subprocess.DEVNULL)
    for width, dark in ((1280, True), (390, False)):
        browser.problems.clear()
        browser.open("about:blank", width)
        browser.open(f"file://{runs[0].folder}/report.html", width, dark=dark)
        browser.await_true("typeof page === 'object' && page.charts.length === 3")
        expect(not browser.value("document.documentElement.scrollWidth > innerWidth"), f"{width}: scrolls sideways")
        expect(browser.value("document.getElementById('runs').innerText.includes('0.25')"), "the settings do not differ")
        expect(browser.value("[...document.querySelectorAll('#learning input, #learning select')].every((each) => each.closest('label').innerText.trim())"), "a control has no label")
        muted, card = (browser.value(f"(() => {{ const of = getComputedStyle(document.querySelector('{of}')); return of.{name}; }})()")
                       for of, name in (("#curve-note", "color"), ("#learning", "backgroundColor")))
        expect(contrast(muted, card) >= 4.5, f"{muted} on {card}")
        expect(set(charted(browser, "max")) == {60} and set(charted(browser, "min")) == {1}, charted(browser, "max"))
        left, top, wide = browser.value("(() => { const canvas = document.getElementById('loss'), { left, right, top } = Chart.getChart(canvas).chartArea; "
                                        "canvas.scrollIntoView({ block: 'center' }); const box = canvas.getBoundingClientRect(); return [box.left + left, box.top + top + 20, right - left]; })()")
        browser.pointer(left + 0.5 * wide, top, left + 0.75 * wide, top)
        low, high = charted(browser, "min")[0], charted(browser, "max")[0]
        expect(abs(low - 30.5) < 1 and abs(high - 45.25) < 1 and len(set(charted(browser, "min"))) == 1, (low, high))
        browser.value("document.getElementById('loss').focus()")
        browser.press("+", 187, "+")
        expect(low < charted(browser, "min")[1] < charted(browser, "max")[1] < high, charted(browser, "min"))
        browser.value("document.getElementById('loss').dispatchEvent(new MouseEvent('dblclick'))")
        expect(set(charted(browser, "max")) == {60} and browser.value("document.getElementById('curve-reset').hidden"), "a double click does not reset")
        for name, last in (("tokens", 60 * 4096), ("elapsed_s", 7.5)):
            browser.value(f"(() => {{ const x = document.getElementById('curve-x'); x.value = '{name}'; x.dispatchEvent(new Event('change')); }})()")
            expect(set(charted(browser, "max")) == {last}, (name, charted(browser, "max")))
        browser.value("['curve-log', 'curve-log-x'].forEach((id) => document.getElementById(id).click())")
        expect(set(charted(browser, "type")) == {"logarithmic"} and browser.value("page.charts[0].scales.y.type") == "logarithmic", "no logarithm")
        # A centred window returns a line as it is, to its ends, and the mean of noise.
        line = [0.5 * i for i in range(200)]
        smooth = browser.value(f"curves.smooth({line})")
        expect(all(abs(a - b) < 1e-9 for a, b in zip(line, smooth)), "smoothing lags")
        noise = browser.value("curves.smooth(Array.from({ length: 200 }, (_, i) => i % 2)).slice(20, 180)")
        expect(max(noise) < 0.7 and min(noise) > 0.3, "nothing is smoothed")
        shown = "page.charts[0].data.datasets.filter((set, i) => page.charts[0].isDatasetVisible(i)).length"
        before = browser.value(shown)
        browser.value("(() => { const chart = page.charts[0]; chart.legend.options.onClick.call(chart.legend, {}, chart.legend.legendItems[1], chart.legend); })()")
        expect(browser.value(shown) == before // 2 and before >= 2, "a name does not hide its run")
        expect(not browser.problems, browser.problems)


def main():
    if not shutil.which("chromium"):
        print("chromium is not installed: pages not opened")
        return
    folder = tempfile.mkdtemp(prefix="tandem-pages-")
    os.environ["TANDEM_CACHE_DIR"] = folder + "/cache"
    browser = None
    try:
        pages = write_pages(folder)
        test_one_head(pages)
        browser = Browser(folder + "/profile")
        test_readers(browser, pages)
        test_curves(browser, folder)
    finally:
        if browser:
            browser.close()
        for process in STARTED:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


main()
