#!/usr/bin/env python3
"""replaced_rank_test.py TANDEM SOURCE_DIR [--device cpu|gpu] [--axes dp tp] [--phases …] [--faults kill hang]
[--repeats N] [--min-dp] [--end]: under `tandem launch --spares`, one of two ranks, processes that share a GPU, is killed
(SIGKILL) or stopped (SIGSTOP) in each phase of a training step. The run continues, within 10 s, and its losses have the
bits of an undisturbed run. With --min-dp no process can take the rank: the other replica continues with
both. With --end there is no spare: the run ends, naming the rank. Exit code 77 without a GPU."""
import argparse
import json
import mmap
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

# Names of what a rank does, in its progress words (src/observe/progress_words.h), by phase: CPU ranks name operations,
# GPU ranks passes.
FORWARD = ("forward", "attention", "rms_norm", "swiglu", "embedding", "cross_entropy")
BACKWARD = ("backward", "attention_backwa", "rms_norm_backwar", "swiglu_backward", "ag_wgrad")
PHASES = {"data": ("read",), "forward": FORWARD, "backward": BACKWARD,
          "reduce": ("send_gradients", "dp_sum", "dp_reduce_scatte", "all_reduce", "reduce_scatter"),
          "update": ("adamw", "dp_all_gather"), "snapshot": ("checkpoint",)}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("tandem", type=os.path.abspath)
parser.add_argument("source", type=os.path.abspath)
parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
parser.add_argument("--axes", choices=("dp", "tp"), nargs="*", default=("dp", "tp"))
parser.add_argument("--phases", choices=PHASES, nargs="*", default=tuple(PHASES))
parser.add_argument("--faults", choices=("kill", "hang"), nargs="*", default=("kill", "hang"))
parser.add_argument("--repeats", type=int, default=1)
parser.add_argument("--min-dp", action="store_true")
parser.add_argument("--end", action="store_true")
parser.add_argument("--keep", type=os.path.abspath, help="folder for the runs, which are left there")
options = parser.parse_args()

BAR = 10 if options.device == "gpu" else 60  # seconds until training continues; on CPUs of a busy machine not a bar
LIMIT = 120                                  # seconds of a wait
DEADLINE = 20                                # seconds of a rank's wait
SPACING = 10                                 # steps between faults, at least
HEAD_BYTES, SLOT_BYTES, TRAINING, STEP, ACTIVITY, NAME = 256, 128, 8, 24, 64, 72  # src/comm/rendezvous/membership.h
folder = pathlib.Path(options.keep or tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
runs = []


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def children(pid):
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def environment_of(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)


class Run:
    """A training of two ranks under `tandem launch`."""

    def __init__(self, name, axis, launch=(), job=()):
        self.name, self.out, self.events_file = name, folder / name, folder / f"{name}.events/events.jsonl"
        self.log = folder / f"{name}.log"
        command = [options.tandem, "launch", "-n", "2", *launch]
        if launch:
            command += ["--out", str(self.events_file.parent)]
        command += ["--", options.tandem, "train", options.source + "/configs/gpu-tiny.toml", "--device", options.device,
                    f"--{axis}", "2", "--out", str(self.out), "--set", "train.steps=1000000",
                    "checkpoint.snapshot_every=1", *job]
        if options.device == "gpu":
            command += ["--ranks-per-gpu", "2"]
        variables = {"TANDEM_TUNE": "0", "TANDEM_THREADS": "1", "TANDEM_DEADLINE_S": str(DEADLINE),
                     "TANDEM_CACHE_DIR": str(folder / "cache")}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            env={**os.environ, **variables})
        self.board, self.slots = None, 2 + ("--spares" in launch)
        runs.append(self)

    def text(self):
        return f"{self.name}:\n{self.log.read_text()[-6000:]}"

    def wait_until(self, what, condition):
        until = time.monotonic() + LIMIT
        while not (result := condition()):
            expect(time.monotonic() < until, f"expected {what} within {LIMIT} s: {self.text()}")
            expect(self.process.poll() is None, f"expected {what}, the run has ended: {self.text()}")
        return result

    def open_board(self):
        """Maps the membership board, through the descriptor of a process that was started with it."""
        for launcher in [self.process.pid, *children(self.process.pid)]:
            for child in children(launcher):
                described = environment_of(child).get("TANDEM_MEMBERSHIP")
                if not described:
                    continue
                try:
                    with open(f"/proc/{child}/fd/{described.split(':')[0]}", "rb") as file:
                        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                except (OSError, ValueError):
                    continue
        return None

    def slot(self, rank):
        """Begin of the slot of a rank, in the board."""
        for slot in range(self.slots):
            at = HEAD_BYTES + slot * SLOT_BYTES
            if struct.unpack_from("<i", self.board, at)[0] == rank:
                return at
        return None

    def process_of(self, at):
        slot = str((at - HEAD_BYTES) // SLOT_BYTES)
        found = [child for launcher in [self.process.pid, *children(self.process.pid)] for child in children(launcher)
                 if environment_of(child).get("TANDEM_MEMBERSHIP", ":").split(":")[1] == slot]
        return found[0] if found else None

    def catch(self, rank, phase):
        """Waits until the rank is in that phase, some steps later; returns its process."""
        self.board = self.board or self.wait_until("the board", self.open_board)
        at = self.wait_until(f"rank {rank}", lambda: self.slot(rank))
        pid = self.wait_until(f"a process of rank {rank}", lambda: self.process_of(at))
        names = {name.encode().ljust(16, b"\0")[:16] for name in PHASES[phase]}
        board, name_at, end = self.board, at + NAME, at + NAME + 16
        after_step = struct.unpack_from("<q", board, at + STEP)[0] + SPACING

        def is_there():
            return struct.unpack_from("<q", board, at + STEP)[0] >= after_step

        def is_in_phase():
            for _ in range(2000):
                if board[name_at:end] in names:
                    return True
            return False

        self.wait_until(f"step {after_step} of rank {rank}", is_there)
        self.wait_until(f"{phase} of rank {rank}", is_in_phase)
        return pid

    def events(self, kind):
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def losses(self):
        whole = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0]
        return [(line["step"], line["loss"]) for line in map(json.loads, whole.splitlines())]

    def fails(self):
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end: {self.text()}") from None
        expect(code != 0, f"exit code {code}: {self.text()}")

    def stop(self, step):
        """Ends the run after that step, or a later one; returns itself."""
        metrics = self.out / "metrics.jsonl"
        self.wait_until(f"step {step}",
                        lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step or time.sleep(0.05))
        self.process.terminate()
        self.fails()
        expect("Stopped after step" in self.log.read_text(), self.text())
        return self


