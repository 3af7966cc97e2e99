#!/usr/bin/env python3
"""serve_fields_test.py TANDEM MODEL: fields that clients of `tandem serve` send, special tokens and calls in answers, and
the scores of prompts by which lm-evaluation-harness judges answers."""
import json
import math
import os
import re
import shutil
import subprocess
import tempfile

from chain_model import chain_model
from serve_server import MODEL, TANDEM, Server, expect

CHATS = "/v1/chat/completions"
SHOWS = ("{{ messages|tojson }}{{ tools|tojson if tools }}{{ add_generation_prompt }}{{ note }}{{ reasoning_effort }}"
         "{{ raise_exception('seen') if show }}{{ '\\n' }}")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SPECIAL = ["<s>", "[TOOL_CALLS]", "[ARGS]", "<|im_end|>"]


def chat(server, *messages, **fields):
    messages = list(messages) or [{"role": "user", "content": "x"}]
    return server.ask({"messages": messages, "temperature": 0} | fields, CHATS)["choices"][0]


def refusal(server, path=CHATS, **fields):
    status, text = server.request("POST", path, {"messages": [{"role": "user", "content": "x"}]} | fields)
    expect(status == 400, (fields, status, text))
    return json.loads(text)["error"]


def test_fields(folder):
    """Fields that change nothing are taken, by their value or their name; others are named."""
    server = Server(chain_model(folder + "/fields", ["Hello", "<s>", " world"], SPECIAL, SHOWS))
    plain = chat(server, max_tokens=5)
    neutral = {"parallel_tool_calls": False, "service_tier": "default", "store": True, "prompt_cache_key": "a", "safety_identifier": "a",
               "modalities": ["text"], "stop_token_ids": [], "add_generation_prompt": True, "include_stop_str_in_output": False,
               "continue_final_message": False, "cache_prompt": True, "functions": [], "prediction": {"type": "content", "content": "x"},
               "metadata": {"a": "b"}, "user": "me", "audio": None, "whatever": None, "length_penalty": 1.0, "best_of": None,
               "response_format": {"type": "text"}, "min_tokens": 0, "tools": None, "tool_choice": "none", "chat_template_kwargs": {}}
    expect(chat(server, max_tokens=5, **neutral) == plain, "fields that change nothing")
    for field, value in [("response_format", {"type": "json_object"}), ("modalities", ["text", "audio"]), ("bad_words", ["x"]), ("min_tokens", 2),
                         ("whatever", 1), ("functions", [{}]), ("function_call", {"name": "add"}), ("parallel_tool_calls", 1),
                         ("stop_token_ids", ["x"]), ("stop_token_ids", [-1]), ("add_generation_prompt", "x"), ("chat_template_kwargs", []),
                         ("chat_template_kwargs", {"messages": []}), ("skip_special_tokens", 1), ("prompt_logprobs", 21), ("echo", True)]:
        error = refusal(server, **{field: value})
        expect(error["param"] == field and field in error["message"], (field, value, error))
    expect("continue_final_message" in refusal(server, add_generation_prompt=True, continue_final_message=True)["message"], "both")
    # Special tokens have no text unless they are asked for.
    expect(plain["message"]["content"] == "Hello world", plain)
    expect(chat(server, skip_special_tokens=False)["message"]["content"] == "Hello<s> world", "special tokens")
    expect("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in server.chunks(
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0}, CHATS)) == "Hello world", "a stream")
    body = {"prompt": "\n", "temperature": 0}
    tokens = json.loads(server.request("POST", "/tokenize", {"prompt": "<s>"})[1])["tokens"]
    stops = server.ask(body | {"stop_token_ids": tokens, "ignore_eos": True})["choices"][0]
    expect((stops["text"], stops["finish_reason"]) == ("Hello", "stop"), stops)
    expect(server.ask(body | {"stop": " wor"})["choices"][0]["text"] == "Hello", "a stop string")
    with_stop = body | {"stop": " wor", "include_stop_str_in_output": True}
    expect(server.ask(with_stop)["choices"][0]["text"] == "Hello wor", "a stop string in the text")
    expect("".join(chunk["choices"][0]["text"] for chunk in server.chunks(with_stop)) == "Hello wor", "the same in a stream")
    expect(server.ask({"prompt": "", "max_tokens": 1})["usage"]["prompt_tokens"] == 1, "an empty prompt begins with <s>")
    # One model by its name.
    for name, status in ("fields", 200), ("%66ields", 200), ("other", 404), ("", 404), ("%zz", 404):
        found, text = server.request("GET", "/v1/models/" + name)
        expect(found == status and ("fields" in text or status == 404), (name, found, text))
    expect(server.request("POST", "/v1/models/fields", {})[0] == 405, "a POST to a model")
    server.stop()


