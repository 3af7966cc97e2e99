#!/usr/bin/env python3
"""bench_serve_test.py TANDEM MODEL: `tandem bench serve` against servers that answer, refuse and die."""
import http.server
import json
import math
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
import xml.etree.ElementTree as xml

from serve_server import MODEL, TANDEM, TEMPLATE, Server, expect

FOLDER = tempfile.TemporaryDirectory()
JSON, CHART = (str(pathlib.Path(FOLDER.name, name)) for name in ("load.json", "load.svg"))


def bench(url, *options, code=0):
    run = subprocess.run([TANDEM, "bench", "serve", url, *map(str, options)], capture_output=True, text=True, timeout=120)
    expect(run.returncode == code, (run.returncode, run.stdout, run.stderr))
    expect(code == 0 or len(run.stderr.strip().splitlines()) == 1, run.stderr)
    return run


def results(url, *options, code=0):
    run = bench(url, "--json", JSON, *options, code=code)
    return json.loads(pathlib.Path(JSON).read_text()), run


class Scripted(http.server.BaseHTTPRequestHandler):
    """A server of another kind: its parts come at known times, and it dies after `lives` texts."""
    protocol_version = "HTTP/1.1"
    lives, delay, usage = math.inf, 0.05, {"other": 1}

    def do_GET(self):
        content = b'{"object": "list", "data": [{"id": "other"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        expect(body["model"] == "other" and body["stream"] and body["temperature"] == 0, body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        Scripted.lives -= 1
        for i in range(body["max_tokens"]):
            time.sleep(self.delay * (3 if i == 0 else 1))
            if Scripted.lives < 0:
                return
            self.event({"choices": [{"index": 0, "text": "a"}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "error": None, "usage": self.usage and usage | self.usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, content):
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_):
        pass


def long_model():
    """MODEL with a context of 256 tokens."""
    model = pathlib.Path(FOLDER.name, "llama3")
    shutil.copytree(MODEL, model)
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 256}))
    return str(model)


