"""Worlds: their ranks and lifetimes."""
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

    World(ranks=4): four ranks in this process, for the caller's threads; each Comm is used by one
    thread at a time. For a process started by mpirun, torchrun or srun use `init`. An exception
    that leaves the `with` block ends the waits of all ranks.

    device: 'cuda': each rank has a GPU, comm.device, and takes tensors of PyTorch and CuPy on it.
    ranks_per_gpu: above 1 the ranks share the first GPU, each with its own SMs. Raises Unsupported
    without a GPU or without CUDA in this build, InvalidArgument for more ranks than GPUs.

    link: an emulated link such as '1GB/s,20us', only for CPU ranks that are threads and for ranks
    that share a GPU. deadline: max seconds of a wait (default: TANDEM_DEADLINE_S or 60).
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
        # Thread whose OpenMP thread count `init` changed, and the previous count.
        self._before: "Tuple[Optional[int], int]" = (threading.get_ident() if before else None, before)
        _open_worlds.add(self)

    @property
    def size(self) -> int:
        """Number of ranks over all processes."""
        return self._handle.size

    @property
    def ranks(self) -> List[int]:
        """Ranks in this process."""
        return self._handle.ranks

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def comm(self, rank: Optional[int] = None) -> _core.Comm:
        """Comm of `rank`; None: of this process's only rank. Raises InvalidArgument for a rank of
        another process, and if the world is closed."""
        return self._handle.comm(rank)

    def abort(self, reason: str) -> None:
        """Ends the waits of all ranks with Aborted. Callable from any thread."""
        self._handle.abort(reason)

    def close(self) -> None:
        """Ends the ranks and everything created on them. Their later use raises InvalidArgument.
        Raises InvalidArgument while a thread is inside a call; on GPUs that call ends with Aborted.
        """
        self._handle.close()
        _open_worlds.discard(self)
        ident, threads = self._before
        if ident == threading.get_ident():
            _core._set_kernel_threads(threads)
            self._before = (None, 0)

    def run(self, fn: Callable[[_core.Comm], Result]) -> List[Result]:
        """Calls fn(comm) for each rank of this process, each on its own thread (a single CPU rank
        or a launcher's rank: on this thread). Returns the results in the order of `ranks`.

        On GPUs a rank always has the same thread. The rank's GPU is current there, in PyTorch and
        CuPy if already imported, and so is its stream if ranks share a GPU. All calls have ended on
        return.

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
        comm.synchronize()  # an error of its last calls belongs to this rank
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
    """Error of several ranks: an original one takes precedence over Aborted."""

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
    """Raises KeyboardInterrupt in the thread, once it executes Python code."""
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
            for ended in self._ended:  # join() may report a thread interrupted by Ctrl-C as ended
                ended.wait()
        except BaseException as error:  # Ctrl-C: ends waits and running Python code
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
    """World of this process as started: under mpirun, torchrun or srun one rank of all, without a
    launcher a world of one rank. MPI is used under mpirun and srun with PMI, otherwise not needed.

    comm: an MPI communicator to adopt instead, mpi4py's or a handle from MPI_Comm_c2f; MPI must be
    initialized with MPI_THREAD_MULTIPLE (mpi4py's default). device and deadline: as in World; on a
    GPU this thread is the rank's.

    Raises Timeout naming a rank that has not connected within the deadline, and InvalidArgument if
    ranks on several hosts have no TANDEM_SECRET, or different ones.
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
    """Calls fn(comm) on each of `ranks` ranks, which are threads of this process; under a launcher,
    on this process's rank of as many. Returns the results by rank (under a launcher: a list with
    this rank's). device, ranks_per_gpu, link and deadline: as in World; errors: as in World.run.
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
    """Closes all open worlds at exit; after an error aborts them, so that the other ranks learn of
    it."""
    failed = getattr(sys, "last_type", None)
    for world in list(_open_worlds):
        if failed is not None:
            world.abort(f"{failed.__name__} ended the process")
        _close_in_time(world)


def _close_in_time(world: World) -> None:
    """Aborts running calls: a thread inside one when Python ends would crash the process."""
    for _ in range(100):
        try:
            return world.close()
        except InvalidArgument:
            world.abort("the process ended inside its run")
            time.sleep(0.02)
