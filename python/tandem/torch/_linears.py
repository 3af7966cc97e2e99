"""Products of other frameworks' tensor-parallel linears on tandem's operators, each planned, measured
and reported under the framework's name, as PyTorch's fused operators are (_fused.py)."""
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._core import AgWgrad
from . import _enable, _fused, _groups
from ._receipts import TORCH, Choice, receipt_of

Form = Callable[[], Any]


def options_of(group_name: str) -> _fused.Options:
    """Options that `enable` was given for the group; the defaults without it."""
    options: Optional[_fused.Options] = _enable._options_of(group_name)
    return options or _fused.Options(measures=_fused.may_measure())


def note_stock(op: str, shape: str, dtype: torch.dtype, group_name: str, ranks: int, why: str) -> None:
    """Counts a call that the framework's own code runs. Raises Unsupported if strict."""
    name = str(dtype).replace("torch.", "")
    receipt_of(op, shape, name, ranks, Choice(TORCH, why), options_of(group_name).strict).count()


def gathered(x: Tensor, group_name: str) -> Tensor:
    """Rows of all ranks, by torch.distributed."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def scattered(partial: Tensor, group_name: str) -> Tensor:
    """This rank's rows of the sum over ranks, by torch.distributed."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    out = partial.new_empty((partial.shape[0] // group.size(), *partial.shape[1:]))
    dist.reduce_scatter_tensor(out, partial.contiguous(), group=group)
    return out


def gather_linear(op: str, x: Tensor, weights: Sequence[Tensor], group_name: str,
                  stock: Optional[Form] = None, keep: bool = False) -> List[Tensor]:
    """[all-gather(x) @ weight.T for each weight [N, K]], and with `keep` all-gather(x) after them; x:
    this rank's rows [rows, ..., K]. stock: the framework's form, to compare with."""

    def torch_form() -> Tuple[Tensor, List[Tensor]]:
        whole = gathered(x, group_name)
        return whole, [torch.matmul(whole, weight.t()) for weight in weights]

    call = _fused.AllGatherMatmul(options_of(group_name), stock or torch_form, x, [weight.t() for weight in weights],
                                  0, group_name, keep)
    call.op = op
    whole, outs = _fused.run(call)
    return [*outs, whole] if keep else list(outs)


def linear_scatter(op: str, x: Tensor, weight: Tensor, group_name: str, stock: Optional[Form] = None) -> Tensor:
    """This rank's rows of the sum over ranks of x [rows, ..., K] @ weight.T; weight: [N, K]."""

    def torch_form() -> Tensor:
        return scattered(torch.matmul(x, weight.t()), group_name)

    call = _fused.MatmulReduceScatter(options_of(group_name), stock or torch_form, x, weight.t(), "sum", 0, group_name)
    call.op = op
    out: Tensor = _fused.run(call)
    return out


class WeightGradient(_fused.Call):
    """dw [N, K] = dy.T @ x over all rows, where one of dy and x is this rank's rows and is gathered:
    of `dtype`, or added to `into`, f32. AgWgrad accumulates in f32; the alternative is a gather and
    a product that rounds once."""

    def __init__(self, op: str, options: _fused.Options, x: Tensor, dy: Tensor, gathers_x: bool, group_name: str,
                 into: Optional[Tensor], dtype: torch.dtype) -> None:
        # A comparison would add to `into` at each of its calls.
        measures = options.measures and into is None
        super().__init__(options._replace(measures=measures), group_name, self._run_torch)
        self.op, self.x, self.dy, self.gathers_x, self.into, self.dtype = op, x, dy, gathers_x, into, dtype

    def a(self) -> Tensor:
        return self.x if self.gathers_x else self.dy

    def key(self) -> Tuple[Any, ...]:
        return (tuple(self.x.shape), tuple(self.dy.shape), self.x.dtype, self.x.device, self.gathers_x, self.dtype,
                self.into is None)

    def shape(self, size: int) -> str:
        rows = self.a().numel() // max(1, self.a().shape[-1]) * size
        return f"m {rows} n {self.dy.shape[-1]} k {self.x.shape[-1]}"

    def _run_torch(self) -> Tensor:
        x = gathered(self.x, self.group_name) if self.gathers_x else self.x
        dy = self.dy if self.gathers_x else gathered(self.dy, self.group_name)
        left, right = dy.flatten(0, -2).t(), x.flatten(0, -2)
        if self.into is not None:
            return self.into.add_(torch.mm(left, right))
        return torch.mm(left, right) if self.dtype == x.dtype else torch.mm(left.to(self.dtype), right.to(self.dtype))

    def local_facts(self) -> Tuple[str, str]:
        return _fused._refusal_of_sizes(self.x, [self.dy]), ""

    def make(self, group: _groups.Group) -> _fused.Made:
        n, k = self.dy.shape[-1], self.x.shape[-1]
        rows = self.a().numel() // self.a().shape[-1] * group.size
        # Like the layers' (_products.py): GPU ranks gather the rows uncompressed here.
        codec = self.options.codec if self.x.device.type == "cpu" else None
        with group.lock:
            if self.gathers_x:
                op = AgWgrad(group.comm, rows, n, k, self.x.dtype, codec=codec)
            else:
                op = AgWgrad(group.comm, rows, k, n, self.x.dtype, weight_kn=True, codec=codec)

        def ours(call: "WeightGradient") -> Tensor:
            x, dy = call.x.flatten(0, -2).contiguous(), call.dy.flatten(0, -2).contiguous()
            dw = call.into
            if dw is None:
                dw = torch.zeros(n, k, dtype=torch.float32, device=x.device)
            with torch.no_grad(), group.lock:
                if call.gathers_x:
                    op(x, dy, dw)
                else:
                    op(dy, x, dw.t())
            return dw if call.into is not None else dw.to(call.dtype)

        return _fused.Made(ours, [op.receipt])


def weight_gradient(op: str, x: Tensor, dy: Tensor, group_name: str, *, gathers_x: bool,
                    into: Optional[Tensor] = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """dy.T @ x over the rows of all ranks, [N, K] of `dtype`: of x [rows, ..., K] and dy [rows, ...,
    N], x (gathers_x) or dy is this rank's rows and the other has all. into: contiguous f32 [N, K] to
    add to, which is returned."""
    with torch.no_grad():
        out: Tensor = _fused.run(WeightGradient(op, options_of(group_name), x, dy, gathers_x, group_name, into, dtype))
    return out
