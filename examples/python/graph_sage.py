"""GraphSAGE on a graph that is divided among ranks, which send each other only some features of their
boundary nodes: few at first, all at the end (VARCO, arXiv 2406.17611). Compressed exchange of
boundaries needs nothing but `all_to_all`.

    python3 examples/python/graph_sage.py                                # a generated graph, checked
    python3 examples/python/package_graph.py graph.npz                   # Debian's packages
    python3 examples/python/graph_sage.py --data graph.npz --exchange varco --slope 3
    mpirun -n 4 python3 examples/python/graph_sage.py --data graph.npz   # the same, in processes

--partition metis divides the graph by METIS (pymetis or Debian's package metis) instead of at random.
--layer torch_geometric takes SAGEConv of torch_geometric instead of the layer below.
"""
import argparse
import json
import os
import sys

import numpy
import torch

import tandem
from graph_partition import NoMetis, partition

HIDDEN, LAYERS, MAX_RATIO = 64, 3, 128


class Part:
    """Nodes of one rank: its own, then the halo, its neighbours on other ranks, by rank."""

    def __init__(self, comm, graph, owner):
        source, target = numpy.concatenate([graph["edges"], graph["edges"][::-1]], 1)
        self.comm, own = comm, owner == comm.rank
        self.nodes = numpy.flatnonzero(own)
        into = source[own[target]], target[own[target]]
        halo = numpy.unique(into[0][~own[into[0]]])
        halo = halo[numpy.argsort(owner[halo], kind="stable")]
        self.recv_counts = numpy.bincount(owner[halo], minlength=comm.size).tolist()
        position = numpy.empty(len(owner), int)
        position[self.nodes] = numpy.arange(len(self.nodes))
        # What every rank gets of this one: nodes that edges lead from, into that rank.
        wanted = [numpy.unique(source[own[source] & (owner[target] == rank)]) if rank != comm.rank
                  else numpy.empty(0, int) for rank in range(comm.size)]
        self.send_counts = [len(nodes) for nodes in wanted]
        self.sent = torch.from_numpy(position[numpy.concatenate(wanted)])
        position[halo] = len(self.nodes) + numpy.arange(len(halo))
        self.edges = torch.from_numpy(position[numpy.stack(into)])
        degree = torch.bincount(self.edges[1], minlength=len(self.nodes)).clamp(min=1)
        self.mean = torch.sparse_coo_tensor(self.edges.flip(0), 1 / degree[self.edges[1]],
                                            (len(self.nodes), len(self.nodes) + len(halo))).coalesce()


class BoundaryRows(torch.autograd.Function):
    """Rows of the halo [nodes, features]: the named columns as other ranks have them, zeros elsewhere.
    The gradient takes the way back, with the same columns."""

    @staticmethod
    def forward(ctx, x, part, columns):
        ctx.part, ctx.columns, ctx.shape = part, columns, x.shape
        sent = x.detach()[part.sent][:, columns].contiguous()
        rows = x.new_zeros(sum(part.recv_counts), x.shape[1])
        rows[:, columns] = tandem.all_to_all(part.comm, sent, part.send_counts, part.recv_counts)
        return rows

    @staticmethod
    def backward(ctx, gradient):
        part, columns = ctx.part, ctx.columns
        back = tandem.all_to_all(part.comm, gradient[:, columns].contiguous(), part.recv_counts,
                                 part.send_counts)
        rows = back.new_zeros(len(part.sent), ctx.shape[1])
        rows[:, columns] = back
        return back.new_zeros(ctx.shape).index_add(0, part.sent, rows), None, None


class SageLayer(torch.nn.Module):
    def __init__(self, features, out):
        super().__init__()
        self.linear = torch.nn.Linear(2 * features, out)

    def forward(self, x, part):
        x_all, x_own = x
        return self.linear(torch.cat([x_own, torch.sparse.mm(part.mean, x_all)], 1))


