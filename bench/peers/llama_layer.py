"""A Llama-style layer in PyTorch, which the peers of training time."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    """`a`: hidden, heads, kv_heads, head_dim and ffn."""

    def __init__(self, a):
        super().__init__()
        self.heads = a.heads, a.kv_heads, a.kv_heads
        self.norm_in, self.norm_out = nn.RMSNorm(a.hidden), nn.RMSNorm(a.hidden)
        self.qkv = nn.Linear(a.hidden, (a.heads + 2 * a.kv_heads) * a.head_dim, bias=False)
        self.out = nn.Linear(a.heads * a.head_dim, a.hidden, bias=False)
        self.gate_up = nn.Linear(a.hidden, 2 * a.ffn, bias=False)
        self.down = nn.Linear(a.ffn, a.hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        heads = self.qkv(self.norm_in(x)).view(b, s, sum(self.heads), -1).transpose(1, 2)
        q, k, v = heads.split(self.heads, 1)

        def rotate(t):
            low, high = t.float().chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(v.dtype)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm_out(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
