"""`tandem report DIR --live 0` of tests."""
import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

from browser import expect


class Server:
    program = None
    started = []

    def __init__(self, folder, *more):
        self.process = subprocess.Popen([Server.program, "report", folder, "--live", "0", *more], stderr=subprocess.PIPE, text=True)
        Server.started.append(self.process)
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        expect(found, f"no address: {line}")
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/"

    def get(self, path, **headers):
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def status(self, method, path, body=None, **headers):
        request = urllib.request.Request(self.url + path, body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def memory_mb(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.search(r"VmRSS:\s*(\d+)", file.read())[1]) / 1e3

    def await_state(self, accept, seconds=30):
        end = time.time() + seconds
        while True:
            state = json.loads(self.get("state.json"))
            if accept(state):
                return state
            expect(time.time() < end, f"state: {json.dumps(state)[:600]}")
            time.sleep(0.2)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        expect(self.process.wait(20) == 0, f"exit code {self.process.returncode}")
