"""tandem.MoeLayer on GPU ranks: against every expert for every row in f64; ordered by streams and
in CUDA graphs; invalid arguments are rejected by name."""
import random
import unittest

import torch

import tandem
from gpu_ranks import DEVICE, call_without_rank_1, captured, counts, cupy, on_gpu, on_ranks, run, steps, values
from tandem import torch as layers

TOKENS, HIDDEN, FFN, TOP_K = 40, 128, 96, 2
MS = 1_000_000  # GPU cycles, about half a millisecond
STEP = {torch.float32: 2.0**-12, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def dtypes():
    return (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32, torch.bfloat16)


def close(got, want, dtype, what):
    """Within rounding steps of the largest value in dtype."""
    bound = (float(want.abs().max()) if want.numel() else 0) * STEP[dtype] + 1e-6
    off = float((got.double() - want.double()).abs().max()) if want.numel() else 0
    assert off <= bound, f"{what} {dtype}: off by {off}, bound {bound}"


class Case:
    """A layer's shape, the whole weights and this rank's shard of them."""

    def __init__(self, comm, dtype, tp=1):
        self.comm, self.dtype, self.tp, self.experts = comm, dtype, tp, 4 * comm.size
        self.w_in = values(comm, (self.experts, 2, FFN, HIDDEN), 1, dtype) / 8
        self.w_out = values(comm, (self.experts, HIDDEN, FFN), 2, dtype) / 8
        self.weights_of_rank = [self.shard(self.w_in), self.shard(self.w_out)]

    def shard(self, whole):
        first, count = tandem.shard_of(self.experts, self.comm.size // self.tp, self.comm.rank // self.tp)
        begin, width = tandem.shard_of(FFN, self.tp, self.comm.rank % self.tp)
        local = whole[first:first + count, :, begin:begin + width]
        return local.reshape(-1, width if whole.dim() == 3 else HIDDEN).contiguous()

    def layer(self, **options):
        return tandem.MoeLayer(self.comm, TOKENS, HIDDEN, FFN, self.experts, TOP_K, self.tp, self.dtype, **options)

    def rows(self, seed, rows=TOKENS, most=None):
        """x, experts below `most` and weights, different on every rank."""
        seed = 100 * seed + self.comm.rank
        x = values(self.comm, (rows, HIDDEN), seed, self.dtype)
        drawn = values(self.comm, (rows, most or self.experts), seed + 50, torch.float32)
        weights = values(self.comm, (rows, TOP_K), seed + 70, torch.float32)
        return x, drawn.argsort(1)[:, :TOP_K].int().contiguous(), weights

    def expected(self, x, experts, weights, dout):
        """out, dx, dweights, and this rank's dw_in and dw_out, in f64."""
        y, by = x.double().requires_grad_(), weights.double().requires_grad_()
        w_in, w_out = self.w_in.double().requires_grad_(), self.w_out.double().requires_grad_()
        dense = torch.zeros(len(x), self.experts, dtype=torch.float64, device=x.device)
        dense = dense.scatter(1, experts.long(), by)
        gate, up = (torch.einsum("th,efh->tef", y, w_in[:, i]) for i in range(2))
        each = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, w_out)
        out = (each * dense[:, :, None]).sum(1)
        dx, dweights, *rest = torch.autograd.grad(out, (y, by, w_in, w_out), dout.double())
        sums = [tandem.all_reduce(self.comm, each.float().contiguous()) for each in rest]
        return [out.detach(), dx, dweights, *map(self.shard, sums)]


def layouts(comm):
    return [tp for tp in range(1, comm.size + 1) if comm.size % tp == 0]


NAMES = ("out", "dx", "dweights", "dw_in", "dw_out")


class Passes(unittest.TestCase):
    def test_forward_and_backward(self):
        """Any number of rows including none, routed to all experts or to a few; both strategies
        give equal bits; given outputs are filled, and a batch serves two backward passes."""
        def body(comm):
            for dtype in dtypes():
                for tp in layouts(comm):
                    case = Case(comm, dtype, tp)
                    made = [case.layer(strategy=s, backward=True) for s in ("serial", "overlapped")]
                    for turn, most in enumerate((None, TOP_K, None)):
                        rows = max(0, TOKENS - 20 * comm.rank)
                        routed = case.rows(turn, rows, most)
                        dout = values(comm, (rows, HIDDEN), 7 + comm.rank, dtype)
                        found = []
                        for layer in made:
                            out, batch = layer.forward(*routed, *case.weights_of_rank)
                            found.append([out, *layer.backward(batch, dout, *case.weights_of_rank)])
                        want = case.expected(*routed, dout)
                        for name, got, right in zip(NAMES, found[0], want):
                            close(got, right, dtype, f"{name} tp {tp} turn {turn}")
                        self.same(found[0][0], found[1][0])
                        out = torch.empty(rows, HIDDEN, device=comm.device)
                        self.assertIs(made[0].forward(*routed, *case.weights_of_rank, out)[0], out)
                        self.same(out.to(dtype), found[0][0])
                        given = [torch.ones_like(found[0][3]), torch.ones_like(found[0][4]),
                                 torch.empty(rows, HIDDEN, device=comm.device), torch.empty_like(routed[2])]
                        again = made[1].backward(batch, dout, *case.weights_of_rank, *given)
                        self.assertEqual([id(t) for t in again], [id(t) for t in given[2:] + given[:2]])
                        self.same(again[0].to(dtype), found[1][1])
                        self.same(again[1], found[1][2])
                        for got, first in zip(again[2:], found[1][3:]):
                            torch.testing.assert_close(got, first + 1, rtol=1e-4, atol=1e-4)
                    self.assertEqual([layer.dropped_routings() for layer in made], [0, 0])

        on_ranks(body)

    def same(self, got, want):
        self.assertTrue(torch.equal(got, want))

    def test_wire_formats(self):
        def body(comm):
            for dtype in dtypes():
                case = Case(comm, dtype)
                routed = case.rows(1)
                uncompressed = case.layer().forward(*routed, *case.weights_of_rank)[0].double()
                for options in ({"codec": "int8"}, {"combine_codec": "int8"},
                                {"codec": "int8", "combine_codec": "int6:g32"}, {"codec": "int8", "allow_uncompressed": True}):
                    out = case.layer(strategy="serial", **options).forward(*routed, *case.weights_of_rank)[0]
                    self.assertLess(float((out - uncompressed).abs().max() / uncompressed.abs().max()), 0.1, options)
                    if "allow_uncompressed" not in options:
                        self.same(case.layer(strategy="overlapped", **options).forward(*routed, *case.weights_of_rank)[0], out)

        on_ranks(body)

    @on_gpu
    def test_choices_that_are_none_are_left_out_and_counted(self):
        def body(comm):
            case = Case(comm, torch.bfloat16)
            layer = case.layer()
            x, experts, weights = case.rows(1)
            want = case.expected(x, experts, torch.cat((weights[:, :1], torch.zeros_like(weights[:, 1:])), 1), x)[0]
            for turn, bad in enumerate((case.experts, -2, 2**31 - 1, None, float("nan"), float("inf"))):
                wrong, by = experts.clone(), weights.clone()
                if isinstance(bad, float):
                    by[:, 1] = bad
                else:
                    wrong[:, 1] = wrong[:, 0] if bad is None else bad
                close(layer.forward(x, wrong, by, *case.weights_of_rank)[0], want, torch.bfloat16, bad)
                self.assertEqual(layer.dropped_routings(), TOKENS * (turn + 1))

        on_ranks(body)

    @unittest.skipUnless(cupy, "CuPy is not installed")
    def test_cupy(self):
        def body(comm):
            case = Case(comm, torch.float16)
            layer = case.layer(backward=True)
            x, experts, weights = case.rows(1)
            dout = values(comm, (TOKENS, HIDDEN), comm.rank, torch.float16)
            cupy_tensors = [cupy.asarray(t.cpu().numpy()) for t in (x, experts, weights, *case.weights_of_rank, dout)]
            out, batch = layer.forward(*cupy_tensors[:5])
            found = [out, *layer.backward(batch, cupy_tensors[5], *cupy_tensors[3:5])]
            for name, got, want in zip(NAMES, found, case.expected(x, experts, weights, dout)):
                self.assertIsInstance(got, cupy.ndarray)
                close(torch.from_numpy(cupy.asnumpy(got)).to(comm.device), want, torch.float16, name)

        on_ranks(body)


class Refused(unittest.TestCase):
    def refuse(self, pattern, call):
        with self.assertRaisesRegex(tandem.InvalidArgument, pattern):
            call()

    def test_operands(self):
        """Raised on every rank; the ranks stay usable."""
        def body(comm):
            case = Case(comm, dtypes()[0])
            layer, other = case.layer(backward=True), case.layer(backward=True)
            x, experts, weights = case.rows(1)
            w_in, w_out = case.weights_of_rank
            want, batch = layer.forward(x, experts, weights, w_in, w_out)
            for name, arguments in (
                ("x", (x.double(), experts, weights, w_in, w_out)),
                ("x", (x[:, :-8], experts, weights, w_in, w_out)),
                ("x", (torch.cat((x, x)), torch.cat((experts,) * 2), torch.cat((weights,) * 2), w_in, w_out)),
                ("experts", (x, experts.float(), weights, w_in, w_out)),
                ("experts", (x, experts[:-1], weights, w_in, w_out)),
                ("weights", (x, experts, weights.double(), w_in, w_out)),
                ("w_in", (x, experts, weights, w_in[1:], w_out)),
                ("w_out", (x, experts, weights, w_in, w_in)),
                ("out", (x, experts, weights, w_in, w_out, torch.empty(3, 3, device=comm.device))),
                ("out .* overlaps x", (x, experts, weights, w_in, w_out, x)),
                ("weights: requires a gradient", (x, experts, weights.clone().requires_grad_(), w_in, w_out)),
            ):
                self.refuse(rf"moe: (routing\.)?{name}\b", lambda: layer.forward(*arguments))
            for name, call in (
                ("dout", lambda: layer.backward(batch, x[1:], w_in, w_out)),
                ("dw_in", lambda: layer.backward(batch, x, w_in, w_out, torch.empty(2, 2, device=comm.device))),
                ("dx .* overlaps dout", lambda: layer.backward(batch, x, w_in, w_out, dx=x)),
                (".*(this|another) layer", lambda: other.backward(batch, x, w_in, w_out)),
            ):
                self.refuse(rf"moe: {name}\b", call)
            self.assertTrue(torch.equal(layer.forward(x, experts, weights, w_in, w_out)[0], want))

        on_ranks(body)

    @on_gpu
    def test_what_gpus_do_not_take(self):
        def body(comm):
            case = Case(comm, torch.bfloat16)
            layer = case.layer()
            x, experts, weights = case.rows(1)
            out, batch = layer.forward(x, experts, weights, *case.weights_of_rank)
            self.assertEqual(batch.rows_of_experts, [])
            self.refuse("backward pass", lambda: layer.backward(batch, x, *case.weights_of_rank))
            self.refuse("moe: x: numpy", lambda: layer.forward(x.float().cpu().numpy(), experts, weights, *case.weights_of_rank))
            self.refuse("moe: x: ", lambda: layer.forward(x.cpu(), experts, weights, *case.weights_of_rank))
            self.refuse("moe: routing.experts: ", lambda: layer.forward(x, experts.cpu(), weights, *case.weights_of_rank))
            self.refuse("moe: w_in: ", lambda: layer.forward(x, experts, weights, case.weights_of_rank[0].cpu(), case.weights_of_rank[1]))
            for pattern, arguments in (("hidden 12", (8, 12, 64, comm.size, 1, 1, "bf16")),
                                       ("ffn 20", (8, 64, 20, comm.size, 1, 1, "bf16")),
                                       ("dtype f32", (8, 64, 64, comm.size)),
                                       ("top_k", (8, 64, 64, comm.size, comm.size + 1, 1, "bf16")),
                                       ("tp", (8, 64, 64, comm.size, 1, comm.size + 1, "bf16"))):
                self.refuse(rf"moe: {pattern}\b", lambda: tandem.MoeLayer(comm, *arguments))
            self.refuse("moe: chunks 2", lambda: tandem.MoeLayer(comm, 8, 64, 64, comm.size, dtype="bf16", chunks=2))
            self.assertTrue(torch.equal(layer.forward(x, experts, weights, *case.weights_of_rank)[0], out))

        on_ranks(body)

    def test_after_the_world(self):
        def body(comm):
            case = Case(comm, dtypes()[0])
            layer, routed = case.layer(backward=True), case.rows(1)
            return layer, layer.forward(*routed, *case.weights_of_rank)[1], routed, case.weights_of_rank

        for n in counts()[:2]:
            for layer, batch, routed, weights_of_rank in run(n, body):
                self.refuse("closed", lambda: layer.forward(*routed, *weights_of_rank))
                self.refuse("closed", lambda: layer.backward(batch, routed[0], *weights_of_rank))
                self.refuse("closed", layer.dropped_routings)


@on_gpu
class Streams(unittest.TestCase):
    def test_races(self):
        """Each step on a random stream: operands that are written late, overwritten as soon as the
        call has returned, and freed."""
        def body(comm):
            draw = random.Random(comm.rank)  # other delays and streams on other ranks
            count = 4 * comm.size
            layer = tandem.MoeLayer(comm, 16, 64, 64, count, TOP_K, dtype="bf16", backward=True)
            streams = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.current_stream()]
            found = []
            for step in range(60):
                stream = draw.choice(streams)
                with torch.cuda.stream(stream):
                    if draw.random() < 0.7:
                        torch.cuda._sleep(int(draw.random() * MS))
                    level = float(step % 3 + 1)
                    x = torch.full((16, 64), level, dtype=torch.bfloat16, device=comm.device)
                    w_in = torch.full((4 * 2 * 64, 64), 1 / 64, dtype=torch.bfloat16, device=comm.device)
                    w_out = torch.full((4 * 64, 64), 1 / 64, dtype=torch.bfloat16, device=comm.device)
                    first = (torch.arange(16, device=comm.device) + step) % count
                    experts = torch.stack((first, (first + 1) % count), 1).int()
                    weights = torch.full((16, TOP_K), 2.0 ** (step % 2), device=comm.device)
                    out, batch = layer.forward(x, experts, weights, w_in, w_out)
                    made = [out, *layer.backward(batch, x, w_in, w_out)]
                    # Gate and up projection are `level`.
                    right = TOP_K * 2.0 ** (step % 2) * level**2 / (1 + 2.718281828 ** -level)
                    off = (out.float() - right).abs().max() / right
                    finite = torch.stack([torch.isfinite(t.float()).all() for t in made[1:]]).all()
                    found.append((step, off, finite))
                    for each in (x, w_in, w_out, weights, *made):
                        each.fill_(float("nan"))
                    experts.fill_(-2)
                    del x, w_in, w_out, weights, experts, out, batch, made, each
            comm.synchronize()
            for stream in streams:
                stream.synchronize()
            self.assertEqual([step for step, off, finite in found if not (float(off) < 2.0**-6 and bool(finite))], [])
            self.assertEqual(layer.dropped_routings(), 0)

        on_ranks(body)


