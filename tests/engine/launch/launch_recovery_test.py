#!/usr/bin/env python3
"""launch_recovery_test.py TANDEM short|long|kills=N|stops=N|launchers=N [json=FILE]: ranks of `tandem launch --spares`, or it, are killed
or stopped, and the run ends with the bits, and each sample once, of an undisturbed one. kills=N, stops=N, launchers=N: prints
how soon N of them were noticed and recovered from, and writes that to FILE, for tools/recovery_table.py."""
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from launched_run import CONFIG, JOB, LIMIT_S, SNAPSHOTS, Run, checkpoints, children, in_time, send


def refused(tandem, text, *arguments):
    result = subprocess.run([tandem, "launch", *arguments], capture_output=True, text=True)
    if result.returncode != 2 or text not in result.stderr or result.stderr.count("\n") != 1:
        sys.exit(f"launch {arguments}: {result.returncode}: {result.stderr}")


def short(tandem, folder):
    refused(tandem, "launch --spares: command true: expected tandem train", "-n", "2", "--spares", "1", "--", "true")
    refused(tandem, "launch --restarts: command sh: expected tandem train", "-n", "2", "--restarts", "1", "--", "sh",
            "-c", "true")
    # Ranks that do not begin: they wait for a job file that is a pipe without a writer.
    os.mkfifo(folder / "job")
    result = subprocess.run([tandem, "launch", "-n", "2", "--restarts", "1", "--start-timeout", "0.5", "--", tandem,
                             "train", str(folder / "job"), "--out", str(folder / "none")], capture_output=True,
                            text=True, timeout=LIMIT_S)
    if result.returncode != 128 + signal.SIGKILL or "began no step within 0.5 s: no process" not in result.stderr:
        sys.exit(f"start time-out: {result.returncode}: {result.stderr}")
    refused(tandem, "--spares", "-n", "2", "--spares", "-1", "--", tandem, "train", CONFIG)
    steps = 40
    reference = Run(tandem, folder, "reference", [], steps)
    reference.ends_like(reference)
    in_time(folder, "killed", lambda place: replaces_ranks(tandem, place, reference))
    in_time(folder, "launcher", lambda place: replaces_launchers(tandem, place, reference))
    in_time(folder, "nohup", lambda place: ignores_a_signal(tandem, place, reference))
    in_time(folder, "launchers", lambda place: ends_for_launchers(tandem, place, steps))
    layout = "--tp 1 --dp 4"
    replicas = Run(tandem, folder, "replicas", [], steps, layout)
    replicas.ends_like(replicas)
    in_time(folder, "fewer", lambda place: continues_with_fewer(tandem, place, replicas, layout))
    # A loss after the last exchange of the ranks, of which some have ended.
    for rank, number in [(0, signal.SIGSTOP), (3, signal.SIGKILL), (1, signal.SIGSTOP)]:
        in_time(folder, f"last{rank}", lambda place: lose_at_end(tandem, place, reference, rank, number, 1e-3))
    in_time(folder, "threads", lambda place: replaces_threads(tandem, place, reference))
    in_time(folder, "early", lambda place: lacks_a_spare(tandem, place, steps))
    replaces_learners(tandem, folder, steps)
    replaces_a_whole_learner(tandem, folder, 10 * steps)
    saves_before_it_gives_up(tandem, folder, reference)
    saves_on_request(tandem, folder, reference)
    in_time(folder, "unstarted", lambda place: starts_no_replacement(tandem, place, replicas))
    in_time(folder, "loop", lambda place: ends_for_a_rank(tandem, place, steps))


def replaces_ranks(tandem, folder, reference):
    run = Run(tandem, folder, "killed", ["--spares", "2", "--restarts", "3"], reference.steps)
    for at, (rank, number) in enumerate([(0, signal.SIGKILL), (3, signal.SIGKILL), (1, signal.SIGSTOP),
                                         (2, signal.SIGKILL), (0, signal.SIGKILL)]):
        run.hurt(rank, number, 1 + at)
    run.ends_like(reference)
    if len(run.events("hung")) != 1 or not re.search(
            " s (in |between operations)", run.events("hung")[0]["cause"]):
        run.fail("expected one hang, with its operation")
    log = run.log.read_text()
    if len(re.findall(r"^tandem: launch: rank \d .* has taken its rank; the run paused for ", log, re.M)) != 5:
        run.fail("expected one line for each loss")


