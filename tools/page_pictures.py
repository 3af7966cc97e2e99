#!/usr/bin/env python3
"""page_pictures.py TANDEM [FOLDER]: pictures of the live page, the report and the planner's page with made-up runs
of 4, 64 and 4,096 ranks, of a report that compares two, and of the page to chat with a made-up chat: light, dark, and
dark on a phone. Without FOLDER those of the guides, docs/images/pages/. Needs chromium and NumPy."""
import base64
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + "/../tests/engine/serve")
sys.dont_write_bytecode = True
from browser import Browser  # noqa: E402
from live_server import Server  # noqa: E402
from recorded_run import write_recorded  # noqa: E402

SIZES = {4: (2, 2, 1, 1), 64: (4, 8, 2, 4), 4096: (8, 64, 8, 8)}
MODES = {"light": (1120, False), "dark": (1120, True), "phone": (390, True)}
COLORS = 96
# Pages, and from which to which section they are shown.
PAGES = {"live": ("groups", "links"), "report": ("ranks", "groups"), "plan": (None, None), "compare": ("learning", "runs"), "chat": (None, "form")}
IN_GUIDES = {("live", 64, "light"), ("live", 4096, "dark"), ("report", 4096, "light"), ("plan", 64, "light"), ("compare", 4, "light"),
             ("chat", 4, "light")}
SERVED = HERE + "/../tests/engine/infer/families/llama3"
CHAT = [{"role": "user", "content": "Sum the numbers of a list in Python?"},
        {"role": "assistant", "content": "Use `sum`:\n\n```python\ntotal = sum([1, 2, 3])    # 6\n```\n\n| form | result |\n| --- | --- |\n| `sum(x)` | the sum |\n| `sum(x, 10)` | the sum and 10 |",
         "note": "58 tokens, the first after 41 ms, then 63.2 tokens/s"}]