@on_gpu
class Graphs(unittest.TestCase):
    def test_replays_with_other_routings(self):
        """One graph of both passes; eager calls between its replays."""
        def body(comm):
            case = Case(comm, torch.bfloat16)
            layer = case.layer(backward=True)
            x, experts, weights = case.rows(0)
            dout = values(comm, (TOKENS, HIDDEN), comm.rank, torch.bfloat16)
            warm = [self.both(layer, case, (x, experts, weights), dout) for _ in range(2)]
            del warm  # frees two batches, one of which is still free when the other is captured

            def calls():
                return self.both(layer, case, (x * 1, experts, weights), dout)

            graph, made = captured(comm, calls)
            for turn in range(6):
                routed = case.rows(turn + 1, most=TOP_K if turn == 3 else None)
                for static, new in zip((x, experts, weights), routed):
                    static.copy_(new)
                graph.replay()
                comm.barrier("all have launched")
                want = case.expected(*routed, dout)
                for name, got, right in zip(NAMES, made, want):
                    close(got, right, torch.bfloat16, f"{name} turn {turn}")
                eager = self.both(layer, case, routed, dout)
                for got, again in zip(made[:3], eager):
                    self.assertTrue(torch.equal(got, again))
                comm.synchronize()
                comm.barrier("the turn has ended")
            self.assertEqual(layer.dropped_routings(), 0)

        on_ranks(body)

    def both(self, layer, case, routed, dout):
        """Results named by NAMES, and the batch."""
        out, batch = layer.forward(*routed, *case.weights_of_rank)
        return [out, *layer.backward(batch, dout, *case.weights_of_rank), batch]

    def test_torch_cuda_graph_of_a_module(self):
        def body(comm):
            torch.manual_seed(1)
            module = layers.Moe(comm, TOKENS, HIDDEN, FFN, 4, TOP_K, dtype=torch.bfloat16, backward=False)
            x = values(comm, (TOKENS, HIDDEN), 1, torch.bfloat16)
            with torch.no_grad():
                module(x)
                comm.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = module(x)
                for seed in range(3):
                    x.copy_(values(comm, (TOKENS, HIDDEN), seed, torch.bfloat16))
                    graph.replay()
                    close(out, module(x), torch.bfloat16, seed)

        on_ranks(body, [1])

    def test_what_cannot_be_captured_is_refused(self):
        def body(comm):
            case = Case(comm, torch.bfloat16)
            trains, routed = case.layer(backward=True), case.rows(1)
            for pattern, call in (
                ("moe: while a CUDA graph", case.layer),
                ("moe: a first forward pass: while a CUDA graph", lambda: trains.forward(*routed, *case.weights_of_rank)),
                ("moe: dropped_routings: while a CUDA graph", trains.dropped_routings),
            ):
                def calls(call=call, pattern=pattern):
                    with self.assertRaisesRegex(tandem.InvalidArgument, pattern):
                        call()
                    return routed[0] + 1

                captured(comm, calls)
            trains.forward(*routed, *case.weights_of_rank)  # the rank is still usable
            self.assertEqual(trains.dropped_routings(), 0)

        on_ranks(body, counts()[:2])