def seen(server, *messages, **fields):
    """What the template is given: the messages, then everything else, from the text of its prompt."""
    answer = server.ask({"messages": list(messages), "max_tokens": 1, "prompt_logprobs": 0} | fields, CHATS)
    tokens = [next(iter(token.values()))["decoded_token"] for token in answer["choices"][0]["prompt_logprobs"][1:]]
    text = "[" + "".join(tokens)
    return json.JSONDecoder().raw_decode(text)[0], text


def test_templates_see_what_clients_sent(folder):
    server = Server(chain_model(folder + "/seen", ["!"], SPECIAL, SHOWS))
    call = lambda **function: {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now"} | function}]}
    for arguments, wanted in [("", {}), (None, {}), ("{}", {}), ('{"n": 12345678901234567890123}', {"n": 12345678901234567890123})]:
        [message], text = seen(server, call(arguments=arguments))
        expect(message["tool_calls"][0]["function"]["arguments"] == wanted, (arguments, message))
        expect("e+" not in text, text)
    [message], _ = seen(server, call())
    expect(message["tool_calls"][0]["function"]["arguments"] == {}, message)
    [message], _ = seen(server, {"role": "assistant", "content": None, "tool_calls": None, "refusal": None})
    expect(message == {"role": "assistant", "content": None}, message)
    [message], _ = seen(server, {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}})
    expect(message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}, message)
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    expect(seen(server, {"role": "user", "content": parts})[0][0]["content"] == "a\nb\nc", "parts as a text")
    _, text = seen(server, {"role": "user", "content": "x"}, chat_template_kwargs={"note": "NOTE"}, reasoning_effort="low", add_generation_prompt=False)
    expect(text.endswith("FalseNOTElow\n"), text)
    expect("12345678901234567890123" in seen(server, {"role": "user", "content": "x"}, tools=[
        {"type": "function", "function": {"name": "f", "parameters": {"maximum": 12345678901234567890123}}}])[1], "a large integer")
    error = refusal(server, chat_template_kwargs={"show": True})
    expect("tokenizer_config.json" in error["message"] and "line 1" in error["message"], error)
    server.stop()
    loops = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    only = "{% for m in messages %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}{% endfor %}"
    for number, (template, wanted) in enumerate([(loops, ["(a)(b)(c)", "x"]), (only, ["(a)(b)(c)", "(x)"])]):
        model = chain_model(f"{folder}/parts{number}", ["!"], ["<|python_tag|>", "<|im_end|>"], template)
        with open(model + "/tokenizer_config.json", "w") as file:  # no token begins or ends a text
            json.dump({"chat_template": template}, file)
        server = Server(model)
        for prompt in "", [""], ["x", ""]:
            status, text = server.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
            expect(status == 400 and "expected at least one token" in text, (prompt, status, text))
        for content, text in zip((parts, "x"), wanted):
            count = len(json.loads(server.request("POST", "/tokenize", {"prompt": text})[1])["tokens"])
            found = server.ask({"messages": [{"role": "user", "content": content}], "max_tokens": 1}, CHATS)["usage"]["prompt_tokens"]
            expect(found == count, (template, content, found, count))
        server.stop()


