"""Backend "tandem" of torch.distributed with CUDA tensors: every call compared with values that the
host computes, training with that of one process. Needs 2 GPUs, PyTorch 2.8 or later with CUDA and a
C++ compiler. Starts its 2 ranks; torchrun --nproc_per_node 2 may do so, too. With
TANDEM_TEST_DEVICE=cpu it runs on CPU tensors, which tests the tests."""
import copy
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest
import warnings
from datetime import timedelta

import torch

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "backend"))
IS_RANK = "RANK" in os.environ
if IS_RANK:
    import torch.distributed as dist
    from group import RANK, SIZE, spread, start, tandem, values
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _coalescing_manager
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    Op = dist.ReduceOp
DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "cuda")
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = FLOATS + [torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool]
SHAPES = [(), (7,), (3, 5), (0,), (40_001,), (300_000,)]
on_gpu = unittest.skipIf(DEVICE == "cpu", "needs GPUs")
of_rank = unittest.skipUnless(IS_RANK, "runs in the ranks that Launch starts")


def setUpModule():
    if IS_RANK:
        begin()


def tearDownModule():
    if IS_RANK:
        dist.destroy_process_group()


def begin():
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    start()


def wait_for_device():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def of_ranks(shape, dtype, seed=0):
    """Inputs of all ranks, on the host."""
    return [values(r, shape, dtype, seed) for r in range(SIZE)]


def here(x):
    """A copy on the device."""
    return x.to(DEVICE, copy=True)


def apart(x):
    """On the device, with gaps in memory."""
    gaps = torch.empty(*x.shape, 3, dtype=x.dtype, device=DEVICE)
    gaps[..., 1] = x
    return gaps[..., 1]


