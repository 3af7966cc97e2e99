"""Scaled e4m3 operands: tandem's operators and PyTorch's fused ones against products of the decoded
values in f64, and against PyTorch's decomposition where it runs."""
import contextlib
import itertools
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symm_mem

import tandem
from members import OnRanks
from tandem.torch import _fused, _groups, _receipts, _scaled

F8 = torch.float8_e4m3fn
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def codes(*shape):
    return torch.randn(shape).to(F8)


def scales(*shape):
    return torch.rand(shape) + 0.25


def exact(a, a_scale, b, b_scale):
    """b: [K, N]."""
    return (a.double() * a_scale.double()) @ (b.double() * b_scale.double())


class Scaled(OnRanks):
    def setUp(self):
        super().setUp()
        self.name = self.group.group_name

    def close(self, got, wanted, what=None, roundings=1):
        self.assertEqual(got.shape, wanted.shape, what)
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        self.assertLess(error.item(), roundings * BOUND[got.dtype], what)


class Operators(Scaled):
    def setUp(self):
        super().setUp()
        self.comm = _groups.group_of(self.name, torch.device("cpu")).comm

    def rows(self, m):
        begin, count = tandem.shard_of(m, self.size, self.rank)
        return slice(begin, begin + count)

    def each(self):
        """Shapes with uneven shards, scalings, dtypes, biases, strategies."""
        for (m, n, k), scaling, dtype, has_bias in itertools.product(
                [(7, 5, 9), (33, 16, 40)], ("tensor", "row"), BOUND, (False, True)):
            x = [codes(m, k) for _ in range(self.size)]
            weight = [codes(n, k) for _ in range(self.size)]
            x_scale = [scales(m, 1) if scaling == "row" else scales(1) for _ in x]
            w_scale = [scales(1, n) if scaling == "row" else scales() for _ in x]
            bias = torch.randn(n).to(dtype) if has_bias else None
            options = {"bias": has_bias, "out_dtype": dtype, "scaling": scaling}
            for strategy in ("serial", "overlapped"):
                yield m, n, k, x, weight, x_scale, w_scale, bias, {**options, "strategy": strategy}

    def test_ag_gemm(self):
        for m, n, k, x, weight, x_scale, w_scale, bias, options in self.each():
            w, of_w, of_x, rows = weight[self.rank], w_scale[self.rank], x_scale[0], self.rows(m)
            op = tandem.AgGemm(self.comm, m, n, k, F8, keep_gathered=True, **options)
            local = of_x[rows] if options["scaling"] == "row" else of_x
            out = op(x[0][rows], w, bias=bias, x_scale=local, weight_scale=of_w)
            self.assertEqual(out.dtype, options["out_dtype"])
            self.close(out, exact(x[0], of_x, w.t(), of_w) + (0 if bias is None else bias.double()), options)
            gathered = op.gathered(x[0])
            self.assertEqual(gathered.dtype, F8)
            self.assertTrue(torch.equal(gathered.view(torch.uint8), x[0].view(torch.uint8)))

    def test_sums(self):
        for m, n, k, x, weight, x_scale, w_scale, bias, options in self.each():
            whole = sum(exact(a, of_a, b.t(), of_b) for a, of_a, b, of_b in zip(x, x_scale, weight, w_scale))
            whole = whole + (0 if bias is None else bias.double())
            r = self.rank
            call = {"bias": bias, "x_scale": x_scale[r], "weight_scale": w_scale[r]}
            out = tandem.GemmRs(self.comm, m, n, k, F8, **options)(x[r], weight[r], **call)
            self.close(torch.cat([out, torch.zeros(0, n)]) if not len(out) else out, whole[self.rows(m)], options)
            out = tandem.GemmAr(self.comm, m, n, k, F8, **options)(x[r], weight[r], **call)
            self.close(out, whole, options)

    def test_out_and_defaults(self):
        """The result is bf16 unless out_dtype is given, and may be written to f32 on the CPU."""
        x, weight = codes(4, 8), codes(6, 8)
        op = tandem.GemmAr(self.comm, 4, 6, 8, F8)
        one = torch.tensor(2.0)
        given = torch.zeros(4, 6, dtype=torch.bfloat16)
        self.assertIs(op(x, weight, given, x_scale=one, weight_scale=one), given)
        self.close(given, self.size * exact(x, one, weight.t(), one))
        self.assertEqual(op(x, weight, x_scale=one, weight_scale=one).dtype, torch.bfloat16)
        wide = tandem.GemmRs(self.comm, 4, 6, 8, torch.bfloat16, out_dtype="f32")(x.bfloat16(), weight.bfloat16())
        self.assertEqual(wide.dtype, torch.float32)

    def test_add_norm(self):
        x, weight, one = codes(4, 8), codes(6, 8), torch.tensor(0.5)
        residual, gain = torch.randn(4, 6), torch.randn(6)
        op = tandem.GemmAr(self.comm, 4, 6, 8, F8, out_dtype="f32", add_norm=True)
        out, hidden = op(x, weight, x_scale=one, weight_scale=one, residual=residual, gain=gain)
        wanted = residual.double() + self.size * exact(x, one, weight.t(), one)
        self.close(hidden, wanted)
        self.close(out, wanted * (wanted.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain.double())

    def test_errors(self):
        comm, x, weight, one = self.comm, codes(4, 8), codes(6, 8), torch.tensor(1.0)
        op = tandem.GemmAr(comm, 4, 6, 8, F8)
        by_row = tandem.GemmAr(comm, 4, 6, 8, F8, scaling="row")
        for call, said in (
                (lambda: op(x, weight), "scales missing: expected them with dtype e4m3"),
                (lambda: op(x, weight, x_scale=one), "weight_scale missing: expected both scales, or none"),
                (lambda: op(x, weight, weight_scale=one), "x_scale missing: expected both scales, or none"),
                (lambda: op(x, weight, x_scale=one.double(), weight_scale=one), "x_scale: dtype of DLPack"),
                (lambda: op(x, weight, x_scale=one.bfloat16(), weight_scale=one), r"scales.x is bf16\[1\]: expected f32\[1\]"),
                (lambda: by_row(x, weight, x_scale=scales(4, 1), weight_scale=one), r"weight is f32\[1\]: expected f32\[6\]"),
                (lambda: by_row(x, weight, x_scale=scales(8)[::2], weight_scale=scales(6)), "x_scale: f32.*contiguous"),
                (lambda: op(bytearray(32), weight, x_scale=one, weight_scale=one), "x: bytearray for a result in bf16"),
                (lambda: op(x.float(), weight, x_scale=one, weight_scale=one), r"x is f32\[4, 8\]: expected e4m3\[4, 8\]"),
                (lambda: tandem.GemmAr(comm, 4, 6, 8, "f32")(x.float(), weight.float(), x_scale=one, weight_scale=one),
                 "scales given: expected none with dtype f32"),
                (lambda: tandem.AgGemm(comm, 4, 6, 8, "f32", scaling="row"),
                 "scaling 'row' with dtype f32: expected dtype e4m3"),
                (lambda: tandem.AgGemm(comm, 4, 6, 8, F8, scaling="block"), "scaling 'block': expected tensor or row"),
                (lambda: tandem.AgGemm(comm, 4, 6, 8, "f32", out_dtype="bf16"), "out_dtype bf16 with dtype f32: expected f32"),
                (lambda: tandem.AgGemm(comm, 4, 6, 8, F8, out_dtype="f16"),
                 "e4m3 to f16: expected an out_dtype of f32 or bf16"),
                (lambda: tandem.AgGemm(comm, 4, 6, 8, F8, weight_kn=True), r"e4m3 weight \[K, N\]: expected \[N, K\]"),
                (lambda: tandem.AgWgrad(comm, 4, 6, 8, F8), "ag_wgrad: dtype e4m3: expected f32 or bf16")):
            with self.assertRaisesRegex(tandem.InvalidArgument, said):
                call()


def gathers_of_bytes():
    """PyTorch's gathers, of bytes for fp8: gloo has no fp8, and says so in whichever collective comes next."""
    functional = torch.ops._c10d_functional
    gather = functional.all_gather_into_tensor

    def gather_bytes(x, *group):
        is_f8 = x.dtype in (F8, torch.float8_e5m2)
        whole = functional.wait_tensor(gather(x.view(torch.uint8) if is_f8 else x, *group))
        return whole.view(x.dtype) if is_f8 else whole

    return mock.patch.object(functional, "all_gather_into_tensor", gather_bytes)


class FusedOperators(Scaled):
    def setUp(self):
        super().setUp()
        if self.size == 1:
            self.skipTest("needs two ranks: a single one runs PyTorch's form")

    def compare_with_torch(self, form, got, what):
        """Values and strides of PyTorch's decomposition. With 2.11 its products have no scales by row
        on the CPU."""
        try:
            with gathers_of_bytes():
                expected = form()
        except RuntimeError as error:
            self.assertIn("per-tensor scaling", str(error))
            return False
        for a, b in zip(got, expected):
            self.assertEqual((a.shape, a.stride(), a.dtype), (b.shape, b.stride(), b.dtype), what)
            if a.dtype == F8:
                self.assertTrue(torch.equal(a.view(torch.uint8), b.view(torch.uint8)), what)
            else:
                self.close(a, b.double(), what, roundings=2)
        return True

    def a_scales(self, whole_shape, dim, mode):
        """Scales of all rows [..., 1], and those that this rank passes."""
        if mode == "tensor":
            one = scales()
            return one, one
        whole = scales(*whole_shape[:-1], 1)
        return whole, whole if mode == "replicated" else self.shard(whole, dim)

    def test_all_gather(self):
        r = self.size
        shapes = [((4, 16), [32], 0), ((3, 16), [16, 48, 8], 0), ((2, 3, 16), [16], 0), ((2, 3, 16), [16, 32], 1)]
        for (shape, widths, dim), mode, dtype, biased in itertools.product(
                shapes, ("tensor", "sharded", "replicated"), BOUND, (False, True)):
            what = (shape, widths, dim, mode, dtype, biased)
            whole_shape = list(shape)
            whole_shape[dim] *= r
            whole = codes(*whole_shape)
            a_scale, given = self.a_scales(whole_shape, dim, mode)
            bs = [codes(n, 16).t() for n in widths]
            b_scales = [scales() if mode == "tensor" else scales(1, n) for n in widths]
            biases = [torch.randn(n).to(dtype) if biased else None for n in widths]
            count = len(bs)
            call = (self.shard(whole, dim), bs, given, b_scales, dim, self.name, biases, [None] * count,
                    [dtype] * count, [False] * count)
            gathered, outs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*call)
            self.assertTrue(torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8)), what)
            for out, b, b_scale, bias in zip(outs, bs, b_scales, biases):
                self.assertEqual(out.dtype, dtype)
                wanted = exact(whole, a_scale, b, b_scale)
                self.close(out, wanted if bias is None else wanted + bias.double(), what)

            def form():
                whole, products = symm_mem._fused_all_gather_scaled_matmul_fallback(*call)
                return [whole, *products]

            has_form = self.compare_with_torch(form, [gathered, *outs], what)
            self.assertTrue(has_form or mode != "tensor", what)
        self.assert_ran_on_tandem()

    def test_reduce_scatter(self):
        r = self.size
        # A, leading dimensions of the result, the one that is scattered: A may have been flattened.
        shapes = [((2 * r, 16), (2 * r,), 0), ((r, 3, 16), (r, 3), 0), ((2, 3 * r, 16), (2, 3 * r), 1),
                  ((6 * r, 16), (2, 3 * r), 1)]
        for (shape, leading, dim), mode, dtype, op in itertools.product(shapes, ("tensor", "row"), BOUND, ("sum", "avg")):
            what = (shape, leading, dim, mode, dtype, op)
            xs, ws = [codes(*shape) for _ in range(r)], [codes(24, 16).t() for _ in range(r)]
            x_scales = [scales(*shape[:-1], 1) if mode == "row" else scales(1) for _ in range(r)]
            w_scales = [scales(1, 24) if mode == "row" else scales(1) for _ in range(r)]
            me = self.rank
            call = (xs[me], ws[me], x_scales[me], w_scales[me], op, dim, min(dim, len(shape) - 2), self.name)
            options = {"bias": None, "result_scale": None, "out_dtype": dtype, "use_fast_accum": True}
            out = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(*call, [*leading, 24], **options)
            self.assertEqual(out.dtype, dtype)
            whole = sum(exact(*each) for each in zip(xs, x_scales, ws, w_scales)).view(*leading, 24)
            self.close(out, whole.chunk(r, dim)[me] / (r if op == "avg" else 1), what)
            has_form = self.compare_with_torch(lambda: [symm_mem._fused_scaled_matmul_reduce_scatter_fallback(
                *call, [*leading, 24], **options)], [out], what)
            self.assertTrue(has_form or mode == "row", what)
        self.assert_ran_on_tandem()

    def assert_ran_on_tandem(self):
        rows = tandem.torch.report()
        self.assertEqual({row["ran"] for row in rows} - {"overlapped", "serial"}, set())
        self.assertEqual({row["dtype"] for row in rows}, {"float8_e4m3fn"})

    def planted(self):
        """name: (call, words of the reason)."""
        name, r = self.name, self.size
        a, b, one = codes(16, 16), codes(16, 16).t(), torch.tensor(1.0)
        e5m2 = torch.randn(16, 16).to(torch.float8_e5m2)
        f32 = torch.float32

        def gather(a=a, b=b, a_scale=one, b_scale=one, dim=0, bias=None, result=None, dtype=f32):
            return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                a, [b], a_scale, [b_scale], dim, name, [bias], [result], [dtype], [False])

        def scatter(a=codes(4 * r, 16), b=b, a_scale=one, b_scale=one, dim=0, shape=None, **options):
            return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                a, b, a_scale, b_scale, options.pop("op", "sum"), dim, 0, name, shape or [4 * r, 16],
                **{"out_dtype": f32, **options})

        return {
            "e5m2": (lambda: gather(a=e5m2), "A is torch.float8_e5m2"),
            "e5m2 weight": (lambda: gather(b=e5m2.t()), "B is torch.float8_e5m2"),
            "blocks": (lambda: gather(a_scale=scales(16, 2), b_scale=scales(2, 16)), "A_scale"),
            "mixed": (lambda: gather(a_scale=scales(16, 1)), r"B_scale \[\]: expected \[1, 16\]"),
            "mixed weight": (lambda: gather(b_scale=scales(1, 16)), "expected one element"),
            "half scale": (lambda: gather(a_scale=one.half()), "A_scale is torch.float16"),
            "result scale": (lambda: gather(result=one), "result_scale"),
            "fp8 result": (lambda: gather(dtype=F8), "out_dtype 24"),
            "no out_dtype": (lambda: gather(dtype=None), "out_dtype None"),
            "f16": (lambda: gather(dtype=torch.float16), "out_dtype torch.float16"),
            "bias": (lambda: gather(bias=torch.randn(16).bfloat16()), "bias is torch.bfloat16"),
            "last dimension": (lambda: gather(dim=1, b=codes(16, 16 * r).t()), "A's last|product"),
            "scatter e5m2": (lambda: scatter(a=torch.randn(4 * r, 16).to(torch.float8_e5m2)), "A is torch.float8_e5m2"),
            "scatter bias": (lambda: scatter(bias=torch.randn(16)), "a bias, which PyTorch adds on every rank"),
            "scatter columns": (lambda: scatter(b=codes(8 * r, 16).t(), shape=[4 * r, 8 * r], dim=1), "orig_scatter_dim 1"),
            "scatter blocks": (lambda: scatter(a_scale=scales(4 * r, 2)), "A_scale"),
            "scatter result": (lambda: scatter(out_dtype=None), "out_dtype None"),
        }

    def test_refused(self):
        for what, (call, reason) in self.planted().items():
            with self.subTest(what):
                _receipts.clear()
                _fused.clear_plans()
                with gathers_of_bytes(), contextlib.suppress(Exception):
                    call()  # PyTorch's form may not support it either: the receipt stands
                row, = tandem.torch.report()
                self.assertEqual((row["ran"], row["calls"]), ("torch", 1))
                self.assertRegex(row["why"], reason)
                dist.barrier()

    def test_strict_refuses_them(self):
        tandem.torch.enable(strict=True)
        call, _ = self.planted()["e5m2"]
        with self.assertRaisesRegex(tandem.Unsupported, "would run as torch"):
            call()

    def test_rows_that_cannot_be_scattered(self):
        m, one = self.size + 1, torch.tensor(1.0)
        with self.assertRaisesRegex(tandem.InvalidArgument, f"{m} entries along orig_scatter_dim 0: expected a multiple"):
            torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                codes(m, 16), codes(16, 16).t(), one, one, "sum", 0, 0, self.name, [m, 16], out_dtype=torch.float32)

    def test_scales_of_later_calls_count(self):
        """A plan is of a shape: each call has scales and operands of its own."""
        a, b = codes(4, 16), codes(16, 16).t()
        for _ in range(3):
            a_scale, b_scale = scales(4 * self.size, 1), scales(1, 16)
            _, (out,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                a, [b], self.shard(a_scale), [b_scale], 0, self.name, [None], [None], [torch.float32], [True])
            self.close(out, exact(torch.cat([a.float()] * self.size), a_scale, b, b_scale))

    def test_inductor_writes_the_operators_into_graphs(self):
        """A gather before a product, and a scatter after one with scales by row and flattened rows;
        without other operations, which would be compiled."""
        if self.size != 2:
            self.skipTest("on two ranks only, as it compiles")
        x, up, h, down, one = codes(8, 16), codes(32, 16).t(), codes(2, 8, 32), codes(24, 32).t(), torch.tensor(0.5)
        h_scale, down_scale = scales(16, 1), scales(1, 24)

        def program(x, up, h, down):
            whole = collectives.all_gather_tensor(x, 0, self.group)
            y = torch._scaled_mm(h.reshape(-1, 32), down, h_scale, down_scale, out_dtype=torch.float32).reshape(2, 8, 24)
            return (torch._scaled_mm(whole, up, one, one, out_dtype=torch.bfloat16),
                    collectives.reduce_scatter_tensor(y, "sum", 1, self.group))

        first, second = torch.compile(program)(x, up, h, down)
        self.close(first, exact(torch.cat([x.float()] * 2), one, up, one))
        whole = 2 * exact(h.view(16, 32), h_scale, down, down_scale).view(2, 8, 24)
        self.close(second, whole.chunk(2, 1)[self.rank])
        rows = {row["op"]: row for row in tandem.torch.report()}
        for op in ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"):
            self.assertEqual(rows[op]["calls"], 1)
            self.assertIn(rows[op]["ran"], ("overlapped", "serial"))

    def test_a_measured_choice(self):
        """PyTorch's form runs repeatedly in the comparison; its kernel changes output_shape."""
        tandem.torch.enable(compare=True)
        x, w, one = codes(4 * self.size, 16), codes(16, 16).t(), torch.tensor(0.5)
        for _ in range(2):
            out = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x, w, one, one, "sum", 0, 0, self.name, [4 * self.size, 16], out_dtype=torch.float32)
            self.close(out, self.shard(self.size * exact(x, one, w, one)))
        row, = tandem.torch.report()
        self.assertEqual(row["calls"], 2)

        def kernel(shape, **options):
            shape[0] //= 2
            return shape

        form = _scaled.torch_form_of(kernel, ([8, 4],), {})
        self.assertEqual([form(), form()], [[4, 4], [4, 4]])


if __name__ == "__main__":
    unittest.main()
