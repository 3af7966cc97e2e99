#!/usr/bin/env python3
"""slow_rank_test.py TANDEM CONFIG TRIALS [PERCENT [JSON]]: in seeded runs a rank is slowed in a phase, or in
every fourth none is; `tandem doctor` must name the rank and the phase, and nothing where nothing is.
Prints how often it does, and writes it to the file JSON. 1 % of the trials may miss, and as many raise alarms."""
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time

TANDEM, CONFIG, TRIALS = sys.argv[1], sys.argv[2], int(sys.argv[3])
PERCENT = float(sys.argv[4]) if len(sys.argv) > 4 and sys.argv[4] != "any" else None
JSON = sys.argv[5] if len(sys.argv) > 5 else None
STEPS = 700


def run(folder, seed):
    """The trial, with the ranks and phases that the doctor names."""
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
    print(f"seed {seed}: {f'rank {rank}, {phase}, {percent:.0f} %' if slow else 'none'}; named: {named}", flush=True)
    trial = {"seed": seed, "slow": [rank, phase] if slow else None, "percent": percent if slow else 0,
             "named": [[int(r), p, float(excess)] for r, p, excess in named]}
    trial["right"] = bool(named) and trial["named"][0][:2] == trial["slow"] if slow else not named
    return trial


def main():
    trials, begin = [], time.time()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(TRIALS):
            trials.append(run(folder, seed))
    slow = [trial for trial in trials if trial["slow"]]
    missed = sum(not trial["right"] for trial in slow)
    alarms = sum(not trial["right"] for trial in trials if not trial["slow"])
    seconds, load = (time.time() - begin) / TRIALS, os.getloadavg()[2]
    print(f"{TRIALS} trials: {len(slow) - missed} of {len(slow)} slow ranks named with their phase, {alarms} alarms in "
          f"{TRIALS - len(slow)} others; {seconds:.1f} s each, load {load:.1f} on {os.cpu_count()} processors")
    if JSON:
        with open(JSON, "w") as file:
            json.dump({"trials": TRIALS, "slow": len(slow), "named": len(slow) - missed, "even": TRIALS - len(slow),
                       "alarms": alarms, "steps": STEPS, "percent": PERCENT or "5 to 50", "seconds_a_trial": seconds,
                       "load": load, "processors": os.cpu_count(), "list": trials}, file, indent=1)
    allowed = int(0.01 * TRIALS)
    if missed > allowed or alarms > allowed:
        sys.exit(1)


main()
