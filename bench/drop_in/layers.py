#!/usr/bin/env python3
"""layers.py FILE [--model llama-8b|llama-70b] [--layers N] [--seq S] [--check-only]: training steps of Llama 3
layers under tensor and sequence parallelism, for torchrun. FILE receives a list of results.

Linears are TorchTitan's (torchtitan.models.common.dist_gemm: AllGatherLinear, AllGatherLinearMulti
and LinearReduceScatter); attention is PyTorch's. Forms: `plain` gathers and scatters with NCCL
around torch.mm; `dist_gemm` is TorchTitan's on PyTorch's kernels; `tandem` is TorchTitan's in a
group that tandem.torch.enable() was called for; `tandem_titan` has tandem.titan's functions, too,
and `tandem_kept` lets them keep the gathered rows, as `plain` does. `no_collectives` is `plain` on
what would have been gathered: wrong values, and the time of a step that hides all communication. A
step is forward, backward and a fused AdamW update. Losses and gradients of all other forms are
compared in the same run; two runs of tandem's must have the same bits."""
import argparse
import datetime
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_tp import about, commit, keep, slowest
from torchtitan.models.common import dist_gemm

import tandem.titan
import tandem.torch
from tandem.torch import _titan

MODELS = {"llama-8b": (4096, 32, 8, 128, 14336), "llama-70b": (8192, 64, 8, 128, 28672), "tiny": (128, 4, 2, 32, 256)}
STEPS = 20


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, dy):
        out = dy.new_empty(dy.shape[0] // dist.get_world_size(), dy.shape[1])
        dist.reduce_scatter_tensor(out, dy.contiguous())
        return out


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(x.shape[0] // dist.get_world_size(), x.shape[1])
        dist.reduce_scatter_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, dy):
        out = dy.new_empty(dy.shape[0] * dist.get_world_size(), dy.shape[1])
        dist.all_gather_into_tensor(out, dy.contiguous())
        return out


def stand_in(rows, like, _made={}):
    """Random values instead of a collective's result, made once for a shape."""
    shape = rows, like.shape[1]
    if shape not in _made:
        _made[shape] = torch.randn(shape, device=like.device, dtype=like.dtype)
    return _made[shape].detach()


class NotGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return stand_in(x.shape[0] * dist.get_world_size(), x)

    @staticmethod
    def backward(ctx, dy):
        return stand_in(dy.shape[0] // dist.get_world_size(), dy)


class NotScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return stand_in(x.shape[0] // dist.get_world_size(), x)

    @staticmethod
    def backward(ctx, dy):
        return stand_in(dy.shape[0] * dist.get_world_size(), dy)


class Plain:
    """Linears of `plain`, or without its collectives."""

    def __init__(self, gather, scatter):
        self.gather, self.scatter = gather, scatter

    def column(self, x, weight):
        return F.linear(self.gather(x), weight)

    def pair(self, x, one, two):
        whole = self.gather(x)
        return F.linear(whole, one), F.linear(whole, two)

    def row(self, x, weight):
        return self.scatter(F.linear(x, weight))


class Titan:
    """TorchTitan's linears; the names are looked up at each call, as its modules do."""

    def __init__(self, group):
        self.group = group, group.group_name

    def column(self, x, weight):
        return dist_gemm.AllGatherLinear.apply(x, weight, None, *self.group)

    def pair(self, x, one, two):
        return dist_gemm.AllGatherLinearMulti.apply(x, one, two, *self.group)

    def row(self, x, weight):
        return dist_gemm.LinearReduceScatter.apply(x, weight, None, *self.group)


class TandemTitan(Titan):
    """TorchTitan's linears as tandem.titan.enable(keep_gathered=keeps) replaces them."""

    def __init__(self, group, keeps):
        super().__init__(group)
        self.keeps = keeps

    def column(self, x, weight):
        _titan._keeps_gathered = self.keeps
        return tandem.titan.AllGatherLinear.apply(x, weight, None, *self.group)

    def pair(self, x, one, two):
        _titan._keeps_gathered = self.keeps
        return tandem.titan.AllGatherLinearMulti.apply(x, one, two, *self.group)


class Layer(torch.nn.Module):
    def __init__(self, hidden, heads, kv_heads, head_dim, ffn, device, dtype):
        super().__init__()
        world = dist.get_world_size()
        self.heads, self.head_dim = (heads // world, kv_heads // world, kv_heads // world), head_dim
        self.norm_in, self.norm_out = (torch.nn.RMSNorm(hidden, device=device, dtype=dtype) for _ in range(2))

        def weight(n, k):
            return torch.nn.Parameter(torch.randn(n, k, device=device, dtype=dtype) * k ** -.5)

        self.qkv, self.out = weight(sum(self.heads) * head_dim, hidden), weight(hidden, heads * head_dim // world)
        self.gate, self.up, self.down = weight(ffn // world, hidden), weight(ffn // world, hidden), weight(hidden, ffn // world)

    def forward(self, x, linears):
        qkv = linears.column(self.norm_in(x), self.qkv).view(1, -1, sum(self.heads), self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(*qkv.split(self.heads, 1), is_causal=True, enable_gqa=True)
        x = x + linears.row(y.transpose(1, 2).reshape(y.shape[2], -1), self.out)
        gate, up = linears.pair(self.norm_out(x), self.gate, self.up)
        return x + linears.row(F.silu(gate) * up, self.down)


def loss_of(layers, x, linears):
    for layer in layers:
        x = layer(x, linears)
    return (x.float() ** 2).mean()


def gradients(layers, x, linears):
    layers.zero_grad()
    loss = loss_of(layers, x, linears)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in layers.parameters()]


def step(layers, optimizer, x, linears):
    optimizer.zero_grad()
    loss_of(layers, x, linears).backward()
    optimizer.step()


def timed_ms(run, device):
    if device.type != "cuda":
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def compare(layers, x, forms):
    """Losses by form; asserts that gradients agree and that two runs on tandem have the same bits."""
    losses, reference = {}, None
    bound = 3e-2 if x.dtype == torch.bfloat16 else 1e-4
    for form, linears in forms.items():
        loss, grads = gradients(layers, x, linears)
        losses[form] = loss.item()
        if reference is None:
            reference = grads
        worst = max(((g.float() - r.float()).norm() / r.float().norm()).item() for g, r in zip(grads, reference))
        assert worst < bound, (form, worst)
        if form.startswith("tandem"):
            again = gradients(layers, x, linears)
            assert torch.equal(again[0], loss) and all(map(torch.equal, again[1], grads)), "two runs differ"
    assert max(losses.values()) - min(losses.values()) < bound * min(losses.values()), losses
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=60),
                            **({"device_id": device} if on_gpu else {}))
    torch.manual_seed(1 + dist.get_rank())
    dtype = torch.bfloat16 if on_gpu else torch.float32
    layers = torch.nn.ModuleList(Layer(*MODELS[options.model], device, dtype) for _ in range(options.layers))
    x = torch.randn(options.seq // dist.get_world_size(), MODELS[options.model][0], device=device, dtype=dtype)
    tandems = dist.new_group()
    tandem.torch.enable(tandems)  # other groups keep PyTorch's kernels
    forms = {"plain": Plain(Gathered.apply, Scattered.apply), "dist_gemm": Titan(dist.group.WORLD), "tandem": Titan(tandems),
             "tandem_titan": TandemTitan(tandems, False), "tandem_kept": TandemTitan(tandems, True)}
    if not on_gpu:
        del forms["dist_gemm"]  # PyTorch has no kernel for it
    torch.use_deterministic_algorithms(True)  # PyTorch's attention: else the bits of two runs differ
    losses = compare(layers, x, forms)
    torch.use_deterministic_algorithms(False)
    if dist.get_rank() == 0:
        print("losses", losses, flush=True)
    if not options.check_only:
        forms["no_collectives"] = Plain(NotGathered.apply, NotScattered.apply)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-6, fused=True)
        times = {form: [] for form in forms}
        for repeat in range(3 + STEPS):
            for form, linears in forms.items():
                ms = timed_ms(lambda: step(layers, optimizer, x, linears), device)
                if repeat >= 3:
                    times[form].append(ms)
        step_us = {form: round(statistics.median(slowest(ms)) * 1e3, 1) for form, ms in times.items()}
        result = {"op": "train", "model": options.model, "layers": options.layers, "seq": options.seq, "tp": dist.get_world_size(),
                  "dtype": "bf16", "time_us": {"step": step_us}, "losses": losses, "receipts": tandem.torch.report(),
                  "commit": commit(), **about("bench/drop_in/layers.py")}
        if dist.get_rank() == 0:
            print(options.model, options.seq, step_us, flush=True)
        keep(options.file, [result])
    tandem.torch.disable()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