def test_calls(folder):
    """In the model's own JSON, in messages and streams, and as older clients have them."""
    arguments = '{"a": 12345678901234567890, "b": 1.0}'
    server = Server(chain_model(folder + "/calls", ["[TOOL_CALLS]", "add", "[ARGS]", arguments, "<s>"], SPECIAL, SHOWS))
    choice = chat(server, tools=TOOLS)
    [call] = choice["message"]["tool_calls"]
    expect(call["function"] == {"name": "add", "arguments": arguments} and choice["finish_reason"] == "tool_calls", choice)
    expect(choice["message"]["content"] is None, choice)
    expect(chat(server)["message"]["content"] == "add" + arguments, "no functions: special tokens have no text")
    with open(folder + "/calls.jsonl", "w") as file:
        line = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
        file.write(json.dumps(line | {"tools": TOOLS, "tool_choice": "auto"}) + "\n" + json.dumps(line) + "\n")
    written = subprocess.run([TANDEM, "generate", folder + "/calls", "--prompts", folder + "/calls.jsonl"], capture_output=True, text=True, timeout=60)
    answers = [json.loads(each) for each in written.stdout.splitlines()]
    expect(answers[0]["tool_calls"] == [{"type": "function", "function": call["function"]}] and answers[0]["text"] == "", (answers, written.stderr))
    expect("tool_calls" not in answers[1] and answers[1]["text"] == "add" + arguments, answers)
    old = chat(server, functions=[TOOLS[0]["function"]])
    expect(old["message"]["function_call"] == call["function"] and old["finish_reason"] == "function_call", old)
    chunks = server.chunks({"messages": [{"role": "user", "content": "x"}], "temperature": 0, "tools": TOOLS}, CHATS)
    calls = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", [])]
    expect([each["function"] for each in calls] == [call["function"]] and calls[0]["index"] == 0, chunks)
    server.stop()


def test_scores_of_prompts(folder, ranks):
    """Sums of log-probabilities as lm-evaluation-harness asks for them, against those of texts that are written."""
    server = Server(MODEL, "--tp", ranks, "--batch", "3")
    tokens = lambda text: json.loads(server.request("POST", "/tokenize", {"prompt": text})[1])["tokens"]
    contexts, sums, greedy, prompts = ["int main() {", "größer 日本", "the"], [], [], []
    for seed, context in enumerate(contexts):  # an answer that the model has written, with its log-probabilities
        prompt = tokens(context)
        line = {"prompt": context, "max_tokens": 12, "temperature": 0 if seed == 0 else 1.2, "seed": seed, "log_probs": True}
        with open(folder + "/line", "w") as file:
            file.write(json.dumps(line))
        ran = subprocess.run([TANDEM, "generate", MODEL, "--prompts", folder + "/line"], capture_output=True, text=True, check=True)
        want = json.loads(ran.stdout)
        prompts.append(prompt + want["token_ids"])
        sums.append((len(prompt), sum(want["log_probs"])))
        greedy.append(line["temperature"] == 0)
    for new in 0, 1:
        answer = server.ask({"model": os.path.basename(MODEL), "prompt": prompts, "max_tokens": new, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True})
        expect(answer["usage"]["prompt_tokens"] == sum(map(len, prompts)) and answer["usage"]["completion_tokens"] == new * len(prompts), answer["usage"])
        for choice, prompt, (begin, total), is_greedy in zip(answer["choices"], prompts, sums, greedy):
            scores = choice["logprobs"]
            end = len(prompt)
            expect(all(len(values) == end + new for values in (scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], scores["text_offset"])), scores)
            expect(scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None and scores["text_offset"][0] == 0, scores)
            found = sum(scores["token_logprobs"][begin:end])
            expect(math.isclose(found, total, rel_tol=1e-4, abs_tol=1e-3), (found, total))
            pairs = zip(scores["token_logprobs"][begin:end], scores["top_logprobs"][begin:end])
            expect(all(value == max(top.values()) for value, top in pairs) or not is_greedy, scores)
            expect(choice["finish_reason"] in ("length", "stop"), choice)
    # Offsets are those of the text, in characters; a stream has the same, with the prompt first.
    body = {"prompt": contexts[1], "max_tokens": 3, "temperature": 0, "logprobs": 2, "echo": True}
    choice = server.ask(body)["choices"][0]
    expect(choice["text"].startswith(contexts[1]), choice)
    offsets = choice["logprobs"]["text_offset"]
    expect(offsets == sorted(offsets) and offsets[-1] <= len(choice["text"]), choice)
    chunks = [chunk["choices"][0] for chunk in server.chunks(body)]
    expect("".join(chunk["text"] for chunk in chunks) == choice["text"], chunks)
    expect([value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]] == choice["logprobs"]["token_logprobs"], chunks)
    expect(server.ask(body | {"max_tokens": 0, "logprobs": None})["choices"][0]["text"] == contexts[1], "only the prompt")
    nothing = server.ask({"prompt": "x", "max_tokens": 0})["choices"][0]
    expect(nothing["text"] == "" and nothing["finish_reason"] == "length", nothing)
    scored = server.ask({"prompt": prompts[0], "max_tokens": 1, "prompt_logprobs": 2})["choices"][0]["prompt_logprobs"]
    expect(len(scored) == len(prompts[0]) and scored[0] is None, scored)
    for token, values in zip(prompts[0][1:], scored[1:]):
        expect(2 <= len(values) <= 3 and values[str(token)]["rank"] >= 1, (token, values))
    server.stop()
    return contexts, prompts


