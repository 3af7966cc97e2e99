"""tandem.torch under torch.compile with fullgraph, against the same layers in eager mode."""
import functools
import gc
import unittest

import tandem
from ranks import LAUNCHED, rows_of, torch, values

if torch:
    from tandem import torch as layers

WHY_NOT = ("python3-torch is not installed" if not torch else
           None if hasattr(torch.library, "custom_op") else
           f"PyTorch {torch.__version__} has no torch.library.custom_op: 2.4 or later")

if not WHY_NOT:
    from tandem.torch import _ops


@functools.lru_cache(None)
def why_no_inductor():
    """Needs a compiler and PyTorch's headers: on Debian python3-setuptools and libtorch-dev."""
    try:
        torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(3))
        return None
    except Exception as error:
        return "; ".join(str(error).strip().splitlines()[:2])


def on_ranks(body, backend="aot_eager"):
    """Runs body(comm, backend) on fresh worlds: ranks that are threads share compiled code.
    aot_eager runs the captured graph unchanged."""
    for ranks in [LAUNCHED] if LAUNCHED else [1, 3] if backend == "aot_eager" else [2]:
        torch._dynamo.reset()
        tandem.run(ranks, lambda comm: body(comm, backend), deadline=60)


@unittest.skipIf(WHY_NOT, WHY_NOT)
class Compiled(unittest.TestCase):
    def same(self, backend, eager, compiled):
        """The captured graph gives equal bits; generated code may round in another order."""
        self.assertEqual(len(eager), len(compiled))
        for want, got in zip(eager, compiled):
            bound = {"rtol": 0, "atol": 0} if backend == "aot_eager" else \
                {"rtol": 2e-2, "atol": 2e-2} if want.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(got, want, **bound)

    def both(self, backend, module, x):
        """Results and gradients of the module, eager and compiled."""
        results = []
        for run in (module, torch.compile(module, fullgraph=True, backend=backend)):
            module.zero_grad(set_to_none=True)
            local = x.clone().requires_grad_()
            y = run(local)
            (y.float() ** 2).sum().backward()
            results.append([y.detach(), local.grad, *(p.grad.clone() for p in module.parameters()
                                                     if p.requires_grad)])
        self.same(backend, *results)

    def mlp(self, comm, dtype, tokens, sequence_parallel, **options):
        class Mlp(torch.nn.Module):
            def __init__(self):
                super().__init__()
                whole = [torch.nn.Linear(*features, dtype=dtype) for features in ((8, 12), (12, 8))]
                with torch.no_grad():
                    for seed, p in enumerate(p for each in whole for p in each.parameters()):
                        p.copy_(torch.tensor(values(tuple(p.shape), seed)))
                options["sequence_parallel"] = sequence_parallel
                self.up = layers.ColumnParallelLinear.from_linear(comm, whole[0], **options)
                self.down = layers.RowParallelLinear.from_linear(comm, whole[1], **options)

            def forward(self, x):
                hidden = self.up(x, tokens) if sequence_parallel else self.up(x)
                return self.down(torch.nn.functional.gelu(hidden))

        return Mlp()

    def check_mlp(self, dtype, sequence_parallel, backend):
        def body(comm, backend):
            module = self.mlp(comm, dtype, 10, sequence_parallel)
            x = torch.tensor(values((10, 8), 7)).to(dtype)
            self.both(backend, module, rows_of(x, comm) if sequence_parallel else x)

        on_ranks(body, backend)

    def test_mlp(self):
        for dtype in (torch.float32, torch.bfloat16):
            for sequence_parallel in (True, False):
                self.check_mlp(dtype, sequence_parallel, "aot_eager")

    def test_inductor(self):
        if why_no_inductor():
            self.skipTest(f"inductor does not compile here: {why_no_inductor()}")
        for sequence_parallel in (True, False):
            self.check_mlp(torch.float32, sequence_parallel, "inductor")
        self.check_moe("inductor")

    def test_codec_and_frozen_weights(self):
        def body(comm, backend):
            module = self.mlp(comm, torch.float32, None, True, codec="int8")
            module.up.weight.requires_grad_(False)
            module.down.bias.requires_grad_(False)
            self.both(backend, module, torch.tensor(values((4, 8), comm.rank)))
            self.assertIsNone(module.up.weight.grad)

        on_ranks(body)

    def test_autocast(self):
        def body(comm, backend):
            module = self.mlp(comm, torch.float32, None, True)

            def run(x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return module(x)

            x, results = torch.tensor(values((4, 8), comm.rank)), []
            for each in (run, torch.compile(run, fullgraph=True, backend=backend)):
                module.zero_grad(set_to_none=True)
                local = x.clone().requires_grad_()
                y = each(local)
                (y.float() ** 2).sum().backward()
                self.assertEqual(y.dtype, torch.bfloat16)
                results.append([y.detach(), local.grad, *(p.grad.clone() for p in module.parameters())])
            self.same(backend, *results)

        on_ranks(body)

    def test_rows_that_change(self):
        """One graph for every number of tokens."""
        def body(comm, backend):
            module = self.mlp(comm, torch.float32, None, True)
            run = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
            for rows in (2, 3, 5):
                x = torch.tensor(values((rows, 8), comm.rank))
                self.same(backend, [module(x).detach()], [run(x).detach()])

        on_ranks(body)

    def test_gather_rows(self):
        def body(comm, backend):
            def gathered(x):
                return layers.gather_rows(comm, x.sin(), tokens=7) * 2

            x, results = torch.tensor(values((7, 3), 1)), []
            for run in (gathered, torch.compile(gathered, fullgraph=True, backend=backend)):
                local = rows_of(x, comm).clone().requires_grad_()
                y = run(local)
                (y ** 2).sum().backward()
                results.append([y.detach(), local.grad])
            self.same(backend, *results)

        on_ranks(body)

    def check_moe(self, backend):
        def body(comm, backend):
            module = layers.Moe(comm, 5, 8, 6, 12, top_k=2)
            self.both(backend, module, torch.tensor(values((5, 8), comm.rank)))

        on_ranks(body, backend)

    def test_moe(self):
        self.check_moe("aot_eager")
        gc.collect()
        self.assertEqual(len(_ops._tickets), 0)

    def test_a_layer_of_experts_by_itself(self):
        def body(comm, backend):
            layer = tandem.MoeLayer(comm, 5, 8, 6, 4 * comm.size, 2)
            w_in, w_out = (torch.tensor(values(shape, 3)) for shape in ((4 * 2 * 6, 8), (4 * 8, 6)))
            x, weights = torch.tensor(values((5, 8), comm.rank)), torch.tensor(values((5, 2), 7)).abs()
            experts = torch.arange(10).reshape(5, 2) % (4 * comm.size)

            def forward(x, weights):
                return layers.moe(layer, x * 2, experts, weights, w_in, w_out) + 1

            results = []
            for run in (forward, torch.compile(forward, fullgraph=True, backend=backend)):
                local, by = x.clone().requires_grad_(), weights.clone().requires_grad_()
                y = run(local, by)
                (y ** 2).sum().backward()
                results.append([y.detach(), local.grad, by.grad])
            self.same(backend, *results)

        on_ranks(body)

    def test_operators_by_themselves(self):
        def body(comm, backend):
            m, n, k = 6 * comm.size, 4, 8
            whole, weight = torch.tensor(values((m, k), 1)), torch.tensor(values((n, k), 2))
            bias, dy = torch.tensor(values((n,), 3)), torch.tensor(values((m, n), 4))
            calls = [(tandem.AgGemm(comm, m, n, k, bias=True), (rows_of(whole, comm), weight, bias)),
                     (tandem.GemmRs(comm, m, n, k), (whole, weight)),
                     (tandem.GemmAr(comm, m, n, k), (whole, weight)),
                     (tandem.AgWgrad(comm, m, n, k), (rows_of(whole, comm), dy))]
            # Ranks that are threads share a limit of 8 compilations per function.
            for op, operands in calls if LAUNCHED or comm.size == 1 else calls[:2]:
                def forward(*operands, op=op):
                    return layers.call(op, *operands).exp()

                compiled = torch.compile(forward, fullgraph=True, backend=backend)
                self.same(backend, [forward(*operands)], [compiled(*operands)])
                with self.assertRaisesRegex(tandem.InvalidArgument, "requires a gradient"):
                    layers.call(op, operands[0].clone().requires_grad_(), *operands[1:])

        on_ranks(body)

    @unittest.skipIf(LAUNCHED, "one rank")
    def test_operators_are_what_they_say(self):
        """PyTorch's own check: schemas, shapes and strides of fake kernels, gradients."""
        def body(comm):
            x, bias = (torch.tensor(values(shape, 1), requires_grad=True) for shape in ((4, 6), (3,)))
            weight = torch.tensor(values((3, 6), 2), requires_grad=True)
            for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                for parallel in (True, False):
                    layer = kind(comm, 6, 3, sequence_parallel=parallel)
                    name = {(True, True): "gather_linear", (True, False): "copied_linear",
                            (False, True): "linear_scatter", (False, False): "linear_sum"}[
                                kind is layers.ColumnParallelLinear, parallel]
                    op = getattr(torch.ops.tandem, name).default
                    torch.library.opcheck(op, (x, weight, bias, layer._handle, None))
            torch.library.opcheck(torch.ops.tandem.gather_rows.default, (x, id(comm), None))
            torch.library.opcheck(torch.ops.tandem.shared.default, (weight, layer._handle))

        tandem.run(1, body)

    @unittest.skipIf(LAUNCHED, "one rank")
    def test_layers_go(self):
        """The registry keeps no dead layers, and a call that names one is rejected."""
        def body(comm):
            before = len(_ops._layers)
            layer = layers.ColumnParallelLinear(comm, 4, 4)
            handle, x, weight = layer._handle, torch.ones(2, 4), layer.weight.detach()
            self.assertEqual(torch.ops.tandem.gather_linear(x, weight, None, handle, None).shape, (2, 4))
            del layer
            gc.collect()
            self.assertEqual(len(_ops._layers), before)
            with self.assertRaisesRegex(tandem.InvalidArgument, "it is gone"):
                torch.ops.tandem.gather_linear(x, weight, None, handle, None)
            with self.assertRaisesRegex(tandem.InvalidArgument, "gone"):
                torch.ops.tandem.gather_rows(x, id(x), None)

        tandem.run(1, body)


if __name__ == "__main__":
    unittest.main()
