"""codec_long.py mlp|gpt: DDP with gradients summed in int8 over 300 steps: the loss ends within .5 % of that with f32
gradients, and the bytes are those of the wire format's formula. Prints "ok" on rank 0."""
import sys
import time

from group import RANK, SIZE, dist, start, tandem, torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

STEPS = 300


class Mlp(torch.nn.Sequential):
    """.1 M parameters, which learn a noisy linear map."""
    WIDTH, HIDDEN, BATCH, RATE = 64, 256, 64, 0.003

    def __init__(self):
        super().__init__(torch.nn.Linear(self.WIDTH, self.HIDDEN), torch.nn.GELU(),
                         torch.nn.Linear(self.HIDDEN, self.HIDDEN), torch.nn.GELU(),
                         torch.nn.Linear(self.HIDDEN, self.WIDTH, bias=False))
        self.teacher = torch.randn(self.WIDTH, self.WIDTH, generator=torch.Generator().manual_seed(2)) / self.WIDTH**0.5

    def batch(self, generator):
        x = torch.randn(self.BATCH, self.WIDTH, generator=generator)
        return x, (x @ self.teacher).tanh() + 0.5 * torch.randn(self.BATCH, self.WIDTH, generator=generator)

    def loss(self, predicted, expected):
        return (predicted - expected).square().mean()


class Layer(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
                                       torch.nn.Linear(4 * width, width))

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(torch.nn.Module):
    """10 M parameters, which learn a chain of Markov: one token in 4 is random."""
    VOCAB, WIDTH, LAYERS, HEADS, TEXTS, LENGTH, RATE = 64, 320, 8, 5, 4, 24, 0.0005

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = (torch.nn.Embedding(n, self.WIDTH) for n in (self.VOCAB, self.LENGTH))
        self.layers = torch.nn.Sequential(*(Layer(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)),
                                          torch.nn.LayerNorm(self.WIDTH), torch.nn.Linear(self.WIDTH, self.VOCAB))
        self.next = torch.randperm(self.VOCAB, generator=torch.Generator().manual_seed(2))

    def forward(self, tokens):
        return self.layers(self.tokens(tokens) + self.positions.weight)

    def batch(self, generator):
        texts = torch.randint(self.VOCAB, (self.TEXTS, self.LENGTH + 1), generator=generator)
        follows = torch.rand(texts.shape, generator=generator) < 0.75
        for i in range(self.LENGTH):
            texts[:, i + 1] = torch.where(follows[:, i], self.next[texts[:, i]], texts[:, i + 1])
        return texts[:, :-1], texts[:, 1:]

    def loss(self, predicted, expected):
        return cross_entropy(predicted.flatten(0, 1), expected.flatten())


def train(options, steps=STEPS):
    """Mean losses of the first and of the last 20 steps, bytes sent a step, and parameters."""
    group = dist.new_group(pg_options=options)
    torch.manual_seed(1)
    task = {"mlp": Mlp, "gpt": Gpt}[sys.argv[1]]()
    model = DistributedDataParallel(task, process_group=group, bucket_cap_mb=100, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.RATE)
    generator = torch.Generator().manual_seed(100 + RANK)
    losses, sent = [], []
    for step in range(steps):
        before = tandem.torch.bytes_sent(group)
        x, expected = task.batch(generator)
        loss = task.loss(model(x), expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sent.append(tandem.torch.bytes_sent(group) - before)
        losses.append(loss.detach())
    means = torch.stack([torch.stack(some).mean() for some in (losses[:20], losses[-20:])])
    dist.all_reduce(means, op=dist.ReduceOp.AVG)
    return means.tolist(), sent, sum(p.numel() for p in model.parameters())


start()
begin = time.monotonic()
(first, exact), exact_bytes, count = train(None)
(_, lossy), lossy_bytes, _ = train(tandem.torch.GroupOptions(codec="int8"))
shards = [count // SIZE + (rank < count % SIZE) for rank in range(SIZE)]


def formula(message):
    """Bytes of an all-reduce: shards of others and sums of this rank's; two encoding ranks send all to each other."""
    local = message(shards[RANK])
    if SIZE == 2 and message is encoded:
        return message(count)
    return sum(map(message, shards)) - local + (SIZE - 1) * local


def is_encoded(sent):
    """A message is sent in chunks, each padded to 16 bytes."""
    return 0 <= sent / formula(encoded) - 1 < 0.001


encoded = tandem.Wire("int8").bytes
uncompressed = formula(lambda elements: 4 * elements)
# The first step also arranges buckets.
assert set(exact_bytes[2:]) == {uncompressed}, (exact_bytes[2:4], uncompressed)
assert all(map(is_encoded, lossy_bytes[2:])), (lossy_bytes[2:4], formula(encoded))
difference = abs(lossy / exact - 1)
assert difference < 0.005, f"loss {lossy} with int8, {exact} without"
assert difference > 0, "int8 changed nothing: it was not used"
assert first > 1.1 * exact, f"control: loss {first} of the first steps, {exact} of the last ones"
# Measured, so either of them; the same at each step.
_, chosen_bytes, _ = train(tandem.torch.GroupOptions(codec="int8", allow_uncompressed=True), 6)
chosen = [is_encoded(sent) for sent in chosen_bytes[3:]]
assert all(chosen) or set(chosen_bytes[3:]) == {uncompressed}, (chosen_bytes, uncompressed, formula(encoded))
if RANK == 0:
    print(f"ok: {count} parameters, loss {lossy:.5f} with int8, {exact:.5f} without ({100 * difference:.4f} %), of "
          f"the first steps {first:.5f}; {lossy_bytes[-1]} of {exact_bytes[-1]} bytes a step, {chosen_bytes[-1]} if "
          f"uncompressed is allowed; {time.monotonic() - begin:.0f} s", flush=True)
dist.destroy_process_group()
