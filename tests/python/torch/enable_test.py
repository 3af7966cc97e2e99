"""PyTorch's fused operators on tandem's kernels against products in one process; what the report
says of them; programs that use them."""
import itertools
import os
import sys
import tempfile
import threading
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symm_mem

import tandem
from members import OnRanks
from tandem.torch import __main__, _enable, _fused, _receipts

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def gather(*call, **options):
    return torch.ops.symm_mem.fused_all_gather_matmul(*call, **options)


def scatter(*call):
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(*call)


class Values(OnRanks):
    def close(self, got, exact, what=None):
        error = (got.double() - exact).abs().max() / exact.abs().max()
        self.assertLess(error.item(), BOUND[got.dtype], what)

    def weights(self, k, widths, dtype, is_kn):
        return [torch.randn(k, n).to(dtype) if is_kn else torch.randn(n, k).to(dtype).t() for n in widths]

    def test_all_gather_matmul(self):
        shapes = [((3, 8), [5], 0), ((4, 16), [8, 24, 1], 0), ((2, 3, 8), [6], 0), ((2, 3, 8), [6, 7], 1),
                  ((1, 2, 2, 8), [4], 2)]
        for (shape, widths, dim), dtype, is_kn, returns in itertools.product(
                shapes, BOUND, (False, True), (False, True)):
            local = list(shape)
            whole_shape = list(shape)
            whole_shape[dim] *= self.size
            whole = torch.randn(whole_shape).to(dtype)
            x = whole.narrow(dim, self.rank * local[dim], local[dim])
            weights = self.weights(shape[-1], widths, dtype, is_kn)
            gathered, outs = gather(x, weights, dim, self.group.group_name, return_A=returns)
            what = (shape, widths, dim, dtype, is_kn, returns)
            if returns:
                self.assertTrue(torch.equal(gathered, whole), what)
            else:
                self.assertIsNone(gathered)
            for out, weight in zip(outs, weights):
                self.assertEqual(out.dtype, dtype)
                self.close(out, whole.double() @ weight.double(), what)

    def test_matmul_reduce_scatter(self):
        r = self.size
        for (shape, dim), n, dtype, is_kn, op in itertools.product(
                [((2 * r, 8), 0), ((r, 3, 8), 0), ((2, 3 * r, 8), 1)], (1, 12), BOUND, (False, True), ("sum", "avg")):
            xs = [torch.randn(shape).to(dtype) for _ in range(r)]
            weights = [self.weights(8, [n], dtype, is_kn)[0] for _ in range(r)]
            out = scatter(xs[self.rank], weights[self.rank], op, dim, self.group.group_name)
            exact = sum(x.double() @ w.double() for x, w in zip(xs, weights)) / (r if op == "avg" else 1)
            self.close(out, exact.chunk(r, dim)[self.rank], (shape, dim, n, dtype, is_kn, op))

    def test_strides_are_those_that_compilers_expect(self):
        """Inductor relies on the strides of PyTorch's decomposition."""
        name, r = self.group.group_name, self.size
        for shape, dim in (((2 * r, 8), 0), ((2 * r, 3, 8), 0), ((2, 3 * r, 8), 1)):
            x, weight = torch.randn(shape), torch.randn(8, 4)
            got, expected = scatter(x, weight, "sum", dim, name), symm_mem._fused_matmul_reduce_scatter_fallback(
                x, weight, "sum", dim, name)
            self.assertEqual((got.shape, got.stride()), (expected.shape, expected.stride()), (shape, dim))
            gathered, outs = gather(x, [weight], dim, name)
            whole, products = symm_mem._fused_all_gather_matmul_fallback(x, [weight], dim, name)
            self.assertEqual((outs[0].shape, outs[0].stride()), (products[0].shape, products[0].stride()), (shape, dim))
            self.assertEqual((gathered.shape, gathered.stride()), (whole.shape, whole.stride()), (shape, dim))

    def test_weights_that_lie_differently_have_plans_of_their_own(self):
        name, x = self.group.group_name, torch.randn(2, 8)
        whole, packed = torch.randn(12, 8), torch.randn(12, 16)
        for weight in (whole.t(), packed[:, :8].t(), whole.t().contiguous(), packed.t()[:8]):
            _, outs = gather(x, [weight], 0, name)
            rows = [torch.empty(2, 8) for _ in range(self.size)]
            dist.all_gather(rows, x)
            self.close(outs[0], torch.cat(rows).double() @ weight.double())

    def test_ranks_that_differ_take_one_form(self):
        """One rank cannot run the call, or stores its weight in another layout: all take PyTorch's."""
        if self.size == 1:
            self.skipTest("needs two ranks")
        name, x = self.group.group_name, torch.randn(2, 8)
        for weight, reason in ((torch.randn(8, 0 if self.rank else 4), "rank 1: B is empty"),
                               (torch.randn(8, 4) if self.rank else torch.randn(4, 8).t(), r"\[N, K\] on rank 0")):
            _receipts.clear()
            _, outs = gather(x, [weight], 0, name)
            self.assertEqual(outs[0].shape, (2 * self.size, weight.shape[1]))
            row, = tandem.torch.report()
            self.assertEqual(row["ran"], "torch")
            self.assertRegex(row["why"], reason)

    def test_groups_may_be_made_again(self):
        """A plan ends with its process group, although another one may get its name."""
        name = self.group.group_name
        gather(torch.ones(2, 8), [torch.ones(8, 4)], 0, name)
        plan, = _fused._plans.values()
        with mock.patch.object(plan, "group", lambda: None):
            gather(torch.ones(2, 8), [torch.ones(8, 4)], 0, name)
        again, = _fused._plans.values()
        self.assertIsNot(plan, again)

    def test_results_do_not_alias(self):
        """A gathered A lives on while later calls gather others."""
        name, weight = self.group.group_name, torch.randn(8, 8)
        first, _ = gather(torch.full((2, 8), 1.0 + self.rank), [weight], 0, name)
        kept = first.clone()
        gather(torch.zeros(2, 8), [weight], 0, name)
        self.assertTrue(torch.equal(first, kept))

    def test_inputs_that_require_gradients(self):
        x = torch.randn(2, 8).requires_grad_()
        _, outs = gather(x, [torch.randn(8, 4).requires_grad_()], 0, self.group.group_name)
        self.assertEqual(outs[0].shape, (2 * self.size, 4))

    def test_operands_that_are_not_contiguous(self):
        x, weight = torch.randn(8, 6).t()[:, ::2], torch.randn(4, 10)[:, ::2]
        whole = [torch.empty(6, 4) for _ in range(self.size)]
        dist.all_gather(whole, x.contiguous())
        _, outs = gather(x, [weight], 0, self.group.group_name)
        self.close(outs[0], torch.cat(whole).double() @ weight.double())

    def test_groups(self):
        """Members of several groups call them in turn, in the order of their ranks in the group."""
        if self.size < 3:
            self.skipTest("needs three ranks")
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 2], [0, 1, 2])]
        for _ in range(2):
            for group in groups:
                rank = dist.get_rank(group)
                if rank < 0:
                    continue
                size = group.size()
                whole = torch.arange(size * 2 * 4, dtype=torch.float32).view(size * 2, 4)
                gathered, outs = gather(whole[2 * rank:2 * rank + 2], [torch.eye(4)], 0, group.group_name)
                self.assertTrue(torch.equal(gathered, whole))
                self.assertTrue(torch.equal(outs[0], whole))

    def test_compiled_programs(self):
        name = self.group.group_name

        def program(x, weight):
            return gather(x * 2, [weight], 0, name)[1][0].relu()

        x, weight = torch.randn(2, 8), torch.randn(8, 4)
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        self.assertTrue(torch.equal(compiled(x, weight), program(x, weight)))

    def test_inductor_writes_the_operators_into_graphs(self):
        """Its asynchronous tensor parallelism, on CPU ranks: collectives around products are fused, and
        the compiled program's values and strides are those of the program."""
        if self.size != 2:
            self.skipTest("on two ranks only, as it compiles")

        def program(x, up, down):
            whole = collectives.all_gather_tensor(x, 1, self.group)
            return collectives.reduce_scatter_tensor((whole @ up).relu() @ down, "sum", 1, self.group)

        operands = torch.randn(2, 4, 16), torch.randn(16, 8), torch.randn(8, 16)
        expected = program(*operands)
        self.assertEqual(tandem.torch.report(), [])
        got = torch.compile(program)(*operands)
        self.assertTrue(torch.allclose(got, expected, atol=1e-5))
        self.assertEqual(got.stride(), expected.stride())
        rows = {row["op"]: row for row in tandem.torch.report()}
        self.assertEqual(rows["torch.compile matmul_reduce_scatter"]["ran"], "fused")
        self.assertEqual(rows["fused_matmul_reduce_scatter"]["calls"], 1)
        self.assertIn(rows["fused_matmul_reduce_scatter"]["ran"], ("overlapped", "serial"))

    def compiled(self, program, *operands):
        """Compiles and checks the program; returns the report's rows of the graph, by operator."""
        torch._dynamo.reset()
        _receipts.clear()
        expected = program(*operands)
        self.assertTrue(torch.allclose(torch.compile(program)(*operands), expected, atol=1e-4))
        return {row["op"]: row for row in tandem.torch.report() if row["op"].startswith("torch.compile")}

    def test_pairs_of_compiled_graphs_are_listed(self):
        """Those that Inductor fused, again if the graph is from its cache, and planted ones that it left."""
        if self.size != 2:
            self.skipTest("on two ranks only, as it compiles")

        def both(x, up, down):
            return scattered((gathered(x) @ up).relu() @ down)

        def biased(x, weight, bias):
            return torch.addmm(bias, gathered(x), weight)

        def used_twice(x, weight):
            product = x @ weight
            return torch.cat([scattered(product), product])

        def without_pairs(x, weight):
            return weight @ gathered(gathered(x @ weight))

        def gathered(x):
            return collectives.all_gather_tensor(x, 0, self.group)

        def scattered(x):
            return collectives.reduce_scatter_tensor(x, "sum", 0, self.group)

        gather_op, scatter_op = "torch.compile all_gather_matmul", "torch.compile matmul_reduce_scatter"
        for _ in range(2):
            rows = self.compiled(both, torch.randn(4, 16), torch.randn(16, 6), torch.randn(6, 10))
            self.assertEqual(set(rows), {gather_op, scatter_op})
            for op, shape in ((gather_op, "m 8 n 6 k 16"), (scatter_op, "m 8 n 10 k 6")):
                self.assertEqual(rows[op], {"op": op, "shape": shape, "dtype": "float32", "group": 2, "asked": "overlapped",
                                            "ran": "fused", "why": "", "calls": 1, "speedup": None})
        planted = [(biased, [(4, 8), (8, 8), (8,)], gather_op, "the product is addmm, which adds: expected mm"),
                   (used_twice, [(4, 8), (8, 8)], scatter_op, "the product has another use")]
        for program, shapes, op, why in planted:
            row = self.compiled(program, *map(torch.randn, shapes))[op]
            self.assertEqual((row["ran"], row["why"], row["calls"]), ("torch", why, 1))
        self.assertEqual(self.compiled(without_pairs, torch.randn(2, 8), torch.randn(8, 8)), {})

        tandem.torch.enable(strict=True, compare=False)
        with self.assertRaisesRegex(Exception, "torch.compile all_gather_matmul: m 8 n 8 k 8, float32, 2 ranks: left "
                                               "alone: the product is addmm.*: expected fused, as strict requests"):
            self.compiled(biased, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8))
        tandem.torch.enable(self.group, compare=False)  # for this group not strict
        self.assertEqual(self.compiled(biased, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8))[gather_op]["calls"], 1)

    def test_a_pass_that_the_user_has_set_runs(self):
        """And is set again by `disable`."""
        if self.size != 2:
            self.skipTest("on two ranks only, as it compiles")
        graphs = []
        tandem.torch.disable()
        with mock.patch.object(torch._inductor.config, "post_grad_custom_post_pass", graphs.append):
            tandem.torch.enable(compare=False)
            rows = self.compiled(lambda x, w: collectives.all_gather_tensor(x, 0, self.group) @ w, torch.randn(2, 8),
                                 torch.randn(8, 8))
            self.assertEqual([row["ran"] for row in rows.values()], ["fused"])
            self.assertEqual(len(graphs), 1)
            tandem.torch.disable()
            self.assertEqual(torch._inductor.config.post_grad_custom_post_pass, graphs.append)

    def test_threads_call_in_turn(self):
        """Backward passes may run on another thread than forward passes."""
        name, results = self.group.group_name, []
        gather(torch.ones(2, 8), [torch.ones(8, 4)], 0, name)
        for value in range(3):
            thread = threading.Thread(
                target=lambda: results.append(gather(torch.full((2, 8), float(value)), [torch.ones(8, 4)], 0, name)))
            thread.start()
            thread.join()
        self.assertEqual([r[1][0][0, 0].item() for r in results], [0, 8, 16])

    def test_mm_with_another_dtype(self):
        a, b = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
        self.assertTrue(torch.equal(torch.mm(a, b, out_dtype=torch.float32), a.float() @ b.float()))


