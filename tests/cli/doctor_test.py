#!/usr/bin/env python3
"""doctor_test.py TANDEM [NETNS_RUN]: `tandem doctor` names the rank or link with a fault, nothing where none is, and ends
with one line when a rank dies or hangs. With NETNS_RUN: hosts are network namespaces, one of which has a slow
link."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

LIMIT_S = 60
# Other programs may run: only far slower ranks are named.
CALM = ["--factor", "200", "--seconds", "0.02"]
ENV = {**os.environ, "TANDEM_THREADS": "1"}


def doctor(tandem, *arguments, before=(), **more):
    return subprocess.run([*before, tandem, "doctor", *arguments], capture_output=True, text=True, timeout=LIMIT_S,
                          **{"env": ENV, **more})


def expect(condition, what, result):
    if not condition:
        sys.exit(f"{what}: {result}")


def refused(tandem, code, text, *arguments, before=()):
    result = doctor(tandem, *arguments, before=before)
    expect(result.returncode == code and text in result.stderr and len(result.stderr.splitlines()) == 1,
           f"{arguments}: expected {code} and {text!r}", result)


def bad(diagnosis):
    return [f"rank {r['rank']}: {r['verdict']}" for r in diagnosis["ranks"] if r["verdict"] != "ok"] + [
        f"{link['from']}->{link['to']}: {link['verdict']}" for link in diagnosis["links"] if link["verdict"] != "ok"]


def clean(tandem, folder):
    file = folder / "clean.json"
    result = doctor(tandem, "-n", "3", *CALM, "--json", str(file))
    diagnosis = json.loads(file.read_text())
    expect(result.returncode == 0 and bad(diagnosis) == [] and diagnosis["verdict"] == "ok", "a clean run", result)
    expect(len(diagnosis["links"]) == 6 and all(link["gbps"] > 0 and link["latency_us"] > 0
                                                for link in diagnosis["links"]), "links", diagnosis)
    expect(result.stdout.endswith("0 of 1 hosts and 0 of 6 links are bad (slow: 200 times the median of its kind)\n")
           and result.stderr.startswith("tandem: doctor: products and memory\n"), "output", result)


def faults(tandem):
    for kind, found in [("gemm", "rank 1: wrong bits"), ("memory", "rank 1: wrong bits"),
                        ("message", "1->2: wrong bits")]:
        result = doctor(tandem, "-n", "3", *CALM, "--json", "-", "--inject", f"1:{kind}")
        expect(result.returncode == 1 and bad(json.loads(result.stdout)) == [found], f"{kind}: expected {found}", result)


def worlds(tandem, folder):
    # Ranks of another launcher print once, and all end with the status.
    launch = [tandem, "launch", "-n", "2", "--"]
    result = doctor(tandem, *CALM, before=launch)
    expect(result.returncode == 0 and result.stdout.count(" links are bad") == 1, "in a launched world", result)
    result = doctor(tandem, *CALM, "--inject", "0:message", before=launch)
    expect(result.returncode == 1 and "[0] link 0 -> 1, shm: wrong bits: " in result.stdout, "in a launched world",
           result)
    shell = folder / "shell"
    shell.write_text('#!/bin/sh\ncase $1 in unknown) echo "ssh: no host $1" >&2; exit 255 ;; esac\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    hosts = folder / "hosts"
    hosts.write_text("a\nb\nspare slots=0\nc\n")
    remote = ["--remote-shell", str(shell), "--hosts"]
    result = doctor(tandem, *CALM, *remote, str(hosts), "--json", "-", env={**ENV, "TANDEM_MPI_SHM": "0"})
    diagnosis = json.loads(result.stdout)
    expect(result.returncode == 0 and len(diagnosis["hosts"]) == 3 and
           {link["link"] for link in diagnosis["links"]} != {"shm"}, "three hosts", result)
    hosts.write_text("a\nunknown\n")
    refused(tandem, 1, "host unknown: its executor ended with exit status 255 before it was ready: ssh: no host unknown",
            *remote, str(hosts))
    refused(tandem, 3, "no-hosts", *remote, str(folder / "no-hosts"))


def bad_input(tandem):
    refused(tandem, 2, "doctor out: expected no options with a run", "out", "-n", "2")
    for fault in ["2:gemm", "gemm", "1:gem", "-1:gemm", "1:", "99999999999:gemm"]:
        refused(tandem, 2, "expected RANK:KIND, a rank below 2 and gemm, memory or message", "-n", "2",
                f"--inject={fault}")
    refused(tandem, 2, "--factor", "--factor", "1")
    refused(tandem, 4, "--device gpu: this build has no CUDA, or this machine no GPU", "--device", "gpu",
            before=["env", "CUDA_VISIBLE_DEVICES="])
    refused(tandem, 2, "this process is a rank of a launcher", "-n", "2",
            before=["env", "RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                    "MASTER_PORT=29511", "TORCHELASTIC_RUN_ID=x"])


def hurt(tandem, number, code, texts):
    """A rank is killed or stopped as soon as the ranks have begun."""
    process = subprocess.Popen([tandem, "doctor", "-n", "3", *CALM, "--link-timeout", "0.5"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=ENV)
    lines = [process.stderr.readline()]
    for child in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if "RANK=1" in pathlib.Path(f"/proc/{child}/environ").read_text().split("\0"):
            os.kill(int(child), number)
    began = time.monotonic()
    rest, errors = process.communicate(timeout=LIMIT_S)
    lines += errors.splitlines(keepends=True)
    ends = [line for line in lines if not line.startswith("tandem: doctor: ")]
    expect(process.returncode in code and len(ends) == 1 and any(text in ends[0] for text in texts) and rest == "",
           f"signal {number}: expected {code} and one of {texts}", (process.returncode, lines, rest))
    expect(time.monotonic() - began < LIMIT_S / 2, f"signal {number}", "took too long")


def slow_host(tandem, shell):
    """On the first of three hosts, with links of 1 Gbit/s: the second one's is slowed to 100."""
    with tempfile.TemporaryDirectory() as name:
        hosts = pathlib.Path(name) / "hosts"
        hosts.write_text("10.77.0.1\n10.77.0.2\n10.77.0.3\n")
        run = ["--remote-shell", shell, "--hosts", str(hosts), "--json", "-", "--factor", "4"]
        for rate, found in [(None, []), ("100mbit", ["1->0: slow", "1->2: slow"])]:
            if rate:
                subprocess.run([shell, "10.77.0.2", f"tc qdisc replace dev eth0 root handle 1: tbf rate {rate} burst 64kb "
                                "latency 50ms"], check=True)
            result = doctor(tandem, *run)
            links = [line for line in bad(json.loads(result.stdout)) if "->" in line]
            expect(links == found, f"link of {rate}: expected {found}", result)


def main():
    tandem = sys.argv[1]
    if "NETNS_SHELL" in os.environ:
        return slow_host(tandem, os.environ["NETNS_SHELL"])
    if len(sys.argv) > 2:
        sys.exit(subprocess.run([sys.argv[2], "--hosts", "3", "--once", __file__, tandem]).returncode)
    failures = []
    cases = [lambda: hurt(tandem, signal.SIGSTOP, [5, 6], ["rank 1"])]

    def run(case):
        try:
            case()
        except BaseException as error:  # sys.exit's, too
            failures.append(error)
    with tempfile.TemporaryDirectory() as name:
        threads = [threading.Thread(target=run, args=[case]) for case in cases]
        for thread in threads:
            thread.start()
        for case in [lambda: clean(tandem, pathlib.Path(name)), lambda: faults(tandem),
                     lambda: worlds(tandem, pathlib.Path(name)), lambda: bad_input(tandem),
                     lambda: hurt(tandem, signal.SIGKILL, [137, 6], ["rank 1"])]:
            run(case)
        for thread in threads:
            thread.join()
    if failures:
        sys.exit("\n".join(str(failure) for failure in failures))


if __name__ == "__main__":
    main()