class GraphSage(torch.nn.Module):
    def __init__(self, features, classes, layer):
        super().__init__()
        widths = [features] + [HIDDEN] * (LAYERS - 1) + [classes]
        self.layers = torch.nn.ModuleList(layer(*pair) for pair in zip(widths, widths[1:]))

    def forward(self, x, part, columns_of):
        for index, layer in enumerate(self.layers):
            columns = columns_of(index, x.shape[1])
            halo = (BoundaryRows.apply(x, part, columns) if len(columns)
                    else x.new_zeros(sum(part.recv_counts), x.shape[1]))
            x = layer((torch.cat([x, halo]), x), part)
            if index + 1 < len(self.layers):
                x = torch.relu(x)
        return x


def make_layer(name):
    if name == "own":
        return SageLayer
    from torch_geometric.nn import SAGEConv

    class Layer(SAGEConv):
        def forward(self, x, part):
            return super().forward(x, part.edges)

    return lambda features, out: Layer((features, features), out, aggr="mean")


def ratio_at(options, step):
    """Features of a row per feature that is sent; 0: none is."""
    if options.exchange in ("full", "none"):
        return 1 if options.exchange == "full" else 0
    if options.exchange == "fixed":
        return options.ratio
    if options.exchange == "reversed":
        step = options.steps - 1 - step
    ratio = MAX_RATIO - options.slope * (MAX_RATIO - 1) / options.steps * step
    return min(max(ratio, 1), MAX_RATIO)


def make_columns(options, step, is_exact=False):
    """Columns that a layer's rows are sent with, drawn alike on all ranks."""
    ratio = 1 if is_exact else ratio_at(options, step)

    def columns_of(layer, width):
        count = max(1, round(width / ratio)) if ratio else 0
        draw = numpy.random.default_rng([options.seed, step, layer]).permutation(width)[:count]
        return torch.from_numpy(numpy.sort(draw))

    return columns_of


def make_model(options, graph):
    model = GraphSage(graph["features"].shape[1], int(graph["labels"].max()) + 1,
                      make_layer(options.layer))
    generator = torch.Generator().manual_seed(options.seed)  # of this rank: ranks may be threads
    with torch.no_grad():
        for parameter in model.parameters():
            bound = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    return model


def loss_of(logits, labels, is_trained):
    """Mean over the graph's trained nodes; of all ranks together."""
    chosen = is_trained[logits.nodes]
    loss = torch.nn.functional.cross_entropy(logits.values[chosen], labels[logits.nodes][chosen],
                                             reduction="sum")
    return loss / is_trained.sum()


class Logits:
    def __init__(self, model, part, graph, columns_of):
        self.nodes = torch.from_numpy(part.nodes)
        self.values = model(torch.from_numpy(graph["features"][part.nodes]), part, columns_of)


def add_gradients(comm, model):
    """Sums the ranks' gradients and returns them, flat."""
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    tandem.all_reduce(comm, flat)
    for parameter, sum_of in zip(model.parameters(),
                                 flat.split([p.numel() for p in model.parameters()])):
        parameter.grad.copy_(sum_of.view_as(parameter))
    return flat


def split_nodes(options, graph):
    """Owner of each node, and which are trained on; 60 %, the others are tested."""
    generator = numpy.random.default_rng([options.seed, 1])
    nodes = len(graph["labels"])
    owner = numpy.arange(nodes) % options.ranks
    generator.shuffle(owner)
    return graph.get("owner", owner), torch.from_numpy(generator.random(nodes) < 0.6)


