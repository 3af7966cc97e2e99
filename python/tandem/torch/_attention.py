"""Attention over ranks with gradients: context-parallel attention, and cross-attention of text over
visual features that are divided among ranks."""
import math
from functools import partial
from typing import Any, Callable, List, Optional, Tuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _products as products
from .._core import Comm, ContextAttention
from .._core import CrossAttention as CrossAttentionLayer
from .._errors import InvalidArgument
from ._receipts import count_call

Gradients = Tuple[Optional[Tensor], ...]


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: ContextAttention, q: Tensor, k: Tensor, v: Tensor,
                document_starts: Optional[Tensor]) -> Tensor:
        count_call(operator)
        out, log_sums = operator.forward(q, k, v, document_starts)
        ctx.operator, ctx.document_starts = operator, document_starts
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        count_call(ctx.operator, is_backward=True)
        gradients = ctx.operator.backward(*ctx.saved_tensors, dout.contiguous(), ctx.document_starts)
        return None, *gradients, None


def context_attention(operator: ContextAttention, q: Tensor, k: Tensor, v: Tensor,
                      document_starts: Optional[Tensor] = None) -> Tensor:
    """tandem.ContextAttention's forward with gradients of q, k and v. Shapes and errors are those of
    ContextAttention.forward; all ranks run the backward pass."""
    return cast(Tensor, _ContextAttention.apply(operator, q.contiguous(), k.contiguous(), v.contiguous(),
                                                document_starts))


def _sum_over_ranks(comm: Comm, gradients: List[Tensor]) -> List[Tensor]:
    """Sums of f32 gradients over ranks, in one all-reduce."""
    whole = products.summed(comm, torch.cat([gradient.reshape(-1) for gradient in gradients]))
    parts = whole.split([gradient.numel() for gradient in gradients])
    return [part.reshape(gradient.shape) for part, gradient in zip(parts, gradients)]


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: CrossAttentionLayer, sum_gradients: bool, x: Tensor, visual: Tensor,
                *weights: Optional[Tensor]) -> Tensor:
        count_call(layer)
        out, ctx.batch = layer.forward(x, visual, *weights)
        ctx.layer, ctx.sum_gradients = layer, sum_gradients
        ctx.save_for_backward(x, visual, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        count_call(ctx.layer, is_backward=True)
        dx, dvisual, *local = ctx.layer.backward(ctx.batch, dout.contiguous(), *saved,
                                                 visual_gradient=ctx.needs_input_grad[3])
        gradients = [gradient for gradient in local if gradient is not None]
        if ctx.sum_gradients and any(ctx.needs_input_grad[4:]):
            gradients = _sum_over_ranks(ctx.layer.comm, gradients)
        of_weights: List[Optional[Tensor]] = [g.to(weight.dtype) for g, weight in zip(gradients, saved[2:])]
        of_weights += [None] * (len(local) - len(gradients))  # without a gate
        return None, None, dx, dvisual, *of_weights


def cross_attention(layer: CrossAttentionLayer, x: Tensor, visual: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor,
                    w_out: Tensor, gate: Optional[Tensor] = None, *, sum_gradients: bool = True) -> Tensor:
    """tandem.CrossAttention's forward with gradients of x, visual, the weights and the gate. visual
    is kept for the backward pass, keys and values are not. sum_gradients: weights' gradients are
    summed over ranks, as the weights are equal on all; else they are those of this rank's rows.
    Shapes and errors are those of CrossAttention.forward; all ranks run the backward pass."""
    return cast(Tensor, _CrossAttention.apply(layer, sum_gradients, x.contiguous(), visual.contiguous(),
                                              w_q, w_k, w_v, w_out, gate))


class CrossAttention(torch.nn.Module):
    """Cross-attention of text over visual features that are divided among ranks
    (tandem.CrossAttention, LV-XAttn). Arguments are those of tandem.CrossAttention.

    Parameters, equal on all ranks, with gradients summed over them: w_q, w_k, w_v, w_out, and with
    `gate` the gate, at first 0, so that the result is 0. Initial weights do not depend on the number
    of ranks. copy.deepcopy copies the parameters and shares the Comm and the layer.

    forward(x, visual): x [batch, this rank's text rows, hidden], visual [batch, this rank's visual
    rows, features], or both with rows of all sequences in one dimension. Returns x's shape. Raises
    InvalidArgument, Timeout, Aborted.
    """

    w_q: torch.nn.Parameter
    w_k: torch.nn.Parameter
    w_v: torch.nn.Parameter
    w_out: torch.nn.Parameter

    def __init__(self, comm: Comm, text: int, visual: int, hidden: int, features: int, heads: int, head_dim: int, *,
                 dtype: Optional[torch.dtype] = None, kv_heads: int = 0, batch: int = 1, gate: bool = False,
                 strategy: str = "automatic", form: str = "", backward: bool = True) -> None:
        super().__init__()
        kind = dtype or torch.float32
        self._layer_of: Callable[[torch.dtype], CrossAttentionLayer] = partial(
            CrossAttentionLayer, comm, text, visual, hidden, features, heads, head_dim, kv_heads=kv_heads, batch=batch,
            gate=gate, strategy=strategy, form=form, backward=backward)
        self.layer = layer = self._layer_of(kind)
        self.comm = comm
        generator = torch.Generator("cpu").manual_seed(products.shared_seed(comm))

        def drawn(rows: int, columns: int) -> torch.nn.Parameter:
            bound = 1 / math.sqrt(columns)
            whole = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
            return torch.nn.Parameter(whole.uniform_(-bound, bound, generator=generator).to(kind))

        queries, keys = heads * head_dim, layer.kv_heads * head_dim
        self.w_q, self.w_k, self.w_v = drawn(queries, hidden), drawn(keys, features), drawn(keys, features)
        self.w_out = drawn(hidden, queries)
        self.gate = torch.nn.Parameter(torch.zeros(1, device="cpu")) if gate else None

    def _apply(self, fn: Any, *more: Any) -> "CrossAttention":
        """Implements to(), bfloat16() etc.: a change of dtype creates another layer, which is
        collective. The gate stays f32."""
        before = self.w_q.dtype
        gate = None if self.gate is None else self.gate.detach().clone()
        super()._apply(fn, *more)
        if self.gate is not None and gate is not None and self.gate.dtype != torch.float32:
            self.gate.data = gate.to(self.gate.device)
            if self.gate.grad is not None:
                self.gate.grad = self.gate.grad.float()
        if self.w_q.dtype != before:
            self.layer = self._layer_of(self.w_q.dtype)
        return self

    def forward(self, x: Tensor, visual: Tensor) -> Tensor:
        for name, tensor, columns in (("x", x, self.layer.hidden), ("visual", visual, self.layer.features)):
            if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[-1] != columns:
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidArgument(f"{name}: {shape}: expected a tensor [..., rows, {columns}]")
        rows = x.reshape(-1, self.layer.hidden)
        features = visual.reshape(-1, self.layer.features)
        if products.autocasts(x.device.type):
            rows, features = rows.to(self.w_q.dtype), features.to(self.w_q.dtype)
        out = cross_attention(self.layer, rows, features, self.w_q, self.w_k, self.w_v, self.w_out, self.gate)
        return out.reshape(x.shape)

    def extra_repr(self) -> str:
        layer = self.layer
        return (f"text={layer.text}, visual={layer.visual}, hidden={layer.hidden}, features={layer.features}, "
                f"heads={layer.heads}, kv_heads={layer.kv_heads}, head_dim={layer.head_dim}, "
                f"rank={self.comm.rank} of {self.comm.size}")