def test_our_server():
    server = Server(long_model(), "--batch", "4")
    url = f"http://{server.host}:{server.port}/v1"
    found, run = results(url, "--streams", "1,4", "--requests", 12, "--prompt", 20, "--new", 8, "--chart", CHART)
    expect([each["concurrency"] for each in found] == [1, 4], found)
    for each in found:
        expect((each["requests"], each["whole"], each["tokens"], each["prompt_tokens"]) == (12, 12, 96, 240), each)
        expect(0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p99"], each)
        expect(abs(each["tokens_per_s"] - 96 / each["seconds"]) <= 0.02 * each["tokens_per_s"], each)
    expect(len(run.stdout.splitlines()) == 4, run.stdout)
    expect(len(xml.parse(CHART).findall(".//{*}circle")) == 4, "a mark for each load and percentile")
    apart, _ = results(url, "--streams", "1,4", "--requests", 8, "--prompt", 150, "--new", 1)
    expect([each["cached_tokens"] for each in apart] == [0, 0], "loads have prompts of their own")
    shared = ("--requests", 10, "--streams", 1, "--prompt", 150, "--new", 1, "--shared-prefix", 128)
    all_share, none = (results(url, *shared, "--share", share, "--seed", 5)[0][0] for share in (1, 0))
    expect(all_share["cached_tokens"] == 9 * 128 and abs(all_share["prefix_hit"] - 9 * 128 / 1500) < 1e-3, all_share)
    expect(none["cached_tokens"] == 0, none)
    lengths = results(url, "--requests", 6, "--rate", 200, "--seed", 1)[0][0]
    expect(lengths["prompt"]["median"] == 99 and lengths["rate"] == 200 and lengths["whole"] == 6, lengths)
    refused, _ = results(url, "--requests", 8, "--streams", 2, "--prompt", 100000, "--new", 1, code=3)
    expect(refused[0]["whole"] == 0 and "400" in refused[0]["error"], refused)
    expect(refused[0]["requests"] == 8 and refused[0]["itl_ms"] is None, refused)


def test_other_servers():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    found = results(url, "--streams", 2, "--requests", 4, "--prompt", 3, "--new", 5)[0][0]
    times = {key: found[key + "_ms"] for key in ("ttft", "itl", "mean_token", "text")}
    expect(150 <= times["ttft"]["p50"] and 50 <= times["itl"]["p50"] + 1, times)
    expect(150 <= times["text"]["p50"] and 49 <= times["mean_token"]["p50"] <= times["itl"]["p99"], times)
    expect(found["seconds"] >= 2 * 0.35 and found["tokens"] == 20, found)
    random = results(url, "--rate", 10, "--requests", 5, "--prompt", 3, "--new", 1)[0][0]
    expect(random["whole"] == 5 and random["text_ms"]["p99"] < 1000 * random["seconds"], random)
    Scripted.lives = 3
    partial, run = results(url, "--streams", "1,2", "--requests", 6, "--prompt", 3, "--new", 2, code=3)
    expect([(each["requests"], each["whole"], each["tokens"]) for each in partial] == [(6, 3, 6), (6, 0, 0)], partial)
    expect("ends" in run.stderr or "end of stream" in run.stderr, run.stderr)
    Scripted.lives, Scripted.usage = math.inf, {"prompt_tokens": None}
    uncounted = results(url, "--streams", 1, "--requests", 2, "--prompt", 3, "--new", 2)[0][0]
    expect((uncounted["whole"], uncounted["tokens_are"]) == (2, "counted by the server"), uncounted)
    Scripted.usage = None
    uncounted = results(url, "--streams", 1, "--requests", 2, "--prompt", 3, "--new", 2)[0][0]
    expect((uncounted["tokens"], uncounted["tokens_are"]) == (4, "parts"), uncounted)
    server.shutdown()
    server.server_close()
    expect("Connection refused" in bench(url, code=3).stderr, "a server that is gone")


def test_a_folder():
    """The server of a folder is started with the options after --, and ended; chats are of its template's tokens."""
    model = pathlib.Path(FOLDER.name, "chats")
    shutil.copytree(pathlib.Path(FOLDER.name, "llama3"), model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    load = ("--streams", 2, "--requests", 4, "--prompt", 30, "--new", 6)
    found = results(str(model), *load, "--chat", "--", "--batch", 2)[0][0]
    expect((found["whole"], found["tokens"], found["endpoint"]) == (4, 24, "chat"), found)
    expect(found["prompt_tokens"] > 4 * 30 and found["ready_s"] > 0 and found["ttft_ms"]["p50"] > 0, found)
    running = subprocess.run(["pgrep", "-f", f"serve {model}"], capture_output=True, text=True).stdout
    expect(running == "", f"still running: {running}")
    for arguments, words in (((str(model), "--", "--batch", 0), "--batch"), (("http://x", "--", "--tp", 2), "expected a model's folder"),
                             ((FOLDER.name,), "config.json")):
        run = subprocess.run([TANDEM, "bench", "serve", *map(str, arguments)], capture_output=True, text=True, timeout=60)
        expect(run.returncode != 0 and words in run.stderr, (arguments, run.stderr))


def test_bad_urls():
    for url, words in (("ftp://x", "expected http://HOST"), ("http://", "expected http://HOST"), ("http://x:0", "expected http"),
                       ("http://x:99999", "expected http"), ("http://[::1", "expected http"), ("http://x?y", "expected http"), ("http://nowhere.invalid", "nowhere.invalid")):
        run = subprocess.run([TANDEM, "bench", "serve", url], capture_output=True, text=True, timeout=60)
        expect(run.returncode != 0 and words in run.stderr, (url, run.stderr))


if __name__ == "__main__":
    test_bad_urls()
    test_other_servers()
    try:
        test_our_server()
        test_a_folder()
    finally:
        for process in Server.started:
            process.kill()