class Case(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual(got.device.type, DEVICE)
        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
        self.assertTrue(torch.equal(got.cpu(), want), f"{got}\nexpected {want}")


@of_rank
class Calls(Case):
    def test_all_reduce(self):
        combine = {Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum,
                   Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
        for dtype in DTYPES:
            ops = list(combine)[:4 if dtype.is_floating_point else 7]
            for shape in SHAPES:
                inputs = of_ranks(shape, dtype)
                for op in ops if shape == (7,) else [Op.SUM]:
                    for arranged in (here, apart):
                        with self.subTest(dtype=dtype, shape=shape, op=op, arranged=arranged.__name__):
                            x = arranged(inputs[RANK])
                            dist.all_reduce(x, op=op)
                            self.same(x, functools.reduce(combine[op], inputs))

    def test_average(self):
        for dtype in FLOATS:
            x = here(values(RANK, (33,), dtype))
            dist.all_reduce(x, op=Op.AVG)
            self.same(x, sum(of_ranks((33,), dtype)) / SIZE)

    def test_coalesced(self):
        for dtype in (torch.float32, torch.int64):
            xs = [here(values(RANK, (n,), dtype, n)) for n in (3, 5000)]
            with _coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
                for x in xs:
                    dist.all_reduce(x)
            manager.wait()
            wholes = [torch.empty(SIZE * n, dtype=dtype, device=DEVICE) for n in (3, 5000)]
            with _coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
                for whole, x in zip(wholes, xs):
                    dist.all_gather_into_tensor(whole, x)
            manager.wait()
            shards = [torch.empty(n, dtype=dtype, device=DEVICE) for n in (3, 5000)]
            with _coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
                for shard, whole in zip(shards, wholes):
                    dist.reduce_scatter_tensor(shard, whole)
            manager.wait()
            for x, whole, shard, n in zip(xs, wholes, shards, (3, 5000)):
                want = sum(of_ranks((n,), dtype, n))
                self.same(x, want)
                self.same(whole, torch.cat([want] * SIZE))
                self.same(shard, SIZE * want)

    def test_broadcast_and_reduce(self):
        for dtype in DTYPES:
            for root in range(SIZE):
                for shape in SHAPES[:4]:
                    inputs = of_ranks(shape, dtype)
                    x = apart(inputs[RANK])
                    dist.broadcast(x, src=root)
                    self.same(x, inputs[root])
                    y = here(inputs[RANK])
                    dist.reduce(y, dst=root)
                    if RANK == root:
                        self.same(y, functools.reduce(torch.add, inputs))

    def test_all_gather(self):
        for dtype in DTYPES:
            for shape in ((2, 3), (0,), (50_001,)):
                inputs = of_ranks(shape, dtype)
                out = [torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(SIZE)]
                dist.all_gather(out, apart(inputs[RANK]))
                for got, want in zip(out, inputs):
                    self.same(got, want)
                whole = torch.empty(SIZE * shape[0], *shape[1:], dtype=dtype, device=DEVICE)
                dist.all_gather_into_tensor(whole, here(inputs[RANK]))
                self.same(whole, torch.cat(inputs))

    def test_reduce_scatter(self):
        for dtype in DTYPES:
            for shape in ((2, 3), (0,), (50_001,)):
                inputs = [of_ranks(shape, dtype, seed) for seed in range(SIZE)]  # by shard
                want = functools.reduce(torch.add, inputs[RANK])
                out = torch.empty(shape, dtype=dtype, device=DEVICE)
                dist.reduce_scatter(out, [here(shard[RANK]) for shard in inputs])
                self.same(out, want)
                out = torch.empty(shape, dtype=dtype, device=DEVICE)
                dist.reduce_scatter_tensor(out, here(torch.cat([shard[RANK] for shard in inputs])))
                self.same(out, want)

    def test_all_to_all(self):
        for dtype in DTYPES:
            for shape in ((2,), (3, 2), (0,)):
                inputs = [of_ranks(shape, dtype, seed) for seed in range(SIZE)]  # by destination
                want = inputs[RANK]
                out = [apart(torch.zeros(shape, dtype=dtype)) for _ in range(SIZE)]
                dist.all_to_all(out, [here(each[RANK]) for each in inputs])
                for got, each in zip(out, want):
                    self.same(got, each)
                whole = torch.empty(SIZE * shape[0], *shape[1:], dtype=dtype, device=DEVICE)
                dist.all_to_all_single(whole, here(torch.cat([each[RANK] for each in inputs])))
                self.same(whole, torch.cat(want))

    def test_all_to_all_of_uneven_rows(self):
        def rows(source, target):
            return values(source, ((source + 2 * target) % 4, 3), torch.float32, target)

        sent, want = [rows(RANK, r) for r in range(SIZE)], [rows(r, RANK) for r in range(SIZE)]
        out = torch.empty(sum(map(len, want)), 3, device=DEVICE)
        dist.all_to_all_single(out, here(torch.cat(sent)), [len(x) for x in want], [len(x) for x in sent])
        self.same(out, torch.cat(want))

    def test_gather_and_scatter(self):
        for dtype in DTYPES:
            for root in range(SIZE):
                for shape in ((5,), (2, 3), (0,)):
                    want = of_ranks(shape, dtype)
                    out = [apart(torch.zeros(shape, dtype=dtype)) for _ in want] if RANK == root else None
                    dist.gather(here(want[RANK]), out, dst=root)
                    for got, each in zip(out or [], want):
                        self.same(got, each)
                    got = apart(torch.zeros(shape, dtype=dtype))
                    dist.scatter(got, [here(x) for x in want] if RANK == root else None, src=root)
                    self.same(got, want[RANK])

    def test_messages(self):
        peer = 1 - RANK
        for dtype in DTYPES:
            for count in (0, 1, 70_001):
                x, out = here(values(RANK, (count,), dtype)), apart(torch.zeros(count, dtype=dtype))
                for call in [dist.send, dist.recv] if RANK == 0 else [dist.recv, dist.send]:
                    call(x if call is dist.send else out, peer)
                self.same(out, values(peer, (count,), dtype))

    def test_messages_that_both_ranks_send_first(self):
        x, out = here(values(RANK, (3_000_000,), torch.float32)), torch.empty(3_000_000, device=DEVICE)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - RANK), dist.P2POp(dist.irecv, out, 1 - RANK)]):
            work.wait()
        self.same(out, values(1 - RANK, (3_000_000,), torch.float32))

    def test_objects_and_barrier(self):
        out = [None] * SIZE
        dist.all_gather_object(out, {"rank": RANK})
        self.assertEqual(out, [{"rank": r} for r in range(SIZE)])
        x = here(torch.ones(5))
        dist.all_reduce(x)
        dist.barrier()
        self.same(x, torch.full((5,), float(SIZE)))

    def test_host_and_device_tensors_in_one_group(self):
        for _ in range(3):
            x, y = torch.ones(9), here(torch.ones(9))
            dist.all_reduce(x)
            dist.all_reduce(y)
            self.assertEqual(float(x.sum()), 9 * SIZE)
            self.same(y, torch.full((9,), float(SIZE)))

    def test_a_group_of_gpus_only(self):
        group = dist.new_group(backend=f"{DEVICE}:tandem")
        x = here(values(RANK, (77,), torch.float32))
        dist.all_reduce(x, group=group)
        self.same(x, sum(of_ranks((77,), torch.float32)))

    def test_int8(self):
        group = dist.new_group(pg_options=tandem.torch.GroupOptions(codec="int8"))
        inputs = [torch.randn(7680 * SIZE, generator=torch.Generator().manual_seed(r)) for r in range(SIZE)]
        # A group of 128 values has 255 steps; two ranks encode once each, more ranks the sums, too.
        bound = 1.1 * (SIZE + 1) * max(float(x.abs().max()) for x in inputs) / 127
        x = here(inputs[RANK])
        dist.all_reduce(x, group=group)
        error = float((x.cpu() - sum(inputs)).abs().max())
        self.assertGreater(error, 0)  # lossy: an uncompressed sum would be exact
        self.assertLess(error, bound)
        shard = torch.empty(7680, device=DEVICE)
        dist.reduce_scatter_tensor(shard, here(inputs[RANK]), group=group)
        error = float((shard.cpu() - sum(inputs).chunk(SIZE)[RANK]).abs().max())
        self.assertGreater(error, 0)
        self.assertLess(error, bound)
        integers = here(values(RANK, (77,), torch.int32))
        dist.all_reduce(integers, group=group)
        self.same(integers, sum(of_ranks((77,), torch.int32)))


