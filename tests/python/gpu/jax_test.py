"""JAX arrays on GPU ranks: read in place once they are ready; results are new arrays with the bits
of PyTorch's."""
import os
import unittest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX allocates most of each GPU

import numpy as np
import torch

import tandem
from gpu_ranks import DEVICE, module, on_gpu, on_ranks, rows_of, run, values
from tandem import _core

jax = module("jax")


def gpus():
    """JAX's GPUs, or the reason why there are none."""
    if not jax:
        return "JAX is not installed"
    try:
        return jax.devices("gpu")
    except RuntimeError as error:
        return f"JAX {jax.__version__} has no GPU backend: {error}"


GPUS = gpus() if DEVICE == "cuda" else None
WHY_NOT = GPUS if isinstance(GPUS, str) else None
if jax:
    import jax.numpy as jnp

M, N, K = 64, 48, 128


def to_jax(comm, tensor):
    """A torch tensor's values as a JAX array on the rank's GPU."""
    gpu = GPUS[int(comm.device.split(":")[1])]
    return jax.device_put(np.asarray(tensor.float().cpu()), gpu).astype(str(tensor.dtype).split(".")[1])


@on_gpu
@unittest.skipIf(WHY_NOT, WHY_NOT)
class Jax(unittest.TestCase):
    def same(self, got, want):
        """Asserts equal bits and device as a torch tensor."""
        self.assertIsInstance(got, jax.Array)
        self.assertEqual([device.platform for device in got.devices()], ["gpu"])
        self.assertEqual(got.dtype.name, str(want.dtype).split(".")[1])
        np.testing.assert_array_equal(np.asarray(got.astype("float32")), want.float().cpu().numpy())

    def test_addresses(self):
        def body(comm):
            x = to_jax(comm, values(comm, (5, 8), 1, torch.bfloat16))
            self.assertEqual(_core._address(x), x.unsafe_buffer_pointer())

        run(1, body)

    def test_products(self):
        def body(comm):
            for dtype in (torch.float32, torch.bfloat16):
                x, w = values(comm, (M, K), 1 + comm.rank, dtype), values(comm, (N, K), 2, dtype)
                local, dy = rows_of(x, comm), values(comm, (M, N), 3, dtype)
                for kind, first, second in ((tandem.AgGemm, local, w), (tandem.GemmRs, x, w), (tandem.GemmAr, x, w),
                                            (tandem.AgWgrad, local, dy)):
                    op = kind(comm, M, N, K, dtype)
                    want = op(first, second)
                    for _ in range(3):  # enqueued, captured, replayed
                        self.same(op(to_jax(comm, first), to_jax(comm, second)), want)

        on_ranks(body)

    def test_collectives(self):
        def body(comm):
            x = values(comm, (4 * comm.size, 32), comm.rank, torch.float32)
            array = to_jax(comm, x)
            for kind in (tandem.AllGather, tandem.ReduceScatter, tandem.AllToAll):
                op = kind(comm, x.shape)
                self.same(op(array), op(x))
            self.same(tandem.all_gather(comm, array), tandem.all_gather(comm, x))
            self.same(tandem.reduce_scatter(comm, array), tandem.reduce_scatter(comm, x))
            self.same(tandem.all_to_all(comm, array), tandem.all_to_all(comm, x))
            self.same(tandem.broadcast(comm, array), tandem.broadcast(comm, x.clone()))
            self.same(tandem.all_reduce(comm, array, codec="int8"), tandem.all_reduce(comm, x.clone(), codec="int8"))
            self.same(tandem.AllReduce(comm, x.shape)(array), tandem.all_reduce(comm, x.clone()))
            self.same(array, x)  # unchanged

        on_ranks(body)

    def test_experts(self):
        def body(comm):
            count = 4 * comm.size
            layer = tandem.MoeLayer(comm, 16, 64, 64, count, 2, dtype="bf16", backward=True)
            x, dout = (values(comm, (16, 64), seed + comm.rank, torch.bfloat16) for seed in (1, 50))
            experts = values(comm, (16, count), 9 + comm.rank, torch.float32).argsort(1)[:, :2].int().contiguous()
            weights = values(comm, (16, 2), 20 + comm.rank, torch.float32)
            local = [values(comm, shape, 5, torch.bfloat16) / 8 for shape in ((4 * 2 * 64, 64), (4 * 64, 64))]
            out, batch = layer.forward(x, experts, weights, *local)
            want = [out, *layer.backward(batch, dout, *local)]
            arrays = [to_jax(comm, t) for t in (x, experts, weights, *local, dout)]
            self.assertEqual(arrays[1].dtype.name, "int32")
            out, batch = layer.forward(*arrays[:5])
            found = [out, *layer.backward(batch, arrays[5], *arrays[3:5])]
            for got, right in zip(found[:3], want):
                self.same(got, right)
            for got, right in zip(found[3:], want[3:]):
                np.testing.assert_allclose(np.asarray(got), right.cpu().numpy(), rtol=1e-4, atol=1e-5)

        on_ranks(body)

    def test_arrays_that_come_late_and_go_early(self):
        """Operands that JAX is still computing at the call, and whose memory it reuses after the
        call has returned; results that it computes on."""
        def body(comm):
            gpu = GPUS[int(comm.device.split(":")[1])]
            op = tandem.GemmAr(comm, M, N, K)

            @jax.jit
            def late(x):
                y = jax.lax.fori_loop(0, 200, lambda _, y: y @ y / 256, jnp.ones((256, 256), x.dtype))
                return x * y[0, 0]

            weight = jax.device_put(np.ones((N, K), "f4"), gpu)
            for step in range(20):
                y = op(late(jax.device_put(np.full((M, K), step + 1, "f4"), gpu)), weight)
                spoilt = jax.device_put(np.full((M, K), np.nan, "f4"), gpu) * 2
                sums = (y * 2).sum(axis=1)
                np.testing.assert_array_equal(np.asarray(sums), np.full(M, 2 * N * K * comm.size * (step + 1), "f4"))
                del spoilt

        on_ranks(body)

    def test_what_is_refused(self):
        def body(comm):
            op = tandem.GemmAr(comm, M, N, K)
            x, w = (to_jax(comm, values(comm, shape, 1, torch.float32)) for shape in ((M, K), (N, K)))
            want = np.asarray(op(x, w))

            def refused(pattern, call):
                with self.assertRaisesRegex(tandem.InvalidArgument, pattern):
                    call()

            refused("out.*read-only", lambda: op(x, w, to_jax(comm, torch.zeros(M, N))))
            refused("gemm_ar: x", lambda: op(jax.device_put(x, jax.devices("cpu")[0]), w))
            refused("gemm_ar: x", lambda: op(x[:, :8], w))
            refused("gemm_ar: x", lambda: op(x.astype("int32"), w))
            refused("encode: x.*expected a tensor of PyTorch's or CuPy's", lambda: tandem.Wire("int8").encode(x))
            gone = x + 1
            gone.delete()
            refused("gemm_ar: x", lambda: op(gone, w))
            np.testing.assert_array_equal(np.asarray(op(x, w)), want)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
