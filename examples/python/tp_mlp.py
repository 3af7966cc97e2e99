"""A tensor-parallel MLP in PyTorch, trained for a few steps and checked against the same MLP on one
rank. Ranks share the tokens (sequence parallelism) and the hidden features.

    python3 examples/python/tp_mlp.py                       # two ranks, threads of this process
    mpirun -n 4 python3 examples/python/tp_mlp.py           # four, processes
    torchrun --nproc_per_node 4 examples/python/tp_mlp.py   # the same without MPI

With --cuda each rank has a GPU; two threads share the first one if there is no second.
"""
import os
import sys

import torch

import tandem
from tandem.torch import ColumnParallelLinear, RowParallelLinear, gather_rows

TOKENS, FEATURES, HIDDEN, STEPS = 64, 32, 96, 5


class Mlp(torch.nn.Module):
    def __init__(self, up, down, **options):
        super().__init__()
        self.up, self.down, self.options = up, down, options

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x, **self.options)))


def train(model, x, target):
    """Loss of each step on this rank's rows, summed over rows and features."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = ((model(x) - target) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def body(comm):
    generator = torch.Generator().manual_seed(1)
    up, down = (torch.nn.Linear(*features).to(comm.device) for features in
                ((FEATURES, HIDDEN), (HIDDEN, FEATURES)))
    with torch.no_grad():
        for parameter in (*up.parameters(), *down.parameters()):
            parameter.copy_(torch.empty(parameter.shape).uniform_(-0.2, 0.2, generator=generator))
    x, target = (torch.randn(TOKENS, FEATURES, generator=generator).to(comm.device) for _ in range(2))

    mlp = Mlp(ColumnParallelLinear.from_linear(comm, up),
              RowParallelLinear.from_linear(comm, down), tokens=TOKENS)
    begin, rows = tandem.shard_of(TOKENS, comm.size, comm.rank)
    local = slice(begin, begin + rows)
    losses = torch.tensor(train(mlp, x[local], target[local]), device=comm.device)
    tandem.all_reduce(comm, losses)
    with torch.no_grad():
        out = gather_rows(comm, mlp(x[local]), TOKENS)

    whole = Mlp(up, down)
    expected = torch.tensor(train(whole, x, target), device=comm.device)
    with torch.no_grad():
        error = (out - whole(x)).abs().max().item()
    if comm.rank == 0:
        for step, (loss, reference) in enumerate(zip(losses.tolist(), expected.tolist())):
            print(f"step {step}: loss {loss:9.4f}, on one rank {reference:9.4f}")
        print(f"largest difference of the outputs: {error:.1e}")
    return torch.allclose(losses, expected, rtol=1e-4) and error < 1e-3


def main():
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    ranks, where = int(launched or "2"), {}
    if "--cuda" in sys.argv:
        shared = not launched and torch.cuda.device_count() < ranks
        where = {"device": "cuda", "ranks_per_gpu": ranks if shared else 1}
    return 0 if all(tandem.run(ranks, body, **where)) else 1


if __name__ == "__main__":
    sys.exit(main())
