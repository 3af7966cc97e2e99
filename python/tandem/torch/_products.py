"""GEMMs of the parallel layers on tandem's operators, as functions of tensors without autograd,
used by autograd (_layers.py) and torch.compile (_ops.py). `wanted`: requested gradients among
x, weight and bias; the others are None."""
from collections import OrderedDict
from contextlib import nullcontext
from functools import wraps
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    cast,
)

import torch
from torch import Tensor

from .. import _api
from .._core import AgGemm, AgWgrad, Comm, GemmAr, GemmRs, Wire
from .._errors import InvalidArgument
from ._receipts import count_call

Gradient = Optional[Tensor]
Gradients = Tuple[Gradient, Gradient, Gradient]
Codec = Optional[Wire]


class _OperatorCache:
    """Operators of one Comm, shared by all layers on it, for the last MAX_TOKEN_COUNTS token
    counts. All ranks make the same calls in the same order, so they create and drop the same
    operators."""

    MAX_TOKEN_COUNTS = 8

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.by_tokens: "OrderedDict[int, Dict[Any, Any]]" = OrderedDict()
        self.captured: Set[Any] = set()  # replayed by CUDA graphs

    def get(self, tokens: int, key: Any, make: Callable[[], Any]) -> Any:
        found = self.by_tokens.get(tokens, {}).get(key)
        if found is None:
            found = self.by_tokens.setdefault(tokens, {})[key] = make()
        self.by_tokens.move_to_end(tokens)
        if len(self.by_tokens) > self.MAX_TOKEN_COUNTS:
            self.by_tokens.popitem(last=False)
        if self.comm.stream is not None and torch.cuda.is_current_stream_capturing():
            self.captured.add(found)
        return found


# Keyed by the Comm's id, until its world is closed: layers are collected at different times on each
# rank.
_caches: Dict[int, _OperatorCache] = {}


def _cache_of(comm: Comm) -> _OperatorCache:
    for address, cache in list(_caches.items()):
        if cache.comm.closed:
            _caches.pop(address, None)
    return _caches.setdefault(id(comm), _OperatorCache(comm))


class Operators:
    """A layer's operators, created at the first call of a shape. features: global sizes of the
    layer, since one rank's shards of two layers may be equal while another rank's differ."""

    def __init__(self, comm: Comm, features: Tuple[int, int]) -> None:
        self.comm, self.features = comm, features
        self._cache = _cache_of(comm)

    def __deepcopy__(self, memo: Any) -> "Operators":
        return self

    def __call__(self, kind: Any, m: int, n: int, k: int, dtype: torch.dtype, **options: Any) -> Any:
        """The operator, for one call, which is counted."""
        key = (self.features, kind, n, k, dtype, *options.items())
        op = self._cache.get(m, key, lambda: kind(self.comm, m, n, k, dtype, **options))
        count_call(op)
        return op


def autocasts(device: str) -> bool:
    """True if torch.autocast is on for this device type."""
    if device not in ("cpu", "cuda"):
        return False
    if hasattr(torch, "get_autocast_dtype"):  # since PyTorch 2.4
        return torch.is_autocast_enabled(device)
    return torch.is_autocast_enabled() if device == "cuda" else torch.is_autocast_cpu_enabled()


def without_autocast(device: str) -> ContextManager[None]:
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


Function = TypeVar("Function", bound=Callable[..., Any])


def _as_given(function: Function) -> Function:
    """Computes in the dtypes of the given tensors, with torch.autocast disabled."""

    @wraps(function)
    def call(operators: Operators, x: Tensor, *more: Any) -> Any:
        with without_autocast(x.device.type):
            return function(operators, x, *more)

    return cast(Function, call)


class Product(NamedTuple):
    """forward(operators, x, weight, bias, tokens, codec), and
    gradients(operators, x, weight, dy, tokens, codec, wanted); tokens: rows over all ranks."""

    name: str
    forward: Callable[..., Tensor]
    gradients: Callable[..., Gradients]


def share(comm: Comm, tokens: int) -> int:
    """Size of this rank's shard of tokens, as by shard_of; tokens may be a torch.compile symbol."""
    return tokens // comm.size + (1 if comm.rank < tokens % comm.size else 0)


def tokens_of(comm: Comm, rows: int, tokens: Optional[int]) -> int:
    if tokens is None:
        return rows * comm.size
    expected = share(comm, tokens)
    if rows != expected:
        raise InvalidArgument(
            f"x: {rows} rows on rank {comm.rank}: expected {expected} of {tokens} tokens"
        )
    return tokens


def gather_linear(operators: Operators, x: Tensor, weight: Tensor, bias: Gradient, tokens: int,
                  codec: Codec) -> Tensor:
    """all-gather(x) @ weight.T + bias."""
    n, k = weight.shape
    op = operators(AgGemm, tokens, n, k, x.dtype, bias=bias is not None, codec=codec)
    return op(x, weight, bias=bias)


