"""tandem.torch: layers split over ranks against torch.nn.Linear, forward and backward."""
import unittest

import numpy as np

import tandem
from ranks import on_ranks, rows_of, torch, values

if torch:
    from tandem import torch as layers
    from tandem.torch import _products


@unittest.skipUnless(torch, "python3-torch is not installed")
class Layers(unittest.TestCase):
    def close(self, got, want, dtype):
        bound = 1e-4 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(got.float(), want.float(), rtol=bound, atol=bound)

    def whole(self, dtype, features=(6, 10)):
        generator = torch.Generator().manual_seed(3)
        linear = torch.nn.Linear(*features).to(dtype)
        with torch.no_grad():
            for p in linear.parameters():
                p.uniform_(-1, 1, generator=generator)
        x = torch.empty(8, features[0]).uniform_(-1, 1, generator=generator).to(dtype)
        dy = torch.empty(8, features[1]).uniform_(-1, 1, generator=generator).to(dtype)
        return linear, x.requires_grad_(), dy

    def check(self, layer_type, dtype, sequence_parallel):
        def body(comm):
            linear, x, dy = self.whole(dtype)
            y = linear(x)
            y.backward(dy)
            column = layer_type is layers.ColumnParallelLinear
            layer = layer_type.from_linear(comm, linear, sequence_parallel=sequence_parallel)

            def features(t, dim=1):
                begin, count = tandem.shard_of(t.shape[dim], comm.size, comm.rank)
                return t.detach().narrow(dim, begin, count)

            def rows(t):
                return rows_of(t.detach(), comm) if sequence_parallel else t.detach()

            local = (rows(x) if column else features(x)).clone().requires_grad_()
            got = layer(local, 8) if column and sequence_parallel else layer(local)
            self.close(got.detach(), features(y) if column else rows(y), dtype)
            got.backward((features(dy) if column else rows(dy)).contiguous())
            self.close(local.grad, rows(x.grad) if column else features(x.grad), dtype)
            self.close(layer.weight.grad, features(linear.weight.grad, 0 if column else 1), dtype)
            bias = linear.bias.grad
            self.close(layer.bias.grad, features(bias, 0) if column else bias, dtype)

        on_ranks(body)

    def test_column_parallel(self):
        for dtype in (torch.float32, torch.bfloat16):
            for sequence_parallel in (True, False):
                self.check(layers.ColumnParallelLinear, dtype, sequence_parallel)

    def test_row_parallel(self):
        for dtype in (torch.float32, torch.bfloat16):
            for sequence_parallel in (True, False):
                self.check(layers.RowParallelLinear, dtype, sequence_parallel)

    def test_defaults_of_torch_change_nothing(self):
        """Another default dtype, and a default device without memory."""
        def body(comm):
            for layer_type in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                for sequence_parallel in (True, False):
                    layer = layer_type(comm, 8, 8, sequence_parallel=sequence_parallel)
                    self.assertEqual(layer.weight.dtype, torch.float32)
                    features = layer.weight.shape[1]
                    x = torch.ones(4, features, dtype=torch.float32, device="cpu", requires_grad=True)
                    layer(x).sum().backward()
                    for tensor in (x, layer.weight, layer.bias):
                        self.assertEqual((tensor.grad.dtype, tensor.grad.device.type),
                                         (torch.float32, "cpu"))
            uncompressed = torch.ones(4, 8, dtype=torch.float32, device="cpu")
            self.assertEqual(tandem.all_gather(comm, uncompressed).device.type, "cpu")

        torch.set_default_dtype(torch.float64)
        try:
            on_ranks(body)
        finally:
            torch.set_default_dtype(torch.float32)
        if not hasattr(torch, "set_default_device"):  # PyTorch 2
            return
        torch.set_default_device("meta")
        try:
            on_ranks(body)
        finally:
            torch.set_default_device(None)

    def test_what_needs_no_gradient_gets_none(self):
        """A frozen weight needs no GEMM: autograd would discard the result."""
        made = []

        class Counted(_products.Operators):
            def __call__(self, kind, *shape, **options):
                made.append(kind.__name__)
                return super().__call__(kind, *shape, **options)

        def body(comm):
            for layer_type in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                for sequence_parallel in (True, False):
                    layer = layer_type(comm, 8, 8, sequence_parallel=sequence_parallel)
                    layer._operators = Counted(comm, layer._operators.features)
                    layer.weight.requires_grad_(False)
                    layer.bias.requires_grad_(False)
                    x = torch.ones(4, layer.weight.shape[1], requires_grad=True)
                    y = layer(x)
                    gradients = y.grad_fn
                    while type(gradients).__name__.startswith(("View", "Reshape", "UnsafeView")):
                        gradients = gradients.next_functions[0][0]
                    dx, dw, db = gradients._forward_cls.backward(
                        gradients, torch.ones_like(y))[:3]
                    self.assertIsNone(dw)
                    self.assertIsNone(db)
                    self.assertEqual(dx.shape, x.shape)
                    layer.weight.requires_grad_()
                    layer.bias.requires_grad_()
                    y = layer(x.detach())
                    y.sum().backward()
                    self.assertEqual(layer.weight.grad.shape, layer.weight.shape)

        on_ranks(body)
        self.assertIn("AgWgrad", made)

    def test_gradients_by_finite_differences(self):
        """Gradients of a whole MLP against finite differences of the loss: f32, so the steps are
        large."""
        def body(comm):
            torch.manual_seed(0)  # rank 0's seed counts
            up = layers.ColumnParallelLinear(comm, 6, 12)
            down = layers.RowParallelLinear(comm, 12, 6)
            x = torch.linspace(-1, 1, 30).reshape(5, 6)
            local = rows_of(x, comm).clone().requires_grad_()

            def loss():
                y = down(torch.tanh(up(local, tokens=5)))
                return tandem.all_reduce(comm, (y.detach() ** 2).sum().reshape(1)).item(), y

            y = loss()[1]
            (y ** 2).sum().backward()
            for tensor in (up.weight, down.weight, up.bias, local):
                step, analytic = 1e-2, 0.0
                differences = []
                for sign in (1, -1):
                    with torch.no_grad():
                        if tensor.numel():
                            tensor.view(-1)[0] += sign * step
                        differences.append(loss()[0])
                        if tensor.numel():
                            tensor.view(-1)[0] -= sign * step
                if tensor.numel():
                    analytic = tensor.grad.view(-1)[0].item()
                total = tandem.all_reduce(comm, np.array([analytic], "f4"))[0]
                self.assertAlmostEqual((differences[0] - differences[1]) / (2 * step), total,
                                       delta=0.01 * (1 + abs(total)))

        on_ranks(body)

    def test_initial_weights_do_not_depend_on_the_layout(self):
        def body(comm):
            if comm.rank == 0:
                torch.manual_seed(5)
            layer = layers.ColumnParallelLinear(comm, 4, 6, bias=False)
            return tandem.all_gather(comm, layer.weight.detach())

        wholes = []
        on_ranks(lambda comm: wholes.append(body(comm)))
        if len(wholes) > 1:
            self.assertEqual({tuple(whole.shape) for whole in wholes}, {(6, 4)})
            for whole in wholes:
                self.assertTrue(torch.equal(whole, wholes[0]))

    def test_codec(self):
        """Near the uncompressed layer, in forward and gradients, and different from it on several
        ranks."""
        def body(comm):
            for layer_type in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                linear = torch.nn.Linear(64, 64)
                with torch.no_grad():
                    for seed, p in enumerate(linear.parameters()):
                        p.copy_(torch.tensor(values(tuple(p.shape), seed)))
                got = []
                for codec in (None, "int8", tandem.Wire("int8")):
                    layer = layer_type.from_linear(comm, linear, codec=codec)
                    whole = torch.tensor(values((8, 64), 5))
                    x = rows_of(whole, comm) if layer_type is layers.ColumnParallelLinear else \
                        whole[:, :layer.weight.shape[1]]
                    x = x.clone().requires_grad_()
                    y = layer(x, 8) if layer_type is layers.ColumnParallelLinear else layer(x)
                    (y ** 2).sum().backward()
                    got.append([t.detach().clone() for t in (y, x.grad, layer.weight.grad, layer.bias.grad)])
                for uncompressed, encoded, again in zip(*got):
                    scale = float(uncompressed.abs().max()) if uncompressed.numel() else 0
                    torch.testing.assert_close(encoded, uncompressed, rtol=0, atol=0.05 * scale + 1e-3)
                    torch.testing.assert_close(encoded, again, rtol=0, atol=1e-3 * scale)
                self.assertEqual(comm.size == 1 or got[0][0].numel() == 0,
                                 torch.equal(got[0][0], got[1][0]))
            column = layers.ColumnParallelLinear(comm, 4, 4, sequence_parallel=False, codec="int8")
            with self.assertRaisesRegex(tandem.InvalidArgument, "codec int8"):
                column(torch.ones(2, 4))
            with self.assertRaises(tandem.InvalidArgument):
                layers.RowParallelLinear(comm, 4, 4, codec="int9")

        on_ranks(body)

    def test_moe(self):
        """Results, and the router's gradient, do not depend on the layout."""
        def train(comm, x, tp):
            if comm.rank == 0:
                torch.manual_seed(3)
            layer = layers.Moe(comm, 12, 16, 24, 12, 3, tp)
            local = x.clone().requires_grad_()
            y = layer(local)
            (y ** 2).sum().backward()
            self.assertEqual(layer.w_in.grad.shape, layer.w_in.shape)
            return y.detach(), local.grad, layer.router.grad

        x = torch.tensor(values((12, 16), 1))
        with tandem.World(1) as world:
            want = train(world.comm(), x, 1)

        def body(comm):
            for tp in {1, comm.size}:
                y, dx, drouter = train(comm, rows_of(x, comm), tp)
                self.close(y, rows_of(want[0], comm), torch.float32)
                self.close(dx, rows_of(want[1], comm), torch.float32)
                self.close(drouter, want[2], torch.float32)
            shaped = layers.Moe(comm, 4, 8, 6, 12, dtype=torch.bfloat16, codec="int8", combine_codec="int8")
            out = shaped(torch.ones(2, 2, 8, dtype=torch.bfloat16))
            self.assertEqual((out.shape, out.dtype), ((2, 2, 8), torch.bfloat16))
            with self.assertRaisesRegex(tandem.InvalidArgument, "features"):
                shaped(torch.ones(2, 7))

        on_ranks(body)

    def test_gather_rows(self):
        def body(comm):
            x = torch.arange(7.0).reshape(7, 1)
            local = rows_of(x, comm).clone().requires_grad_()
            got = layers.gather_rows(comm, local, tokens=7)
            self.assertTrue(torch.equal(got.detach(), x))
            (got * x).sum().backward()
            self.close(local.grad, rows_of(x, comm) * comm.size, torch.float32)

        on_ranks(body)

    def test_wrong_shapes(self):
        def body(comm):
            layer = layers.ColumnParallelLinear(comm, 4, 6)
            for x, tokens in ((torch.ones(2, 3), None), (torch.ones(2, 4), 5 * comm.size)):
                with self.assertRaises(tandem.InvalidArgument):
                    layer(x, tokens)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
