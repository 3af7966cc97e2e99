"""Products of frameworks' linears (tandem/torch/_linears.py) against one process, on CPU ranks."""
import itertools
import unittest

import group

group.require(None)

import torch
import torch.distributed as dist

import tandem
import tandem.torch
from tandem.torch import _fused, _linears, _receipts

BATCH, N, K = 3, 20, 12
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-14}


def values(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Linears(unittest.TestCase):
    def setUp(self):
        _fused.clear_plans()
        _receipts.clear()

    def groups(self):
        """The world and, on four ranks, groups of two."""
        yield dist.group.WORLD
        if dist.get_world_size() == 4:
            pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            yield pairs[dist.get_rank() % 2]

    def cases(self):
        """Group, dtype and shape [rows, ...] of a rank."""
        return itertools.product(self.groups(), DTYPES, ((5,), (4, BATCH)))

    def same(self, got, expected, dtype):
        scale = float(expected.abs().max())
        self.assertEqual(got.shape, expected.shape)
        self.assertLessEqual(float((got.double() - expected.double()).abs().max()), BOUND[dtype] * scale)

    def ran(self, op, dtype):
        rows = [row["ran"] for row in tandem.torch.report()
                if row["op"] == op and row["dtype"] == str(dtype).replace("torch.", "")]
        # Of these dtypes tandem's CPU operators take two.
        self.assertEqual(set(rows) == {"torch"}, dtype in (torch.float16, torch.float64), rows)

    def shards(self, of, dtype, leading, columns, seed):
        """This rank's rows, and all ranks'."""
        every = [values(*leading, columns, seed=seed + rank, dtype=dtype) for rank in range(of.size())]
        return every[of.rank()], torch.cat(every)

    def test_gather_linear_matches(self):
        for of, dtype, leading in self.cases():
            x, whole = self.shards(of, dtype, leading, K, 1)
            weights = [values(n, K, seed=n, dtype=dtype) for n in (N, 7)]
            outs = _linears.gather_linear("test.gather", x, weights, of.group_name)
            for out, weight in zip(outs, weights, strict=True):
                self.assertEqual(out.dtype, dtype)
                self.same(out, whole.double() @ weight.double().t(), dtype)
            self.ran("test.gather", dtype)

    def test_linear_scatter_matches(self):
        for of, dtype, leading in self.cases():
            rows = (leading[0] * of.size(), *leading[1:])
            xs = [values(*rows, K, seed=rank, dtype=dtype) for rank in range(of.size())]
            weights = [values(N, K, seed=50 + rank, dtype=dtype) for rank in range(of.size())]
            out = _linears.linear_scatter("test.scatter", xs[of.rank()], weights[of.rank()], of.group_name)
            whole = sum(x.double() @ weight.double().t() for x, weight in zip(xs, weights, strict=True))
            self.assertEqual(out.dtype, dtype)
            self.same(out, whole.chunk(of.size())[of.rank()], dtype)
            self.ran("test.scatter", dtype)

    def test_weight_gradient_matches(self):
        for of, dtype, leading in self.cases():
            x, every_x = self.shards(of, dtype, leading, K, 1)
            dy, every_dy = self.shards(of, dtype, leading, N, 30)
            for gathers_x in (True, False):
                expected = every_dy.double().flatten(0, -2).t() @ every_x.double().flatten(0, -2)
                operands = (x, every_dy) if gathers_x else (every_x, dy)
                op = f"test.wgrad {gathers_x}"
                dw = _linears.weight_gradient(op, *operands, of.group_name, gathers_x=gathers_x)
                self.assertEqual(dw.dtype, torch.float32)
                self.same(dw, expected, torch.float32)
                before = torch.full_like(dw, 3)
                into = before.clone()
                got = _linears.weight_gradient(op, *operands, of.group_name, gathers_x=gathers_x, into=into)
                self.assertIs(got, into)
                self.same(into, before + dw, torch.float16 if dtype == torch.float16 else torch.float32)
                self.ran(op, dtype)

    def test_columns_and_transposed_operands_are_taken(self):
        of = dist.group.WORLD
        x = values(K, 6, seed=of.rank(), dtype=torch.float32).t()
        weight = values(N, 2 * K, seed=9, dtype=torch.float32)[:, :K]
        whole = torch.cat([values(K, 6, seed=rank, dtype=torch.float32).t() for rank in range(of.size())])
        out = _linears.gather_linear("test.gather", x, [weight], of.group_name)[0]
        self.same(out, whole @ weight.t(), torch.float32)
        dy = values(N, 6 * of.size(), seed=4, dtype=torch.float32).t()
        self.same(_linears.weight_gradient("test.wgrad", x, dy, of.group_name, gathers_x=True), dy.t() @ whole,
                  torch.float32)

    def test_a_codec_is_used_in_both_passes(self):
        of = dist.group.WORLD
        tandem.torch.enable(of, codec="int8")
        try:
            x, whole = self.shards(of, torch.float32, (8,), 64, 1)
            weight = values(N, 64, seed=5, dtype=torch.float32)
            out = _linears.gather_linear("test.gather", x, [weight], of.group_name)[0]
            dy = values(8 * of.size(), N, seed=6, dtype=torch.float32)
            dw = _linears.weight_gradient("test.wgrad", x, dy, of.group_name, gathers_x=True)
        finally:
            tandem.torch.disable()
        for got, exact in ((out, whole @ weight.t()), (dw, dy.t() @ whole)):
            error = float((got - exact).abs().max() / exact.abs().max())
            self.assertGreater(error, 1e-5)
            self.assertLess(error, 2e-2)


if __name__ == "__main__":
    group.run_tests()
