"""Layers: torch.nn.Module and functions with autograd."""
import math
from functools import partial
from typing import Any, Callable, Optional, Tuple, Type, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _sequence_parallel as sequence
from . import _products as products
from ._attention import CrossAttention
from .._core import Comm, MoeLayer, Wire, shard_of
from .._errors import InvalidArgument
from ._products import (
    COPIED_LINEAR,
    GATHER_LINEAR,
    LINEAR_SCATTER,
    LINEAR_SUM,
    Gradient,
    Operators,
    Product,
    tokens_of,
    without_autocast,
)
from ._receipts import count_call

if hasattr(torch.library, "custom_op"):  # since PyTorch 2.4
    from ._ops import handle_of

    is_compiling = torch.compiler.is_compiling
else:
    def is_compiling() -> bool:
        return False

    def handle_of(layer: Any) -> int:
        return 0

Layer = TypeVar("Layer", bound="_ParallelLinear")
Module = TypeVar("Module", bound=torch.nn.Module)


def mark_sequence_parallel(module: Module) -> Module:
    """Sets `sequence_parallel = True` on the replicated parameters of module that each rank uses
    for its own tokens only: all except those of this file's layers and those that already have the
    attribute. Returns module."""
    return sequence.mark(module, (_ParallelLinear, CrossAttention, Moe))


def sum_sequence_parallel_gradients(comm: Comm, module: torch.nn.Module) -> None:
    """Sums the gradients of module's marked parameters over ranks, in f32, in place. Call it once,
    between the backward pass and the optimizer step. Collective; a gradient that is None stays
    None, on all ranks. Raises InvalidArgument for a parameter without that attribute, Mismatch if
    ranks have different gradients, Timeout, Aborted."""
    sequence.sum_gradients(comm, module, (_ParallelLinear, CrossAttention, Moe))


def _autocast_dtype(x: Tensor) -> Optional[torch.dtype]:
    """dtype of torch.autocast on x's device; None if it is off or does not change x."""
    if not products.autocasts(x.device.type) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    if hasattr(torch, "get_autocast_dtype"):  # since PyTorch 2.4
        return torch.get_autocast_dtype(x.device.type)
    return torch.get_autocast_gpu_dtype() if x.is_cuda else torch.get_autocast_cpu_dtype()


