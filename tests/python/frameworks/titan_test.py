"""tandem.titan's autograd functions against one process, and TorchTitan's own, on CPU ranks."""
import unittest

import group

group.require("torchtitan")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.distributed.linear as linear
import torchtitan.models.common.dist_gemm as dist_gemm

import tandem
import tandem.titan
import tandem.torch
from tandem.torch import _titan

K, N = 24, 20  # N: of a rank
STOCK = {name: getattr(linear, name) for name in ("AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter")}
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative to the largest value


def values(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shard(whole, dim=0):
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def leaf(tensor):
    return tensor.clone().requires_grad_()


def calls():
    """Calls by operator that tandem ran."""
    counts = {}
    for row in tandem.torch.report():
        if row["ran"] != "torch":
            counts[row["op"]] = counts.get(row["op"], 0) + row["calls"]
    return counts


class Functions(unittest.TestCase):
    def setUp(self):
        tandem.titan.enable()
        self.group = dist.group.WORLD
        self.ranks = dist.get_world_size()
        self.assertIs(dist_gemm.AllGatherLinear, tandem.titan.AllGatherLinear)

    def tearDown(self):
        tandem.titan.disable()
        tandem.torch.disable()
        self.assertIs(dist_gemm.AllGatherLinear, STOCK["AllGatherLinear"])
        self.assertIs(linear.AllGatherLinearMulti, STOCK["AllGatherLinearMulti"])

    def same(self, got, expected, dtype):
        self.assertEqual(got.dtype, dtype)
        scale = float(expected.abs().max())
        self.assertLessEqual(float((got.float() - expected.float()).abs().max()), BOUND[dtype] * scale)

    def all_gather_linear(self, apply, dtype):
        """y and gradients of x, w and b, of this rank; and those that one process computes."""
        m, n = 6 * self.ranks, N * self.ranks
        whole = [values(m, K, seed=1, dtype=dtype), values(n, K, seed=2, dtype=dtype), values(n, seed=3, dtype=dtype)]
        dy = values(m, n, seed=4, dtype=dtype)
        exact = [leaf(each.float()) for each in whole]
        y = F.linear(*exact)
        y.backward(dy.float())
        expected = [shard(y, 1), *(shard(each.grad) for each in exact)]
        own = [leaf(shard(each)) for each in whole]
        out = apply(*own, self.group, self.group.group_name)
        out.backward(shard(dy, 1))
        return [out.detach(), *(each.grad for each in own)], expected

    def multi(self, apply, dtype):
        m, n = 6 * self.ranks, N * self.ranks
        whole = [values(m, K, seed=1, dtype=dtype), values(n, K, seed=2, dtype=dtype),
                 values(2 * n, K, seed=3, dtype=dtype)]
        dys = values(m, n, seed=4, dtype=dtype), values(m, 2 * n, seed=5, dtype=dtype)
        exact = [leaf(each.float()) for each in whole]
        ys = F.linear(exact[0], exact[1]), F.linear(exact[0], exact[2])
        torch.autograd.backward(ys, [dy.float() for dy in dys])
        expected = [*(shard(y, 1) for y in ys), *(shard(each.grad) for each in exact)]
        own = [leaf(shard(each)) for each in whole]
        outs = apply(*own, self.group, self.group.group_name)
        torch.autograd.backward(outs, [shard(dy, 1) for dy in dys])
        return [*(out.detach() for out in outs), *(each.grad for each in own)], expected

    def linear_reduce_scatter(self, apply, dtype):
        m, k = 6 * self.ranks, K * self.ranks
        whole = [values(m, k, seed=1, dtype=dtype), values(N, k, seed=2, dtype=dtype), values(N, seed=3, dtype=dtype)]
        dy = values(m, N, seed=4, dtype=dtype)
        exact = [leaf(each.float()) for each in whole]
        y = F.linear(*exact)
        y.backward(dy.float())
        expected = [shard(y), shard(exact[0].grad, 1), shard(exact[1].grad, 1), exact[2].grad]
        own = [leaf(shard(whole[0], 1)), leaf(shard(whole[1], 1)), leaf(whole[2])]
        out = apply(*own, self.group, self.group.group_name)
        out.backward(shard(dy))
        return [out.detach(), *(each.grad for each in own)], expected

    def compare(self, run, apply):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                got, expected = run(apply, dtype)
                for one, other in zip(got, expected, strict=True):
                    self.same(one, other, dtype)

    def test_functions_match_one_process(self):
        self.compare(self.all_gather_linear, dist_gemm.AllGatherLinear.apply)
        self.compare(self.multi, dist_gemm.AllGatherLinearMulti.apply)
        self.compare(self.linear_reduce_scatter, dist_gemm.LinearReduceScatter.apply)
        # x is gathered once in the forward pass and once for the weights' gradient, also for a pair.
        self.assertEqual(calls(), {_titan.OP: 4, f"{_titan.OP} wgrad": 4, "fused_matmul_reduce_scatter": 8,
                                   "fused_all_gather_matmul": 2})

    def test_kept_rows_are_gathered_once(self):
        tandem.titan.enable(keep_gathered=True)
        try:
            self.compare(self.all_gather_linear, dist_gemm.AllGatherLinear.apply)
            self.compare(self.multi, dist_gemm.AllGatherLinearMulti.apply)
            self.assertEqual(calls(), {_titan.OP: 4, "fused_matmul_reduce_scatter": 6})
            self.assertEqual(self.saved(), [(6 * self.ranks, K), (N, K)])
        finally:
            tandem.titan.enable()

    def test_torchtitans_functions_match_with_enable_only(self):
        tandem.titan.disable()
        self.compare(self.all_gather_linear, dist_gemm.AllGatherLinear.apply)
        self.compare(self.multi, dist_gemm.AllGatherLinearMulti.apply)
        self.assertEqual(calls(), {"fused_all_gather_matmul": 8, "fused_matmul_reduce_scatter": 4})
        tandem.titan.enable()

    def test_control_a_wrong_weight_gradient_is_noticed(self):
        gradient = _titan._linears.weight_gradient
        _titan._linears.weight_gradient = lambda *given, **more: gradient(*given, **more) * 1.001
        try:
            got, expected = self.all_gather_linear(dist_gemm.AllGatherLinear.apply, torch.float32)
            with self.assertRaises(AssertionError):
                self.same(got[2], expected[2], torch.float32)
        finally:
            _titan._linears.weight_gradient = gradient

    def saved(self):
        """Shapes of the tensors that AllGatherLinear saves."""
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tuple(tensor.shape)) or tensor,
                                                      lambda tensor: tensor):
            x, w = leaf(values(6, K, seed=1)), leaf(values(N, K, seed=2))
            dist_gemm.AllGatherLinear.apply(x, w, None, self.group, self.group.group_name)
        return saved

    def test_they_save_this_ranks_rows_only(self):
        self.assertEqual(self.saved(), [(6, K), (N, K)])

    def test_compiled_functions_match(self):
        def pair(x, wa, wb, group, name):
            ya, yb = dist_gemm.AllGatherLinearMulti.apply(x, wa, wb, group, name)
            return ya * 1, yb * 1

        def one(x, w, b, group, name):
            return dist_gemm.AllGatherLinear.apply(x, w, b, group, name) * 1

        for run, function in ((self.all_gather_linear, one), (self.multi, pair)):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            got, expected = run(compiled, torch.float32)
            for one, other in zip(got, expected, strict=True):
                self.same(one, other, torch.float32)
        self.assertEqual(calls()[f"{_titan.OP} wgrad"], 2)

    def test_other_signatures_are_refused(self):
        tandem.titan.disable()

        class AllGatherLinear(STOCK["AllGatherLinear"]):
            @staticmethod
            def forward(ctx, x, w):
                return x

        linear.AllGatherLinear = AllGatherLinear
        try:
            with self.assertRaisesRegex(tandem.Unsupported, r"TorchTitan's AllGatherLinear takes \['ctx', 'x', 'w'\]"):
                tandem.titan.enable()
        finally:
            linear.AllGatherLinear = STOCK["AllGatherLinear"]
        self.assertIs(dist_gemm.AllGatherLinear, STOCK["AllGatherLinear"])


if __name__ == "__main__":
    group.run_tests()
