"""tandem.torch layers with other features of PyTorch programs: varying token counts, shards without
features, mixed precision, copies, state dicts."""
import copy
import io
import os
import unittest
from unittest import mock

import tandem
from ranks import LAUNCHED, on_ranks, rank_counts, rows_of, torch, values

MEASURES = os.environ.get("TANDEM_TUNE") != "0"

if torch:
    from tandem.torch import _products, _receipts
    from tandem import torch as layers


def parallel_layers(comm, in_features, out_features, tokens=6):
    """Each of our layers, and this rank's shard of the input."""
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        for sequence_parallel in (True, False):
            layer = kind(comm, in_features, out_features, sequence_parallel=sequence_parallel)
            x = torch.tensor(values((tokens, in_features), 1))
            if kind is layers.RowParallelLinear:
                begin, count = tandem.shard_of(in_features, comm.size, comm.rank)
                x = x[:, begin:begin + count]
            elif sequence_parallel:
                layer.forward = lambda x, forward=layer.forward: forward(x, tokens)
                x = rows_of(x, comm)
            yield layer, x.clone().requires_grad_()


def close(got, want):
    torch.testing.assert_close(got.float(), want.float(), rtol=5e-2, atol=5e-2)


@unittest.skipUnless(torch, "python3-torch is not installed")
class ManyNumbersOfTokens(unittest.TestCase):
    def test_operators_are_bounded_and_results_right(self):
        """Keeps operators for the last token counts, shared by all layers of a Comm."""
        def body(comm):
            linear = torch.nn.Linear(8, 8)
            with torch.no_grad():
                for seed, p in enumerate(linear.parameters()):
                    p.copy_(torch.tensor(values(tuple(p.shape), seed)))
            two = [layers.ColumnParallelLinear.from_linear(comm, linear) for _ in range(2)]
            cache = two[0]._operators._cache
            self.assertIs(cache, two[1]._operators._cache)
            for tokens in [*range(1, 30), 3, 29, 4]:
                x = torch.tensor(values((tokens, 8), tokens))
                begin, count = tandem.shard_of(8, comm.size, comm.rank)
                for layer in two:
                    y = layer(rows_of(x, comm).requires_grad_(), tokens)
                    torch.testing.assert_close(y, linear(x)[:, begin:begin + count], rtol=1e-4, atol=1e-4)
                    y.sum().backward()
                self.assertLessEqual(len(cache.by_tokens), cache.MAX_TOKEN_COUNTS)
                self.assertEqual(len(cache.by_tokens[tokens]), 3)  # forward, and gradients of x and weight
            self.assertEqual(list(cache.by_tokens)[-3:], [3, 29, 4])

        on_ranks(body)

    def test_shards_that_are_equal_on_one_rank_only(self):
        """Layers with 5 and 6 features on 2 ranks: shards of 3 and 3, but 2 and 3."""
        def body(comm):
            for features in (5, 6, 5, 6):
                layer = layers.ColumnParallelLinear(comm, 4, features, bias=False)
                self.assertEqual(layer(torch.ones(2, 4)).shape[0], 2 * comm.size)

        on_ranks(body)

    def test_operators_go_with_their_world(self):
        on_ranks(lambda comm: layers.ColumnParallelLinear(comm, 4, 4))
        with tandem.World(1) as world:
            layer = layers.ColumnParallelLinear(world.comm(), 4, 4)
            self.assertEqual([cache.comm for cache in _products._caches.values()], [world.comm()])
            del layer


