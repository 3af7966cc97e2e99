#!/usr/bin/env python3
"""torch_layers.py [--hidden N --heads N --kv-heads N --head-dim D --ffn F --layers N --batch B --seq S --repeats N]: times a
forward and a backward pass through Llama-style layers on one GPU in PyTorch, as `tandem bench train` does: torch.compile, bf16
weights and gradients, the faster of cuDNN's and flash attention. Prints one JSON object: median times of steps after an
idle gap and of steps one after another, MFU by the formula and rated peak of `tandem bench train`. Random data. Defaults: 4 layers of
Llama-3.1-8B."""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama_layer import Layer

PEAK = 989.4e12  # H100 SXM and H200, bf16
GAP = 1.5  # of a step, as in `tandem bench train`

parser = argparse.ArgumentParser()
for name, value in {"hidden": 4096, "heads": 32, "kv-heads": 8, "head-dim": 128, "ffn": 14336, "layers": 4, "batch": 1,
                    "seq": 8192, "repeats": 10}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
a = parser.parse_args()
torch.manual_seed(1)


layers = nn.ModuleList(Layer(a) for _ in range(a.layers)).to("cuda", torch.bfloat16)


def forward(x, cos, sin):
    for layer in layers:
        x = layer(x, cos, sin)
    return x


def measure(backend):
    torch._dynamo.reset()
    compiled = torch.compile(forward)
    inverse = 1 / 500000 ** (torch.arange(0, a.head_dim, 2, device="cuda").float() / a.head_dim)
    angles = torch.outer(torch.arange(a.seq, device="cuda").float(), inverse)
    cos, sin = angles.cos(), angles.sin()
    x = torch.rand(a.batch, a.seq, a.hidden, device="cuda", dtype=torch.bfloat16) * 2 - 1
    x.requires_grad_()
    dy = torch.rand_like(x) * 2 - 1

    def step():
        x.grad = None
        for p in layers.parameters():
            p.grad = None
        with sdpa_kernel(backend):
            compiled(x, cos, sin).backward(dy)
    for _ in range(4):
        step()
    torch.cuda.synchronize()

    def timed(steps):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps
    after_gap = []
    last = timed(1)
    for _ in range(a.repeats):
        time.sleep(GAP * last)
        last = timed(1)
        after_gap.append(last)
    return statistics.median(after_gap), min(timed(a.repeats) for _ in range(2))


tokens = a.batch * a.seq
weights = sum(p.numel() for p in layers.parameters() if p.dim() > 1)
flops = 6 * weights * tokens + 6 * a.layers * a.heads * a.head_dim * a.seq * tokens
times = {}
for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
    try:
        times[name] = measure(backend)
    except RuntimeError as error:
        times.setdefault("failed", {})[name] = str(error).splitlines()[0][:120]
failed = times.pop("failed", {})
best = min(times, key=lambda name: times[name][0])
step, sustained = times[best]
print(json.dumps({
    "name": f"torch {torch.__version__} compiled, {best} attention", "layers": a.layers, "seq": a.seq, "batch": a.batch,
    "time_us": {"step": round(step * 1e6, 2), "sustained": round(sustained * 1e6, 2)},
    "all_us": {name: [round(t * 1e6, 2) for t in both] for name, both in times.items()}, "failed": failed,
    "mfu": round(flops / step / PEAK, 4), "mfu_sustained": round(flops / sustained / PEAK, 4),
    "memory_bytes": torch.cuda.max_memory_reserved()}))
