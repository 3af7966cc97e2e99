#!/usr/bin/env python3
"""fault_campaign.py TANDEM short|faults=N [seed=S] [json=FILE]: random faults in the processes of short trainings (`tandem launch
--inject random:SEED,RATE`), until there were N; a quarter of the trainings is on two hosts, which are this machine. Each run
must end with the bits, and each sample once, of an undisturbed one. Prints how soon losses were noticed and recovered
from, how often the right process was blamed, and the steps that were lost: with snapshots in memory at most one finished
step. Controls: without detection a stopped rank ends no run; a flipped bit is seen in the final weights. The faults
follow from the seed, their moments within a step do not. json=FILE writes the figures, for tools/recovery_table.py."""
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from launch_hosts_test import Hosts

CONFIG = str(pathlib.Path(__file__).resolve().parents[3] / "configs/tiny.toml")
JOB = ["--set", "model.hidden=16", "--set", "model.head_dim=4", "--set", "model.ffn=32", "--set", "train.seq=32",
       "--set", "train.batch=8"]
LAYOUTS = [["--tp", "2", "--dp", "2"], ["--tp", "1", "--dp", "4"], ["--tp", "1", "--dp", "2", "--set", "parallel.pp=2"]]
RESTORES = {"copies in peers' memory": ["checkpoint.snapshot_every=1", "checkpoint.peer_copy=true"],
            "snapshots in memory": ["checkpoint.snapshot_every=1"], "checkpoints on disk": ["checkpoint.every=1"]}
STEPS, LIMIT_S = 80, 120


