"""Tandem: collectives overlapped with GEMMs.

Accepts tensors of NumPy, PyTorch, CuPy, JAX, or any other DLPack producer without copying; results
have the framework of x.

    import numpy as np, tandem

    def body(comm):
        op = tandem.AgGemm(comm, m=64, n=32, k=48)
        begin, rows = tandem.shard_of(64, comm.size, comm.rank)
        x = np.full((rows, 48), comm.rank, "f4")
        return op(x, np.ones((32, 48), "f4"))       # all-gather(x) @ weight.T

    tandem.run(2, body)
"""
from . import _isa, _libraries

_libraries.load(_isa.load)

from ._api import all_reduce, broadcast
from ._core import (
    AgGemm,
    AgWgrad,
    AllGather,
    AllReduce,
    AllToAll,
    Comm,
    ContextAttention,
    CrossAttention,
    CrossAttentionBatch,
    DType,
    GemmAr,
    GemmRs,
    MoeBatch,
    MoeLayer,
    ReduceScatter,
    Wire,
    __isa__,
    __version__,
    all_gather,
    all_to_all,
    context_chunks,
    receipts,
    recv,
    reduce_scatter,
    send,
    shard_of,
)
from ._errors import (
    Aborted,
    DeviceError,
    Error,
    InvalidArgument,
    IoError,
    Mismatch,
    Timeout,
    Unsupported,
)
from ._core import _Operator
from ._world import World, init, run

__all__ = [
    "Aborted", "AgGemm", "AgWgrad", "AllGather", "AllReduce", "AllToAll", "Comm",
    "ContextAttention", "CrossAttention", "CrossAttentionBatch", "DType",
    "DeviceError", "Error", "GemmAr", "GemmRs", "InvalidArgument", "IoError", "Mismatch", "MoeBatch",
    "MoeLayer", "ReduceScatter", "Timeout",
    "Unsupported", "Wire", "World", "__isa__", "__version__",
    "all_gather", "all_reduce", "all_to_all", "broadcast", "context_chunks", "init", "receipts", "recv",
    "reduce_scatter", "run", "send", "shard_of",
]

# Operators whose rows have no stub yet.
for _operator in _Operator.__subclasses__():
    globals().setdefault(_operator.__name__, _operator)
