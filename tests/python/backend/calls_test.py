"""torch.distributed's calls on backend "tandem", compared with what each rank computes from all inputs."""
import functools
import unittest
from unittest import mock

from group import RANK, SIZE, dist, spread, start, tandem, torch, values

from tandem.torch import _backend

Op = dist.ReduceOp
EXACT = [torch.float32, torch.bfloat16, torch.float16, torch.int32]
DTYPES = EXACT + [torch.float64, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (2, 0), (40001,)]
COMBINE = {Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum,
           Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}


def setUpModule():
    start()


def tearDownModule():
    dist.destroy_process_group()


def ops_of(dtype):
    if dtype.is_complex:
        return [Op.SUM]
    ops = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]
    if not dtype.is_floating_point:
        ops += [Op.BAND, Op.BOR, Op.BXOR]
    return ops


def reduced(op, tensors):
    """In rank order."""
    return functools.reduce(COMBINE[op], tensors)


class Case(unittest.TestCase):
    def same(self, got, want):
        self.assertEqual(got.dtype, want.dtype)
        self.assertEqual(got.shape, want.shape)
        self.assertTrue(torch.equal(got, want), f"{got}\nexpected {want}")


class Reductions(Case):
    def test_all_reduce(self):
        for dtype in DTYPES:
            for shape in SHAPES if dtype in (torch.float32, torch.int64) else [(7,), (0,)]:
                for op in ops_of(dtype):
                    for arranged in (torch.clone, spread):
                        with self.subTest(dtype=dtype, shape=shape, op=op, arranged=arranged.__name__):
                            x = arranged(values(RANK, shape, dtype))
                            dist.all_reduce(x, op=op)
                            self.same(x, reduced(op, [values(r, shape, dtype) for r in range(SIZE)]))

    def test_sums_in_rank_order(self):
        for dtype in (torch.float32, torch.float64):
            for count in (5, 100003):
                inputs = [torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(r))
                          for r in range(SIZE)]
                x = inputs[RANK].clone()
                dist.all_reduce(x)
                self.same(x, functools.reduce(torch.add, inputs))

    def test_average(self):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = values(RANK, (9,), dtype)
            dist.all_reduce(x, op=Op.AVG)
            self.same(x, (sum(values(r, (9,), dtype) for r in range(SIZE))) / SIZE)

    def test_average_of_integers_is_rounded_to_zero(self):
        for dtype in (torch.int32, torch.int64, torch.int8, torch.uint8):
            x, shard = values(RANK, (9 * SIZE,), dtype), torch.empty(9, dtype=dtype)
            want = torch.div(sum(values(r, (9 * SIZE,), dtype) for r in range(SIZE)), SIZE, rounding_mode="trunc")
            dist.reduce_scatter_tensor(shard, x.clone(), op=Op.AVG)
            self.same(shard, want[9 * RANK:9 * (RANK + 1)])
            dist.all_reduce(x, op=Op.AVG)
            self.same(x, want)

    def test_sparse_sum(self):
        def of(rank, dense, dtype):
            count = 0 if rank == SIZE - 1 else 2 + rank  # as many places, some twice
            places = torch.stack([values(rank, (count,), torch.int64, seed) + 4 for seed in (1, 2)])
            return torch.sparse_coo_tensor(places, values(rank, (count, *dense), dtype, 3), (9, 9, *dense))

        for dense in ((), (3,)):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                x = of(RANK, dense, dtype)
                dist.all_reduce(x)
                self.assertTrue(x.is_sparse)
                self.same(x.to_dense(), sum(of(r, dense, dtype).to_dense() for r in range(SIZE)))
        with self.assertRaisesRegex(ValueError, "all_reduce: MAX of a sparse tensor: expected SUM"):
            dist.all_reduce(x, op=Op.MAX)

    def test_premultiplied_sum(self):
        x, out = values(RANK, (4 * SIZE,), torch.float32), torch.empty(4)
        factor = dist._make_nccl_premul_sum(0.5)
        before = x.clone()
        dist.reduce_scatter_tensor(out, x, op=factor)
        self.same(x, before)
        dist.all_reduce(x, op=factor)
        want = sum(0.5 * values(r, (4 * SIZE,), torch.float32) for r in range(SIZE))
        self.same(x, want)
        self.same(out, want[4 * RANK:4 * RANK + 4])

    def test_coalesced(self):
        shapes = [(3,), (2, 5), (0,), (4097,)]
        tensors = [values(RANK, shape, torch.float32) for shape in shapes]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in tensors:
                dist.all_reduce(x)
        manager.wait()
        for shape, x in zip(shapes, tensors):
            self.same(x, sum(values(r, shape, torch.float32) for r in range(SIZE)))

    def test_reduce(self):
        for dtype in DTYPES:
            for root in range(SIZE):
                for count in (5, 1, 0):
                    x = spread(values(RANK, (count,), dtype))
                    dist.reduce(x, dst=root)
                    if RANK == root:
                        self.same(x, reduced(Op.SUM, [values(r, (count,), dtype) for r in range(SIZE)]))
                    else:
                        self.same(x, values(RANK, (count,), dtype))

    def test_reduce_scatter(self):
        for dtype in DTYPES:
            for shape in [(3,), (2, 4), (0,), (20001,)] if dtype in (torch.bfloat16, torch.int64) else [(2, 4)]:
                for op in ops_of(dtype):
                    inputs = [[values(r, shape, dtype, seed) for seed in range(SIZE)] for r in range(SIZE)]
                    want = reduced(op, [each[RANK] for each in inputs])
                    out = torch.empty(shape, dtype=dtype)
                    dist.reduce_scatter(out, [x.clone() for x in inputs[RANK]], op=op)
                    self.same(out, want)
                    out = spread(torch.empty(shape, dtype=dtype))
                    whole = torch.stack(inputs[RANK])
                    dist.reduce_scatter_tensor(out, whole, op=op)
                    self.same(out, want)
                    self.same(whole, torch.stack(inputs[RANK]))

    def test_reduce_scatter_of_uneven_shards(self):
        shapes = [(r + 1,) for r in range(SIZE)]
        inputs = [[values(r, shape, torch.float32) for shape in shapes] for r in range(SIZE)]
        out = torch.empty(shapes[RANK])
        dist.reduce_scatter(out, inputs[RANK])
        self.same(out, sum(each[RANK] for each in inputs))


