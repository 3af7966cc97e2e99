"""A training under `tandem launch`, for tests that hurt it.

Runs take less than a second, and a test may wait longer for a processor: what it meant to hurt may have ended. Such an attempt shows
nothing, and is made again (in_time)."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

JOB = ["--set", "model.hidden=16", "--set", "model.layers=1", "--set", "model.head_dim=4",
       "--set", "model.ffn=32", "--set", "train.seq=32", "--set", "train.batch=8", "--set", "checkpoint.every=1"]
CONFIG = str(pathlib.Path(__file__).resolve().parents[3] / "configs/tiny.toml")
LIMIT_S = 60
ATTEMPTS = 20
LAST_STEPS = 5  # the file of metrics may be behind
SNAPSHOTS = ["--set", "checkpoint.snapshot_every=1", "--set", "checkpoint.every=1000"]


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


class Late(SystemExit):
    """The run had made its steps before something was done to it."""


def in_time(folder, name, attempt):
    """Calls attempt(FOLDER), and again while it is late."""
    for number in range(1, ATTEMPTS + 1):
        place = folder / f"{name}.{number}"
        place.mkdir()
        try:
            return attempt(place)
        except Late as late:
            if number == ATTEMPTS:
                raise
            print(f"{str(late).splitlines()[0]}: attempt {number}", file=sys.stderr)


class Run:
    """A training under `tandem launch`, whose ranks' processes are known."""

    def __init__(self, tandem, folder, name, launch, steps, layout="--tp 2 --dp 2", job=(), ranks=4, ignores=None,
                 sibling=False):
        self.tandem, self.out, self.steps = tandem, folder / name, steps
        self.events_file = folder / (name + ".events") / "events.jsonl"
        self.log = folder / (name + ".log")
        command = [tandem, "launch", "-n", str(ranks), *launch, "--", tandem, "train", CONFIG, "--out", str(self.out),
                   *layout.split(), *JOB,
                   "--set", f"train.steps={steps}", *job]
        if "--spares" in launch or "--restarts" in launch:
            command[2:2] = ["--out", str(self.events_file.parent)]
        self.is_supervised = bool({"--spares", "--restarts", "--min-dp"} & set(launch))
        if sibling:
            command = ["sh", "-c", 'sleep 1000 & exec "$@"', "sh", *command]
        self.process = subprocess.Popen(command, preexec_fn=lambda: ignores and signal.signal(ignores, signal.SIG_IGN), stdout=subprocess.DEVNULL, stderr=open(self.log, "wb"),
                                        env={**os.environ, "TANDEM_THREADS": "1", "TANDEM_TUNE": "0",
                                             "TANDEM_CACHE_DIR": str(folder / "cache")})

    def kill(self):
        left = children(self.process.pid)
        self.process.kill()
        for child in left:
            send(child, signal.SIGKILL)

    def fail(self, text):
        self.kill()
        sys.exit(f"{self.out.name}: {text}\n{self.log.read_text()}")

    def late(self):
        self.kill()
        self.process.wait()
        raise Late(f"{self.out.name}: ended too early\n{self.log.read_text()}")

    def find(self, what, search):
        """Waits for a process to hurt."""
        return self.wait_until(what, lambda: search() or (self.process.poll() == 0 and self.late()))

    def send(self, pid, number):
        """To one of its processes, which the run must notice unless it is in its last steps."""
        send(pid, number)
        if self.step() > self.steps - LAST_STEPS:
            self.late()

    def wait_until(self, what, condition):
        until = time.monotonic() + LIMIT_S
        while not (result := condition()):
            if time.monotonic() > until or (self.process.poll() is not None and not condition()):
                self.fail(f"expected {what}")
            time.sleep(0.002)
        return result

    def events(self, kind=None):
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["event"])]

    def pid(self, rank):
        """Process of a rank: the one started as such, or its last replacement."""
        for event in reversed(self.events("recovered")):
            if event["rank"] == rank:
                return event["replacement"]
            if event["rank"] == -1:  # the launcher, which has started all ranks anew
                break
        launcher = self.launcher()
        for child in children(launcher) if launcher else []:
            try:
                if f"RANK={rank}" in pathlib.Path(f"/proc/{child}/environ").read_text().split("\0"):
                    return child
            except OSError:
                pass
        return None

    def launcher(self):
        """The process that has started the ranks: a child, if it would be started again."""
        if not self.is_supervised:
            return self.process.pid
        for child in children(self.process.pid):
            try:
                if b"\0launch\0" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
            except OSError:
                pass
        return None

    def kill_launcher(self, after_step):
        self.wait_until(f"step {after_step}", lambda: self.step() >= after_step)
        recovered = len(self.events("recovered"))
        pid = self.find("the launcher", self.launcher)
        self.send(pid, signal.SIGKILL)
        self.wait_until("recovery of the launcher", lambda: len(self.events("recovered")) > recovered)
        event = self.events("recovered")[recovered]
        if (event["rank"], event["process"]) != (-1, pid) or "signal 9" not in event["cause"]:
            self.fail(f"launcher {pid}: blamed {event}")
        return event

    def step(self):
        file = self.out / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return len(lines)

    def hurt(self, rank, number, after_step=None):
        """Sends a signal to a rank, and waits for its recovery; returns the event of that and of the notice."""
        if after_step is not None:
            self.wait_until(f"step {after_step}", lambda: self.step() >= after_step)
        recovered = len(self.events("recovered"))
        pid = self.find(f"a process of rank {rank}", lambda: self.pid(rank))
        sent = time.time()
        self.send(pid, number)
        self.wait_until(f"recovery of rank {rank}", lambda: len(self.events("recovered")) > recovered)
        event = self.events("recovered")[-1]
        notice = self.events("lost")[-1] if number == signal.SIGKILL else self.events("hung")[-1]
        if event["rank"] != rank or event["process"] != pid or notice["process"] != pid:
            self.fail(f"rank {rank}, process {pid}: blamed {event}, {notice}")
        return 1e3 * (notice["time_s"] - sent), event["recovered_ms"]

    def ends_well(self):
        """With each sample once."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.fail("does not end")
        if code != 0:
            self.fail(f"exit {code}")
        check = subprocess.run([self.tandem, "data", "check", str(self.out)], capture_output=True, text=True)
        if check.returncode != 0 or f", {self.steps} steps" not in check.stdout:
            self.fail(check.stdout + check.stderr)
        return self

    def ends_like(self, reference):
        self.ends_well()
        for name in ["model.safetensors"]:
            if (self.out / "final" / name).read_bytes() != (reference.out / "final" / name).read_bytes():
                self.fail(f"final/{name} differs")
        return self

    def stops(self, reason):
        if self.process.wait(LIMIT_S) != 128 + signal.SIGKILL or reason not in self.log.read_text():
            self.fail(f"expected an end: {reason}")
        if self.events()[-1]["event"] != "stopped":
            self.fail("expected an event of the end")


def checkpoints(run):
    folder = run.out / "checkpoints"
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*")) if folder.exists() else []


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
