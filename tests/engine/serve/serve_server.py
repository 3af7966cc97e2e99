"""A running `tandem serve` and raw requests to it, for the tests of serving: TANDEM and MODEL are their first arguments."""
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

TANDEM, MODEL = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
TEMPLATE = """{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {%- for call in message.tool_calls or [] %}{{ call.function.name + '=' + call.function.arguments.a | string }}{% endfor %}
    {{- '[' + message.role + '] ' + (message.content or '') | trim + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
"""


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


class Server:
    started = []

    def __init__(self, model, *options, address="0", **environment):
        self.process = subprocess.Popen([TANDEM, "serve", model, "--port", address, *options], stderr=subprocess.PIPE,
                                        text=True, env=os.environ | environment)
        Server.started.append(self.process)
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            found = re.match(r"Serving \S+ at http://(127\.0\.0\.\d):(\d+)/$", line)
            if found:
                break
        expect(found, f"no address: {line}")
        self.host, self.port = found[1], int(found[2])

    def request(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=300)
        content = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def connect(self):
        return socket.create_connection((self.host, self.port), timeout=60)

    def ask(self, body, path="/v1/completions"):
        status, text = self.request("POST", path, body)
        expect(status == 200, (status, text))
        return json.loads(text)

    def chunks(self, body, path="/v1/completions"):
        status, text = self.request("POST", path, body | {"stream": True})
        expect(status == 200, (status, text))
        events = text.split("\n\n")
        expect(events[-1] == "" and events[-2] == "data: [DONE]", events[-2:])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def metric(self, name, **headers):
        text = self.request("GET", "/metrics", **headers)[1]
        return float(re.search(rf"^tandem_serve_{re.escape(name)} (\S+)$", text, re.M)[1])

    def begun(self):
        """Requests for texts so far that were not refused."""
        text = self.request("GET", "/metrics")[1]
        return sum(float(value) for value in re.findall(
            r'^tandem_serve_requests_(?:active|total{end="(?:done|client left)"}) (\S+)$', text, re.M))

    def await_metric(self, name, value, seconds=120):
        end = time.time() + seconds
        while self.metric(name) != value:
            expect(time.time() < end, f"{name} is {self.metric(name)}: expected {value}")
            time.sleep(0.02)

    def memory_mb(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.search(r"VmRSS:\s*(\d+)", file.read())[1]) / 1e3

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        expect(self.process.wait(30) == 0, f"exit code {self.process.returncode}")


def raw_request(server, body, path="/v1/completions"):
    client = server.connect()
    content = json.dumps(body).encode()
    client.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(content), content))
    return client


@contextlib.contextmanager
def chat_model(prefix):
    """A folder, and in it MODEL with TEMPLATE. At the end it is removed, and servers that still run are killed."""
    folder = tempfile.mkdtemp(prefix=prefix)
    os.environ["TANDEM_CACHE_DIR"] = folder + "/cache"
    try:
        model = folder + "/chat"
        shutil.copytree(MODEL, model)
        with open(model + "/chat_template.jinja", "w") as file:
            file.write(TEMPLATE)
        yield folder, model
    finally:
        for process in Server.started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
