#!/usr/bin/env python3
"""slow_event_test.py TANDEM: a rank of `tandem launch` that is slow for a while is in events.jsonl, with its phase, and
keeps its process."""
import pathlib
import sys
import tempfile
import time

from launched_run import Run

JOB = ["--set", "train.dtype=f32", "--set", "checkpoint.every=0", "--set", "train.seconds=40", "--set", "model.hidden=64",
       "--set", "model.ffn=256"]
LIMIT_S = 120


def main():
    tandem = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        faults = folder / "slow.toml"
        faults.write_text('[[fault]]\nstep = 1\nrank = 1\nkind = "slow"\nphase = "backward"\npercent = 150\n')
        run = Run(tandem, folder, "slow", ["--spares", "1"], 10**6, layout="--dp 2", ranks=2,
                  job=[*JOB, "--inject", str(faults)])
        began = time.monotonic()
        while not run.events("slow"):
            if time.monotonic() > began + LIMIT_S or run.process.poll() is not None:
                run.fail("expected an event of the slow rank")
            time.sleep(0.1)
        event = run.events("slow")[0]
        if (event["rank"], event["phase"]) != (1, "backward") or event["share"] < 0.02 or not event["excess"] > 0.3:
            run.fail(f"expected backward of rank 1: {event}")
        if run.events() != run.events("slow"):
            run.fail(f"expected that it keeps its process: {run.events()}")
        run.process.terminate()
        run.process.wait(LIMIT_S)


if __name__ == "__main__":
    main()