@on_gpu
class Compiled(unittest.TestCase):
    def test_module(self):
        def body(comm):
            torch.manual_seed(1)
            module = layers.Moe(comm, TOKENS, HIDDEN, FFN, 4 * comm.size, TOP_K, dtype=torch.bfloat16)
            x = values(comm, (TOKENS, HIDDEN), comm.rank, torch.bfloat16)
            for want, got in zip(*steps(module, x, "aot_eager")):
                close(got, want, torch.bfloat16, "compiled")

        # While PyTorch traces in one thread, calls of compiled modules in others fail: ranks that
        # are threads would have to take turns, which collective calls cannot.
        torch._dynamo.reset()
        run(1, body, deadline=60)


@on_gpu
class Lost(unittest.TestCase):
    def test_a_rank_that_does_not_come_is_named(self):
        def body(comm):
            case = Case(comm, torch.bfloat16)
            layer, routed = case.layer(), case.rows(1)
            call_without_rank_1(comm, lambda: layer.forward(*routed, *case.weights_of_rank))

        if 2 in counts():
            with self.assertRaises(tandem.Timeout) as caught:
                run(2, body)
            self.assertEqual((caught.exception.op, caught.exception.rank, caught.exception.peer), ("all_to_all", 0, 1))


if __name__ == "__main__":
    unittest.main()