MODEL = {"vocab": 32768, "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672, "max_seq": 4096}


def write_plan(tandem, folder, gpus):
    """Address of the planner's page for a model that fits that many GPUs."""
    model = MODEL if gpus > 4 else MODEL | {"hidden": 4096, "layers": 32, "heads": 32, "ffn": 11008}
    with open(folder + "/job.toml", "w") as file:
        file.write("[model]\n" + "".join(f"{key} = {value}\n" for key, value in model.items()) +
                   f"[train]\nbatch = {max(64, 2 * gpus)}\nseq = 4096\n[data]\npaths = [\"x\"]\n")
    with open(folder + "/hardware.toml", "w") as file:
        file.write('gpu = "H100"\ngpus_per_host = 8\nmemory_gib = 80\n[link]\nhost = 450\nnetwork = 50\n')
    subprocess.run([tandem, "plan", "job.toml", "--gpus", str(gpus), "--hardware", "hardware.toml", "--accuracy", "lossless", "--out", "planned.toml",
                    "--page", f"plan-{gpus}.html"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return f"file://{folder}/plan-{gpus}.html"


def write_compared(tandem, folder, size):
    """Address of a report of two runs, the second with twice the learning rate."""
    runs = []
    for name, rate in (("base", 0.001), ("faster", 0.002)):
        run = write_recorded(f"compare-{size}-{name}", *SIZES[size])
        with open(run.folder + "/config.toml", "a") as file:
            file.write(f"[optimizer]\nlr = {rate}\n")
        lines = [json.loads(line) for line in open(run.folder + "/metrics.jsonl")]
        with open(run.folder + "/metrics.jsonl", "w") as file:
            for line in lines:
                file.write(json.dumps(line | {"loss": line["loss"] * (1 - 100 * (rate - 0.001) * (1 - 1 / line["step"])), "lr": rate}) + "\n")
        runs.append(run.folder)
    subprocess.run([tandem, "report", *runs], check=True, stdout=subprocess.DEVNULL)
    return f"file://{folder}/{runs[0]}/report.html"


def open_chat(browser, address, width, dark):
    """The page with a made-up chat in the browser's storage."""
    browser.open(address, width, dark=dark)
    browser.await_true("typeof state === 'object' && document.getElementById('meta').textContent")
    browser.value(f"localStorage.setItem('tandem-serve', JSON.stringify({{ settings: {{}}, chats: [{{ id: 'made up', messages: {json.dumps(CHAT)} }}] }}))")
    browser.open("about:blank", width)
    browser.open(address, width, dark=dark)
    browser.await_true("typeof state === 'object' && document.getElementById('meta').textContent && document.getElementById('chats').options.length === 2")
    browser.value("open(0); document.activeElement.blur()")


def serve_model(tandem, folder):
    """Address of the page of a small model with a chat template."""
    model = shutil.copytree(SERVED, folder + "/small-chat-model")
    with open(model + "/chat_template.jinja", "w") as file:
        file.write("{% for message in messages %}{{ message.content }}\\n{% endfor %}")
    process = subprocess.Popen([tandem, "serve", model, "--port", "0"], stderr=subprocess.PIPE, text=True)
    Server.started.append(process)
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
            return found[0]
    raise RuntimeError("no address of the page to chat")


def choose(browser, is_focused):
    """The slowest rank, perhaps with its groups only."""
    browser.value("lattice.choose(lattice.data.ranks.work.indexOf(Math.max(...lattice.data.ranks.work))); "
                  f"lattice.focus({'true' if is_focused else 'false'}); rankSpace.paint()")


def await_charts(browser, width):
    """Makes the window as high as the page, which draws its charts again, and waits for them."""
    for _ in range(2):  # without its scroll bar the page may have another height
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=browser.value("document.documentElement.scrollHeight"),
                     deviceScaleFactor=1, mobile=width < 600)
        time.sleep(0.5)
    browser.await_true("""[...document.querySelectorAll("section:not([hidden]) canvas")].every((canvas) => canvas.width &&
        canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value))""")


def capture(browser, first, last):
    """Pixels [height, width, 3] from the top of one section to the end of another, or of the page."""
    box = browser.value(f"""(() => {{ const top = {f"document.getElementById('{first}').getBoundingClientRect().top + scrollY - 8" if first else 0};
        const end = {f"document.getElementById('{last}').getBoundingClientRect().bottom + scrollY + 8" if last else "document.documentElement.scrollHeight"};
        return {{ x: 0, y: top, width: document.documentElement.clientWidth, height: end - top, scale: 1 }}; }})()""")
    image = browser.call("Page.captureScreenshot", format="png", clip=box)["data"]
    size, pixels = browser.call("Runtime.evaluate", awaitPromise=True, returnByValue=True, expression=f"""(async () => {{
        const image = new Image();
        image.src = "data:image/png;base64,{image}";
        await image.decode();
        const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        const bytes = context.getImageData(0, 0, image.width, image.height).data;
        let text = "";
        for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
        return [[image.height, image.width, 4], btoa(text)]; }})()""")["result"]["value"]
    return np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(size)[:, :, :3]


def write_png(path, pixels):
    """With the most frequent colours and, of the others, those that differ most from them; all become the nearest of these."""
    height, width, _ = pixels.shape
    found, inverse, counts = np.unique(pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32), return_inverse=True, return_counts=True)

    def split(values):
        return np.stack([values >> 16, values >> 8 & 255, values & 255], 1).astype(int)
    order = np.argsort(-counts)
    colors, weights = split(found[order]), np.sqrt(counts[order])
    chosen = list(range(min(len(colors), COLORS // 3)))
    far = np.min([((colors - colors[i]) ** 2).sum(1) for i in chosen], 0)
    while len(chosen) < COLORS and far.any():
        chosen.append(int(np.argmax(far * weights)))
        far = np.minimum(far, ((colors - colors[chosen[-1]]) ** 2).sum(1))
    palette = colors[chosen]
    nearest = np.concatenate([((split(block)[:, None] - palette[None]) ** 2).sum(2).argmin(1)
                              for block in np.array_split(found, 1 + len(found) // 4096)]).astype(np.uint8)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), nearest[inverse].reshape(height, width)], 1)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)) +
                   chunk(b"PLTE", palette.astype(np.uint8).tobytes()) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b""))


def main():
    tandem = Server.program = os.path.abspath(sys.argv[1])
    target = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else HERE + "/../docs/images/pages")
    sizes = {"compare": (4,), "chat": (4,)}
    wanted = [(page, size, mode) for page in PAGES for size in sizes.get(page, SIZES) for mode in MODES if len(sys.argv) > 2 or (page, size, mode) in IN_GUIDES]
    os.makedirs(target, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="tandem-pictures-")
    browser = Browser(folder + "/profile")
    try:
        os.chdir(folder)
        for size in sorted({size for _, size, _ in wanted}):
            run = write_recorded(f"run-{size}", *SIZES[size])
            subprocess.run([tandem, "report", run.folder], check=True, stdout=subprocess.DEVNULL)
            server = Server(run.folder)
            addresses = {"live": server.url, "report": f"file://{folder}/{run.folder}/report.html", "plan": write_plan(tandem, folder, size)}
            if any(picture[:2] == ("compare", size) for picture in wanted):
                addresses["compare"] = write_compared(tandem, folder, size)
            for page, _, mode in [picture for picture in wanted if picture[1] == size]:
                width, dark = MODES[mode]
                browser.problems.clear()
                browser.open("about:blank", width)
                if page == "chat":
                    addresses["chat"] = addresses.get("chat") or serve_model(tandem, folder)
                    open_chat(browser, addresses["chat"], width, dark)
                else:
                    browser.open(addresses[page], width, dark=dark)
                if page == "plan":
                    browser.await_true("typeof whatIf === 'object' && whatIf.state.found.length > 0")
                elif page == "compare":
                    browser.await_true("typeof page === 'object' && page.charts.length > 2")
                elif page != "chat":
                    browser.await_true("typeof lattice === 'object' && lattice.data")
                    browser.value("for (const id of ['groups-fold', 'links-fold']) document.getElementById(id).open = true")
                    browser.await_true("document.getElementById('space-map')?.dataset.frameMs && lattice.data")
                    choose(browser, size < 4096)
                await_charts(browser, width)
                path = f"{target}/{page}-{size}-{mode}.png"
                write_png(path, capture(browser, *PAGES[page]))
                print(f"{os.path.getsize(path) / 1e3:6.1f} kB {path}")
                if browser.problems:
                    raise RuntimeError(f"{path}: {browser.problems}")
            server.stop()
    finally:
        browser.close()
        for process in Server.started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


main()