def compare(run, name, axis, job=()):
    """Compares the losses of a run that goes on with those of an undisturbed one."""
    run.stop(run.events("recovered")[-1]["step"] + SPACING)
    losses = run.losses()
    expected = Run(name, axis, (), job).stop(len(losses)).losses()[:len(losses)]
    expect(losses == expected, f"{run.name}: other losses than without faults: " + str(
        [pair for pair in zip(losses, expected) if pair[0] != pair[1]][:3]) + run.text())
    differ = len({loss for _, loss in losses})  # else a step that was lost or made twice would not show
    expect(differ > 0.9 * len(losses), f"{differ} different losses in {len(losses)} steps")
    return len(losses)


def hurt(run, rank, phase, fault):
    """Causes a fault and waits until the run continues; returns the seconds of that."""
    recovered = len(run.events("recovered"))
    pid = run.catch(rank, phase)
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    began = time.monotonic()
    run.wait_until(f"recovery from {fault} in {phase}", lambda: len(run.events("recovered")) > recovered or time.sleep(0.01))
    took = time.monotonic() - began
    event = run.events("recovered")[-1]
    expect((event["rank"], event["process"]) == (rank, pid), f"rank {rank}, process {pid}: blamed {event}: {run.text()}")
    print(f"{run.name}: {fault} of rank {rank} in {phase}, step {event['step']}: noticed, replaced and in its next step "
          f"after {took:.2f} s; {event['steps_lost']} steps made again", flush=True)
    return took


def replaced(axis):
    faults = [(phase, fault) for _ in range(options.repeats) for fault in options.faults for phase in options.phases]
    run = Run(f"{axis}2", axis, ("--spares", "1", "--restarts", "1000"))
    times = [hurt(run, 1 - i % 2, phase, fault) for i, (phase, fault) in enumerate(faults)]
    steps = compare(run, f"{axis}2-undisturbed", axis)
    print(f"PASS {axis} 2: {len(faults)} faults, same bits in {steps} steps; max {max(times):.2f} s until training continued, "
          f"bar {BAR}", flush=True)
    expect(max(times) <= BAR, f"{max(times)} s: expected at most {BAR}")


def without_process(axis):
    """No process takes the rank: with data-parallel replicas the other one continues, else the run ends."""
    if options.min_dp and axis == "dp":
        job = ("checkpoint.every=20",)
        run = Run("min-dp", axis, ("--min-dp", "1"), job)
        hurt(run, 1, "backward", "kill")
        steps = compare(run, "min-dp-undisturbed", axis, job)
        print(f"PASS one replica continued with the work of both, same bits in {steps} steps", flush=True)
    if options.end:
        run = Run(f"{axis}2-end", axis, ("--restarts", "1"))
        hurt(run, 0, "forward", "kill")
        pid = run.catch(1, "backward")
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        run.fails()
        took = time.monotonic() - began
        expect(re.search(r"launch: rank 1 \(process \d+\) was ended by signal 9", run.log.read_text()), run.text())
        expect(took < DEADLINE + 40, f"ends after {took} s")
        print(f"PASS {axis} 2: without a spare the run ended after {took:.1f} s, naming the rank", flush=True)


def main():
    has_gpu = shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    if options.device == "gpu" and not has_gpu:
        print("skipped: no GPU")
        return 77
    for axis in options.axes:
        if options.phases and options.faults:
            replaced(axis)
        without_process(axis)
    return 0


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the runs, too
try:
    sys.exit(main())
finally:
    for each in runs:
        if each.process.poll() is None:
            each.process.terminate()
            try:
                each.process.wait(20)
            except subprocess.TimeoutExpired:
                each.process.kill()
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
