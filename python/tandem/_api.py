"""Collectives that write where they read: for frameworks without writing they return a new array."""
from typing import TYPE_CHECKING, Any, Optional

from . import _frameworks
from ._core import _all_reduce, _broadcast, all_gather, reduce_scatter

if TYPE_CHECKING:
    from ._core import Array, CodecLike, Comm

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]


def all_reduce(
    comm: "Comm",
    x: "Array",
    op: str = "sum",
    *,
    codec: "CodecLike" = None,
    residual: Any = None,
) -> "Array":
    """The sum ('max': the maximum) over ranks, in x itself, which is returned; of JAX, whose arrays
    are immutable, a new one. f32, bf16, f16 or i32; the same bits on every rank.

    codec: the wire format of a sum of f32, bf16 or f16, such as 'int8' or 'int4:g32'
    (docs/wire-formats.md), or a Wire. residual: f32 of as many elements as x, zeros at first: what encoding
    lost here, which the next call adds to its values.

    Collective. Raises InvalidArgument, Mismatch, Timeout, Aborted.
    """
    result: "Array" = _frameworks.finish(x, _all_reduce(
        comm, _frameworks.writable(x), op, codec, residual))
    return result


def broadcast(comm: "Comm", x: "Array", root: int = 0) -> "Array":
    """x [any shape, any dtype] of rank `root`, in x itself, which is returned; of JAX a new one.
    Collective. Raises InvalidArgument, Mismatch, Timeout, Aborted."""
    result: "Array" = _frameworks.finish(x, _broadcast(comm, _frameworks.writable(x), root))
    return result