class Gathers(Case):
    def test_all_gather(self):
        for dtype in DTYPES:
            for shape in SHAPES if dtype == torch.float32 else [(7,)]:
                want = [values(r, shape, dtype) for r in range(SIZE)]
                out = [spread(torch.empty(shape, dtype=dtype)) for _ in range(SIZE)]
                dist.all_gather(out, spread(want[RANK]))
                for got, each in zip(out, want):
                    self.same(got, each)
                for arranged in (torch.clone, spread):
                    whole = arranged(torch.empty(SIZE, *shape, dtype=dtype))
                    dist.all_gather_into_tensor(whole, arranged(want[RANK]))
                    self.same(whole, torch.stack(want))

    def test_all_gather_of_uneven_tensors(self):
        want = [values(r, (r, 3), torch.int64) for r in range(SIZE)]
        out = [torch.empty(r, 3, dtype=torch.int64) for r in range(SIZE)]
        dist.all_gather(out, want[RANK])
        for got, each in zip(out, want):
            self.same(got, each)

    def test_coalesced(self):
        wholes = [torch.empty(SIZE * count) for count in (3, 5)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for whole, count in zip(wholes, (3, 5)):
                dist.all_gather_into_tensor(whole, values(RANK, (count,), torch.float32))
        manager.wait()
        for whole, count in zip(wholes, (3, 5)):
            self.same(whole, torch.cat([values(r, (count,), torch.float32) for r in range(SIZE)]))

    def test_broadcast(self):
        for dtype in DTYPES:
            for root in range(SIZE):
                for shape in [(), (3, 4), (0,), (30001,)]:
                    x = spread(values(RANK, shape, dtype))
                    dist.broadcast(x, src=root)
                    self.same(x, values(root, shape, dtype))

    def test_gather_and_scatter(self):
        for dtype in DTYPES:
            for root in range(SIZE):
                for shape in [(5,), (2, 3), (0,)]:
                    want = [values(r, shape, dtype) for r in range(SIZE)]
                    out = [torch.empty(shape, dtype=dtype) for _ in range(SIZE)] if RANK == root else None
                    dist.gather(spread(want[RANK]), out, dst=root)
                    for got, each in zip(out or [], want):
                        self.same(got, each)
                    got = spread(torch.empty(shape, dtype=dtype))
                    dist.scatter(got, want if RANK == root else None, src=root)
                    self.same(got, want[RANK])

    def test_objects(self):
        out = [None] * SIZE
        dist.all_gather_object(out, {"rank": RANK, "text": "x" * (100 * RANK)})
        self.assertEqual(out, [{"rank": r, "text": "x" * (100 * r)} for r in range(SIZE)])
        shared = [RANK, "of 0"] if RANK == 0 else [None, None]
        dist.broadcast_object_list(shared, src=0)
        self.assertEqual(shared, [0, "of 0"])


class AllToAll(Case):
    def test_equal_shards(self):
        for dtype in DTYPES:
            for shape in [(2,), (3, 2), (0,)]:
                inputs = [[values(r, shape, dtype, seed) for seed in range(SIZE)] for r in range(SIZE)]
                want = [inputs[r][RANK] for r in range(SIZE)]
                out = [spread(torch.empty(shape, dtype=dtype)) for _ in range(SIZE)]
                dist.all_to_all(out, [spread(x) for x in inputs[RANK]])
                for got, each in zip(out, want):
                    self.same(got, each)
                whole = torch.empty(SIZE * shape[0], *shape[1:], dtype=dtype)
                dist.all_to_all_single(whole, torch.cat(inputs[RANK]))
                self.same(whole, torch.cat(want))

    def test_splits(self):
        def rows(source, target):
            return values(source, ((source + 2 * target) % 4, 3), torch.float32, target)

        sent = [rows(RANK, r) for r in range(SIZE)]
        want = [rows(r, RANK) for r in range(SIZE)]
        out = torch.empty(sum(map(len, want)), 3)
        dist.all_to_all_single(out, torch.cat(sent), [len(x) for x in want], [len(x) for x in sent])
        self.same(out, torch.cat(want))


class Messages(Case):
    def test_ring_of_long_messages_that_all_send_first(self):
        right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        for count in (0, 1, 1000, 1_500_000):
            out = spread(torch.empty(count)) if count < 2000 else torch.empty(count)
            works = [dist.isend(values(RANK, (count,), torch.float32), right), dist.irecv(out, left)]
            for work in works:
                work.wait()
            self.same(out, values(left, (count,), torch.float32))

    def test_short_messages_leave_before_they_are_received(self):
        peer = RANK ^ 1
        if peer < SIZE:
            dist.send(values(RANK, (3,), torch.int64), peer)
            out = torch.empty(3, dtype=torch.int64)
            dist.recv(out, peer)
            self.same(out, values(peer, (3,), torch.int64))

    def test_tags_in_another_order(self):
        counts = {5: 3, 1: 200_000, 9: 7}
        if RANK == 0:
            works = [dist.isend(values(0, (count,), torch.float32, tag), 1, tag=tag) for tag, count in counts.items()]
        elif RANK == 1:
            outs = {tag: torch.empty(counts[tag]) for tag in (9, 5, 1)}
            works = [dist.irecv(out, 0, tag=tag) for tag, out in outs.items()]
        else:
            works = []
        for work in works:
            work.wait()
        if RANK == 1:
            for tag, out in outs.items():
                self.same(out, values(0, (counts[tag],), torch.float32, tag))

    def test_concurrent_with_a_collective(self):
        x, message = torch.ones(5), values(0, (300_000,), torch.float32)
        if RANK == 0:
            work = dist.isend(message, 1)
            dist.all_reduce(x)
            work.wait()
        else:
            dist.all_reduce(x)
            if RANK == 1:
                out = torch.empty(300_000)
                dist.recv(out, 0)
                self.same(out, message)
        self.same(x, torch.full((5,), float(SIZE)))

    def test_batch(self):
        right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        out = torch.empty(11)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, values(RANK, (11,), torch.float32), right),
                                            dist.P2POp(dist.irecv, out, left)]):
            work.wait()
        self.same(out, values(left, (11,), torch.float32))

    def test_from_any_rank(self):
        if RANK == 0:
            seen = set()
            for _ in range(SIZE - 1):
                out = torch.empty(150_000)
                source = dist.recv(out, tag=4)
                self.same(out, torch.full((150_000,), float(source)))
                seen.add(source)
            self.assertEqual(seen, set(range(1, SIZE)))
        else:
            dist.send(torch.full((150_000,), float(RANK)), 0, tag=4)

    def test_sizes_that_differ(self):
        if RANK == 0:
            dist.send(torch.ones(4), 1, tag=3)
            dist.send(torch.ones(2), 1, tag=3)
        elif RANK == 1:
            with self.assertRaisesRegex(dist.DistBackendError, "recv: rank 0 sends 16 bytes with tag 3, rank 1 expects 8"):
                dist.recv(torch.empty(2), 0, tag=3)
            out = torch.empty(2)
            dist.recv(out, 0, tag=3)
            self.same(out, torch.ones(2))


