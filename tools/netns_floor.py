#!/usr/bin/env python3
"""netns_floor.py [--bench PROGRAM] [--rounds N] [--rate RATE] [--json FILE]: measures the cost of a
network to the cores that compute, without Tandem. Two hosts as in netns_run.sh; on each, a bare
oneDNN matmul (operators_bench) is timed alternately with the link idle and with plain sockets
filling it both ways; a host is one core, sockets included. The slow-down is the share of the wire
time that no overlap can hide: E is at most 1 - slow-down. Buffers are traversed, as with fresh
data: they do not stay in the cache."""
import argparse
import datetime
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
PORT, BUFFER, PIECE = 7777, 8 << 20, 256 << 10


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", default="build/bin/operators_bench")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--json")
    return parser.parse_args()


def matmul_seconds(program):
    """One thread, 512 x 1024 x 1024, f32: the mean of half a second, and the machine's
    description."""
    out = subprocess.run([program, "--benchmark_filter=^bare/m:512/n:1024/k:1024/bf16:0",
                          "--benchmark_min_time=0.5", "--benchmark_format=json"], check=True,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                         env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=60).stdout
    report = json.loads(out)
    return report["benchmarks"][0]["real_time"] / 1e9, report["context"]


def connect(rank):
    if rank == 0:
        with socket.create_server(("", PORT)) as server:
            server.settimeout(30)
            return server.accept()[0]
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("10.77.0.1", PORT), timeout=30)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Transfer:
    """Sends and receives concurrently until stop(); a last chunk of zeros ends the peer's
    stream."""

    def __init__(self, link):
        self.link, self.ending, self.received = link, threading.Event(), 0
        self.source, self.target = memoryview(bytearray(b"x" * BUFFER)), memoryview(bytearray(BUFFER))
        self.threads = [threading.Thread(target=self.send), threading.Thread(target=self.receive)]
        self.start = time.monotonic()
        for thread in self.threads:
            thread.start()

    def send(self):
        at = 0
        while not self.ending.is_set():
            self.link.sendall(self.source[at:at + PIECE])
            at = (at + PIECE) % BUFFER
        self.link.sendall(bytes(PIECE))

    def receive(self):
        at = 0
        while True:
            end = (at // PIECE + 1) * PIECE
            count = self.link.recv_into(self.target[at:end])
            if not count:
                raise ConnectionError("the other host is gone")
            self.received += count
            if at + count == end and self.target[end - 1] == 0:
                return
            at = (at + count) % BUFFER

    def stop(self):
        """Ends the stream; Mbit/s received until then."""
        rate = self.received * 8 / (time.monotonic() - self.start) / 1e6
        self.ending.set()
        for thread in self.threads:
            thread.join()
        return rate


def on_host(args, rank):
    link = connect(rank)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PIECE)
    found = {"matmul_s": [], "slowdown": [], "mbit_per_s": []}
    for _ in range(args.rounds):
        alone, context = matmul_seconds(args.bench)
        transfer = Transfer(link)
        beside, _ = matmul_seconds(args.bench)
        found["mbit_per_s"].append(transfer.stop())
        found["matmul_s"].append(alone)
        found["slowdown"].append(beside / alone - 1)
    if rank == 1:
        link.sendall(json.dumps(found).encode())
        return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    with link.makefile() as other:
        hosts = [found, json.loads(other.readline())]
    slowdown = statistics.median(hosts[0]["slowdown"] + hosts[1]["slowdown"])
    for host, of in enumerate(hosts):
        print(f"host {host}: matmul {statistics.median(of['matmul_s']) * 1e3:.2f} ms, "
              f"{statistics.median(of['slowdown']) * 100:.1f} % slower beside "
              f"{statistics.median(of['mbit_per_s']):.0f} Mbit/s each way")
    print(f"both: {slowdown * 100:.1f} % slower; E at most {(1 - slowdown) * 100:.0f} %")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({
            "what": "slow-down of a bare oneDNN matmul beside plain sockets that fill the link",
            "command": f"tools/netns_floor.py --rate {args.rate} --rounds {args.rounds}",
            "hardware": context["hardware"], "commit": context["commit"],
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "link": f"tbf {args.rate}", "rounds": args.rounds, "hosts": hosts, "slowdown": slowdown,
            "efficiency_at_most": 1 - slowdown}, indent=1) + "\n")


args = arguments()
rank = os.environ.get("OMPI_COMM_WORLD_RANK")
if rank is None:
    sys.exit(subprocess.run([HERE / "netns_run.sh", "--rate", args.rate, sys.executable,
                             pathlib.Path(__file__).resolve(), *sys.argv[1:]]).returncode)
os.sched_setaffinity(0, {int(rank) % os.cpu_count()})
on_host(args, int(rank))