class Campaign:
    def __init__(self, tandem, folder):
        self.tandem, self.folder, self.references, self.runs = tandem, folder, {}, 0
        self.hosts = Hosts(tandem, folder)
        self.environment = {**os.environ, "TANDEM_THREADS": "1", "TANDEM_TUNE": "0",
                            "TANDEM_CACHE_DIR": str(folder / "cache")}

    def command(self, out, job, launch=()):
        return [self.tandem, "launch", "-n", "4", *launch, "--", self.tandem, "train", CONFIG, "--out", str(out), *JOB,
                "--set", f"train.steps={STEPS}", *job]

    def start(self, out, job, launch=()):
        return subprocess.Popen(self.command(out, job, launch), env=self.environment, stdout=subprocess.DEVNULL,
                                stderr=open(f"{out}.log", "wb"))

    def train(self, out, job, launch=()):
        """Seconds of a run that ends well."""
        began = time.monotonic()
        process = self.start(out, job, launch)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = f"none within {LIMIT_S} s"
        if code != 0:
            sys.exit(f"{self.command(out, job, launch)}: exit {code}\n{pathlib.Path(f'{out}.log').read_text()}")
        return time.monotonic() - began

    def weights(self, out):
        return (out / "final/model.safetensors").read_bytes()

    def reference(self, layout):
        """Final weights of an undisturbed run, and its seconds."""
        key = tuple(layout)
        if key not in self.references:
            out = self.folder / f"reference{len(self.references)}"
            seconds = self.train(out, layout)
            self.references[key] = self.weights(out), seconds
        return self.references[key]

    def hurt(self, seed, rate):
        """Injected faults, recoveries and seconds of a run with faults, whose result is checked."""
        layout = LAYOUTS[seed % len(LAYOUTS)]
        restore = list(RESTORES)[seed // len(LAYOUTS) % len(RESTORES)]
        out, events = self.folder / f"run{seed}", self.folder / f"run{seed}.events"
        launch = ["--spares", "1", "--restarts", "1000", "--inject", f"random:{seed},{rate}", "--out", str(events)]
        job = [*layout, *(word for key in RESTORES[restore] for word in ("--set", key))]
        if seed % 4 == 3:  # a spare may be on the other host, without the rank's snapshots
            restore += " of two hosts"
            launch += self.hosts.options("a", "b")
        seconds = self.train(out, job, launch)
        if self.weights(out) != self.reference(layout)[0]:
            sys.exit(f"seed {seed}, {layout}, {restore}: the final weights differ\n{pathlib.Path(f'{out}.log').read_text()}")
        check = subprocess.run([self.tandem, "data", "check", str(out)], capture_output=True, text=True)
        if check.returncode != 0 or f", {STEPS} steps" not in check.stdout:
            sys.exit(f"seed {seed}: {check.stdout}{check.stderr}")
        lines = lambda name: [json.loads(line) for line in (events / name).read_text().splitlines()]
        faults = lines("faults.jsonl")
        told = lines("events.jsonl") if faults else []
        for fault in faults:
            fault["blamed"] = is_blamed(fault, faults, told)
        recovered = [{**event, "restore": restore} for event in told if event["event"] == "recovered"]
        self.runs += 1
        shutil.rmtree(out)
        return faults, recovered, seconds

    def check_controls(self):
        layout = LAYOUTS[0]
        weights, seconds = self.reference(layout)
        # Detection off: a rank that is stopped is not replaced.
        out = self.folder / "control"
        process = self.start(out, layout)
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.002)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[2]), signal.SIGSTOP)
        try:
            code = process.wait(max(1.5, 3 * seconds))
            sys.exit(f"control: a stopped rank without --spares: exit {code}: expected no end")
        except subprocess.TimeoutExpired:
            process.kill()
        # The comparison: a flipped bit.
        plan = self.folder / "flip.toml"
        plan.write_text('[[fault]]\nstep = 9\nrank = 1\nkind = "flip_masters"\nbit = 30\n')
        out = self.folder / "flipped"
        self.train(out, [*layout, "--inject", str(plan), "--set", "check.action=warn"])
        if self.weights(out) == weights:
            sys.exit("control: a flipped bit does not change the final weights")

    def check_file_errors(self):
        """A failing write is reported with the file, and the run, or its --resume, ends with the same bits."""
        layout = LAYOUTS[0]
        for kind, file, reason in [("no_space", "metrics.jsonl", "No space left on device"),
                                   ("io_error", "model.safetensors", "Input/output error")]:
            plan = self.folder / f"{kind}.toml"
            plan.write_text(f'[[fault]]\nstep = 5\nrank = 0\nkind = "{kind}"\nfile = "*/{file}"\n')
            out = self.folder / kind
            job = [*layout, "--set", "checkpoint.every=1", "--inject", str(plan)]
            code, log = self.start(out, job).wait(LIMIT_S), pathlib.Path(f"{out}.log").read_text()
            if f"{file}: cannot write: {reason}" not in log:
                sys.exit(f"{kind}: exit {code}: expected a line with the file\n{log}")
            if code != 0:
                self.train(out, [*job, "--resume"])
            if self.weights(out) != self.reference(layout)[0]:
                sys.exit(f"{kind}: the final weights differ\n{log}")

    def check_refused(self):
        for text, inject in [("kind flip_weights: expected kill, hang, pause or slow", "flip"), ("expected a file, or random:SEED,RATE", "random:x"),
                             ("phase backward: a launcher slows whole processes", "phase"),
                             ("random:SEED,RATE with a rate from 0 to 1", "random:1,2"), ("No such file", "none.toml")]:
            file = self.folder / inject
            if inject == "flip":
                file.write_text('[[fault]]\nstep = 1\nkind = "flip_weights"\n')
                inject = str(file)
            elif inject == "phase":
                file.write_text('[[fault]]\nstep = 1\nkind = "slow"\nphase = "backward"\n')
                inject = str(file)
            self.refuse(text, ["--restarts", "1", "--inject", inject])
        self.refuse("launch --inject: expected --spares", ["--inject", "random:1"])

    def refuse(self, text, launch):
        result = subprocess.run(self.command(self.folder / "none", LAYOUTS[0], launch), capture_output=True, text=True,
                                timeout=LIMIT_S)
        if result.returncode not in (2, 3) or text not in result.stderr or result.stderr.count("\n") != 1:
            sys.exit(f"{launch}: {result.returncode}: {result.stderr}")


CAUSES = {"kill": "was ended by signal 9, Killed", "hang": "was stopped (SIGSTOP) for "}


def is_blamed(fault, faults, events):
    """Whether the first event of the fault's process names its rank, and the cause of one of the process's faults."""
    notices = [event for event in events if event["event"] in ("lost", "hung") and event["process"] == fault.get("process")]
    causes = [CAUSES[other["kind"]] for other in faults if other.get("process") == fault.get("process") and
              other["kind"] in CAUSES]
    if not notices:  # lost after its rank had finished its work: told by faults.jsonl only
        return fault.get("cause") is not None and any(fault["cause"].startswith(cause) for cause in causes)
    return notices[0]["rank"] == fault.get("rank") and any(notices[0]["cause"].startswith(cause) for cause in causes)


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def setting_of(restore):
    """Row of the table of lost steps."""
    if "disk" in restore:
        return "with `checkpoint.every=1` only"
    if "hosts" not in restore:
        return "on one host with `checkpoint.snapshot_every=1`, also with `checkpoint.peer_copy`"
    return "of two hosts with `checkpoint.peer_copy`" if "peers" in restore else "of two hosts with `checkpoint.snapshot_every=1` only"


