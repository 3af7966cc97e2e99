"""Worlds: who the ranks are, and how long they live."""
import atexit
import ctypes
import sys
import threading
import time
from typing import Any, Callable, List, Optional, Set, Tuple, TypeVar, Union

from . import _core
from ._errors import Aborted, InvalidArgument
from ._gpus import GpuRanks, RankThread

Result = TypeVar("Result")
_Handle = Union[_core._World, GpuRanks]
_open_worlds: "Set[World]" = set()


class World:
    """Ranks that live until `close`, or to the end of a `with` block.

    World(ranks=4): four ranks in this process, for threads of the caller's; each Comm is used by
    one thread at a time. Where mpirun, torchrun or srun started this process, `init` gives this
    process's rank of all. An exception that leaves the `with` block ends the waits of all ranks.

    device: 'cuda': each rank has a GPU, comm.device, and takes tensors of PyTorch and CuPy that lie
    there. ranks_per_gpu: above 1 the ranks share the first GPU, each with SMs of its own. Raises
    Unsupported without a GPU or without CUDA in this build, InvalidArgument for more ranks than GPUs.

    link: 'threads' and ranks that share a GPU only: an emulated link such as '1GB/s,20us'. deadline:
    seconds that a wait lasts at most (default: TANDEM_DEADLINE_S or 60).
    """

    def __init__(
        self, ranks: int, *, device: str = "cpu", ranks_per_gpu: int = 1, link: Optional[str] = None,
        deadline: Optional[float] = None
    ) -> None:
        if _is_cuda(device):
            self._hold(GpuRanks(ranks, ranks_per_gpu, link, deadline))
            return
        if ranks_per_gpu != 1:
            raise InvalidArgument(f"ranks_per_gpu {ranks_per_gpu} on the CPU: expected device='cuda'")
        self._hold(_core._threads(ranks, link, deadline))

    @classmethod
    def _of(cls, handle: "_Handle", before: int = 0) -> "World":
        world = cls.__new__(cls)
        world._hold(handle, before)
        return world

    def _hold(self, handle: "_Handle", before: int = 0) -> None:
        self._handle = handle
        # Whose OpenMP threads `init` has set, and their number before.
        self._before: "Tuple[Optional[int], int]" = (threading.get_ident() if before else None, before)
        _open_worlds.add(self)

    @property
    def size(self) -> int:
        """Ranks, of all processes."""
        return self._handle.size

    @property
    def ranks(self) -> List[int]:
        """The ranks that this process holds."""
        return self._handle.ranks

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def comm(self, rank: Optional[int] = None) -> _core.Comm:
        """The Comm of `rank`; None: of this process's only one. Raises InvalidArgument for a rank
        that this process does not hold, and once the world is closed."""
        return self._handle.comm(rank)

    def abort(self, reason: str) -> None:
        """Ends the waits of all ranks with Aborted. Any thread."""
        self._handle.abort(reason)

    def close(self) -> None:
        """Ends the ranks and what was made on them. Their later use raises InvalidArgument. Raises
        InvalidArgument while a thread is inside a call; on GPUs that call ends with Aborted."""
        self._handle.close()
        _open_worlds.discard(self)
        ident, threads = self._before
        if ident == threading.get_ident():
            _core._set_kernel_threads(threads)
            self._before = (None, 0)

    def run(self, fn: Callable[[_core.Comm], Result]) -> List[Result]:
        """fn(comm) for each rank that this process holds, on a thread each (a single one on the CPU, or
        a launcher's: on this thread). Returns the results in the order of `ranks`.

        On GPUs a rank's thread is always the same. The rank's GPU is current there, in each of PyTorch and
        CuPy that is imported by then, and so is its stream where ranks share a GPU. Calls have ended when
        this returns.

        The first exception ends the waits of the other ranks and is raised here, as is Ctrl-C.
        """
        if len(self.ranks) == 1 and not (isinstance(self._handle, GpuRanks) and self._handle.has_threads):
            before = _core._kernel_threads()
            try:
                return [self._on_thread(fn, self.comm())]
            except BaseException as error:
                self.abort(_describe(error))
                raise
            finally:
                _core._set_kernel_threads(before)
        return _Threads(self, fn).results()

    def _on_thread(self, fn: Callable[[_core.Comm], Result], comm: _core.Comm) -> Result:
        if not isinstance(self._handle, GpuRanks):
            _core._share_processors(self.size)
            return fn(comm)
        self._handle.enter(comm)
        result = fn(comm)
        comm.synchronize()  # an error of its last calls is this rank's
        return result

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self.abort(_describe(error))
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<tandem.World of {self.size} ranks{state}>"


class _FirstError:
    """Of several ranks: an original error before any Aborted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: Optional[BaseException] = None

    def keep(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None or (
                isinstance(self._error, Aborted) and not isinstance(error, Aborted)
            ):
                self._error = error

    def rethrow(self) -> None:
        if self._error is not None:
            raise self._error


def _interrupt(thread: "Union[threading.Thread, RankThread]") -> None:
    """Raises KeyboardInterrupt in it, once it computes in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )


