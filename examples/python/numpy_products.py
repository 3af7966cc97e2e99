"""A GEMM over all ranks' rows, of NumPy arrays, overlapped with the all-gather; checked against
NumPy.

    python3 examples/python/numpy_products.py               # three ranks, threads of this process
    mpirun -n 2 python3 examples/python/numpy_products.py   # two, processes
"""
import os
import sys

import numpy as np

import tandem

ROWS, OUT, IN = 96, 64, 48


def body(comm):
    x = np.random.default_rng(1).standard_normal((ROWS, IN), dtype="f4")
    weight = np.random.default_rng(2 + comm.rank).standard_normal((OUT, IN), dtype="f4")
    begin, rows = tandem.shard_of(ROWS, comm.size, comm.rank)
    op = tandem.AgGemm(comm, ROWS, OUT, IN, "f32")
    out = op(x[begin:begin + rows], weight)  # this rank's output features of all ranks' rows
    error = np.abs(out - x @ weight.T).max()
    largest = tandem.all_reduce(comm, np.array([error], "f4"), "max")[0]
    if comm.rank == 0:
        print(f"[{ROWS}, {OUT}] on each of {comm.size} ranks, largest difference {largest:.1e}")
    return largest < 1e-4


if __name__ == "__main__":
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "3"))
    sys.exit(0 if all(tandem.run(ranks, body)) else 1)
