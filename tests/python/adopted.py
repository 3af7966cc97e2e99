"""Run under mpirun: makes a world from a caller's communicator, created here with MPI through
ctypes. Prints "ok"."""
import ctypes

import numpy as np

import tandem

MPI_THREAD_MULTIPLE = 3
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
WORLD = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))


class Half:
    """Exposes its handle as mpi4py's communicators do."""

    def __init__(self, color):
        self.comm = ctypes.c_void_p()
        mpi.MPI_Comm_split(WORLD, color, 0, ctypes.byref(self.comm))

    def py2f(self):
        return mpi.MPI_Comm_c2f(self.comm)


def refused(handle):
    try:
        tandem.init(handle)
    except tandem.InvalidArgument as error:
        return str(error)
    return "nothing"


assert "not initialised" in refused(0)
mpi.MPI_Init_thread(None, None, MPI_THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
rank, size = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(WORLD, ctypes.byref(rank))
mpi.MPI_Comm_size(WORLD, ctypes.byref(size))
half = Half(rank.value % 2)
for _ in range(2):
    with tandem.init(half, deadline=20) as world:
        comm = world.comm()
        assert comm.transport == "mpi" and comm.size == (size.value + 1 - rank.value % 2) // 2
        assert tandem.all_reduce(comm, np.ones(1, "f4"))[0] == comm.size
        assert "open in this process" in refused(half)
assert "handle -1" in refused(-1)
mpi.MPI_Barrier(WORLD)
mpi.MPI_Finalize()
if rank.value == 0:
    print("ok")
