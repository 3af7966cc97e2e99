#!/usr/bin/env python3
"""serve_ranks_test.py TANDEM MODEL short|ROUNDS: `tandem serve` on processes of which one is killed or stopped, with
texts being written and without: rank 0 ends by name, clients get status 503, and under `tandem launch` it comes back."""
import concurrent.futures
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
import threading
import time

TANDEM, MODEL, ROUNDS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3]
DEADLINE_S, PATIENCE_S = 8, 120
LONG = {"prompt": "int main", "n": 128, "max_tokens": 60, "ignore_eos": True}


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def request(port, path, body=None):
    """Status and text; None if there is no answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def await_true(holds, what):
    end = time.time() + PATIENCE_S
    while not holds():
        expect(time.time() < end, what)
        time.sleep(0.02)


def is_healthy(port):
    answer = request(port, "/health")
    return answer is not None and answer[0] == 200


def count_active(port):
    answer = request(port, "/metrics")
    return 0 if answer is None else float(re.search(r"^tandem_serve_texts_active (\S+)$", answer[1], re.M)[1])


def ask_long(port, answers, streams):
    answers.append(request(port, "/v1/completions", LONG | {"stream": streams}))


def start_clients(port):
    """Clients whose texts are being written, and the list of their answers."""
    answers = []
    clients = [threading.Thread(target=ask_long, args=(port, answers, i == 0)) for i in range(2)]
    for client in clients:
        client.start()
    await_true(lambda: count_active(port) >= 128, "texts are written")
    return clients, answers


def check_answers(answers):
    """Each client hears of the end, in a stream as its last event."""
    for answer in answers:
        expect(answer is not None, "a client without an answer")
        status, text = answer
        if status == 200:
            expect('data: {"error"' in text and "[DONE]" not in text, text[-300:])
        else:
            expect(status == 503, answer)
        expect("the server is ending" in text, text[-300:])


def lose_a_rank(how, when):
    port, store = free_port(), free_port()
    processes = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store), "TANDEM_DEADLINE_S": str(DEADLINE_S)}
        processes.append(subprocess.Popen([TANDEM, "serve", MODEL, "--port", str(port), "--queue", "1000"], text=True,
                                          env=os.environ | variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE))
    try:
        await_true(lambda: is_healthy(port), "the server starts")
        clients, answers = start_clients(port) if when == "busy" else ([], [])
        processes[1].send_signal(how)
        text = processes[0].communicate(timeout=PATIENCE_S)[1]
        for client in clients:
            client.join()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    expect(processes[0].returncode in (5, 6) and "rank 1" in text, (how, when, processes[0].returncode, text))
    check_answers(answers)


def rank_processes(launcher):
    """Processes of the ranks of a launch, by rank."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/environ", "rb") as environ:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environ.read())
        except (OSError, ValueError, IndexError):
            continue
        if parent == launcher and rank:
            found[int(rank[1])] = int(entry)
    return found


def test_restarts():
    """A server comes back after each rank that is lost, until no restart is left."""
    port = free_port()
    launcher = subprocess.Popen([TANDEM, "launch", "-n", "2", "--restarts", "3", "--", TANDEM, "serve", MODEL, "--port", str(port)],
                                env=os.environ | {"TANDEM_DEADLINE_S": str(DEADLINE_S)}, stdin=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)
    try:
        for rank, how in ((1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (1, signal.SIGKILL)):
            await_true(lambda: is_healthy(port), "the server comes back")
            processes = rank_processes(launcher.pid)
            expect(sorted(processes) == [0, 1], processes)
            os.kill(processes[rank], how)
            await_true(lambda: rank_processes(launcher.pid).get(0) != processes[0], "rank 0 ends")
        text = launcher.communicate(timeout=PATIENCE_S)[1]
    finally:
        launcher.terminate()
        launcher.wait()
    expect(launcher.returncode == 128 + signal.SIGKILL, (launcher.returncode, text))
    expect(text.count("starting all ranks again") == 3 and "(restart 3 of 3)" in text, text)
    result = subprocess.run([TANDEM, "launch", "-n", "1", "--spares", "1", "--", TANDEM, "serve", MODEL], capture_output=True, text=True)
    expect(result.returncode == 2 and "tandem serve has --restarts only" in result.stderr, result)


def main():
    folder = tempfile.mkdtemp(prefix="tandem-serve-ranks-")
    os.environ.update(TANDEM_CACHE_DIR=folder + "/cache", OMP_NUM_THREADS="1", TANDEM_THREADS="1", TANDEM_TUNE="0")
    cases = [(how, when) for when in ("busy", "idle") for how in (signal.SIGKILL, signal.SIGSTOP)]
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            restarts = [pool.submit(test_restarts)] if ROUNDS == "short" else []
            count = len(cases) if ROUNDS == "short" else int(ROUNDS)
            losses = [pool.submit(lose_a_rank, *cases[i % len(cases)]) for i in range(count)]
            for each in restarts + losses:
                each.result()
        print(f"{count} ranks lost, each by name")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


main()
