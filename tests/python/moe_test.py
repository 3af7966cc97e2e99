"""Mixture-of-Experts layer against every expert computed for every row."""
import gc
import unittest

import numpy as np

import tandem
from ranks import assert_same, frameworks, jax, ml_dtypes, on_ranks, torch, values

if torch:
    from tandem import torch as layers

HIDDEN, FFN, EXPERTS, TOP_K = 16, 24, 12, 3
W_IN, W_OUT = values((EXPERTS, 2, FFN, HIDDEN), 1), values((EXPERTS, HIDDEN, FFN), 2)


def routing(rows, seed, most=EXPERTS):
    """Routing to experts below `most`."""
    chance = np.random.default_rng(seed)
    experts = [chance.permutation(most)[:TOP_K] for _ in range(rows)]
    return np.array(experts, "i4").reshape(rows, TOP_K), chance.random((rows, TOP_K), dtype="f4")


def expert_weights(comm, tp, w_in=W_IN, w_out=W_OUT):
    """This rank's shard of w_in [experts, 2, ffn, hidden] and w_out [experts, hidden, ffn]."""
    first, count = tandem.shard_of(EXPERTS, comm.size // tp, comm.rank // tp)
    at, width = tandem.shard_of(FFN, tp, comm.rank % tp)
    local_in = w_in[first:first + count, :, at:at + width].reshape(-1, HIDDEN)
    local_out = w_out[first:first + count, :, at:at + width].reshape(-1, width)
    return np.ascontiguousarray(local_in), np.ascontiguousarray(local_out)


def each_layout(body, dtype="f32"):
    def ranks(comm):
        for tp in range(1, comm.size + 1):
            if comm.size % tp:
                continue
            for strategy in ("serial", "overlapped"):
                body(comm, tp, tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, tp, dtype,
                                               strategy=strategy))

    on_ranks(ranks)


def exact(x, experts, weights, w_in, w_out):
    """The layer's result in f64, and the sum of magnitudes of its terms."""
    want, size = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(len(x)):
        for e, weight in zip(experts[t], weights[t]):
            gate, up = (w_in[e, i].astype("f8") @ x[t] for i in range(2))
            inner = gate / (1 + np.exp(-gate)) * up
            want[t] += weight * (w_out[e] @ inner)
            size[t] += abs(weight) * (np.abs(w_out[e]) @ np.abs(inner))
    return want, size


