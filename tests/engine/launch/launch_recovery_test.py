#!/usr/bin/env python3
"""launch_recovery_test.py TANDEM short|long|kills=N|stops=N|launchers=N [json=FILE]: ranks of `tandem launch --spares`, or it, are killed
or stopped, and the run ends with the bits, and each sample once, of an undisturbed one. kills=N, stops=N, launchers=N: prints
how soon N of them were noticed and recovered from, and writes that to FILE, for tools/recovery_table.py."""
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

JOB = ["--set", "model.hidden=16", "--set", "model.layers=1", "--set", "model.head_dim=4",
       "--set", "model.ffn=32", "--set", "train.seq=32", "--set", "train.batch=8", "--set", "checkpoint.every=1"]
CONFIG = str(pathlib.Path(__file__).resolve().parents[3] / "configs/tiny.toml")
LIMIT_S = 60


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


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

    def fail(self, text):
        self.process.kill()
        sys.exit(f"{self.out.name}: {text}\n{self.log.read_text()}")

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
        pid = self.wait_until("the launcher", self.launcher)
        os.kill(pid, signal.SIGKILL)
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
        pid = self.wait_until(f"a process of rank {rank}", lambda: self.pid(rank))
        sent = time.time()
        os.kill(pid, number)
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


def refused(tandem, text, *arguments):
    result = subprocess.run([tandem, "launch", *arguments], capture_output=True, text=True)
    if result.returncode != 2 or text not in result.stderr or result.stderr.count("\n") != 1:
        sys.exit(f"launch {arguments}: {result.returncode}: {result.stderr}")


def short(tandem, folder):
    refused(tandem, "launch --spares: command true: expected tandem train", "-n", "2", "--spares", "1", "--", "true")
    refused(tandem, "launch --restarts: command sh: expected tandem train", "-n", "2", "--restarts", "1", "--", "sh",
            "-c", "true")
    # Ranks that do not begin: they wait for a job file that is a pipe without a writer.
    os.mkfifo(folder / "job")
    result = subprocess.run([tandem, "launch", "-n", "2", "--restarts", "1", "--start-timeout", "0.5", "--", tandem,
                             "train", str(folder / "job"), "--out", str(folder / "none")], capture_output=True,
                            text=True, timeout=LIMIT_S)
    if result.returncode != 128 + signal.SIGKILL or "began no step within 0.5 s: no process" not in result.stderr:
        sys.exit(f"start time-out: {result.returncode}: {result.stderr}")
    refused(tandem, "--spares", "-n", "2", "--spares", "-1", "--", tandem, "train", CONFIG)
    steps = 40
    reference = Run(tandem, folder, "reference", [], steps)
    reference.ends_like(reference)
    run = Run(tandem, folder, "killed", ["--spares", "2", "--restarts", "3"], steps)
    for at, (rank, number) in enumerate([(0, signal.SIGKILL), (3, signal.SIGKILL), (1, signal.SIGSTOP),
                                         (2, signal.SIGKILL), (0, signal.SIGKILL)]):
        run.hurt(rank, number, 1 + at)
    run.ends_like(reference)
    if len(run.events("hung")) != 1 or not re.search(
            " s (in |between operations)", run.events("hung")[0]["cause"]):
        run.fail("expected one hang, with its operation")
    log = run.log.read_text()
    if len(re.findall(r"^tandem: launch: rank \d .* has taken its rank; the run paused for ", log, re.M)) != 5:
        run.fail("expected one line for each loss")
    # The launcher, and a rank after it, with snapshots in the memory that outlives both.
    run = Run(tandem, folder, "launcher", ["--spares", "1"], steps,
              job=["--set", "checkpoint.snapshot_every=1", "--set", "checkpoint.every=1000"])
    if run.kill_launcher(5)["steps_lost"] > 1:
        run.fail("expected at most one step made again")
    run.hurt(2, signal.SIGKILL, 12)
    run.kill_launcher(18)
    run.ends_like(reference)
    log = run.log.read_text()
    if len(re.findall(r"^tandem: launch: the launcher \(process \d+\) was ended by signal 9, Killed in step \d+; it and its ranks were "
                      r"started again; the run paused for ", log, re.M)) != 2:
        run.fail("expected one line for each launcher")
    # A signal that the launch ignores, as under nohup, stops nothing; other children of its process live on.
    run = Run(tandem, folder, "nohup", ["--restarts", "3"], steps, ignores=signal.SIGHUP, sibling=True)
    run.wait_until("a step", lambda: run.step() >= 2)
    run.process.send_signal(signal.SIGHUP)
    run.hurt(1, signal.SIGKILL, 4)
    sibling = next(child for child in children(run.process.pid) if b"sleep" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes())
    run.kill_launcher(9)
    if not pathlib.Path(f"/proc/{sibling}").exists():
        run.fail("another child of its process was killed")
    os.kill(sibling, signal.SIGKILL)
    run.ends_like(reference)
    run = Run(tandem, folder, "launchers", ["--spares", "1"], steps)
    while run.process.poll() is None:
        if launcher := run.launcher():
            os.kill(launcher, signal.SIGKILL)
        time.sleep(0.001)
    if run.process.returncode != 128 + signal.SIGKILL or "the 5th in a row without a further step" not in run.log.read_text():
        run.fail("expected an end: launchers that are killed at their begin")
    # Two at once, and then fewer replicas, with the bits of all four.
    layout = "--tp 1 --dp 4"
    replicas = Run(tandem, folder, "replicas", [], steps, layout)
    replicas.ends_like(replicas)
    run = Run(tandem, folder, "fewer", ["--spares", "1", "--min-dp", "2"], steps, layout)
    run.wait_until("a step", lambda: run.step() >= 2)
    for pid in [run.pid(0), run.pid(2)]:
        os.kill(pid, signal.SIGKILL)
    run.wait_until("recovery", lambda: len(run.events("recovered")) == 2)
    if sorted(event["replacement"] is None for event in run.events("recovered")) != [False, True]:
        run.fail("expected a spare for one rank and none for the other")
    run.kill_launcher(15)  # all replicas return
    if not 0 <= run.events("recovered")[-1]["continues_after"] < steps:
        run.fail("expected the run to continue")
    run.ends_like(replicas)
    if "the run has 3 ranks now" not in run.log.read_text():
        run.fail("expected 3 ranks")
    # A loss after the last exchange of the ranks, of which some have ended.
    for rank, number in [(0, signal.SIGSTOP), (3, signal.SIGKILL), (1, signal.SIGSTOP)]:
        lose_at_end(tandem, folder, reference, rank, number, 1e-3)
    # One process, whose threads are the ranks.
    run = Run(tandem, folder, "threads", ["--spares", "1"], steps, ranks=1)
    run.hurt(0, signal.SIGKILL, 2)
    run.ends_like(reference)
    # A loss in the start, and one without a spare.
    run = Run(tandem, folder, "early", ["--spares", "1"], steps)
    run.hurt(2, signal.SIGKILL)
    os.kill(run.wait_until("rank 1", lambda: run.pid(1)), signal.SIGKILL)
    run.stops("Killed: no process is left to take its rank")
    replaces_learners(tandem, folder, steps)
    replaces_a_whole_learner(tandem, folder, 10 * steps)
    saves_before_it_gives_up(tandem, folder, reference)
    saves_on_request(tandem, folder, reference)
    starts_no_replacement(tandem, folder, replicas)
    # A rank that is lost again and again.
    run = Run(tandem, folder, "loop", ["--restarts", "9"], steps)
    killed = set()
    while run.process.poll() is None:
        pid = run.pid(3)
        if pid and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    run.stops("Killed: the 3rd time in a row without a further step")


