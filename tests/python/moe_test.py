"""The Mixture-of-Experts layer against every expert computed for every row."""
import unittest

import numpy as np

import tandem
from ranks import assert_same, on_ranks, torch, values

if torch:
    from tandem import torch as layers

HIDDEN, FFN, EXPERTS, TOP_K = 16, 24, 12, 3


def routing(rows, seed):
    chance = np.random.default_rng(seed)
    experts = np.stack([chance.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype("i4")
    return experts, chance.random((rows, TOP_K), dtype="f4")


def parts(comm, tp, w_in, w_out):
    """This rank's of w_in [experts, 2, ffn, hidden] and w_out [experts, hidden, ffn]."""
    first, count = tandem.shard_of(EXPERTS, comm.size // tp, comm.rank // tp)
    at, width = tandem.shard_of(FFN, tp, comm.rank % tp)
    mine_in = w_in[first:first + count, :, at:at + width].reshape(-1, HIDDEN)
    mine_out = w_out[first:first + count, :, at:at + width].reshape(-1, width)
    return np.ascontiguousarray(mine_in), np.ascontiguousarray(mine_out)


def each_layout(body):
    def ranks(comm):
        for tp in {1, comm.size}:
            for strategy in ("serial", "overlapped"):
                body(comm, tp, tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, tp,
                                               strategy=strategy))

    on_ranks(ranks)


W_IN, W_OUT = values((EXPERTS, 2, FFN, HIDDEN), 1), values((EXPERTS, HIDDEN, FFN), 2)


class Moe(unittest.TestCase):
    def test_codec(self):
        def body(comm):
            x = values((9, HIDDEN), 3 + comm.rank)
            experts, weights = routing(9, comm.rank)
            w_in, w_out = parts(comm, 1, W_IN, W_OUT)

            def forward(**options):
                layer = tandem.MoeLayer(comm, 9, HIDDEN, FFN, EXPERTS, TOP_K, **options)
                return layer.forward(x, experts, weights, w_in, w_out)[0]

            plain = forward(strategy="serial")
            size = np.abs(plain).max()
            for options in ({"codec": "int8"}, {"combine_codec": "int8"},
                            {"codec": "e4m3", "combine_codec": "int6:g32"}):
                out = forward(strategy="serial", **options)
                assert_same(out, forward(strategy="overlapped", **options), size * 0.3)
                self.assertLessEqual(np.abs(out - plain).max(), size * 0.3)
                if comm.size > 1:
                    self.assertTrue((out != plain).any())
            exact = forward(strategy="overlapped", codec="lossless", combine_codec="lossless")
            assert_same(exact, plain, size * 1e-5)
            forward(codec="int8", or_plain=True)
            for bad in ({"codec": "int9"}, {"combine_codec": "int8:g48"}, {"or_plain": True}):
                with self.assertRaises(tandem.InvalidArgument):
                    forward(**bad)

        on_ranks(body)

    def test_forward(self):
        def body(comm, tp, layer):
            rows = 9 - 2 * comm.rank
            x = values((rows, HIDDEN), 3 + comm.rank)
            experts, weights = routing(rows, comm.rank)
            w_in, w_out = parts(comm, tp, W_IN, W_OUT)
            out, batch = layer.forward(x, experts, weights, w_in, w_out)
            want = np.zeros_like(x)
            for t in range(rows):
                for e, weight in zip(experts[t], weights[t]):
                    gate, up = W_IN[e, 0] @ x[t], W_IN[e, 1] @ x[t]
                    want[t] += weight * (W_OUT[e] @ (gate / (1 + np.exp(-gate)) * up))
            np.testing.assert_allclose(out, want, rtol=1e-3, atol=2e-2)
            self.assertEqual(len(batch.rows_of_experts), EXPERTS // (comm.size // tp))
            again = np.empty_like(out)
            self.assertIs(layer.forward(x, experts, weights, w_in, w_out, again)[0], again)
            np.testing.assert_array_equal(again, out)

        each_layout(body)

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_gradients(self):
        def body(comm, tp, layer):
            x = torch.tensor(values((5, HIDDEN), 3 + comm.rank), requires_grad=True)
            experts, weights = (torch.tensor(a) for a in routing(5, comm.rank))
            weights.requires_grad_()
            mine = [torch.tensor(a, requires_grad=True) for a in parts(comm, tp, W_IN, W_OUT)]
            out = layers.moe(layer, x, experts.long(), weights, *mine)
            (out ** 2).sum().backward()

            w_in, w_out = (torch.tensor(a, requires_grad=True) for a in (W_IN, W_OUT))
            y, v = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
            chosen = w_in[experts.long()]
            gate = torch.einsum("tkfh,th->tkf", chosen[:, :, 0], y)
            up = torch.einsum("tkfh,th->tkf", chosen[:, :, 1], y)
            hidden = torch.nn.functional.silu(gate) * up
            whole = torch.einsum("tkhf,tkf,tk->th", w_out[experts.long()], hidden, v)
            (whole ** 2).sum().backward()
            grads = [tandem.all_reduce(comm, w.grad.contiguous()).numpy() for w in (w_in, w_out)]
            for got, want in ((x.grad, y.grad), (weights.grad, v.grad),
                              *zip((w.grad for w in mine), parts(comm, tp, *grads))):
                scale = float(np.abs(np.asarray(want)).max(initial=0)) + 1
                np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-4 * scale)

        each_layout(body)

    def test_what_is_wrong(self):
        def body(comm):
            layer = tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 1)
            other = tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 1)
            x, one = values((2, HIDDEN), 1), np.ones((2, 1), "f4")
            w = parts(comm, 1, W_IN, W_OUT)
            with self.assertRaises(tandem.Mismatch):
                layer.forward(x, np.full((2, 1), 99, "i4"), one, *w)
            with self.assertRaisesRegex(tandem.InvalidArgument, "experts"):
                layer.forward(x, np.zeros((2, 1), "f4"), one, *w)
            one_is_wrong = np.zeros((2, 1), "f4" if comm.rank == comm.size - 1 else "i4")
            with self.assertRaisesRegex(tandem.InvalidArgument, "experts is f32"):  # on every rank
                layer.forward(x, one_is_wrong, one, *w)
            batch = layer.forward(x, np.zeros((2, 1), "i4"), one, *w)[1]
            with self.assertRaisesRegex(tandem.InvalidArgument, "another layer"):
                other.backward(batch, x, *w)
            with self.assertRaises(tandem.InvalidArgument):
                tandem.MoeLayer(comm, 4, HIDDEN, FFN, EXPERTS, 1, tp=comm.size + 1)
            return layer, batch

        on_ranks(body)
        world = tandem.World(1)
        layer = tandem.MoeLayer(world.comm(), 4, HIDDEN, FFN, EXPERTS, 1)
        batch = layer.forward(values((1, HIDDEN), 1), np.zeros((1, 1), "i4"), np.ones((1, 1), "f4"),
                              *parts(world.comm(), 1, W_IN, W_OUT))[1]
        world.close()
        with self.assertRaisesRegex(tandem.InvalidArgument, "closed"):
            batch.rows_of_experts


if __name__ == "__main__":
    unittest.main()