class Controls(OnRanks):
    """Errors that the comparisons above must find."""

    def test_a_wrong_reduction_differs(self):
        if self.size == 1:
            self.skipTest("needs two ranks")
        x, w = torch.ones(self.size, 4), torch.ones(4, 4)
        name = self.group.group_name
        self.assertFalse(torch.allclose(scatter(x, w, "sum", 0, name), scatter(x, w, "avg", 0, name)))

    def test_permuted_ranks_differ(self):
        if self.size == 1:
            self.skipTest("needs two ranks")
        x = torch.full((1, 4), float(self.rank))
        gathered, _ = gather(x, [torch.eye(4)], 0, self.group.group_name)
        self.assertEqual(gathered[:, 0].tolist(), [float(r) for r in range(self.size)])
        self.assertNotEqual(gathered[:, 0].tolist(), [float(r) for r in reversed(range(self.size))])


class Reports(OnRanks):
    """Configurations that would run without overlap: the report says so, and strict refuses."""

    def planted(self):
        """name: (call, form that runs, words of the reason)."""
        name, r = self.group.group_name, self.size
        alone = dist.new_group([self.rank], use_local_synchronization=True)
        f32, f64 = torch.randn(2, 8), torch.randn(2, 8).double()
        rows = torch.randn(2 * r, 8)
        wide = torch.randn(2, 2, 8)
        return {
            "group of one": (lambda: gather(f32, [f32.t()], 0, alone.group_name), "a group of 1 rank"),
            "group of one, scatter": (lambda: scatter(f32, f32.t(), "sum", 0, alone.group_name), "a group of 1 rank"),
            "f64": (lambda: gather(f64, [f64.t()], 0, name), "float64"),
            "f64, scatter": (lambda: scatter(rows.double(), f64.t(), "sum", 0, name), "float64"),
            "empty rows": (lambda: gather(f32[:0], [f32.t()], 0, name), "empty"),
            "empty scatter": (lambda: scatter(rows[:0], f32.t(), "sum", 0, name), "empty"),
            "last dimension": (lambda: gather(torch.randn(2, 8), [torch.randn(8 * r, 4)], 1, name), "A's last"),
            "last dimension, three": (lambda: gather(wide, [torch.randn(8 * r, 4)], 2, name), "A's last"),
            "no weights": (lambda: gather(f32, [], 0, name), "no B"),
            "integers": (lambda: gather(f32.int(), [f32.t().int()], 0, name), "int32"),
            "empty columns": (lambda: gather(f32, [torch.randn(8, 0)], 0, name), "empty"),
        }

    def test_planted_configurations(self):
        for what, (call, reason) in self.planted().items():
            with self.subTest(what):
                _receipts.clear()
                _fused.clear_plans()
                try:
                    call()
                except Exception:  # PyTorch's form may not support it either: the receipt stands
                    pass
                rows = tandem.torch.report()
                self.assertEqual([(row["ran"], row["calls"]) for row in rows], [("torch", 1)])
                self.assertIn(reason if self.size > 1 else "", rows[0]["why"])
                self.assertEqual(rows[0]["asked"], "overlapped")
                dist.barrier()

    def test_strict_refuses_them(self):
        planted = self.planted()
        for options in ({"strict": True}, {}):
            tandem.torch.enable(**options)
            for what, (call, reason) in planted.items():
                with self.subTest(what), mock.patch.dict(os.environ, {} if options else {"TANDEM_STRICT": "1"}):
                    _receipts.clear()
                    _fused.clear_plans()
                    with self.assertRaisesRegex(tandem.Unsupported, "would run as torch"):
                        call()
                    dist.barrier()

    def test_calls_that_overlap(self):
        if self.size == 1:
            self.skipTest("needs two ranks")
        x = torch.randn(64, 64)
        tandem.torch.enable(self.group, compare=False)
        for _ in range(3):
            scatter(torch.randn(64 * self.size, 64), x.t(), "sum", 0, self.group.group_name)
        row, = tandem.torch.report()
        self.assertEqual((row["op"], row["calls"], row["dtype"], row["group"]),
                         ("fused_matmul_reduce_scatter", 3, "float32", self.size))
        self.assertEqual(row["shape"], f"m {64 * self.size} n 64 k 64")
        self.assertIn(row["ran"], ("overlapped", "serial"))
        self.assertEqual(row["why"] == "", row["ran"] == "overlapped")

    def test_the_faster_kernel_runs(self):
        """A planted comparison: PyTorch's kernel is twice as fast."""
        if self.size == 1:
            self.skipTest("needs two ranks")
        tandem.torch.enable(self.group)
        _enable._options[self.group.group_name] = _fused.Options()
        with mock.patch.object(_fused, "_compare", lambda *_: (20.0, 10.0)):
            x = torch.randn(2, 8)
            gathered, _ = gather(x, [torch.eye(8)], 0, self.group.group_name)
        self.assertTrue(torch.equal(gathered[2 * self.rank:2 * self.rank + 2], x))
        row, = tandem.torch.report()
        self.assertEqual((row["ran"], row["speedup"]), ("torch", 2.0))
        self.assertIn("PyTorch's kernel is faster: 10.0 us against 20.0", row["why"])

    def test_rows_that_cannot_be_scattered(self):
        if self.size == 1:
            self.skipTest("needs two ranks")
        with self.assertRaisesRegex(tandem.InvalidArgument, f"{self.size + 1} entries along scatter_dim 0: expected a "
                                                            f"multiple of the group's {self.size} ranks"):
            scatter(torch.randn(self.size + 1, 8), torch.randn(8, 4), "sum", 0, self.group.group_name)

    def test_ranks_with_different_shapes(self):
        if self.size == 1:
            self.skipTest("needs two ranks")
        with self.assertRaisesRegex(tandem.Mismatch, "rank"):
            gather(torch.randn(2 + self.rank, 8), [torch.randn(8, 4)], 0, self.group.group_name)

    def test_codec(self):
        """A wire format is close to the exact product, and not equal to it."""
        if self.size == 1:
            self.skipTest("needs two ranks")
        tandem.torch.enable(self.group, codec="int8")
        x = torch.randn(128, 256)
        weight = torch.randn(256, 64)
        _, outs = gather(x, [weight], 0, self.group.group_name)
        exact = torch.cat([x] * self.size) @ weight
        error = (outs[0] - exact).norm() / exact.norm()
        self.assertTrue(1e-4 < error < 2e-2, error)

    def run_program(self, text, *options):
        """As `python -m tandem.torch` does. Returns the report."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file, mock.patch.dict(os.environ), \
                mock.patch.object(sys, "path", list(sys.path)), mock.patch("atexit.register"), \
                mock.patch.object(sys, "argv", ["tandem.torch", *options, file.name]):
            file.write(text)
            file.flush()
            _receipts.clear()
            __main__.main()
            return tandem.torch.report()

    def test_strict_programs(self):
        """Fail where tandem's layers would not overlap, and without a call."""
        if self.size > 1:
            self.skipTest("on one rank, whose layers have nothing to overlap")
        layer = """
import tandem.torch, torch
with tandem.World(1) as world:
    tandem.torch.ColumnParallelLinear(world.comm(), 4, 4, bias=False)(torch.ones(2, 4))
"""
        row, = self.run_program(layer)
        self.assertEqual((row["op"], row["shape"], row["ran"], row["calls"]), ("AgGemm", "m 2 n 4 k 4", "serial", 1))
        with self.assertRaisesRegex(tandem.Unsupported, "a group of 1 rank has nothing to overlap"):
            self.run_program(layer, "--strict")
        self.assertEqual(self.run_program("x = 1"), [])
        with self.assertRaisesRegex(SystemExit, "no call of PyTorch's fused operators or of tandem's layers: expected"):
            self.run_program("x = 1", "--strict")

    def test_disable(self):
        tandem.torch.disable()
        self.assertIsNone(_enable._kernels)
        with self.assertRaisesRegex(NotImplementedError, "CPU"):
            gather(torch.randn(2, 8), [torch.randn(8, 4)], 0, self.group.group_name)
        tandem.torch.disable()

    def test_another_schema_is_refused(self):
        with mock.patch.dict(_enable.OPERATORS, {"fused_matmul_reduce_scatter": "(Tensor A) -> Tensor"}):
            with self.assertRaisesRegex(tandem.Unsupported, "fused_matmul_reduce_scatter.*expected"):
                tandem.torch.enable()

    def test_groups_that_are_none(self):
        with self.assertRaisesRegex(tandem.InvalidArgument, "group: int: expected"):
            tandem.torch.enable(3)


if __name__ == "__main__":
    unittest.main()
