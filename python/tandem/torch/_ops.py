"""The layers' GEMMs as PyTorch custom operators (torch.ops.tandem), which torch.compile supports.
Requires PyTorch 2.4. A layer is passed as a number, since operators take no objects; the registry
drops it with the layer. Objects of the library are passed by their id()."""
import itertools
import sys
import weakref
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _products as products
from .._core import AgGemm, AgWgrad, Comm, GemmAr, GemmRs, MoeLayer
from .._errors import InvalidArgument
from ._products import Product, share, tokens_of
from ._receipts import count_call

_numbers = itertools.count(1)
_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def handle_of(layer: Any) -> int:
    """Registers the layer and returns its new number, valid for the layer's lifetime."""
    handle = next(_numbers)
    _layers[handle] = layer
    return handle


def _layer_of(handle: int) -> Any:
    layer = _layers.get(int(handle))
    if layer is None:
        raise InvalidArgument(f"layer {int(handle)} of a compiled model: it is gone: expected one that lives")
    return layer


def _named(address: int, *kinds: Any) -> Any:
    """Object of one of these classes with that id()."""
    for kind in kinds:
        found = kind._at(int(address))
        if found is not None:
            return found
    raise InvalidArgument(f"a {kinds[0].__name__} of a compiled function is gone: expected one that lives")


def _comm_at(address: int) -> Any:
    return _named(address, Comm)


def _define(product: Product) -> None:
    """Defines tandem::NAME, and NAME_gradients as one operator, so that all ranks run its
    collectives in the same order."""

    def tokens_of_layer(layer: Any, rows: int, tokens: Optional[int]) -> int:
        return tokens_of(layer.comm, rows, tokens) if product is products.GATHER_LINEAR else rows

    @torch.library.custom_op(f"tandem::{product.name}", mutates_args=())
    def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], handle: int, tokens: Optional[int]) -> Tensor:
        layer = _layer_of(handle)
        with torch.no_grad():
            return product.forward(layer._operators, x.contiguous(), weight, bias,
                                   tokens_of_layer(layer, x.shape[0], tokens), layer.codec)

    @forward.register_fake
    def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], handle: int, tokens: Optional[int]) -> Tensor:
        layer = _layer_of(handle)
        rows = tokens_of_layer(layer, x.shape[0], tokens)
        if product is products.LINEAR_SCATTER:
            rows = share(layer.comm, rows)
        return x.new_empty((rows, weight.shape[0]))

    @torch.library.custom_op(f"tandem::{product.name}_gradients", mutates_args=())
    def gradients(dy: Tensor, x: Tensor, weight: Tensor, handle: int, tokens: Optional[int],
                  wanted: Sequence[bool]) -> Tuple[Tensor, Tensor, Tensor]:
        layer = _layer_of(handle)
        with torch.no_grad():
            made = product.gradients(layer._operators, x.contiguous(), weight, dy,
                                     tokens_of_layer(layer, x.shape[0], tokens), layer.codec, wanted)
        dx, dw, db = (dy.new_empty(0) if each is None else each for each in made)
        return dx, dw, db

    @gradients.register_fake
    def _(dy: Tensor, x: Tensor, weight: Tensor, handle: int, tokens: Optional[int],
          wanted: Sequence[bool]) -> Tuple[Tensor, Tensor, Tensor]:
        return (x.new_empty(x.shape if wanted[0] else 0), weight.new_empty(weight.shape if wanted[1] else 0),
                dy.new_empty(dy.shape[1] if wanted[2] else 0))

    def keep(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.handle, ctx.tokens = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, dy: Tensor) -> Tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        made = gradients(dy, x, weight, ctx.handle, ctx.tokens, wanted)
        return *(each if want else None for want, each in zip(wanted, made)), None, None

    forward.register_autograd(backward, setup_context=keep)


for _product in (products.GATHER_LINEAR, products.LINEAR_SCATTER, products.COPIED_LINEAR, products.LINEAR_SUM):
    _define(_product)


@torch.library.custom_op("tandem::gather_rows", mutates_args=())
def gather_rows(x: Tensor, comm: int, tokens: Optional[int]) -> Tensor:
    """comm: the Comm's id."""
    group = _comm_at(comm)
    with torch.no_grad():
        return products.gather_rows(group, x, tokens_of(group, x.shape[0], tokens))


@gather_rows.register_fake
def _(x: Tensor, comm: int, tokens: Optional[int]) -> Tensor:
    return x.new_empty((tokens_of(_comm_at(comm), x.shape[0], tokens), *x.shape[1:]))


@torch.library.custom_op("tandem::gather_rows_gradient", mutates_args=())
def gather_rows_gradient(dy: Tensor, comm: int) -> Tensor:
    with torch.no_grad():
        return products.gather_rows_gradient(_comm_at(comm), dy)


@gather_rows_gradient.register_fake
def _(dy: Tensor, comm: int) -> Tensor:
    return dy.new_empty((share(_comm_at(comm), dy.shape[0]), *dy.shape[1:]))


