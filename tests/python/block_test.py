"""A whole Transformer block of tandem.torch layers against the same block in one process."""
import copy
import unittest

import tandem
from ranks import on_ranks, rank_counts, rows_of, torch, values

if torch:
    from tandem import torch as layers

    class Block(torch.nn.Module):
        """Norm, attention and MLP; x holds this rank's rows, or all rows in one process."""

        def __init__(self, hidden=24, heads=12, ffn=20):
            super().__init__()
            self.head_dim = hidden // heads
            self.norm, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
            self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden) for _ in range(4))
            self.up, self.down = torch.nn.Linear(hidden, ffn), torch.nn.Linear(ffn, hidden)

        def split(self, comm, tokens):
            for name in ("q", "k", "v", "up"):
                layer = layers.ColumnParallelLinear.from_linear(comm, getattr(self, name))
                layer.forward = lambda x, forward=layer.forward: forward(x, tokens)
                setattr(self, name, layer)
            for name in ("o", "down"):
                setattr(self, name, layers.RowParallelLinear.from_linear(comm, getattr(self, name)))
            return self

        def forward(self, x):
            normed = self.norm(x)
            q, k, v = (layer(normed) for layer in (self.q, self.k, self.v))
            q, k, v = (each.reshape(len(each), -1, self.head_dim).transpose(0, 1) for each in (q, k, v))
            scores = torch.softmax(q @ k.transpose(1, 2) / self.head_dim**0.5, -1)
            attended = (scores @ v).transpose(0, 1)
            x = x + self.o(attended.reshape(len(attended), -1))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def shard_like(whole, shard, comm):
    """Shard of this rank of a tensor of the whole block."""
    for dim, (large, small) in enumerate(zip(whole.shape, shard.shape)):
        if large != small:
            begin, count = tandem.shard_of(large, comm.size, comm.rank)
            whole = whole.narrow(dim, begin, count)
    return whole


@unittest.skipUnless(torch, "python3-torch is not installed")
class SequenceParallelBlock(unittest.TestCase):
    TOKENS = 10

    def setUp(self):
        self.whole = Block()
        with torch.no_grad():
            for seed, parameter in enumerate(self.whole.parameters()):
                parameter.copy_(torch.tensor(values(tuple(parameter.shape), seed)) * 0.2 + (parameter.dim() == 1))
        self.x, self.dy = (torch.tensor(values((2, self.TOKENS, 24), seed)) for seed in (101, 102))

    def split(self, comm):
        return layers.mark_sequence_parallel(copy.deepcopy(self.whole).split(comm, self.TOKENS))

    def test_every_gradient_is_that_of_one_process(self):
        """Also with gradient accumulation over micro-batches, and with a bf16 gradient."""
        for x, dy in zip(self.x, self.dy):
            self.whole(x).backward(dy)

        def body(comm):
            block = self.split(comm)
            for x, dy in zip(self.x, self.dy):
                block(rows_of(x, comm)).backward(rows_of(dy, comm))
            layers.sum_sequence_parallel_gradients(comm, block)
            for (name, want), got in zip(self.whole.named_parameters(), block.parameters()):
                torch.testing.assert_close(got.grad, shard_like(want.grad, got, comm), rtol=1e-4, atol=1e-4,
                                           msg=lambda text, name=name: f"{name} of {comm.size} ranks: {text}")

        on_ranks(body)

    def test_marks(self):
        """Marks replicated parameters outside our layers; an existing mark stays. A missing mark is
        named."""
        def body(comm):
            block = copy.deepcopy(self.whole).split(comm, self.TOKENS)
            block.norm2.bias.sequence_parallel = False
            self.assertIs(layers.mark_sequence_parallel(block), block)
            self.assertEqual({name for name, p in block.named_parameters() if getattr(p, "sequence_parallel", False)},
                             {"norm.weight", "norm.bias", "norm2.weight"})
            layers.sum_sequence_parallel_gradients(comm, block)
            self.assertIsNone(block.norm.weight.grad)
            block.norm = copy.deepcopy(block.norm)
            with self.assertRaisesRegex(tandem.InvalidArgument, "^norm.weight: no sequence_parallel"):
                layers.sum_sequence_parallel_gradients(comm, block)
            with self.assertRaisesRegex(tandem.InvalidArgument, "^0.norm.weight: no sequence_parallel"):
                layers.sum_sequence_parallel_gradients(comm, torch.nn.Sequential(block))

        on_ranks(body)

    def test_gradients_travel_in_buckets_in_f32(self):
        def body(comm):
            module = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in (
                ((3, 2), torch.float32), ((4,), torch.bfloat16), ((0,), torch.float32), ((5, 5), torch.float32)))
            layers.mark_sequence_parallel(module)
            for parameter in module:
                parameter.grad = torch.full_like(parameter.t() if parameter.dim() == 2 else parameter,
                                                 comm.rank + 1.0).reshape(parameter.shape)
            module[3].grad = torch.full((5, 5), comm.rank + 1.0).t()
            layers.sum_sequence_parallel_gradients(comm, module)
            for parameter in module:
                expected = torch.full_like(parameter, comm.size * (comm.size + 1) / 2)
                self.assertTrue(torch.equal(parameter.grad, expected))

        from tandem.torch import _sequence_parallel as sequence
        most = sequence.MAX_ELEMENTS
        for sequence.MAX_ELEMENTS in (1, 8, most):
            on_ranks(body)

    def test_gradients_that_only_some_ranks_have_are_refused_on_all(self):
        def body(comm):
            norm = layers.mark_sequence_parallel(torch.nn.LayerNorm(8))
            if comm.rank:
                norm.bias.grad = torch.ones(8)
            with self.assertRaises(tandem.Mismatch):
                layers.sum_sequence_parallel_gradients(comm, norm)

        for ranks in rank_counts():
            if ranks > 1:
                on_ranks(body, [ranks])


if __name__ == "__main__":
    unittest.main()