def replaces_launchers(tandem, folder, reference):
    """The launcher, and a rank after it, with snapshots in the memory that outlives both."""
    run = Run(tandem, folder, "launcher", ["--spares", "1"], reference.steps, job=SNAPSHOTS)
    if run.kill_launcher(5)["steps_lost"] > 1:
        run.fail("expected at most one step made again")
    run.hurt(2, signal.SIGKILL, 12)
    run.kill_launcher(18)
    run.ends_like(reference)
    log = run.log.read_text()
    if len(re.findall(r"^tandem: launch: the launcher \(process \d+\) was ended by signal 9, Killed in step \d+; it and its ranks were "
                      r"started again; the run paused for ", log, re.M)) != 2:
        run.fail("expected one line for each launcher")


def ignores_a_signal(tandem, folder, reference):
    """A signal that the launch ignores, as under nohup, stops nothing; other children of its process live on."""
    run = Run(tandem, folder, "nohup", ["--restarts", "3"], reference.steps, ignores=signal.SIGHUP, sibling=True)
    run.wait_until("a step", lambda: run.step() >= 2)
    run.process.send_signal(signal.SIGHUP)
    run.hurt(1, signal.SIGKILL, 4)
    sibling = next(child for child in children(run.process.pid) if b"sleep" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes())
    run.kill_launcher(9)
    if not pathlib.Path(f"/proc/{sibling}").exists():
        run.fail("another child of its process was killed")
    os.kill(sibling, signal.SIGKILL)
    run.ends_like(reference)


def ends_for_launchers(tandem, folder, steps):
    """Launchers that are killed at their begin."""
    run = Run(tandem, folder, "launchers", ["--spares", "1"], steps)
    while run.process.poll() is None:
        if launcher := run.launcher():
            send(launcher, signal.SIGKILL)
        time.sleep(0.001)
    if run.process.returncode == 0:
        run.late()
    if run.process.returncode != 128 + signal.SIGKILL or "the 5th in a row without a further step" not in run.log.read_text():
        run.fail("expected an end: launchers that are killed at their begin")


def continues_with_fewer(tandem, folder, replicas, layout):
    """Two ranks are lost at once, and then there are fewer replicas, with the bits of all four."""
    run = Run(tandem, folder, "fewer", ["--spares", "1", "--min-dp", "2"], replicas.steps, layout)
    run.wait_until("a step", lambda: run.step() >= 2)
    for pid in [run.find(f"rank {rank}", lambda: run.pid(rank)) for rank in (0, 2)]:
        run.send(pid, signal.SIGKILL)
    run.wait_until("recovery", lambda: len(run.events("recovered")) == 2)
    if sorted(event["replacement"] is None for event in run.events("recovered")) != [False, True]:
        run.fail("expected a spare for one rank and none for the other")
    run.kill_launcher(15)  # all replicas return
    if not 0 <= run.events("recovered")[-1]["continues_after"] < run.steps:
        run.fail("expected the run to continue")
    run.ends_like(replicas)
    if "the run has 3 ranks now" not in run.log.read_text():
        run.fail("expected 3 ranks")


def replaces_threads(tandem, folder, reference):
    """One process, whose threads are the ranks."""
    run = Run(tandem, folder, "threads", ["--spares", "1"], reference.steps, ranks=1)
    run.hurt(0, signal.SIGKILL, 2)
    run.ends_like(reference)


def lacks_a_spare(tandem, folder, steps):
    """A loss in the start, and one without a spare."""
    run = Run(tandem, folder, "early", ["--spares", "1"], steps)
    run.hurt(2, signal.SIGKILL)
    run.send(run.find("rank 1", lambda: run.pid(1)), signal.SIGKILL)
    run.stops("Killed: no process is left to take its rank")


