#!/usr/bin/env python3
"""serve_clients_test.py TANDEM MODEL: clients of `tandem serve` that leave, hostile ones, and its limits and end."""
import concurrent.futures
import json
import signal
import socket
import threading
import time
import resource

from http_clients import send_malformed
from serve_server import Server, chat_model, expect, raw_request


def test_clients_cannot_hurt_it(model):
    server = Server(model, "--tp", "2", "--batch", "1", "--queue", "1000")
    long = {"prompt": "int main", "n": 128, "max_tokens": 4000, "temperature": 1, "stop": ["\x01\x02\x03"]}
    server.ask(long)
    all_rows = server.metric("rows_total")
    for streams in (True, False):  # both leave while their texts are written
        client = raw_request(server, long | {"stream": streams})
        if streams:
            client.recv(100)
        else:
            end = time.time() + 30
            while server.metric("texts_active") == 0:
                expect(time.time() < end, "no text begins")
        client.close()
        server.await_metric("texts_active", 0)
        server.await_metric("pages_used", 0)
    expect(server.metric('requests_total{end="client left"}') == 2, "clients that left")
    rows = server.metric("rows_total") - all_rows
    expect(rows < 1.5 * all_rows, f"{rows} rows for clients that left: {all_rows} for one that does not")
    begun = server.begun()
    deaf = [raw_request(server, long | {"stream": True, "n": 4}) for _ in range(4)]  # they never read
    silent = [server.connect() for _ in range(40)]
    send_malformed(server.connect, [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx"])
    # Neither a length that is refused nor bodies that have been read keep other requests from being read.
    with server.connect() as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        expect(b" 413 " in client.recv(1 << 16), "a long body")
        expect(server.request("GET", "/health")[0] == 200, "health while a long body is refused")
    content = json.dumps(long | {"n": 1}).encode()
    chunked = []
    for _ in range(2):
        for client in [server.connect() for _ in range(20)]:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                           b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
            chunked.append(client)
        end = time.time() + 60
        while server.begun() < begun + len(deaf) + len(chunked):
            expect(time.time() < end, f"{server.begun() - begun} requests have begun: expected {len(deaf) + len(chunked)}")
            time.sleep(0.02)
    expect(server.request("GET", "/health")[0] == 200, "health while texts are written")
    for client in chunked:
        client.close()
    # Several requests on one connection, of which the second is sent before the first is answered.
    one = json.dumps({"prompt": "int", "max_tokens": 5, "seed": 1}).encode()
    two = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(one), one)
    with server.connect() as client:
        client.sendall(two + two)
        got = b""
        while got.count(b'"usage"') < 2:
            block = client.recv(1 << 16)
            expect(block, got)
            got += block
    expect(server.memory_mb() < 1000, f"memory: {server.memory_mb()} MB")
    for client in deaf + silent:
        client.close()
    server.await_metric("texts_active", 0)
    server.stop()


def read_answer(client):
    """Whole answer of a connection, without interim ones."""
    got = b"".join(iter(lambda: client.recv(1 << 16), b""))
    while got.startswith(b"HTTP/1.1 100 "):
        got = got.partition(b"\r\n\r\n")[2]
    return got


def test_how_clients_end(model):
    """One that sends no more gets its answer; one that leaves ends its texts, also after further bytes."""
    server = Server(model, "--batch", "1", "--queue", "1000")
    long = {"prompt": "int main", "n": 128, "max_tokens": 4000, "temperature": 1, "ignore_eos": True}
    other = raw_request(server, long | {"n": 20})  # the texts of the next clients wait for its texts
    server.await_metric("requests_active", 1)
    short = {"prompt": "int", "max_tokens": 5, "seed": 1}
    waiting = [raw_request(server, short | {"stream": streams}) for streams in (False, True)]
    for client in waiting:
        client.shutdown(socket.SHUT_WR)
    for client, end in zip(waiting, (b"}", b"data: [DONE]\n\n\r\n0\r\n\r\n")):
        got = read_answer(client)
        expect(got.startswith(b"HTTP/1.1 200 ") and got.endswith(end), got)
    read_one = other.recv(1 << 16)
    expect(read_one.startswith(b"HTTP/1.1 200 "), read_one)
    other.close()
    for count, streams in enumerate((False, True)):
        client = raw_request(server, long | {"stream": streams})
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server.await_metric("requests_active", 1)
        client.close()
        server.await_metric("texts_active", 0)
        server.await_metric('requests_total{end="client left"}', count + 1)
    server.stop()


def test_one_client_does_not_cost_others(model):
    server = Server(model)
    keys = ",".join(f'"{i}":0' for i in range(700_000))
    bodies = [("/v1/completions", "{" + keys + "}", 400), ("/tokenize", json.dumps({"prompt": "x " * 3_500_000}), 200),
              ("/v1/chat/completions", '{"messages": [{' + keys + ', "role": "user", "content": "x"}], "max_tokens": 2}', 200)]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = [(pool.submit(server.request, "POST", path, body), status) for path, body, status in bodies * 2]
        while not all(each.done() for each, _ in asked):
            begin = time.time()
            expect(server.ask({"prompt": "int", "max_tokens": 2})["usage"]["prompt_tokens"] > 0, "a small request")
            expect(time.time() - begin < 10, f"{time.time() - begin} s for a small request next to large ones")
        for each, status in asked:
            expect(each.result()[0] == status, each.result()[1][:300])
    # Clients that say nothing make room for others.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    silent = [server.connect() for _ in range(min(1100, limit[1] - 100))]
    for _ in range(20):
        expect(server.request("GET", "/health")[0] == 200, "health next to silent clients")
    for client in silent:
        client.close()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # an end while large requests are read
        for path, body, _ in bodies:
            pool.submit(server.request, "POST", path, body).add_done_callback(lambda each: each.exception())
        time.sleep(0.2)
        server.stop()


def test_bodies_are_bounded_by_their_bytes(model):
    """Not by their number: those whose length is unknown, or whose bytes do not come, hold next to none. Of too many
    bytes the largest bodies are refused."""
    server = Server(model)
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    slow = []
    for header in (b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"Content-Length: 8000000\r\n\r\n{"):
        for _ in range(50):
            slow.append(server.connect())
            slow[-1].sendall(begin + header)
    for _ in range(3):
        server.ask({"prompt": "int", "max_tokens": 2})
    large = [server.connect() for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        def send(client):
            try:
                client.sendall(begin + b"Content-Length: 8000000\r\n\r\n{" + b" " * 7_900_000)
            except OSError:
                pass  # refused meanwhile
        list(pool.map(send, large))
    server.ask({"prompt": "int", "max_tokens": 2})
    refused = 0
    for client in large:
        client.settimeout(0.2)
        try:
            refused += b" 503 " in client.recv(1 << 16)
        except OSError:
            pass
    expect(refused > 0, "316 MB of bodies are held")
    expect(server.memory_mb() < 1000, f"memory: {server.memory_mb()} MB")
    for client in slow + large:
        client.close()
    server.stop()


def test_end_with_a_client_that_does_not_read(model):
    server = Server(model, "--queue", "1000")
    body = {"messages": [{"role": "user", "content": "x"}], "n": 128, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    client = raw_request(server, body, "/v1/chat/completions")  # its answer is larger than the buffers of a connection
    server.await_metric("requests_active", 1)
    server.await_metric("texts_active", 0)
    server.stop()
    expect("closing 1 connections whose answers were not sent in 5 s" in server.process.stderr.read(), "what was waited for")
    client.close()


def test_slow_reader_gets_all(model):
    """Events that do not fit into the buffers of a connection wait for a client that reads late, and keep their order."""
    server = Server(model, "--queue", "1000")
    body = {"messages": [{"role": "user", "content": "x"}], "n": 128, "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
            "temperature": 1, "seed": 5}
    path = "/v1/chat/completions"
    expected = server.ask(body, path)["choices"]
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((server.host, server.port))
    client.settimeout(60)
    content = json.dumps(body | {"stream": True}).encode()
    client.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
                   % (path.encode(), len(content), content))
    server.await_metric("requests_active", 1)
    server.await_metric("texts_active", 0)
    body, begin, events = read_answer(client).partition(b"\r\n\r\n")[2], 0, b""
    while begin < len(body):
        size, begin = int(body[begin:body.index(b"\r\n", begin)], 16), body.index(b"\r\n", begin) + 2
        events += body[begin:begin + size]
        expect(body[begin + size:begin + size + 2] == b"\r\n", body[begin:begin + 100])
        begin += size + 2
    expect(len(events) > 8 << 20, f"{len(events)} bytes may fit into the buffers")
    texts = [""] * len(expected)
    tokens = [[] for _ in expected]
    *events, done, end = events.decode().split("\n\n")
    expect((done, end) == ("data: [DONE]", ""), done)
    for event in events:
        choice = json.loads(event.removeprefix("data: "))["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        tokens[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    for text, listed, whole in zip(texts, tokens, expected):
        expect(text == whole["message"]["content"], (text, whole["message"]))
        expect(listed == whole["logprobs"]["content"], "log-probabilities")
    client.close()
    server.stop()


def test_limits_and_end(model):
    server = Server(model, "--queue", "100", "--batch", "1", "--name", "small", "--tp", "2", address="127.0.0.2:0",
                    TANDEM_API_KEY="secret")
    key = {"Authorization": "Bearer secret"}
    for host, status in (("127.0.0.2", 200), ("LocalHost:80", 200), ("[::1]:9", 200), ("127.9.9.9:80", 200), ("127.0.0.2.evil.example", 403),
                         ("localhost:evil.example", 403), ("::1", 403), ("[127.0.0.1]", 403), ("[localhost]", 403), ("10.0.0.1", 403), ("", 403)):
        expect(server.request("GET", "/health", Host=host)[0] == status, host)
    body = {"prompt": "int", "n": 100, "max_tokens": 4000, "seed": 3, "stop": ["\x01\x02\x03"]}
    for value in ("bearer secret", "BEARER  secret"):
        expect(server.request("GET", "/v1/models", Authorization=value)[0] == 200, value)
    for headers in ({}, {"Authorization": "Bearer secreT"}, {"Authorization": "secret"}, {"Authorization": "Bearer "},
                    {"Authorization": "Bearersecret"}, {"Authorization": "Basic secret"}):
        status, text = server.request("POST", "/v1/completions", body, **headers)
        expect(status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key", (status, text))
    expect(server.request("GET", "/health")[0] == 200, "health needs no key")
    expect("TANDEM_API_KEY" not in server.said, server.said)
    with server.connect() as client:  # refused before its body is read
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n")
        expect(b" 401 " in client.recv(1 << 16), "a body without the key")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.request("POST", "/v1/completions", body, **key)))
    asking.start()
    while not answers and server.metric("texts_active", **key) == 0:
        pass
    status, text = server.request("POST", "/v1/completions", body | {"n": 101}, **key)
    expect(status == 400 and "101 texts: expected at most 100" in text, (status, text))
    status, text = server.request("POST", "/v1/completions", body, **key)  # does not fit beside any other
    expect(status == 429 and "too many" in text, (status, text))
    server.process.send_signal(signal.SIGTERM)  # what has begun is finished
    while not answers:  # and nothing else begun
        try:
            status, text = server.request("GET", "/health")
        except OSError:
            break
        if status != 200:
            expect(status == 503 and "ending" in text, (status, text))
            break
    asking.join()
    expect(answers[0][0] == 200 and len(json.loads(answers[0][1])["choices"]) == 100, answers)
    expect(server.process.wait(30) == 0, server.process.returncode)


def main():
    with chat_model("tandem-serve-clients-") as (_, model):
        test_clients_cannot_hurt_it(model)
        test_how_clients_end(model)
        test_one_client_does_not_cost_others(model)
        test_bodies_are_bounded_by_their_bytes(model)
        test_end_with_a_client_that_does_not_read(model)
        test_slow_reader_gets_all(model)
        test_limits_and_end(model)


main()
