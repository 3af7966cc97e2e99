"""Overlap operators against NumPy, for every framework, dtype and number of ranks."""
import unittest

import numpy as np

import tandem
from ranks import assert_same, frameworks, on_ranks, rows_of, tolerance, values, torch

SHAPES = [(12, 5, 7), (64, 32, 48), (3, 16, 8), (1, 1, 1), (33, 40, 24)]


def rounded(a, make, back):
    """Rounds the array to the framework's dtype."""
    return back(make(np.ascontiguousarray(a)))


def summed(comm, make, back, m, n, k):
    """x and weight of this rank, and of all ranks side by side."""
    operands = [(rounded(values((m, k), r), make, back), rounded(values((n, k), 50 + r), make, back))
                for r in range(comm.size)]
    a, b = (np.concatenate(each, axis=1) for each in zip(*operands))
    return *map(make, operands[comm.rank]), a, b


class Products(unittest.TestCase):
    def check(self, got, a, b, dtype, bias=0):
        want = a @ b.T + bias
        error = np.abs(got - want) - tolerance(dtype, a, b) * 2
        self.assertLessEqual(error.max(initial=-1), 0, f"{dtype} {a.shape} {b.shape}")

    def each(self, body):
        for framework in frameworks():
            for shape in SHAPES:
                for strategy in ("serial", "overlapped"):
                    on_ranks(lambda comm: body(comm, framework, *shape, strategy))

    def test_ag_gemm(self):
        def body(comm, framework, m, n, k, strategy):
            name, make, back, dtype = framework
            x = rounded(values((m, k), 1), make, back)
            w = rounded(values((n, k), 2 + comm.rank), make, back)
            b = rounded(values((n,), 9), make, back)
            local, weight = make(rows_of(x, comm)), make(w)
            op = tandem.AgGemm(comm, m, n, k, dtype, strategy=strategy)
            out = op(local, weight)
            self.assertIs(type(out), type(local))
            self.assertEqual(out.dtype, local.dtype)
            self.check(back(out), x, w, dtype)
            again = make(np.zeros((m, n), "f4"))
            self.assertIs(op(local, weight, again), again)
            self.assertTrue((back(again) == back(out)).all())
            biased = tandem.AgGemm(comm, m, n, k, dtype, bias=True, strategy=strategy)
            self.check(back(biased(local, weight, bias=make(b))), x, w, dtype, b)

        self.each(body)

    def test_gemm_rs(self):
        def body(comm, framework, m, n, k, strategy):
            name, make, back, dtype = framework
            x, w, a, b = summed(comm, make, back, m, n, k)
            op = tandem.GemmRs(comm, m, n, k, dtype, strategy=strategy)
            got = back(op(x, w))
            self.check(got, rows_of(a, comm), b, dtype)

        self.each(body)

    def test_gemm_ar(self):
        def body(comm, framework, m, n, k, strategy):
            name, make, back, dtype = framework
            x, w, a, b = summed(comm, make, back, m, n, k)
            op = tandem.GemmAr(comm, m, n, k, dtype, strategy=strategy)
            self.check(back(op(x, w)), a, b, dtype)

        self.each(body)

    def test_ag_wgrad(self):
        def body(comm, framework, m, n, k, strategy):
            name, make, back, dtype = framework
            x = rounded(values((m, k), 1), make, back)
            dy = rounded(values((m, n), 2 + comm.rank), make, back)
            op = tandem.AgWgrad(comm, m, n, k, dtype, strategy=strategy)
            dw = op(make(rows_of(x, comm)), make(dy))
            self.assertEqual(str(dw.dtype).split(".")[-1], "float32")
            self.check(back(dw), dy.T, x.T, dtype)
            once = back(dw).copy()
            self.assertIs(op(make(rows_of(x, comm)), make(dy), dw), dw)
            np.testing.assert_allclose(back(dw), 2 * once, rtol=1e-4, atol=1e-4)

        self.each(body)

    def test_codec(self):
        """Encoded rows give equal bits under every strategy, and results near the exact product."""
        def body(comm):
            m, n, k = 9, 64, 96
            x, w = values((m, k), 1), values((n, k), 2)
            xs = [values((m, k), 10 + r) for r in range(comm.size)]
            ws = [values((n, k), 50 + r) for r in range(comm.size)]
            whole = sum(a @ b.T for a, b in zip(xs, ws))
            # For each operator: this rank's x and weight, the exact result, the max error.
            cases = {
                tandem.AgGemm: (rows_of(x, comm), w, x @ w.T, np.abs(x).max() * np.abs(w).sum(1).max()),
                tandem.GemmRs: (xs[comm.rank], ws[comm.rank], rows_of(whole, comm),
                                comm.size * max(np.abs(a @ b.T).max() for a, b in zip(xs, ws))),
                tandem.GemmAr: (xs[comm.rank], ws[comm.rank], whole,
                                3 * comm.size * max(np.abs(a @ b.T).max() for a, b in zip(xs, ws))),
            }
            for make, (local, weight, want, size) in cases.items():
                for codec, bound in (("int8", 0.005), ("int4:g32", 0.08), ("lossless", 0)):
                    got = [make(comm, m, n, k, codec=codec, strategy=strategy, chunks=chunks)(local, weight)
                           for strategy, chunks in (("serial", 0), ("overlapped", 1), ("overlapped", 3))]
                    for other in got[1:]:
                        assert_same(got[0], other, 2 * size * bound + 1e-3)
                    error = np.abs(got[0] - want).max(initial=0)
                    self.assertLessEqual(error, size * bound + 1e-3)
                    if codec == "int4:g32" and comm.size > 1:
                        uncompressed = make(comm, m, n, k, strategy="serial")(local, weight)
                        self.assertTrue((uncompressed != got[0]).any())
                either = make(comm, m, n, k, codec="int8", allow_uncompressed=True)(local, weight)
                self.assertLessEqual(np.abs(either - want).max(initial=0), size * 0.005 + 1e-3)
                for bad in ({"codec": "int9"}, {"codec": "int8:g48"}, {"allow_uncompressed": True}):
                    with self.assertRaises(tandem.InvalidArgument):
                        make(comm, m, n, k, **bad)

        on_ranks(body)

    def test_gathered_rows(self):
        def body(comm):
            for name, make, back, dtype in frameworks():
                x = rounded(values((12, 7), 1), make, back)
                op = tandem.AgGemm(comm, 12, 5, 7, dtype, keep_gathered=True)
                local = make(rows_of(x, comm))
                op(local, make(values((5, 7), 2)))
                got = op.gathered(local)
                self.assertIs(type(got), type(local))
                np.testing.assert_array_equal(back(got), x)
                out = make(np.zeros((12, 7), "f4"))
                self.assertIs(op.gathered(local, out), out)
                np.testing.assert_array_equal(back(out), x)
                remote = op.gathered(local, make(np.full((12, 7), 9, "f4")), local=False)
                np.testing.assert_array_equal(rows_of(back(remote), comm), np.full_like(rows_of(x, comm), 9))
                others = np.setdiff1d(np.arange(12), rows_of(np.arange(12), comm))
                np.testing.assert_array_equal(back(remote)[others], x[others])
                for bad in (make(np.zeros((7, 12), "f4")), make(np.zeros((12, 14), "f4"))[:, ::2]):
                    with self.assertRaisesRegex(tandem.InvalidArgument, "gathered: out"):
                        op.gathered(local, bad)
                with self.assertRaisesRegex(tandem.InvalidArgument, "keep_gathered"):
                    tandem.AgGemm(comm, 12, 5, 7, dtype).gathered(local)

        on_ranks(body)

    def test_add_norm(self):
        def body(comm):
            m, n, k = 9, 16, 24
            x, w = values((m, k), 1 + comm.rank), values((n, k), 20 + comm.rank)
            residual, gain = values((m, n), 40), values((n,), 41)
            want = residual + sum(values((m, k), 1 + r) @ values((n, k), 20 + r).T for r in range(comm.size))
            normed = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-5) * gain
            op = tandem.GemmAr(comm, m, n, k, add_norm=True)
            out, hidden = op(x, w, residual=residual, gain=gain)
            np.testing.assert_allclose(hidden, want, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(out, normed, rtol=1e-3, atol=1e-3)
            again, stream = np.empty_like(out), residual.copy()
            got = op(x, w, again, residual=stream, gain=gain, hidden=stream)
            self.assertTrue(got[0] is again and got[1] is stream)
            np.testing.assert_array_equal(again, out)
            np.testing.assert_array_equal(stream, hidden)
            if torch:
                got = op(*map(torch.tensor, (x, w)), residual=torch.tensor(residual), gain=torch.tensor(gain))
                np.testing.assert_array_equal(got[0].numpy(), out)
            for bad in ({}, {"residual": residual}, {"gain": gain}, {"residual": residual, "gain": gain[:3]},
                        {"residual": residual, "gain": gain, "eps": -1.0}):
                with self.assertRaises(tandem.InvalidArgument):
                    op(x, w, **bad)
            with self.assertRaises(tandem.InvalidArgument):
                tandem.GemmAr(comm, m, n, k)(x, w, residual=residual, gain=gain)

        on_ranks(body)

    def test_transposed_weight(self):
        def body(comm):
            w = values((7, 5), 3)  # [K, N]
            x = values((12, 7), 1)
            op = tandem.AgGemm(comm, 12, 5, 7, weight_kn=True)
            np.testing.assert_allclose(op(rows_of(x, comm), w.T), x @ w, rtol=1e-4, atol=1e-5)

        on_ranks(body)

    def test_the_tuner_chooses(self):
        def body(comm):
            op = tandem.GemmAr(comm, 8, 16, 16)
            self.assertIn(op.strategy, ("serial", "overlapped"))
            self.assertEqual((op.m, op.n, op.k, op.dtype), (8, 16, 16, tandem.DType.f32))
            self.assertIs(op.comm.__class__, tandem.Comm)

        on_ranks(body)

    def test_memory_is_used_where_it_lies(self):
        """A call writes into the caller's memory, through any view of it."""
        def body(comm):
            memory = bytearray(4 * 12 * 5)
            op = tandem.AgGemm(comm, 12, 5, 7)
            x, w = values((12, 7), 1), np.ones((5, 7), "f4")
            view = np.frombuffer(memory, "f4").reshape(12, 5)
            op(rows_of(x, comm), w, view)
            np.testing.assert_allclose(np.frombuffer(memory, "f4").reshape(12, 5), x @ w.T,
                                       rtol=1e-4, atol=1e-5)
            wide = np.zeros((12, 11), "f4")
            op(rows_of(x, comm), w, wide[:, 2:7])
            np.testing.assert_array_equal(wide[:, 2:7], view)
            self.assertEqual(np.abs(wide[:, :2]).sum() + np.abs(wide[:, 7:]).sum(), 0)
            if torch:
                out = torch.zeros(12, 5)
                before = out.data_ptr()
                self.assertIs(op(torch.tensor(rows_of(x, comm)), torch.tensor(w), out), out)
                self.assertEqual(out.data_ptr(), before)
                np.testing.assert_array_equal(out.numpy(), view)

        on_ranks(body)

    def test_dtypes_by_any_name(self):
        names = ["f32", "float32", tandem.DType.f32, np.float32, np.dtype("f4")]
        if torch:
            names.append(torch.float32)

        def body(comm):
            for name in names:
                self.assertEqual(tandem.GemmAr(comm, 2, 2, 2, name).dtype, tandem.DType.f32)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