SNAPSHOTS = ["--set", "checkpoint.snapshot_every=1", "--set", "checkpoint.every=1000"]


LEARNERS = [text for key in ["method=local", "learners=2", "every=8", "fragments=2", "delay=2"]
            for text in ("--set", f"sync.{key}")]


def replaces_learners(tandem, folder, steps):
    """A rank of a learner is lost between exchanges, while a fragment travels, and in the step that applies it."""
    job = [*SNAPSHOTS, *LEARNERS]
    reference = Run(tandem, folder, "learners", [], steps, job=job)
    reference.ends_like(reference)
    run = Run(tandem, folder, "learner-lost", ["--spares", "1", "--restarts", "3"], steps, job=job)
    for rank, after_step in [(3, 3), (1, 8), (2, 13)]:
        run.hurt(rank, signal.SIGKILL, after_step)
    run.ends_like(reference)


def replaces_a_whole_learner(tandem, folder, steps):
    """All ranks of a learner are lost at once, some steps after the last snapshot, which learners make apart."""
    job = [*SNAPSHOTS, *LEARNERS, "--set", "checkpoint.snapshot_every=5"]
    reference = Run(tandem, folder, "apart", [], steps, job=job)
    reference.ends_like(reference)
    run = Run(tandem, folder, "whole-learner-lost", ["--spares", "2", "--restarts", "8"], steps, job=job)
    for after_step in 5, 60, 117, 181:
        run.wait_until(f"step {after_step}", lambda: run.step() >= after_step)
        recovered = len(run.events("recovered"))
        for pid in [run.wait_until(f"rank {rank}", lambda: run.pid(rank)) for rank in (2, 3)]:
            os.kill(pid, signal.SIGKILL)
        run.wait_until("two recoveries", lambda: len(run.events("recovered")) >= recovered + 2)
    run.ends_like(reference)


