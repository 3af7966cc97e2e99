"""Runs a test's body on ranks: on 1 to 4 threads, or under a launcher once on the world's
processes."""
import importlib
import os
import sys

import numpy as np

import tandem

LAUNCHED = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "0"))


def framework(name):
    """Imports the module; None if it is not installed. TANDEM_TEST_NAME=1 declares it installed:
    then a failing import fails the test."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get(f"TANDEM_TEST_{name.upper()}") == "1":
            sys.exit(f"{name} is installed and cannot be imported: {error}")
        return None


torch, jax, ml_dtypes = map(framework, ("torch", "jax", "ml_dtypes"))


def rank_counts():
    return [LAUNCHED] if LAUNCHED else [1, 2, 3, 4]


def on_ranks(body, counts=None, **options):
    """Runs body(comm) on a world of each size in `counts`."""
    for ranks in counts or rank_counts():
        tandem.run(ranks, body, deadline=30, **options)


def rows_keep_bits():
    """True if an f32 product's bits do not depend on its rows (src/gemm/gemm.h): from AVX2 on, as
    this build targets its machine."""
    with open("/proc/cpuinfo") as file:
        return " avx2 " in file.read()


def assert_same(got, other, bound):
    """Bit for bit if the processor supports it, otherwise within `bound`."""
    if rows_keep_bits():
        np.testing.assert_array_equal(got, other)
    else:
        np.testing.assert_allclose(got, other, rtol=0, atol=bound)


def values(shape, seed):
    """Equal on every rank."""
    return np.random.default_rng(seed).standard_normal(shape, dtype="f4")


def rows_of(matrix, comm):
    begin, count = tandem.shard_of(len(matrix), comm.size, comm.rank)
    return matrix[begin:begin + count]


def frameworks():
    """Yields (name, conversion from an f32 NumPy array, conversion to one, dtype)."""
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
    """Elementwise error bound of a product a @ b.T."""
    size = np.abs(a) @ np.abs(b).T
    return size * (2.0**-20 if str(dtype) == "f32" or "float32" in str(dtype) else 2.0**-7) + 1e-6