class Forward(unittest.TestCase):
    def test_results(self):
        """Any number of rows per rank including none, routed to all experts or to a few."""
        for name, make, back, dtype in frameworks():
            step = 2.0**-18 if "bfloat16" not in name else 2.0**-6
            w_in, w_out = back(make(W_IN)), back(make(W_OUT))  # rounded to the dtype

            def body(comm, tp, layer):
                weights_of_rank = [make(a) for a in expert_weights(comm, tp)]
                for most in (EXPERTS, TOP_K):
                    rows = max(0, 9 - 4 * comm.rank)
                    x = make(values((rows, HIDDEN), 3 + comm.rank))
                    experts, weights = routing(rows, comm.rank, most)
                    if not isinstance(x, np.ndarray):
                        experts, weights = torch.tensor(experts), torch.tensor(weights)
                    out, batch = layer.forward(x, experts, weights, *weights_of_rank)
                    self.assertIs(type(out), type(x))
                    self.assertEqual((out.shape, out.dtype), (x.shape, x.dtype))
                    want, size = exact(back(x), np.asarray(experts), np.asarray(weights), w_in, w_out)
                    self.assertTrue((np.abs(back(out) - want) <= size * step + 1e-6).all(), (name, tp, most))
                    loads = np.zeros(comm.size // tp * len(batch.rows_of_experts), "f4")
                    first = len(batch.rows_of_experts) * (comm.rank // tp)
                    loads[first:first + len(batch.rows_of_experts)] = batch.rows_of_experts
                    routed = np.bincount(np.asarray(experts).reshape(-1), minlength=EXPERTS).astype("f4")
                    np.testing.assert_array_equal(tandem.all_reduce(comm, loads),
                                                  tp * tandem.all_reduce(comm, routed))

            each_layout(body, dtype)

    def test_out(self):
        """out is returned itself, with equal bits; for bf16 it may be f32."""
        for name, make, back, dtype in frameworks():
            def body(comm, tp, layer):
                x, weights_of_rank = make(values((5, HIDDEN), comm.rank)), [make(a) for a in expert_weights(comm, tp)]
                experts, weights = routing(5, comm.rank)
                if not isinstance(x, np.ndarray):
                    experts, weights = torch.tensor(experts), torch.tensor(weights)
                out = layer.forward(x, experts, weights, *weights_of_rank)[0]
                again = make(values((5, HIDDEN), 99))
                self.assertIs(layer.forward(x, experts, weights, *weights_of_rank, again)[0], again)
                np.testing.assert_array_equal(back(again), back(out))
                wide = make(values((5, HIDDEN), 99)) if isinstance(x, np.ndarray) else torch.empty(5, HIDDEN)
                self.assertIs(layer.forward(x, experts, weights, *weights_of_rank, out=wide)[0], wide)
                rounded = wide if isinstance(x, np.ndarray) else wide.to(x.dtype)
                np.testing.assert_array_equal(back(rounded), back(out))

            each_layout(body, dtype)

    def test_codec(self):
        def body(comm):
            x = values((9, HIDDEN), 3 + comm.rank)
            experts, weights = routing(9, comm.rank)
            weights_of_rank = expert_weights(comm, 1)

            def forward(**options):
                layer = tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, **options)
                return layer.forward(x, experts, weights, *weights_of_rank)[0]

            uncompressed = forward(strategy="serial")
            size = np.abs(uncompressed).max()
            for options in ({"codec": "int8"}, {"combine_codec": "int8"},
                            {"codec": "e4m3", "combine_codec": "int6:g32"}):
                out = forward(strategy="serial", **options)
                assert_same(out, forward(strategy="overlapped", **options), size * 0.3)
                assert_same(out, forward(strategy="overlapped", chunks=2, **options), size * 0.3)
                self.assertLessEqual(np.abs(out - uncompressed).max(), size * 0.3)
                if comm.size > 1:
                    self.assertTrue((out != uncompressed).any())
            lossless = forward(strategy="overlapped", codec="lossless", combine_codec="lossless")
            assert_same(lossless, uncompressed, size * 1e-5)
            forward(codec="int8", allow_uncompressed=True)
            for bad in ({"codec": "int9"}, {"combine_codec": "int8:g48"}, {"allow_uncompressed": True}):
                with self.assertRaises(tandem.InvalidArgument):
                    forward(**bad)

        on_ranks(body)

    def test_save(self):
        def body(comm):
            x, dout = values((9, HIDDEN), 3 + comm.rank), values((9, HIDDEN), 30 + comm.rank)
            experts, weights = routing(9, comm.rank)
            weights_of_rank = expert_weights(comm, 1)
            results, sizes = [], []
            for save in ("sorted", "rows", "recompute"):
                layer = tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, strategy="overlapped", save=save)
                out, batch = layer.forward(x, experts, weights, *weights_of_rank)
                results.append((out, *layer.backward(batch, dout, *weights_of_rank)))
                sizes.append(batch.bytes)
            for other in results[1:]:
                for found, expected in zip(other, results[0]):
                    np.testing.assert_array_equal(found, expected)
            self.assertLess(sizes[2], min(sizes[:2]))
            with self.assertRaisesRegex(tandem.InvalidArgument, "moe: save 'all': expected sorted, rows or recompute"):
                tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, save="all")

        on_ranks(body)

    @unittest.skipUnless(jax or ml_dtypes, "neither JAX nor ml_dtypes is installed")
    def test_arrays_of_jax_and_bfloat16_of_numpy(self):
        kinds = []
        if jax:
            kinds += [(jax.numpy.asarray, jax.Array, "f4"), (jax.numpy.asarray, jax.Array, "bfloat16")]
        if ml_dtypes:
            kinds.append((np.asarray, np.ndarray, ml_dtypes.bfloat16))

        def body(comm):
            for make, kind, dtype in kinds:
                wide = dtype == "f4"
                layer = tandem.MoeLayer(comm, 5, HIDDEN, FFN, EXPERTS, TOP_K, 1, "f32" if wide else "bf16")
                x, w_in, w_out = (make(np.asarray(make(a, dtype)), dtype) for a in (
                    values((5, HIDDEN), comm.rank), *expert_weights(comm, 1)))
                experts, weights = routing(5, comm.rank)
                out, batch = layer.forward(x, make(experts), make(weights), w_in, w_out)
                self.assertIsInstance(out, kind)
                whole = [np.asarray(make(a, dtype), "f4") for a in (W_IN, W_OUT)]
                want, size = exact(np.asarray(x, "f4"), experts, weights, *whole)
                bound = size * (2.0**-18 if wide else 2.0**-6) + 1e-6
                self.assertTrue((np.abs(np.asarray(out, "f4") - want) <= bound).all())
                dout = make(values((5, HIDDEN), 7), dtype)
                gradients = layer.backward(batch, dout, w_in, w_out)
                for got, shape in zip(gradients, (x.shape, weights.shape, w_in.shape, w_out.shape)):
                    self.assertIsInstance(got, kind)
                    self.assertEqual(got.shape, shape)
                again = layer.backward(batch, dout, w_in, w_out, dweights=np.empty((5, TOP_K), "f4"))
                for got, want in zip(again, gradients):
                    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
                if kind is not np.ndarray:
                    with self.assertRaisesRegex(tandem.InvalidArgument, "dw_in.*read-only"):
                        layer.backward(batch, dout, w_in, w_out, make(np.zeros(w_in.shape, "f4")))

        on_ranks(body)


