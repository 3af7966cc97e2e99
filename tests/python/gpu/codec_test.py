"""Wire formats of GPU tensors: bytes and values equal the host's, and sums over them."""
import unittest

import torch

import tandem
from gpu_ranks import cupy, dtypes, on_gpu, on_ranks, rows_of, run, values
from tandem import torch as layers

FORMATS = ("int8", "int6:g64", "int5", "int4:g32", "int3:g32", "int2:g32:asym:spikes", "int4:hadamard", "e4m3", "e5m2",
           "mxfp8", "mxfp4")


class Messages(unittest.TestCase):
    def test_the_hosts_bytes(self):
        def body(comm):
            for dtype in dtypes():
                for text in FORMATS:
                    wire = tandem.Wire(text)
                    for shape in ((5,), (33, 40)):
                        x = values(comm, shape, 3, dtype)
                        message = wire.encode(x)
                        self.assertEqual((message.device, message.dtype), (x.device, torch.uint8))
                        want = wire.encode(x.cpu())
                        self.assertTrue(torch.equal(message.cpu(), want), f"{text} {dtype} {shape}")
                        out = torch.empty_like(x)
                        self.assertIs(wire.decode(message, out), out)
                        decoded = wire.decode(want, torch.empty(shape, dtype=dtype))
                        self.assertTrue(torch.equal(out.cpu(), decoded), f"{text} {dtype} {shape}")
                        given = torch.zeros(len(message) + 16, dtype=torch.uint8, device=comm.device)
                        again = wire.encode(x, given)
                        self.assertEqual(again.data_ptr(), given.data_ptr())
                        self.assertTrue(torch.equal(again, message))

        run(1, body)

    @on_gpu
    def test_what_is_refused(self):
        def body(comm):
            wire = tandem.Wire("int8")
            x = values(comm, (256,), 1, torch.float32)
            message = wire.encode(x)
            for call in (
                lambda: wire.decode(message.cpu(), x),
                lambda: wire.decode(message, x.cpu()),
                lambda: wire.decode(message[:-1], x),
                lambda: wire.decode(message, x.to(torch.int32)),
                lambda: wire.encode(x, torch.empty(4096, dtype=torch.uint8)),
                lambda: wire.encode(x, torch.empty(4, dtype=torch.uint8, device=comm.device)),
                lambda: wire.encode(x[::2]),
            ):
                self.assertRaises(tandem.InvalidArgument, call)
            self.assertRaises(tandem.Unsupported, lambda: tandem.Wire("lossless").encode(x))

        run(1, body)

    @unittest.skipUnless(cupy, "CuPy is not installed")
    def test_cupy(self):
        def body(comm):
            x = cupy.random.rand(1000, dtype="f4")
            message = tandem.Wire("int8").encode(x)
            self.assertIsInstance(message, cupy.ndarray)
            out = tandem.Wire("int8").decode(message, cupy.empty_like(x))
            self.assertLess(float(abs(out - x).max()), 1 / 127)

        run(1, body)


class Operators(unittest.TestCase):
    def test_products(self):
        def body(comm):
            m, n, k = 128 * comm.size, 256, 512
            for dtype in dtypes():
                for text in ("int8", "int4:g32"):
                    bound = 2 * tandem.Wire(text).error_bound + 2.0**-6
                    x, w = values(comm, (m, k), 1, dtype), values(comm, (n, k), 2, dtype)
                    got = tandem.AgGemm(comm, m, n, k, dtype, codec=text)(rows_of(x, comm), w)
                    want = x.double() @ w.double().t()
                    size = w.double().abs().sum(1)  # x is in [-1, 1]
                    self.assertLess(float(((got.double() - want).abs() / size).max()), bound, f"ag {text} {dtype}")
                    partials = [values(comm, (m, k), 10 + r, dtype).double() @ w.double().t() for r in range(comm.size)]
                    want, size = sum(partials), sum(partial.abs().max() for partial in partials)
                    local = values(comm, (m, k), 10 + comm.rank, dtype)
                    got = tandem.GemmRs(comm, m, n, k, dtype, codec=text)(local, w)
                    off = (got.double() - rows_of(want, comm)).abs().max() / size
                    self.assertLess(float(off), bound, f"rs {text} {dtype}")
                    got = tandem.GemmAr(comm, m, n, k, dtype, codec=text)(local, w)
                    self.assertLess(float((got.double() - want).abs().max() / size), bound, f"ar {text} {dtype}")

        on_ranks(body)

    def test_layers(self):
        def body(comm):
            torch.manual_seed(3)
            dtype = dtypes()[min(1, len(dtypes()) - 1)]
            up = layers.ColumnParallelLinear(comm, 256, 512, dtype=dtype, codec="int8")
            down = layers.RowParallelLinear(comm, 512, 256, dtype=dtype, codec="int8")
            x = values(comm, (128, 256), comm.rank, dtype)
            optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.5)
            losses = []
            for _ in range(6):
                optimizer.zero_grad()
                loss = (down(torch.relu(up(x))).float() - x.float()).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().clone())
            losses = tandem.all_reduce(comm, torch.stack(losses))
            self.assertLess(float(losses[-1]), float(losses[0]))

        on_ranks(body)


class Sums(unittest.TestCase):
    def test_collectives(self):
        def body(comm):
            for dtype in dtypes():
                for text in ("int8", "int4:g32", "e4m3"):
                    total = sum(values(comm, (32, 128), r, dtype).double() for r in range(comm.size))
                    x = values(comm, (32, 128), comm.rank, dtype)
                    self.assertIs(tandem.all_reduce(comm, x, codec=text), x)
                    bound = 4 * comm.size * tandem.Wire(text).error_bound + 0.05
                    self.assertLess(float((x.double() - total).abs().max()), bound, f"{text} {dtype}")
                    same = tandem.broadcast(comm, x.clone())
                    self.assertTrue(torch.equal(same, x))  # equal bits on all ranks
                    whole = tandem.all_gather(comm, x[:8], codec=text)
                    self.assertEqual(tuple(whole.shape), (8 * comm.size, 128))

        on_ranks(body)

    def test_error_feedback(self):
        def body(comm):
            residual = torch.zeros(2048, device=comm.device)
            mean = torch.zeros(2048, device=comm.device)
            uncompressed = sum(values(comm, (2048,), r, torch.float32) for r in range(comm.size))
            turns = 32
            for _ in range(turns):
                x = values(comm, (2048,), comm.rank, torch.float32)
                mean += tandem.all_reduce(comm, x, codec="int4:g32", residual=residual) / turns
            once = values(comm, (2048,), comm.rank, torch.float32)
            tandem.all_reduce(comm, once, codec="int4:g32")
            if comm.size > 1:
                self.assertTrue(bool(residual.any()))
                self.assertLess(float((mean - uncompressed).abs().max()), float((once - uncompressed).abs().max()))

        on_ranks(body, [1, 2])


if __name__ == "__main__":
    unittest.main()