class _Threads:
    """One call of World.run."""

    def __init__(self, world: World, fn: Callable[[_core.Comm], Any]) -> None:
        self._world = world
        self._fn = fn
        self._results: List[Any] = [None] * len(world.ranks)
        self._first = _FirstError()
        self._threads = [self._thread(i, rank) for i, rank in enumerate(world.ranks)]
        self._ended = [threading.Event() for _ in self._threads]

    def _thread(self, index: int, rank: int) -> "Union[threading.Thread, RankThread]":
        handle = self._world._handle
        if isinstance(handle, GpuRanks):
            return handle.thread(rank, lambda: self._body(index, rank))
        return threading.Thread(target=self._body, args=(index, rank), name=f"rank {rank}")

    def _body(self, index: int, rank: int) -> None:
        try:
            self._call(index, rank)
        except KeyboardInterrupt:
            pass  # from `results`, while the error was kept
        finally:
            self._ended[index].set()

    def _call(self, index: int, rank: int) -> None:
        try:
            self._results[index] = self._world._on_thread(self._fn, self._world.comm(rank))
        except BaseException as error:
            self._first.keep(error)
            if not self._world.closed:
                self._world._handle.abort(_describe(error), rank)

    def results(self) -> List[Any]:
        for thread in self._threads:
            thread.start()
        try:
            for ended in self._ended:  # join() takes a thread for ended that Ctrl-C found running
                ended.wait()
        except BaseException as error:  # Ctrl-C: ends waits, and what computes in Python
            self._world.abort(_describe(error))
            patience = time.monotonic() + 0.5
            for thread, ended in zip(self._threads, self._ended):
                if not ended.wait(max(0.0, patience - time.monotonic())):
                    _interrupt(thread)
            for thread in self._threads:
                thread.join()
            raise
        for thread in self._threads:
            thread.join()
        self._first.rethrow()
        return self._results


def _describe(error: BaseException) -> str:
    text = str(error).encode("utf-8", "backslashreplace").decode("utf-8").splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _is_cuda(device: str) -> bool:
    if device not in ("cpu", "cuda"):
        raise InvalidArgument(f"device '{device}': expected cpu or cuda")
    return device == "cuda"


def init(comm: Any = None, *, device: str = "cpu", deadline: Optional[float] = None) -> World:
    """The world of this process as it was started: by mpirun, torchrun or srun one rank of all, by
    nobody a world of one rank. MPI is used under mpirun and srun with PMI, otherwise not needed.

    comm: an MPI communicator to adopt instead, mpi4py's or what MPI_Comm_c2f gives; MPI was
    initialised with MPI_THREAD_MULTIPLE (mpi4py's default). device and deadline: as of World; on a GPU
    this thread is the rank's.

    Raises Timeout naming a rank that has not come within the deadline, and InvalidArgument where
    ranks of several hosts have no TANDEM_SECRET, or not the same.
    """
    if _is_cuda(device):
        if comm is not None:
            raise InvalidArgument("comm: an MPI communicator for GPU ranks: expected none")
        ranks = GpuRanks(1, 1, None, deadline)
        ranks.enter(ranks.comm())
        return World._of(ranks)
    if comm is not None:
        handle = comm.py2f() if hasattr(comm, "py2f") else comm
        return _launched(_core._adopted(handle, deadline))
    return _launched(_core._launched(deadline))


def _launched(handle: _core._World) -> World:
    before = _core._kernel_threads()
    _core._share_processors(handle.size)
    return World._of(handle, before)


def run(
    ranks: int,
    fn: Callable[[_core.Comm], Result],
    *,
    device: str = "cpu",
    ranks_per_gpu: int = 1,
    link: Optional[str] = None,
    deadline: Optional[float] = None,
) -> List[Result]:
    """fn(comm) on each of `ranks` ranks, threads of this process; under a launcher, on this process's
    rank of as many. Returns the results by rank (under a launcher: a list of this rank's). device,
    ranks_per_gpu, link and deadline: as of World; errors: as of World.run.
    """
    if _core._is_launched() and ranks_per_gpu == 1:
        if link is not None:
            raise InvalidArgument(f"link '{link}': expected none: only threads emulate one")
        world = init(device=device, deadline=deadline)
        if ranks != world.size:
            size = world.size
            world.close()
            raise InvalidArgument(f"ranks {ranks}: the launcher started {size}: expected {size}")
    else:
        world = World(ranks, device=device, ranks_per_gpu=ranks_per_gpu, link=link, deadline=deadline)
    with world:
        return world.run(fn)


@atexit.register
def _end() -> None:
    """What is left open; after an error the other ranks hear of it."""
    failed = getattr(sys, "last_type", None)
    for world in list(_open_worlds):
        if failed is not None:
            world.abort(f"{failed.__name__} ended the process")
        _close_in_time(world)


def _close_in_time(world: World) -> None:
    """A thread that is inside a call when Python ends would take the process down."""
    for _ in range(100):
        try:
            return world.close()
        except InvalidArgument:
            world.abort("the process ended inside its run")
            time.sleep(0.02)