@unittest.skipUnless(torch, "python3-torch is not installed")
class Gradients(unittest.TestCase):
    def case(self, comm, tp, dtype, rows):
        """x, experts, weights and this rank's w_in and w_out, with gradients."""
        x = torch.tensor(values((rows, HIDDEN), 3 + comm.rank)).to(dtype).requires_grad_()
        experts, weights = (torch.tensor(a) for a in routing(rows, comm.rank))
        weights_of_rank = [torch.tensor(a).to(dtype).requires_grad_() for a in expert_weights(comm, tp)]
        return x, experts, weights.requires_grad_(), weights_of_rank

    def expected(self, comm, tp, x, experts, weights, dout):
        """Reference gradients of x, weights, w_in and w_out: every expert by torch in f64, from the
        rounded operands."""
        w_in, w_out = (torch.tensor(a).to(x.dtype).double().requires_grad_() for a in (W_IN, W_OUT))
        y, v = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
        chosen = w_in[experts.long()]
        gate, up = (torch.einsum("tkfh,th->tkf", chosen[:, :, i], y) for i in range(2))
        inner = torch.nn.functional.silu(gate) * up
        whole = (torch.einsum("tkhf,tkf->tkh", w_out[experts.long()], inner) * v[:, :, None]).sum(1)
        found = torch.autograd.grad(whole, (y, v, w_in, w_out), dout.double())
        sums = [tandem.all_reduce(comm, each.float().contiguous()).numpy() for each in found[2:]]
        return [found[0], found[1], *map(torch.tensor, expert_weights(comm, tp, *sums))]

    def near(self, got, want, dtype, what):
        bound = (float(want.abs().max()) if want.numel() else 0) * (
            2.0**-14 if dtype == torch.float32 else 2.0**-5) + 1e-6
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=bound, msg=lambda m: f"{what}: {m}")

    def test_of_torch(self):
        for dtype in (torch.float32, torch.bfloat16):
            def body(comm, tp, layer):
                rows = max(0, 9 - 4 * comm.rank)
                x, experts, weights, weights_of_rank = self.case(comm, tp, dtype, rows)
                dout = torch.tensor(values((rows, HIDDEN), 50 + comm.rank)).to(dtype)
                layers.moe(layer, x, experts.long(), weights, *weights_of_rank).backward(dout)
                want = self.expected(comm, tp, x, experts, weights, dout)
                for name, tensor, expected in zip(("dx", "dweights", "dw_in", "dw_out"),
                                                  (x, weights, *weights_of_rank), want):
                    self.assertEqual(tensor.grad.dtype, tensor.dtype)
                    self.near(tensor.grad, expected, dtype, f"{name} {dtype} tp {tp}")

            each_layout(body, dtype)

    def test_what_is_given_is_filled(self):
        """dx and dweights are overwritten, dw_in and dw_out accumulated; a batch serves any number
        of backward passes."""
        def body(comm, tp, layer):
            x, experts, weights, weights_of_rank = self.case(comm, tp, torch.bfloat16, 5)
            with torch.no_grad():
                batch = layer.forward(x, experts, weights, *weights_of_rank)[1]
                other = layer.forward(x * 2, experts, weights, *weights_of_rank)[1]
                dout = torch.tensor(values((5, HIDDEN), comm.rank)).bfloat16()
                first = layer.backward(batch, dout, *weights_of_rank)
                given = [torch.ones(weights_of_rank[0].shape), torch.ones(weights_of_rank[1].shape),
                         torch.full((5, HIDDEN), 7.0), torch.full((5, TOP_K), 7.0)]
                again = layer.backward(batch, dout, *weights_of_rank, *given)
            self.assertEqual([id(each) for each in again], [id(each) for each in given[2:] + given[:2]])
            self.assertTrue(torch.equal(again[0].bfloat16(), first[0]))  # f32 dx before rounding
            self.assertTrue(torch.equal(again[1], first[1]))
            for got, want in zip(again[2:], first[2:]):
                torch.testing.assert_close(got, want + 1)
            del batch
            layer.backward(other, dout, *(w.detach() for w in weights_of_rank), dx=torch.empty(5, HIDDEN))

        each_layout(body, "bf16")

    def test_what_needs_no_gradient_gets_none(self):
        def body(comm, tp, layer):
            x, experts, weights, weights_of_rank = self.case(comm, tp, torch.float32, 5)
            frozen = [w.detach() for w in weights_of_rank]
            layers.moe(layer, x, experts, weights, *frozen).sum().backward()
            self.assertIsNotNone(x.grad)
            self.assertEqual([w.grad for w in frozen], [None, None])
            with torch.no_grad():
                self.assertFalse(layers.moe(layer, x, experts, weights, *weights_of_rank).requires_grad)
            with self.assertRaisesRegex(tandem.InvalidArgument, "requires a gradient"):
                layer.forward(x, experts, weights.detach(), *frozen)

        each_layout(body)


