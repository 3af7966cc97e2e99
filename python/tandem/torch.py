"""Tensor-parallel layers for PyTorch, forward and backward on tandem's operators.

Rows of x are tokens: [..., features] is taken as [tokens, features]. With sequence parallelism
(the default) each rank has the tokens of shard_of(tokens, size, rank) outside the layers and all of
them inside; without, every rank has all of them. Layers are collective: all ranks construct and
call them in the same order, in the forward pass and in the backward one.
"""
import math

import torch
from torch.autograd.function import once_differentiable

from . import _api
from ._core import AgGemm, AgWgrad, GemmAr, GemmRs, shard_of
from ._errors import InvalidArgument

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "gather_rows", "moe"]


class _Operators:
    """One layer's operators, made at the first call of a shape."""

    def __init__(self, comm):
        self.comm = comm
        self._made = {}

    def __call__(self, kind, m, n, k, dtype, **options):
        key = (kind, m, n, k, dtype, *options.items())
        if key not in self._made:
            self._made[key] = kind(self.comm, m, n, k, dtype, **options)
        return self._made[key]


class _GatherLinear(torch.autograd.Function):
    """all-gather(x) @ weight.T + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, operators, tokens):
        ctx.save_for_backward(x, weight)
        ctx.operators, ctx.tokens = operators, tokens
        op = operators(AgGemm, tokens, *weight.shape, x.dtype, bias=bias is not None)
        return op(x, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        n, k = weight.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.operators(GemmRs, ctx.tokens, k, n, x.dtype, weight_kn=True)(dy, weight.t())
        if ctx.needs_input_grad[1]:
            dw = ctx.operators(AgWgrad, ctx.tokens, n, k, x.dtype)(x, dy).to(weight.dtype)
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _LinearScatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks of x @ weight.T, + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, operators, tokens):
        ctx.save_for_backward(x, weight)
        ctx.operators, ctx.tokens = operators, tokens
        op = operators(GemmRs, tokens, *weight.shape, x.dtype, bias=bias is not None)
        return op(x, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        n, k = weight.shape
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.operators(AgGemm, ctx.tokens, k, n, x.dtype, weight_kn=True)(dy, weight.t())
        if ctx.needs_input_grad[1]:
            dw = torch.zeros(n, k, dtype=torch.float32, device=dy.device)
            ctx.operators(AgWgrad, ctx.tokens, k, n, x.dtype, weight_kn=True)(dy, x, dw.t())
            dw = dw.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = _api.all_reduce(ctx.operators.comm, dy.float().sum(0)).to(dy.dtype)
        return dx, dw, db, None, None


def _own_gradients(ctx, dy, x):
    """Of weight and bias, where this rank has all that they are made of."""
    dw = dy.t() @ x if ctx.needs_input_grad[1] else None
    return dw, dy.sum(0) if ctx.needs_input_grad[2] else None


class _CopiedLinear(torch.autograd.Function):
    """x @ weight.T + bias of an x that all ranks have."""

    @staticmethod
    def forward(ctx, x, weight, bias, operators):
        ctx.save_for_backward(x, weight)
        ctx.operators = operators
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        n, k = weight.shape
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.operators(GemmAr, len(dy), k, n, x.dtype, weight_kn=True)(dy, weight.t())
        return dx, *_own_gradients(ctx, dy, x), None


class _LinearSum(torch.autograd.Function):
    """The sum over ranks of x @ weight.T, + bias, on every rank."""

    @staticmethod
    def forward(ctx, x, weight, bias, operators):
        ctx.save_for_backward(x, weight)
        op = operators(GemmAr, len(x), *weight.shape, x.dtype, bias=bias is not None)
        return op(x, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, *_own_gradients(ctx, dy, x), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, tokens):
        ctx.comm = comm
        return _api.all_gather(comm, x, x.new_empty((tokens, *x.shape[1:])))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _api.reduce_scatter(ctx.comm, dy.contiguous()), None, None


def gather_rows(comm, x, tokens=None):
    """All ranks' rows of x [rows, ...]: [tokens, ...]. tokens: rows over all ranks, as of the
    layers. In the backward pass every rank's gradient is summed."""
    return _GatherRows.apply(x.contiguous(), comm, _tokens(comm, x.shape[0], tokens))


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, experts, weights, w_in, w_out):
        out, ctx.batch = layer.forward(x, experts, weights, w_in, w_out)
        ctx.layer = layer
        ctx.save_for_backward(w_in, w_out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        w_in, w_out = ctx.saved_tensors
        dx, dweights, dw_in, dw_out = ctx.layer.backward(
            ctx.batch, dout.contiguous(), w_in, w_out)
        return None, dx, None, dweights, dw_in.to(w_in.dtype), dw_out.to(w_out.dtype)


def moe(layer, x, experts, weights, w_in, w_out):
    """tandem.MoeLayer's forward with gradients of x, weights, w_in and w_out. experts: any integers."""
    return _Moe.apply(layer, x.contiguous(), experts.to(torch.int32).contiguous(),
                      weights.float().contiguous(), w_in, w_out)


def _tokens(comm, rows, tokens):
    if tokens is None:
        tokens = rows * comm.size
    expected = shard_of(tokens, comm.size, comm.rank)[1]
    if rows != expected:
        raise InvalidArgument(
            f"x: {rows} rows on rank {comm.rank}: expected {expected} of {tokens} tokens"
        )
    return tokens


class _ParallelLinear(torch.nn.Module):
    def __init__(self, comm, in_features, out_features, bias, dtype, sequence_parallel):
        super().__init__()
        self.comm, self.in_features, self.out_features = comm, in_features, out_features
        self.sequence_parallel = sequence_parallel
        self._operators = _Operators(comm)
        whole = torch.nn.Linear(in_features, out_features, bias, dtype=dtype or torch.float32,
                                device="cpu")
        self._draw(whole)
        self._take(whole)

    def _draw(self, whole):
        """The same values on every rank, from rank 0's generator, whatever the world's size."""
        seed = torch.randint(2**31 - 1, (1,), dtype=torch.int32, device="cpu")
        generator = torch.Generator("cpu").manual_seed(int(_api.broadcast(self.comm, seed)))
        bound = 1 / math.sqrt(max(1, self.in_features))
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.uniform_(-bound, bound, generator=generator)

    def _rows(self, x, features):
        if x.shape[-1] != features:
            raise InvalidArgument(f"x: {x.shape[-1]} features: expected {features}")
        return x.reshape(-1, features).contiguous()

    @classmethod
    def from_linear(cls, comm, linear, *, sequence_parallel=True):
        """A copy of this rank's part of a torch.nn.Linear that all ranks have."""
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made.comm, made.in_features, made.out_features = (
            comm, linear.in_features, linear.out_features)
        made.sequence_parallel = sequence_parallel
        made._operators = _Operators(comm)
        made._take(linear)
        return made

    def extra_repr(self):
        return (f"in_features={self.in_features}, out_features={self.out_features}, "
                f"rank={self.comm.rank} of {self.comm.size}, "
                f"sequence_parallel={self.sequence_parallel}")


def _part(whole, comm, dim):
    begin, count = shard_of(whole.shape[dim], comm.size, comm.rank)
    return torch.nn.Parameter(whole.detach().narrow(dim, begin, count).clone())


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are split: weight [out_features of this rank,
    in_features], bias likewise.

    forward(x, tokens=None): x [..., in_features], with sequence parallelism this rank's rows of
    `tokens` (default: as many on every rank). Returns [tokens, out_features of this rank], else
    [..., out_features of this rank]. f32 or bf16, on the CPU.
    """

    def __init__(self, comm, in_features, out_features, bias=True, *, dtype=None,
                 sequence_parallel=True):
        super().__init__(comm, in_features, out_features, bias, dtype, sequence_parallel)

    def _take(self, whole):
        self.weight = _part(whole.weight, self.comm, 0)
        self.bias = None if whole.bias is None else _part(whole.bias, self.comm, 0)

    def forward(self, x, tokens=None):
        rows = self._rows(x, self.in_features)
        if self.sequence_parallel:
            tokens = _tokens(self.comm, len(rows), tokens)
            return _GatherLinear.apply(rows, self.weight, self.bias, self._operators, tokens)
        out = _CopiedLinear.apply(rows, self.weight, self.bias, self._operators)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are split: weight [out_features, in_features of this
    rank], the whole bias on every rank.

    forward(x): x [..., in_features of this rank], all tokens. Returns with sequence parallelism
    [this rank's rows of them, out_features], else [..., out_features]. f32 or bf16, on the CPU.
    """

    def __init__(self, comm, in_features, out_features, bias=True, *, dtype=None,
                 sequence_parallel=True):
        super().__init__(comm, in_features, out_features, bias, dtype, sequence_parallel)

    def _take(self, whole):
        self.weight = _part(whole.weight, self.comm, 1)
        self.bias = None
        if whole.bias is not None:
            self.bias = torch.nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        rows = self._rows(x, self.weight.shape[1])
        if self.sequence_parallel:
            return _LinearScatter.apply(rows, self.weight, self.bias, self._operators, len(rows))
        out = _LinearSum.apply(rows, self.weight, self.bias, self._operators)
        return out.reshape(*x.shape[:-1], out.shape[-1])