@_as_given
def gather_linear_gradients(operators: Operators, x: Tensor, weight: Tensor, dy: Tensor, tokens: int,
                            codec: Codec, wanted: Sequence[bool]) -> Gradients:
    dy = dy.contiguous()
    n, k = weight.shape
    dx = dw = None
    if wanted[0]:
        dx = operators(GemmRs, tokens, k, n, x.dtype, weight_kn=True)(dy, weight.t())
    if wanted[1]:
        # dw uses x as decoded on all ranks; GPU ranks gather it uncompressed here.
        on_cpu = operators.comm.stream is None
        op = operators(AgWgrad, tokens, n, k, x.dtype, codec=codec if on_cpu else None)
        dw = op(x, dy).to(weight.dtype)
    return dx, dw, dy.sum(0) if wanted[2] else None


def linear_scatter(operators: Operators, x: Tensor, weight: Tensor, bias: Gradient, tokens: int,
                   codec: Codec) -> Tensor:
    """This rank's rows of the sum over ranks of x @ weight.T, + bias."""
    n, k = weight.shape
    op = operators(GemmRs, tokens, n, k, x.dtype, bias=bias is not None, codec=codec)
    return op(x, weight, bias=bias)


@_as_given
def linear_scatter_gradients(operators: Operators, x: Tensor, weight: Tensor, dy: Tensor, tokens: int,
                             codec: Codec, wanted: Sequence[bool]) -> Gradients:
    dy = dy.contiguous()
    n, k = weight.shape
    dx = dw = db = None
    if wanted[0]:
        dx = operators(AgGemm, tokens, k, n, x.dtype, weight_kn=True)(dy, weight.t())
    if wanted[1]:
        dw = torch.zeros(n, k, dtype=torch.float32, device=dy.device)
        operators(AgWgrad, tokens, k, n, x.dtype, weight_kn=True)(dy, x, dw.t())
        dw = dw.to(weight.dtype)
    if wanted[2]:
        db = _api.all_reduce(operators.comm, dy.float().sum(0)).to(dy.dtype)
    return dx, dw, db


@_as_given
def copied_linear(operators: Operators, x: Tensor, weight: Tensor, bias: Gradient, tokens: int,
                  codec: Codec) -> Tensor:
    """x @ weight.T + bias of a replicated x."""
    return torch.nn.functional.linear(x, weight, bias)


@_as_given
def copied_linear_gradients(operators: Operators, x: Tensor, weight: Tensor, dy: Tensor, tokens: int,
                            codec: Codec, wanted: Sequence[bool]) -> Gradients:
    dy = dy.contiguous()
    n, k = weight.shape
    dx = None
    if wanted[0]:
        dx = operators(GemmAr, len(dy), k, n, x.dtype, weight_kn=True)(dy, weight.t())
    return dx, *_local_gradients(x, dy, wanted)


def linear_sum(operators: Operators, x: Tensor, weight: Tensor, bias: Gradient, tokens: int,
               codec: Codec) -> Tensor:
    """Sum over ranks of x @ weight.T, + bias, on every rank."""
    n, k = weight.shape
    op = operators(GemmAr, len(x), n, k, x.dtype, bias=bias is not None, codec=codec)
    return op(x, weight, bias=bias)


@_as_given
def linear_sum_gradients(operators: Operators, x: Tensor, weight: Tensor, dy: Tensor, tokens: int,
                         codec: Codec, wanted: Sequence[bool]) -> Gradients:
    dx = dy @ weight if wanted[0] else None
    return dx, *_local_gradients(x, dy, wanted)


def _local_gradients(x: Tensor, dy: Tensor, wanted: Sequence[bool]) -> Tuple[Gradient, Gradient]:
    """Gradients of weight and bias if this rank has all rows of x and dy."""
    return dy.t() @ x if wanted[1] else None, dy.sum(0) if wanted[2] else None


def gather_rows(comm: Comm, x: Tensor, tokens: int) -> Tensor:
    x = x.contiguous()
    return _api.all_gather(comm, x, x.new_empty((tokens, *x.shape[1:])))


def gather_rows_gradient(comm: Comm, dy: Tensor) -> Tensor:
    return _api.reduce_scatter(comm, dy.contiguous())


def shared_seed(comm: Comm) -> int:
    """Seed equal on every rank, drawn from rank 0's generator only."""
    drawn = 0
    if comm.rank == 0:
        drawn = int(torch.empty(1, dtype=torch.int64, device="cpu").random_(2**31 - 1))
    return comm._of_rank_0(drawn)


def summed(comm: Comm, gradient: Tensor) -> Tensor:
    """Sums the gradient of a replicated parameter over ranks, in f32."""
    whole = gradient.to(torch.float32, copy=True).contiguous()
    return _api.all_reduce(comm, whole).to(gradient.dtype)


GATHER_LINEAR = Product("gather_linear", gather_linear, gather_linear_gradients)
LINEAR_SCATTER = Product("linear_scatter", linear_scatter, linear_scatter_gradients)
COPIED_LINEAR = Product("copied_linear", copied_linear, copied_linear_gradients)
LINEAR_SUM = Product("linear_sum", linear_sum, linear_sum_gradients)
