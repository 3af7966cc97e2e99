#!/usr/bin/env python3
"""launch_hosts_test.py TANDEM: `tandem launch --hosts`, with a remote shell that runs commands on this machine. Ranks
and hosts are killed, and the run ends with the bits of one on a single host."""
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

from launched_run import CONFIG, JOB, LIMIT_S, SNAPSHOTS, Run, checkpoints, children, in_time

SHELL = """#!/bin/sh
# Stands for ssh: HOST COMMAND.
case $1 in
unknown*) echo "ssh: Could not resolve hostname $1" >&2; exit 255 ;;
silent*) exec sleep 100 ;;
secret*) sed 's/"secret":"[0-9a-f]*"/"secret":"0123456789abcdef0123"/' | sh -c "$2" ;;
other*) exec "$OTHER_PROGRAM" launch --executor ;;
*) host=$1 exec /bin/sh -c "$2" ;;
esac
"""


class Hosts:
    def __init__(self, tandem, folder):
        self.tandem, self.folder = tandem, folder
        self.shell = folder / "shell"
        self.shell.write_text(SHELL)
        self.shell.chmod(0o755)

    def options(self, *lines):
        file = self.folder / f"hosts{len(list(self.folder.glob('hosts*.txt')))}.txt"
        file.write_text("\n".join(lines) + "\n")
        return ["--hosts", str(file), "--remote-shell", str(self.shell)]

    def launch(self, lines, *arguments, **more):
        return subprocess.run([self.tandem, "launch", *self.options(*lines), *arguments], capture_output=True, text=True,
                              timeout=LIMIT_S, **more)

    def refused(self, code, text, lines, *arguments, **more):
        result = self.launch(lines, *arguments, **more)
        printed = [line for line in result.stderr.splitlines() if "[warning] refused a connection" not in line]
        if result.returncode != code or text not in result.stderr or len(printed) != 1:
            sys.exit(f"hosts {lines} {arguments}: expected {code} {text!r}: {result.returncode}: {result.stderr}")


class HostsRun(Run):
    """Processes are grandchildren: of the executors, which the launcher's children become."""

    def executors(self):
        found = {}
        for child in children(self.process.pid):
            try:
                variables = pathlib.Path(f"/proc/{child}/environ").read_text().split("\0")
            except OSError:
                continue
            for variable in variables:
                if variable.startswith("host="):
                    found[variable[5:]] = child
        return found

    def pid(self, rank):
        replacements = [e["replacement"] for e in self.events("recovered") if e["rank"] == rank]
        if replacements:
            return replacements[-1]
        for executor in self.executors().values():
            for child in children(executor):
                try:
                    if f"RANK={rank}" in pathlib.Path(f"/proc/{child}/environ").read_text().split("\0"):
                        return child
                except OSError:
                    pass
        return None


def hostile(hosts):
    run = ["-n", "2", "--", "true"]
    for text, lines in [("line 2: host -oProxyCommand=x: expected a name", ["a", "-oProxyCommand=x"]),
                        ("line 3: host a: also in line 1", ["a", "# b", "a"]),
                        ("line 1: slots=-1: expected slots=K", ["a slots=-1"]),
                        ("line 1: slot=2: expected slots=K", ["a slot=2"]),
                        ("line 1: x: expected the end", ["a slots=2 x"]),
                        ("expected a host a line", ["# none", ""]),
                        ("2 ranks on hosts with 1 slots", ["a slots=1", "b slots=0"])]:
        hosts.refused(2, text, lines, *run)
    hosts.refused(2, "host b: launch: no-such-command: No such file", ["a slots=0", "b"], "-n", "1", "--",
                  "no-such-command")
    code = 1
    hosts.refused(code, "host unknown1: its executor ended with exit status 255 before it was ready: ssh: Could not "
                  "resolve hostname unknown1", ["a", "unknown1"], *run)
    hosts.refused(code, "host silent1: its executor has not connected to port ", ["a", "silent1"], "--start-timeout",
                  "0.5", *run)
    hosts.refused(code, "the secret of this launch is not its own", ["a", "secret1"], *run)
    program, note = hosts.folder / "other", b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"
    data = bytearray(pathlib.Path(hosts.tandem).read_bytes())
    data[data.index(note) + len(note)] ^= 255  # of the build ID
    program.write_bytes(data)
    program.chmod(0o755)
    hosts.refused(2, "host other1 runs Tandem ", ["other1"], *run,
                  env={**os.environ, "OTHER_PROGRAM": str(program)})
    if subprocess.run([hosts.tandem, "launch", "--executor"], input="{}", capture_output=True,
                      text=True).returncode != 2:
        sys.exit("expected settings that are none to be refused")


