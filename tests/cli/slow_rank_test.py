#!/usr/bin/env python3
"""slow_rank_test.py TANDEM CONFIG TRIALS [PERCENT]: in seeded runs a rank is slowed in a phase, or in
every fourth none is; `tandem doctor` must name the rank and the phase, and nothing where nothing is.
Prints how often it does; more than three trials may miss 1 % of their number, and the same of alarms."""
import os
import random
import re
import subprocess
import sys
import tempfile

TANDEM, CONFIG, TRIALS = sys.argv[1], sys.argv[2], int(sys.argv[3])
PERCENT = float(sys.argv[4]) if len(sys.argv) > 4 else None
STEPS = 700


def run(folder, seed):
    """Phase and rank that are slow, and those that the doctor names."""
    random.seed(seed)
    slow = seed % 4 != 3
    rank, phase = random.randrange(2), random.choice(["forward", "backward", "update"])
    percent = PERCENT or random.uniform(5, 50)
    if phase == "update":  # a small share of the step
        percent = max(60, 4 * percent)
    faults, out = f"{folder}/{seed}.toml", f"{folder}/{seed}"
    with open(faults, "w") as file:
        if slow:
            file.write(f'[[fault]]\nstep = 1\nrank = {rank}\nkind = "slow"\nphase = "{phase}"\npercent = {percent}\n')
    environment = {**os.environ, "TANDEM_THREADS": "1", "TANDEM_TUNE": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run([TANDEM, "train", CONFIG, "--dp=2", "--out", out, "--inject", faults, "--set", f"train.steps={STEPS}",
                    "train.dtype=f32"], env=environment, check=True, capture_output=True, timeout=300)
    text = subprocess.run([TANDEM, "doctor", out], check=True, capture_output=True, text=True, timeout=60).stdout
    named = re.findall(r"^slow: rank (\d+) \(.*?\): (.*) takes ([\d.]+) % longer", text, re.MULTILINE)
    wanted = (rank, phase) if slow else None
    print(f"seed {seed}: {f'rank {rank}, {phase}, {percent:.0f} %' if slow else 'none'}; named: {named}", flush=True)
    return wanted, [(int(r), p) for r, p, _ in named]


def main():
    missed = alarms = slow = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(TRIALS):
            wanted, named = run(folder, seed)
            slow += wanted is not None
            missed += wanted is not None and (not named or named[0] != wanted)
            alarms += wanted is None and bool(named)
    print(f"{TRIALS} trials: {slow - missed} of {slow} slow ranks named with their phase, {alarms} alarms in {TRIALS - slow} others")
    allowed = int(0.01 * TRIALS)
    if missed > allowed or alarms > allowed:
        sys.exit(1)


main()
