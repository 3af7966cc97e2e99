"""Invalid calls: named exceptions on every rank, and no crash. Threads only."""
import os
import signal
import threading
import unittest

import numpy as np

import tandem
from ranks import on_ranks, torch
from tandem import _core


def product(comm, m=4, n=3, k=5, **options):
    return tandem.GemmAr(comm, m, n, k, **options)


class Refused(unittest.TestCase):
    def refuse(self, pattern, call, kind=tandem.InvalidArgument):
        with self.assertRaisesRegex(kind, pattern):
            call()

    def test_operands(self):
        x, w = np.ones((4, 5), "f4"), np.ones((3, 5), "f4")
        frozen = np.ones((4, 3), "f4")
        frozen.flags.writeable = False

        def body(comm):
            op = product(comm)
            self.refuse("gemm_ar: x: dtype 'd'", lambda: op(x.astype("f8"), w))
            self.refuse("x", lambda: op(x.astype("f2"), w))
            self.refuse("x.*>f", lambda: op(x.astype(">f4"), w))
            self.refuse("x", lambda: op(x[:, :4], w))
            self.refuse("x", lambda: op(x.reshape(2, 2, 5), w))
            self.refuse("x", lambda: op(x[::-1], w))
            self.refuse("6 dimensions", lambda: op(x.reshape(4, 5, 1, 1, 1, 1), w))
            self.refuse("weight", lambda: op(x, w.T))
            self.refuse("weight", lambda: op(x, w[:2]))
            self.refuse("whole elements", lambda: op(
                np.ndarray((4, 5), "f4", b"0" * 200, 0, (21, 4)), w))
            self.refuse("out.*read-only", lambda: op(x, w, frozen))
            odd = np.frombuffer(bytes(81), "f4", 20, 1).reshape(4, 5)
            self.refuse("x: elements of 4 bytes at address.*multiple of 4", lambda: op(odd, w))
            self.refuse("out", lambda: op(x, w, np.ones((3, 4), "f4")))
            self.refuse("overlap", lambda: op(x, w, x[:, :3]))
            self.refuse("bias", lambda: op(x, w, bias=np.ones(3, "f4")))
            self.refuse("x: builtins.list: expected a tensor", lambda: op([[1.0]], w))
            self.refuse("x: builtins.NoneType", lambda: op(None, w))
            self.refuse("out: none given.*memoryview", lambda: op(memoryview(x), w))
            self.assertEqual(op(memoryview(x), w, np.ones((4, 3), "f4")).sum(),
                             12 * 5 * comm.size)

        on_ranks(body)

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_torch_operands(self):
        def body(comm):
            op = product(comm)
            x, w = torch.ones(4, 5), torch.ones(3, 5)
            grad = torch.ones(3, 5, requires_grad=True)
            self.refuse("weight: requires a gradient", lambda: op(x, grad))
            with torch.no_grad():
                self.assertEqual(op(x, grad).sum().item(), 60 * comm.size)
            self.refuse("x", lambda: op(x.to_sparse(), w))
            self.refuse("x", lambda: op(x.to(torch.float64), w))
            self.refuse("x", lambda: op(x.to(torch.complex64), w))
            self.refuse("x", lambda: op(torch.ones(4, 5, device="meta"), w))
            gone = torch.ones(4, 5)
            gone.storage().resize_(0)
            self.refuse("gemm_ar: x: ", lambda: op(gone, w))

        on_ranks(body)

    def test_construction(self):
        def body(comm):
            for arguments in ({"m": -1}, {"k": 2**62}, {"dtype": "f8"}, {"dtype": 7},
                              {"strategy": "best"}, {"chunks": -3}, {"dtype": "i32"}):
                self.refuse(".", lambda: product(comm, **arguments))
            with self.assertRaises(TypeError):
                product(comm, m=4.0)
            with self.assertRaises(TypeError):
                tandem.AgGemm(None, 1, 1, 1)

        on_ranks(body)

    def test_ranks_that_differ(self):
        def body(comm):
            self.refuse("gemm_ar", lambda: product(comm, m=4 + comm.rank), tandem.Mismatch)
            self.refuse("rank", lambda: tandem.all_reduce(comm, np.ones(2 + comm.rank, "f4")),
                        tandem.Mismatch)
            comm.barrier()

        on_ranks(body, [2, 3, 4])

    def test_worlds_of_gpus(self):
        """Without a GPU, or without CUDA in the build; tests/python/gpu covers the rest."""
        self.refuse("device 'tpu': expected cpu or cuda", lambda: tandem.run(1, print, device="tpu"))
        self.refuse("ranks_per_gpu 2 on the CPU", lambda: tandem.run(2, print, ranks_per_gpu=2))
        if _core._gpu_count() == 0:
            self.refuse("no CUDA|no GPU", lambda: tandem.run(2, print, device="cuda"), tandem.Unsupported)

    def test_every_number_of_every_call(self):
        """Numbers that are negative, or that no C++ integer holds, in each place that takes one."""
        bad = (-2**31 - 1, -2**63, 2**63 - 1, -2**63 - 1, 2**63, 2**70, 10**5000, -10**5000)
        world = tandem.World(2)
        comm, x = world.comm(0), np.ones((4, 5), "f4")
        calls = [("broadcast", "root", lambda n: tandem.broadcast(comm, x, n), -1),
                 ("send", "peer", lambda n: tandem.send(comm, x, n), -1),
                 ("recv", "peer", lambda n: tandem.recv(comm, x, n), -1),
                 ("split", "color", lambda n: comm.split(n), None),
                 ("split", "key", lambda n: comm.split(0, n), None),
                 ("", "ranks", lambda n: tandem.World(n), -1),
                 ("shard_of", "world", lambda n: tandem.shard_of(4, n, 0), -1),
                 ("shard_of", "rank", lambda n: tandem.shard_of(4, 2, n), -1)]
        for at in range(2):
            counts = lambda n, at=at: [n if i == at else 2 for i in range(2)]
            for name in "send_counts", "recv_counts":
                calls.append(("all_to_all", f"{name[:4]}", lambda n, name=name, counts=counts: tandem.all_to_all(
                    comm, x, **{"send_counts": [2, 2], "recv_counts": [2, 2], name: counts(n)}), -1))
            calls.append(("all_to_all", "send_counts",
                          lambda n, counts=counts: tandem.AllToAll(comm, (4, 5), send_counts=counts(n)), -1))
        for kind in "AllReduce", "AllGather", "ReduceScatter", "AllToAll":
            for at in range(3):
                shape = lambda n, at=at: [n if i == at else 4 for i in range(3)]
                op = {"AllReduce": "all_reduce", "AllGather": "all_gather",
                      "ReduceScatter": "reduce_scatter", "AllToAll": "all_to_all"}[kind]
                calls.append((op, "shape", lambda n, kind=kind, shape=shape: getattr(tandem, kind)(comm, shape(n)), -1))
        for kind, op in ("AgGemm", "ag_gemm"), ("GemmRs", "gemm_rs"), ("GemmAr", "gemm_ar"), ("AgWgrad", "ag_wgrad"):
            for name in "m", "n", "k":
                calls.append((op, name, lambda n, kind=kind, name=name: getattr(tandem, kind)(
                    comm, **{"m": 4, "n": 3, "k": 5, name: n}), -1))
            calls.append((op, "chunks", lambda n, kind=kind: getattr(tandem, kind)(
                comm, 4, 3, 5, chunks=n, strategy="overlapped"), -1))
        for name in "tokens", "hidden", "ffn", "experts", "top_k", "tp", "chunks":
            calls.append(("moe", name, lambda n, name=name: tandem.MoeLayer(
                comm, **{"tokens": 4, "hidden": 4, "ffn": 4, "experts": 2, name: n}), -1))
        for op, name, call, more in calls:
            for number in bad + ((more,) if more else ()):
                with self.subTest(op=op, name=name, number=hex(number)[:20]):
                    self.refuse(f"{op}.*{name}", lambda: call(number))
        world.close()

    def test_shapes_whose_product_is_no_integer(self):
        comm = tandem.World(1).comm()
        for kind in tandem.AllReduce, tandem.AllGather, tandem.ReduceScatter, tandem.AllToAll:
            self.refuse("shape .281474976710656, 281474976710656.: expected .* less than 2.63 bytes",
                        lambda: kind(comm, (2**48, 2**48)))
            self.refuse("shape", lambda: kind(comm, (2**48, 2**48, 0)))
        for size in 2**40, 2**62:
            self.refuse("ag_gemm: .*expected at most", lambda: tandem.AgGemm(comm, size, size, 4))
        x = np.ones((4, 5), "f4")
        self.refuse("all_to_all: recv_counts .*below 2.63", lambda: tandem.all_to_all(
            tandem.World(2).comm(0), x, [2, 2], [2**62, 2**62]))

    def test_one_array_of_all_ranks(self):
        for count in 4, 30000:
            shared, out = np.ones(count, "f4"), np.zeros((4, 3), "f4")

            def body(comm):
                self.refuse("all_reduce: data of rank 0 .* overlaps data of rank 1 ",
                            lambda: tandem.all_reduce(comm, shared))
                self.refuse("all_gather: out of rank 0 .* overlaps out of rank 1 ",
                            lambda: tandem.all_gather(comm, np.ones(count // comm.size, "f4"), shared))
                op = product(comm)
                self.refuse("gemm_ar: out of rank 0 .* overlaps out of rank 1 ",
                            lambda: op(np.ones((4, 5), "f4"), np.ones((3, 5), "f4"), out))
                self.assertEqual(tandem.all_reduce(comm, shared.copy())[0], comm.size)

            on_ranks(body, [2])

    def test_collectives(self):
        def body(comm):
            x = np.ones((4, 2), "f4")
            self.refuse("op 'mean'", lambda: tandem.all_reduce(comm, x, "mean"))
            self.refuse("root", lambda: tandem.broadcast(comm, x, 9))
            self.refuse("all_gather: x: no dim", lambda: tandem.all_gather(comm, np.float32(1)))
            self.refuse("counts", lambda: tandem.all_to_all(comm, x, [1] * 9))
            self.refuse("dtype", lambda: tandem.all_reduce(comm, np.ones(2, "?")))
            self.refuse("expected", lambda: tandem.shard_of(3, 2, 2))

        on_ranks(body)


class Endings(unittest.TestCase):
    def test_a_rank_that_never_arrives_is_named(self):
        def body(comm):
            if comm.rank != 1:
                comm.barrier("step 3")

        with self.assertRaises(tandem.Timeout) as caught:
            tandem.run(3, body, deadline=0.3)
        self.assertEqual((caught.exception.op, caught.exception.peer), ("step 3", 1))
        self.assertIn(caught.exception.rank, (0, 2))
        self.assertIsInstance(caught.exception, TimeoutError)

    def test_the_first_error_is_raised_and_ends_the_others(self):
        seen = []

        def body(comm):
            if comm.rank == 1:
                raise KeyError("wheel")
            try:
                comm.barrier()
            except tandem.Aborted as error:
                seen.append(str(error))
                raise

        with self.assertRaisesRegex(KeyError, "wheel"):
            tandem.run(3, body)
        self.assertEqual(len(seen), 2)
        self.assertIn("KeyError", seen[0])

    def test_aborted_names_the_rank_that_failed(self):
        seen = {}

        def body(comm):
            if comm.rank == 2:
                raise KeyError("wheel")
            try:
                comm.barrier()
            except tandem.Aborted as error:
                seen[comm.rank] = error.origin
                raise

        with self.assertRaises(KeyError):
            tandem.run(4, body)
        self.assertEqual(set(seen.values()), {2})

    def test_texts_that_have_no_utf8(self):
        def body(comm):
            if comm.rank == 1:
                raise ValueError("a lone \udcff")
            comm.barrier("another \udcfe")

        with self.assertRaisesRegex(ValueError, "a lone"):
            tandem.run(2, body)
        with tandem.World(2) as world:
            world.comm(1).abort("why \udcff")
            with self.assertRaisesRegex(tandem.Aborted, r"why .udcff"):
                world.comm(0).barrier()

    def test_messages_are_one_line_without_control_characters(self):
        for control in map(chr, [*range(1, 32), *range(0x7f, 0xa0)]):
            with tandem.World(2) as world:
                world.comm(1).abort(f"why {control}[31m é")
                with self.assertRaisesRegex(tandem.Aborted, "why [ ?]\\[31m é$"):
                    world.comm(0).barrier()
                with self.assertRaisesRegex(tandem.InvalidArgument, "'m[ ?]ean'"):
                    tandem.all_reduce(world.comm(0), np.ones(1, "f4"), f"m{control}ean")

    def test_openmp_threads_of_the_caller_stay(self):
        before = _core._kernel_threads()
        try:
            _core._set_kernel_threads(before + 3)
            inside = tandem.run(1, lambda comm: _core._kernel_threads())[0]
            self.assertLessEqual(inside, before + 3)
            self.assertEqual(_core._kernel_threads(), before + 3)
            with tandem.init():
                pass
            self.assertEqual(_core._kernel_threads(), before + 3)
            _core._set_kernel_threads(1)
            if not os.environ.get("TANDEM_THREADS"):
                self.assertEqual(tandem.run(1, lambda comm: _core._kernel_threads()), [1])
        finally:
            _core._set_kernel_threads(before)

    def test_a_forked_child(self):
        def product_of(comm):
            ones = np.ones((256, 256), "f4")
            return product(comm, 256, 256, 256)(ones, ones)[0, 0]

        before = _core._kernel_threads()
        _core._set_kernel_threads(3)
        self.addCleanup(_core._set_kernel_threads, before)
        with tandem.World(2) as world:
            world.run(lambda comm: tandem.all_reduce(comm, np.ones(3, "f4")))
            self.assertEqual(tandem.run(1, product_of), [256])
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                said = b"nothing raised"
                try:
                    world.comm(0).barrier()
                except tandem.InvalidArgument as error:
                    said = str(error).encode()
                signal.alarm(20)
                said += b" %d" % tandem.run(1, product_of)[0]
                os.write(write, said)
                os._exit(0)
            os.waitpid(child, 0)
            said = os.read(read, 4000).decode()
            self.assertIn("its communicator belongs to the process that forked this one", said)
            self.assertTrue(said.endswith(" 256"), said)

    def test_use_after_close(self):
        world = tandem.World(1)
        comm = world.comm(0)
        op = product(comm)
        group = comm.split(0)
        world.close()
        world.close()
        self.assertTrue(world.closed and comm.closed and group.closed)
        x, w = np.ones((4, 5), "f4"), np.ones((3, 5), "f4")
        for call in (lambda: op(x, w), lambda: op.strategy, lambda: comm.barrier(),
                     lambda: tandem.all_reduce(comm, x), lambda: product(comm),
                     lambda: comm.split(0), lambda: group.barrier(), lambda: world.comm(0),
                     lambda: comm.link, lambda: comm.deadline):
            with self.assertRaisesRegex(tandem.InvalidArgument, "closed"):
                call()
        repr(op), repr(comm), repr(world)

    def test_one_thread_at_a_time(self):
        with tandem.World(2, deadline=20) as world:
            first, second = world.comm(0), world.comm(1)
            waiter = threading.Thread(target=first.barrier)
            waiter.start()
            refused = 0
            while waiter.is_alive() and not refused:
                try:
                    first.deadline = 20
                    first.split(0)
                except tandem.InvalidArgument as error:
                    self.assertIn("another thread", str(error))
                    refused += 1
            with self.assertRaisesRegex(tandem.InvalidArgument, "another thread"):
                world.close()
            second.barrier()
            waiter.join()
            self.assertEqual(refused, 1)

    def test_worlds(self):
        for bad in (0, -1):
            with self.assertRaisesRegex(tandem.InvalidArgument, "ranks"):
                tandem.World(bad)
        with self.assertRaises(tandem.InvalidArgument):
            tandem.World(1, link="fast")
        with self.assertRaises(tandem.InvalidArgument):
            tandem.World(1, deadline=-1)
        with self.assertRaises(TypeError):
            tandem.World("two")
        with tandem.World(2) as world:
            for bad in (None, 2, -1):
                with self.assertRaisesRegex(tandem.InvalidArgument, "rank"):
                    world.comm(bad)
        with tandem.init() as world:
            self.assertEqual((world.size, world.ranks, world.comm().rank), (1, [0], 0))

    def test_an_emulated_link(self):
        def body(comm):
            self.assertIn("emulated", comm.link)
            self.assertEqual(tandem.all_reduce(comm, np.ones(3, "f4")).tolist(), [2] * 3)

        tandem.run(2, body, link="1GB/s,20us")


if __name__ == "__main__":
    unittest.main()