def checkpoints(run):
    folder = run.out / "checkpoints"
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*")) if folder.exists() else []


def saves_before_it_gives_up(tandem, folder, reference):
    """The newest snapshot in memory is written to disk, also of ranks that are not replaced, and of launchers that
    are killed again and again."""
    def kill_rank(run, reached):
        run.wait_until("steps", lambda: run.step() >= reached)
        os.kill(run.wait_until("rank 1", lambda: run.pid(1)), signal.SIGKILL)

    def kill_twice(run):
        run.hurt(1, signal.SIGKILL, 4)
        kill_rank(run, 9)

    def kill_launchers(run):
        run.wait_until("steps", lambda: run.step() >= 9)
        last = 0
        while "the 5th in a row" not in run.log.read_text():
            pid = run.launcher()
            if pid and pid != last:
                os.kill(pid, signal.SIGKILL)
                last = pid
            time.sleep(0.001)
    cases = {"lost": (["--spares", "1"], kill_twice, "--tp 2 --dp 2", 4),
             "alone": ([], lambda run: kill_rank(run, 9), "--tp 2 --dp 2", 4),
             "process": (["--restarts", "0", "--min-dp", "2"], lambda run: os.kill(run.pid(0), signal.SIGKILL), "", 1),
             "killers": (["--spares", "1"], kill_launchers, "--tp 2 --dp 2", 4)}
    for name, (launch, hurt, layout, ranks) in cases.items():
        run = Run(tandem, folder, "saved-" + name, launch, reference.steps, layout or "--tp 2 --dp 2", SNAPSHOTS, ranks)
        if not layout:
            run.wait_until("steps", lambda: run.step() >= 9)
        hurt(run)
        reached = run.step()
        if run.process.wait(LIMIT_S) != 128 + signal.SIGKILL:
            run.fail("expected the exit status of the loss")
        saved = checkpoints(run)
        # The file of metrics may be a line behind, and a snapshot is complete on all ranks a step later.
        if not saved or saved[-1] < reached - 1 or "Stopped after step" not in run.log.read_text():
            run.fail(f"expected a checkpoint of step {reached} or the one before: {saved}")
        resumed = subprocess.run([tandem, "train", CONFIG, "--out", str(run.out), "--tp", "2", "--dp", "2", *JOB, *SNAPSHOTS, "--set",
                                  f"train.steps={run.steps}", "--resume"], capture_output=True, text=True, timeout=LIMIT_S)
        if f"resuming from {run.out}/checkpoints/step-{saved[-1]:08}" not in resumed.stderr:
            run.fail(f"expected to continue after step {saved[-1]}: {resumed.stderr}")
        run.process.returncode = resumed.returncode
        run.ends_like(reference)


def saves_on_request(tandem, folder, reference):
    """SIGUSR1 and SIGUSR2 save a checkpoint: once for each, also after a recovery, and never end the launch."""
    run = Run(tandem, folder, "requests", ["--spares", "1"], 100000, job=SNAPSHOTS)
    run.wait_until("ranks", lambda: run.pid(3))
    run.process.send_signal(signal.SIGUSR1)  # in the first moments
    run.wait_until("a checkpoint", lambda: len(checkpoints(run)) == 1)
    run.hurt(1, signal.SIGKILL, run.step() + 2)
    reached = run.step()
    run.wait_until("steps", lambda: run.step() > reached + 3)
    if len(checkpoints(run)) != 1:
        run.fail(f"expected no further checkpoint: {checkpoints(run)}")
    for number in signal.SIGUSR2, signal.SIGUSR1:
        before = checkpoints(run)
        run.process.send_signal(number)
        run.wait_until("a checkpoint", lambda: checkpoints(run)[-1] > before[-1])
    run.process.terminate()
    if run.process.wait(LIMIT_S) != 130:
        run.fail("expected to be stopped")
    for launch in [], ["--spares", "1"]:  # in the last moments
        run = Run(tandem, folder, f"last-request{len(launch)}", launch, reference.steps)
        run.wait_until("the final model", lambda: (run.out / "final").exists())
        while run.process.poll() is None:
            run.process.send_signal(signal.SIGUSR1)
        run.ends_like(reference)


