"""A small model that reads long visual inputs beside text, trained with the visual features divided
among ranks (cross-attention as in LV-XAttn) and checked against the same model on one rank. Text
asks for patches by their code; the model answers with their class.

    python3 examples/python/long_images.py                    # on two ranks, then on four: threads
    python3 examples/python/long_images.py --visual 20000 --text 100 --ranks 4
    mpirun -n 4 python3 examples/python/long_images.py        # four, processes

It prints the bytes that ranks send for attention if keys and values travel (`ring`) and if queries
do (`queries`), as the communicators count them.
"""
import argparse
import os
import sys

import torch

import tandem
from tandem.torch import CrossAttention, mark_sequence_parallel, sum_sequence_parallel_gradients

BATCH, CODE, CLASSES, HIDDEN, HEADS, HEAD_DIM = 2, 8, 4, 32, 2, 16


class Reader(torch.nn.Module):
    """One gated cross-attention layer between a residual stream and a classifier."""

    def __init__(self, comm, text, visual):
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.cross = CrossAttention(comm, text, visual, HIDDEN, CODE + CLASSES, HEADS, HEAD_DIM, batch=BATCH, gate=True)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, parameter.shape[1] ** -.5, generator=generator)
                elif name != "norm.weight":
                    parameter.fill_(.5 if name == "cross.gate" else 0)

    def forward(self, x, visual):
        return self.head(x + self.cross(self.norm(x), visual))


def draw(text, visual):
    """Text rows [batch, text, hidden], whose first columns are the code of a patch, features [batch,
    visual, code and class], and the classes asked for. The same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.nn.functional.normalize(torch.randn(BATCH, visual, CODE, generator=generator), dim=-1)
    # Patches with similar codes are of one class, which differs by sequence: only the features tell.
    classes = ((codes[..., :2] > 0).long() @ torch.tensor([1, 2]) + torch.arange(BATCH)[:, None]) % CLASSES
    asked = torch.randint(visual, (BATCH, text), generator=generator)
    x = torch.zeros(BATCH, text, HIDDEN)
    x[..., :CODE] = torch.gather(codes, 1, asked[..., None].expand(-1, -1, CODE))
    features = torch.cat([codes, torch.nn.functional.one_hot(classes, CLASSES).float()], -1)
    return x, features, torch.gather(classes, 1, asked)


def of_rank(comm, tensor):
    begin, count = tandem.shard_of(tensor.shape[1], comm.size, comm.rank)
    return tensor[:, begin:begin + count]


def train(comm, text, visual, steps):
    """Loss of each step, the mean over all text rows."""
    x, features, classes = draw(text, visual)
    x, features, classes = of_rank(comm, x), of_rank(comm, features), of_rank(comm, classes)
    model = mark_sequence_parallel(Reader(comm, text, visual))
    optimizer = torch.optim.Adam(model.parameters(), lr=.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, features).reshape(-1, CLASSES), classes.reshape(-1),
                                                 reduction="sum") / (BATCH * text)
        loss.backward()
        sum_sequence_parallel_gradients(comm, model)
        optimizer.step()
        losses.append(loss.detach())
    return tandem.all_reduce(comm, torch.stack(losses))


def sent_bytes(comm, text, visual, form):
    """Bytes that all ranks send in a forward and a backward pass of the layer: counted, and by
    formula."""
    layer = tandem.CrossAttention(comm, text, visual, HIDDEN, CODE + CLASSES, HEADS, HEAD_DIM, batch=BATCH, form=form)
    x, features, _ = draw(text, visual)
    x, features = (of_rank(comm, each).reshape(-1, each.shape[-1]).contiguous() for each in (x, features))
    weights = [torch.ones(rows, columns) for rows, columns in (
        (HEADS * HEAD_DIM, HIDDEN), (HEADS * HEAD_DIM, CODE + CLASSES), (HEADS * HEAD_DIM, CODE + CLASSES),
        (HIDDEN, HEADS * HEAD_DIM))]
    before = comm.bytes_sent
    _, batch = layer.forward(x, features, *weights)
    layer.backward(batch, x, x, features, *weights)
    counts = torch.tensor([comm.bytes_sent - before, layer.forward_bytes + layer.backward_bytes], dtype=torch.int32)
    counted, formula = tandem.all_reduce(comm, counts).tolist()
    return counted, formula


def body(comm, text, visual, steps):
    losses = train(comm, text, visual, steps)
    expected = train(comm.split(comm.rank), text, visual, steps)  # every rank, as a world of its own
    difference = ((losses - expected).abs().max() / expected[0]).item()
    ring, ring_formula = sent_bytes(comm, text, visual, "ring")
    queries, queries_formula = sent_bytes(comm, text, visual, "queries")
    if comm.rank == 0:
        print(f"{comm.size} ranks, {visual} patches and {text} text rows in each of {BATCH} sequences")
        for step in sorted({0, steps // 2, steps - 1}):
            print(f"  step {step}: loss {losses[step]:.4f}, on one rank {expected[step]:.4f}")
        print(f"  bytes sent, both passes: ring {ring}, queries {queries}: {ring / max(1, queries):.1f} times fewer")
    return (difference < 1e-3 and bool(losses[-1] < .5 * losses[0])
            and (ring, queries) == (ring_formula, queries_formula))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--text", type=int, default=12, help="text rows of a sequence (default: 12)")
    parser.add_argument("--visual", type=int, default=400, help="patches of a sequence (default: 400)")
    parser.add_argument("--steps", type=int, default=20, help="(default: 20)")
    options = parser.parse_args()
    launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    results = [tandem.run(ranks, lambda comm: body(comm, options.text, options.visual, options.steps))
               for ranks in ([int(launched)] if launched else options.ranks)]
    return 0 if all(all(each) for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
