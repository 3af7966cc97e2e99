"""GPU calls and the caller's streams: order, lifetime of operands, CUDA graphs."""
import gc
import random
import time
import unittest

import torch

import tandem
from gpu_ranks import assert_product, captured, counts, cupy, on_gpu, on_ranks, values

N, K = 64, 128
MS = 1_000_000  # GPU cycles, about half a millisecond


def sleep(cycles):
    torch.cuda._sleep(int(cycles))


@on_gpu
class Order(unittest.TestCase):
    def test_a_call_follows_its_stream_only_and_the_host_does_not_wait(self):
        def body(comm):
            op = tandem.AgGemm(comm, 8 * comm.size, N, K)
            ones, w = torch.ones(8, K, device=comm.device), torch.ones(N, K, device=comm.device)
            op(ones, w)
            first, second = torch.cuda.Stream(), torch.cuda.Stream()
            x = torch.zeros_like(ones)
            torch.cuda.current_stream().synchronize()
            comm.barrier()
            with torch.cuda.stream(first):
                sleep(400 * MS)
                x.fill_(1)
            with torch.cuda.stream(second):
                begin = time.monotonic()
                early = op(x, w)  # before x is written on another stream
                took = time.monotonic() - begin
            self.assertFalse(first.query(), "the delay is too short for this test")
            self.assertLess(took, 0.1)
            with torch.cuda.stream(first):
                late = op(x, w)
            torch.cuda.synchronize()
            self.assertEqual(float(early.sum()), 0)
            self.assertEqual(float(late.min()), K)
            comm.barrier()

        on_ranks(body, [1])  # preparing a call of ranks that share a GPU may wait for it

    def races(self, comm, steps, seed, ordered=True):
        """Each step on a random stream: operands that are written late, overwritten as soon as the
        call has returned, and freed. Without `ordered` calls are made on another stream. Returns
        the steps with wrong results."""
        draw = random.Random(seed + comm.rank)  # other delays and streams on other ranks
        shape = random.Random(seed)
        usual = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in range(4)] + [usual]
        made, found = {}, []
        for step in range(steps):
            m = 8 * comm.size * shape.randint(1, 4)
            kind = shape.choice((tandem.AgGemm, tandem.GemmRs, tandem.GemmAr, None))
            if kind is not None and (kind, m) not in made:
                made[kind, m] = kind(comm, m, N, K, "bf16")
            stream = draw.choice(streams)
            with torch.cuda.stream(stream):
                if draw.random() < 0.7:
                    sleep(draw.random() * MS)
                rows = m // comm.size if kind is tandem.AgGemm else m
                x = torch.full((rows, K), float(step % 7 + 1), dtype=torch.bfloat16, device=comm.device)
                w = torch.full((N, K), 2.0 ** (step % 3), dtype=torch.bfloat16, device=comm.device)
                with torch.cuda.stream(stream if ordered else usual):
                    y = tandem.all_reduce(comm, x) if kind is None else made[kind, m](x, w)
                if kind is None:
                    want = (step % 7 + 1) * comm.size
                else:
                    want = (step % 7 + 1) * 2.0 ** (step % 3) * K
                    want *= 1 if kind is tandem.AgGemm else comm.size
                found.append((step, kind, want, y.float().sub(want).abs().max()))
                for each in (x, w, y):
                    each.fill_(float("nan"))
                del x, w, y, each
        comm.synchronize()
        for stream in streams:
            stream.synchronize()
        # The result is rounded to bf16; partial sums are exact.
        return [(step, str(kind)) for step, kind, want, off in found if not float(off) <= want * 2.0**-7]

    def test_races(self):
        on_ranks(lambda comm: self.assertEqual(self.races(comm, 120, 5), []))

    def test_the_search_finds_races(self):
        on_ranks(lambda comm: self.assertNotEqual(self.races(comm, 40, 5, ordered=False), []), [1])

    @unittest.skipUnless(cupy, "CuPy is not installed")
    def test_races_of_cupy(self):
        def body(comm):
            draw = random.Random(comm.rank)
            op = tandem.AgGemm(comm, 8 * comm.size, N, K)
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
            found = []
            for step in range(40):
                with draw.choice(streams):
                    x = cupy.full((8, K), step + 1, "f4")
                    w = cupy.ones((N, K), "f4")
                    y = op(x, w)
                    found.append((step, cupy.abs(y - K * (step + 1)).max()))
                    for each in (x, w, y):
                        each.fill(float("nan"))
            comm.synchronize()
            for stream in streams:
                stream.synchronize()
            for step, off in found:
                self.assertEqual(float(off), 0, step)

        on_ranks(body)