def run_campaign(campaign, count, seed, rate, file):
    figures = {"steps_lost": []}
    faults, recovered, seconds = [], [], 0
    while len(faults) < count:
        more, recoveries, time_s = campaign.hurt(seed, rate)
        faults, recovered, seconds, seed = faults + more, recovered + recoveries, seconds + time_s, seed + 1
    alarms = [fault for fault in faults if fault["kind"] == "false_alarm"]
    faults = [fault for fault in faults if fault["kind"] != "false_alarm"]
    right = 0
    for kind in sorted({fault["kind"] for fault in faults}):
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        noticed = [fault["noticed_ms"] for fault in of_kind if fault["noticed_ms"] is not None]
        text = f"{kind}: {len(of_kind)} injected"
        if kind in ("kill", "hang"):
            blamed = sum(fault["blamed"] for fault in of_kind)
            right += blamed
            figures[kind] = {"count": len(of_kind), "p50_ms": quantile(noticed, 0.5), "p99_ms": quantile(noticed, 0.99)}
            text += (f", {len(noticed)} noticed, {blamed} with the right rank and cause, p50 {quantile(noticed, 0.5):.1f} ms, "
                     f"p99 {quantile(noticed, 0.99):.1f} ms")
        print(text)
    paused = [event["recovered_ms"] for event in recovered]
    losses = [fault for fault in faults if fault["kind"] in ("kill", "hang")]
    if losses:
        lost_s = (statistics.mean(fault["noticed_ms"] or 0 for fault in losses) + statistics.mean(paused)) / 1e3
        figures["recovered"] = {"count": len(paused), "p50_ms": quantile(paused, 0.5), "p95_ms": quantile(paused, 0.95)}
        print(f"recovered: {len(paused)}, p50 {quantile(paused, 0.5):.1f} ms, p95 {quantile(paused, 0.95):.1f} ms")
        print(f"time lost for a loss: {lost_s:.3f} s on average, {100 * lost_s / (60 + lost_s):.2f} % at a loss a minute")
    lost_more = []
    for restore in sorted({event["restore"] for event in recovered}):
        lost = [event["steps_lost"] for event in recovered if event["restore"] == restore]
        print(f"steps lost with {restore}: mean {statistics.mean(lost):.2f}, max {max(lost)} over {len(lost)}, more than "
              f"one in {sum(steps > 1 for steps in lost)}")
        if restore.endswith("memory"):
            lost_more += [event for event in recovered if event["restore"] == restore and event["steps_lost"] > 1]
    print(f"{len(alarms)} false alarms; {campaign.runs} runs in {seconds:.0f} s: final weights bitwise those of undisturbed "
          "ones, each sample once")
    for setting in sorted({setting_of(event["restore"]) for event in recovered}):
        lost = [event["steps_lost"] for event in recovered if setting_of(event["restore"]) == setting]
        figures["steps_lost"].append({"setting": setting, "mean": statistics.mean(lost), "max": max(lost), "recoveries": len(lost),
                                      "more_than_one": sum(steps > 1 for steps in lost)})
    figures |= {"right": right, "false_alarms": len(alarms)}
    if file:
        pathlib.Path(file).write_text(json.dumps(figures) + "\n")
    if lost_more:
        sys.exit(f"expected at most one lost step with snapshots in memory: {lost_more}")
    if alarms or right != len(losses):
        sys.exit(f"blamed {right} of {len(losses)}; {alarms}; {[fault for fault in losses if not fault['blamed']]}")


def main():
    tandem, extent, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(tandem, pathlib.Path(name))
        if extent == "short":
            campaign.check_refused()
            campaign.check_file_errors()
        campaign.check_controls()
        count = 6 if extent == "short" else int(extent.removeprefix("faults="))
        run_campaign(campaign, count, int(options.get("seed", 1)), 0.03, options.get("json"))


main()
