"""Operators and worlds that come and go: in any order, without leaks. Threads only."""
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

COUNT = int(os.environ.get("TANDEM_TEST_OPERATORS", "1500"))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Lifetimes(unittest.TestCase):
    def test_operators_dropped_in_any_order_leak_nothing(self):
        x, w = np.ones((2, 4), "f4"), np.ones((3, 4), "f4")

        def body(comm):
            chance = random.Random(comm.rank)
            kept, sizes = [], []
            for i in range(COUNT):
                op = tandem.GemmAr(comm, 2, 3, 4, strategy="serial")
                if i % 16 == 0:
                    self.assertEqual(op(x, w)[0, 0], 4 * comm.size)
                kept.append(op)
                del op
                while len(kept) > 8:
                    kept.pop(chance.randrange(len(kept)))
                if i in (COUNT // 2, COUNT - 1):
                    gc.collect()
                    sizes.append(resident())
            return sizes

        before, after = tandem.run(2, body)[0]
        self.assertLess(after - before, 8 << 20)

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


LEFT = """
import tandem, threading, time
world = tandem.World(2)
threading.Thread(target=world.comm(0).barrier, daemon=True).start()
time.sleep(0.3)
print("waiting", flush=True)
"""


class Endings(unittest.TestCase):
    def test_a_thread_that_still_waits(self):
        done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stdout), (0, "waiting\n"), done.stderr)


class Interrupts(unittest.TestCase):
    def interrupt(self, program):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as process:
            self.assertEqual(process.stdout.readline(), "waiting\n")
            time.sleep(0.3)
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=20)
            self.assertEqual((out, errors, process.returncode), ("interrupted\n", "", 0))
            self.assertLess(time.monotonic() - begin, 5)

    def test_of_ranks_that_wait_and_that_compute(self):
        self.interrupt(WAITING)

    def test_of_the_main_thread_inside_a_wait(self):
        self.interrupt(WAITING_ALONE)


if __name__ == "__main__":
    unittest.main()