class Attributes(unittest.TestCase):
    def test_of_a_layer(self):
        def body(comm):
            layer = tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, comm.size, "bf16", strategy="overlapped")
            self.assertIs(layer.comm, comm)
            self.assertEqual((layer.tokens, layer.hidden, layer.ffn, layer.experts, layer.top_k, layer.tp, layer.dtype),
                             (9, HIDDEN, FFN, EXPERTS, TOP_K, comm.size, tandem.DType.bf16))
            self.assertEqual((layer.dispatch_strategy, layer.combine_strategy), ("overlapped",) * 2)
            self.assertEqual(layer.dropped_routings(), 0)
            self.assertIn(f"experts {EXPERTS}", repr(layer))

        on_ranks(body)


class Wrong(unittest.TestCase):
    def test_arguments(self):
        """Rejected by name on every rank; the ranks stay usable."""
        def body(comm):
            layer = tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 2)
            w_in, w_out = expert_weights(comm, 1)
            right = {"x": values((3, HIDDEN), 1), "experts": np.array([[0, 1]] * 3, "i4"),
                     "weights": np.ones((3, 2), "f4"), "w_in": w_in, "w_out": w_out, "out": None}
            want, batch = layer.forward(**right)
            dout = values((3, HIDDEN), 2)

            def refused(name, **wrong):
                with self.assertRaisesRegex(tandem.InvalidArgument, rf"moe: (routing\.)?{name}\b"):
                    layer.forward(**{**right, **wrong})

            def misrouted(pattern, **wrong):
                with self.assertRaisesRegex(tandem.Mismatch, f"moe: rank [0-{comm.size - 1}]: row 0 .*{pattern}"):
                    layer.forward(**{**right, **wrong})

            def not_back(name, *arguments, **named):
                with self.assertRaisesRegex(tandem.InvalidArgument, rf"moe: {name}\b"):
                    layer.backward(*arguments, **named)

            big = {"x": values((5, HIDDEN), 1), "experts": np.array([[0, 1]] * 5, "i4"),
                   "weights": np.ones((5, 2), "f4")}
            refused("x", **big)  # more rows than tokens
            refused("x", x=values((3, HIDDEN - 1), 1))
            refused("x", x=np.ones((3, HIDDEN), "f8"))
            refused("x: builtins.NoneType", x=None)
            refused("experts", experts=right["experts"].astype("f4"))
            refused("experts", experts=np.ones((3, 1), "i4"))
            refused("weights", weights=np.ones((2, 2), "f4"))
            refused("w_in", w_in=w_in[:-1])
            refused("w_in", w_in=w_in[::-1])
            refused("w_out", w_out=w_in)
            refused("out", out=np.empty((3, HIDDEN - 1), "f4"))
            refused("out", out=np.empty((3, HIDDEN), "i4"))
            refused("out .* overlaps x", out=right["x"])  # overlaps
            read_only = np.empty((3, HIDDEN), "f4")
            read_only.flags.writeable = False
            refused("out.*read-only", out=read_only)
            for bad in (99, EXPERTS, -2):
                misrouted("expert", experts=np.array([[0, bad]] * 3, "i4"))
            misrouted("twice", experts=np.zeros((3, 2), "i4"))
            for bad in (np.nan, np.inf):
                misrouted("finite", weights=np.full((3, 2), bad, "f4"))
            last = comm.rank == comm.size - 1
            with self.assertRaisesRegex(tandem.InvalidArgument, "experts is f32"):  # on every rank
                layer.forward(**{**right, "experts": right["experts"].astype("f4" if last else "i4")})
            not_back("dout", batch, dout[:2], w_in, w_out)
            not_back("dw_in", batch, dout, w_in, w_out, np.zeros((1, 1), "f4"))
            not_back("dw_out", batch, dout, w_in, w_out, dw_out=np.zeros(w_out.shape, "f8"))
            not_back("dx", batch, dout, w_in, w_out, dx=np.zeros((3, 1), "f4"))
            not_back("dweights", batch, dout, w_in, w_out, dweights=np.zeros((3, 2), "i4"))
            not_back("dx .* overlaps dout", batch, dout, w_in, w_out, dx=dout)
            self.assertRaises(TypeError, layer.backward, None, dout, w_in, w_out)
            other = tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 2)
            with self.assertRaisesRegex(tandem.InvalidArgument, "another layer"):
                other.backward(batch, dout, w_in, w_out)
            np.testing.assert_array_equal(layer.forward(**right)[0], want)

        on_ranks(body)

    def test_shapes(self):
        def body(comm):
            for pattern, arguments in (
                ("tp", (4, HIDDEN, FFN, EXPERTS, 1, comm.size + 1)),
                ("tp", (4, HIDDEN, FFN, EXPERTS, 1, 0)),
                ("top_k", (4, HIDDEN, FFN, EXPERTS, EXPERTS + 1)),
                ("top_k", (4, HIDDEN, FFN, EXPERTS, 0)),
                ("tokens", (-1, HIDDEN, FFN, EXPERTS)),
                ("hidden", (4, -1, FFN, EXPERTS)),
                ("dtype", (4, HIDDEN, FFN, EXPERTS, 1, 1, "i32")),
                ("dtype", (4, HIDDEN, FFN, EXPERTS, 1, 1, "f12")),
            ):
                with self.assertRaisesRegex(tandem.InvalidArgument, rf"\b{pattern}\b"):
                    tandem.MoeLayer(comm, *arguments)
            if comm.size > 1:
                with self.assertRaisesRegex(tandem.InvalidArgument, "experts"):
                    tandem.MoeLayer(comm, 4, HIDDEN, FFN, comm.size + 1)
                with self.assertRaises(tandem.Mismatch):
                    tandem.MoeLayer(comm, 4 + comm.rank, HIDDEN, FFN, EXPERTS)
            with self.assertRaisesRegex(tandem.InvalidArgument, "strategy"):
                tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, strategy="fast")

        on_ranks(body)

    def test_after_the_world(self):
        world = tandem.World(1)
        layer = tandem.MoeLayer(world.comm(), 4, HIDDEN, FFN, EXPERTS, 1)
        x, w = values((1, HIDDEN), 1), expert_weights(world.comm(), 1)
        to = np.zeros((1, 1), "i4"), np.ones((1, 1), "f4")
        batch = layer.forward(x, *to, *w)[1]
        world.close()
        for call in (lambda: layer.forward(x, *to, *w), lambda: layer.backward(batch, x, *w), layer.dropped_routings,
                     lambda: batch.rows_of_experts, lambda: layer.dispatch_strategy, lambda: layer.combine_strategy,
                     lambda: tandem.MoeLayer(layer.comm, 4, HIDDEN, FFN, EXPERTS, 1)):
            with self.assertRaisesRegex(tandem.InvalidArgument, "closed"):
                call()
        self.assertEqual(layer.tokens, 4)
        self.assertIn("closed", repr(layer))

    def test_a_batch_outlives_its_layer(self):
        def body(comm):
            layer = tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 1)
            x, to = values((1, HIDDEN), 1), (np.zeros((1, 1), "i4"), np.ones((1, 1), "f4"))
            batch = layer.forward(x, *to, *expert_weights(comm, 1))[1]
            del layer
            gc.collect()
            counted = tandem.all_reduce(comm, np.array([sum(batch.rows_of_experts)], "f4"))
            self.assertEqual(counted[0], comm.size)
            other = tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 1)
            with self.assertRaises(tandem.InvalidArgument):
                other.backward(batch, x, *expert_weights(comm, 1))

        on_ranks(body)