def _keep_comm(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.comm = inputs[1]


gather_rows.register_autograd(lambda ctx, dy: (gather_rows_gradient(dy, ctx.comm), None, None),
                              setup_context=_keep_comm)


@torch.library.custom_op("tandem::call", mutates_args=())
def call(x: Tensor, weight: Tensor, bias: Optional[Tensor], op: int) -> Tensor:
    """op: an operator's id. Has no gradients."""
    made = _named(op, AgGemm, GemmRs, GemmAr, AgWgrad)
    count_call(made)
    return made(x, weight) if bias is None else made(x, weight, bias=bias)


@call.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], op: int) -> Tensor:
    made = _named(op, AgGemm, GemmRs, GemmAr, AgWgrad)
    if isinstance(made, AgWgrad):
        return x.new_empty((made.n, made.k), dtype=torch.float32)
    return x.new_empty((share(made.comm, made.m) if isinstance(made, GemmRs) else made.m, made.n))


@torch.library.custom_op("tandem::shared", mutates_args=())
def shared(parameter: Tensor, handle: int) -> Tensor:
    """Replicated parameter that each rank uses for its own rows: its gradient is summed."""
    return parameter.detach().clone()


@shared.register_fake
def _(parameter: Tensor, handle: int) -> Tensor:
    return torch.empty_like(parameter)


@torch.library.custom_op("tandem::summed", mutates_args=())
def summed(gradient: Tensor, handle: int) -> Tensor:
    """Sums over ranks, in f32."""
    return products.summed(_layer_of(handle).comm, gradient.detach())


@summed.register_fake
def _(gradient: Tensor, handle: int) -> Tensor:
    return gradient.new_empty(gradient.shape)


def _keep_handle(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.handle = inputs[-1]


shared.register_autograd(lambda ctx, gradient: (summed(gradient, ctx.handle), None), setup_context=_keep_handle)


class _Ticket(bytearray):
    """Owner of the memory of a tensor that represents the batch from MoeLayer.forward for backward.
    The batch lives as long as that memory is referenced."""

    batch: Any


_tickets: "weakref.WeakValueDictionary[int, _Ticket]" = weakref.WeakValueDictionary()


def _ticket_of(batch: Any) -> Tensor:
    number = next(_numbers)
    ticket = _Ticket(number.to_bytes(8, sys.byteorder))
    ticket.batch = batch
    _tickets[number] = ticket
    return torch.frombuffer(ticket, dtype=torch.int64)


def _moe_layer(handle: int) -> Any:
    """MoeLayer of a Moe by its number, or of a MoeLayer by its id()."""
    module = _layers.get(int(handle))
    return _named(handle, MoeLayer) if module is None else module.layer


@torch.library.custom_op("tandem::moe", mutates_args=())
def moe(x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor,
        handle: int) -> Tuple[Tensor, Tensor]:
    """Returns (out, ticket); ticket is for moe_gradients."""
    layer = _moe_layer(handle)
    count_call(layer)
    with torch.no_grad():
        out, batch = layer.forward(x.contiguous(), experts.contiguous(), weights.contiguous(), w_in, w_out)
        return out, _ticket_of(batch)


@moe.register_fake
def _(x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor,
      handle: int) -> Tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("tandem::moe_gradients", mutates_args=())
def moe_gradients(dout: Tensor, ticket: Tensor, w_in: Tensor, w_out: Tensor,
                  handle: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, w_in and w_out."""
    ticket_state = _tickets.get(int(ticket.item()))
    if ticket_state is None:
        raise InvalidArgument("moe: the batch of a compiled forward pass is gone: expected one that lives")
    layer = _moe_layer(handle)
    count_call(layer, is_backward=True)
    with torch.no_grad():
        dx, dweights, dw_in, dw_out = layer.backward(ticket_state.batch, dout.contiguous(), w_in, w_out)
        return dx, dweights, dw_in.to(w_in.dtype), dw_out.to(w_out.dtype)


@moe_gradients.register_fake
def _(dout: Tensor, ticket: Tensor, w_in: Tensor, w_out: Tensor,
      handle: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    dweights = dout.new_empty((dout.shape[0], _moe_layer(handle).top_k), dtype=torch.float32)
    return dout.new_empty(dout.shape), dweights, w_in.new_empty(w_in.shape), w_out.new_empty(w_out.shape)


def _keep_moe(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    _, _, _, w_in, w_out, ctx.handle = inputs
    ctx.save_for_backward(output[1], w_in, w_out)


def _moe_backward(ctx: Any, dout: Tensor, _: Any) -> Tuple[Optional[Tensor], ...]:
    dx, dweights, dw_in, dw_out = moe_gradients(dout, *ctx.saved_tensors, ctx.handle)
    return dx, None, dweights, dw_in, dw_out, None


moe.register_autograd(_moe_backward, setup_context=_keep_moe)
