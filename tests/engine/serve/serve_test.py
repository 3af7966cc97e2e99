#!/usr/bin/env python3
"""serve_test.py TANDEM MODEL: answers of `tandem serve` against texts of `tandem generate`, and requests that fail or
are refused."""
import concurrent.futures
import http.client
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess

from serve_server import MODEL, TANDEM, Server, chat_model, expect


def random_requests(count):
    """Lines of `generate --prompts`, whose fields the server knows, too."""
    rng, requests = random.Random(7), []
    for i in range(count):
        request = {"prompt": rng.choice(["Tandem trains", "int main() {", "größer ", "日本", ""]) * rng.randint(1, 3),
                   "max_tokens": rng.randint(1, 40), "temperature": rng.choice([0, 0.7, 1.3]), "seed": i}
        if rng.random() < 0.5:
            request["top_p"] = 0.8
        if rng.random() < 0.3:
            request["stop"] = ["e", "ab"]
        requests.append(request)
    return requests


def generate(folder, model, requests, *options):
    with open(folder + "/prompts", "w") as file:
        file.write("".join(json.dumps(request | {"log_probs": True}) + "\n" for request in requests))
    lines = subprocess.run([TANDEM, "generate", model, "--prompts", folder + "/prompts", *options],
                           capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in lines.splitlines()]