class _Linear(torch.autograd.Function):
    """Autograd function of one of _products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Gradient, product: Product, operators: Operators,
                tokens: int, codec: Optional[Wire]) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.operators, ctx.tokens, ctx.codec = product, operators, tokens, codec
        return product.forward(operators, x, weight, bias, tokens, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tuple[Gradient, ...]:
        x, weight = ctx.saved_tensors
        gradients = ctx.product.gradients(ctx.operators, x, weight, dy, ctx.tokens, ctx.codec,
                                          ctx.needs_input_grad)
        return *gradients, None, None, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, tokens: int) -> Any:
        ctx.comm = comm
        return products.gather_rows(comm, x, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tuple[Gradient, ...]:
        return products.gather_rows_gradient(ctx.comm, dy), None, None


def gather_rows(comm: Comm, x: Tensor, tokens: Optional[int] = None) -> Tensor:
    """Gathers all ranks' rows of x [rows, ...]: [tokens, ...]. tokens: rows over all ranks, as in
    the layers. The backward pass sums every rank's gradient. Collective."""
    _require_tensor(x, "[rows, ...]")
    if is_compiling():
        return torch.ops.tandem.gather_rows(x, id(comm), tokens)
    return cast(Tensor, _GatherRows.apply(x, comm, tokens_of(comm, x.shape[0], tokens)))


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: MoeLayer, x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor,
                w_out: Tensor) -> Any:
        count_call(layer)
        out, ctx.batch = layer.forward(x, experts, weights, w_in, w_out)
        ctx.layer = layer
        ctx.save_for_backward(w_in, w_out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Tuple[Gradient, ...]:
        w_in, w_out = ctx.saved_tensors
        count_call(ctx.layer, is_backward=True)
        dx, dweights, dw_in, dw_out = ctx.layer.backward(
            ctx.batch, dout.contiguous(), w_in, w_out)
        return None, dx, None, dweights, dw_in.to(w_in.dtype), dw_out.to(w_out.dtype)


def moe(layer: MoeLayer, x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor,
        w_out: Tensor) -> Tensor:
    """tandem.MoeLayer's forward with gradients of x, weights, w_in and w_out. experts: any integer
    dtype. Shapes and errors are those of MoeLayer.forward. The backward pass sends uncompressed
    rows."""
    if _autocast_dtype(x):
        x = x.to(w_in.dtype)
    rows, chosen, by = x.contiguous(), experts.to(torch.int32).contiguous(), weights.float().contiguous()
    if is_compiling():
        out, _ = torch.ops.tandem.moe(rows, chosen, by, w_in, w_out, id(layer))
        return cast(Tensor, out)
    return cast(Tensor, _Moe.apply(layer, rows, chosen, by, w_in, w_out))


def call(op: Any, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """op(x, weight, bias=bias) of an AgGemm, GemmRs, GemmAr or, with dy as weight, AgWgrad, in a
    form that torch.compile supports. Has no gradients. Errors are those of the operator."""
    if is_compiling():
        return cast(Tensor, torch.ops.tandem.call(x, weight, bias, id(op)))
    count_call(op)
    return cast(Tensor, op(x, weight) if bias is None else op(x, weight, bias=bias))


class _Shared(torch.autograd.Function):
    """Replicated parameter that each rank uses for its own rows: its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Gradient, ...]:
        return products.summed(ctx.comm, gradient), None


class _Layer(torch.nn.Module):
    """Base of layers. copy.deepcopy copies the parameters and shares the Comm and operators."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._handle = handle_of(self)


class Moe(_Layer):
    """Mixture of SwiGLU experts with a router, on all ranks of comm (tandem.MoeLayer).

    tokens: max rows per rank; ffn: width inside one whole expert; experts: number over all ranks;
    tp: ranks that share each expert. A row is routed to the top_k experts with the largest router
    logits, weighted by the softmax over those. codec, combine_codec: wire formats of rows and of
    their sums, in the forward pass. Parameters: router [experts, hidden], replicated, its gradient
    summed over ranks; w_in and w_out, of this rank's experts. Initial values do not depend on the
    layout. backward=False saves GPU memory if there is no backward pass; save: as of MoeLayer.

    forward(x): x [..., hidden], this rank's rows. Returns their results, with x's shape and dtype;
    under torch.autocast it still computes in the layer's dtype. Raises InvalidArgument, Mismatch
    (router logits that are not finite), Timeout, Aborted.
    """

    def __init__(self, comm: Comm, tokens: int, hidden: int, ffn: int, experts: int, top_k: int = 1,
                 tp: int = 1, *, dtype: Optional[torch.dtype] = None, codec: Any = None,
                 combine_codec: Any = None, backward: bool = True, save: str = "sorted") -> None:
        super().__init__()
        kind = dtype or torch.float32
        self._make(kind, comm, tokens, hidden, ffn, experts, top_k, tp, codec=codec, combine_codec=combine_codec,
                   backward=backward, save=save)
        first, count = shard_of(experts, comm.size // tp, comm.rank // tp)
        begin, width = shard_of(ffn, tp, comm.rank % tp)
        seed = products.shared_seed(comm)

        def drawn(draw: int, fan: int, *shape: int) -> Tensor:
            generator = torch.Generator("cpu").manual_seed(seed + draw)
            bound = 1 / math.sqrt(max(1, fan))
            whole = torch.empty(*shape, dtype=torch.float32, device="cpu")
            return whole.uniform_(-bound, bound, generator=generator).to(kind)

        self.router = torch.nn.Parameter(drawn(0, hidden, experts, hidden).to(comm.device))
        w_in = [drawn(1 + 2 * e, hidden, 2, ffn, hidden)[:, begin:begin + width].reshape(-1, hidden)
                for e in range(first, first + count)]
        w_out = [drawn(2 + 2 * e, ffn, hidden, ffn)[:, begin:begin + width]
                 for e in range(first, first + count)]
        self.w_in = torch.nn.Parameter(torch.cat(w_in).to(comm.device))
        self.w_out = torch.nn.Parameter(torch.cat(w_out).to(comm.device))

    def _make(self, dtype: torch.dtype, *shape: Any, **options: Any) -> None:
        self._layer_of: Callable[..., MoeLayer] = partial(MoeLayer, *shape, **options)
        self.layer = layer = self._layer_of(dtype)
        self.comm, self.hidden, self.top_k = layer.comm, layer.hidden, layer.top_k
        self._handle = handle_of(self)

    def _apply(self, fn: Any, *more: Any) -> "Moe":
        """Implements to(), bfloat16() etc.: a change of dtype creates another MoeLayer, which is
        collective."""
        before = self.w_in.dtype
        super()._apply(fn, *more)
        if self.w_in.dtype != before:
            self.layer = self._layer_of(self.w_in.dtype)
        return self

    @classmethod
    def from_experts(cls, comm: Comm, tokens: int, router: Tensor, w_in: Tensor, w_out: Tensor, top_k: int = 1,
                     tp: int = 1, *, codec: Any = None, combine_codec: Any = None,
                     backward: bool = True, save: str = "sorted") -> "Moe":
        """Copies this rank's shard of experts that all ranks hold. router: [experts, hidden]; w_in:
        [experts, 2, ffn, hidden], for each expert the gate, then the up projection; w_out:
        [experts, hidden, ffn], with w_in's dtype. The other arguments are those of Moe."""
        if w_in.dim() != 4 or w_in.shape[1] != 2:
            raise InvalidArgument(f"w_in: {list(w_in.shape)}: expected [experts, 2, ffn, hidden]")
        experts, _, ffn, hidden = w_in.shape
        for name, tensor, shape in (("router", router, (experts, hidden)), ("w_out", w_out, (experts, hidden, ffn))):
            if tensor.shape != shape:
                raise InvalidArgument(f"{name}: {list(tensor.shape)}: expected {list(shape)}")
        if w_out.dtype != w_in.dtype:
            raise InvalidArgument(f"w_out: {w_out.dtype}: expected w_in's {w_in.dtype}")
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._make(w_in.dtype, comm, tokens, hidden, ffn, experts, top_k, tp, codec=codec,
                   combine_codec=combine_codec, backward=backward, save=save)
        first, count = shard_of(experts, comm.size // tp, comm.rank // tp)
        begin, width = shard_of(ffn, tp, comm.rank % tp)

        def copied(shard: Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(shard.detach().to(comm.device, copy=True,
                                                       memory_format=torch.contiguous_format))

        local_in, local_out = w_in[first:first + count], w_out[first:first + count]
        made.router = copied(router)
        made.w_in = copied(local_in[:, :, begin:begin + width].reshape(-1, hidden))
        made.w_out = copied(local_out[:, :, begin:begin + width].reshape(-1, width))
        return made

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(x, self.hidden, self.w_in)
        if _autocast_dtype(rows):
            rows = rows.to(self.w_in.dtype)
        if is_compiling():
            router = torch.ops.tandem.shared(self.router, self._handle)
        else:
            router = _Shared.apply(self.router, self.comm)
        with without_autocast(rows.device.type):
            logits = rows.float() @ router.float().t()
        chosen, experts = logits.topk(self.top_k, dim=-1)
        weights = torch.softmax(chosen, -1)
        if is_compiling():
            out, _ = torch.ops.tandem.moe(rows, experts.to(torch.int32), weights, self.w_in, self.w_out,
                                          self._handle)
        else:
            out = moe(self.layer, rows, experts, weights, self.w_in, self.w_out)
        return out.reshape(x.shape)

    def extra_repr(self) -> str:
        return (f"hidden={self.hidden}, experts={len(self.router)}, top_k={self.top_k}, "
                f"rank={self.comm.rank} of {self.comm.size}")


def _require_tensor(x: Any, expected: str) -> None:
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"x: {type(x).__name__}: expected a tensor {expected}")
    if x.dim() == 0 or x.layout != torch.strided:
        raise InvalidArgument(f"x: {x.layout} of shape {list(x.shape)}: expected a strided tensor {expected}")


def _rows(x: Tensor, features: int, weight: Tensor) -> Tensor:
    """x as a matrix that weight can be applied to."""
    _require_tensor(x, f"[..., {features}]")
    if x.shape[-1] != features:
        raise InvalidArgument(f"x: {x.shape[-1]} features: expected {features}")
    if x.device != weight.device:
        raise InvalidArgument(f"x: on {x.device}: expected it where the layer is, on {weight.device}")
    if x.dtype != weight.dtype and _autocast_dtype(x) is None:
        raise InvalidArgument(f"x: {x.dtype}: expected the layer's {weight.dtype}")
    rows = -1 if features else math.prod(x.shape[:-1])
    return x.reshape(rows, features).contiguous()


class _ParallelLinear(_Layer):
    weight: torch.nn.Parameter
    bias: Optional[torch.nn.Parameter]

    def __init__(self, comm: Comm, in_features: int, out_features: int, bias: bool = True, *,
                 dtype: Optional[torch.dtype] = None, sequence_parallel: bool = True,
                 codec: Any = None) -> None:
        super().__init__()
        self._hold(comm, in_features, out_features, sequence_parallel, codec)
        # Ranks that are threads share PyTorch's generator: only rank 0 may draw from it.
        whole = torch.nn.utils.skip_init(torch.nn.Linear, in_features, out_features, bias,
                                         dtype=dtype or torch.float32, device="cpu")
        self._draw(whole)
        self._take(whole)

    def _hold(self, comm: Comm, in_features: int, out_features: int, sequence_parallel: bool,
              codec: Any) -> None:
        self.comm, self.in_features, self.out_features = comm, in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.codec = Wire(codec) if isinstance(codec, str) else codec
        self._operators = Operators(comm, (in_features, out_features))
        self._handle = handle_of(self)

    def _take(self, whole: torch.nn.Linear) -> None:
        raise NotImplementedError

    def _product(self, product: Product, rows: Tensor, tokens: Optional[int] = None) -> Tensor:
        """tokens: as in ColumnParallelLinear, whose x is gathered."""
        weight: Tensor = self.weight
        bias: Optional[Tensor] = self.bias
        kind = _autocast_dtype(rows)
        if kind is not None:
            rows, weight, bias = rows.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
        if is_compiling():
            op = getattr(torch.ops.tandem, product.name)
            return op(rows, weight, bias, self._handle, tokens)
        if product is GATHER_LINEAR:
            tokens = tokens_of(self.comm, len(rows), tokens)
        else:
            tokens = len(rows)
        return cast(Tensor, _Linear.apply(rows, weight, bias, product, self._operators, tokens, self.codec))

    def _draw(self, whole: torch.nn.Linear) -> None:
        """Draws the same values on every rank, from rank 0's generator, for any world size."""
        generator = torch.Generator("cpu").manual_seed(products.shared_seed(self.comm))
        bound = 1 / math.sqrt(max(1, self.in_features))
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.uniform_(-bound, bound, generator=generator)

    @classmethod
    def from_linear(cls: Type[Layer], comm: Comm, linear: torch.nn.Linear, *,
                    sequence_parallel: bool = True, codec: Any = None) -> Layer:
        """Copies this rank's shard of a torch.nn.Linear that all ranks hold."""
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._hold(comm, linear.in_features, linear.out_features, sequence_parallel, codec)
        made._take(linear)
        return made

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, "
                f"rank={self.comm.rank} of {self.comm.size}, "
                f"sequence_parallel={self.sequence_parallel}")


def _shard(whole: Tensor, comm: Comm, dim: int) -> torch.nn.Parameter:
    begin, count = shard_of(whole.shape[dim], comm.size, comm.rank)
    return torch.nn.Parameter(whole.detach().narrow(dim, begin, count).to(comm.device, copy=True))


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer split by output features: weight [out_features of this rank, in_features], bias
    likewise.

    forward(x, tokens=None): x [..., in_features], with sequence parallelism this rank's rows of
    `tokens` (default: the same number on every rank). Returns [tokens, out_features of this rank],
    else [..., out_features of this rank]. On comm.device, f32 or bf16, on a GPU also f16. codec:
    wire format of x's rows, with sequence parallelism; gradients are uncompressed. Raises
    InvalidArgument, Mismatch, Timeout, Aborted.
    """

    def _take(self, whole: torch.nn.Linear) -> None:
        self.weight = _shard(whole.weight, self.comm, 0)
        self.bias = None if whole.bias is None else _shard(whole.bias, self.comm, 0)

    def forward(self, x: Tensor, tokens: Optional[int] = None) -> Tensor:
        rows = _rows(x, self.in_features, self.weight)
        if self.sequence_parallel:
            return self._product(GATHER_LINEAR, rows, tokens)
        if self.codec is not None:
            raise InvalidArgument(f"codec {self.codec}: without sequence parallelism nothing travels here: "
                                  "expected none")
        out = self._product(COPIED_LINEAR, rows)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class RowParallelLinear(_ParallelLinear):
    """Linear layer split by input features: weight [out_features, in_features of this rank], the
    whole bias on every rank.

    forward(x): x [..., in_features of this rank], all tokens. Returns, with sequence parallelism,
    [this rank's rows, out_features], else [..., out_features]. On comm.device, f32 or bf16, on a
    GPU also f16. codec: wire format of partial products; gradients are uncompressed. Raises
    InvalidArgument, Mismatch, Timeout, Aborted.
    """

    def _take(self, whole: torch.nn.Linear) -> None:
        self.weight = _shard(whole.weight, self.comm, 1)
        self.bias = None
        if whole.bias is not None:
            self.bias = torch.nn.Parameter(whole.bias.detach().to(self.comm.device, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(x, self.weight.shape[1], self.weight)
        if self.sequence_parallel:
            return self._product(LINEAR_SCATTER, rows)
        out = self._product(LINEAR_SUM, rows)
        return out.reshape(*x.shape[:-1], out.shape[-1])
