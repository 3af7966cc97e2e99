"""A tensor-parallel MLP on JAX arrays: the rows of all ranks are gathered during the first GEMM,
the partial sums of the second are reduce-scattered during it. Checked against the same MLP in plain
JAX.

    python3 examples/python/jax_mlp.py                      # two ranks, threads of this process
    mpirun -n 3 python3 examples/python/jax_mlp.py          # three, processes
"""
import os
import sys

import jax
import jax.numpy as jnp

import tandem

TOKENS, FEATURES, HIDDEN = 48, 32, 96


def body(comm):
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    x = jax.random.normal(keys[0], (TOKENS, FEATURES))
    up, down = jax.random.normal(keys[1], (HIDDEN, FEATURES)), jax.random.normal(keys[2], (FEATURES, HIDDEN))

    begin, rows = tandem.shard_of(TOKENS, comm.size, comm.rank)
    first, width = tandem.shard_of(HIDDEN, comm.size, comm.rank)
    local, features = slice(begin, begin + rows), slice(first, first + width)
    hidden = tandem.AgGemm(comm, TOKENS, width, FEATURES)(x[local], up[features])
    out = tandem.GemmRs(comm, TOKENS, FEATURES, width)(jax.nn.gelu(hidden), down[:, features])

    want = jax.nn.gelu(x @ up.T) @ down.T
    error = tandem.all_reduce(comm, jnp.abs(out - want[local]).max(initial=0).reshape(1), "max")
    largest = float(error[0] / jnp.abs(want).max())
    if comm.rank == 0:
        print(f"{comm.size} ranks, largest relative difference {largest:.1e}")
    return isinstance(out, jax.Array) and largest < 1e-5


if __name__ == "__main__":
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "2"))
    sys.exit(0 if all(tandem.run(ranks, body)) else 1)
