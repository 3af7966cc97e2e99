"""Arrays of JAX, which cannot be written: read where they lie, and new ones out."""
import unittest

import numpy as np

import tandem
from ranks import jax, on_ranks, rows_of, values

if jax:
    import jax.numpy as jnp


@unittest.skipUnless(jax, "JAX is not installed: tools/setup_python.sh fetches it")
class Jax(unittest.TestCase):
    def test_operators(self):
        def body(comm):
            x, w = values((12, 7), 1), values((5, 7), 2)
            for dtype, bound in (("float32", 1e-4), ("bfloat16", 5e-2)):
                mine, weight = jnp.asarray(rows_of(x, comm), dtype), jnp.asarray(w, dtype)
                out = tandem.AgGemm(comm, 12, 5, 7, dtype)(mine, weight)
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

    def test_writing_is_refused(self):
        def body(comm):
            op = tandem.AgGemm(comm, 1, 1, 1)
            one = np.ones((1 if comm.rank == 0 else 0, 1), "f4")
            with self.assertRaisesRegex(tandem.InvalidArgument, "out.*read-only"):
                op(one, np.ones((1, 1), "f4"), jnp.ones((1, 1)))

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
