"""Overlap operators and collectives on torch.cuda and CuPy tensors, against torch."""
import unittest

import torch

import tandem
from gpu_ranks import DEVICE, assert_product, cupy, dtypes, on_gpu, on_ranks, rows_of, values
from tandem import _core

M, N, K = 96, 64, 128


def shards(comm, dtype, seed=1):
    """x [M, size * K] and weight [N, size * K] of all ranks, and this rank's columns of both."""
    x, weight = (values(comm, (rows, comm.size * K), seed + i, dtype) for i, rows in enumerate((M, N)))
    local = slice(comm.rank * K, (comm.rank + 1) * K)
    return x, weight, x[:, local].contiguous(), weight[:, local].contiguous()


class Products(unittest.TestCase):
    def test_gather(self):
        def body(comm):
            for dtype in dtypes():
                for m in (M, 7, 2):
                    x, weight = values(comm, (m, K), 3, dtype), values(comm, (N, K), 4 + comm.rank, dtype)
                    op = tandem.AgGemm(comm, m, N, K, dtype, keep_gathered=True)
                    local = rows_of(x, comm)
                    out = op(local, weight)
                    self.assertIs(type(out), torch.Tensor)
                    self.assertEqual((out.dtype, out.device, tuple(out.shape)), (dtype, x.device, (m, N)))
                    assert_product(out, x, weight)
                    self.assertTrue(torch.equal(op.gathered(local), x))
                    again = torch.empty_like(out)
                    self.assertIs(op(local, weight, again), again)
                    self.assertTrue(torch.equal(again, out))

        on_ranks(body)

    def test_scatter(self):
        def body(comm):
            for dtype in dtypes():
                x, weight, local, columns = shards(comm, dtype)
                op = tandem.GemmRs(comm, M, N, K, dtype)
                for _ in range(3):  # enqueued, captured, replayed
                    assert_product(op(local, columns), rows_of(x, comm), weight, ranks=comm.size)

        on_ranks(body)

    def test_sum(self):
        def body(comm):
            for dtype in dtypes():
                x, weight, local, columns = shards(comm, dtype)
                bias = values(comm, (N,), 9, dtype)
                op = tandem.GemmAr(comm, M, N, K, dtype, bias=True)
                out = torch.empty(M, N, dtype=dtype, device=comm.device)
                self.assertIs(op(local, columns, out, bias), out)
                assert_product(out, x, weight, bias, comm.size)
                self.assertTrue(torch.equal(op(local, columns, bias=bias), out))

        on_ranks(body)

    def test_weight_kn(self):
        def body(comm):
            for dtype in dtypes():
                x, weight, local, columns = shards(comm, dtype)
                op = tandem.GemmRs(comm, M, N, K, dtype, weight_kn=True)
                kn = columns.t().contiguous()
                assert_product(op(local, kn.t()), rows_of(x, comm), weight, ranks=comm.size)

        on_ranks(body)

    def test_weight_gradient(self):
        def body(comm):
            for dtype in dtypes():
                x, dy = values(comm, (M, K), 3, dtype), values(comm, (M, N), 4 + comm.rank, dtype)
                got = tandem.AgWgrad(comm, M, N, K, dtype)(rows_of(x, comm), dy)
                self.assertEqual(got.dtype, torch.float32)
                assert_product(got, dy.t(), x.t())

        on_ranks(body)

    def test_norm(self):
        def body(comm):
            dtype = dtypes()[-1]
            x, weight, local, columns = shards(comm, dtype)
            residual, gain = values(comm, (M, N), 5, dtype), values(comm, (N,), 6, dtype)
            op = tandem.GemmAr(comm, M, N, K, dtype, add_norm=True)
            out, hidden = op(local, columns, residual=residual, gain=gain)
            want = x.double() @ weight.double().t() + residual.double()
            normed = want * (want.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double()
            torch.testing.assert_close(hidden.double(), want, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(out.double(), normed, rtol=2e-2, atol=2e-2)

        on_ranks(body)

    def test_addresses(self):
        def body(comm):
            for dtype in dtypes():
                x = values(comm, (8, 6), 1, dtype)
                for view in (x, x.t(), x[1:, 2:], x[::2], x[0], x.expand(2, 8, 6)):
                    self.assertEqual(_core._address(view), view.data_ptr())

        on_ranks(body, [1])


class Collectives(unittest.TestCase):
    def check(self, dtype, comm):
        def of(rank, seed=0):
            return (values(comm, (12, 8), 10 * seed + rank, torch.float32) * 8).round().to(dtype)

        total = sum(of(r).double() for r in range(comm.size))
        x = of(comm.rank)
        self.assertIs(tandem.all_reduce(comm, x), x)
        self.assertTrue(torch.equal(x.double(), total))  # small integers are exact
        scattered = tandem.reduce_scatter(comm, of(comm.rank))
        self.assertTrue(torch.equal(scattered.double(), rows_of(total, comm)))
        whole = tandem.all_gather(comm, rows_of(of(7), comm))
        self.assertTrue(torch.equal(whole, of(7)))
        self.assertEqual(whole.device, x.device)
        sent = tandem.broadcast(comm, of(comm.rank), comm.size - 1)
        self.assertTrue(torch.equal(sent, of(comm.size - 1)))
        begin, count = tandem.shard_of(12, comm.size, comm.rank)
        exchanged = tandem.all_to_all(comm, of(comm.rank))
        gathered = [of(r)[begin:begin + count] for r in range(comm.size)]
        self.assertTrue(torch.equal(exchanged, torch.cat(gathered)))

    def test_functions(self):
        def body(comm):
            for dtype in dtypes():
                self.check(dtype, comm)

        on_ranks(body)

    def test_objects(self):
        def body(comm):
            x = values(comm, (12, 8), comm.rank, torch.float32)
            self.assertTrue(torch.equal(tandem.AllGather(comm, (12, 8))(x), tandem.all_gather(comm, x)))
            self.assertTrue(torch.equal(
                tandem.ReduceScatter(comm, (12, 8))(x), tandem.reduce_scatter(comm, x)))
            want = tandem.all_reduce(comm, x.clone())
            self.assertIs(tandem.AllReduce(comm, (12, 8))(x), x)
            self.assertTrue(torch.equal(x, want))

        on_ranks(body)

    def test_pairs(self):
        def body(comm):
            x = values(comm, (5, 8), comm.rank, torch.float32)
            if comm.rank == 0:
                tandem.send(comm, x, 1)
            elif comm.rank == 1:
                tandem.recv(comm, x, 0)
                self.assertTrue(torch.equal(x, values(comm, (5, 8), 0, torch.float32)))

        on_ranks(body, [2])


@unittest.skipUnless(cupy, "CuPy is not installed")
class Cupy(unittest.TestCase):
    def test_products(self):
        def body(comm):
            for dtype in (torch.float32, torch.float16):
                x, weight = values(comm, (M, K), 3, dtype), values(comm, (N, K), 4 + comm.rank, dtype)
                cupy_operands = [cupy.array(t.cpu().numpy()) for t in (rows_of(x, comm), weight)]
                op = tandem.AgGemm(comm, M, N, K, "f32" if dtype == torch.float32 else "f16")
                out = op(*cupy_operands)
                self.assertIsInstance(out, cupy.ndarray)
                self.assertEqual(out.shape, (M, N))
                assert_product(torch.from_numpy(cupy.asnumpy(out)).to(comm.device), x, weight)
                again = cupy.empty_like(out)
                self.assertIs(op(*cupy_operands, again), again)
                self.assertTrue((again == out).all())

        on_ranks(body)

    def test_addresses_and_sums(self):
        def body(comm):
            x = cupy.arange(24, dtype="f4").reshape(4, 6)
            for view in (x, x.T, x[1:, 2:]):
                self.assertEqual(_core._address(view), view.data.ptr)
            self.assertIs(tandem.all_reduce(comm, x), x)
            self.assertEqual(float(x.sum()), comm.size * 276)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