@on_gpu
class Graphs(unittest.TestCase):
    def test_replays_with_new_values(self):
        def body(comm):
            m = 16 * comm.size
            gather = tandem.AgGemm(comm, m, N, K, "bf16")
            scatter = tandem.GemmRs(comm, m, N, K, "bf16")
            everywhere = tandem.GemmAr(comm, m, N, K, "bf16")
            x = values(comm, (16, K), 1, torch.bfloat16)
            whole = values(comm, (m, K), 2, torch.bfloat16)
            w = values(comm, (N, K), 3, torch.bfloat16)
            total = torch.zeros(64, device=comm.device)
            for op, operand in ((gather, x), (scatter, whole), (everywhere, whole)):
                op(operand, w)
            tandem.all_reduce(comm, total)

            def calls():
                a, b, c = gather(x * 1, w), scatter(whole, w), everywhere(whole, w)
                total.copy_(a.float().flatten()[:64])
                tandem.all_reduce(comm, total)
                return a, b, c

            graph, (a, b, c) = captured(comm, calls)
            for turn in range(4):
                x.copy_(values(comm, (16, K), 10 * turn + comm.rank, torch.bfloat16))
                whole.copy_(values(comm, (m, K), 100 + 10 * turn + comm.rank, torch.bfloat16))
                graph.replay()
                comm.barrier("all have launched")
                xs = torch.cat([values(comm, (16, K), 10 * turn + r, torch.bfloat16)
                                for r in range(comm.size)])
                wholes = [values(comm, (m, K), 100 + 10 * turn + r, torch.bfloat16) for r in range(comm.size)]
                side_by_side, weights = torch.cat(wholes, 1), torch.cat([w] * comm.size, 1)
                assert_product(a, xs, w)
                begin, count = tandem.shard_of(m, comm.size, comm.rank)
                assert_product(b, side_by_side[begin:begin + count], weights, ranks=comm.size)
                assert_product(c, side_by_side, weights, ranks=comm.size)
                torch.testing.assert_close(total, a.float().flatten()[:64] * comm.size)
                eager = gather(x, w)  # between replays
                self.assertTrue(torch.equal(eager, a))
                comm.synchronize()
                comm.barrier("the turn has ended")

        on_ranks(body)

    def test_torch_cuda_graph(self):
        def body(comm):
            op = tandem.GemmAr(comm, 16, N, K, "bf16")
            x, w = values(comm, (16, K), 1, torch.bfloat16), values(comm, (N, K), 2, torch.bfloat16)
            op(x, w)
            comm.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = op(x, w)
            for seed in range(3):
                x.copy_(values(comm, (16, K), seed, torch.bfloat16))
                graph.replay()
                assert_product(out, x, w)

        on_ranks(body, [1])

    def test_what_cannot_be_captured_is_refused(self):
        def body(comm):
            x = torch.ones(16, K, device=comm.device)
            tandem.all_reduce(comm, x)
            for what, call in (
                ("ag_gemm", lambda: tandem.AgGemm(comm, 16, N, K)),
                ("all_gather", lambda: tandem.AllGather(comm, (4, 4))),
                ("synchronize", comm.synchronize),
                ("moe", lambda: tandem.MoeLayer(comm, 16, 64, 64, comm.size, dtype="bf16")),
            ):
                def calls(call=call, what=what):
                    with self.assertRaisesRegex(tandem.InvalidArgument, f"{what}: while a CUDA graph"):
                        call()
                    return x + 1

                captured(comm, calls)
            tandem.all_reduce(comm, x)  # the rank is still usable
            comm.synchronize()

        on_ranks(body, counts()[:2])


if __name__ == "__main__":
    unittest.main()
