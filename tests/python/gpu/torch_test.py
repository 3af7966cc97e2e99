"""tandem.torch on GPU ranks: layers split over ranks against torch.nn.Linear in f64, forward,
backward, in training and compiled; Mixture of Experts forward."""
import copy
import unittest

import torch

import tandem
from gpu_ranks import DEVICE, dtypes, on_gpu, on_ranks, rows_of, run, counts, steps, values
from tandem import torch as layers

IN, OUT, TOKENS = 64, 96, 24
STEP = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def close(got, want, dtype):
    """Within rounding steps of the largest value in dtype."""
    bound = float(want.double().abs().max()) * STEP[dtype] + 1e-6
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=bound)


def linear(comm, features, seed, dtype):
    made = torch.nn.Linear(*features, device=comm.device, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(values(comm, made.weight.shape, seed, dtype) / features[0] ** 0.5)
        made.bias.copy_(values(comm, made.bias.shape, seed + 1, dtype))
    return made


class Layers(unittest.TestCase):
    def check(self, comm, kind, dtype, sequence_parallel):
        whole = linear(comm, (IN, OUT), 1, dtype)
        exact = copy.deepcopy(whole).double()
        x, dy = values(comm, (TOKENS, IN), 3, dtype), values(comm, (TOKENS, OUT), 4, dtype)
        reference = x.double().requires_grad_()
        y = exact(reference)
        y.backward(dy.double())
        layer = kind.from_linear(comm, whole, sequence_parallel=sequence_parallel)
        self.assertEqual(layer.weight.device, x.device)
        column = kind is layers.ColumnParallelLinear

        def features(t, dim=1):
            begin, count = tandem.shard_of(t.shape[dim], comm.size, comm.rank)
            return t.detach().narrow(dim, begin, count).contiguous()

        def rows(t):
            return rows_of(t.detach(), comm) if sequence_parallel else t.detach()

        for _ in range(3):  # the third replays the second's capture
            layer.zero_grad(set_to_none=True)
            local_x = (rows(x) if column else features(x)).clone().requires_grad_()
            got = layer(local_x, TOKENS) if column and sequence_parallel else layer(local_x)
            close(got.detach(), features(y) if column else rows(y), dtype)
            got.backward(features(dy) if column else rows(dy))
            close(local_x.grad, rows(reference.grad) if column else features(reference.grad), dtype)
            close(layer.weight.grad, features(exact.weight.grad, 0 if column else 1), dtype)
            close(layer.bias.grad, features(exact.bias.grad, 0) if column else exact.bias.grad, dtype)

    def test_column_and_row_parallel(self):
        def body(comm):
            for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                for dtype in dtypes():
                    for sequence_parallel in (True, False):
                        self.check(comm, kind, dtype, sequence_parallel)

        on_ranks(body, [n for n in counts() if n != 3])

    def test_gather_rows(self):
        def body(comm):
            x = values(comm, (TOKENS, IN), 1, torch.float32)
            local_x = rows_of(x, comm).requires_grad_()
            whole = layers.gather_rows(comm, local_x, TOKENS)
            self.assertTrue(torch.equal(whole.detach(), x))
            whole.backward(torch.full_like(whole, float(comm.rank + 1)))
            self.assertEqual(local_x.grad.unique().tolist(), [comm.size * (comm.size + 1) / 2])

        on_ranks(body)

    def test_training(self):
        """Training losses of an MLP on all ranks equal those on one rank."""
        def body(comm):
            dtype = dtypes()[min(1, len(dtypes()) - 1)]
            whole = [linear(comm, (IN, OUT), 1, dtype), linear(comm, (OUT, IN), 5, dtype)]
            up = layers.ColumnParallelLinear.from_linear(comm, whole[0])
            down = layers.RowParallelLinear.from_linear(comm, whole[1])
            x, target = values(comm, (TOKENS, IN), 3, dtype), values(comm, (TOKENS, IN), 9, dtype)

            def train(modules, forward, x, target):
                steps = torch.optim.SGD([p for shard in modules for p in shard.parameters()], lr=0.2)
                losses = []
                for _ in range(8):
                    steps.zero_grad()
                    loss = (forward(x).float() - target.float()).pow(2).sum() / TOKENS
                    loss.backward()
                    steps.step()
                    losses.append(loss.detach())
                return torch.stack(losses)

            alone = train(whole, lambda x: whole[1](torch.nn.functional.gelu(whole[0](x))), x, target)
            local_x, goal = rows_of(x, comm), rows_of(target, comm)
            ours = train([up, down], lambda x: down(torch.nn.functional.gelu(up(x, TOKENS))), local_x, goal)
            ours = tandem.all_reduce(comm, ours)
            torch.testing.assert_close(ours, alone, rtol=2e-2, atol=2e-2)
            self.assertLess(float(ours[-1]), float(ours[0]) * 0.9)

        on_ranks(body)

    def test_new_layers_do_not_depend_on_the_ranks(self):
        found = []

        def body(comm):
            torch.manual_seed(5)
            layer = layers.ColumnParallelLinear(comm, IN, OUT)
            first = tandem.broadcast(comm, layer.weight.detach().clone())
            return first[:8].cpu()

        for n in counts():
            found.append(run(n, body)[0])
        for each in found:
            self.assertTrue(torch.equal(each, found[0]))


@on_gpu
class Compiled(unittest.TestCase):
    def check(self, comm, backend):
        dtype = torch.bfloat16
        whole = [linear(comm, (IN, OUT), 1, dtype), linear(comm, (OUT, IN), 5, dtype)]

        class Mlp(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up = layers.ColumnParallelLinear.from_linear(comm, whole[0])
                self.down = layers.RowParallelLinear.from_linear(comm, whole[1])

            def forward(self, x):
                return self.down(torch.nn.functional.gelu(self.up(x, TOKENS)))

        for want, got in zip(*steps(Mlp(), rows_of(values(comm, (TOKENS, IN), 3, dtype), comm), backend)):
            close(got, want, dtype)

    def test_as_it_is(self):
        for n in counts()[:2]:
            torch._dynamo.reset()
            run(n, lambda comm: self.check(comm, "aot_eager"), deadline=60)

    def test_inductor(self):
        torch._dynamo.reset()
        run(1, lambda comm: self.check(comm, "inductor"), deadline=60)


@on_gpu
class Experts(unittest.TestCase):
    def check(self, comm, dtype, tp):
        """Against every expert of all ranks, for every row, in f64."""
        tokens, hidden, ffn, experts, top_k = 40, 64, 64, 4 * comm.size, 2
        torch.manual_seed(1)
        layer = layers.Moe(comm, tokens, hidden, ffn, experts, top_k, tp, dtype=dtype)
        self.assertEqual(layer.w_in.device, torch.device(comm.device))
        groups, width, rows = comm.size // tp, ffn // tp, tokens - 8 * comm.rank
        local = experts // groups
        w_in = tandem.all_gather(comm, layer.w_in.detach()).double()
        w_out = tandem.all_gather(comm, layer.w_out.detach()).double()
        w_in = w_in.view(groups, tp, local, 2, width, hidden).permute(0, 2, 3, 1, 4, 5)
        w_in = w_in.reshape(experts, 2, ffn, hidden).requires_grad_()
        w_out = w_out.view(groups, tp, local, hidden, width).permute(0, 2, 3, 1, 4)
        w_out = w_out.reshape(experts, hidden, ffn).requires_grad_()
        router = layer.router.detach().double().requires_grad_()
        expert_rows = slice(local * (comm.rank // tp), local * (comm.rank // tp + 1))
        shard = slice(width * (comm.rank % tp), width * (comm.rank % tp + 1))

        def of_all_ranks(gradient):
            return tandem.all_reduce(comm, gradient.float().contiguous()).double()

        for turn in range(3):  # batches are reused
            x = values(comm, (rows, hidden), 10 * turn + comm.rank, dtype).requires_grad_()
            dout = values(comm, (rows, hidden), 100 + 10 * turn + comm.rank, dtype)
            layer.zero_grad(set_to_none=True)
            got = layer(x)
            got.backward(dout)
            exact = x.detach().double().requires_grad_()
            at = (x.detach().float() @ layer.router.detach().float().t()).topk(top_k, dim=-1).indices
            weights = torch.softmax((exact @ router.t()).gather(1, at), -1)
            dense = torch.zeros(rows, experts, dtype=torch.float64, device=x.device).scatter(1, at, weights)
            gate, up = (torch.einsum("th,efh->tef", exact, w_in[:, i]) for i in range(2))
            each = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, w_out)
            want = (each * dense[:, :, None]).sum(1)
            found = torch.autograd.grad(want, (exact, router, w_in, w_out), dout.double())
            close(got.detach(), want.detach(), dtype)
            close(x.grad, found[0], dtype)
            close(layer.router.grad, of_all_ranks(found[1]), dtype)
            close(layer.w_in.grad, of_all_ranks(found[2])[expert_rows, :, shard].reshape(-1, hidden), dtype)
            close(layer.w_out.grad, of_all_ranks(found[3])[expert_rows][:, :, shard].reshape(-1, width), dtype)

    def test_gradients(self):
        def body(comm):
            for dtype in (torch.bfloat16, torch.float16):
                for tp in {1, comm.size}:
                    self.check(comm, dtype, tp)

        on_ranks(body, [n for n in counts() if n != 3])

    def test_forward_alone(self):
        def body(comm):
            layer = layers.Moe(comm, 40, 64, 64, 4 * comm.size, 2, dtype=torch.bfloat16)
            torch.manual_seed(2)
            alone = layers.Moe(comm, 40, 64, 64, 4 * comm.size, 2, dtype=torch.bfloat16, backward=False)
            alone.load_state_dict(layer.state_dict())
            x = values(comm, (40, 64), comm.rank, torch.bfloat16)
            with torch.no_grad():
                close(alone(x), layer(x), torch.bfloat16)

        on_ranks(body, [n for n in counts() if n != 3])


if __name__ == "__main__":
    unittest.main()
