#!/usr/bin/env python3
"""driver_death_test.py TANDEM KILLS: `tandem launch` and the process above it are killed again and again. Its ranks end with it, the same command
continues the run, and the final weights and the ledger are those of an undisturbed one. A second launch of a run that
has one is refused."""
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from launched_run import Run

STEPS_A_KILL, LIMIT_S = 500, 60  # the rest of the run outlasts the time that a second launch waits
RESUME = ["--resume"]


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def steps_of(out):
    """The last step in the metrics, whose last line may not be complete."""
    try:
        return max(json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()[-3:-1])
    except (OSError, ValueError):
        return 0


def refuse_second(run, command):
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    text = f"another run (process {run.process.pid}) writes to it"
    if result.returncode != 2 or text not in result.stderr or result.stderr.count("\n") != 1 or result.stdout:
        run.fail(f"expected a second launch to be refused: {result}")
    if time.monotonic() - began > 10 or run.process.poll() is not None:
        run.fail("expected a refusal at once, and the first to continue")


def main():
    tandem, kills = sys.argv[1], int(sys.argv[2])
    random.seed(kills)
    steps = STEPS_A_KILL * (kills + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def start(name, job=RESUME):
            return Run(tandem, folder, name, ["--spares", "1"], steps, layout="--dp 2", ranks=2, job=job)
        reference = start("reference", [])
        reference.ends_like(reference)
        slowest = 0
        for kill in range(kills):
            run = start("killed")  # the same command from the first on
            reach = STEPS_A_KILL * kill + random.randrange(STEPS_A_KILL)
            run.wait_until(f"step {reach}", lambda: steps_of(run.out) >= reach)
            if kill == 0:
                refuse_second(run, run.process.args)
            # Below the process that would start it again, which may still wait for those of the run before.
            launcher = run.wait_until("a launcher", lambda: children(run.process.pid))[0]
            run.wait_until("two ranks and a spare", lambda: len(children(launcher)) >= 3)
            ranks = [launcher, *children(launcher)]
            if run.process.poll() is not None:
                run.fail("expected it to train")
            run.process.kill()
            run.process.wait()
            if kill % 2 == 1:  # the next one waits for what is left of this one
                continue
            killed = time.monotonic()
            while any(is_running(pid) for pid in ranks):
                if time.monotonic() > killed + 10:
                    run.fail("ranks outlive the launcher")
                time.sleep(0.002)
            slowest = max(slowest, time.monotonic() - killed)
        run = start("killed")
        run.ends_like(reference)
        if "resuming from " not in run.log.read_text():
            run.fail("expected to resume")
        print(f"{kills} kills of the launcher: ranks ended within {slowest * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
