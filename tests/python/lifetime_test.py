"""Operators and worlds created and destroyed in any order, without leaks. Threads only."""
import gc
import os
import random
import signal
import subprocess
import sys
import time
import unittest
import weakref

import numpy as np

import tandem
from forged import COPIED, READ_ONLY, Forged
from ranks import torch

COUNT = int(os.environ.get("TANDEM_TEST_OPERATORS", "1500"))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Lifetimes(unittest.TestCase):
    def test_operators_dropped_in_any_order_leak_nothing(self):
        x, w = np.ones((2, 4), "f4"), np.ones((3, 4), "f4")

        def body(comm):
            alike, chance = random.Random(1), random.Random(2 + comm.rank)
            operators, sizes = [], []
            begin, rows = tandem.shard_of(2, comm.size, comm.rank)
            local, dy = x[begin:begin + rows], np.ones((2, 3), "f4")
            one = np.zeros((1, 1), "i4"), np.ones((1, 1), "f4")

            def moe(codec):
                layer = tandem.MoeLayer(comm, 2, 4, 3, 2, strategy="serial", codec=codec)
                out, batch = layer.forward(x[:1], *one, np.ones((6, 4), "f4"), np.ones((4, 3), "f4"))
                return chance.choice((layer, batch)), out[0, 0] > 0

            def made(kind, codec):
                return kind(comm, 2, 3, 4, strategy="serial", codec=codec)

            def sums(kind, first, second, want, codec):
                op = made(kind, codec)
                return op, abs(op(first, second)[:1].sum() - want) < 0.5

            makers = (
                lambda codec: sums(tandem.AgGemm, local, w, 12, codec),
                lambda codec: sums(tandem.GemmRs, x, w, 12 * comm.size, codec),
                lambda codec: sums(tandem.GemmAr, x, w, 12 * comm.size, codec),
                lambda codec: sums(tandem.AgWgrad, local, dy, 8, codec),
                moe,
            )
            kinds = (tandem.AgGemm, tandem.GemmRs, tandem.GemmAr, tandem.AgWgrad)
            for i in range(COUNT):
                codec = alike.choice((None, None, "int8"))
                if i % 16 == 0:
                    op, right = makers[i // 16 % len(makers)](codec)
                    self.assertTrue(right, op)
                else:
                    op = made(alike.choice(kinds), codec)
                operators.append(op)
                del op
                while len(operators) > 8:
                    operators.pop(chance.randrange(len(operators)))
                if i in (COUNT // 2, COUNT - 1):
                    gc.collect()
                    sizes.append(resident())
            return sizes

        before, after = tandem.run(2, body)[0]
        self.assertLess(after - before, 8 << 20)

    @unittest.skipUnless(torch, "PyTorch is not installed")
    def test_memory_does_not_grow_with_shapes(self):
        done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True, timeout=240)
        self.assertLess(int(done.stdout), 160, done.stderr)

    def test_worlds_leak_nothing(self):
        sizes = []
        for i in range(200):
            with tandem.World(2) as pair, tandem.World(1) as single:
                pair.comm(0)
                tandem.GemmAr(single.comm(), 1, 1, 1)
            if i in (100, 199):
                gc.collect()
                sizes.append(resident())
        self.assertLess(sizes[1] - sizes[0], 8 << 20)

    def test_results_outlive_their_operator(self):
        def body(comm):
            return tandem.GemmAr(comm, 2, 3, 4)(np.ones((2, 4), "f4"), np.ones((3, 4), "f4"))

        for out in tandem.run(2, body):
            self.assertEqual(out.sum(), 48)

    def test_operands_are_given_back(self):
        x = np.ones((2, 4), "f4")
        alive = weakref.ref(x)
        with tandem.World(1) as world:
            op = tandem.GemmAr(world.comm(), 2, 3, 4)
            out = op(x, np.ones((3, 4), "f4"))
            references = sys.getrefcount(x)
            op(x, np.ones((3, 4), "f4"), out)
            self.assertEqual(sys.getrefcount(x), references)
            del x
            gc.collect()
            self.assertIsNone(alive())

    def test_operands_are_given_back_when_refused(self):
        w = np.ones((3, 4), "f4")
        with tandem.World(1) as world:
            comm = world.comm()
            op = tandem.GemmAr(comm, 2, 3, 4)

            def refused(call, *arguments):
                with self.assertRaises(tandem.InvalidArgument):
                    call(*arguments)

            for make in (lambda: np.ones((2, 4), "f8"), lambda: np.ones((2, 4), "f4")[::-1],
                         lambda: np.ones((1,) * 5, "f4")):
                bad = make()
                references, alive = sys.getrefcount(bad), weakref.ref(bad)
                refused(op, bad, w)
                refused(op, np.ones((2, 4), "f4"), w, bad)
                refused(tandem.all_reduce, comm, bad)
                self.assertEqual(sys.getrefcount(bad), references)
                del bad
                self.assertIsNone(alive())
            for cast, call in (("d", op), ("d", tandem.all_gather)):
                memory = bytearray(64)
                with memoryview(memory) as whole, whole.cast(cast) as view:
                    refused(call, *((view, w) if call is op else (comm, view)))
                memory.append(0)  # BufferError while it is exported

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_tensors_are_given_back_when_refused(self):
        for shape, dtype in (((2, 4), torch.float64), ((1,) * 5, torch.float32)):
            bad = torch.ones(shape, dtype=dtype)
            alive = weakref.ref(bad)
            with tandem.World(1) as world:
                with self.assertRaises(tandem.InvalidArgument):
                    tandem.all_reduce(world.comm(), bad)
            memory = weakref.ref(bad.storage())
            del bad
            gc.collect()
            self.assertIsNone(alive())
            self.assertIsNone(memory())

    def test_capsules_are_given_back_when_refused(self):
        for changes in ({"bits": 64}, {"dims": 5}, {"device": 4}, {"strides": (-2, 1)}, {"shape": None}):
            for versioned in (False, True):
                forged = Forged(versioned=versioned, **changes)
                with tandem.World(1) as world, self.assertRaises(tandem.InvalidArgument):
                    tandem.all_reduce(world.comm(), forged)
                self.assertEqual(forged.freed, 1, changes)

    def test_what_was_copied_is_not_written(self):
        for flag, read_only in ((0, False), (READ_ONLY, True), (COPIED, True)):
            forged = Forged(flags=flag)
            with tandem.World(1) as world:
                op = tandem.GemmAr(world.comm(), 4, 5, 3)
                x, w = np.ones((4, 3), "f4"), np.ones((5, 3), "f4")
                if read_only:
                    with self.assertRaisesRegex(tandem.InvalidArgument, "out.*read-only"):
                        op(x, w, forged)
                else:
                    op(x, w, forged)
            self.assertEqual(list(forged.memory)[:20], [1.0 if read_only else 3.0] * 20)
            self.assertEqual(forged.freed, 1)

    def test_operators_outlive_their_world_object(self):
        comm = tandem.World(1).comm()
        gc.collect()
        op = tandem.GemmAr(comm, 2, 3, 4)
        del comm
        self.assertEqual(op(np.ones((2, 4), "f4"), np.ones((3, 4), "f4")).sum(), 24)


WAITING = """
import sys, tandem
def body(comm):
    if comm.rank == 0:
        print("waiting", flush=True)
        comm.barrier()
    else:
        while True: pass
try:
    tandem.run(2, body)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
WAITING_ALONE = """
import tandem
world = tandem.World(2)
print("waiting", flush=True)
try:
    world.comm(0).barrier()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
# One of two processes; the other never starts.
JOINING = """
import os, tandem
os.environ.update(RANK="%d", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT="29500", TORCHELASTIC_RUN_ID=str(os.getpid()))
print("waiting", flush=True)
try:
    tandem.init()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


LEFT = """
import tandem, threading, time
world = tandem.World(2)
threading.Thread(target=world.comm(0).barrier, daemon=True).start()
time.sleep(0.3)
print("waiting", flush=True)
"""


# Layers that see many numbers of tokens; MB of growth.
SHAPES = """
import gc, os, torch, tandem
from tandem import torch as layers

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def body(comm):
    up, down = layers.ColumnParallelLinear(comm, 256, 256), layers.RowParallelLinear(comm, 256, 256)
    for i in range(240):
        down(up(torch.randn(64 + i, 256, requires_grad=True))).sum().backward()
        if i == 40: begin = resident()
    return (resident() - begin) // 10**6

print(tandem.run(2, body)[0])
"""
# Two threads close a world in which another one makes calls and communicators.
CLOSING = """
import sys, threading, numpy as np, tandem
sys.setswitchinterval(1e-6)
x, w = np.ones((8, 4), "f4"), np.ones((3, 4), "f4")

def call(world):
    try:
        comm = world.comm(0)
        op = tandem.AgGemm(comm, 8, 3, 4, keep_gathered=True)
        while True:
            halves = [comm.split(0) for _ in range(20)]
            op(x, w)
            assert op.gathered(x).sum() == 32
            halves[3].split(0).barrier()
    except tandem.InvalidArgument as error:
        named.append("is closed" in str(error))

def close(world):
    while not world.closed:
        try:
            world.close()
        except tandem.InvalidArgument as error:
            assert "inside a call of another thread" in str(error), error

named = []
for _ in range(40):
    world = tandem.World(1)
    threads = [threading.Thread(target=f, args=(world,)) for f in (call, close, close)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(len(named), all(named))
"""


class Endings(unittest.TestCase):
    def test_a_world_closed_during_calls_of_other_threads(self):
        done = subprocess.run([sys.executable, "-c", CLOSING], capture_output=True, text=True, timeout=240)
        self.assertEqual((done.returncode, done.stdout), (0, "40 True\n"), done.stderr)

    def test_a_thread_that_still_waits(self):
        done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stdout), (0, "waiting\n"), done.stderr)


class Interrupts(unittest.TestCase):
    def interrupt(self, program):
        heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if a shell started us with &
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
            self.assertEqual(process.stdout.readline(), "waiting\n")
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=25)  # less than the deadline of a wait
            self.assertEqual((out, errors, process.returncode), ("interrupted\n", "", 0))

    def test_of_ranks_that_wait_and_that_compute(self):
        self.interrupt(WAITING)

    def test_of_a_process_that_looks_for_the_others(self):
        for rank in 0, 1:
            self.interrupt(JOINING % rank)

    def test_of_the_main_thread_inside_a_wait(self):
        self.interrupt(WAITING_ALONE)


if __name__ == "__main__":
    unittest.main()