@of_rank
@on_gpu
class Streams(Case):
    def test_calls_follow_their_stream_and_wait_blocks_the_current_one(self):
        producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
        count = 1 << 20
        for asleep in (0, 400_000_000):  # the first round allocates
            x = torch.empty(count, device=DEVICE)
            wait_for_device()
            begun = time.monotonic()
            with torch.cuda.stream(producer):
                torch.cuda._sleep(asleep)
                x.fill_(RANK + 1)
                work = dist.all_reduce(x, async_op=True)
            with torch.cuda.stream(consumer):
                work.wait()
                y = 2 * x
            if asleep:
                self.assertFalse(work.is_completed())  # the host has not waited
                self.assertFalse(consumer.query())
            enqueued = time.monotonic() - begun
            consumer.synchronize()
            self.assertTrue(work.is_completed())
            if asleep:
                self.assertGreater(time.monotonic() - begun, enqueued)
            self.same(y, torch.full((count,), float(SIZE * (SIZE + 1))))

    def test_computation_goes_on_during_a_call(self):
        """The caller's stream does not wait before work.wait()."""
        x, y = torch.ones(1 << 20, device=DEVICE), torch.ones(8, device=DEVICE)
        dist.all_reduce(x)
        wait_for_device()
        if RANK == 1:
            torch.cuda._sleep(400_000_000)  # delays the call of both ranks
        work = dist.all_reduce(x, async_op=True)
        if RANK == 0:
            y.mul_(3)
            torch.cuda.current_stream().synchronize()
            self.assertFalse(work.is_completed())
        work.wait()
        self.same(x, torch.full((1 << 20,), float(SIZE * SIZE)))

    def test_memory_of_calls_without_wait(self):
        side = torch.cuda.Stream()
        total = torch.zeros(1, device=DEVICE)
        for step in range(30):
            with torch.cuda.stream(side):
                x = torch.full((1 << 18,), 1.0, device=DEVICE)
                future = dist.all_reduce(x, async_op=True).get_future()
                del x
                torch.full((1 << 18,), -7.0, device=DEVICE)  # would reuse memory that is free
                total += future.wait()[0][::1000].max()
        side.synchronize()
        self.assertEqual(float(total), 30.0 * SIZE)

    def test_a_graph_replays_calls(self):
        x = torch.ones(4096, device=DEVICE)
        dist.all_reduce(x)
        graph = torch.cuda.CUDAGraph()
        wait_for_device()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        x.fill_(1)
        for _ in range(3):
            graph.replay()
        self.same(x, torch.full((4096,), float(SIZE**3)))


WIDTH, ROWS = 64, 4  # rows of a rank


@of_rank
class Training(unittest.TestCase):
    def steps_equal_one_process(self, wrap):
        torch.manual_seed(7)
        reference = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(),
                                        torch.nn.Linear(4 * WIDTH, WIDTH)).to(DEVICE)
        before = copy.deepcopy(reference)
        model = wrap(copy.deepcopy(reference))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (reference, model)]
        for step in range(2):
            batch = here(torch.randn(ROWS * SIZE, WIDTH, generator=torch.Generator().manual_seed(50 + step)))
            for each, optimizer, x in ((reference, optimizers[0], batch), (model, optimizers[1], batch.chunk(SIZE)[RANK])):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
        for got, want, old in zip(model.parameters(), reference.parameters(), before.parameters()):
            whole = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(whole, want, rtol=1e-3, atol=1e-4)
            self.assertGreater(float((want - old).abs().max()), 1e-3)  # two steps move the weights by more

    def test_ddp(self):
        for buckets in (25, 0.01):
            self.steps_equal_one_process(functools.partial(DistributedDataParallel, bucket_cap_mb=buckets))

    def test_fsdp(self):
        def wrap(model):
            mesh = init_device_mesh(DEVICE, (SIZE,))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        self.steps_equal_one_process(wrap)


