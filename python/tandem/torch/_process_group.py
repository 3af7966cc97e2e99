"""Process group of backend "tandem" without a compiler: torch.distributed's calls and DDP. Calls run
before they return, on CPU ranks: CUDA tensors are copied to the host and back."""
from datetime import timedelta
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _api, _core
from .._errors import Error
from ._backend import STORE_NAME
from ._groups import connect

NATIVE = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
Op = dist.ReduceOp.RedOpType
COMBINE = {
    Op.SUM: torch.add, Op.AVG: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor,
}


class _Ended(dist.Work):
    """Work that has ended."""

    def __init__(self, result: List[Tensor]) -> None:
        super().__init__()
        self._future: "torch.futures.Future[List[Tensor]]" = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[List[Tensor]]":
        return self._future


def _flat(x: Tensor) -> Tensor:
    """A copy."""
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1))


def _bytes(x: Tensor) -> Tensor:
    return _flat(x).view(torch.uint8)


def _fill(x: Tensor, flat: Tensor) -> None:
    x.detach().copy_(flat.view(x.dtype).view(x.shape))


class PythonGroup(dist.ProcessGroup):
    """Arguments: the group's store, rank and size, seconds of a wait and GroupOptions."""

    def __init__(self, store: Any, rank: int, size: int, deadline: float, options: Any) -> None:
        super().__init__(rank, size)
        self._options = options
        self._world = connect(store, STORE_NAME, rank, size, torch.device("cpu"), deadline)
        self._comm = self._world.comm()

    def getBackendName(self) -> str:
        return "tandem"

    def tandem_bytes_sent(self) -> int:
        return self._comm.bytes_sent

    def shutdown(self) -> None:
        self._world.close()

    def _ended(self, outputs: List[Tensor], call: Callable[[], None]) -> _Ended:
        with torch.no_grad():
            try:
                call()
            except Error as error:
                raise dist.DistBackendError(str(error)) from error
        return _Ended(outputs)

    def _gather(self, x: Tensor) -> List[Tensor]:
        """Bytes of x of every rank."""
        local = _bytes(x)
        all_bytes = local.new_empty(len(local) * self.size())
        return list(_api.all_gather(self._comm, local, all_bytes).chunk(self.size())) if len(local) else [
            local] * self.size()

    def _exchange(self, inputs: List[Tensor], outputs: List[Tensor]) -> None:
        """Sends inputs[r] to rank r and receives outputs[r] from it."""
        sent, received = [_bytes(x) for x in inputs], [_bytes(x) for x in outputs]
        whole = _core.all_to_all(self._comm, torch.cat(sent), [len(x) for x in sent], [len(x) for x in received])
        for output, part in zip(outputs, whole.split([len(x) for x in received])):
            _fill(output, part.clone())

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        op = getattr(op, "op", op)
        if op not in COMBINE:
            raise ValueError(f"{op}: without a C++ compiler: expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")
        if op == Op.AVG and x.dtype == torch.bool:
            raise ValueError("AVG of Bool: expected a number")
        if op in (Op.SUM, Op.AVG, Op.MAX) and x.dtype in NATIVE:
            whole = _flat(x)
            codec = self._options.codec if op != Op.MAX and x.is_floating_point() else None
            if codec is None:
                _api.all_reduce(self._comm, whole, "max" if op == Op.MAX else "sum")
            else:
                _api.all_reduce(self._comm, whole, codec=codec)
        else:
            parts = [each.clone().view(x.dtype) for each in self._gather(x)]
            whole = parts[0]
            for part in parts[1:]:
                whole = COMBINE[op](whole, part)
        if op != Op.AVG:
            return whole
        is_integer = not (x.is_floating_point() or x.is_complex())
        return torch.div(whole, self.size(), rounding_mode="trunc" if is_integer else None)

    def allreduce(self, tensors: List[Tensor], opts: Any = None) -> Any:
        def call() -> None:
            for x in tensors:
                _fill(x, self._reduced(x, opts.reduceOp if opts else Op.SUM))

        return self._ended(tensors, call)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: List[Tensor], opts: Any) -> Any:
        def call() -> None:
            whole = self._reduced(tensors[0], opts.reduceOp)
            if self.rank() == opts.rootRank:
                _fill(tensors[0], whole)

        return self._ended(tensors, call)

    def broadcast(self, tensors: List[Tensor], opts: Any) -> Any:
        def call() -> None:
            for x in tensors:
                data = _bytes(x)
                _api.broadcast(self._comm, data, opts.rootRank)
                _fill(x, data)

        return self._ended(tensors, call)

    def allgather(self, outputs: List[List[Tensor]], inputs: List[Tensor], opts: Any = None) -> Any:
        def call() -> None:
            if len({x.numel() for x in outputs[0]}) == 1:
                for output, part in zip(outputs[0], self._gather(inputs[0])):
                    _fill(output, part.clone())
                return
            for rank, output in enumerate(outputs[0]):
                data = _bytes(inputs[0] if rank == self.rank() else output)
                _fill(output, _api.broadcast(self._comm, data, rank))

        return self._ended(outputs[0], call)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._ended([output], lambda: _fill(output, torch.cat(self._gather(input))))

    def reduce_scatter(self, outputs: List[Tensor], inputs: List[List[Tensor]], opts: Any) -> Any:
        def call() -> None:
            whole = self._reduced(torch.cat([_flat(x) for x in inputs[0]]), opts.reduceOp)
            _fill(outputs[0], whole.split([x.numel() for x in inputs[0]])[self.rank()].clone())

        return self._ended(outputs, call)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        return self.reduce_scatter([output], [list(_flat(input).chunk(self.size()))], opts)

    def alltoall(self, outputs: List[Tensor], inputs: List[Tensor], opts: Any = None) -> Any:
        return self._ended(outputs, lambda: self._exchange(inputs, outputs))

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: List[int], input_splits: List[int],
                      opts: Any = None) -> Any:
        def rows(x: Tensor, splits: List[int]) -> List[Tensor]:
            return list(x.split(splits or [len(x) // self.size()] * self.size()))

        return self._ended([output], lambda: self._exchange(rows(input, input_splits), rows(output, output_splits)))

    def gather(self, outputs: List[List[Tensor]], inputs: List[Tensor], opts: Any) -> Any:
        def call() -> None:
            parts = self._gather(inputs[0])
            for output, part in zip(outputs[0] if outputs else [], parts):
                _fill(output, part.clone())

        return self._ended(outputs[0] if outputs else [], call)

    def scatter(self, outputs: List[Tensor], inputs: List[List[Tensor]], opts: Any) -> Any:
        nothing = outputs[0].new_empty(0)
        sent = inputs[0] if inputs else [nothing] * self.size()
        received = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self.size())]
        return self._ended(outputs, lambda: self._exchange(sent, received))

    def send(self, tensors: List[Tensor], peer: int, tag: int = 0) -> Any:
        return self._ended(tensors, lambda: _core.send(self._comm, _bytes(tensors[0]), peer))

    def recv(self, tensors: List[Tensor], peer: int, tag: int = 0) -> Any:
        def call() -> None:
            data = _bytes(tensors[0])
            _core.recv(self._comm, data, peer)
            _fill(tensors[0], data)

        return self._ended(tensors, call)

    def barrier(self, opts: Optional[Any] = None) -> Any:
        return self._ended([], lambda: self._comm.barrier())

    # Names since PyTorch 2.15.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
