"""Independent subnetwork training (IST, arXiv 2306.16484) of an MLP: in each round every rank has
other hidden units, trains them alone on its own data, and sends each to the rank that trains it next.
A rank holds 1/n of the hidden layers and sends at most that much in a round. What that costs, or here
gains, is printed: the losses of both, each at its best learning rate.

    python3 examples/python/ist.py                   # four ranks, threads of this process
    mpirun -n 4 python3 examples/python/ist.py       # the same, in processes
"""
import argparse
import os
import sys

import numpy
import torch

import tandem

FEATURES, HIDDEN, CLASSES, SAMPLES, BATCH, LOCAL_STEPS = 32, 256, 8, 4096, 64, 8


def make_data(generator):
    """(inputs, labels) to train, choose and test with: a random network's answers."""
    hidden = generator.standard_normal((FEATURES, 24)) / FEATURES ** 0.5
    out = generator.standard_normal((24, CLASSES))
    x = generator.standard_normal((3 * SAMPLES, FEATURES)).astype("f4")
    labels = (numpy.tanh(2 * x @ hidden) @ out).argmax(1)
    x, labels = torch.from_numpy(x), torch.from_numpy(labels)
    return list(zip(x.split(SAMPLES), labels.split(SAMPLES)))


def make_weights(generator):
    """Rows of a hidden unit: its input weights, then its output weights [HIDDEN, FEATURES + CLASSES]."""
    rows = generator.standard_normal((HIDDEN, FEATURES + CLASSES)) / FEATURES ** 0.5
    rows[:, FEATURES:] *= (FEATURES / HIDDEN) ** 0.5
    return torch.from_numpy(rows.astype("f4"))


def logits_of(units, x, scale=1.0):
    return scale * torch.relu(x @ units[:, :FEATURES].T) @ units[:, FEATURES:]


def steps(units, data, first, count, lr, scale, add=None):
    """Takes SGD steps on these hidden units; `add` sums their gradient over the ranks."""
    x, labels = data
    for step in range(first, first + count):
        at = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        units = units.detach().requires_grad_()
        torch.nn.functional.cross_entropy(logits_of(units, x[at], scale), labels[at]).backward()
        gradient = units.grad if add is None else add(units.grad)
        units = units.detach() - lr * gradient
    return units


def order_of(round_):
    """Hidden units in the order in which ranks hold them, drawn alike on all ranks."""
    return numpy.random.default_rng([5, round_]).permutation(HIDDEN)


def move(comm, units, order, next_order):
    """Sends each hidden unit to the rank that trains it next: a rank never holds more than its own."""
    shards = [tandem.shard_of(HIDDEN, comm.size, rank) for rank in range(comm.size)]
    position, holder = numpy.empty(HIDDEN, int), numpy.empty(HIDDEN, int)
    position[next_order] = numpy.arange(HIDDEN)
    for rank, (begin, count) in enumerate(shards):
        holder[order[begin:begin + count]] = rank
    begin, count = shards[comm.rank]
    local, received = order[begin:begin + count], next_order[begin:begin + count]
    leaving = numpy.argsort(position[local])             # by rank, and within it as that rank has them
    arriving = numpy.argsort(holder[received], kind="stable")
    bounds = [first for first, _ in shards] + [HIDDEN]
    send_counts = numpy.histogram(position[local], bounds)[0].tolist()
    recv_counts = numpy.bincount(holder[received], minlength=comm.size).tolist()
    moved = torch.empty_like(units[:1]).expand(count, -1).clone()
    moved[torch.from_numpy(arriving)] = tandem.all_to_all(
        comm, units[torch.from_numpy(leaving)].contiguous(), send_counts, recv_counts)
    return moved


def train_ist(comm, data, units, rounds, lr):
    """This rank's hidden units."""
    begin, count = tandem.shard_of(HIDDEN, comm.size, comm.rank)
    units = units[torch.from_numpy(order_of(0)[begin:begin + count])]
    for round_ in range(rounds):
        # A subnetwork stands for all of them: its output is scaled by their number.
        units = steps(units, data, round_ * LOCAL_STEPS, LOCAL_STEPS, lr, comm.size)
        units = move(comm, units, order_of(round_), order_of(round_ + 1))
    return units


def train_replicas(comm, data, units, rounds, lr):
    def add(gradient):
        tandem.all_reduce(comm, gradient)
        return gradient / comm.size

    return steps(units, data, 0, rounds * LOCAL_STEPS, lr, 1, add)


def loss_of(units, data):
    return torch.nn.functional.cross_entropy(logits_of(units, data[0]), data[1]).item()


def body(comm, options):
    torch.set_num_threads(1)
    generator = numpy.random.default_rng(options.seed)
    data, chosen_with, test = make_data(generator)
    initial = make_weights(generator)
    losses = {}
    begin, rows = tandem.shard_of(SAMPLES, comm.size, comm.rank)
    own_data = [of_data[begin:begin + rows] for of_data in data]
    for name, train in ("data parallel", train_replicas), ("IST", train_ist):
        # Both take the best of the same learning rates.
        best = None
        for lr in options.lr:
            before = comm.bytes_sent
            units = train(comm, own_data, initial, options.rounds, lr)
            held, sent = len(units), comm.bytes_sent - before
            if held < HIDDEN:  # in any order
                units = tandem.all_gather(comm, units.contiguous())
            loss = loss_of(units, chosen_with)
            if best is None or loss < best[0]:
                best = loss, units, held, sent, lr
        _, units, held, sent, lr = best
        losses[name] = loss_of(units, test)
        if comm.rank == 0:
            print(f"{name:>13}, lr {lr}: loss {loss_of(units, data):.4f}, of the test {losses[name]:.4f}; a "
                  f"rank holds {held} of {HIDDEN} hidden units and sent {sent / 1e6:.2f} MB")
    if comm.rank == 0:
        print(f"IST's loss of the test: {losses['IST'] / losses['data parallel'] - 1:+.1%}")
    return max(losses.values()) < 0.7 * loss_of(initial, test)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    results = tandem.run(int(launched or "4"), lambda comm: body(comm, options))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
