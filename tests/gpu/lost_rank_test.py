#!/usr/bin/env python3
"""lost_rank_test.py TANDEM SOURCE_DIR [REPEATS] [--device cpu|gpu] [--work train|pipeline|generate] [--seed N]: of two
ranks, each a process with its GPU, one is killed (SIGKILL) or late (SIGSTOP), at a random moment of training
(tensor and pipeline parallel) and of generation. The other one ends within its deadline and names it. Where there is
one GPU the processes share it, after a check that this is refused unless asked for. Exit code 77 without a GPU."""
import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("tandem", type=os.path.abspath)
parser.add_argument("source", type=os.path.abspath)
parser.add_argument("repeats", type=int, nargs="?", default=2)
parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
parser.add_argument("--work", choices=("train", "pipeline", "generate"), nargs="*",
                    default=("train", "pipeline", "generate"))
parser.add_argument("--seed", type=int, default=7)
options = parser.parse_args()

DEADLINE = 6  # seconds of a wait
START = 240   # seconds until the ranks are at work
MARGIN = 60   # seconds beyond the deadline: what a busy machine adds, not what the ranks may take
TIMED_OUT, PEER_ABORTED = 5, 6
rng = random.Random(options.seed)
folder = tempfile.mkdtemp()
running = []
sharing = []  # options of processes that share a GPU


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Ranks:
    """A command as two ranks that nothing but themselves supervises."""

    def __init__(self, name, arguments, count=2, **environment):
        self.paths = [f"{folder}/{name}-{rank}" for rank in range(count)]
        port = free_port()
        self.processes = []
        for rank, path in enumerate(self.paths):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{name}",
                         "TANDEM_DEADLINE_S": DEADLINE, "TANDEM_CACHE_DIR": f"{folder}/cache"} | environment
            with open(path + ".out", "w") as out, open(path + ".err", "w") as err:
                self.processes.append(subprocess.Popen(
                    [options.tandem, *arguments, *sharing], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                    env=os.environ | {key: str(value) for key, value in variables.items()}))
        running.extend(self.processes)

    def read(self, rank, ending):
        with open(f"{self.paths[rank]}.{ending}") as file:
            return file.read()

    def logs(self):
        return "".join(f"--- rank {rank}, exit code {process.poll()}\n{self.read(rank, 'err')[-3000:]}\n"
                       for rank, process in enumerate(self.processes))

    def await_work(self, lines):
        """Waits until `lines()`, those that the ranks have written, are several."""
        end = time.time() + START
        while lines() < 3:
            expect(all(process.poll() is None for process in self.processes), f"a rank has ended:\n{self.logs()}")
            expect(time.time() < end, f"no work after {START} s:\n{self.logs()}")
            time.sleep(0.05)

    def wait(self, rank, seconds, why):
        try:
            return self.processes[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{why}: rank {rank} still runs after {seconds} s:\n{self.logs()}") from None

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def lines_of(path):
    try:
        with open(path) as file:
            return sum(line.endswith("\n") for line in file)
    except FileNotFoundError:
        return 0


def fault(ranks, lines, sent, victim, what):
    """One of the ranks at work is lost: the other's end."""
    ranks.await_work(lines)
    time.sleep(rng.random() * 0.5)
    ranks.processes[victim].send_signal(sent)
    began = time.time()
    survivor = 1 - victim
    code = ranks.wait(survivor, DEADLINE + MARGIN, what)
    took = time.time() - began
    said = ranks.read(survivor, "err")
    expect(code in (TIMED_OUT, PEER_ABORTED), f"{what}: exit code {code}, expected 5 or 6:\n{ranks.logs()}")
    last = said.strip().splitlines()[-1] if said.strip() else ""
    expect(re.search(rf"\brank {victim}\b", last.partition(f"rank {survivor}: ")[2]),
           f"{what}: the last line does not name rank {victim}:\n{ranks.logs()}")
    if sent == signal.SIGSTOP:  # it goes on too late
        ranks.processes[victim].send_signal(signal.SIGCONT)
        late = ranks.wait(victim, DEADLINE + MARGIN, f"{what}, continued")
        expect(late in (TIMED_OUT, PEER_ABORTED), f"{what}: the late rank ends with {late}:\n{ranks.logs()}")
    ranks.end()
    print(f"{what}: exit code {code} after {took:.1f} s: {last[:160]}", flush=True)


def model():
    path = folder + "/model"
    if not os.path.exists(path):
        subprocess.run([options.tandem, "train", options.source + "/configs/gpu-tiny.toml", "--device", options.device,
                        "--set", "train.steps=20", "--out", path], check=True, capture_output=True, timeout=START)
    return path


def train(number, sent, victim, axis):
    out = f"{folder}/train-{number}"
    ranks = Ranks(f"train-{number}", ["train", options.source + "/configs/gpu-tiny.toml", "--device", options.device,
                                      f"--{axis}", "2", "--set", "train.steps=10000000", "--out", out])
    fault(ranks, lambda: lines_of(out + "/metrics.jsonl"), sent, victim,
          f"training, {axis} 2, rank {victim} {signal.Signals(sent).name}")
    shutil.rmtree(out)


def texts_of(text):
    return [json.loads(line)["token_ids"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def prompts(count):
    path = f"{folder}/prompts-{count}"
    with open(path, "w") as file:
        for i in range(count):
            print(json.dumps({"prompt": "#include <" * (1 + i % 4), "max_tokens": 20 + i % 40, "seed": i}), file=file)
    return path


expected = []  # token ids of the first prompts


def generate(number, sent, victim):
    command = ["generate", model(), "--device", options.device, "--tp", "2", "--dtype", "f32", "--batch", "4", "--prompts"]
    if not expected:
        whole = Ranks("whole", [*command, prompts(100)])
        for rank in (0, 1):
            expect(whole.wait(rank, START, "without a fault") == 0, f"generate:\n{whole.logs()}")
        expected.extend(texts_of(whole.read(0, "out")))
        expect(len(expected) == 100, f"{len(expected)} texts of 100")
    ranks = Ranks(f"generate-{number}", [*command, prompts(1000000)])
    fault(ranks, lambda: lines_of(ranks.paths[0] + ".out"), sent, victim,
          f"generation, rank {victim} {signal.Signals(sent).name}")
    texts = texts_of(ranks.read(0, "out"))[:len(expected)]
    others = sum(text != right for text, right in zip(texts, expected))
    expect(others <= 1, f"{others} of {len(texts)} texts are others than without a fault")  # sums in another order


def gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("\n") if listed.returncode == 0 else 0


def main():
    if options.device == "gpu" and gpus() == 0:
        print("skipped: no GPU")
        return 77
    if options.device == "gpu" and gpus() == 1:
        refused = Ranks("one-gpu", ["train", options.source + "/configs/gpu-tiny.toml", "--device", "gpu", "--tp", "2",
                                    "--out", folder + "/refused"])
        codes = [refused.wait(rank, START, "two processes on one GPU") for rank in (0, 1)]
        expect(0 not in codes and re.search("it has 1 GPU|have the same GPU", refused.logs()), refused.logs())
        sharing.extend(["--ranks-per-gpu", "2"])
    number = 0
    for _ in range(options.repeats):
        for work in options.work:
            for sent in (signal.SIGKILL, signal.SIGSTOP):
                for victim in (0, 1):
                    number += 1
                    if work == "generate":
                        generate(number, sent, victim)
                    else:
                        train(number, sent, victim, "tp" if work == "train" else "pp")
    print(f"{number} lost ranks were named")
    return 0


try:
    sys.exit(main())
finally:
    for each in running:
        if each.poll() is None:
            each.kill()
            each.wait()
    shutil.rmtree(folder, ignore_errors=True)
