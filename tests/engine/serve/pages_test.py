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
    finally:
        if browser:
            browser.close()
        for process in STARTED:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


main()
