"""PyTorch's fused operators on tandem's: a plan a shape, made at its first call.

A plan owns its operators and its receipt. All ranks of a group call the same operators with the same
shapes in the same order, as PyTorch's kernels require too, so they make the same plans.
"""
import os
import statistics
import time
import weakref
from collections import OrderedDict
from functools import lru_cache
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._core import AgGemm, GemmRs, Wire
from .._errors import InvalidArgument, Mismatch, Unsupported
from ._groups import Group, group_of
from ._receipts import OVERLAPPED, SERIAL, TORCH, Choice, Receipt, receipt_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDS, CALLS = 5, 4  # of a comparison with PyTorch's kernel
MIN_BESIDE = 16 << 20  # bytes of rows that are copied under a product; a smaller copy takes less time than its start
MAX_PLANS = 256  # of a process; then the oldest is dropped that no CUDA graph has


class Options(NamedTuple):
    """Of a group. codec: wire format. measures: compare with PyTorch's kernel at the first call."""

    codec: Optional[Wire] = None
    strict: bool = False
    measures: bool = True


def may_measure() -> bool:
    return os.environ.get("TANDEM_TUNE", "1") != "0"


class Refused(Exception):
    """Reason tandem cannot run a call."""


def _require_product(a: Tensor, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    for name, tensor in [("A", a)] + [("B", weight) for weight in weights]:
        if tensor.dtype not in dtypes:
            raise Refused(f"{name} is {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
        if tensor.dtype != a.dtype:
            raise Refused(f"A is {a.dtype} and {name} {tensor.dtype}")
        if tensor.device != a.device:
            raise Refused(f"A is on {a.device} and {name} on {tensor.device}")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[0] != a.shape[-1]:
            raise Refused(f"A {list(a.shape)} and B {list(weight.shape)} are not a product")


def _refusal_of_sizes(a: Tensor, weights: Sequence[Tensor]) -> str:
    """Reason this rank cannot run the product, of sizes that may differ by rank; empty if it can."""
    for name, tensor in [("A", a)] + [("B", weight) for weight in weights]:
        if tensor.numel() == 0:
            return f"{name} is empty"
        for size in tensor.shape[-1:] if name == "A" else tensor.shape:
            if a.is_cuda and size * a.element_size() % 16:
                return f"{size} of {name} {list(tensor.shape)} are no multiple of 16 bytes"
    return ""


def _require_dim(name: str, dim: int, a: Tensor) -> None:
    if a.dim() < 2 or not 0 <= dim < a.dim():
        raise Refused(f"{name} {dim} of A {list(a.shape)}")
    if dim == a.dim() - 1:
        raise Refused(f"{name} {dim} is A's last, which is summed over")


def _dense(weight: Tensor) -> Tensor:
    """weight [K, N] such that it or its transpose is contiguous."""
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()


def _rows(a: Tensor, dim: int) -> Tensor:
    """A as a matrix whose rows begin with `dim`."""
    return a.movedim(dim, 0).flatten(0, -2).contiguous() if a.dim() > 2 or dim else a.contiguous()


def _unflatten(matrix: Tensor, a: Tensor, dim: int, length: int) -> Tensor:
    """Inverse of _rows for a result with `length` entries along dim."""
    if a.dim() == 2:
        return matrix
    leading = list(a.movedim(dim, 0).shape[1:-1])
    return matrix.view(length, *leading, matrix.shape[-1]).movedim(0, dim)


def _is_kn(weight: Tensor) -> bool:
    return weight.stride(-1) == 1 and weight.shape[1] > 1 or not weight.t().is_contiguous()


class Plan:
    """Form of the calls of one shape in a process group."""

    def __init__(self, run: Callable[..., Any], receipt: Receipt, group: Any) -> None:
        self.run, self.receipt, self.group = run, receipt, weakref.ref(group)
        self.is_captured = False  # a CUDA graph may replay its operators


_plans: "OrderedDict[Any, Plan]" = OrderedDict()


def clear_plans() -> None:
    _plans.clear()


def _key_of(tensor: Tensor) -> Tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype)


def _key_of_weight(weight: Tensor) -> Tuple[Any, ...]:
    return (tuple(weight.shape), weight.dtype, weight.dim() == 2 and _is_kn(weight))


def _remember(key: Any, plan: Plan) -> Plan:
    _plans[key] = plan
    if len(_plans) > MAX_PLANS:
        oldest = next((each for each, kept in _plans.items() if not kept.is_captured), key)
        del _plans[oldest]
    return plan


@lru_cache(maxsize=None)
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _is_capturing(a: Tensor) -> bool:
    return a.is_cuda and torch.cuda.is_current_stream_capturing()


def _time_us(run: Callable[[], Any], device: torch.device) -> float:
    """Time of a call in a row of calls, as in a program whose host runs ahead of its GPU: that of
    the host or of the GPU, whichever is longer. Waits only for the current stream: another one may
    wait for something that this rank enqueues later."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if stream:
        stream.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    if stream:
        stream.synchronize()
    return (time.perf_counter() - begin) * 1e6 / CALLS


def _compare(group: Group, ours: Callable[[], Any], other: Callable[[], Any], device: torch.device) -> Tuple[float, float]:
    """Median times of both in alternating calls, of rank 0: collective."""
    times: Tuple[List[float], List[float]] = ([], [])
    for repeat in range(1 + ROUNDS):
        for run, taken in zip((ours, other), times):
            with group.lock:
                group.comm.barrier("comparison with PyTorch's kernel")
            us = _time_us(run, device)
            if repeat:
                taken.append(us)
    nanoseconds = [group.comm._of_rank_0(int(statistics.median(taken) * 1e3)) for taken in times]
    return nanoseconds[0] / 1e3, nanoseconds[1] / 1e3


def _exchange(group: Group, text: str) -> List[str]:
    """Texts of all ranks: collective."""
    with group.lock:
        return [blob.decode() for blob in group.comm._exchange(text.encode())]


def _runs_everywhere(group: Group, form: Callable[[], Any]) -> bool:
    """Whether the framework's form runs on all ranks: without peer access or symmetric memory
    PyTorch's kernels raise. Collective."""
    failure = ""
    try:
        form()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return not any(_exchange(group, failure))


def _choose(group: Group, made: "Made", options: Options, ours: Callable[[], Any],
            other: Callable[[], Any], device: torch.device) -> Choice:
    """Choice between tandem's operators and the framework's form."""
    overlaps = [receipt["ran"] == OVERLAPPED for receipt in made.receipts]
    ran = OVERLAPPED if any(overlaps) or not overlaps else SERIAL
    why = "" if ran == OVERLAPPED else str(made.receipts[0]["why"])
    if not options.measures or options.codec is not None or not _runs_everywhere(group, other):
        return Choice(ran, why)
    local, torchs = _compare(group, ours, other, device)
    if torchs < local:
        return Choice(TORCH, f"PyTorch's kernel is faster: {torchs:.1f} us against {local:.1f}", local / torchs)
    return Choice(ran, why, torchs / local if local > 0 else None)


class Made(NamedTuple):
    """Tandem's form, a function of a Call, and the receipts of its operators."""

    run: Callable[..., Any]
    receipts: Sequence[Dict[str, Any]]


class Call:
    """One call of a fused operator: what its plan depends on, and how it is planned."""

    op = ""
    asked = OVERLAPPED

    def __init__(self, options: Options, group_name: str, torch_form: Callable[[], Any]) -> None:
        self.options, self.group_name, self.torch_form = options, group_name, torch_form

    def a(self) -> Tensor:
        raise NotImplementedError

    def key(self) -> Tuple[Any, ...]:
        raise NotImplementedError

    def shape(self, size: int) -> str:
        """As the receipt shows it."""
        raise NotImplementedError

    def check(self, size: int) -> None:
        """Raises InvalidArgument for a call that no form can run."""

    def require(self) -> None:
        """Raises Refused for a call that tandem cannot run, by what is equal on all ranks."""

    def local_facts(self) -> Tuple[str, str]:
        """Reason this rank cannot run the call, by what may differ by rank; and what must not."""
        return "", ""

    def make(self, group: Group) -> Made:
        """Collective. Raises Error."""
        raise NotImplementedError


class Gathering(Call):
    """A call that gathers A, this rank's rows, for a product with each of several B."""

    tensor: Tensor
    bs: Sequence[Tensor]

    def a(self) -> Tensor:
        return self.tensor

    def shape(self, size: int) -> str:
        columns = "+".join(str(b.shape[-1]) for b in self.bs)
        k = self.tensor.shape[-1]
        return f"m {self.tensor.numel() // max(1, k) * size} n {columns} k {k}"

    def first(self) -> int:
        """Index of the product that hides the gather, the largest; the others follow with the
        gathered A."""
        return max(range(len(self.bs)), key=lambda i: self.bs[i].shape[1])


class Scattering(Call):
    """A call that scatters the sums over ranks of a product of A and B."""

    tensor: Tensor
    b: Tensor

    def a(self) -> Tensor:
        return self.tensor

    def shape(self, size: int) -> str:
        k = self.tensor.shape[-1]
        return f"m {self.tensor.numel() // max(1, k)} n {self.b.shape[-1]} k {k}"


def run(call: Call) -> Any:
    """Runs the call in the form of its plan. Raises Error, and what PyTorch's kernel raises."""
    key = (call.op, call.group_name, call.options, *call.key())
    plan = _plans.get(key)
    if plan is None or plan.group() is not _group_named(call.group_name):
        plan = _plan(call, key)
    plan.receipt.count()
    plan.is_captured = plan.is_captured or _is_capturing(call.a())
    return plan.run(call)


def _run_torch(call: Call) -> Any:
    return call.torch_form()


def _group_named(name: str) -> Any:
    return torch._C._distributed_c10d._resolve_process_group(name)


def _require_on_all_ranks(call: Call, group: Group) -> None:
    """Raises Refused, on all ranks alike."""
    facts = [text.split("\n", 1) for text in _exchange(group, "\n".join(call.local_facts()))]
    for rank, (refusal, layout) in enumerate(facts):
        if refusal:
            raise Refused(f"rank {rank}: {refusal}")
        if layout != facts[0][1]:
            raise Refused(f"operands are {facts[0][1]} on rank 0 and {layout} on rank {rank}")


def _make(call: Call, size: int) -> Tuple[Group, Made]:
    """Collective. Raises Refused, on all ranks alike, and Error."""
    if size == 1:
        raise Refused("a group of 1 rank has nothing to overlap")
    call.require()
    try:
        group = group_of(call.group_name, call.a().device)
    except (Unsupported, InvalidArgument) as error:  # of all ranks
        raise Refused(str(error)) from None
    _require_on_all_ranks(call, group)
    try:
        return group, call.make(group)
    except Mismatch:  # no form can run it
        raise
    except (Unsupported, InvalidArgument) as error:
        raise Refused(str(error)) from None


def _plan(call: Call, key: Any) -> Plan:
    process_group = _group_named(call.group_name)
    size = process_group.size()

    def plan(form: Callable[..., Any], choice: Choice) -> Plan:
        dtype = str(call.a().dtype).replace("torch.", "")
        receipt = receipt_of(call.op, call.shape(size), dtype, size, choice, call.options.strict, call.asked)
        return Plan(form, receipt, process_group)

    call.check(size)
    if _is_capturing(call.a()):
        why = "the first call of this shape is inside a CUDA graph's capture: expected one before it"
        return plan(_run_torch, Choice(TORCH, why))
    try:
        group, made = _make(call, size)
    except Refused as refused:
        return _remember(key, plan(_run_torch, Choice(TORCH, str(refused))))
    with torch.no_grad():
        choice = _choose(group, made, call.options, lambda: made.run(call), call.torch_form, call.a().device)
    if choice.ran == TORCH:
        return _remember(key, plan(_run_torch, choice))
    return _remember(key, plan(made.run, choice))


def _with_gathered(op: AgGemm, rows: Tensor, weight: Tensor, group: Group, is_encoded: bool) -> Tuple[Tensor, Tensor]:
    """The product and the rows of all ranks, of which this rank's are copied under the product if they
    are many and not as a wire format has them."""
    if not rows.is_cuda or is_encoded or rows.nbytes < MIN_BESIDE:
        return op(rows, weight), op.gathered(rows)
    whole = rows.new_empty((op.m, rows.shape[1]))
    current, beside = torch.cuda.current_stream(), _stream_beside(rows.device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        whole[group.rank * len(rows):][:len(rows)].copy_(rows)
    try:
        product = op(rows, weight)
        op.gathered(rows, whole, local=False)
    finally:
        current.wait_stream(beside)
    return product, whole


class AllGatherMatmul(Gathering):
    """(A gathered along gather_dim, [A @ B for each B])."""

    op = "fused_all_gather_matmul"

    def __init__(self, options: Options, torch_form: Callable[[], Any], a: Tensor, bs: Sequence[Tensor],
                 gather_dim: int, group_name: str, return_a: bool) -> None:
        super().__init__(options, group_name, torch_form)
        self.tensor, self.bs, self.dim, self.returns_a = a, bs, gather_dim, return_a

    def key(self) -> Tuple[Any, ...]:
        return (_key_of(self.tensor), self.tensor.device, self.dim, self.returns_a, *map(_key_of_weight, self.bs))

    def require(self) -> None:
        if not self.bs:
            raise Refused("no B")
        _require_dim("gather_dim", self.dim, self.tensor)
        _require_product(self.tensor, self.bs)

    def local_facts(self) -> Tuple[str, str]:
        first = self.first()
        layout = "[K, N]" if _is_kn(self.bs[first]) else "[N, K]"
        return _refusal_of_sizes(self.tensor, self.bs), f"B {first} in {layout}"

    def make(self, group: Group) -> Made:
        a, bs, first = self.tensor, self.bs, self.first()
        keeps = self.returns_a or len(bs) > 1
        weight = _dense(bs[first])
        k, n = weight.shape
        m = a.numel() // k * group.size
        with group.lock:
            op = AgGemm(group.comm, m, n, k, a.dtype, weight_kn=_is_kn(weight), codec=self.options.codec,
                        keep_gathered=keeps)

        def ours(call: "AllGatherMatmul") -> Tuple[Optional[Tensor], List[Tensor]]:
            x, weights = call.tensor, call.bs
            with torch.no_grad(), group.lock:
                rows = _rows(x, call.dim)
                length = x.shape[call.dim] * group.size
                if not keeps:
                    return None, [_unflatten(op(rows, _dense(weights[first]).t()), x, call.dim, length)]
                product, whole = _with_gathered(op, rows, _dense(weights[first]).t(), group, call.options.codec is not None)
            outs = [_unflatten(product if i == first else torch.mm(whole, b), x, call.dim, length)
                    for i, b in enumerate(weights)]
            return _unflatten(whole, x, call.dim, length) if call.returns_a else None, outs

        return Made(ours, [op.receipt])


class MatmulReduceScatter(Scattering):
    """This rank's part along scatter_dim of the sum, or mean, over ranks of A @ B."""

    op = "fused_matmul_reduce_scatter"

    def __init__(self, options: Options, torch_form: Callable[[], Any], a: Tensor, b: Tensor, reduce_op: str,
                 scatter_dim: int, group_name: str) -> None:
        super().__init__(options, group_name, torch_form)
        self.tensor, self.b, self.reduce_op, self.dim = a, b, reduce_op, scatter_dim

    def key(self) -> Tuple[Any, ...]:
        return (_key_of(self.tensor), self.tensor.device, self.dim, self.reduce_op, _key_of_weight(self.b))

    def check(self, size: int) -> None:
        a, dim = self.tensor, self.dim
        if 0 <= dim < a.dim() and a.shape[dim] % size:
            raise InvalidArgument(f"{self.op}: {a.shape[dim]} entries along scatter_dim {dim}: expected a multiple of "
                                  f"the group's {size} ranks")

    def require(self) -> None:
        if self.reduce_op not in ("sum", "avg"):
            raise Refused(f"reduce_op {self.reduce_op}")
        _require_dim("scatter_dim", self.dim, self.tensor)
        _require_product(self.tensor, [self.b])

    def local_facts(self) -> Tuple[str, str]:
        return _refusal_of_sizes(self.tensor, [self.b]), "B in " + ("[K, N]" if _is_kn(self.b) else "[N, K]")

    def make(self, group: Group) -> Made:
        a = self.tensor
        weight = _dense(self.b)
        k, n = weight.shape
        with group.lock:
            op = GemmRs(group.comm, a.numel() // k, n, k, a.dtype, weight_kn=_is_kn(weight),
                        codec=self.options.codec)

        def ours(call: "MatmulReduceScatter") -> Tensor:
            x = call.tensor
            with torch.no_grad(), group.lock:
                out = op(_rows(x, call.dim), _dense(call.b).t())
            if call.reduce_op == "avg":
                out = out.div_(group.size)
            return _unflatten(out, x, call.dim, x.shape[call.dim] // group.size).contiguous()

        return Made(ours, [op.receipt])