class Groups(Case):
    def test_several_groups_at_once(self):
        """Calls of two groups in another order on each rank."""
        all_ranks = list(range(SIZE))
        first, second = dist.new_group(all_ranks), dist.new_group(all_ranks[::-1])
        x, y = torch.full((1000,), float(RANK)), torch.full((1000,), 10.0 * RANK)
        calls = [lambda: dist.all_reduce(x, group=first, async_op=True),
                 lambda: dist.all_reduce(y, group=second, async_op=True)]
        works = [call() for call in (calls if RANK % 2 else reversed(calls))]
        for work in works:
            work.wait()
        total = float(sum(all_ranks))
        self.same(x, torch.full((1000,), total))
        self.same(y, torch.full((1000,), 10 * total))

    def test_subgroups(self):
        for members in ([0, SIZE - 1], [0], list(range(1, SIZE))):
            group = dist.new_group(members)
            if RANK not in members:
                continue
            x = values(RANK, (9,), torch.float32)
            dist.all_reduce(x, group=group)
            self.same(x, sum(values(r, (9,), torch.float32) for r in members))
            y = values(RANK, (4,), torch.int64)
            dist.broadcast(y, src=members[-1], group=group)
            self.same(y, values(members[-1], (4,), torch.int64))

    def test_works(self):
        x = values(RANK, (50,), torch.float32)
        work = dist.all_reduce(x, async_op=True)
        self.assertTrue(work.wait())
        self.assertTrue(work.is_completed())
        want = sum(values(r, (50,), torch.float32) for r in range(SIZE))
        self.same(work.get_future().value()[0], want)
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] + 1)
        self.same(future.wait(), want * SIZE + 1)

    def test_calls_run_in_their_order(self):
        x = torch.ones(20_000)
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        works[-1].wait()
        self.same(x, torch.full((20_000,), float(SIZE**5)))

    def test_default_backends_stay(self):
        self.assertEqual(dist.Backend.default_device_backend_map["cpu"], "gloo")
        self.assertEqual(dist.get_backend(), "tandem")

    def test_concurrent_backends(self):
        group = dist.new_group(backend="cpu:tandem")
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        self.same(x, torch.full((3,), float(SIZE)))
        dist.barrier(group=group)


