"""Lifetime of worlds of GPU ranks, with CPU ranks substituted for the library's GPU ranks."""
import signal
import threading
import time
import unittest
from unittest import mock

import tandem
from tandem import _core, _gpus


class OnCpus:
    """_core with `_on_gpus` on CPU ranks: runs `body` on all of them, each on its own thread."""

    def __init__(self):
        self.threads = 0

    def __getattr__(self, name):
        return getattr(_core, name)

    def _on_gpus(self, ranks, ranks_per_gpu, link, deadline, body):
        if ranks > 4:
            raise tandem.InvalidArgument(f"nccl: {ranks} ranks: this machine has 4 GPUs")
        world = _core._threads(ranks, link, deadline)
        threads = [threading.Thread(target=body, args=(world.comm(rank),)) for rank in range(ranks)]
        self.threads += ranks
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            self.threads -= 1
        world.close()


class Worlds(unittest.TestCase):
    def setUp(self):
        self.library, self.entered = OnCpus(), []
        for patch in (mock.patch.object(_gpus, "_core", self.library),
                      mock.patch.object(_gpus.GpuRanks, "enter", lambda _, comm: self.entered.append(comm.rank))):
            patch.start()
            self.addCleanup(patch.stop)

    def tearDown(self):
        self.assertEqual(self.library.threads, 0)

    def test_run(self):
        self.assertEqual(tandem.run(3, lambda comm: comm.rank * 10, device="cuda"), [0, 10, 20])
        self.assertEqual(sorted(self.entered), [0, 1, 2])

    def test_a_world(self):
        with tandem.World(2, device="cuda", ranks_per_gpu=2) as world:
            self.assertEqual((world.size, world.ranks, world.closed), (2, [0, 1], False))
            comm = world.comm(1)
            for _ in range(2):
                self.assertEqual(world.run(lambda comm: comm.size), [2, 2])
            self.assertRaisesRegex(tandem.InvalidArgument, "rank 2: expected one.* 0 to 1", lambda: world.comm(2))
            self.assertRaisesRegex(tandem.InvalidArgument, "no rank given", world.comm)
        self.assertTrue(comm.closed)
        self.assertRaisesRegex(tandem.InvalidArgument, "world is closed", lambda: world.comm(0))
        world.close()

    def test_a_world_that_cannot_be(self):
        for call in (lambda: tandem.run(5, print, device="cuda"), lambda: tandem.World(5, device="cuda")):
            self.assertRaisesRegex(tandem.InvalidArgument, "5 ranks: this machine has 4 GPUs", call)

    def test_an_exception_of_a_rank_ends_the_others(self):
        def body(comm):
            if comm.rank == 1:
                raise KeyError("mine")
            comm.barrier()

        with self.assertRaisesRegex(KeyError, "mine"):
            tandem.run(3, body, device="cuda", deadline=20)

    def test_a_rank_keeps_its_thread(self):
        with tandem.World(2, device="cuda") as world:
            first, second = (world.run(lambda comm: threading.get_ident()) for _ in range(2))
        self.assertEqual(first, second)
        self.assertEqual(len({*first, threading.get_ident()}), 3)

    def test_ctrl_c(self):
        """Ends a rank that executes Python code, and one that waits."""
        def body(comm):
            if comm.rank == 1:
                return comm.barrier()
            threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            while True:
                time.sleep(0.01)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started us with &
        try:
            with self.assertRaises(KeyboardInterrupt):
                tandem.run(2, body, device="cuda", deadline=20)
        finally:
            signal.signal(signal.SIGINT, before)

    def test_init(self):
        with tandem.init(device="cuda") as world:
            self.assertEqual((world.comm().size, self.entered), (1, [0]))
        self.assertRaises(tandem.InvalidArgument, lambda: tandem.init(5, device="cuda"))


if __name__ == "__main__":
    unittest.main()
