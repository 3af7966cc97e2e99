#!/usr/bin/env python3
"""chat_page_test.py TANDEM MODEL: the page of `tandem serve` in a browser: history, settings, Enter, regenerate, copy, stop, chats of
before, Markdown, the speed that it shows, names of its controls, nothing cut; without a chat template it continues texts."""
import json
import shutil

from browser import Browser, contrast, expect
from serve_server import MODEL, Server, chat_model

# Records requests and what is copied. `window.stub`: text whose words a made-up answer streams, with the times of its pieces.
HOOKS = """(() => {
  const real = window.fetch;
  window.bodies = [];
  window.copied = [];
  Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied.push(text); } } });
  window.fetch = async (path, options) => {
    if (options?.body) window.bodies.push({ path, ...JSON.parse(options.body) });
    if (!options?.body || window.stub === undefined) return real(path, options);
    const words = window.stub.split(/(?<= )/), encoder = new TextEncoder();
    window.times = [];
    return new Response(new ReadableStream({ async start(stream) {
      const send = (event) => stream.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
      for (const word of words) {
        if (options.signal.aborted) return stream.error(new DOMException('', 'AbortError'));
        send({ choices: [{ delta: { content: word } }] });
        window.times.push(performance.now());
        await new Promise((then) => setTimeout(then, 20));
      }
      send({ choices: [{ delta: {}, finish_reason: 'stop' }] });
      send({ choices: [], usage: { completion_tokens: words.length } });
      stream.close();
    } }));
  };
})()"""
MARKDOWN = """## A head
One **strong** and *soft* `code` in
two lines, [a page](https://example.org/a) and [none](javascript:alert(1)).

1. first
2. second
   - inner
3. third

| a | b |
|---|---|
| 1 | 2 |

```python
x = 1 < 2
```

> quoted

<script>window.broken = true</script> <b>no tag</b>"""


class Page:
    def __init__(self, browser, server, width=1280, dark=False):
        self.browser = browser
        browser.problems.clear()
        browser.open("about:blank", width)
        browser.open(f"http://{server.host}:{server.port}/", width, dark=dark)
        self.wait("/ tokens/.test(document.getElementById('meta')?.textContent)")
        self.value(HOOKS)

    def value(self, expression):
        return self.browser.value(expression)

    def wait(self, expression):
        self.browser.await_true(expression, 30)

    def set(self, name, value):
        self.value(f"document.getElementById('{name}').value = {json.dumps(str(value))}; "
                   f"document.getElementById('{name}').dispatchEvent(new Event('change'))")

    def type(self, text):
        self.value("document.getElementById('prompt').focus()")
        self.browser.call("Input.insertText", text=text)

    def send(self, text):
        self.type(text)
        self.browser.press("Enter", 13, "\r")
        self.wait_done()

    def wait_done(self):
        self.wait("document.getElementById('go').textContent === 'Send' && state.running === null")

    def click(self, label, where="#log article:last-child"):
        self.value(f"[...document.querySelectorAll('{where} button')].find((button) => button.textContent === '{label}').click()")

    def roles(self):
        return self.value("[...document.querySelectorAll('#log article')].map((article) => article.className).join(' ')")

    def check_problems(self):
        problems = [problem for problem in self.browser.problems if problem.get("entry", {}).get("level") != "verbose"]
        expect(not problems, problems)


def test_text(browser, server):
    page = Page(browser, server)
    expect(page.value("document.getElementById('kind').disabled && document.getElementById('kind').value") == "text", "not a page for texts")
    expect("no chat template" in page.value("document.getElementById('meta').textContent"), "no reason")
    page.set("tokens", 5)
    page.send("int main")
    expect(page.value("document.querySelector('#log .text').textContent").startswith("int main"), "the prompt is not shown")
    page.wait("/^5 tokens, the first after \\d+ ms/.test(document.querySelector('.note-of').textContent)")
    expect("limit" in page.value("document.getElementById('status').textContent"), "why it ended is not said")
    # A model that only continues texts does not change what the next one at this address is asked for.
    for kind in ("null", "'chat'"):
        page.value(f"localStorage.setItem('tandem-serve', JSON.stringify({{ settings: {{ kind: {kind} }}, chats: [] }}))")
        page = Page(browser, server)
        page.set("tokens", 5)
        page.send("int main")
        expect(page.value(f"JSON.parse(localStorage.getItem('tandem-serve')).settings.kind === {kind}"), f"the kind {kind} is overwritten")
    page.check_problems()