def processes(hosts):
    result = hosts.launch(["a slots=1", "b"], "-n", "3", "--", "sh", "-c",
                          'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE"; echo e$RANK >&2')
    if sorted(result.stdout.splitlines()) != ["[0] 0/3 0/1", "[1] 1/3 0/2", "[2] 2/3 1/2"] or sorted(
            result.stderr.splitlines()) != ["[0] e0", "[1] e1", "[2] e2"] or result.returncode != 0:
        sys.exit(f"output of three ranks: {result}")
    # Words, variables and folders of any bytes.
    odd = os.path.join(os.fsencode(hosts.folder), b"q'd $x\xff\xc3\xa9")
    os.mkdir(odd)
    words = [b"a b", b"c'd\"", b"$HOME", b"\xff\xc3\xa9\xc2", b""]
    result = subprocess.run([hosts.tandem, "launch", *hosts.options("a", "b"), "-n", "2", "--", "sh", "-c",
                             'pwd; for word in "$OMP_ODD" "$@"; do echo "$word"; done', *words], capture_output=True,
                            timeout=LIMIT_S, cwd=odd, env={**os.environ, "OMP_ODD": os.fsdecode(b"\xfe=1")})
    wanted = [odd, b"\xfe=1", *words[1:]]
    for rank in (b"[0] ", b"[1] "):
        lines = [line.removeprefix(rank) for line in result.stdout.splitlines() if line.startswith(rank)]
        if lines != wanted:
            sys.exit(f"words of any bytes: expected {wanted}: {result}")
    # A port for the launcher, and the ones after it for ranks.
    with socket.create_server(("", 0)) as taken:
        port = min(taken.getsockname()[1], 60000)
        if port == taken.getsockname()[1]:
            hosts.refused(2, "expected a free port (--port gave it)", ["a"], "--port", str(port), "-n", "1", "--", "true")
    result = hosts.launch(["a", "b"], "--port", str(port), "-n", "2", "--", "sh", "-c", "echo $MASTER_PORT")
    ports = {int(line.split()[1]) for line in result.stdout.splitlines()}
    if len(ports) != 1 or not port < ports.pop() <= port + 16:
        sys.exit(f"ports after {port}: {result}")
    result = hosts.launch(["a", "b"], "-n", "2", "--", "sh", "-c", "[ $RANK = 1 ] || exec sleep 0.5; exit 7")
    if result.returncode != 7 or " on b) ended with exit status 7\n" not in result.stderr:
        sys.exit(f"a failing rank: {result}")


