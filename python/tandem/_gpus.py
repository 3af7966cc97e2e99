"""GPU ranks of this process, which live as long as they are referenced."""
import queue
import threading
from typing import Callable, Dict, List, Optional

from . import _core, _frameworks
from ._errors import InvalidArgument


class GpuRanks:
    """Counterpart of _core._World for GPU ranks. A thread of the library creates each rank, runs
    the work passed by `thread` until `close`, and ends the rank. Under a launcher the rank uses the
    caller's thread."""

    def __init__(self, ranks: int, ranks_per_gpu: int, link: Optional[str], deadline: Optional[float]) -> None:
        self._options = (ranks, ranks_per_gpu, link, deadline)
        self._comms: Dict[int, _core.Comm] = {}
        self._work: "Dict[int, queue.SimpleQueue[Optional[Callable[[], None]]]]" = {}
        self._idents: Dict[int, int] = {}
        self._error: Optional[BaseException] = None
        self._changed = threading.Condition()
        self._ended, self._closing, self._aborted = False, threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="GPU ranks", daemon=True)
        self._thread.start()
        self.has_threads = not _core._is_launched()
        here = ranks if self.has_threads else 1
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._comms) == here)
        if self._ended:
            self._thread.join()
            assert self._error is not None
            raise self._error
        self._local = [self._comms[rank] for rank in sorted(self._comms)]
        self.size = self._local[0].size
        self.ranks = [comm.rank for comm in self._local]

    def _run(self) -> None:
        try:
            _core._on_gpus(*self._options, self._body)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _body(self, comm: _core.Comm) -> None:
        work: "queue.SimpleQueue[Optional[Callable[[], None]]]" = queue.SimpleQueue()
        with self._changed:
            self._comms[comm.rank], self._work[comm.rank] = comm, work
            self._idents[comm.rank] = threading.get_ident()
            self._changed.notify_all()
        while True:
            try:
                call = work.get()
                if call is None:
                    return
                call()
            except KeyboardInterrupt:  # raised by RankThread's caller after its end
                pass

    def thread(self, rank: int, target: Callable[[], None]) -> "RankThread":
        return RankThread(self._work[rank], self._idents[rank], target)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def comm(self, rank: Optional[int] = None) -> _core.Comm:
        if self.closed:
            raise InvalidArgument("comm: the world is closed: expected an open one")
        if rank is None and len(self._local) == 1:
            return self._local[0]
        if rank is None:
            raise InvalidArgument(f"comm: no rank given: expected one of the {self.size} in this process")
        if rank not in self.ranks:
            raise InvalidArgument(f"comm: rank {rank}: expected one that this process has: {self.ranks[0]} to "
                                  f"{self.ranks[-1]}")
        return self._local[self.ranks.index(rank)]

    def enter(self, comm: _core.Comm) -> None:
        """Makes this the rank's thread: its GPU is current, and so is its stream if ranks share the
        GPU."""
        assert comm.stream is not None
        _frameworks.enter(int(comm.device.split(":")[1]), comm.stream, comm._shares_gpu, self.has_threads)

    def abort(self, reason: str, rank: Optional[int] = None) -> None:
        self._aborted = True
        if rank is not None:
            self.comm(rank).abort(reason)  # other ranks see the first exception
        for comm in self._local:
            comm.abort(reason)

    def close(self) -> None:
        """Raises the Timeout of a call, unless the world was aborted."""
        if self.closed:
            return
        self._closing.set()
        for work in self._work.values():
            work.put(None)
        self._thread.join()
        if self._error is not None and not self._aborted:
            raise self._error


class RankThread:
    """Equivalent of threading.Thread that runs `target` on a rank's thread. target must not
    raise."""

    def __init__(self, work: "queue.SimpleQueue[Optional[Callable[[], None]]]", ident: int,
                 target: Callable[[], None]) -> None:
        self._work, self.ident, self._target = work, ident, target
        self._ended = threading.Event()

    def start(self) -> None:
        self._work.put(self._run)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()

    def join(self) -> None:
        self._ended.wait()
