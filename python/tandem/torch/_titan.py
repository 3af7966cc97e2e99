"""Autograd functions of tandem.titan, in place of TorchTitan's."""
import inspect
from typing import Any, Callable, List, Optional, Sequence, Tuple

import spmd_types
import torch
import torchtitan.distributed.linear as stock
import torchtitan.models.common.dist_gemm as dist_gemm
from torch import Tensor

from .._errors import Unsupported
from . import _enable, _linears

Gradient = Optional[Tensor]
OP = "torchtitan.AllGatherLinear"

# Operators rather than functions, so that torch.compile puts them into its graphs.
_library = torch.library.Library("tandem", "FRAGMENT")
_library.define("titan_gather_linear(Tensor x, Tensor[] weights, str group_name, bool keep) -> Tensor[]")
_library.define("titan_weight_gradient(Tensor x, Tensor dy, str group_name) -> Tensor")


_keeps_gathered = False


def _gather_linear(x: Tensor, weights: Sequence[Tensor], group_name: str, keep: bool) -> List[Tensor]:
    """[all-gather(x) @ weight.T for each weight], and with `keep` all-gather(x) after them."""
    # Without the gathered rows PyTorch's kernel may use NVLink multicast.
    form = _enable._torch_forms["CUDA" if x.is_cuda else "CPU"]["fused_all_gather_matmul"]
    torch_form = lambda: form(x, [weight.t() for weight in weights], 0, group_name, return_A=True)
    return _linears.gather_linear(OP, x, weights, group_name, torch_form, keep)


def _weight_gradient(x: Tensor, dy: Tensor, group_name: str) -> Tensor:
    """dy.T @ all-gather(x)."""
    return _linears.weight_gradient(f"{OP} wgrad", x, dy, group_name, gathers_x=True, dtype=x.dtype)


for _device in ("CPU", "CUDA"):
    _library.impl("titan_gather_linear", _gather_linear, _device)
    _library.impl("titan_weight_gradient", _weight_gradient, _device)


@torch.library.register_fake("tandem::titan_gather_linear", lib=_library)
def _(x: Tensor, weights: Sequence[Tensor], group_name: str, keep: bool) -> List[Tensor]:
    rows = x.shape[0] * torch.distributed.distributed_c10d._resolve_process_group(group_name).size()
    return [x.new_empty((rows, columns)) for columns in [w.shape[0] for w in weights] + [x.shape[1]] * keep]


@torch.library.register_fake("tandem::titan_weight_gradient", lib=_library)
def _(x: Tensor, dy: Tensor, group_name: str) -> Tensor:
    return x.new_empty((dy.shape[1], x.shape[1]))


def _forward(ctx: Any, x: Tensor, weights: Sequence[Tensor], group_name: str) -> List[Tensor]:
    """Products, of which the backward pass uses x or, kept, the gathered x."""
    ctx.group_name, ctx.kept = group_name, _keeps_gathered
    outs: List[Tensor] = torch.ops.tandem.titan_gather_linear(x, weights, group_name, ctx.kept)
    ctx.save_for_backward(outs[-1] if ctx.kept else x, *weights)
    return outs


def _dw(ctx: Any, x: Tensor, dy: Tensor) -> Tensor:
    """dy.T @ all-gather(x), where x is gathered already if it was kept."""
    if ctx.kept:
        return torch.mm(dy.t(), x)
    dw: Tensor = torch.ops.tandem.titan_weight_gradient(x, dy, ctx.group_name)
    return dw


def _dx(ctx: Any, dy: Tensor, weight: Tensor) -> Tensor:
    """This rank's rows of dy @ weight, summed over ranks."""
    dx: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(dy, weight, "sum", 0, ctx.group_name)
    return dx


@spmd_types.register_autograd_function
class AllGatherLinear(stock.AllGatherLinear):
    """TorchTitan's AllGatherLinear: all-gather(x_shard_m) @ w_shard_n.T + bias_shard_n."""

    @staticmethod
    def forward(ctx: Any, x_shard_m: Tensor, w_shard_n: Tensor, bias_shard_n: Gradient, group: Any,
                group_name: str) -> Tensor:
        y = _forward(ctx, x_shard_m.contiguous(), [w_shard_n], group_name)[0]
        ctx.has_bias = bias_shard_n is not None
        return y if bias_shard_n is None else y + bias_shard_n

    @staticmethod
    def backward(ctx: Any, grad_y_shard_n: Tensor) -> Tuple[Gradient, ...]:
        x, w = ctx.saved_tensors
        dy = grad_y_shard_n.contiguous()
        dx, dw = _dx(ctx, dy, w), _dw(ctx, x, dy)
        db = dy.sum(dim=0) if ctx.has_bias else None
        return dx, dw, db, None, None


@spmd_types.register_autograd_function
class AllGatherLinearMulti(stock.AllGatherLinearMulti):
    """TorchTitan's AllGatherLinearMulti: one gather of x_shard_m for two linears. The gradient of
    x_shard_m is the sum of two products: joining gradients and weights for a single one copies both."""

    @staticmethod
    def forward(ctx: Any, x_shard_m: Tensor, wa_shard_n: Tensor, wb_shard_n: Tensor, group: Any,
                group_name: str) -> Tuple[Tensor, Tensor]:
        outs = _forward(ctx, x_shard_m.contiguous(), [wa_shard_n, wb_shard_n], group_name)
        return outs[0], outs[1]

    @staticmethod
    def backward(ctx: Any, grad_ya_shard_n: Tensor, grad_yb_shard_n: Tensor) -> Tuple[Gradient, ...]:
        x, wa, wb = ctx.saved_tensors
        dya, dyb = grad_ya_shard_n.contiguous(), grad_yb_shard_n.contiguous()
        dx = _dx(ctx, dya, wa) + _dx(ctx, dyb, wb)
        if ctx.kept:
            return dx, _dw(ctx, x, dya), _dw(ctx, x, dyb), None, None
        dw = _dw(ctx, x, torch.cat((dya, dyb), dim=1))
        return dx, dw[:wa.shape[0]], dw[wa.shape[0]:], None, None


_undo: List[Callable[[], None]] = []


def _require_signature(ours: Any, theirs: Any) -> None:
    expected, found = (list(inspect.signature(each.forward).parameters) for each in (ours, theirs))
    if found != expected:
        raise Unsupported(f"titan.enable: TorchTitan's {theirs.__name__} takes {found}: expected {expected}, as of "
                          "TorchTitan 0.3")


def enable(*, keep_gathered: bool = False) -> None:
    """Calls `tandem.torch.enable`, unless the program has, and replaces TorchTitan's AllGatherLinear
    and AllGatherLinearMulti. keep_gathered: they save the gathered x instead of this rank's rows, and
    the backward pass gathers nothing. Raises Unsupported for a TorchTitan whose functions take other
    arguments, and what `tandem.torch.enable` raises."""
    global _keeps_gathered
    _keeps_gathered = keep_gathered
    if _undo:
        return
    ours = (AllGatherLinear, AllGatherLinearMulti)
    for function in ours:
        _require_signature(function, getattr(stock, function.__name__))
    if _enable._kernels is None:
        _enable.enable()
    # TorchTitan's own module, too: its type checks call the function by its name there.
    for module in (stock, dist_gemm):
        for function in ours:
            name, before = function.__name__, getattr(module, function.__name__)
            setattr(module, name, function)
            _undo.append(lambda module=module, name=name, before=before: setattr(module, name, before))  # type: ignore[misc]


def disable() -> None:
    """Gives TorchTitan its functions back; `tandem.torch.disable` ends the rest."""
    while _undo:
        _undo.pop()()