def ends_for_a_rank(tandem, folder, steps):
    """A rank that is lost again and again."""
    run = Run(tandem, folder, "loop", ["--restarts", "9"], steps)
    killed = set()
    while run.process.poll() is None:
        pid = run.pid(3)
        if pid and pid not in killed:
            killed.add(pid)
            send(pid, signal.SIGKILL)
        time.sleep(0.001)
    if run.process.returncode == 0 or "no process is left to take its rank" in run.log.read_text():
        run.late()  # steps between the kills
    run.stops("Killed: the 3rd time in a row without a further step")


LEARNERS = [text for key in ["method=local", "learners=2", "every=8", "fragments=2", "delay=2"]
            for text in ("--set", f"sync.{key}")]


def replaces_learners(tandem, folder, steps):
    """A rank of a learner is lost between exchanges, while a fragment travels, and in the step that applies it."""
    job = [*SNAPSHOTS, *LEARNERS]
    reference = Run(tandem, folder, "learners", [], steps, job=job)
    reference.ends_like(reference)

    def lose_ranks(place):
        run = Run(tandem, place, "learner-lost", ["--spares", "1", "--restarts", "3"], steps, job=job)
        for rank, after_step in [(3, 3), (1, 8), (2, 13)]:
            run.hurt(rank, signal.SIGKILL, after_step)
        run.ends_like(reference)
    in_time(folder, "learner-lost", lose_ranks)


def replaces_a_whole_learner(tandem, folder, steps):
    """All ranks of a learner are lost at once, some steps after the last snapshot, which learners make apart."""
    job = [*SNAPSHOTS, *LEARNERS, "--set", "checkpoint.snapshot_every=5"]
    reference = Run(tandem, folder, "apart", [], steps, job=job)
    reference.ends_like(reference)

    def lose_learner(place):
        run = Run(tandem, place, "whole-learner-lost", ["--spares", "2", "--restarts", "8"], steps, job=job)
        for after_step in 5, 60, 117, 181:
            run.wait_until(f"step {after_step}", lambda: run.step() >= after_step)
            recovered = len(run.events("recovered"))
            for pid in [run.find(f"rank {rank}", lambda: run.pid(rank)) for rank in (2, 3)]:
                run.send(pid, signal.SIGKILL)
            run.wait_until("two recoveries", lambda: len(run.events("recovered")) >= recovered + 2)
        run.ends_like(reference)
    in_time(folder, "whole-learner-lost", lose_learner)


def saves_before_it_gives_up(tandem, folder, reference):
    """The newest snapshot in memory is written to disk, also of ranks that are not replaced, and of launchers that
    are killed again and again."""
    def kill_rank(run, reached):
        run.wait_until("steps", lambda: run.step() >= reached)
        run.send(run.find("rank 1", lambda: run.pid(1)), signal.SIGKILL)

    def kill_process(run):
        run.wait_until("steps", lambda: run.step() >= 9)
        run.send(run.find("rank 0", lambda: run.pid(0)), signal.SIGKILL)

    def kill_twice(run):
        run.hurt(1, signal.SIGKILL, 4)
        kill_rank(run, 9)

    def kill_launchers(run):
        run.wait_until("steps", lambda: run.step() >= 9)
        last = 0
        while "the 5th in a row" not in run.log.read_text():
            if run.process.poll() == 0:
                run.late()
            pid = run.launcher()
            if pid and pid != last:
                send(pid, signal.SIGKILL)
                last = pid
            time.sleep(0.001)
    cases = {"lost": (["--spares", "1"], kill_twice, 4),
             "alone": ([], lambda run: kill_rank(run, 9), 4),
             "process": (["--restarts", "0", "--min-dp", "2"], kill_process, 1),
             "killers": (["--spares", "1"], kill_launchers, 4)}

    def lose_and_resume(place, name):
        launch, hurt, ranks = cases[name]
        run = Run(tandem, place, "saved-" + name, launch, reference.steps, job=SNAPSHOTS, ranks=ranks)
        hurt(run)
        reached = run.step()
        if run.process.wait(LIMIT_S) != 128 + signal.SIGKILL:
            run.fail("expected the exit status of the loss")
        saved = checkpoints(run)
        # The file of metrics may be a line behind, and a snapshot is complete on all ranks a step later.
        if not saved or saved[-1] < reached - 1 or "Stopped after step" not in run.log.read_text():
            run.fail(f"expected a checkpoint of step {reached} or the one before: {saved}")
        resumed = subprocess.run([tandem, "train", CONFIG, "--out", str(run.out), "--tp", "2", "--dp", "2", *JOB, *SNAPSHOTS, "--set",
                                  f"train.steps={run.steps}", "--resume"], capture_output=True, text=True, timeout=LIMIT_S)
        if f"resuming from {run.out}/checkpoints/step-{saved[-1]:08}" not in resumed.stderr:
            run.fail(f"expected to continue after step {saved[-1]}: {resumed.stderr}")
        run.process.returncode = resumed.returncode
        run.ends_like(reference)
    for name in cases:
        in_time(folder, "saved-" + name, lambda place: lose_and_resume(place, name))


