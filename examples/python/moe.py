"""A Transformer's Mixture-of-Experts block in PyTorch, trained for a few steps with its experts
spread over ranks (expert parallelism) and checked against the same block in one process, with the
experts in plain PyTorch.

    python3 examples/python/moe.py                       # two ranks, threads of this process
    mpirun -n 4 python3 examples/python/moe.py           # four, processes
    torchrun --nproc_per_node 2 examples/python/moe.py   # the same without MPI

Each rank has its own tokens and whole experts; with --tp 2 two ranks share each expert. With --cuda
each rank has a GPU and rows are bf16; two threads share the first one if there is no second.
"""
import argparse
import os
import sys

import torch

import tandem
from tandem.torch import Moe

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K, STEPS = 64, 32, 48, 12, 2, 6


class Block(torch.nn.Module):
    """Adds the experts' results to x."""

    def __init__(self, experts, hidden):
        super().__init__()
        self.experts = experts
        self.hidden = hidden

    def forward(self, x):
        normed = torch.nn.functional.layer_norm(x.float(), (self.hidden,)).to(x.dtype)
        return x + self.experts(normed)


class SerialExperts(torch.nn.Module):
    """Moe in plain PyTorch: router [experts, hidden], w_in [experts, 2, ffn, hidden], w_out
    [experts, hidden, ffn]."""

    def __init__(self, router, w_in, w_out):
        super().__init__()
        self.router, self.w_in, self.w_out = (torch.nn.Parameter(w.clone()) for w in (router, w_in, w_out))

    def forward(self, x):
        chosen, experts = (x.float() @ self.router.float().t()).topk(TOP_K, dim=-1)
        weights = torch.softmax(chosen, -1)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, (both, down) in enumerate(zip(self.w_in, self.w_out)):
            rows, choice = (experts == expert).nonzero(as_tuple=True)
            gate, up = (x[rows] @ each.t() for each in both)
            result = (torch.nn.functional.silu(gate) * up) @ down.t()
            out = out.index_add(0, rows, weights[rows, choice][:, None] * result.float())
        return out.to(x.dtype)


def train(model, x, target):
    """Loss of each step on this rank's rows, summed over rows and features."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = ((model(x) - target).float() ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def body(comm, tp):
    dtype = torch.float32 if comm.device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(comm.device)

    whole = drawn(EXPERTS, HIDDEN) / 4, drawn(EXPERTS, 2, FFN, HIDDEN) / 6, drawn(EXPERTS, HIDDEN, FFN) / 6
    x, target = drawn(TOKENS, HIDDEN), drawn(TOKENS, HIDDEN)

    begin, rows = tandem.shard_of(TOKENS, comm.size, comm.rank)
    most = tandem.shard_of(TOKENS, comm.size, 0)[1]
    split = Block(Moe.from_experts(comm, most, *whole, TOP_K, tp), HIDDEN)
    local = slice(begin, begin + rows)
    losses = tandem.all_reduce(comm, train(split, x[local], target[local]))

    serial = Block(SerialExperts(*whole), HIDDEN)
    expected = train(serial, x, target)
    with torch.no_grad():
        want = serial(x).float()
        off = ((split(x[local]).float() - want[local]) ** 2).sum().reshape(1)
    error = (tandem.all_reduce(comm, off).item() / (want ** 2).sum().item()) ** 0.5
    if comm.rank == 0:
        print(f"{EXPERTS} experts on {comm.size // tp} x {tp} ranks")
        for step, (loss, reference) in enumerate(zip(losses.tolist(), expected.tolist())):
            print(f"step {step}: loss {loss:9.4f}, in one process {reference:9.4f}")
        print(f"relative difference of the outputs: {error:.1e}")
    bound = 1e-4 if dtype == torch.float32 else 0.1  # in bf16 a row may be routed to another expert
    return torch.allclose(losses, expected, rtol=bound) and error < bound and losses[-1] < losses[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each expert (default: 1)")
    parser.add_argument("--cuda", action="store_true", help="ranks on GPUs, in bf16")
    options = parser.parse_args()
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    ranks, where = int(launched or "2"), {}
    if options.cuda:
        shared = not launched and torch.cuda.device_count() < ranks
        where = {"device": "cuda", "ranks_per_gpu": ranks if shared else 1}
    return 0 if all(tandem.run(ranks, lambda comm: body(comm, options.tp), **where)) else 1


if __name__ == "__main__":
    sys.exit(main())