def main():
    tandem = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        hosts = Hosts(tandem, folder)
        hostile(hosts)
        processes(hosts)
        steps = 30
        reference = Run(tandem, folder, "reference", [], steps)
        # Ranks of two hosts, whose secret and store are those of the launch.
        HostsRun(tandem, folder, "hosts", hosts.options("a", "b"), steps).ends_like(reference.ends_like(reference))
        # One rank of each host, and one that is stopped; then all of a host: from the checkpoint with spares and new
        # processes, one spare lost with it, or from copies in the memory of the other host.
        def lose_ranks(place):
            run = HostsRun(tandem, place, "ranks", [*hosts.options("a", "b"), "--spares", "2", "--restarts", "1"], steps)
            for at, (rank, number) in enumerate([(0, signal.SIGKILL), (3, signal.SIGSTOP), (2, signal.SIGKILL)]):
                run.hurt(rank, number, 1 + at)
            run.ends_like(reference)

        in_time(folder, "ranks", lose_ranks)
        # Faults that the launcher causes on another host.
        plan = folder / "faults.toml"
        plan.write_text("".join(f'[[fault]]\nstep = {step}\nrank = {rank}\nkind = "{kind}"\n'
                                for step, rank, kind in [(3, 3, "kill"), (8, 1, "hang"), (12, 2, "pause")]))
        run = HostsRun(tandem, folder, "injected", [*hosts.options("a", "b"), "--spares", "2", "--inject", str(plan)], steps)
        run.ends_like(reference)
        faults = [json.loads(line) for line in (run.events_file.parent / "faults.jsonl").read_text().splitlines()]
        blamed = [(event["rank"], event["process"]) for event in run.events("recovered")]
        if [fault["kind"] for fault in faults] != ["kill", "hang", "pause"] or blamed != [
                (fault["rank"], fault["process"]) for fault in faults if fault["noticed_ms"] is not None]:
            run.fail(f"expected two of three faults to be noticed: {faults}, {blamed}")
        copies = ["--set", "checkpoint.every=1000", "--set", "checkpoint.snapshot_every=8", "--set",
                  "checkpoint.peer_copy=true"]

        def lose_host(place, launch, job, target):
            """Log of a run whose host a is lost."""
            run = HostsRun(tandem, place, "lost", launch, steps, job=job)
            run.wait_until("a step", lambda: run.step() >= 15)
            run.send(run.find("host a", lambda: run.executors().get("a")), signal.SIGKILL)
            run.wait_until("recovery", lambda: len(run.events("recovered")) == 2)
            run.ends_like(reference)
            for event in run.events("recovered"):
                if event["host"] != "a" or event["replacement_host"] != target or event["rank"] < 2:
                    run.fail(f"expected the loss of a and a replacement on {target}: {event}")
            log = run.log.read_text()
            if " on a) was lost with its host: its executor has ended in step " not in log:
                run.fail("expected a line for each rank of the lost host")
            return log

        log = in_time(folder, "mixed", lambda place: lose_host(
            place, [*hosts.options("b", "a"), "--spares", "2", "--restarts", "1"], [], "b"))
        if "from its copy" in log:
            sys.exit("mixed: expected no copy in memory")
        # Copies are sent in the background: on a busy machine none may be whole yet.
        if not any("of rank 2 from its copy" in in_time(folder, f"copies{attempt}", lambda place: lose_host(
                place, [*hosts.options("b", "a", "c slots=0"), "--spares", "2"], copies, "c")) for attempt in range(3)):
            sys.exit("copies: expected them to be used")
        # A loss without a replacement: snapshots in the memory of both hosts are written to disk.
        for name, launch in ("saved", []), ("saved_replaced", ["--restarts", "0", "--min-dp", "2"]):
            run = HostsRun(tandem, folder, name, [*hosts.options("a", "b"), *launch], 10**6, job=SNAPSHOTS)
            run.wait_until("steps", lambda: run.step() >= 5)
            os.kill(run.wait_until("a rank", lambda: run.pid(2)), signal.SIGKILL)
            reached = run.step()
            if run.process.wait(LIMIT_S) != 128 + signal.SIGKILL or not checkpoints(run) or checkpoints(run)[-1] < reached - 1:
                run.fail(f"expected step {reached} or the one before to be saved: {checkpoints(run)}")
        # The launcher dies: no rank is left.
        run = HostsRun(tandem, folder, "launcher", hosts.options("a", "b"), 10**6)
        run.wait_until("a step", lambda: run.step() >= 2)
        pids = [run.wait_until("a rank", lambda r=r: run.pid(r)) for r in range(4)]
        run.process.kill()
        until = time.monotonic() + 10
        while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > until:
                sys.exit("ranks outlive the launcher")
            time.sleep(0.01)


if __name__ == "__main__":
    main()