def saves_on_request(tandem, folder, reference):
    """SIGUSR1 and SIGUSR2 save a checkpoint: once for each, also after a recovery, and never end the launch."""
    run = Run(tandem, folder, "requests", ["--spares", "1"], 100000, job=SNAPSHOTS)
    run.wait_until("ranks", lambda: run.pid(3))
    run.process.send_signal(signal.SIGUSR1)  # in the first moments
    run.wait_until("a checkpoint", lambda: len(checkpoints(run)) == 1)
    run.hurt(1, signal.SIGKILL, run.step() + 2)
    reached = run.step()
    run.wait_until("steps", lambda: run.step() > reached + 3)
    if len(checkpoints(run)) != 1:
        run.fail(f"expected no further checkpoint: {checkpoints(run)}")
    for number in signal.SIGUSR2, signal.SIGUSR1:
        before = checkpoints(run)
        run.process.send_signal(number)
        run.wait_until("a checkpoint", lambda: checkpoints(run)[-1] > before[-1])
    run.process.terminate()
    if run.process.wait(LIMIT_S) != 130:
        run.fail("expected to be stopped")
    for launch in [], ["--spares", "1"]:  # in the last moments
        run = Run(tandem, folder, f"last-request{len(launch)}", launch, reference.steps)
        run.wait_until("the final model", lambda: (run.out / "final").exists())
        while run.process.poll() is None:
            run.process.send_signal(signal.SIGUSR1)
        run.ends_like(reference)


def starts_no_replacement(tandem, folder, replicas):
    """A replacement that cannot be started counts as lost."""
    link = folder / "bin" / "tandem"
    link.parent.mkdir()
    link.symlink_to(os.path.abspath(tandem))
    run = Run(str(link), folder, "unstarted", ["--restarts", "1", "--min-dp", "2"], replicas.steps, "--tp 1 --dp 4")
    run.tandem = tandem
    run.wait_until("steps", lambda: run.step() >= 2)
    link.unlink()
    run.send(run.find("rank 2", lambda: run.pid(2)), signal.SIGKILL)
    run.ends_like(replicas)
    causes = [event["cause"] for event in run.events("lost")]
    if len(causes) != 2 or not re.match("was not started: .*No such file or directory", causes[1]):
        run.fail(f"expected a loss, and a replacement that was not started: {causes}")
    if "the run has 3 ranks now" not in run.log.read_text():
        run.fail("expected 3 ranks")


def lose_at_end(tandem, folder, reference, rank, number, delay):
    run = Run(tandem, folder, f"last{rank}-{int(number)}-{delay}", ["--spares", "1"], reference.steps)
    pid = run.find("its start", lambda: run.pid(rank))
    run.wait_until("the final model", lambda: (run.out / "final").exists())
    time.sleep(delay)
    send(pid, number)
    run.ends_like(reference)


