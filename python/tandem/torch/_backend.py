"""Backend "tandem" of torch.distributed, registered at import where PyTorch is new enough."""
import atexit
import os
import sys
import warnings
from functools import lru_cache
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from .. import _core
from .._core import Wire
from .._errors import InvalidArgument, IoError, Timeout, Unsupported

OLDEST = (2, 8)  # PyTorch with c10d's present interface and the fused operators
STORE_NAME = "tandem/backend"  # of keys in the group's store
LIMITS = ("it serves torch.distributed's calls and DDP, but not FSDP2, functional collectives, torch.compile, tags "
          "or coalesced calls, its calls are blocking, and CUDA tensors travel through the host's memory")


class GroupOptions:
    """pg_options of a "tandem" process group: floating sums (all_reduce, reduce_scatter, reduce; DDP
    gradients) travel in the wire format `codec`, such as 'int8', and are lossy. allow_uncompressed:
    only where that is measured to be faster. Equal on all ranks of the group, and not inherited by
    groups made later. Raises InvalidArgument."""

    def __init__(self, codec: Union[None, str, Wire] = None, allow_uncompressed: bool = False) -> None:
        self.codec = None if codec is None else str(codec if isinstance(codec, Wire) else Wire(codec))
        self.allow_uncompressed = bool(allow_uncompressed)

    def __repr__(self) -> str:
        return f"GroupOptions(codec={self.codec!r}, allow_uncompressed={self.allow_uncompressed})"


def deadline_of(timeout: float) -> float:
    """Seconds of a wait: the group's timeout, at most TANDEM_DEADLINE_S if that is set."""
    named = os.environ.get("TANDEM_DEADLINE_S")
    return min(1e9, max(0.001, min(timeout, float(named)) if named else timeout))


def is_new_enough() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST


@lru_cache(maxsize=None)
def compiled() -> Any:
    """The compiled backend, or None with one warning where it cannot be had."""
    from . import _compile
    try:
        module = _compile.load()
    except (Unsupported, IoError) as error:
        warnings.warn(f"backend tandem: {error}: using the one in Python: {LIMITS}", stacklevel=2)
        return None
    atexit.register(lambda: module.close_all(getattr(sys, "last_type", None) is not None))
    return module


def prepare_gpus() -> None:
    """Called before a group's GPUs are connected: sets NCCL's variables, unless PyTorch's NCCL may
    have read them. Then NCCL_NVLS_ENABLE is the user's, and connecting refuses any other than 0."""
    from ._enable import set_gpu_environment
    if not any("nccl" in str(backends) for backends in dist.distributed_c10d._world.pg_backend_config.values()):
        set_gpu_environment()


def _create(of_group: Any, options: Any) -> Any:
    if options is not None and not isinstance(options, GroupOptions):
        raise InvalidArgument(f"pg_options: {type(options).__name__}: expected tandem.torch.GroupOptions or None")
    asked = options or GroupOptions()
    deadline = deadline_of(of_group.timeout.total_seconds())
    rank, size = of_group.group_rank, of_group.group_size
    module = compiled()
    try:
        if module is None:
            from ._process_group import PythonGroup
            return PythonGroup(of_group.store, rank, size, deadline, asked)
        from ._groups import store_gather
        gather = store_gather(of_group.store, STORE_NAME, rank, size, deadline)
        return module.create(_core._backend_table(), gather, rank, size, deadline,
                             list(of_group.global_ranks_in_group), asked.codec or "", asked.allow_uncompressed)
    except Timeout as error:
        raise dist.DistBackendError(str(error)) from None


def bytes_sent(group: Optional[Any] = None) -> int:
    """Bytes that this rank has sent in collectives of CPU tensors in a "tandem" process group (None:
    the default one), without messages of send and recv, arguments and signals. Raises InvalidArgument for a
    group of another backend."""
    found = group or dist.distributed_c10d._get_default_group()
    if hasattr(found, "tandem_bytes_sent"):
        return int(found.tandem_bytes_sent())
    try:
        return int(compiled().bytes_sent(found._get_backend(torch.device("cpu"))))
    except (AttributeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"bytes_sent: {error}: expected a process group of backend tandem") from None


def register() -> None:
    """No-op for a PyTorch without torch.distributed, or older than OLDEST."""
    if dist.is_available() and is_new_enough():
        devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
        dist.Backend.register_backend("tandem", _create, extended_api=True, devices=devices)


register()
