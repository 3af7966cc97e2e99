"""JAX arrays, which are immutable: read in place; results are new arrays."""
import unittest
from unittest import mock

import numpy as np

import tandem
from tandem import _frameworks
from ranks import jax, on_ranks, rows_of, values

if jax:
    import jax.numpy as jnp


@unittest.skipUnless(jax, "JAX is not installed: tools/setup_python.sh fetches it")
class Jax(unittest.TestCase):
    def test_operators(self):
        def body(comm):
            x, w = values((12, 7), 1), values((5, 7), 2)
            for dtype, bound in (("float32", 1e-4), ("bfloat16", 5e-2)):
                local, weight = jnp.asarray(rows_of(x, comm), dtype), jnp.asarray(w, dtype)
                out = tandem.AgGemm(comm, 12, 5, 7, dtype)(local, weight)
                self.assertIsInstance(out, jax.Array)
                self.assertEqual(str(out.dtype), dtype)
                np.testing.assert_allclose(np.asarray(out, "f4"), x @ w.T, rtol=bound, atol=bound)

        on_ranks(body)

    def test_collectives(self):
        def body(comm):
            x = jnp.full((3, 2), 1.0)
            y = tandem.all_reduce(comm, x)
            self.assertIsInstance(y, jax.Array)
            self.assertEqual((float(x.sum()), float(y.sum())), (6, 6 * comm.size))
            self.assertEqual(tandem.all_gather(comm, x).shape, (3 * comm.size, 2))
            self.assertEqual(float(tandem.broadcast(comm, x + comm.rank, 0)[0, 0]), 1)
            for kind in (tandem.AllReduce, tandem.AllGather, tandem.ReduceScatter, tandem.AllToAll):
                made = kind(comm, x.shape)
                out = made(x)
                self.assertIsInstance(out, jax.Array)
                self.assertEqual((out.shape, float(x.sum())), (made.result_shape, 6))

        on_ranks(body)

    def test_results_as_on_gpus(self):
        """On a GPU JAX allocates results, which are written before any other code sees them.
        Simulated here on CPU ranks, as if x were on a GPU."""
        made, empty = [], _frameworks.empty

        def recorded(*given):
            made.append(empty(*given))
            return made[-1]

        def body(comm):
            x, w = values((12, 7), 1), values((5, 7), 2)
            local, weight = jnp.asarray(rows_of(x, comm)), jnp.asarray(w)
            out = tandem.AgGemm(comm, 12, 5, 7)(local, weight)
            np.testing.assert_allclose(out, x @ w.T, rtol=1e-4, atol=1e-4)
            dw = tandem.AgWgrad(comm, 12, 5, 7)(local, jnp.asarray(x @ w.T))  # accumulates
            np.testing.assert_allclose(dw, (x @ w.T).T @ x, rtol=1e-3, atol=1e-3)
            ones = jnp.ones((3, 2))
            total = tandem.all_reduce(comm, ones)
            again = tandem.AllReduce(comm, (3, 2))(ones)
            sent = tandem.broadcast(comm, ones + comm.rank)
            whole = tandem.all_gather(comm, ones)
            half = tandem.all_reduce(comm, ones.astype("bfloat16"))
            self.assertEqual([float(a.sum()) for a in (ones, total, again, sent, whole, half)],
                             [6, 6 * comm.size, 6 * comm.size, 6, 6 * comm.size, 6 * comm.size])
            layer = tandem.MoeLayer(comm, 2, 4, 3, comm.size)
            to = jnp.zeros((2, 1), "int32"), jnp.ones((2, 1))
            weights_of_rank = jnp.ones((6, 4)), jnp.ones((4, 3))
            moe, batch = layer.forward(jnp.ones((2, 4)), *to, *weights_of_rank)
            np.testing.assert_allclose(moe, np.full((2, 4), 3 * 16 / (1 + np.exp(-4))), rtol=1e-5)
            back = layer.backward(batch, jnp.ones((2, 4)), *weights_of_rank)
            for each in (out, dw, total, again, sent, whole, half, moe, *back):
                self.assertIsInstance(each, jax.Array)

        with mock.patch.object(_frameworks, "_is_on_gpu", lambda x: True), \
                mock.patch.object(_frameworks, "empty", recorded):
            on_ranks(body)
        self.assertTrue(made)
        self.assertEqual({type(each) for each in made}, {_frameworks.Fresh})

    def test_what_has_no_memory_is_refused_by_name(self):
        def calls(comm):
            yield lambda x: tandem.all_reduce(comm, x)
            yield lambda x: tandem.broadcast(comm, x)
            yield lambda x: tandem.all_gather(comm, x)
            yield lambda x: tandem.AllReduce(comm, (comm.size, 2))(x)
            yield lambda x: tandem.GemmAr(comm, comm.size, 3, 2)(x, jnp.ones((3, 2)))

        def body(comm):
            gone = jnp.ones((comm.size, 2)) + 1
            gone.delete()
            for call in calls(comm):
                for run in (jax.jit(call), jax.grad(lambda x, call=call: call(x).sum())):
                    with self.assertRaisesRegex(tandem.InvalidArgument, "x: .*[Tt]race"):
                        run(jnp.ones((comm.size, 2)))
                with self.assertRaisesRegex(tandem.InvalidArgument, "x: .*deleted"):
                    call(gone)

        on_ranks(body)

    def test_writing_is_refused(self):
        def body(comm):
            op = tandem.AgGemm(comm, 1, 1, 1)
            one = np.ones((1 if comm.rank == 0 else 0, 1), "f4")
            with self.assertRaisesRegex(tandem.InvalidArgument, "out.*read-only"):
                op(one, np.ones((1, 1), "f4"), jnp.ones((1, 1)))

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
