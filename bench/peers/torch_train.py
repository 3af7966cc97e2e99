#!/usr/bin/env python3
"""torch_train.py [--layers N --hidden H --heads N --kv-heads N --head-dim D --ffn F --vocab V --batch B --seq S --steps N]:
times whole training steps of a Llama-style model on one GPU in PyTorch, with what its users have: f32 parameters under
bf16 autocast, torch.compile, cuDNN attention, gradient clipping, fused AdamW. Prints one JSON object: median step time of
the last half of the steps, tokens/s, MFU by the formula and rated peak of `tandem train`. Random tokens. Defaults: a model of
1.24 B parameters, tied embeddings, 8,192 tokens a step."""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama_layer import Layer

PEAK = 989.4e12  # H100 SXM and H200, bf16

parser = argparse.ArgumentParser()
for name, value in {"layers": 16, "hidden": 2048, "heads": 32, "kv-heads": 8, "head-dim": 64, "ffn": 8192,
                    "vocab": 128256, "batch": 4, "seq": 2048, "steps": 40}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
a = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(a.vocab, a.hidden)
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.hidden)

    def forward(self, tokens, targets, cos, sin):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


torch.manual_seed(1)
torch.set_float32_matmul_precision("high")
model = Model().cuda()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.normal_(p, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
frequency = 1 / 10000 ** (torch.arange(0, a.head_dim, 2, device="cuda").float() / a.head_dim)
angle = torch.outer(torch.arange(a.seq, device="cuda").float(), frequency)
cos, sin = angle.cos(), angle.sin()
compiled = torch.compile(model)
times = []
for step in range(a.steps):
    tokens = torch.randint(a.vocab, (a.batch, a.seq + 1), device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        loss = compiled(tokens[:, :-1], tokens[:, 1:], cos, sin)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = loss.item()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - begin)
seconds = statistics.median(times[a.steps // 2:])
matrices = a.layers * a.hidden * ((2 * a.heads + 2 * a.kv_heads) * a.head_dim + 3 * a.ffn) + a.vocab * a.hidden
flops = 6 * matrices + 6 * a.layers * a.heads * a.head_dim * a.seq  # a token; causal attention
tokens_per_s = a.batch * a.seq / seconds
print(json.dumps({"name": f"torch {torch.__version__}", "gpu": torch.cuda.get_device_name(), "step_ms": 1e3 * seconds,
                  "tokens_per_s": tokens_per_s, "mfu": tokens_per_s * flops / PEAK, "loss": value,
                  "memory_bytes": torch.cuda.max_memory_allocated(), **vars(a)}))
