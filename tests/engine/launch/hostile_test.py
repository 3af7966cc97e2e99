#!/usr/bin/env python3
"""hostile_test.py TANDEM connections=N [seed=S]: N hostile connections to the rendezvous store of a training on two hosts
of one machine, and N to that of one on a single host: half while the job forms its world, half while it replaces a lost
rank, and more tries beside its steps, when nothing listens. A rank is withheld until enough have come. No rank notices:
the final weights are those of an undisturbed run, and no event but the loss is recorded; the launcher's descriptors and
memory stay bounded."""
import collections
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

from launch_hosts_test import Hosts, HostsRun
from launched_run import LIMIT_S, Run

MAGIC = b"tandem\0\1"  # comm/rendezvous/message.h
RANKS, MAX_PENDING, OTHER_DESCRIPTORS, MAX_GROWTH_KIB = 4, 256, 32, 16 << 10
WITHHELD = 3


def answer(draw, secured=1):
    return MAGIC + struct.pack("<iiQ", draw.randrange(RANKS), RANKS, secured) + draw.randbytes(64)


def huge(draw):
    return MAGIC + struct.pack("<IiQII", 8, 1, 0, 0xffffffff, 0xffffffff) + draw.randbytes(64)


def listener_of(pid):
    """Family and address at which the process listens; None if there is none."""
    try:
        inodes = {match[1] for fd in os.listdir(f"/proc/{pid}/fd")
                  if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}")))}
    except OSError:
        return None
    for file in "tcp6", "tcp":
        for line in pathlib.Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                return socket.AF_INET, ("127.0.0.1", int(words[1].rpartition(":")[2], 16))
    for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "00010000" and words[6] in inodes and len(words) > 7:  # listens
            return socket.AF_UNIX, words[7].replace("@", "\0", 1)
    return None


class Attack(threading.Thread):
    """Connects until `stop`. Connections that were not refused count."""

    def __init__(self, launcher, seed):
        super().__init__(daemon=True)
        self.launcher, self.draw, self.listener, self.error = launcher, random.Random(seed), None, None
        self.stopped = False
        self.connected, self.refused, self.kinds = 0, 0, collections.Counter()
        # Those that the server cannot tell from a rank yet: more than it may keep.
        self.pending, self.slow = collections.deque(maxlen=2 * MAX_PENDING), collections.deque(maxlen=50)
        self.open = collections.deque(maxlen=100)
        self.descriptors = self.first_kib = self.kib = 0

    def run(self):
        try:
            while not self.stopped:
                self.connect()
        except Exception as error:
            self.error = error

    def connect(self):
        self.listener = self.listener or listener_of(self.launcher)
        family, address = self.listener or (socket.AF_UNIX, "")
        stranger = socket.socket(family)
        stranger.settimeout(5)
        try:
            stranger.connect(address)
        except OSError:
            self.refused += 1
            self.listener = None
            time.sleep(0.002)
            return
        self.connected += 1
        stranger.setblocking(False)
        kind = self.draw.choice([self.silent, self.half, self.garbage, self.wrong, self.unsecured, self.huge, self.slowly,
                                 self.reset, self.half_open])
        self.kinds[kind.__name__] += 1
        try:
            kind(stranger)
        except OSError:  # the server has closed it
            pass
        for other, text in self.slow:
            try:
                other.send(bytes([next(text, 0)]))
            except OSError:
                pass
        if self.connected % 20 == 0:
            self.measure()

    def measure(self):
        try:
            self.descriptors = max(self.descriptors, len(os.listdir(f"/proc/{self.launcher}/fd")))
            status = pathlib.Path(f"/proc/{self.launcher}/status").read_text()
        except OSError:
            return
        if match := re.search(r"VmRSS:\s+(\d+)", status):
            self.first_kib = self.first_kib or int(match[1])
            self.kib = max(self.kib, int(match[1]))

    def silent(self, stranger):
        self.pending.append(stranger)

    def half(self, stranger):
        stranger.send(answer(self.draw)[:self.draw.randrange(1, 88)])
        self.pending.append(stranger)

    def garbage(self, stranger):
        stranger.send(self.draw.randbytes(self.draw.randrange(1, 4000)))
        self.open.append(stranger)

    def wrong(self, stranger):
        stranger.send(answer(self.draw))
        self.open.append(stranger)

    def unsecured(self, stranger):
        stranger.send(answer(self.draw, secured=0))
        self.open.append(stranger)

    def huge(self, stranger):
        stranger.send(huge(self.draw))
        self.open.append(stranger)

    def slowly(self, stranger):
        self.slow.append((stranger, iter(answer(self.draw))))

    def reset(self, stranger):
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()

    def half_open(self, stranger):
        stranger.shutdown(socket.SHUT_WR)
        self.open.append(stranger)


def check(hosts, reference, count, seed, is_local):
    folder, go = hosts.folder, hosts.folder / "go"
    go.unlink(missing_ok=True)
    wrapper = folder / "bin/tandem"
    wrapper.parent.mkdir(exist_ok=True)
    wrapper.write_text(f'#!/bin/sh\n[ "$RANK" != {WITHHELD} ] || while [ ! -e {go} ]; do sleep 0.02; done\n'
                       f'exec {hosts.tandem} "$@"\n')
    wrapper.chmod(0o755)
    launch = ["--restarts", "1"]
    run = (Run(str(wrapper), folder, "local", launch, reference.steps) if is_local else
           HostsRun(str(wrapper), folder, "hosts", [*launch, *hosts.options("a", "b")], reference.steps))
    run.wait_until("its ranks", lambda: all(run.pid(rank) for rank in range(RANKS)))  # the executors have connected
    attack = Attack(run.launcher() if is_local else run.process.pid, seed)
    attack.start()

    def release_after(connections):
        until = time.monotonic() + LIMIT_S
        while attack.connected < connections and not attack.error and time.monotonic() < until:
            time.sleep(0.002)
        if attack.error or attack.connected < connections:
            run.fail(f"{attack.connected} of {connections} connections: {attack.error}")
        go.touch()

    release_after((count + 1) // 2)
    run.wait_until("a step", lambda: run.step() >= 3)
    go.unlink()
    os.kill(run.pid(WITHHELD), signal.SIGKILL)
    release_after(count)
    run.ends_like(reference)
    attack.stopped = True
    attack.join()
    if [(event["event"], event["rank"]) for event in run.events()] != [("lost", WITHHELD), ("recovered", WITHHELD)]:
        run.fail(f"expected the loss of rank {WITHHELD} and no other event: {run.events()}")
    print(f"{'one host' if is_local else 'two hosts'}: {attack.connected} hostile connections, {attack.refused} refused: {dict(attack.kinds)}; the launcher has at "
          f"most {attack.descriptors} descriptors, and {attack.kib - attack.first_kib} KiB more memory")
    if attack.descriptors > MAX_PENDING + RANKS + OTHER_DESCRIPTORS or attack.kib - attack.first_kib > MAX_GROWTH_KIB:
        run.fail("expected bounded descriptors and memory")


def main():
    tandem, connections, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        hosts = Hosts(tandem, pathlib.Path(name))
        reference = Run(tandem, hosts.folder, "reference", [], 60)
        reference.ends_like(reference)
        for is_local in True, False:
            check(hosts, reference, int(connections.removeprefix("connections=")),
                  int(options[0].removeprefix("seed=")) if options else 1, is_local)


if __name__ == "__main__":
    main()
