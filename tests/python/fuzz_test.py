"""Invalid arguments, by position and by name: any call ends with a named exception or a result.
Threads only."""
import os
import random
import unittest

import numpy as np

import tandem
from forged import COPIED, READ_ONLY, Forged
from ranks import ml_dtypes, torch

if torch:
    from tandem import torch as layers

CALLS = int(os.environ.get("TANDEM_TEST_FUZZ", "4000"))
SEED = int(os.environ.get("TANDEM_TEST_SEED", "7"))
NAMED = (tandem.Error, TypeError, MemoryError)


class Liar:
    """Claims to be a tensor."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, **options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __dlpack_device__(self):
        return (1, 0)


def capsules():
    """Capsules that were consumed, or are not DLPack."""
    import datetime

    yield datetime.datetime_CAPI
    if torch:
        used = torch.utils.dlpack.to_dlpack(torch.ones(4, 5))
        torch.utils.dlpack.from_dlpack(used)
        yield used


def forged(chance):
    """Tensors on valid memory with otherwise arbitrary fields."""
    fields = {}
    for field, values in (
            ("shape", ((4, 5), (3, 5), (4, 3), (0, 5), (2, 2, 2), (2**62,) * 4, (-1, 5), None)),
            ("strides", ((5, 1), (1, 4), (0, 1), (-5, 1), (1, -1), (2**62, 1), None)),
            ("code", (0, 1, 2, 4, 5, 6, 255)), ("bits", (0, 1, 8, 16, 32, 64, 255)),
            ("lanes", (0, 1, 2, 65535)), ("device", (-1, 0, 1, 2, 3, 8, 2**31 - 1)),
            ("byte_offset", (0, 1, 2, 4)), ("data", (None,)), ("flags", (READ_ONLY, COPIED, 2**64 - 1)),
            ("major", (0, 2, 2**32 - 1)), ("name", (b"used_dltensor", b"dltensor", b""))):
        if chance.random() < 0.2:
            fields[field] = chance.choice(values)
    shape = fields.get("shape", (4, 5))
    fields["dims"] = chance.choice((len(shape or ()), len(shape or ()), 0, -1, 5, 2**31 - 1))
    name = fields.get("name", b"dltensor_versioned")
    return Forged(versioned=name == b"dltensor_versioned", **fields)


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
    if ml_dtypes and chance.random() < 0.1 and array.dtype == "f4":
        return array.astype(ml_dtypes.bfloat16)
    return array


def anything(chance, comm):
    pick = chance.randrange(14)
    if pick < 5:
        return tensors(chance)
    if pick < 7:
        return np.ones(chance.choice(((4, 5), (3, 5), (4, 3), (3,))), "f4")
    if pick < 9:
        return forged(chance)
    return chance.choice((
        None, 0, -1, 3, 2**40, 2**70, 1.5, float("nan"), "f32", "bf16", "", "x" * 1000, b"abc",
        bytearray(60), memoryview(bytearray(8)).cast("f"), np.frombuffer(bytes(81), "f4", 20, 1),
        [], [1, 2], (3,), {}, object(), comm,
        tandem, tandem.DType.bf16, Liar(None), Liar(7), Liar(MemoryError("no")),
        Liar(ValueError("no")), *(Liar(capsule) for capsule in capsules()), np.float32, np.int64(4),
        np.array("text"), np.array([None]), range(3), Ellipsis, "int8", "int4:g32", "serial", True,
    ))


NAMES = ("x", "weight", "out", "bias", "comm", "dtype", "codec", "residual", "op", "peer", "m", "strategy",
         "chunks", "allow_uncompressed", "weight_kn", "send_counts", "recv_counts", "root", "dy", "experts", "weights", "w_in", "w_out", "dx", "dw_in",
         "tp", "combine_codec", "nothing")


def hostile(chance, comm, first):
    """Arguments; `first`: comm precedes them."""
    positional = [anything(chance, comm) for _ in range(chance.randrange(6))]
    if first:
        positional.insert(0, comm)
    named = {}
    while chance.random() < 0.2:
        named[chance.choice(NAMES)] = anything(chance, comm)
    return positional, named


def experts_operands():
    """Valid arguments of MoeLayer(comm, 4, 5, 3, 2).forward on one rank; on two, w_in and w_out are
    halves."""
    return [np.ones((4, 5), "f4"), np.zeros((4, 1), "i4"), np.ones((4, 1), "f4"), np.ones((12, 5), "f4"),
            np.ones((10, 3), "f4")]


def spoilt(right, chance, comm):
    """Valid arguments, usually with one replaced."""
    positional = list(right)
    if chance.random() < 0.7:
        positional[chance.randrange(len(positional))] = anything(chance, comm)
    return positional, {"out": anything(chance, comm)} if chance.random() < 0.2 else {}


class Fuzz(unittest.TestCase):
    def check(self, ended):
        """Checks that some calls succeeded and some failed."""
        count = sum(ended.values())
        self.assertGreater(ended[True], count // 100)
        self.assertGreater(ended[False], count // 4)

    def test_any_arguments(self):
        chance = random.Random(SEED)
        with tandem.World(1, deadline=0.05) as world:
            comm = world.comm()
            ops = [kind(comm, 4, 3, 5) for kind in
                   (tandem.AgGemm, tandem.GemmRs, tandem.GemmAr, tandem.AgWgrad)]
            layer = tandem.MoeLayer(comm, 4, 5, 3, 2)
            right = experts_operands()
            batch = layer.forward(*right)[1]
            made_for = {layer.forward: right, layer.backward: [batch, right[0], *right[3:]]}
            objects = [kind(comm, (4, 5)) for kind in
                       (tandem.AllReduce, tandem.AllGather, tandem.ReduceScatter, tandem.AllToAll)]
            calls = [
                *ops, tandem.AgGemm, tandem.GemmRs, tandem.all_reduce, tandem.all_gather,
                tandem.reduce_scatter, tandem.all_to_all, tandem.broadcast, tandem.shard_of,
                tandem.send, tandem.recv, tandem.AllReduce, tandem.AllGather, tandem.ReduceScatter,
                tandem.AllToAll, *objects,
                comm.split, world.comm, tandem.run, tandem.World, tandem.MoeLayer, layer.forward,
                layer.backward, lambda *a, **named: layer.backward(batch, *a, **named),
            ]
            alone = (*ops, *objects, tandem.World, tandem.run, world.comm)
            ended = {True: 0, False: 0}
            for _ in range(CALLS):
                call = chance.choice(calls)
                positional, named = hostile(chance, comm, call not in alone and chance.random() < 0.6)
                if call in objects and chance.random() < 0.3:
                    positional, named = [np.ones((4, 5), "f4")], {}  # valid arguments
                if call in made_for and chance.random() < 0.6:
                    positional, named = spoilt(made_for[call], chance, comm)
                if call in (tandem.World, tandem.run) and positional and \
                        isinstance(positional[0], (int, np.integer)) and positional[0] > 64:
                    continue  # would start as many threads as requested
                try:
                    call(*positional, **named)
                    ended[True] += 1
                except NAMED:
                    ended[False] += 1
            self.check(ended)
            x, w = np.ones((4, 5), "f4"), np.ones((3, 5), "f4")
            self.assertEqual(ops[0](x, w).sum(), 60)
            out = layer.forward(*experts_operands())[0]
            np.testing.assert_allclose(out, np.full((4, 5), 3 * 25 / (1 + np.exp(-5))), rtol=1e-5)

    def test_two_ranks(self):
        """Mostly the same calls on both ranks; a world whose ranks diverged is discarded."""
        for seed in range(SEED, SEED + max(1, CALLS // 400)):
            ended = {True: 0, False: 0}

            def body(comm):
                chance, local = random.Random(seed), random.Random(10 * seed + comm.rank)
                ops = [kind(comm, 4, 3, 5) for kind in
                       (tandem.AgGemm, tandem.GemmRs, tandem.GemmAr, tandem.AgWgrad)]
                layer, right = tandem.MoeLayer(comm, 4, 5, 3, 2), experts_operands()
                right[3:] = [np.ascontiguousarray(w[:len(w) // 2]) for w in right[3:]]
                calls = [*ops, tandem.all_reduce, tandem.all_gather, tandem.reduce_scatter,
                         tandem.all_to_all, tandem.broadcast, tandem.AgGemm, tandem.GemmAr, tandem.MoeLayer,
                         layer.forward, layer.forward]
                for _ in range(100):
                    call = chance.choice(calls)
                    positional, named = hostile(chance, comm, call not in ops)
                    if call == layer.forward:
                        positional, named = spoilt(right, chance, comm)
                    if local.random() < 0.005:
                        positional, named = hostile(local, comm, call not in ops)
                    try:
                        call(*positional, **named)
                        ended[True] += 1
                    except (tandem.Timeout, tandem.Aborted):
                        return
                    except NAMED:
                        ended[False] += 1

            tandem.run(2, body, deadline=0.2)
            self.assertGreater(sum(ended.values()), 0)

    @unittest.skipUnless(torch, "python3-torch is not installed")
    def test_torch_layers(self):
        """Errors about arguments may be PyTorch's own exceptions."""
        chance = random.Random(SEED)
        with tandem.World(1) as world:
            comm = world.comm()
            modules = [kind(comm, 5, 3, sequence_parallel=parallel)
                       for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear)
                       for parallel in (True, False)]
            layer = tandem.MoeLayer(comm, 4, 5, 3, 2)
            calls = [*modules, layers.gather_rows, lambda *a, **named: layers.moe(layer, *a, **named),
                     layers.ColumnParallelLinear, layers.RowParallelLinear.from_linear, layers.Moe,
                     layers.Moe.from_experts]
            ended = {True: 0, False: 0}
            for _ in range(CALLS // 4):
                call = chance.choice(calls)
                positional, named = hostile(chance, comm, call not in modules)
                if any(isinstance(each, int) and each > 2**20 for each in positional):
                    continue  # layers of terabytes
                if chance.random() < 0.5:
                    x = torch.ones(chance.randrange(5), 5, requires_grad=chance.random() < 0.5)
                    positional.insert(len(positional[:1]) if call not in modules else 0, x)
                    positional, named = positional[:1 + (call not in modules)], {}
                try:
                    out = call(*positional, **named)
                    if isinstance(out, torch.Tensor) and out.requires_grad:
                        out.backward(tensors(chance) if chance.random() < 0.2 else torch.ones_like(out))
                    ended[True] += 1
                except Exception:
                    ended[False] += 1
            self.check(ended)


if __name__ == "__main__":
    unittest.main()
