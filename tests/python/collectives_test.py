"""Collectives against NumPy."""
import unittest

import numpy as np

import tandem
from ranks import ml_dtypes, on_ranks, rows_of, torch, values


class Collectives(unittest.TestCase):
    def test_all_reduce(self):
        def body(comm):
            for dtype in ("f4", "f2", "i4"):
                x = np.arange(7, dtype=dtype) + comm.rank
                self.assertIs(tandem.all_reduce(comm, x), x)
                want = np.arange(7) * comm.size + sum(range(comm.size))
                np.testing.assert_array_equal(x, want.astype(dtype))
            self.assertEqual(tandem.all_reduce(comm, np.array([comm.rank], "f4"), "max")[0],
                             comm.size - 1)
            if torch:
                t = torch.full((3, 2), 1.0, dtype=torch.bfloat16)
                self.assertIs(tandem.all_reduce(comm, t), t)
                self.assertEqual(t.float().sum().item(), 6 * comm.size)

        on_ranks(body)

    def test_all_gather_and_reduce_scatter(self):
        def body(comm):
            for rows in (0, 1, 5, 12):
                whole = np.arange(rows * 3, dtype="f4").reshape(rows, 3)
                got = tandem.all_gather(comm, rows_of(whole, comm))
                np.testing.assert_array_equal(got, whole)
                out = np.empty_like(whole)
                self.assertIs(tandem.all_gather(comm, rows_of(whole, comm), out), out)
                np.testing.assert_array_equal(out, whole)
                group = tandem.reduce_scatter(comm, whole)
                np.testing.assert_array_equal(group, rows_of(whole, comm) * comm.size)
                group = tandem.reduce_scatter(comm, whole + comm.rank, "max")
                np.testing.assert_array_equal(group, rows_of(whole, comm) + comm.size - 1)

        on_ranks(body)

    def test_all_to_all(self):
        def body(comm):
            counts = [(comm.rank + r) % 3 for r in range(comm.size)]
            x = np.concatenate([np.full((c, 2), 10 * comm.rank + r, "f4")
                                for r, c in enumerate(counts)])
            got = tandem.all_to_all(comm, x, counts)
            want = np.concatenate([np.full(((r + comm.rank) % 3, 2), 10 * r + comm.rank, "f4")
                                   for r in range(comm.size)])
            np.testing.assert_array_equal(got, want)
            even = tandem.all_to_all(comm, np.full(comm.size, comm.rank, "f4"))
            np.testing.assert_array_equal(even, np.arange(comm.size))

        on_ranks(body)

    def test_broadcast_send_recv(self):
        def body(comm):
            x = np.full(4, comm.rank, "i4")
            self.assertIs(tandem.broadcast(comm, x, comm.size - 1), x)
            self.assertEqual(x.tolist(), [comm.size - 1] * 4)
            if comm.size == 1:
                return
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            y = np.empty(2, "f4")
            if comm.rank == 0:
                tandem.send(comm, np.full(2, comm.rank, "f4"), right)
                tandem.recv(comm, y, left)
            else:
                tandem.recv(comm, y, left)
                tandem.send(comm, np.full(2, comm.rank, "f4"), right)
            self.assertEqual(y.tolist(), [left] * 2)

        on_ranks(body)

    def test_split(self):
        def body(comm):
            group = comm.split(comm.rank % 2)
            x = tandem.all_reduce(group, np.ones(1, "f4"))
            self.assertEqual(x[0], group.size)
            comm.barrier()

        on_ranks(body)

    def test_wire_formats(self):
        def body(comm):
            exact = values((8, 128), 1) * comm.size
            close = dict(rtol=0, atol=0.25 * comm.size)  # bounds are tested in tests/codec
            for codec in ("int8", "int6:g32", "mxfp8", "none"):
                x = values((8, 128), 1)
                self.assertIs(tandem.all_reduce(comm, x, codec=codec), x)
                np.testing.assert_allclose(x, exact, **close)
                group = tandem.reduce_scatter(comm, values((8, 128), 1), codec=codec)
                np.testing.assert_allclose(group, rows_of(exact, comm), **close)
                whole = tandem.all_gather(comm, rows_of(exact, comm), codec=codec)
                np.testing.assert_allclose(whole, exact, **close)
                local = np.repeat(values((1, 128), 2), comm.size, 0)
                np.testing.assert_allclose(tandem.all_to_all(comm, local, codec=codec), local, **close)
            residual = np.zeros((8, 128), "f4")
            tandem.all_reduce(comm, values((8, 128), 1), codec="int2", residual=residual)
            self.assertEqual(bool(np.abs(residual).sum()), comm.size > 1)
            for bad in ({"codec": "int9"}, {"codec": "int8", "op": "max"}, {"residual": residual}):
                with self.assertRaises(tandem.InvalidArgument):
                    tandem.all_reduce(comm, values((8, 128), 1), **bad)

        on_ranks(body)

    def test_objects_as_functions(self):
        """Collective objects give the bits of the functions, call after call."""
        def body(comm):
            rows = [tandem.shard_of(9, comm.size, r)[1] for r in range(comm.size)]
            counts = [(comm.rank + r) % 3 for r in range(comm.size)]
            local = (9, 128), (rows[comm.rank], 128), (sum(counts), 128)
            whole, shard, sent = (values(shape, 3 + comm.rank) for shape in local)
            for codec in (None, "int8", tandem.Wire("int4:g32")):
                reduce = tandem.AllReduce(comm, whole.shape, codec=codec)
                gather = tandem.AllGather(comm, shard.shape, codec=codec)
                scatter = tandem.ReduceScatter(comm, whole.shape, "f32", codec=codec)
                exchange = tandem.AllToAll(comm, sent.shape, "f32", counts, codec=codec)
                self.assertEqual(exchange.recv_counts, [(r + comm.rank) % 3 for r in range(comm.size)])
                self.assertEqual(exchange.result_shape, (sum(exchange.recv_counts), 128))
                for _ in range(2):
                    x = whole.copy()
                    self.assertIs(reduce(x), x)
                    np.testing.assert_array_equal(x, tandem.all_reduce(comm, whole.copy(), codec=codec))
                    for call, given, want in (
                            (gather, shard, tandem.all_gather(comm, shard, codec=codec)),
                            (scatter, whole, tandem.reduce_scatter(comm, whole, codec=codec)),
                            (exchange, sent, tandem.all_to_all(comm, sent, counts, codec=codec))):
                        np.testing.assert_array_equal(call(given), want)
                        out = np.empty_like(want)
                        self.assertIs(call(given, out), out)
                        np.testing.assert_array_equal(out, want)
            largest = tandem.AllReduce(comm, [2], "i32", op="max")
            self.assertEqual(largest(np.full(2, comm.rank, "i4")).tolist(), [comm.size - 1] * 2)
            residuals = [np.zeros((9, 128), "f4") for _ in range(2)]
            by_object = tandem.AllReduce(comm, (9, 128), codec="int2")(whole.copy(), residuals[0])
            by_function = tandem.all_reduce(comm, whole.copy(), codec="int2", residual=residuals[1])
            np.testing.assert_array_equal(by_object, by_function)
            np.testing.assert_array_equal(*residuals)
            self.assertEqual(tandem.AllReduce(comm, ())(np.ones((), "f4")), comm.size)
            if torch:
                t = torch.ones(3, 2, dtype=torch.bfloat16)
                self.assertIs(tandem.AllReduce(comm, t.shape, t.dtype)(t), t)
                self.assertEqual(t.float().sum().item(), 6 * comm.size)

        on_ranks(body)

    def test_objects_refuse(self):
        def body(comm):
            reduce = tandem.AllReduce(comm, (3, 2))
            for bad in (np.ones((2, 3), "f4"), np.ones((3, 2), "f2"), np.ones(3, "f4"), None):
                with self.assertRaisesRegex(tandem.InvalidArgument, "all_reduce: x"):
                    reduce(bad)
            scatter = tandem.ReduceScatter(comm, (4, 2))
            with self.assertRaisesRegex(tandem.InvalidArgument, "reduce_scatter: out"):
                scatter(np.ones((4, 2), "f4"), np.ones((5, 2), "f4"))
            for make in (lambda: tandem.AllReduce(comm, (-1,)), lambda: tandem.AllGather(comm, ()),
                         lambda: tandem.AllReduce(comm, (1,) * 5), lambda: tandem.AllReduce(comm, (2**60,)),
                         lambda: tandem.AllReduce(comm, (2,), op="mean"),
                         lambda: tandem.AllReduce(comm, (2,), op="max", codec="int8"),
                         lambda: tandem.AllToAll(comm, (comm.size,), "f32", [2] * comm.size),
                         lambda: tandem.AllToAll(comm, (1,), "f32", [])):
                with self.assertRaises(tandem.InvalidArgument):
                    make()
            if comm.size == 1:
                return
            for make in (lambda: tandem.AllReduce(comm, (comm.rank, 2)),
                         lambda: tandem.AllReduce(comm, (2,), op=("sum", "max")[comm.rank % 2]),
                         lambda: tandem.AllGather(comm, (2 + 2 * comm.rank,)),
                         lambda: tandem.AllToAll(comm, (4, comm.rank))):
                with self.assertRaises(tandem.Mismatch):
                    make()

        on_ranks(body)

    @unittest.skipUnless(ml_dtypes, "ml_dtypes is not installed: NumPy has no bfloat16")
    def test_a_bfloat16_of_numpy(self):
        def body(comm):
            x = np.ones(3, ml_dtypes.bfloat16)
            self.assertIs(tandem.all_reduce(comm, x), x)
            self.assertEqual(x.astype("f4").tolist(), [comm.size] * 3)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
