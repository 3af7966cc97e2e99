"""In-place collectives; for frameworks with immutable arrays they return a new array."""
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
    """In-place all-reduce: sum ('max': maximum) of x over ranks.

    x: any shape; f32, bf16, f16 or i32. Returns x, or a new array for JAX, whose arrays are
    immutable. Equal bits on every rank.

    codec: wire format of a sum of f32, bf16 or f16, such as 'int8' or 'int4:g32'
    (docs/reference/wire-formats.md), or a Wire. residual: f32 with as many elements as x, zeros at first: the
    encoding error of this call, added to the values of the next one.

    Collective. Raises InvalidArgument, Mismatch, Timeout, Aborted.
    """
    result: "Array" = _frameworks.finish(x, _all_reduce(
        comm, _frameworks.writable(x), op, codec, residual))
    return result


def broadcast(comm: "Comm", x: "Array", root: int = 0) -> "Array":
    """Copies x [any shape, any dtype] of rank `root` into x of every rank. Returns x, or a new
    array for JAX. Collective. Raises InvalidArgument, Mismatch, Timeout, Aborted."""
    result: "Array" = _frameworks.finish(x, _broadcast(comm, _frameworks.writable(x), root))
    return result