@unittest.skipUnless(torch, "python3-torch is not installed")
class Receipts(unittest.TestCase):
    def rows(self, shape):
        """Those of the report with this shape, by operator."""
        return {row["op"]: row for row in layers.report() if shape in row["shape"].split(" as ")[0]}

    def check(self, rows, expected, ranks):
        """expected: calls on each rank by operator."""
        self.assertEqual({op: row["calls"] for op, row in rows.items()},
                         {op: calls * (1 if LAUNCHED else ranks) for op, calls in expected.items()})
        for row in rows.values():
            self.assertEqual((row["dtype"], row["group"], row["asked"]), ("float32", ranks, "overlapped"))
            self.assertEqual(row["why"] == "", row["ran"] == "overlapped")

    def on_ranks(self, body, shape, expected):
        for ranks in rank_counts():
            _receipts.clear()
            on_ranks(body, [ranks])
            self.check(self.rows(shape), expected, ranks)

    def test_of_linears(self):
        """The report counts the calls of a layer's operators in both passes, a copied layer's too."""
        def body(comm):
            up = layers.ColumnParallelLinear(comm, 12, 12 * comm.size, bias=False)
            for layer in (up, copy.deepcopy(up)):
                for _ in range(2):
                    layer(torch.ones(3, 12).requires_grad_()).sum().backward()
            down = layers.RowParallelLinear(comm, 12 * comm.size, 12, bias=False, sequence_parallel=False)
            down(torch.ones(3 * comm.size, 12))

        self.on_ranks(body, "n 12 k 12", {"AgGemm": 4, "GemmRs": 4, "AgWgrad": 4, "GemmAr": 1})

    def test_of_experts_and_attention(self):
        def body(comm):
            experts = layers.Moe(comm, 4, 44, 8, comm.size)
            experts(torch.ones(4, 44)).sum().backward()
            with torch.no_grad():
                experts(torch.ones(4, 44))
            attention = tandem.ContextAttention(comm, 44, 2, 6)
            rows = attention.query_chunks[0][1] + attention.query_chunks[1][1]
            x = torch.ones(rows, 12, requires_grad=True)
            layers.context_attention(attention, x, x, x).sum().backward()
            cross = layers.CrossAttention(comm, 44, 4, 8, 8, 2, 4)
            count = [tandem.shard_of(length, comm.size, comm.rank)[1] for length in (44, 4)]
            cross(torch.ones(count[0], 8), torch.ones(count[1], 8)).sum().backward()

        passes = {"MoeLayer": 2, "ContextAttention": 1, "CrossAttention": 1}
        backward = {"MoeLayer backward": 1, "ContextAttention backward": 1, "CrossAttention backward": 1}
        self.on_ranks(body, " 44 ", {**passes, **backward})

    def test_strict_refuses_before_a_call(self):
        def body(comm):
            op = tandem.AgGemm(comm, 3 * comm.size, 4, 52, strategy="serial")
            layers.call(op, torch.ones(3, 52), torch.ones(4, 52))  # as requested
            if MEASURES and comm.size > 1:
                return
            layer = layers.ColumnParallelLinear(comm, 52, 4)
            why = "a group of 1 rank has nothing to overlap" if comm.size == 1 else "no times are known"
            with self.assertRaisesRegex(tandem.Unsupported, f"as serial: {why}.*: expected overlapped"):
                layer(torch.ones(3, 52))
            self.assertNotIn(" k 52", str([row for row in layers.report() if row["asked"] == "overlapped"]))

        _receipts.clear()
        with mock.patch.dict(os.environ, {"TANDEM_STRICT": "1"}):
            on_ranks(body)


@unittest.skipUnless(torch, "python3-torch is not installed")
class Shards(unittest.TestCase):
    def test_without_features_or_tokens(self):
        """Fewer features, or tokens, than ranks."""
        def body(comm):
            for shape in ((4, 2, 6), (2, 4, 6), (1, 1, 6), (4, 4, 2), (2, 1, 1), (3, 3, 0)):
                for layer, x in parallel_layers(comm, *shape):
                    layer(x).sum().backward()
                    self.assertEqual(x.grad.shape, x.shape)
                    self.assertEqual(layer.weight.grad.shape, layer.weight.shape)

        on_ranks(body)

    def test_of_more_dimensions(self):
        def body(comm):
            layer = layers.RowParallelLinear(comm, 2, 4, sequence_parallel=False)
            x = torch.ones(2, 3, layer.weight.shape[1])
            self.assertEqual(layer(x).shape, (2, 3, 4))
            self.assertEqual(layer(x[0, 0]).shape, (4,))

        on_ranks(body)


@unittest.skipUnless(torch, "python3-torch is not installed")
class Inputs(unittest.TestCase):
    def test_that_no_layer_takes_are_refused_by_name(self):
        """Raised locally: other ranks do not see this call."""
        def body(comm):
            experts = layers.Moe(comm, 6, 8, 6, 12, 2)
            for layer in (*(layer for layer, _ in parallel_layers(comm, 8, 8)), experts):
                ones = torch.ones(6, layer.weight.shape[1] if layer is not experts else 8)
                for x, said in ((ones.double(), "float64"), (ones.long(), "int64"), (ones.bfloat16(), "bfloat16"),
                                (ones.to("meta"), "on meta"), (torch.tensor(1.0), r"shape \[\]"),
                                (ones.to_sparse(), "sparse"), (ones.numpy(), "ndarray"), (None, "NoneType"),
                                (torch.ones(6, 9), "9 features")):
                    with self.subTest(said), self.assertRaisesRegex(tandem.InvalidArgument, "^x: .*" + said):
                        layer(x)
            with self.assertRaisesRegex(tandem.InvalidArgument, r"^x: .*shape \[\]"):
                layers.gather_rows(comm, torch.tensor(1.0))

        on_ranks(body)

    def test_layers_follow_a_change_of_dtype(self):
        def body(comm):
            model = torch.nn.Sequential(
                layers.ColumnParallelLinear(comm, 8, 8, sequence_parallel=False),
                layers.RowParallelLinear(comm, 8, 8, sequence_parallel=False), layers.Moe(comm, 6, 8, 6, 12, 2))
            x = torch.tensor(values((6, 8), comm.rank))
            whole = tandem.broadcast(comm, x.clone())
            want = model(whole)
            got = model.bfloat16()(whole.bfloat16())
            self.assertEqual(got.dtype, torch.bfloat16)
            close(got, want)
            self.assertEqual(model.float()(whole).dtype, torch.float32)

        on_ranks(body)


