"""vLLM on tandem: `VLLM_PLUGINS=tandem vllm serve …`, the entry point `tandem` of vllm.general_plugins.

In every process of vLLM: `tandem.torch.enable()`, for the operators that its fuse_gemm_comms pass
writes into graphs, and `tandem.AllReduce` in place of the all-reduce of CudaCommunicator's
tensor-parallel group, for the sizes at which it measured faster (unless TANDEM_TUNE=0) than the one
vLLM would choose. TANDEM_VLLM_CODEC: wire format of those sums, such as int8.

Written for vllm/distributed/device_communicators/cuda_communicator.py at vLLM's commits 00b5a01d and
089eca13.
"""
import atexit
import inspect
import os
from typing import Any, Callable, List, Optional, Set, Tuple

import torch
from torch import Tensor

from ._core import AllReduce, Wire
from ._errors import InvalidArgument, Unsupported
from .torch import _enable, _fused, _linears
from .torch._groups import Group, name_of
from .torch._receipts import SERIAL, print_report, report

__all__ = ["register"]

NAME = "tandem"  # of the entry point
OP = "vllm.all_reduce"

_captured: Set[AllReduce] = set()  # replayed by CUDA graphs, which no plan may drop
_undo: List[Callable[[], None]] = []


def padded_rows(rows: int) -> int:
    """Rows of the operator that sums `rows` rows: eight sizes per power of two, so that prompts of any
    length share few operators."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


class _AllReduce(_fused.Call):
    """Sum of x [..., features] over ranks, in a new tensor."""

    op = OP
    asked = SERIAL

    def __init__(self, options: _fused.Options, torch_form: Callable[[], Tensor], x: Tensor, group_name: str,
                 codec: Optional[Wire]) -> None:
        # The base compares with vLLM's form unless it is told of a codec; here it is compared, too.
        super().__init__(options._replace(codec=None), group_name, torch_form)
        self.x, self.codec = x, codec
        self.features = x.shape[-1]
        self.rows = padded_rows(x.numel() // max(1, self.features))

    def a(self) -> Tensor:
        return self.x

    def key(self) -> Tuple[Any, ...]:
        return (self.rows, self.features, self.x.dtype, self.x.device, str(self.codec))

    def shape(self, size: int) -> str:
        return f"up to {self.rows} rows of {self.features}"

    def require(self) -> None:
        if self.x.dtype not in _fused.DTYPES:
            raise _fused.Refused(f"x is {self.x.dtype}")
        if self.x.numel() == 0:
            raise _fused.Refused("x is empty")

    def make(self, group: Group) -> _fused.Made:
        x = self.x
        elements = self.rows * self.features
        with group.lock:
            op = AllReduce(group.comm, [elements], x.dtype, codec=self.codec)

        def ours(call: "_AllReduce") -> Tensor:
            given = call.x.reshape(-1)
            whole = given.new_empty(elements)
            whole[:len(given)].copy_(given)
            whole[len(given):].zero_()
            if whole.is_cuda and torch.cuda.is_current_stream_capturing():
                _captured.add(op)
            with torch.no_grad(), group.lock:
                op(whole)
            return whole[:len(given)].view(call.x.shape)

        return _fused.Made(ours, [{"ran": SERIAL, "why": "a sum has no product to overlap with"}])


def _all_reduce_on_tandem(stock: Callable[[Any, Tensor], Tensor], codec: Optional[Wire]) -> Callable[[Any, Tensor], Tensor]:
    """CudaCommunicator.all_reduce with tandem's before the others. stock: vLLM's."""

    def all_reduce(self: Any, input_: Tensor) -> Tensor:
        group = self.device_group
        is_sum_of_ranks = self.world_size > 1 and "tp" in self.unique_name
        if not is_sum_of_ranks or not isinstance(group, torch.distributed.ProcessGroup):
            return stock(self, input_)
        name = name_of(group)
        call = _AllReduce(_linears.options_of(name), lambda: stock(self, input_), input_, name, codec)
        out: Tensor = _fused.run(call)
        return out

    return all_reduce


def _wanted_codec() -> Optional[Wire]:
    codec = os.environ.get("TANDEM_VLLM_CODEC", "")
    try:
        return Wire(codec) if codec else None
    except InvalidArgument as error:
        raise InvalidArgument(f"TANDEM_VLLM_CODEC: {error}") from None


def _print_report() -> None:
    if report():
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ.get("RANK", "0"))
        print_report(rank)


def register() -> None:
    """The entry point; vLLM may call it several times. Does nothing unless VLLM_PLUGINS names
    `tandem`: without that variable vLLM loads every installed plugin. Raises InvalidArgument for
    another TANDEM_VLLM_CODEC, Unsupported for a vLLM with another all_reduce."""
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(",") or _undo:
        return
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    stock = CudaCommunicator.all_reduce
    found = list(inspect.signature(stock).parameters)
    if found != ["self", "input_"]:
        raise Unsupported(f"vLLM's CudaCommunicator.all_reduce takes {found}: expected ['self', 'input_']")
    codec = _wanted_codec()
    if _enable._kernels is None:
        _enable.enable()
    CudaCommunicator.all_reduce = _all_reduce_on_tandem(stock, codec)
    atexit.register(_print_report)
    _undo.append(lambda: setattr(CudaCommunicator, "all_reduce", stock))


def unregister() -> None:
    """Gives vLLM its all_reduce back."""
    while _undo:
        _undo.pop()()
    atexit.unregister(_print_report)
    _captured.clear()
