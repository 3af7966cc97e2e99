"""Runs a test's body on ranks: on its own 1 to 4 threads, under mpirun once on the world's
processes."""
import os
import sys

import numpy as np

import tandem

LAUNCHED = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "0"))

try:
    import torch
except ImportError:
    torch = None
if os.environ.get("TANDEM_TEST_TORCH") == "1" and torch is None:
    sys.exit("python3-torch is installed and cannot be imported")


def rank_counts():
    return [LAUNCHED] if LAUNCHED else [1, 2, 3, 4]


def on_ranks(body, counts=None, **options):
    """body(comm) on each world of `counts`."""
    for ranks in counts or rank_counts():
        tandem.run(ranks, body, deadline=30, **options)


def values(shape, seed):
    """The same on every rank."""
    return np.random.default_rng(seed).standard_normal(shape, dtype="f4")


def rows_of(matrix, comm):
    begin, count = tandem.shard_of(len(matrix), comm.size, comm.rank)
    return matrix[begin:begin + count]


def frameworks():
    """(name, from an f32 NumPy array, to one, dtype)."""
    kinds = [("numpy", lambda a: a.copy(), lambda a: np.asarray(a, "f4"), "f32")]
    if torch:
        for name in ("float32", "bfloat16"):
            dtype = getattr(torch, name)
            kinds.append((
                "torch " + name,
                lambda a, dtype=dtype: torch.tensor(a).to(dtype),
                lambda a: a.to(torch.float32).numpy(),
                dtype,
            ))
    return kinds


def tolerance(dtype, a, b):
    """Of a product a @ b.T, element by element."""
    size = np.abs(a) @ np.abs(b).T
    return size * (2.0**-20 if str(dtype) == "f32" or "float32" in str(dtype) else 2.0**-7) + 1e-6
