"""DDP with gradients summed in int8 over 300 steps: the loss ends within .5 % of that with f32 gradients, and the
bytes are those that the wire format's formula gives. Prints "ok" on rank 0."""
import time

from group import RANK, SIZE, dist, start, tandem, torch
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, BATCH, STEPS = 64, 256, 64, 300


def train(options, steps=STEPS):
    """Mean loss of the last 20 steps, and bytes sent a step."""
    group = dist.new_group(pg_options=options)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, HIDDEN),
                                torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH, bias=False))
    teacher = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)) / WIDTH**0.5
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=100, gradient_as_bucket_view=True)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(100 + RANK)
    losses, sent = [], []
    for step in range(steps):
        before = tandem.torch.bytes_sent(group)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        noise = 0.5 * torch.randn(BATCH, WIDTH, generator=generator)
        loss = (model(x) - (x @ teacher).tanh() - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sent.append(tandem.torch.bytes_sent(group) - before)
        losses.append(loss.detach())
    mean = torch.stack(losses[-20:]).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return float(mean), sent, count


start()
begin = time.monotonic()
exact, exact_bytes, count = train(None)
lossy, lossy_bytes, _ = train(tandem.torch.GroupOptions(codec="int8"))
short, _, _ = train(None, STEPS // 10)
shards = [count // SIZE + (rank < count % SIZE) for rank in range(SIZE)]


def formula(message):
    """Bytes of an all-reduce: shards of others and sums of this rank's; two encoding ranks send all to each other."""
    local = message(shards[RANK])
    if SIZE == 2 and message is encoded:
        return message(count)
    return sum(map(message, shards)) - local + (SIZE - 1) * local


encoded = tandem.Wire("int8").bytes
# The first step also arranges buckets. A message is sent in chunks, each padded to 16 bytes.
assert set(exact_bytes[2:]) == {formula(lambda elements: 4 * elements)}, exact_bytes[2:4]
padding = [sent / formula(encoded) - 1 for sent in lossy_bytes[2:]]
assert all(0 <= each < 0.001 for each in padding), (lossy_bytes[2:4], formula(encoded))
difference = abs(lossy / exact - 1)
assert difference < 0.005, f"loss {lossy} with int8, {exact} without"
assert difference > 0, "int8 changed nothing: it was not used"
assert abs(short / exact - 1) > 0.005, f"control: loss {short} after a tenth of the steps, {exact} after all"
if RANK == 0:
    print(f"ok: {count} parameters, loss {lossy:.5f} with int8, {exact:.5f} without ({100 * difference:.3f} %), after "
          f"{STEPS // 10} steps {short:.5f}; {lossy_bytes[-1]} of {exact_bytes[-1]} bytes a step; "
          f"{time.monotonic() - begin:.0f} s", flush=True)
dist.destroy_process_group()