class Codecs(Case):
    def test_sums_travel_encoded(self):
        wire, count = tandem.Wire("int8"), 30 * 128 * SIZE
        group = dist.new_group(pg_options=tandem.torch.GroupOptions(codec="int8"))
        x = torch.randn(count, generator=torch.Generator().manual_seed(RANK))
        want = sum(torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(SIZE))
        dist.all_reduce(x, group=group)
        # Two ranks encode once, more ranks the shards of others and the sums of theirs.
        shard = wire.bytes(count // SIZE)
        sent = (SIZE - 1) * (wire.bytes(count) if SIZE == 2 else 2 * shard)
        self.assertEqual(tandem.torch.bytes_sent(group), sent)
        error = float((x - want).abs().max())
        self.assertLess(error, 0.2)
        self.assertGreater(error, 0)  # lossy: an uncompressed sum would be exact
        whole = torch.cat([x.new_full((count // SIZE,), 1.0 + r) for r in range(SIZE)])
        out = torch.empty(count // SIZE)
        dist.reduce_scatter_tensor(out, whole, group=group)
        self.assertEqual(tandem.torch.bytes_sent(group), sent + (SIZE - 1) * shard)
        torch.testing.assert_close(out, torch.full_like(out, SIZE * (1.0 + RANK)), rtol=0.01, atol=0)
        integers = values(RANK, (count,), torch.int32)
        dist.all_reduce(integers, group=group)
        self.same(integers, sum(values(r, (count,), torch.int32) for r in range(SIZE)))

    def test_options_are_checked(self):
        with self.assertRaisesRegex(tandem.InvalidArgument, "codec"):
            tandem.torch.GroupOptions(codec="int9")
        with self.assertRaisesRegex(tandem.InvalidArgument, "pg_options: str: expected tandem.torch.GroupOptions"):
            dist.new_group(pg_options="int8")
        with self.assertRaisesRegex(tandem.InvalidArgument, "bytes_sent: .*: expected a process group of backend tandem"):
            tandem.torch.bytes_sent(dist.new_group(backend="gloo"))


class Errors(Case):
    def test_arguments(self):
        x = torch.ones(4)
        refusals = [
            (ValueError, "all_reduce: BAND of Float: expected an integer dtype", lambda: dist.all_reduce(x, op=Op.BAND)),
            (ValueError, "all_reduce: AVG of Bool: expected a number", lambda: dist.all_reduce(x.bool(), op=Op.AVG)),
            (ValueError, r"expected 4 numbers|expected \d numbers whose sum is 4",
             lambda: dist.all_to_all_single(x.clone(), x, [1] * SIZE, [9] * SIZE)),
            (ValueError, "expected a tensor|expected .* elements",
             lambda: dist.group.WORLD._allgather_base(torch.ones(3), x).wait()),
        ]
        for kind, text, call in refusals:
            with self.subTest(text=text), self.assertRaisesRegex(kind, text):
                call()
        dist.all_reduce(x)  # the group still works
        self.same(x, torch.full((4,), float(SIZE)))

    def test_variables_of_nccl_are_set_before_it_reads_them(self):
        """NVLink multicast stays off in tandem's communicators."""
        groups = dist.distributed_c10d._world.pg_backend_config
        with mock.patch("tandem.torch._enable.set_gpu_environment") as setter:
            with mock.patch.dict(groups, {dist.group.WORLD: "cpu:tandem,cuda:nccl"}):
                _backend.prepare_gpus()
            setter.assert_not_called()
            _backend.prepare_gpus()
            setter.assert_called_once_with()

    def test_calls_that_differ(self):
        group = dist.new_group()
        for mismatched in (lambda: dist.all_reduce(torch.ones(4 + RANK), group=group),
                           lambda: dist.all_reduce(torch.ones(4, dtype=[torch.int64, torch.float64][RANK % 2]), group=group),
                           lambda: (dist.broadcast(torch.ones(4), src=0, group=group) if RANK % 2
                                    else dist.all_reduce(torch.ones(4), group=group))):
            with self.assertRaisesRegex(dist.DistBackendError, "rank 0.*rank 1|rank 1.*rank 0"):
                mismatched()
        x = torch.ones(4)
        dist.all_reduce(x, group=group)
        self.same(x, torch.full((4,), float(SIZE)))


if __name__ == "__main__":
    unittest.main()
