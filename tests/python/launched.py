"""One of several processes started without MPI: `init` gives this process's rank, for one world
after another; if rank TANDEM_TEST_ABSENT never starts, all others name it. Rank 0 prints "ok"."""
import os

import numpy as np

import tandem

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
absent = os.environ.get("TANDEM_TEST_ABSENT")
if absent is not None:
    try:
        tandem.init(deadline=1)
    except tandem.Timeout as error:
        assert error.peer == int(absent) and error.rank == rank, error
        if rank == 0:
            print(f"ok: rank {error.peer} is missing", flush=True)
        raise SystemExit
    raise AssertionError("expected a Timeout")
for _ in range(2):
    with tandem.init(deadline=20) as world:
        comm = world.comm()
        assert (comm.rank, comm.size, comm.transport) == (rank, size, "processes")
        assert world.ranks == [rank]
        assert tandem.all_reduce(comm, np.ones(1, "f4"))[0] == size
        try:
            tandem.init()
            raise AssertionError("expected one world at a time")
        except tandem.InvalidArgument as error:
            assert "open in this process" in str(error)
try:
    tandem.run(size + 1, lambda comm: None)
    raise AssertionError("expected a refusal")
except tandem.InvalidArgument as error:
    assert f"the launcher started {size}" in str(error)
assert tandem.run(size, lambda comm: comm.rank) == [rank]
with tandem.World(2) as threads:
    assert threads.run(lambda comm: comm.transport) == ["threads"] * 2
if rank == 0:
    print("ok")
