#!/usr/bin/env python3
"""faults.py [--kills N] [--corruptions N] [--models N] [--tuner-files N] [--fs-faults N] [--seed
S]: kills trainings, damages their checkpoints, tuner cache and models, makes their file system
fail, and checks the outcomes.

  kills        SIGKILL at a random moment of a training (one process; every fifth a rank of two under
               mpirun), repeatedly, then --resume: the end has the bits of an undisturbed run, and the
               ledger shows every sample once
  corruptions  one to three files of one to three checkpoints flipped, cut, removed, exchanged or
               replaced, then --resume: an older valid checkpoint and the same bits, or, if none is
               left, exit 3 and an error naming a file
  models       files of a final/ or of checkpoints damaged in the same ways, then eval or generate: the
               result of the undamaged model, or an error naming a file
  tuner files  tuner.json flipped, cut, removed, replaced, or its lock held elsewhere: the training
               completes with the same bits, and leaves a file that a third one reads
  fs faults    libfiu makes random reads, writes and similar calls fail in a training: exit 0 and the
               same bits, perhaps with a warning that names the last step's checkpoint as not saved,
               or a named error; a --resume without faults then ends with the same bits; the
               ledger shows every sample once

Prints a table of outcomes; exits 1 after any other outcome, whose folder is kept. The choices
follow from the seed; the moments of kills and failing calls do not entirely."""
import argparse
import collections
import concurrent.futures
import fcntl
import filecmp
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, EVERY, LIMIT_S = 30, 3, 120
JOB = ["--set", f"train.steps={STEPS}", "--set", f"checkpoint.every={EVERY}", "--set",
       "model.hidden=16", "--set", "model.layers=1", "--set", "model.head_dim=4", "--set",
       "model.ffn=32", "--set", "train.seq=16", "--set", "train.batch=2", "--set", "train.dtype=f32"]
LAYOUTS = {"one rank": [], "tp 2": ["--tp", "2"], "dp 2": ["--dp", "2"]}
MPI = "tp 2, mpirun"
FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"]
FAULTS = ["posix/io/rw/*", "posix/io/rw/*", "posix/io/sync/*", "posix/io/dir/*", "posix/io/oc/*"]


