"""Megatron-Core's tensor-parallel linears on tandem: `enable()`, or a provider of layer specs.

With sequence parallelism, ColumnParallelLinear and RowParallelLinear run AgGemm and GemmRs in the
forward pass, and GemmRs, AgGemm and AgWgrad in the backward pass. Parameters, their initial values,
checkpoints, `main_grad` and gradient_accumulation_fusion stay Megatron's; so does every call that
tandem has no form for, which `tandem.torch.report()` lists with its reason. Requires Megatron-Core
0.16 or newer.
"""
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_token_prediction
from torch import Tensor
from torch.autograd.function import once_differentiable

from .torch import _fused, _linears
from .torch._enable import set_gpu_environment
from .torch._groups import name_of
from .torch._products import autocasts

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "TandemSpecProvider", "disable", "enable"]

Gradient = Optional[Tensor]
COLUMN, ROW = "megatron.ColumnParallelLinear", "megatron.RowParallelLinear"


def _main_grad(weight: Tensor, fuses: bool) -> Optional[Tensor]:
    return getattr(weight, "main_grad", None) if fuses else None


def _accumulate(op: str, ctx: Any, x: Tensor, dy: Tensor, weight: Tensor, gathers_x: bool) -> Gradient:
    """The weight's gradient as Megatron's linears return it: with gradient_accumulation_fusion it is
    added to main_grad, and the returned one has no meaning."""
    name, main_grad = ctx.group_name, ctx.main_grad
    if not ctx.fuses:
        return _linears.weight_gradient(op, x, dy, name, gathers_x=gathers_x, dtype=weight.dtype)
    weight.main_grad = main_grad
    if main_grad.dtype == torch.float32 and main_grad.is_contiguous():
        _linears.weight_gradient(op, x, dy, name, gathers_x=gathers_x, into=main_grad)
    else:
        main_grad.add_(_linears.weight_gradient(op, x, dy, name, gathers_x=gathers_x))
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Backward hooks run on the main thread only for a parameter with a gradient.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(main_grad.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, x: Tensor, weight: Tensor, fuses: bool, group_name: str) -> None:
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.fuses, ctx.group_name, ctx.main_grad = fuses, group_name, _main_grad(weight, fuses)


class _Column(torch.autograd.Function):
    """all-gather(x [sequence / ranks, batch, K]) @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Gradient, fuses: bool, group_name: str) -> Tensor:
        _save(ctx, x, weight, fuses, group_name)
        ctx.has_bias = bias is not None
        y = _linears.gather_linear(COLUMN, x, [weight], group_name)[0]
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tuple[Gradient, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _linears.linear_scatter(f"{COLUMN} dgrad", dy, weight.t(), ctx.group_name)
        if ctx.needs_input_grad[1]:
            dw = _accumulate(f"{COLUMN} wgrad", ctx, x, dy, weight, True)
        db = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        return dx, dw, db, None, None


class _Row(torch.autograd.Function):
    """This rank's rows of the sum over ranks of x [sequence, batch, K / ranks] @ weight.T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fuses: bool, group_name: str) -> Tensor:
        _save(ctx, x, weight, fuses, group_name)
        return _linears.linear_scatter(ROW, x, weight, group_name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tuple[Gradient, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _linears.gather_linear(f"{ROW} dgrad", dy, [weight.t()], ctx.group_name)[0]
        if ctx.needs_input_grad[1]:
            dw = _accumulate(f"{ROW} wgrad", ctx, x, dy, weight, False)
        return dx, dw, None, None


def _ranks(layer: Any) -> int:
    return 1 if layer.tp_group is None else layer.tp_group.size()


def _refusal(layer: Any, x: Tensor, weight: Tensor, options: Dict[str, Any]) -> str:
    """Reason the layer's call is Megatron's; empty if it is tandem's. options: of _forward_impl."""
    offloading = getattr(layer.config, "_cpu_offloading_context", None)
    reasons = (
        (layer.is_expert, "a layer of experts"),
        (_ranks(layer) == 1, "a group of 1 rank has nothing to overlap"),
        (not layer.sequence_parallel, "sequence_parallel is off"),
        (weight is not layer.weight, "the weight is given at the call"),
        (x.dtype not in _fused.DTYPES, f"x is {x.dtype}"),
        (x.dtype != weight.dtype, f"x is {x.dtype} and the weight {weight.dtype}"),
        (autocasts(x.device.type), "torch.autocast is on"),
        (options.get("allreduce_dgrad", False), "allreduce_dgrad is on"),
        (options.get("grad_output_buffer") is not None, "the weight gradient is deferred"),
        (options.get("gtp_remat_size", 1) > 1, "the weight is sharded over a gtp_remat group"),
        (options.get("output_dtype") not in (None, x.dtype), f"output_dtype is {options.get('output_dtype')}"),
        (hasattr(weight, "__fsdp_param__"), "the weight is Megatron-FSDP's"),
        (offloading is not None and offloading.inside_context, "activations are offloaded"),
    )
    return next((why for holds, why in reasons if holds), "")


def _is_stock(op: str, layer: Any, x: Tensor, weight: Tensor, options: Dict[str, Any], gathers: bool) -> bool:
    """True, with a receipt, if Megatron's own code runs the call."""
    why = _refusal(layer, x, weight, options)
    if why:
        ranks = _ranks(layer)
        rows = x.numel() // max(1, x.shape[-1]) * (ranks if gathers and layer.sequence_parallel else 1)
        _linears.note_stock(op, f"m {rows} n {weight.shape[0]} k {weight.shape[1]}", x.dtype,
                            "" if layer.tp_group is None else name_of(layer.tp_group), ranks, why)
    return bool(why)


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """Megatron-Core's ColumnParallelLinear on AgGemm, GemmRs and AgWgrad."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or _is_stock(COLUMN, self, input, weight, kwargs, True):
            out: Tensor = super()._forward_impl(input, weight, *args, **kwargs)
            return out
        return _Column.apply(input, weight, kwargs["bias"], kwargs["gradient_accumulation_fusion"],  # type: ignore[no-any-return]
                             name_of(self.tp_group))


class RowParallelLinear(layers.RowParallelLinear):
    """Megatron-Core's RowParallelLinear on GemmRs, AgGemm and AgWgrad."""

    def forward(self, input_: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        options = {"gtp_remat_size": getattr(self, "gtp_remat_size", 1)}
        if _is_stock(ROW, self, input_, self.weight, options, False):
            stock: Tuple[Tensor, Optional[Tensor]] = super().forward(input_)
            return stock
        out = _Row.apply(input_, self.weight, self.gradient_accumulation_fusion, name_of(self.tp_group))
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


class TandemSpecProvider(backends.LocalSpecProvider):
    """Megatron-Core's local layer specs with tandem's tensor-parallel linears."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear


_undo: List[Callable[[], None]] = []


def enable() -> None:
    """Makes Megatron-Core's local layer specs (get_gpt_layer_local_spec, and the specs of experts and
    of multi-token prediction) use TandemSpecProvider. Call it before the program makes its specs.
    Options are those of `tandem.torch.enable`, if it was called."""
    if _undo:
        return
    set_gpu_environment()
    for module in (gpt_layer_specs, moe_module_specs, multi_token_prediction):
        before = module.LocalSpecProvider
        module.LocalSpecProvider = TandemSpecProvider
        _undo.append(lambda module=module, before=before: setattr(module, "LocalSpecProvider", before))  # type: ignore[misc]


def disable() -> None:
    """Ends `enable` for specs made from now on."""
    while _undo:
        _undo.pop()()