def long(tandem, folder):
    steps = 30
    reference = Run(tandem, folder, "reference", [], steps)
    reference.ends_like(reference)

    def lose_rank(place, rank, number, after_step, delay=0):
        run = Run(tandem, place, "lost", ["--spares", "1"], steps)
        if delay:
            run.find("its start", lambda: run.pid(rank))
            time.sleep(delay)
        run.hurt(rank, number, after_step)
        run.ends_like(reference)
    for rank in range(4):
        for number in signal.SIGKILL, signal.SIGSTOP:
            for after in 1, 5, 9, 20:
                in_time(folder, f"rank{rank}-{int(number)}-{after}", lambda place: lose_rank(place, rank, number, after))
        for delay in range(0, 400, 40):
            in_time(folder, f"start{rank}-{delay}", lambda place: lose_rank(place, rank, signal.SIGKILL, None, delay / 1e3))
        for delay in range(0, 200, 20):  # about the end, which may have come
            run = Run(tandem, folder, f"end{rank}-{delay}", ["--spares", "1"], steps)
            pid = run.find("its start", lambda: run.pid(rank))
            run.wait_until("the last step", lambda: run.step() >= steps - 1)
            time.sleep(delay / 1e3)
            send(pid, signal.SIGKILL)
            run.ends_like(reference)
        for number in signal.SIGKILL, signal.SIGSTOP:  # the others may have ended
            for delay in range(0, 10):
                in_time(folder, f"end{rank}-{int(number)}-{delay}",
                        lambda place: lose_at_end(tandem, place, reference, rank, number, delay / 1e3))


def figures_of(values):
    ranked = sorted(values)
    return {"median_ms": statistics.median(ranked), "p95_ms": ranked[int(0.95 * (len(ranked) - 1))], "max_ms": ranked[-1]}


def describe(figures):
    return ", ".join(f"{key.removesuffix('_ms')} {value:.1f}" for key, value in figures.items())


def measure_launchers(tandem, folder, count):
    steps = 10 * count + 20
    job = ["--set", "checkpoint.snapshot_every=1", "--set", "checkpoint.every=1000"]
    run = Run(tandem, folder, "launchers", ["--spares", "1"], steps, job=job)
    events = [run.kill_launcher(3 + 7 * at) for at in range(count)]
    figures, lost = figures_of(event["recovered_ms"] for event in events), max(event["steps_lost"] for event in events)
    print(f"recovered_ms: {describe(figures)} over {count}; at most {lost} steps made again")
    reference = Run(tandem, folder, "reference", [], steps, job=job)
    reference.process.wait(600)
    run.ends_like(reference)
    print("final weights: bitwise those of an undisturbed run; each sample once")
    return {f"recovered, at most {lost} step{'s' * (lost != 1)} made again": figures}


def measure(tandem, folder, number, count):
    steps = 10 * count + 20
    run = Run(tandem, folder, "kills", ["--spares", "1", "--restarts", str(count)], steps,
              job=["--set", "checkpoint.keep=2"])
    figures = [run.hurt(at % 4, number, 3 + 3 * at) for at in range(count)]
    times = {name: figures_of(values) for name, values in zip(["noticed", "recovered"], zip(*figures))}
    for name, values in times.items():
        print(f"{name}_ms: {describe(values)} over {count}")
    run.process.wait(600)
    reference = Run(tandem, folder, "reference", [], steps)
    reference.process.wait(600)
    run.ends_like(reference)
    print("final weights: bitwise those of an undisturbed run; each sample once")
    return times


def main():
    tandem, extent, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        kind, _, count = extent.partition("=")
        times = {}
        if kind == "launchers":
            times = measure_launchers(tandem, folder, int(count))
        elif count:
            times = measure(tandem, folder, {"kills": signal.SIGKILL, "stops": signal.SIGSTOP}[kind], int(count))
        else:
            {"short": short, "long": long}[extent](tandem, folder)
        if "json" in options:
            pathlib.Path(options["json"]).write_text(json.dumps({"times": times}) + "\n")


if __name__ == "__main__":
    main()
