"""Comm of a torch.distributed.ProcessGroup, connected over the group's store at its first use."""
import threading
import time
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import _core
from .._errors import InvalidArgument, Timeout
from .._world import World, _launched
from ._backend import deadline_of


def store_gather(store: Any, name: str, rank: int, size: int, deadline: float) -> Callable[[bytes], bytes]:
    """Gathers bytes of all ranks through a torch.distributed store, for one world; worlds of a name
    are made in the same order on all ranks. Polls, since a wait would lock the store for other
    threads. Raises Timeout naming a rank whose bytes have not come within `deadline` seconds."""
    number = store.add(f"{name}/worlds/{rank}", 1)  # a store may outlive a group
    rounds = 0

    def gather(local: bytes) -> bytes:
        nonlocal rounds
        rounds += 1
        keys = [f"{name}/{number}/{rounds}/{each}" for each in range(size)]
        store.set(keys[rank], local)
        until = time.monotonic() + deadline
        for each, key in enumerate(keys):
            pause = 0.0001
            while not store.check([key]):
                if time.monotonic() > until:
                    raise Timeout(f"connect: rank {each} of {size} has not come within {deadline:g} s: expected all "
                                  "ranks to use the group")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        return b"".join(bytes(store.get(key)) for key in keys)

    return gather


def _timeout_of(group: Any, device: torch.device) -> float:
    """Seconds of the process group's timeout."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without options
        return 600.0


def connect(store: Any, name: str, rank: int, size: int, device: torch.device,
            deadline: float) -> World:
    """Collective: world of the ranks that share the store. GPU ranks use the current device, and
    their calls follow its current stream."""
    gather = store_gather(store, name, rank, size, deadline)
    if device.type == "cuda":
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            return World._of(_core._connected(rank, size, gather, stream, deadline))
    return _launched(_core._connected(rank, size, gather, None, deadline))


class Group:
    """Process group and its Comm for one type of device. Calls hold `lock`: a program may call from
    its main and its autograd thread."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.of = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.lock = threading.RLock()
        store = c10d._get_process_group_store(group)
        deadline = deadline_of(_timeout_of(group, device))
        self.world = connect(store, f"tandem/{device.type}", self.rank, self.size, device, deadline)
        self.comm = self.world.comm()


_groups: Dict[Tuple[str, str], Group] = {}
_locks: Dict[Tuple[str, str], threading.Lock] = {}
_lock = threading.Lock()


def group_of(name: str, device: torch.device) -> Group:
    """The group with that name (`ProcessGroup.group_name`). Collective at the first call of a group
    and device type. Raises Timeout naming a missing rank, InvalidArgument and Unsupported."""
    group = c10d._resolve_process_group(name)
    found = _groups.get((name, device.type))
    if found is not None and found.of() is group and not found.comm.closed:
        return found
    with _lock:
        lock = _locks.setdefault((name, device.type), threading.Lock())
    with lock:  # one for each group: another thread may connect another one meanwhile
        other = _groups.get((name, device.type))
        if other is not None and other.of() is group and not other.comm.closed:
            return other
        if other is not None:  # of a process group that was destroyed
            other.world.close()
        made = _groups[name, device.type] = Group(group, device)
    return made


def name_of(group: Any) -> str:
    """group_name of a ProcessGroup; None is the default group. Raises InvalidArgument."""
    if group is None:
        group = c10d._get_default_group()
    if isinstance(group, str):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"group: {type(group).__name__}: expected a torch.distributed.ProcessGroup or its name")
    return str(group.group_name)


def close_all() -> None:
    """Closes the worlds of all groups."""
    with _lock:
        for group in _groups.values():
            group.world.close()
        _groups.clear()
