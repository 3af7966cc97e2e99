"""hosts.py: one rank on each of two hosts (tools/netns_run.sh, as root), which also have a bridge with the same address
on each, as container engines make. Over a TCP store: an all-reduce, a barrier, messages and a step of DDP."""
import os
import socket
import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tandem.torch

if "TANDEM_LINK" not in os.environ:
    raise SystemExit("hosts.py makes a bridge: expected tools/netns_run.sh to start it")
for command in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
    subprocess.run(["ip", *command.split()], check=True)
dist.init_process_group("tandem")
rank, size = dist.get_rank(), dist.get_world_size()
names = [None] * size
dist.all_gather_object(names, socket.gethostname())
assert len(set(names)) == size > 1, names
x = torch.full((1_000_003,), rank + 1.0)
dist.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all()
dist.barrier()
message = torch.full((300_000,), float(rank))
works = [dist.isend(message, (rank + 1) % size), dist.irecv(x[:300_000], (rank - 1) % size)]
for work in works:
    work.wait()
assert x[:300_000].eq((rank - 1) % size).all()

torch.manual_seed(1)
model = torch.nn.Linear(300, 200)
batch = torch.randn(4 * size, 300)
model(batch).square().mean().backward()
expected = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
parallel = DistributedDataParallel(model)
parallel(batch[4 * rank:4 * (rank + 1)]).square().mean().backward()
for p, want in zip(model.parameters(), expected):
    torch.testing.assert_close(p.grad, want, rtol=1e-5, atol=1e-6)
print(f"ok: rank {rank} on {names[rank]}", flush=True)
dist.destroy_process_group()