def test_scores_are_those_of_eval(folder):
    """Bits per byte of a text by its scores, and by `tandem eval`."""
    text = "int main() { return 0; }\n"
    os.makedirs(folder + "/data")
    with open(folder + "/data/a.txt", "w") as file:
        file.write(text)
    ran = subprocess.run([TANDEM, "eval", MODEL, "--data", folder + "/data", "--json", "-"], capture_output=True, text=True, check=True)
    server = Server(MODEL)
    scores = server.ask({"prompt": text, "max_tokens": 0, "logprobs": 0, "echo": True})["choices"][0]["logprobs"]["token_logprobs"]
    server.stop()
    bits = -sum(scores[1:]) / math.log(2) / len(text)
    want = json.loads(ran.stdout)["bits_per_byte"]
    expect(math.isclose(bits, want, rel_tol=1e-4), (bits, want))


def test_broken_templates_are_refused(folder):
    for number, template in enumerate(["{% if %}", "{{ 'a' }", "{% include 'x' %}"]):
        model = chain_model(f"{folder}/broken{number}", ["!"], SPECIAL, template)
        ran = subprocess.run([TANDEM, "serve", model, "--port", "0"], capture_output=True, text=True, timeout=60)
        expect(ran.returncode == 2 and "chat_template: line 1: " in ran.stderr, (template, ran))


def test_metrics_have_what_operators_ran(folder):
    """Experts are operators: as many calls as steps have layers, serial, which is what is asked for on CPU ranks."""
    job = os.path.join(os.path.dirname(__file__), "../../../configs/moe.toml")
    subprocess.run([TANDEM, "train", job, "--out", folder + "/experts", "--set", "train.steps=1", "model.layers=1"],
                   capture_output=True, check=True)
    server = Server(folder + "/experts/final")
    server.ask({"prompt": "int", "max_tokens": 4, "ignore_eos": True})
    text = server.request("GET", "/metrics")[1]
    rows = re.findall(r'^tandem_serve_operator_calls_total{op="(.*?)",shape="(.*?)",asked="(.*?)",ran="(.*?)",candidate="(.*?)"} (\d+)$', text, re.M)
    expect(len(rows) == 1 and rows[0][0] == "moe" and rows[0][2:4] == ("serial", "serial"), text)
    expect(float(rows[0][5]) == server.metric("steps_total"), text)
    server.stop()


def main():
    folder = tempfile.mkdtemp(prefix="tandem-serve-fields-")
    os.environ["TANDEM_CACHE_DIR"] = folder + "/cache"
    try:
        test_fields(folder)
        test_templates_see_what_clients_sent(folder)
        test_calls(folder)
        for ranks in "1", "2":
            test_scores_of_prompts(folder, ranks)
        test_scores_are_those_of_eval(folder)
        test_broken_templates_are_refused(folder)
        test_metrics_have_what_operators_ran(folder)
    finally:
        for process in Server.started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


main()
