"""PyTorch tensors as found in programs: right results, or rejected by name before any data is
sent."""
import unittest

import tandem
from ranks import on_ranks, rows_of, torch

if torch:
    from tandem import torch as layers


@unittest.skipUnless(torch, "python3-torch is not installed")
class Tensors(unittest.TestCase):
    def test_what_is_no_memory_of_the_rank_is_refused(self):
        ones = torch.ones(4, 4)
        freed = torch.ones(4)
        (freed.untyped_storage() if hasattr(freed, "untyped_storage") else freed.storage()).resize_(0)
        cases = {
            "meta": torch.ones(4, device="meta"), "sparse": ones.to_sparse(), "rows": ones.to_sparse_csr(),
            "double": ones.double(), "long": ones.long(), "bool": ones.bool(), "complex": ones.cfloat(),
            "negated": ones.cfloat().conj().imag, "transposed": torch.ones(2, 3).t(), "column": ones[:, 1],
            "expanded": ones[:1].expand(4, 4), "quantized": torch.quantize_per_tensor(ones, 1.0, 0, torch.quint8),
            "freed": freed, "five dimensions": torch.ones(1, 1, 1, 1, 2), "leaf": torch.ones(4, requires_grad=True),
        }

        def body(comm):
            for name, tensor in cases.items():
                with self.subTest(name), self.assertRaisesRegex(tandem.InvalidArgument, "^all_reduce: "):
                    tandem.all_reduce(comm, tensor)

        tandem.World(1).run(body)

    def test_what_lies_there_is_taken(self):
        class Own(torch.Tensor):
            pass

        def body(comm):
            with torch.inference_mode():
                inference = torch.ones(4)
            frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
            with torch.no_grad():
                leaf = torch.ones(4, requires_grad=True)
                tandem.all_reduce(comm, leaf)
            for tensor in (inference, frozen, torch.ones(4).as_subclass(Own), torch.ones(8)[2:6], torch.tensor(1.0),
                           torch.ones(0, 4), torch.ones(4).bfloat16(), torch.ones(4).half()):
                self.assertIs(tandem.all_reduce(comm, tensor), tensor)
                self.assertTrue((tensor == comm.size).all())
            self.assertTrue((leaf == comm.size).all())
            data = torch.ones(4)
            with torch.inference_mode():
                tandem.all_reduce(comm, data)
            self.assertTrue((data == comm.size).all())

        on_ranks(body)

    def test_a_backward_pass_hears_of_what_was_written(self):
        """If a call overwrites a saved tensor, PyTorch rejects the backward pass instead of
        computing a wrong result."""
        def writes(comm, x):
            """x: [size, 4]; already contains this rank's rows."""
            local = rows_of(x, comm).clone()
            weight, wide = torch.eye(4), torch.ones(comm.size, 4)
            yield lambda: tandem.all_reduce(comm, x)
            yield lambda: tandem.all_reduce(comm, x, codec="int8")
            yield lambda: tandem.AllReduce(comm, x.shape)(x)
            yield lambda: tandem.broadcast(comm, x)
            yield lambda: tandem.all_gather(comm, local, x)
            yield lambda: tandem.AllGather(comm, local.shape)(local, x)
            yield lambda: tandem.all_to_all(comm, wide, out=x)
            yield lambda: tandem.AgGemm(comm, comm.size, 4, 4)(local, weight, x)
            yield lambda: tandem.GemmAr(comm, comm.size, 4, 4)(wide, weight, x)
            yield lambda: tandem.AgWgrad(comm, comm.size, comm.size, 4)(local, torch.ones(comm.size, comm.size), x)
            yield lambda: tandem.Wire("lossless").decode(tandem.Wire("lossless").encode(wide), x)

        def body(comm):
            for number in range(len(list(writes(comm, torch.ones(comm.size, 4))))):
                x = torch.ones(comm.size, 4, requires_grad=True)
                y = x.exp()  # its backward pass needs y
                list(writes(comm, y.detach()))[number]()
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    y.sum().backward()

        on_ranks(body)

    def test_a_trace_would_leave_calls_out(self):
        def body(comm):
            with self.assertRaisesRegex(tandem.InvalidArgument, "all_reduce: x: within torch.jit.trace"):
                torch.jit.trace(lambda x: tandem.all_reduce(comm, x.clone()), torch.ones(4), check_trace=False)
            layer = layers.ColumnParallelLinear(comm, 4, 4)
            with self.assertRaisesRegex(tandem.InvalidArgument, "ag_gemm: x: within torch.jit.trace"):
                torch.jit.trace(layer, torch.ones(2, 4), check_trace=False)

        on_ranks(body)


if __name__ == "__main__":
    unittest.main()