def test_texts_are_those_of_generate(folder, server, *options):
    requests = random_requests(24)
    wanted = generate(folder, MODEL, requests, *options)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda request: server.ask(request | {"logprobs": 0}), requests))
        streams = list(pool.map(server.chunks, requests))
    for request, want, answer, chunks in zip(requests, wanted, answers, streams):
        [choice] = answer["choices"]
        expect(choice["text"] == want["text"], (request, choice, want))
        reason = "length" if want["ended_by"] == "max-tokens" else "stop"
        expect(choice["finish_reason"] == reason, (choice, want))
        expect(len(choice["logprobs"]["tokens"]) == want["tokens"], choice)
        expect(max(map(lambda a, b: abs(a - b), choice["logprobs"]["token_logprobs"], want["log_probs"])) < 1e-3, choice)
        expect(answer["usage"]["prompt_tokens"] == want["prompt_tokens"], answer)
        expect("".join(chunk["choices"][0]["text"] for chunk in chunks) == want["text"], (request, chunks))
        expect([chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [reason],
               chunks)
    # Several prompts with several texts each: choice i of a prompt has the seed + i.
    many = server.ask({"prompt": ["int", "main"], "n": 2, "max_tokens": 9, "seed": 5})["choices"]
    expect([choice["index"] for choice in many] == [0, 1, 2, 3], many)
    for choice, (prompt, seed) in zip(many, [("int", 5), ("int", 6), ("main", 5), ("main", 6)]):
        one = server.ask({"prompt": prompt, "max_tokens": 9, "seed": seed})["choices"][0]
        expect(choice["text"] == one["text"], (choice, one))
    tokens = json.loads(server.request("POST", "/tokenize", {"prompt": "int main"})[1])
    expect(tokens["count"] == len(tokens["tokens"]) > 0, tokens)
    one, other = (server.ask({"prompt": prompt, "max_tokens": 9, "temperature": 0}) for prompt in ("int main", tokens["tokens"]))
    expect(one["choices"][0]["text"] == other["choices"][0]["text"], (one, other))


def test_models_of_bytes(folder):
    """Parts of characters are neither sent nor lost."""
    config = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../configs/tiny.toml")
    subprocess.run([TANDEM, "train", config, "--out", folder + "/bytes", "--set", "train.steps=2",
                    "--set", "model.tie_word_embeddings=false"], check=True, capture_output=True)
    requests = [{"prompt": "größer", "max_tokens": 100, "seed": seed, "temperature": 1} for seed in range(12)]
    wanted = generate(folder, folder + "/bytes", requests)
    server = Server(folder + "/bytes")
    joined = 0
    for request, want in zip(requests, wanted):
        whole = server.ask(request)["choices"][0]["text"]
        expect("".join(chunk["choices"][0]["text"] for chunk in server.chunks(request)) == whole, request)
        same = [re.sub("\ufffd+", "\ufffd", text) for text in (whole, want["text"])]
        expect(same[0] == same[1], same)
        joined += any("\x80" <= character != "\ufffd" for character in whole)
    expect(joined > 0, "no character of several bytes")
    server.stop()


def test_logits_that_are_not_finite(folder):
    """fail their own request only."""
    shutil.copytree(folder + "/bytes/final", folder + "/overflow")
    os.remove(folder + "/overflow/state.json")  # as a folder of another program: no hashes
    with open(folder + "/overflow/model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        values = bytearray(file.read())
    header.pop("__metadata__")
    width = header["model.embed_tokens.weight"]["shape"][1]
    for name, token, value in (("model.embed_tokens.weight", "Z", 1e6), ("lm_head.weight", "Q", 5e37)):
        begin = header[name]["data_offsets"][0] + ord(token) * width * 4
        values[begin:begin + width * 4] = struct.pack(f"<{width}f", value, *[0] * (width - 1))  # Z · Q overflows
    with open(folder + "/overflow/model.safetensors", "wb") as file:
        text = json.dumps(header).encode()
        file.write(struct.pack("<Q", len(text)) + text + values)
    for ranks in "1", "2":
        server = Server(folder + "/overflow", "--tp", ranks)
        good = {"prompt": "abc", "max_tokens": 60, "seed": 3, "logit_bias": {str(ord("Z")): -100}}
        bad = {"prompt": "abZ", "max_tokens": 20, "n": 3}
        want = server.ask(good)["choices"]
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            goods = [pool.submit(server.ask, good) for _ in range(4)]
            bads = [pool.submit(server.request, "POST", "/v1/completions", bad) for _ in range(4)]
            stream = pool.submit(server.request, "POST", "/v1/completions", bad | {"stream": True})
        for each in bads:
            status, text = each.result()
            expect(status == 500 and "logits after token 3" in text and "finite numbers" in text, (status, text))
        status, text = stream.result()
        expect(status == 200 and '"error"' in text and "finite numbers" in text and "[DONE]" not in text, (status, text))
        expect(all(each.result()["choices"] == want for each in goods), "texts next to one that fails")
        expect(server.ask(good)["choices"] == want, "a text after one that fails")
        expect(server.metric('requests_total{end="failed"}') == 5, "failed requests")
        for new in 1, 5:  # within a prompt that is scored, whose text could go on
            scored = {"prompt": "aZc", "echo": True, "logprobs": 0, "max_tokens": new}
            status, text = server.request("POST", "/v1/completions", scored)
            expect(status == 500 and "logits after token 2" in text, (status, text))
        server.await_metric("pages_used", 0)
        server.stop()


def test_chats(folder, server, model):
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "größer?"}]
    body = {"messages": messages, "max_completion_tokens": 9, "temperature": 0}
    [want] = generate(folder, model, [{"messages": messages, "max_tokens": 9, "temperature": 0}])
    path = "/v1/chat/completions"
    answer = server.ask(body | {"logprobs": True}, path)
    expect(answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-"), answer)
    expect(answer["choices"][0]["message"] == {"role": "assistant", "content": want["text"]}, (answer, want))
    expect(answer["usage"]["prompt_tokens"] == want["prompt_tokens"], answer)
    content = answer["choices"][0]["logprobs"]["content"]
    expect(all(token["top_logprobs"] == [] for token in content), content)
    for token in server.ask(body | {"logprobs": True, "top_logprobs": 2}, path)["choices"][0]["logprobs"]["content"]:
        expect(len(token["top_logprobs"]) == 2 and token["top_logprobs"][0] == {key: token[key] for key in ("token", "logprob", "bytes")}, token)
    expect(server.request("POST", path, body | {"top_logprobs": 2})[0] == 400, "top_logprobs without logprobs")
    written = b"".join(bytes(token["bytes"]) for token in content)
    expect(written.decode(errors="replace") == want["text"], (written, want))
    chunks = server.chunks(body | {"stream_options": {"include_usage": True}}, path)
    expect(chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}, chunks[0])
    expect("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == want["text"], chunks)
    expect(chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"], chunks[-1])
    flat = [{"role": message["role"], "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    expect(server.ask(body | {"messages": flat}, path)["choices"][0]["message"]["content"] == want["text"], "a list of texts")
    for messages in ([], [{"role": "tool", "content": "x"}], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        status, text = server.request("POST", path, {"messages": messages})
        expect(status == 400 and json.loads(text)["error"]["param"] == "messages", (status, text))


def test_tools(folder, server, model):
    """Functions reach the template, as those of a file of `generate --chat`; calls of earlier messages, too."""
    path = "/v1/chat/completions"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "function", "content": "3", "tool_call_id": "a"}]
    body = {"messages": messages, "tools": tools, "max_tokens": 9, "temperature": 0}
    objects = json.loads(json.dumps(messages))
    objects[1]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    with open(folder + "/tools.json", "w") as file:
        json.dump({"messages": objects, "tools": tools}, file)
    ran = subprocess.run([TANDEM, "generate", model, "--chat", folder + "/tools.json", "--max-tokens", "9", "--temperature", "0",
                          "--json", "-"], capture_output=True, text=True, check=True)
    want = json.loads(ran.stdout)
    answer = server.ask(body, path)
    expect(answer["usage"]["prompt_tokens"] == want["prompt_tokens"], (answer, want))
    expect(answer["choices"][0]["message"]["content"] == want["text"], (answer, want))
    without = server.ask(body | {"tools": []}, path)["usage"]["prompt_tokens"]
    hidden = server.ask(body | {"tool_choice": "none"}, path)["usage"]["prompt_tokens"]
    expect(hidden == without < want["prompt_tokens"], (hidden, without, want))
    expect(server.ask(body | {"tool_choice": "auto"}, path)["usage"] == answer["usage"], "tool_choice auto")
    wrong_call = messages[1] | {"tool_calls": [{"function": {"name": "add", "arguments": "["}}]}
    for field, value in [("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "add"}}),
                         ("tools", [{"type": "function"}]), ("tools", {}), ("parallel_tool_calls", 3), ("messages", [wrong_call])]:
        status, text = server.request("POST", path, body | {field: value})
        expect(status == 400 and json.loads(text)["error"]["param"] == field, (field, value, status, text))


def reference_token(step, before, rules):
    """The token that temperature 0 chooses, if it is certain to be among the likeliest ones."""
    bias = {int(token): value for token, value in rules.get("logit_bias", {}).items()}
    changed = {}
    for token, log_prob in step:
        count = before.count(token)
        changed[token] = log_prob + bias.get(token, 0) - rules.get("frequency_penalty", 0) * count
        changed[token] -= rules.get("presence_penalty", 0) if count else 0
    best = max(changed, key=changed.get)
    second = max(value for token, value in changed.items() if token != best)
    return best if changed[best] > max(step[-1][1], second) + 1e-4 else None


def test_rules_choose_as_the_reference(folder, server):
    rng, checked, moved = random.Random(4), 0, 0
    requests = []
    for _ in range(12):
        requests.append({"prompt": rng.choice(["int main", "the", "for (int i"]), "max_tokens": 20, "temperature": 0} |
                        rng.choice([{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"frequency_penalty": 2, "presence_penalty": -1},
                                    {"logit_bias": {str(rng.randrange(60)): -3, str(rng.randrange(60)): 0.5}, "presence_penalty": 1}]))
    texts = generate(folder, MODEL, [request | {"top_log_probs": 20} for request in requests])
    answers = [server.ask(request | {"logprobs": 20})["choices"][0] for request in requests]
    for request, text, answer in zip(requests, texts, answers):
        tokens = text["token_ids"]
        for i, (token, step) in enumerate(zip(tokens, text["top_log_probs"])):
            expect(len(step) == 20 and [pair[1] for pair in step] == sorted((pair[1] for pair in step), reverse=True), step)
            wanted = reference_token(step, tokens[:i], request)
            if wanted is not None:
                expect(token == wanted, (request, i, token, step))
                checked += 1
                moved += token != step[0][0]
        expect(answer["text"] == text["text"], (request, answer, text))
        tops = answer["logprobs"]["top_logprobs"]
        expect(len(tops) == text["tokens"], answer)
        values = answer["logprobs"]["token_logprobs"]
        for top, step, token, value in zip(tops, text["top_log_probs"], answer["logprobs"]["tokens"], values):
            expect(abs(max(top.values()) - step[0][1]) < 1e-3, (top, step))
            expect("\ufffd" in token or top[token] == value, (top, token, value))  # parts of characters share a text
    expect(checked > 60 and moved > 10, (checked, moved))


def test_bad_requests_are_refused(server):
    for body, status, name in [
            ("", 400, "JSON object"), ("[]", 400, "JSON object"), ("{", 400, "JSON object"), ("[" * 5000, 400, "JSON object"),
            ({}, 400, "prompt: expected"), ({"prompt": 3}, 400, "prompt = 3"), ({"prompt": ["x", 3]}, 400, "prompt"),
            ({"prompt": [10 ** 9]}, 400, "1000000000"), ({"prompt": []}, 400, "prompt"), ({"prompt": [-1]}, 400, "-1"),
            ({"prompt": "x", "temperature": "hot"}, 400, "temperature"), ({"prompt": "x", "temperature": -1}, 400, "temperature"),
            ({"prompt": "x", "top_p": 0}, 400, "top_p"), ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
            ({"prompt": ["a"] * 4, "n": 2 ** 62}, 400, "n = "), ({"prompt": "x", "max_tokens": 2 ** 64 - 1}, 400, "max_tokens = "),
            ({"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty 0: expected above 0"),
            ({"prompt": "x", "frequency_penalty": 2.1}, 400, "frequency_penalty 2.1: expected -2 to 2"),
            ({"prompt": "x", "min_p": -0.1}, 400, "min_p -0.1: expected 0 to 1"), ({"prompt": "x", "tools": [{}]}, 400, "tools"),
            ({"prompt": "x", "n": 0}, 400, "n = 0"), ({"prompt": "x", "n": 1000}, 400, "n = 1000"),
            ({"prompt": "x", "stop": 3}, 400, "stop = 3"), ({"prompt": "x", "stop": [""]}, 400, "stop"),
            ({"prompt": "x", "stop": ["y" * 1025]}, 400, "each of at most 1024 bytes"),
            ({"prompt": "x", "logit_bias": {f"{i % 300:0{3 + i // 300}}": 1 for i in range(1025)}}, 400, "at most 1024 tokens"),
            ({"prompt": "x" * 7_000_000}, 400, "prompt of 7000000 bytes, which count as at least"),
            ({"prompt": [1] * 2_000_000}, 400, "prompt of 2000000 tokens: expected fewer than the context of 64"),
            ({"prompt": "x", "presence_penalty": "1"}, 400, "presence_penalty"), ({"prompt": "x", "echo": 3}, 400, "echo"),
            ({"prompt": "x", "logprobs": 21}, 400, "logprobs = 21: expected 0 to 20"), ({"prompt": "x", "nonsense": 5}, 400, "nonsense: unknown field"),
            ({"prompt": "x", "stream_options": {}}, 400, "stream_options"), ({"prompt": "x", "seed": 1.5}, 400, "seed"),
            ({"prompt": "x", "model": "other"}, 404, "model = other"), ({"prompt": "x " * 3000}, 400, "tokens: expected fewer"),
            ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"), ({"prompt": "x", "logit_bias": [3]}, 400, "logit_bias"),
            ({"prompt": "x", "logit_bias": {"3": 101}}, 400, "logit_bias 101 of token 3"),
            ({"prompt": "x", "logit_bias": {"99999": 1}}, 400, "logit_bias of token 99999")]:
        found, text = server.request("POST", "/v1/completions", body)
        expect(found == status and name in json.loads(text)["error"]["message"], (str(body)[:300], found, text))
    for fields, param in ({"top_p": 0}, "top_p"), ({"top_k": -2}, "top_k"), ({"max_tokens": -1}, "max_tokens"), ({"stop": [""]}, "stop"), (
            {"temperature": -1}, "temperature"), ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"prompt": [[]]}, "prompt"), (
            {"prompt": [10 ** 6]}, "prompt"), ({"prompt": "x " * 3000}, "prompt"), ({"min_p": 2}, "min_p"):
        found, text = server.request("POST", "/v1/completions", {"prompt": "x"} | fields)
        error = json.loads(text)["error"]
        expect(found == 400 and error["param"] == param and param in error["message"], (fields, found, error))
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "max_completion_tokens": -1}
    error = json.loads(server.request("POST", "/v1/chat/completions", chat)[1])["error"]
    expect(error["param"] == "max_completion_tokens" and "= -1: expected 0 or more" in error["message"], error)
    for body, reason in ('{"prompt": "x", "temperature": 1e400}', "1e400"), ('{"prompt": "x"}\0{}', "byte 16 is zero"), (
            '{"prompt": "x",}', "column 16"), ('{"prompt": "\\ud800"}', "surrogate"), ("[" * 200, "nested more than 100 deep"), (" ", "it is empty"):
        found, text = server.request("POST", "/v1/completions", body)
        expect(found == 400 and reason in json.loads(text)["error"]["message"], (body, found, text))
    # As vLLM's benchmark asks: the text goes on after its end.
    answer = server.ask({"prompt": "x", "repetition_penalty": 1.0, "ignore_eos": True, "max_tokens": 60, "seed": 1})
    expect(answer["choices"][0]["finish_reason"] == "length", answer)
    server.ask({"prompt": "x", "echo": False, "suffix": None, "presence_penalty": 0, "logit_bias": {}, "user": "me",
                "max_tokens": 1})
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/../etc/passwd", 404),
                                 ("DELETE", "/", 405), ("POST", "/v1/embeddings", 404), ("DELETE", "/v1/", 404), ("HEAD", "/x", 404)):
        expect(server.request(method, path)[0] == status, (method, path))
    expect(server.request("GET", "/v1/models", Host="evil.example")[0] == 403, "another site's name")
    for origin, status in ("https://evil.example", 403), (f"http://localhost:{server.port}", 200):
        found = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, Origin=origin)
        expect(found[0] == status, (origin, found))
    expect(server.request("POST", "/v1/completions", "x" * (9 << 20))[0] == 413, "a long body")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for method in ("HEAD", "GET", "HEAD", "GET"):  # on one connection: the first has no body
        connection.request(method, "/health")
        answer = connection.getresponse()
        expect(answer.status == 200 and len(answer.read()) == (15 if method == "GET" else 0), method)
    connection.close()
    # Requests whose end another program would find elsewhere: refused, and nothing else is read of the connection.
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for lengths, status in ((b"Transfer-Encoding: gzip", 501), (b"Transfer-Encoding: gzip, chunked", 501), (b"Content-Encoding: gzip", 415), (b"Transfer-Encoding: chunked, identity", 501),
                            (b"Content-Length: 0\r\nTransfer-Encoding: chunked", 400), (b"Content-Length: 0\r\nContent-Length: 43", 400),
                            (b"Content-Length: -1", 400), (b"Content-Length: 0x2b", 400), (b"X : 1", 400), (b"X", 400), (b"Host: evil.example", 400)):
        with server.connect() as client:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + lengths + b"\r\n\r\n" + hidden)
            client.shutdown(socket.SHUT_WR)
            got = b"".join(iter(lambda: client.recv(1 << 16), b""))
            expect(got.startswith(b"HTTP/1.1 %d " % status) and got.count(b"HTTP/1.1") == 1, (lengths, got))
    for head, status, field in ((b"GET /health HTTP/1.0\r\n", 200, b""), (b"GET /health HTTP/1.1\r\n", 400, b""),
                                (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n", 200, b""),
                                (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n", 405, b"Allow: POST\r\n"),
                                (b"POST /health HTTP/1.1\r\nHost: localhost\r\n", 405, b"Allow: GET, HEAD\r\n")):
        with server.connect() as client:
            client.sendall(head + b"Connection: close\r\n\r\n")
            got = b"".join(iter(lambda: client.recv(1 << 16), b""))
            expect(b" %d " % status in got.split(b"\r\n")[0] and field in got, (head, got))
    with server.connect() as client:
        client.sendall(b"GARBAGE\r\n\r\n")
        expect(b" 400 " in client.recv(1 << 16), "what is not HTTP")
    expect(json.loads(server.request("GET", "/v1/models")[1])["data"][0]["id"] == "chat", "the model's name")
    expect(server.request("GET", "/health")[0] == 200, "health")
    expect("<title>Tandem serve</title>" in server.request("GET", "/")[1], "the page")


def test_bad_options(model):
    for options, text in ((["--port", "x"], "--port x: expected [HOST:]PORT"), (["--port=0", "--context", "100000"], "--context 100000: expected at most 64"),
                          (["--port=0", "--tp", "3"], "tp = 3"), (["--port=0", "--codec", "int9"], "int9"),
                          (["--port=0", "--weights", "int4"], "--weights: int4 not in {none,int8,e4m3}")):
        result = subprocess.run([TANDEM, "serve", model, *options], capture_output=True, text=True, timeout=60)
        expect(result.returncode == 2 and len(result.stderr.splitlines()) == 1 and text in result.stderr, (options, result))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = subprocess.run([TANDEM, "serve", model, "--port", str(taken.getsockname()[1])], capture_output=True, text=True, timeout=60)
        expect(result.returncode == 3 and "cannot listen: Address already in use" in result.stderr, result)


def main():
    with chat_model("tandem-serve-") as (folder, model):
        server = Server(model, "--tp", "2", "--batch", "6")
        test_texts_are_those_of_generate(folder, server)
        test_rules_choose_as_the_reference(folder, server)
        test_chats(folder, server, model)
        test_tools(folder, server, model)
        test_bad_requests_are_refused(server)
        server.stop()
        test_models_of_bytes(folder)
        test_logits_that_are_not_finite(folder)
        test_bad_options(model)


if __name__ == "__main__":
    main()
