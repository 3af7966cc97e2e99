#!/usr/bin/env python3
"""replace_corrupt_test.py TANDEM short|long: bits are flipped in the memory of ranks of `tandem launch --spares`; with
check.action = "replace" those ranks are replaced, and the run ends with the bits of an undisturbed one; also on several
hosts, which are this machine."""
import json
import pathlib
import subprocess
import sys
import tempfile

from launch_hosts_test import Hosts
from launched_run import CONFIG, Run

STEPS = 16
LAYOUT, RANKS = "--dp 3", 3
JOB = ["--set", "train.batch=6", "--set", "train.dtype=f32"]
SNAPSHOTS = ["--set", "checkpoint.every=1000", "--set", "checkpoint.snapshot_every=1"]
CHECKS = ["--set", "check.action=replace", "--set", "check.state=1"]


def refused(tandem, text, *arguments):
    result = subprocess.run([*arguments], capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if "tandem: launch: " not in line]
    if result.returncode != 2 or len(errors) != 1 or text not in errors[0]:
        sys.exit(f"{arguments}: expected {text!r}: {result.returncode}: {result.stderr}")


def fault(step, rank, kind, bit=20, tensor="*"):
    return f'[[fault]]\nstep = {step}\nrank = {rank}\nkind = "{kind}"\nbit = {bit}\ntensor = "{tensor}"\n'


def replaced(tandem, folder, reference, name, plan, ranks, steps, check, job=(), layout=LAYOUT, launch=("--spares", "2")):
    """A run with the plan's faults, in which those ranks are replaced in those steps, in this order; several of one
    step in any."""
    file = folder / f"{name}.toml"
    file.write_text(plan)
    run = Run(tandem, folder, name, list(launch), STEPS, layout=layout, job=[*JOB, *CHECKS, "--inject", str(file), *job],
              ranks=RANKS)
    run.ends_like(reference)
    found = [(event["step"], event["rank"]) for event in run.events("corrupt")]
    if sorted(found) != sorted(zip(steps, ranks)):
        run.fail(f"expected ranks {ranks} in steps {steps}: {run.events()}")
    if len(run.events("recovered")) != len(ranks) or run.events("lost") or run.events("hung"):
        run.fail(f"expected a recovery for each of {ranks}: {run.events()}")
    if any(event["continues_after"] >= event["step"] - 1 for event in run.events("recovered")):
        run.fail(f"expected to continue before the step whose state may be corrupt: {run.events('recovered')}")
    findings = [json.loads(line) for line in (run.out / "checks.jsonl").read_text().splitlines()]
    if not {finding["check"] for finding in findings} <= set(check.split()):
        run.fail(f"expected {check} to find it: {findings}")
    return run


def main():
    tandem, length = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train = [tandem, "train", CONFIG, "--out", str(folder / "refused"), "--set", "check.action=replace"]
        refused(tandem, "check.action is replace: expected tandem launch --spares, --restarts or --min-dp", *train)
        refused(tandem, "checkpoint.keep is 1: expected at least 2 where check.action is replace", tandem, "launch", "-n",
                "1", "--spares", "1", "--", *train, "--set", "checkpoint.keep=1")
        reference = Run(tandem, folder, "reference", [], STEPS, layout=LAYOUT, job=JOB, ranks=RANKS)
        reference.ends_like(reference)
        weights = fault(6, 1, "flip_weights", tensor="*.0.*.down_proj.weight")
        run = replaced(tandem, folder, reference, "weights", weights, [1], [6], "weights")
        log = run.log.read_text()
        for text in ["step 6: model.layers.0.mlp.down_proj.weight of rank 1 is corrupt: it differs from that of ranks 0, 2",
                     "to be replaced: rank 1; the state after step 5 is not used", ") was taken out for corrupt data in step 6, noticed within "]:
            if text not in log:
                run.fail(f"expected {text!r}")
        # From snapshots in memory; rank 0 writes the log and its own finding.
        replaced(tandem, folder, reference, "moments", fault(5, 0, "flip_moments") + fault(9, 2, "flip_moments"), [0, 2],
                 [5, 9], "state", SNAPSHOTS)
        # On two hosts, a spare on the other one: from checkpoints on disk, and from copies in the memory of a peer.
        hosts = Hosts(tandem, folder)
        run = replaced(tandem, folder, reference, "hosts", fault(6, 0, "flip_weights", tensor="*.0.*.down_proj.weight"), [0], [6],
                       "weights", launch=[*hosts.options("a", "b", "c slots=0"), "--spares", "1"])
        [corrupt], [recovered] = run.events("corrupt"), run.events("recovered")
        if (corrupt["host"], recovered["host"], recovered["replacement_host"]) != ("a", "a", "c"):
            run.fail(f"expected rank 0 of a to be replaced on c: {run.events()}")
        if length == "short":
            return
        replaced(tandem, folder, reference, "copies", fault(5, 2, "flip_moments") + fault(9, 0, "flip_moments"), [2, 0], [5, 9],
                 "state", [*SNAPSHOTS, "--set", "checkpoint.peer_copy=true"],
                 launch=[*hosts.options("a", "b", "c slots=0"), "--spares", "2"])
        replaced(tandem, folder, reference, "restarts of hosts", weights, [1], [6], "weights",
                 launch=[*hosts.options("a", "b"), "--restarts", "1"])
        replaced(tandem, folder, reference, "gradients", fault(7, 2, "flip_gradients"), [2], [7], "recompute",
                 ["--set", "check.recompute=1"])
        replaced(tandem, folder, reference, "masters", fault(4, 1, "flip_masters"), [1], [4], "state weights", SNAPSHOTS)
        replaced(tandem, folder, reference, "restarts", weights, [1], [6], "weights", SNAPSHOTS, launch=("--restarts", "1"))
        replaced(tandem, folder, reference, "two at once", fault(6, 0, "flip_moments") + fault(6, 1, "flip_moments"),
                 [0, 1], [6, 6], "state", SNAPSHOTS)
        # Flips in every rank in turn; an owner's f32 weights are its state, too.
        plan = "".join(fault(step, step % 3, "flip_weights", tensor="*.up_proj.weight") for step in range(3, 15, 2))
        replaced(tandem, folder, reference, "each", plan, [step % 3 for step in range(3, 15, 2)], list(range(3, 15, 2)),
                 "weights state", SNAPSHOTS, launch=("--spares", "1", "--restarts", "6"))


if __name__ == "__main__":
    main()
