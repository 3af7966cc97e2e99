"""Times decode and prefill of Llama-shaped layers in PyTorch: torch.compile'd halves of a layer in one CUDA graph, keys and
values of a fixed context (no paging, no sampling beyond argmax). With several ranks, tensor parallel over NCCL.

python3 torch_generate.py --model llama-8b --layers 32 --batch 1 --context 2048
NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 torch_generate.py --model llama-70b --layers 8 --batch 1 --context 2048
"""
import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = {"llama-8b": (4096, 32, 8, 128, 14336, 128256), "llama-70b": (8192, 64, 8, 128, 28672, 128256)}
arguments = argparse.ArgumentParser()
arguments.add_argument("--model", default="llama-8b", choices=SIZES)
arguments.add_argument("--layers", type=int, default=8)
arguments.add_argument("--batch", type=int, default=1)
arguments.add_argument("--context", type=int, default=2048)
arguments.add_argument("--prompt", type=int, default=0, help="tokens of a prefill instead of a decode step")
arguments.add_argument("--repeats", type=int, default=20)
q = arguments.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.cuda.set_device(rank)
if world > 1:
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(rank)
hidden, heads, kv_heads, dim, ffn, vocab = SIZES[q.model]
heads, kv_heads, ffn, vocab = heads // world, max(1, kv_heads // world), ffn // world, vocab // world
bf16 = dict(device="cuda", dtype=torch.bfloat16)


def matrix(rows, columns):
    return torch.randn(rows, columns, **bf16) * 0.02


rows = q.prompt or q.batch
layers = [dict(qkv=matrix((heads + 2 * kv_heads) * dim, hidden), o=matrix(hidden, heads * dim), up=matrix(2 * ffn, hidden),
               down=matrix(hidden, ffn), n1=torch.ones(hidden, **bf16), n2=torch.ones(hidden, **bf16)) for _ in range(q.layers)]
head = matrix(vocab, hidden)
caches = [(torch.randn(q.batch, kv_heads, q.context, dim, **bf16), torch.randn(q.batch, kv_heads, q.context, dim, **bf16))
          for _ in layers] if not q.prompt else [None] * q.layers
angles = torch.outer(torch.arange(max(q.prompt, q.context) + 1, device="cuda").float(),
                     1 / 500000 ** (torch.arange(0, dim, 2, device="cuda").float() / dim))
at = slice(0, q.prompt) if q.prompt else slice(q.context - 1, q.context)
cos, sin = angles.cos()[at], angles.sin()[at]


def rotated(t):
    a, b = t.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(t.dtype)


def attention_half(x, n1, qkv, o, keys, values):
    tokens = q.prompt or 1
    y = F.rms_norm(x, (hidden,), n1, 1e-5) @ qkv.t()
    y = y.view(rows // tokens, tokens, heads + 2 * kv_heads, dim).transpose(1, 2)
    query, key, value = y.split((heads, kv_heads, kv_heads), 1)
    query, key = rotated(query), rotated(key)
    if q.prompt:
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    else:
        keys[:, :, -1:], values[:, :, -1:] = key, value
        y = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    return y.transpose(1, 2).reshape(rows, -1) @ o.t()


def mlp_half(x, n2, up, down):
    gate, value = (F.rms_norm(x, (hidden,), n2, 1e-5) @ up.t()).chunk(2, -1)
    return (F.silu(gate) * value) @ down.t()


def measure(backend):
    torch._dynamo.reset()
    attention, mlp = torch.compile(attention_half), torch.compile(mlp_half)

    def step(x):
        for layer, cache in zip(layers, caches):
            with sdpa_kernel(backend):
                y = attention(x, layer["n1"], layer["qkv"], layer["o"], *(cache or (None, None)))
            if world > 1:
                dist.all_reduce(y)
            x = x + y
            y = mlp(x, layer["n2"], layer["up"], layer["down"])
            if world > 1:
                dist.all_reduce(y)
            x = x + y
        return (x[-q.batch:] @ head.t()).float().argmax(-1)

    x = torch.randn(rows, hidden, **bf16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            step(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step(x)
        times = []
        for _ in range(q.repeats):
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


weights = sum(t.numel() for layer in layers for t in layer.values() if t.dim() == 2) + head.numel()
cached = 0 if q.prompt else sum(2 * keys.numel() for keys, _ in caches)
results = {}
for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
    try:
        results[name] = measure(getattr(SDPBackend, name))
    except Exception as error:
        if rank == 0:
            print(f"{name}: {str(error)[:200]}", flush=True)
best = min(results.values()) if results else float("nan")
if rank == 0:
    print(json.dumps(dict(peer="torch " + torch.__version__, model=q.model, layers=q.layers, ranks=world, batch=q.batch,
                          context=q.context, prompt=q.prompt, us=round(best, 1), by_attention=results,
                          gb_per_s=round(2 * (weights + cached) / best / 1e3, 1))), flush=True)
if world > 1:
    dist.destroy_process_group()