@unittest.skipUnless(torch, "python3-torch is not installed")
class Autocast(unittest.TestCase):
    def on_bf16(self, enabled=True):
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)

    def test_layers(self):
        """bf16 computation with f32 parameters, whose gradients are f32, also if backward runs
        inside autocast."""
        def body(comm):
            for within in (False, True):
                for layer, x in parallel_layers(comm, 8, 12):
                    want = layer(x)
                    want.sum().backward()
                    wants = [x.grad, layer.weight.grad, layer.bias.grad]
                    x.grad = layer.weight.grad = layer.bias.grad = None
                    with self.on_bf16():
                        got = layer(x)
                        if within:
                            got.float().sum().backward()
                    if not within:
                        got.float().sum().backward()
                    self.assertEqual(got.dtype, torch.bfloat16)
                    close(got, want)
                    for gradient, other in zip((x.grad, layer.weight.grad, layer.bias.grad), wants):
                        self.assertEqual(gradient.dtype, torch.float32)
                        close(gradient, other)

        on_ranks(body)

    def test_gradients_within_of_what_ran_outside(self):
        """Gradients use the dtype of the forward computation: f32, bit for bit."""
        def body(comm):
            for layer, x in parallel_layers(comm, 8, 12):
                results = []
                for enabled in (False, True):
                    x.grad = layer.weight.grad = None
                    y = layer(x)
                    with self.on_bf16(enabled):
                        y.backward(torch.ones_like(y))
                    results.append((x.grad, layer.weight.grad))
                for got, want in zip(*results):
                    self.assertTrue(torch.equal(got, want))

        on_ranks(body)

    def test_experts(self):
        """Computes in the layer's dtype for rows of any dtype; router logits are f32."""
        def body(comm):
            layer = layers.Moe(comm, 6, 8, 12, 12, 2)
            x = torch.tensor(values((6, 8), comm.rank)).bfloat16()
            want = layer(x.float())
            with self.on_bf16():
                got = layer(x)
                loose = layers.moe(layer.layer, x, torch.zeros(6, 2, dtype=torch.int64) + torch.arange(2),
                                   torch.ones(6, 2), layer.w_in, layer.w_out)
            self.assertEqual((got.dtype, loose.dtype), (torch.float32, torch.float32))
            self.assertTrue(torch.equal(got, want))
            got.sum().backward()
            self.assertEqual(layer.router.grad.dtype, torch.float32)

        on_ranks(body)


@unittest.skipUnless(torch, "python3-torch is not installed")
class Copies(unittest.TestCase):
    def test_have_parameters_of_their_own_on_the_same_ranks(self):
        def body(comm):
            module = torch.nn.Module()
            module.op, module.comm = tandem.AllReduce(comm, (2,)), comm
            module.layer = layers.ColumnParallelLinear(comm, 8, 12, codec="int8")
            module.experts = layers.Moe(comm, 6, 8, 12, 12, 2)
            other = copy.deepcopy(module)
            self.assertIs(other.comm, comm)
            self.assertIs(other.op, module.op)
            self.assertTrue(other.layer._handle == 0 or other.layer._handle != module.layer._handle)
            x = torch.tensor(values((6, 8), comm.rank))
            for name in ("layer", "experts"):
                local, its = getattr(module, name), getattr(other, name)
                self.assertTrue(torch.equal(local(x), its(x)))
                with torch.no_grad():
                    for parameter in its.parameters():
                        parameter.zero_()
                self.assertEqual(its(x).abs().sum(), 0)
                if local(x).numel():
                    self.assertGreater(local(x).abs().sum(), 0)

        on_ranks(body)

    def test_state_dicts_go_round(self):
        """Loads from a file; loading into a layer of another layout raises an error naming the
        parameter."""
        def body(comm):
            layer, other = (layers.RowParallelLinear(comm, 8, 6) for _ in range(2))
            file = io.BytesIO()
            torch.save(layer.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file))
            x = torch.ones(3, layer.weight.shape[1])
            self.assertTrue(torch.equal(layer(x), other(x)))
            with self.assertRaisesRegex(RuntimeError, "weight"):
                other.load_state_dict(torch.nn.Linear(9, 6).state_dict())
            with self.assertRaisesRegex(TypeError, "Comm|pickle"):
                torch.save(layer, io.BytesIO())

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