def starts_no_replacement(tandem, folder, replicas):
    """A replacement that cannot be started counts as lost."""
    link = folder / "bin" / "tandem"
    link.parent.mkdir()
    link.symlink_to(os.path.abspath(tandem))
    run = Run(str(link), folder, "unstarted", ["--restarts", "1", "--min-dp", "2"], replicas.steps, "--tp 1 --dp 4")
    run.tandem = tandem
    run.wait_until("steps", lambda: run.step() >= 2)
    link.unlink()
    os.kill(run.wait_until("rank 2", lambda: run.pid(2)), signal.SIGKILL)
    run.ends_like(replicas)
    causes = [event["cause"] for event in run.events("lost")]
    if len(causes) != 2 or not re.match("was not started: .*No such file or directory", causes[1]):
        run.fail(f"expected a loss, and a replacement that was not started: {causes}")
    if "the run has 3 ranks now" not in run.log.read_text():
        run.fail("expected 3 ranks")


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def lose_at_end(tandem, folder, reference, rank, number, delay):
    run = Run(tandem, folder, f"last{rank}-{int(number)}-{delay}", ["--spares", "1"], reference.steps)
    pid = run.wait_until("its start", lambda: run.pid(rank))
    run.wait_until("the final model", lambda: (run.out / "final").exists())
    time.sleep(delay)
    send(pid, number)
    run.ends_like(reference)


def long(tandem, folder):
    steps = 30
    reference = Run(tandem, folder, "reference", [], steps)
    reference.ends_like(reference)
    for rank in range(4):
        for number in signal.SIGKILL, signal.SIGSTOP:
            for after in 1, 5, 9, 20:
                run = Run(tandem, folder, f"rank{rank}-{int(number)}-{after}", ["--spares", "1"], steps)
                run.hurt(rank, number, after)
                run.ends_like(reference)
        for delay in range(0, 400, 40):
            run = Run(tandem, folder, f"start{rank}-{delay}", ["--spares", "1"], steps)
            run.wait_until("its start", lambda: run.pid(rank))
            time.sleep(delay / 1e3)
            run.hurt(rank, signal.SIGKILL)
            run.ends_like(reference)
        for delay in range(0, 200, 20):  # about the end, which may have come
            run = Run(tandem, folder, f"end{rank}-{delay}", ["--spares", "1"], steps)
            pid = run.wait_until("its start", lambda: run.pid(rank))
            run.wait_until("the last step", lambda: run.step() >= steps - 1)
            time.sleep(delay / 1e3)
            send(pid, signal.SIGKILL)
            run.ends_like(reference)
        for number in signal.SIGKILL, signal.SIGSTOP:  # the others may have ended
            for delay in range(0, 10):
                lose_at_end(tandem, folder, reference, rank, number, delay / 1e3)


def figures_of(values):
    ranked = sorted(values)
    return {"median_ms": statistics.median(ranked), "p95_ms": ranked[int(0.95 * (len(ranked) - 1))], "max_ms": ranked[-1]}


def describe(figures):
    return ", ".join(f"{key.removesuffix('_ms')} {value:.1f}" for key, value in figures.items())


def measure_launchers(tandem, folder, count):
    steps = 10 * count + 20
    job = ["--set", "checkpoint.snapshot_every=1", "--set", "checkpoint.every=1000"]
    run = Run(tandem, folder, "launchers", ["--spares", "1"], steps, job=job)
    events = [run.kill_launcher(3 + 7 * at) for at in range(count)]
    figures, lost = figures_of(event["recovered_ms"] for event in events), max(event["steps_lost"] for event in events)
    print(f"recovered_ms: {describe(figures)} over {count}; at most {lost} steps made again")
    reference = Run(tandem, folder, "reference", [], steps, job=job)
    reference.process.wait(600)
    run.ends_like(reference)
    print("final weights: bitwise those of an undisturbed run; each sample once")
    return {f"recovered, at most {lost} step{'s' * (lost != 1)} made again": figures}


def measure(tandem, folder, number, count):
    steps = 10 * count + 20
    run = Run(tandem, folder, "kills", ["--spares", "1", "--restarts", str(count)], steps,
              job=["--set", "checkpoint.keep=2"])
    figures = [run.hurt(at % 4, number, 3 + 3 * at) for at in range(count)]
    times = {name: figures_of(values) for name, values in zip(["noticed", "recovered"], zip(*figures))}
    for name, values in times.items():
        print(f"{name}_ms: {describe(values)} over {count}")
    run.process.wait(600)
    reference = Run(tandem, folder, "reference", [], steps)
    reference.process.wait(600)
    run.ends_like(reference)
    print("final weights: bitwise those of an undisturbed run; each sample once")
    return times


def main():
    tandem, extent, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        kind, _, count = extent.partition("=")
        times = {}
        if kind == "launchers":
            times = measure_launchers(tandem, folder, int(count))
        elif count:
            times = measure(tandem, folder, {"kills": signal.SIGKILL, "stops": signal.SIGSTOP}[kind], int(count))
        else:
            {"short": short, "long": long}[extent](tandem, folder)
        if "json" in options:
            pathlib.Path(options["json"]).write_text(json.dumps({"times": times}) + "\n")


if __name__ == "__main__":
    main()
