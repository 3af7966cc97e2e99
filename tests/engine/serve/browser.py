"""Headless Chromium for tests of pages."""
import base64
import json
import os
import re
import signal
import subprocess
import time


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def contrast(one, other):
    """Ratio of luminances as in WCAG 2."""
    def luminance(color):
        parts = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


class Browser:
    """Headless Chromium, driven through a pair of pipes."""

    def __init__(self, folder):
        to_read, self.to = os.pipe()
        self.answers, to_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                 f"--user-data-dir={folder}"]
        # The descriptors of the pipes are 3 and 4.
        script = f'exec 3<&{to_read} 4>&{to_write} && exec chromium {" ".join(flags)}'
        self.process = subprocess.Popen(["bash", "-c", script], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.id, self.problems, self.session = b"", 0, [], None
        self.open_tab()

    def open_tab(self):
        """Makes a new tab the one that is driven. Returns the one before, for use_tab."""
        before, self.session = self.session, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")
        return before

    def use_tab(self, session):
        """Timers of a tab behind another are slow."""
        self.session = session
        self.call("Page.bringToFront")

    def read(self):
        while b"\0" not in self.buffer:
            block = os.read(self.answers, 1 << 16)
            expect(block, "the browser has ended")
            self.buffer += block
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(message["params"])
        return message

    def call(self, method, **params):
        self.id += 1
        message = {"id": self.id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.id:
                expect("error" not in answer, answer)
                return answer["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        expect("exceptionDetails" not in result, result)
        return result["result"].get("value")

    def await_true(self, expression, seconds=60):
        end = time.time() + seconds
        while not self.value(expression):
            expect(time.time() < end, f"never true: {expression}")
            time.sleep(0.1)

    def open(self, url, width, height=1000, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=url)

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def press(self, name, code, text="", control=False, shift=False):
        """A key as sliders, lists and buttons need it. `code`: of Windows."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code,
                      modifiers=2 * control + 8 * shift, **({"text": text} if text and kind == "keyDown" else {}))

    def pointer(self, x, y, to_x=None, to_y=None):
        """A click, or a drag."""
        end = (x, y) if to_x is None else (to_x, to_y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        if to_x is not None:
            for step in range(1, 6):
                self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + (to_x - x) * step / 5, y=y + (to_y - y) * step / 5, button="left", buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], button="left", clickCount=1)

    def save(self, path):
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("innerWidth")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.5)
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        os.close(self.to)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
