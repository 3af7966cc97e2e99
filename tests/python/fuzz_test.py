"""Hostile arguments: whatever comes in, a named exception or a result comes out. Threads only."""
import os
import random
import unittest

import numpy as np

import tandem
from ranks import torch

CALLS = int(os.environ.get("TANDEM_TEST_FUZZ", "4000"))
NAMED = (tandem.Error, TypeError)


class Liar:
    """Says that it is a tensor."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, **options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __dlpack_device__(self):
        return (1, 0)


def capsules():
    """DLPack capsules that were used, or are of somebody else."""
    import datetime

    yield datetime.datetime_CAPI
    if torch:
        used = torch.utils.dlpack.to_dlpack(torch.ones(4, 5))
        torch.utils.dlpack.from_dlpack(used)
        yield used


def tensors(chance):
    shape = tuple(chance.choice((0, 1, 2, 3, 4, 5, 2**20)) for _ in range(chance.randrange(4)))
    if np.prod(shape, dtype="f8") > 1e6:
        shape = shape[:1]
    array = np.ones(shape, chance.choice(("f4", "f4", "f4", "f2", "f8", "i4", "u1", "?", "c8", ">f4")))
    if array.ndim and chance.random() < 0.3:
        array = array[:: chance.choice((1, 2, -1))]
    if array.ndim > 1 and chance.random() < 0.3:
        array = array.T
    if chance.random() < 0.1:
        array.flags.writeable = False
    if torch and chance.random() < 0.4 and array.dtype.byteorder != ">" and array.flags.writeable \
            and array.dtype.kind != "c" \
            and all(stride >= 0 for stride in array.strides):
        tensor = torch.from_numpy(array)
        return chance.choice((tensor, tensor.to(torch.bfloat16), tensor.expand(2, *tensor.shape)))
    return array


def anything(chance, comm):
    pick = chance.randrange(12)
    if pick < 5:
        return tensors(chance)
    if pick < 7:
        return np.ones(chance.choice(((4, 5), (3, 5), (4, 3), (3,))), "f4")
    return chance.choice((
        None, 0, -1, 3, 2**40, 2**70, 1.5, float("nan"), "f32", "bf16", "", "x" * 1000, b"abc",
        bytearray(60), memoryview(bytearray(8)).cast("f"), [], [1, 2], (3,), {}, object(), comm,
        tandem, tandem.DType.bf16, Liar(None), Liar(7), Liar(MemoryError("no")),
        Liar(ValueError("no")), *(Liar(capsule) for capsule in capsules()), np.float32, np.int64(4),
        np.array("text"), np.array([None]), range(3), Ellipsis,
    ))


class Fuzz(unittest.TestCase):
    def test_any_arguments(self):
        chance = random.Random(int(os.environ.get("TANDEM_TEST_SEED", "7")))
        with tandem.World(1) as world:
            comm = world.comm()
            ops = [kind(comm, 4, 3, 5) for kind in
                   (tandem.AgGemm, tandem.GemmRs, tandem.GemmAr, tandem.AgWgrad)]
            layer = tandem.MoeLayer(comm, 4, 5, 3, 2)
            batch = layer.forward(np.ones((4, 5), "f4"), np.zeros((4, 1), "i4"), np.ones((4, 1), "f4"),
                                  np.ones((12, 5), "f4"), np.ones((10, 3), "f4"))[1]
            calls = [
                *ops, tandem.AgGemm, tandem.GemmRs, tandem.all_reduce, tandem.all_gather,
                tandem.reduce_scatter, tandem.all_to_all, tandem.broadcast, tandem.shard_of,
                comm.split, world.comm, tandem.run, tandem.World, tandem.MoeLayer, layer.forward,
                lambda *a: layer.backward(batch, *a),
            ]
            ended = {True: 0, False: 0}
            for _ in range(CALLS):
                call = chance.choice(calls)
                arguments = [anything(chance, comm) for _ in range(chance.randrange(6))]
                if chance.random() < 0.6 and call not in (*ops, tandem.World, tandem.run, world.comm):
                    arguments.insert(0, comm)
                if call in (tandem.World, tandem.run) and arguments and \
                        isinstance(arguments[0], (int, np.integer)) and arguments[0] > 64:
                    continue  # as many threads as asked for
                try:
                    call(*arguments)
                    ended[True] += 1
                except NAMED:
                    ended[False] += 1
                except MemoryError:
                    ended[False] += 1
            self.assertGreater(ended[True], CALLS // 100)
            self.assertGreater(ended[False], CALLS // 4)
            x, w = np.ones((4, 5), "f4"), np.ones((3, 5), "f4")
            self.assertEqual(ops[0](x, w).sum(), 60)


if __name__ == "__main__":
    unittest.main()