def test_chat(browser, server):
    page = Page(browser, server)
    expect(page.value("document.getElementById('kind').value") == "chat", "not a chat")
    for name, value in {"system": "S", "tokens": 3, "temperature": 0, "top-p": 0.9, "seed": 3, "stop": "@@@@\n####"}.items():
        page.set(name, value)
    page.type("a")
    browser.press("Enter", 13, "\r", shift=True)
    expect(page.value("document.getElementById('prompt').value") == "a\n", "Shift and Enter do not end a line")
    page.send("b")
    first = page.value("bodies[0]")
    wanted = {"stream": True, "max_tokens": 3, "temperature": 0, "top_p": 0.9, "seed": 3, "stop": ["@@@@", "####"]}
    expect(wanted.items() <= first.items(), first)
    expect(first["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "a\nb"}], first["messages"])
    unstreamed = {key: value for key, value in first.items() if key not in ("path", "stream", "stream_options")}
    answer = server.ask(unstreamed, "/v1/chat/completions")["choices"][0]["message"]["content"]
    expect(page.value("chat().messages[1].content") == answer, "another answer than without a stream")
    page.send("c")
    second = page.value("bodies[1].messages")
    expect([message["role"] for message in second] == ["system", "user", "assistant", "user"] and second[2]["content"] == answer, second)
    page.click("Regenerate")
    page.wait("bodies.length === 3 && state.running === null")
    expect(page.value("bodies[2].messages") == second and page.roles() == "user assistant user assistant", page.roles())
    # An answer stays if the one in its place fails.
    before = page.value("JSON.stringify(chat().messages)")
    page.set("temperature", -1)
    page.click("Regenerate")
    page.wait("bodies.length === 4 && state.running === null")
    expect(page.value("JSON.stringify(chat().messages)") == before and page.roles() == "user assistant user assistant", "a failed answer replaces another")
    expect("temperature" in page.value("document.getElementById('status').textContent"), "the error of another answer is not shown")
    page.set("temperature", 0)
    browser.problems[:] = [problem for problem in browser.problems if "400" not in json.dumps(problem)]
    page.click("Copy")
    expect(page.value("copied[0] === chat().messages[3].content"), "what is copied")

    # The chat and the settings are there after the page was closed, and gone when they are deleted.
    page = Page(browser, server)
    expect(page.value("document.getElementById('system').value") == "S" and page.roles() == "", "settings, or a new chat")
    expect(page.value("[...document.getElementById('chats').options].map((option) => option.text).join('|')") == "New chat|a b", "chats")
    page.value("document.getElementById('chats').selectedIndex = 1; document.getElementById('chats').dispatchEvent(new Event('change'))")
    expect(page.roles() == "user assistant user assistant", page.roles())
    page.value("document.getElementById('delete').click()")
    expect("a\\nb" not in page.value("localStorage.getItem('tandem-serve')"), "a deleted chat is kept")

    # Chats stored by another page of this browser since stay; of all, the 50 changed last.
    titles = "JSON.parse(localStorage.getItem('tandem-serve')).chats.map((each) => each.messages[0].content).join()"
    page.value("localStorage.setItem('tandem-serve', JSON.stringify({ settings: {}, chats: [...Array(50).keys()].map((i) => "
               "({ id: `of another ${i}`, messages: [{ role: 'user', content: `other ${i}` }] })) }))")
    page.send("mine")
    kept = page.value(titles).split(",")
    expect(kept == [f"other {i}" for i in range(1, 50)] + ["mine"], kept)
    page.value("document.getElementById('delete').click()")
    kept = page.value(titles).split(",")
    expect(kept == [f"other {i}" for i in range(1, 50)], kept)

    # A chat that another page of this browser deletes does not come back when it is changed here, and leaves the list once it is not open.
    page.value("document.getElementById('new').click()")
    page.send("both")
    names = "[...document.getElementById('chats').options].map(({ text }) => text).join()"

    def delete(page, name):
        page.value(f"""(() => {{ const list = document.getElementById('chats');
            list.selectedIndex = [...list.options].findIndex(({{ text }}) => text === '{name}');
            list.dispatchEvent(new Event('change'));
            document.getElementById('delete').click(); }})()""")
    first = browser.open_tab()
    second, other = browser.session, Page(browser, server)
    delete(other, "both")
    expect("both" not in other.value(titles) and "other 7" in other.value(names), other.value(names))
    other.check_problems()
    browser.use_tab(first)
    page.send("changed")
    expect("both" not in page.value(titles), "a chat that another tab deleted is back")
    expect("Another tab" in page.value("document.getElementById('status').textContent"), "the deletion is not told")
    expect("both" in page.value(names), "the open chat leaves the list")
    page = Page(browser, server)
    delete(page, "other 7")
    browser.use_tab(second)
    other.wait(f"!({names}).includes('other 7')")
    browser.use_tab(first)

    # An error of the server, and the message is sent once more.
    page.set("temperature", -1)
    page.send("four")
    expect("temperature" in page.value("document.getElementById('status').textContent"), "the error is not shown")
    page.set("temperature", "")
    page.send("five")
    expect(page.roles() == "user assistant" and page.value("chat().messages[0].content") == "five", page.roles())
    browser.problems[:] = [problem for problem in browser.problems if "400" not in json.dumps(problem)]
    page.check_problems()


def test_stream(browser, server):
    page = Page(browser, server)
    page.value(f"window.stub = {json.dumps(MARKDOWN)}")
    page.send("Markdown?")
    text = "document.querySelector('#log .assistant .text')"
    counts = page.value(f"Object.fromEntries(['h4', 'strong', 'em', 'p code', 'ol > li', 'li > ul > li', 'th', 'td', 'pre code', 'blockquote', 'a', 'script', "
                        f"'b', 'br'].map((name) => [name, {text}.querySelectorAll(name).length]))")
    expect(counts == {"h4": 1, "strong": 1, "em": 1, "p code": 1, "ol > li": 3, "li > ul > li": 1, "th": 2, "td": 2, "pre code": 1, "blockquote": 1, "a": 1,
                      "script": 0, "b": 0, "br": 1}, counts)
    expect(page.value(f"{text}.querySelector('a').href") == "https://example.org/a", "the link")
    expect(page.value("window.broken") is None and "<b>no tag</b>" in page.value(f"{text}.textContent"), "HTML of a model")
    page.click("Copy", "#log .code")
    expect(page.value("copied.at(-1)") == "x = 1 < 2", "the code that is copied")

    # The speed is that of the tokens' times.
    shown = float(page.value("document.querySelector('#log .assistant .note-of').textContent.match(/then ([\\d.]+) tokens/)[1]"))
    measured = page.value("1e3 * (times.length - 1) / (times.at(-1) - times[0])")
    expect(abs(shown / measured - 1) < 0.1, f"shows {shown} tokens/s, measured {measured}")

    page.value("window.stub = 'word '.repeat(2000)")
    page.type("Much?")
    browser.press("Enter", 13, "\r")
    page.wait("times.length > 3 && document.getElementById('go').textContent === 'Stop'")
    page.value("document.getElementById('go').click()")
    page.wait_done()
    expect(page.value("document.getElementById('status').textContent") == "Stopped" and page.value("chat().messages[3].content").startswith("word "),
           "a stopped answer is not kept")
    page.check_problems()


def test_readers(browser, server):
    """At both sizes, light and dark: names of controls, contrast, and nothing that is cut or wider than the page."""
    for width in (1280, 390):
        for dark in (False, True):
            what = f"{width} wide, {'dark' if dark else 'light'}"
            page = Page(browser, server, width, dark)
            page.value(f"document.getElementById('settings').open = true; window.stub = {json.dumps(MARKDOWN + ' ' + 'long' * 80)}")
            page.send("unbroken" * 40)
            expect(page.value("document.documentElement.scrollWidth <= innerWidth"), f"{what}: scrolls sideways")
            nameless = page.value("""[...document.querySelectorAll('input, select, textarea, button')].filter((element) => !element.labels?.length &&
                !element.getAttribute('aria-label') && !element.textContent.trim()).map((element) => element.id).join()""")
            expect(nameless == "", f"{what}: without a name: {nameless}")
            cut = page.value("""[...document.querySelectorAll('main button, label, summary, h1, h2, p, article')].filter((element) => element.offsetParent &&
                !element.classList.contains('unseen') && element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0)
                .map((element) => element.outerHTML.slice(0, 80)).join()""")
            expect(cut == "", f"{what}: cut: {cut}")
            for name, least in (("#log .text", 7), (".note-of", 4.5), ("#log button", 7), ("#go", 4.5), ("label", 4.5)):
                colors = page.value(f"""(() => {{ let element = document.querySelector('{name}'); const ink = getComputedStyle(element).color;
                    while (getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)') element = element.parentElement;
                    return [ink, getComputedStyle(element).backgroundColor]; }})()""")
                expect(contrast(*colors) >= least, f"{what}: {name}: {colors}")
            page.check_problems()


def main():
    if not shutil.which("chromium"):
        print("chromium is not installed: the page is not opened")
        return
    with chat_model("tandem-chat-page-") as (folder, model):
        browser = Browser(folder + "/profile")
        try:
            text, chat = (Server(of) for of in (MODEL, model))
            test_text(browser, text)
            for test in (test_chat, test_stream, test_readers):
                test(browser, chat)
        finally:
            browser.close()


main()