@of_rank
class Errors(unittest.TestCase):
    def expect_rank_1(self, call):
        begun = time.monotonic()
        with self.assertRaisesRegex(dist.DistBackendError, "rank 1"):
            call()
        self.assertLess(time.monotonic() - begun, 25)

    def late(self, connected):
        group = dist.new_group(timeout=timedelta(seconds=8))  # GPUs connect within it, too
        x = here(torch.ones(3))
        if connected:
            dist.all_reduce(x, group=group)
            wait_for_device()

        def call():
            work = dist.all_reduce(x, group=group, async_op=True)
            wait_for_device()
            work.wait()

        if RANK == 1:
            time.sleep(14)
            # The others have left: a call that needs nothing more of them may still end.
            with self.assertRaises(dist.DistBackendError):
                for _ in range(3):
                    call()
        else:
            self.expect_rank_1(call)
            self.expect_rank_1(call)  # the group stays so
        dist.barrier()  # other groups go on

    def test_a_late_rank_is_named(self):
        self.late(connected=True)

    def test_a_rank_that_is_late_for_the_first_call_is_named(self):
        self.late(connected=False)

    @on_gpu
    def test_arguments(self):
        x = here(torch.ones(4))
        refusals = [
            ("send: tag 3: expected 0 for CUDA tensors", lambda: dist.send(x, 1 - RANK, tag=3)),
            ("tensors on cuda:. and cpu|tensors on cpu and cuda:.|expected one device",
             lambda: dist.group.WORLD._get_backend(torch.device("cuda"))._allgather_base(torch.ones(4 * SIZE), x)),
            ("recv: from any rank: expected a rank for CUDA tensors",
             lambda: dist.group.WORLD._get_backend(torch.device("cuda")).recv_anysource([x], 0)),
            (f"a tensor on cuda:{1 - RANK}: expected cuda:{RANK}",
             lambda: dist.all_reduce(torch.ones(4, device=f"cuda:{1 - RANK}"))),
            ("all_reduce: BAND of Float: expected an integer dtype", lambda: dist.all_reduce(x, op=Op.BAND)),
        ]
        dist.all_reduce(x)
        for text, call in refusals:
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, text):
                call()
        dist.all_reduce(x)  # the group still works
        self.assertEqual(x.tolist(), [float(SIZE**2)] * 4)


def lose_a_rank():
    begin()
    x = here(torch.ones(1000))
    dist.all_reduce(x)
    wait_for_device()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        for _ in range(100):
            dist.all_reduce(x)
            wait_for_device()
    except dist.DistBackendError as error:
        assert "rank 1" in str(error), error
        assert time.monotonic() - begun < 30
        print(f"ok: rank {RANK}", flush=True)


def serve_without_a_compiler():
    os.environ["CXX"] = "no-such-compiler"
    warnings.simplefilter("ignore")
    begin()
    assert type(dist.group.WORLD).__name__ == "PythonGroup"
    x = apart(values(RANK, (7,), torch.float32))
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), sum(of_ranks((7,), torch.float32))), x
    whole = torch.empty(7 * SIZE, device=DEVICE)
    dist.all_gather_into_tensor(whole, x)
    assert torch.equal(whole.cpu(), torch.cat([x.cpu()] * SIZE)), whole
    print(f"ok: rank {RANK}", flush=True)
    dist.destroy_process_group()


@unittest.skipIf(IS_RANK, "a rank")
class Launch(unittest.TestCase):
    def setUp(self):
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
            self.skipTest("needs PyTorch 2.8 or later")
        if DEVICE == "cuda" and torch.cuda.device_count() < 2:
            self.skipTest("needs 2 GPUs")

    def launched(self, *program):
        environment = dict(os.environ, TANDEM_DEADLINE_S="20", OMP_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), environment.get("PYTHONPATH", "")])
        return subprocess.run([str(TESTS.parent / "comm/processes/launch.sh"), "2", sys.executable, *program],
                              env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def test_ranks(self):
        done = self.launched("-X", "faulthandler", "-m", "unittest", "backend_test")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("\nOK", done.stdout)

    def test_a_lost_rank_is_named(self):
        self.assertIn("ok: rank 0", self.launched(__file__, "lose_a_rank").stdout)

    def test_without_a_compiler(self):
        done = self.launched(__file__, "serve_without_a_compiler")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stdout.count("ok: rank"), 2, done.stdout)


if __name__ == "__main__":
    if sys.argv[1:] in (["lose_a_rank"], ["serve_without_a_compiler"]):
        {"lose_a_rank": lose_a_rank, "serve_without_a_compiler": serve_without_a_compiler}[sys.argv[1]]()
    else:
        unittest.main()