class Unexpected(Exception):
    pass


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--corruptions", type=int, default=500)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--tuner-files", type=int, default=100)
    parser.add_argument("--fs-faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="cases at once")
    parser.add_argument("--tandem", default=str(ROOT / "build/bin/tandem"))
    parser.add_argument("--no-mpi", action="store_true", help="no case under mpirun")
    return parser.parse_args()


class Runs:
    """Trainings in one folder, and the results of undisturbed ones."""

    def __init__(self, tandem, folder, layouts):
        self.tandem, self.folder = tandem, folder
        self.environment = {**os.environ, "TANDEM_THREADS": "1", "TANDEM_TUNE": "0",
                            "TANDEM_CACHE_DIR": str(folder / "cache"), "TANDEM_DEADLINE_S": "20"}
        self.seconds = {}
        for layout in layouts:
            self.train(layout, self.whole(layout), 0, extra=["--set", "checkpoint.keep=100"])
            self.write_skipped(layout)
            begin = time.monotonic()
            self.train(layout, folder / f"timed {layout}", 0)
            self.seconds[layout] = time.monotonic() - begin
        self.answers = {}
        for command in ("eval", "generate"):
            status, text, self.answers[command] = self.answer(
                command, self.whole("one rank") / "final")
            if status != 0:
                raise Unexpected(f"{command}: {text.strip()[-2000:]}")

    def write_skipped(self, layout):
        """Adds the checkpoints that newer ones have overtaken. The first one that is due in a run
        never is: each is that of a run that resumes from the one before."""
        paths = [f"checkpoints/step-{step:08}" for step in range(0, STEPS, EVERY)]
        for before, path in zip(paths, paths[1:]):
            if (self.whole(layout) / path).exists():
                continue
            run = self.folder / "skipped"
            if (self.whole(layout) / before).exists():
                shutil.copytree(self.whole(layout) / before, run / before)
                shutil.copy(self.whole(layout) / "metrics.jsonl", run)
            self.train(layout, run, 0, extra=["--set", "checkpoint.keep=100"])
            shutil.copytree(run / path, self.whole(layout) / path)
            shutil.rmtree(run)

    def whole(self, layout):
        return self.folder / f"whole {layout}"

    def command(self, layout, out, extra=()):
        words = [self.tandem, "train", str(ROOT / "configs/tiny.toml"), "--out", str(out), "--resume",
                 *JOB, *extra]
        if layout == MPI:
            return [str(ROOT / "tools/mpirun.sh"), "2", *words, "--tp", "2"]
        return words + LAYOUTS[layout]

    def start(self, layout, out, extra=(), before=(), environment=()):
        return self.spawn([*before, *self.command(layout, out, extra)], subprocess.DEVNULL, environment)

    def spawn(self, command, output, environment=()):
        return subprocess.Popen(command, env={**self.environment, **dict(environment)},
                                stdin=subprocess.DEVNULL,
                                stdout=output, stderr=subprocess.PIPE, text=True,
                                errors="replace", start_new_session=True)

    def answer(self, command, model):
        """Exit status, standard error, and the output of eval or generate for `model`."""
        words = {"eval": ["--data", str(ROOT / "configs/tiny.toml")],
                 "generate": ["--prompt", "int ", "--max-tokens", "8", "--temperature", "0"]}
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            status, text = self.end(self.spawn(
                [self.tandem, command, str(model), *words[command], "--json", "-"], output))
            output.seek(0)
            said = output.read()
        if status:
            return status, text, None
        return status, text, json.loads(said)["bits_per_byte" if command == "eval" else "text"]

    def end(self, process):
        """Exit status and standard error."""
        try:
            _, text = process.communicate(timeout=LIMIT_S)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Unexpected(f"still running after {LIMIT_S} s") from None

    def end_of_killed(self, process, ranks):
        """The same after one of mpirun's `ranks` was killed. Open MPI 4.1's mpirun may wait for
        a lock forever if that was in MPI_Init: it is killed once no rank is left."""
        try:
            _, text = process.communicate(timeout=10)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            wait_until_gone(ranks)
        try:
            _, text = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            print("mpirun hangs without ranks, killed", file=sys.stderr, flush=True)
            os.killpg(process.pid, signal.SIGKILL)
            _, text = process.communicate()
        return process.returncode, text

    def train(self, layout, out, expected, extra=(), before=(), environment=()):
        status, text = self.end(self.start(layout, out, extra, before, environment))
        if status != expected:
            raise Unexpected(f"exit {status}, expected {expected}: {text.strip()[-2000:]}")
        return text

    def require_same_end(self, layout, out, metrics=True, checkpoint=True):
        whole, last = self.whole(layout), f"checkpoints/step-{STEPS:08}"
        files = ["final/model.safetensors", "final/config.json"]
        if checkpoint:
            files += [f"{last}/model.safetensors", f"{last}/optimizer.safetensors"]
        for name in files:
            if not (out / name).is_file():
                raise Unexpected(f"{name} is missing")
            if not filecmp.cmp(whole / name, out / name, shallow=False):
                raise Unexpected(f"{name} differs from the run left alone")
        if metrics and results(whole) != results(out):
            raise Unexpected("metrics.jsonl differs from the run left alone")

    def require_ledger(self, out):
        """Every sample consumed once."""
        with tempfile.TemporaryFile("w+", dir=self.folder) as output:
            status, text = self.end(self.spawn([self.tandem, "data", "check", str(out)], output))
            output.seek(0)
            if status:
                raise Unexpected(f"data check: exit {status}: {text}{output.read()[-2000:]}")


def results(out):
    """Fields that do not depend on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")] for line in lines]


def error_line(text):
    """Error reported by the program. Raises Unexpected if there is none, or an internal one."""
    lines = [line for line in text.splitlines() if "error:" in line]
    if not lines or "internal error" in text or "terminate called" in text:
        raise Unexpected(f"no error by name: {text.strip()[-2000:]}")
    return lines[0]


def children(pid):
    try:
        return [int(word)
                for word in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_until_gone(pids):
    """Ranks that outlive their mpirun for a moment still hold the run's lock."""
    def alive(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            raise Unexpected(f"ranks {pids} outlive their mpirun by {LIMIT_S} s")
        time.sleep(0.01)


def kill_case(runs, rng, out, mpi):
    """One to four kills of a training, each of which resumes from the state that the previous kill
    left."""
    layout = MPI if mpi else rng.choice(list(LAYOUTS))
    kills = 0
    for _ in range(rng.randint(1, 4)):
        process = runs.start(layout, out)
        time.sleep(rng.uniform(0, 1.1) * runs.seconds[layout])
        ranks = children(process.pid) if mpi else []
        victim = rng.choice(ranks) if ranks and rng.random() < 0.8 else process.pid
        struck = process.poll() is None
        if struck:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:  # a rank that has just ended normally
                struck = False
        status, text = runs.end_of_killed(process, ranks) if mpi else runs.end(process)
        wait_until_gone(ranks)
        if status == 0:
            break  # it had finished before
        if not struck or (not mpi and status != -signal.SIGKILL):
            raise Unexpected(f"exit {status} before it was killed: {text.strip()[-2000:]}")
        kills += 1
    runs.train(layout, out, 0)
    runs.require_same_end(layout, out)
    runs.require_ledger(out)
    return kills, f"killed in {'mpirun' if mpi else 'one process'}, the same bits"


def damage(rng, file, others):
    """Damages `file`; `others` are files that it may be exchanged with."""
    data = bytearray(file.read_bytes())
    kind = "append" if not data else rng.choice(["flip", "flip", "flips", "cut", "zeros", "append", "empty", "remove", "pipe",
                       "folder", "link", "exchange", "exchange"])
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else rng.randint(2, 100)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif kind == "cut":
        os.truncate(file, rng.randrange(len(data)))
    elif kind == "zeros":
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.randint(1, 4096))
        file.write_bytes(bytes(data[:begin]) + bytes(end - begin) + bytes(data[end:]))
    elif kind == "append":
        file.write_bytes(bytes(data) + rng.randbytes(rng.randint(1, 100)))
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "exchange":
        other = rng.choice(others)
        foreign = other.read_bytes()
        other.write_bytes(data)
        file.write_bytes(foreign)
    else:
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        elif kind == "link":
            file.symlink_to("nowhere")
    return kind


def regular(files):
    """Those of `files` that an earlier damage has neither removed nor replaced."""
    return [file for file in files if file.is_file() and not file.is_symlink()]


def intact(checkpoint, original):
    return all((checkpoint / name).is_file() and
               (checkpoint / name).read_bytes() == (original / name).read_bytes() for name in FILES)


def corruption_case(runs, rng, out, _):
    layout = rng.choice(list(LAYOUTS))
    last = rng.randrange(2, STEPS // EVERY - 1) * EVERY
    names = [f"step-{last - older * EVERY:08}" for older in range(rng.randint(1, 3))
             if last > older * EVERY]
    whole = runs.whole(layout)
    for name in names:
        shutil.copytree(whole / "checkpoints" / name, out / "checkpoints" / name)
    shutil.copy(whole / "metrics.jsonl", out)
    folders = [out / "checkpoints" / name for name in names]
    damaged = []
    spared = 0 if rng.random() < 0.25 else 1
    for folder in rng.sample(folders, rng.randint(1, max(1, len(folders) - spared))):
        for name in rng.sample(FILES, rng.randint(1, 3)):
            file = folder / name
            others = regular(other / each for other in folders for each in FILES)
            if file in others:
                damaged.append(f"{damage(rng, file, others)} {folder.name}/{name}")
    if rng.random() < 0.1:
        damaged.append(f"{damage(rng, out / 'metrics.jsonl', [out / 'metrics.jsonl'])} metrics.jsonl")
    (out / "damaged.txt").write_text("\n".join(damaged) + "\n")
    valid = [name for name in names
             if intact(out / "checkpoints" / name, whole / "checkpoints" / name)]
    if not valid:
        error = error_line(runs.train(layout, out, 3))
        if str(out / "checkpoints") not in error:
            raise Unexpected(f"no file by name: {error}")
        return 1, "nothing valid left, refused by name"
    bad_metrics = "metrics.jsonl" in damaged[-1]
    if bad_metrics and (out / "metrics.jsonl").exists() and not (out / "metrics.jsonl").is_file():
        error = error_line(runs.train(layout, out, 3))
        if "metrics.jsonl: expected a regular file" not in error:
            raise Unexpected(f"metrics.jsonl not by name: {error}")
        return 1, "no file of steps to go on with, refused by name"
    text = runs.train(layout, out, 0)
    if f"resuming from {out}/checkpoints/{valid[0]}" not in text:
        raise Unexpected(f"did not resume from {valid[0]}: {text.strip()[-2000:]}")
    runs.require_same_end(layout, out, metrics=not bad_metrics)
    return 1, "resumed from the newest valid one, the same bits"


def model_case(runs, rng, out, _):
    whole, command = runs.whole("one rank"), rng.choice(["eval", "generate"])
    last, before = (f"checkpoints/step-{STEPS - older * EVERY:08}" for older in range(2))
    for name in ("final", last, before):
        shutil.copytree(whole / name, out / name)
    # Without its state.json a final/ is like any model, so there only one file at a time is
    # damaged.
    folder, model = rng.choice([("final", "final"), ("final", "."), (last, last), (last, ".")])
    if folder == last and model == ".":
        shutil.rmtree(out / "final")
    files = ["config.json", "model.safetensors", "state.json"]
    others = [out / other / name for other in ("final", last, before) for name in files
              if (out / other).exists()]
    damaged = [f"{damage(rng, out / folder / name, regular(others))} {folder}/{name}"
               for name in rng.sample(files, 1 if folder == "final" else rng.randint(1, 2))
               if (out / folder / name).is_file()]
    (out / "damaged.txt").write_text(f"{command} {model}: " + ", ".join(damaged) + "\n")
    status, text, said = runs.answer(command, out / model)
    if status == 0:
        if said != runs.answers[command]:
            raise Unexpected(f"{said!r}, of the whole model {runs.answers[command]!r}: {damaged}")
        return 1, "eval or generate: as the whole model"
    if status not in (2, 3):
        raise Unexpected(f"exit {status}: {text.strip()[-2000:]}")
    if str(out) not in error_line(text):
        raise Unexpected(f"no file by name: {text.strip()[-2000:]}")
    return 1, "eval or generate: refused by name"


def tuner_file_case(runs, rng, out, _):
    """Damages the times that a first training measured; two more trainings read the rest."""
    cache = out / "cache"
    environment = {"TANDEM_TUNE": "1", "TANDEM_CACHE_DIR": str(cache)}
    layout = "tp 2"
    runs.train(layout, out / "first", 0, environment=environment)
    file, lock = cache / "tuner.json", cache / "tuner.json.lock"
    if not file.exists():  # none of its measurements was conclusive
        file.write_text("{}")
    locked = rng.random() < 0.2
    what = "its lock is held" if locked else damage(rng, file, [lock])
    (out / "damaged.txt").write_text(f"{what} {file}\n")
    with open(lock, "a") as held:
        if locked:
            fcntl.flock(held, fcntl.LOCK_EX)
            if rng.random() < 0.5:
                os.truncate(file, rng.randrange(file.stat().st_size))
        text = runs.train(layout, out / "second", 0, environment=environment)
    runs.require_same_end(layout, out / "second")
    notes = [line for line in text.splitlines() if "tuner cache" in line]
    if len(notes) > 3:
        raise Unexpected(f"{len(notes)} notes of the tuner's cache after {what}: {notes[0]}")
    runs.train(layout, out / "third", 0, environment=environment)
    runs.require_same_end(layout, out / "third")
    if file.is_file() and not locked and not isinstance(json.loads(file.read_text()), dict):
        raise Unexpected(f"{file} is not whole after {what}")
    return 1, "measured again or read, the same bits"


def fs_fault_case(runs, rng, out, _):
    layout = rng.choice(list(LAYOUTS))
    point, probability = rng.choice(FAULTS), math.exp(rng.uniform(math.log(1e-3), math.log(0.1)))
    if rng.random() < 0.5:  # half of them resume
        shutil.copytree(runs.whole(layout) / "checkpoints" / f"step-{EVERY * 4:08}",
                        out / "checkpoints" / f"step-{EVERY * 4:08}")
        for name in ("metrics.jsonl", "ledger.jsonl"):
            shutil.copy(runs.whole(layout) / name, out)
    (out / "fault.txt").write_text(f"{point} {probability} {layout}\n")
    faulty = ["fiu-run", "-f", "", "-x", "-c", f"enable_random name={point},probability={probability}"]
    status, text = runs.end(runs.start(layout, out, before=faulty))
    if status not in (0, 2, 3, 4, 6):
        raise Unexpected(f"exit {status} with {point} at {probability:.4f}: {text.strip()[-2000:]}")
    if status != 0:
        error = error_line(text)
        if str(out) not in error and str(ROOT) not in error:
            raise Unexpected(f"no file by name: {error}")
        runs.train(layout, out, 0)
    # A training that reaches its last step ends well without that step's checkpoint, and says so.
    unsaved = status == 0 and f"warning: step {STEPS} not saved: " in text
    runs.require_same_end(layout, out, checkpoint=not unsaved)
    runs.require_ledger(out)
    how = "failed by name, then resumed" if status else "last checkpoint not saved, with a warning" if unsaved else "went through"
    return 1, how + ", the same bits"


def run_cases(kind, case, wanted, runs, options, outcomes, failures):
    def one(index):
        rng = random.Random(f"{options.seed} {kind} {index}")
        out = runs.folder / f"{kind.replace(' ', '-')}-{index}"
        out.mkdir()
        try:
            result = case(runs, rng, out, not options.no_mpi and index % 5 == 4)
            shutil.rmtree(out)
            return result
        except Unexpected as problem:
            print(f"{kind} {index}: {problem}\n  kept: {out}", file=sys.stderr, flush=True)
            failures.append(out)
            return 1, "UNEXPECTED"

    done = index = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        while done < wanted and index < 20 * wanted + 20:
            batch = range(index, index + min(wanted - done, 8 * options.jobs))
            index = batch.stop
            for count, outcome in pool.map(one, batch):
                done += count
                outcomes[kind, outcome] += count
            print(f"{kind}: {done} of {wanted}", file=sys.stderr, flush=True)
    if done < wanted:
        failures.append(f"{kind}: {done} of {wanted}")


def main():
    options = arguments()
    if options.fs_faults and not shutil.which("fiu-run"):
        sys.exit("faults: --fs-faults needs fiu-run: apt-get install fiu-utils")
    options.no_mpi = options.no_mpi or not options.kills
    if not options.no_mpi and not shutil.which("mpirun"):
        sys.exit("faults: kills of ranks need mpirun: install openmpi-bin, or pass --no-mpi")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-faults-"))
    begin, outcomes, failures = time.monotonic(), collections.Counter(), []
    runs = Runs(options.tandem, folder, [*LAYOUTS] + ([] if options.no_mpi else [MPI]))
    for kind, case, wanted in [("kills", kill_case, options.kills),
                               ("corruptions", corruption_case, options.corruptions),
                               ("models", model_case, options.models),
                               ("tuner files", tuner_file_case, options.tuner_files),
                               ("fs faults", fs_fault_case, options.fs_faults)]:
        if wanted:
            run_cases(kind, case, wanted, runs, options, outcomes, failures)
    print(f"seed {options.seed}, {STEPS} steps with a checkpoint every {EVERY}, "
          f"{time.monotonic() - begin:.0f} s")
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"  {kind:12} {outcome:50} {count:5}")
    if failures:
        print(f"faults: {len(failures)} unexpected: {failures[0]}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