def train(comm, options, graph):
    """(accuracy with the full exchange, bytes sent by all ranks, the same by the formula)."""
    owner, is_trained = split_nodes(options, graph)
    part, model = Part(comm, graph, owner), make_model(options, graph)
    labels = torch.from_numpy(graph["labels"])
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    formula, sent = 0, 0
    widths = [graph["features"].shape[1]] + [HIDDEN] * (LAYERS - 1)
    for step in range(options.steps):
        columns_of, before = make_columns(options, step), comm.bytes_sent
        optimizer.zero_grad()
        loss = loss_of(Logits(model, part, graph, columns_of), labels, is_trained)
        loss.backward()
        sent += comm.bytes_sent - before
        # The features need no gradient: nothing is sent back for them.
        for layer, width in enumerate(widths):
            rows = len(part.sent) + (sum(part.recv_counts) if layer else 0)
            formula += 4 * rows * len(columns_of(layer, width))
        add_gradients(comm, model)
        optimizer.step()
    with torch.no_grad():
        logits = Logits(model, part, graph, make_columns(options, 0, is_exact=True))
    tested = ~is_trained[logits.nodes]
    right = (logits.values.argmax(1) == labels[logits.nodes])[tested].sum()
    sums = torch.tensor([right, tested.sum(), sent, formula, loss], dtype=torch.float64)
    # All-gathered as integers, which keeps every bit.
    bits = tandem.all_gather(comm, sums.numpy().view("i4").reshape(1, -1))
    right, tested, sent, formula, loss = bits.view("f8").sum(0)
    return right / tested, int(sent), int(formula), loss


def equals_one_rank(comm, options, graph):
    """Whether the gradients of a step with the full exchange are those of the whole graph."""
    owner, is_trained = split_nodes(options, graph)
    labels = torch.from_numpy(graph["labels"])

    def gradients(on, owner):
        part, model = Part(on, graph, owner), make_model(options, graph)
        logits = Logits(model, part, graph, make_columns(options, 0, is_exact=True))
        loss_of(logits, labels, is_trained).backward()
        return add_gradients(on, model)

    whole = gradients(comm.split(comm.rank), numpy.zeros_like(owner))
    error = (gradients(comm, owner) - whole).abs().max() / whole.abs().max()
    if comm.rank == 0:
        print(f"gradients with the full exchange, against one rank: largest difference {error:.1e}")
    return bool(error < 1e-5)


def generate_graph(nodes=600, classes=4, features=32):
    """Communities: a node's own features say little about its class, its neighbours' tell it."""
    generator = numpy.random.default_rng(3)
    labels = generator.integers(classes, size=nodes)
    means = generator.standard_normal((classes, features))
    noise = generator.standard_normal((nodes, features))
    near = labels[:, None] == labels[None, :]
    chance = numpy.where(near, 0.04, 0.004)
    edges = numpy.argwhere(numpy.triu(generator.random((nodes, nodes)) < chance, 1)).T
    return {"features": (means[labels] * 0.3 + noise).astype("f4"), "labels": labels,
            "edges": edges}


def body(comm, options, graph):
    # A part of a model must not depend on how many threads add it up.
    torch.set_num_threads(1)
    equal = options.data or equals_one_rank(comm, options, graph)
    accuracy, sent, formula, loss = train(comm, options, graph)
    return bool(equal and sent == formula), accuracy, sent, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", help="a file of package_graph.py; a graph is generated without it")
    parser.add_argument("--exchange", default="varco",
                        choices=["varco", "full", "fixed", "reversed", "none"])
    parser.add_argument("--slope", type=float, default=3, help="of varco's ratio, in runs")
    parser.add_argument("--ratio", type=float, default=1.5, help="of fixed")
    parser.add_argument("--layer", default="own", choices=["own", "torch_geometric"])
    parser.add_argument("--partition", default="random", choices=["random", "metis"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="file to write the result to")
    options = parser.parse_args()
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    options.ranks = int(launched or "4")
    graph = dict(numpy.load(options.data)) if options.data else generate_graph()
    if options.partition == "metis":
        try:
            graph["owner"] = partition(len(graph["labels"]), graph["edges"], options.ranks)
        except NoMetis as error:
            sys.exit(f"--partition metis: {error}")
    results = tandem.run(options.ranks, lambda comm: body(comm, options, graph))
    good, accuracy, sent, loss = results[0]
    if not launched or os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")) == "0":
        print(f"{options.exchange}: accuracy {accuracy:.4f}, loss {loss:.4f}, "
              f"{sent / 1e6:.2f} MB sent by {options.ranks} ranks in {options.steps} steps")
        if options.json:
            with open(options.json, "w") as file:
                json.dump({**vars(options), "accuracy": accuracy, "bytes_sent": sent, "loss": loss}, file)
    return 0 if all(result[0] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
