#!/usr/bin/env python3
"""learners_killed_test.py TANDEM short|long: a rank of a learner is killed in each phase of a step, from the reading of text to the
outer update, and replaced by a spare. Where all learners count, or faults say which are late, the run ends with the
bits, and each sample once, of an undisturbed one; where time decides which are late, with its loss."""
import json
import pathlib
import sys
import tempfile

from launched_run import SNAPSHOTS, Run

STEPS = 24
# Two learners of two ranks. A fragment leaves after every fourth step and is applied two steps later.
LAYOUT = "--tp 1 --dp 4"
KEYS = ["method=local", "learners=2", "every=8", "fragments=2", "delay=2"]
MAX_RISE = 0.005  # of the loss

# (rank, step, phase or span, whose end it is killed at)
KILLS = [(2, 9, 'phase = "data"'), (3, 9, 'phase = "forward"'), (0, 9, 'phase = "backward"'),  # while a fragment travels
         (3, 9, 'phase = "update"'), (1, 9, 'phase = "DP wait"'), (2, 8, 'span = "encode_changes"'),
         (1, 8, 'span = "encode_changes"'), (3, 10, 'phase = "sync wait"'), (0, 10, 'phase = "sync wait"'),
         (2, 10, 'span = "decode_changes"'), (1, 10, 'span = "outer_step"'), (3, 10, 'span = "outer_step"')]
# The message of the second learner after step 8 does not count, and it has changes yet to send: it is killed in the
# outer step without them, later, as it sends them, and as they are applied.
LATE = '[[fault]]\nstep = 8\nrank = 2\nkind = "late_message"\n'
LATE_KEYS = ["method=local", "learners=2", "every=4", "quorum=1"]
LATE_KILLS = [(2, 10, 'phase = "backward"'), (3, 8, 'span = "outer_step"'), (2, 12, 'span = "encode_changes"'),
              (3, 12, 'span = "outer_step"')]


class Runs:
    def __init__(self, tandem, folder):
        self.tandem, self.folder = tandem, folder

    def start(self, name, keys, faults="", launch=("--spares", "1")):
        job = [*SNAPSHOTS, *(text for key in keys for text in ("--set", f"sync.{key}")),
               "--set", f"train.validate_every={STEPS}", "--set", "data.val_fraction=0.05"]
        if faults:
            plan = self.folder / f"{name}.toml"
            plan.write_text(faults)
            job += ["--inject", str(plan)]
        return Run(self.tandem, self.folder, name, list(launch), STEPS, LAYOUT, job)

    def killed(self, name, keys, kill, faults=""):
        rank, step, moment = kill
        run = self.start(name, keys, f'{faults}[[fault]]\nstep = {step}\nrank = {rank}\nkind = "kill"\n{moment}\n')
        run.wait_until("recovery", lambda: run.events("recovered"))
        lost = run.events("lost")[0]
        if (lost["rank"], lost["step"]) != (rank, step) or "signal 9" not in lost["cause"]:
            run.fail(f"expected the loss of rank {rank} in step {step}: {lost}")
        return run


def loss_of(run):
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    return lines[-1]["validation_loss"]


def main():
    tandem, extent = sys.argv[1:]
    every = 1 if extent == "long" else 6
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(tandem, pathlib.Path(name))
        whole = runs.start("whole", KEYS, launch=())
        whole.ends_like(whole)
        for i, kill in list(enumerate(KILLS))[1::every]:
            runs.killed(f"kill{i}", KEYS, kill).ends_like(whole)
        late = runs.start("late", LATE_KEYS, LATE, launch=())
        late.ends_like(late)
        punctual = runs.start("punctual", LATE_KEYS, LATE.replace("step = 8", "step = 1000"), launch=())
        punctual.ends_well()
        if (late.out / "final/model.safetensors").read_bytes() == (punctual.out / "final/model.safetensors").read_bytes():
            late.fail("control: expected other bits than without a late message")
        for i, kill in list(enumerate(LATE_KILLS))[::every]:
            runs.killed(f"late{i}", LATE_KEYS, kill, LATE).ends_like(late)
        # A message that travels as the run is resumed counts, late or not.
        for i, kill in enumerate(KILLS[2::every]):
            run = runs.killed(f"quorum{i}", [*KEYS, "quorum=1"], kill, LATE if i % 2 else "")
            run.ends_well()
            if not loss_of(run) <= (1 + MAX_RISE) * loss_of(whole):
                run.fail(f"expected a loss of at most {1 + MAX_RISE} times {loss_of(whole)}: {loss_of(run)}")


if __name__ == "__main__":
    main()