@unittest.skipUnless(torch, "python3-torch is not installed")
class FromExperts(unittest.TestCase):
    def test_is_this_ranks_part(self):
        def body(comm):
            router = torch.tensor(values((EXPERTS, HIDDEN), 5))
            whole = torch.tensor(W_IN), torch.tensor(W_OUT)
            for tp in (tp for tp in range(1, comm.size + 1) if comm.size % tp == 0):
                made = layers.Moe.from_experts(comm, 9, router, *whole, TOP_K, tp)
                for got, want in zip((made.w_in, made.w_out), expert_weights(comm, tp)):
                    self.assertTrue(got.is_contiguous())
                    np.testing.assert_array_equal(got.detach().numpy(), want)
                rows = 9 - comm.rank
                x = torch.tensor(values((rows, HIDDEN), comm.rank))
                out = made(x).detach()
                best = (x @ router.t()).topk(TOP_K, -1)
                want, size = exact(x.numpy(), best.indices.numpy(), torch.softmax(best.values, -1).numpy(), W_IN, W_OUT)
                self.assertTrue((np.abs(out.numpy() - want) <= size * 2.0**-18 + 1e-6).all())
                router_copy = made.router.detach()
                self.assertNotEqual(router_copy.data_ptr(), router.data_ptr())
            for pattern, arguments in (("w_in", (router, whole[1], whole[1])),
                                       ("router", (router[:-1], *whole)),
                                       ("w_out", (router, whole[0], whole[1][:, :, :-1])),
                                       ("w_out: torch.bfloat16", (router, whole[0], whole[1].bfloat16()))):
                with self.assertRaisesRegex(tandem.InvalidArgument, pattern):
                    layers.Moe.from_experts(comm, 9, *arguments)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
