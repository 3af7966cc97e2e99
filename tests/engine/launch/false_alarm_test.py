#!/usr/bin/env python3
"""false_alarm_test.py TANDEM minutes=N|sequences: trainings under `tandem launch --spares` on a machine with twice as many computing
processes as processors, for N minutes in all. No rank may be lost or blamed. Control: at the end of each a rank is
stopped, and that is noticed. sequences: only one of two steps and validations, with sequences of 16384 on one thread."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from launched_run import LIMIT_S, Run

COPIES = ["--set", "checkpoint.every=1000", "--set", "checkpoint.snapshot_every=1", "--set", "checkpoint.peer_copy=true"]
JOBS = {"short steps": ("--tp 2 --dp 2", COPIES), "checkpoints on disk": ("--tp 1 --dp 4", []),
        "long steps": ("--tp 1 --dp 2", [*COPIES, "--set", "parallel.pp=2", "--set", "model.hidden=128", "--set",
                                         "model.head_dim=32", "--set", "model.ffn=512", "--set", "model.layers=4", "--set",
                                         "train.seq=128", "--set", "train.batch=32"])}


def check(tandem, folder, name, seconds):
    layout, job = JOBS[name]
    run = Run(tandem, folder, name.replace(" ", "_"), ["--spares", "1"], 10**9, layout, job)
    run.wait_until("a step", lambda: run.step() >= 1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if run.events() or run.process.poll() is not None:
            run.fail(f"expected no event: {run.events()}")
        time.sleep(0.2)
    steps = run.step()
    os.kill(run.pid(3), signal.SIGSTOP)
    run.wait_until("recovery", lambda: run.events("recovered"))
    if [(event["event"], event["rank"]) for event in run.events()] != [("hung", 3), ("recovered", 3)]:
        run.fail(f"expected that rank 3 hung: {run.events()}")
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(LIMIT_S)
    print(f"{name}: {steps} steps in {seconds:.0f} s, {1e3 * seconds / steps:.1f} ms each, no event; then a stopped rank was "
          f"noticed within {run.events('hung')[0]['noticed_ms']:.0f} ms", flush=True)


def train_long_sequences(tandem):
    with tempfile.TemporaryDirectory() as name:
        job = ["--set", "model.max_seq=16384", "--set", "train.seq=16384", "--set", "train.batch=2", "--set", "train.validate_every=1",
               "--set", "data.val_fraction=0.3", "--set", "train.validate_bytes=60000"]
        run = Run(tandem, pathlib.Path(name), "sequences", ["--spares", "1"], 2, "--dp 2", job, ranks=2)
        if run.process.wait(1200) != 0 or run.events() or not (run.out / "final").exists():
            run.fail(f"expected the final model, and no event: {run.events()}")


def main():
    tandem, minutes = sys.argv[1:]
    if minutes == "sequences":
        return train_long_sequences(tandem)
    seconds = 60 * float(minutes.removeprefix("minutes="))
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        with tempfile.TemporaryDirectory() as name:
            for job in JOBS:
                check(tandem, pathlib.Path(name), job, seconds / len(JOBS))
    finally:
        for process in load:
            process.kill()


if __name__ == "__main__":
    main()
