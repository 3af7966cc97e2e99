"""Ranks that are late, are killed and fail, on 4 ranks: every other one gets an error that names them within the
deadline. Ranks 0 and 2 stay to the end and print "ok"."""
import os
import re
import signal
import sys
import time
from datetime import timedelta

from group import RANK, dist, start, torch

DEADLINE = 20.0


def expect(text, call, within):
    """Runs the call, which must fail with that text (a regular expression) after at most `within` seconds."""
    begin = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        took = time.monotonic() - begin
        assert re.search(text, str(error)), f"rank {RANK}: {error}: expected {text}"
        assert "\n" not in str(error), error
        assert took < within, f"rank {RANK}: {took:.1f} s: expected at most {within} s: {error}"
        return
    raise AssertionError(f"rank {RANK}: expected a DistBackendError: {text}")


def late():
    group = dist.new_group(timeout=timedelta(seconds=1))
    if RANK == 1:
        time.sleep(2.5)
    # Rank 1 finds the others gone from the call.
    expect("rank 1" if RANK != 1 else r"rank \d", lambda: dist.all_reduce(torch.ones(3), group=group), DEADLINE)
    if RANK != 1:
        expect("rank 1", lambda: dist.barrier(group=group), DEADLINE)


def no_message():
    group = dist.new_group(timeout=timedelta(seconds=1))
    if RANK in (0, 1):
        expect(f"recv: rank {RANK} .*rank {1 - RANK}|rank {1 - RANK}",
               lambda: dist.recv(torch.ones(3), 1 - RANK, group=group), DEADLINE)


def killed():
    members = [2, 0, 1]  # in another order than in the world
    messages, group = dist.new_group([0, 1, 2]), dist.new_group(members)
    calm = dist.new_group([0, 2])
    if RANK not in members:
        return
    dist.all_reduce(torch.ones(3), group=group)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message = torch.ones(3)
    work = dist.irecv(message, 1, group=messages)
    # Sorted by new_group: rank 1 of the world is rank 1 of the group.
    expect("rank 1", lambda: dist.all_reduce(torch.ones(100_000), group=group), DEADLINE)
    expect("rank 1", work.wait, DEADLINE)
    expect("rank 1", lambda: dist.all_reduce(torch.ones(3), group=group), 1)
    x = torch.ones(3)
    dist.all_reduce(x, group=calm)  # groups without the lost rank go on
    assert x[0] == 2


def named_by_world():
    """A rank of a subgroup whose number differs from that in the world."""
    dist.all_reduce(torch.ones(3), group=last)
    if RANK == 3:
        raise SystemExit(7)
    expect(r"rank 2.* \(ranks of this group, from 0: 0, 2, 3\)", lambda: dist.all_reduce(torch.ones(3), group=last),
           DEADLINE)


start()
last = dist.new_group([0, 2, 3])
late()
dist.barrier()
no_message()
dist.barrier()
killed()
named_by_world()
print(f"ok: rank {RANK}", flush=True)
sys.stdout.flush()
