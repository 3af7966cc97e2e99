"""Invalid calls with GPU ranks: named exceptions on every rank, no hang, no crash."""
import threading
import time
import unittest

import numpy as np
import torch

import tandem
from gpu_ranks import SIDE_STREAMS, call_without_rank_1, counts, cupy, on_ranks, run

N, K = 64, 128


class Refused(unittest.TestCase):
    def refuse(self, pattern, call, kind=tandem.InvalidArgument):
        with self.assertRaisesRegex(kind, pattern):
            call()

    def test_operands(self):
        def body(comm):
            op = tandem.GemmAr(comm, 16, N, K)
            x, w = torch.ones(16, K, device=comm.device), torch.ones(N, K, device=comm.device)
            self.refuse("x", lambda: op(x.cpu(), w))
            self.refuse("weight", lambda: op(x, w.cpu()))
            self.refuse("out", lambda: op(x, w, torch.ones(16, N)))
            self.refuse("x: numpy.ndarray: expected a tensor of PyTorch's, CuPy's or JAX's on cuda:0",
                        lambda: op(np.ones((16, K), "f4"), w, torch.ones(16, N, device=comm.device)))
            self.refuse("x", lambda: op(x.double(), w))
            self.refuse("x", lambda: op(x.bfloat16(), w))
            self.refuse("x", lambda: op(x[:, :64], w))
            self.refuse("x", lambda: op(x[:8], w))
            self.refuse("out", lambda: op(x, w, x[:, :N]))
            self.refuse("requires a gradient", lambda: op(x, w.requires_grad_()))
            w = w.detach()
            gone = torch.ones(16, K, device=comm.device)
            gone.untyped_storage().resize_(0)
            self.refuse("x: no memory", lambda: op(gone, w))
            self.refuse("x", lambda: tandem.all_reduce(comm, x.cpu()))
            self.refuse("numpy", lambda: tandem.all_reduce(comm, np.ones(4, "f4")))
            self.refuse("x", lambda: tandem.all_gather(comm, x.cpu()))
            self.refuse("multiple|N|n ", lambda: tandem.GemmAr(comm, 16, 3, K))
            self.assertEqual(float(op(x, w)[0, 0]), K * comm.size)  # no error has broken the rank

        on_ranks(body)

    def test_a_tensor_of_a_gpu_in_a_world_of_cpus(self):
        x, w = torch.ones(16, K, device="cuda"), torch.ones(N, K, device="cuda")

        def body(comm):
            self.assertEqual((comm.device, comm.stream), ("cpu", None))
            op = tandem.GemmAr(comm, 16, N, K)
            self.refuse("x", lambda: op(x, w))
            self.refuse("weight", lambda: op(x.cpu(), w))
            self.refuse("x", lambda: tandem.all_reduce(comm, x))
            if cupy:
                self.refuse("x", lambda: tandem.all_reduce(comm, cupy.ones(4, "f4")))

        tandem.run(2, body)

    def test_another_gpu(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("needs 2 GPUs")

        def body(comm):
            other = f"cuda:{1 - comm.rank}"
            self.refuse("x", lambda: tandem.all_reduce(comm, torch.ones(4, device=other)))

        run(2, body)

    def test_the_default_stream_where_ranks_share_a_gpu(self):
        def body(comm):
            if not comm._shares_gpu:
                return
            x = torch.ones(4, device=comm.device)
            with torch.cuda.stream(torch.cuda.default_stream()):
                self.refuse("all_reduce: the current stream is CUDA's default stream",
                            lambda: tandem.all_reduce(comm, x))
            if not SIDE_STREAMS:
                self.assertEqual(torch.cuda.current_stream().cuda_stream, comm.stream)

        on_ranks(body, [2])

    def test_one_stream_of_two_ranks_that_share_a_gpu(self):
        streams = []

        def body(comm):
            if not comm._shares_gpu:
                return
            x = torch.ones(4, device=comm.device)
            if comm.rank == 0:
                streams.append(torch.cuda.Stream())
            comm.barrier()
            if comm.rank == 0:
                with torch.cuda.stream(streams[0]):
                    tandem.all_reduce(comm, x)
            else:
                tandem.all_reduce(comm, x)
            comm.barrier()
            if comm.rank == 1:
                with torch.cuda.stream(streams[0]):
                    self.refuse("stream.* is another rank's", lambda: tandem.all_reduce(comm, x))
            comm.synchronize()

        run(2, body)

    def test_a_closed_world(self):
        for n in counts()[:2]:
            made = run(n, lambda comm: (comm, tandem.GemmAr(comm, 16, N, K)))
            x, w = torch.ones(16, K, device="cuda"), torch.ones(N, K, device="cuda")
            for comm, op in made:
                self.assertTrue(comm.closed)
                self.refuse("gemm_ar: its world is closed", lambda: op(x, w))
                self.refuse("all_reduce: its world is closed", lambda: tandem.all_reduce(comm, x))
                self.refuse("synchronize: its world is closed", comm.synchronize)
            del made, comm, op

    def test_ranks(self):
        most = torch.cuda.device_count()
        self.refuse("ranks", lambda: tandem.run(most + 1, print, device="cuda"))
        self.refuse("ranks a GPU", lambda: tandem.run(2, print, device="cuda", ranks_per_gpu=99))
        self.refuse("device 'tpu'", lambda: tandem.run(1, print, device="tpu"))
        self.refuse("ranks_per_gpu", lambda: tandem.run(2, print, ranks_per_gpu=2))
        self.refuse("deadline", lambda: tandem.run(1, print, device="cuda", deadline=0))


class Failing(unittest.TestCase):
    def test_an_exception_of_a_rank_ends_the_others(self):
        def body(comm):
            x = torch.ones(1024, device=comm.device)
            tandem.all_reduce(comm, x)
            if comm.rank == comm.size - 1:
                raise KeyError("mine")
            tandem.all_reduce(comm, x)
            comm.synchronize()

        for n in counts():
            begin = time.monotonic()
            with self.assertRaisesRegex(KeyError, "mine"):
                run(n, body)
            self.assertLess(time.monotonic() - begin, 15)

    def test_a_rank_that_does_not_come_is_named(self):
        def body(comm):
            op = tandem.GemmAr(comm, 16, N, K)
            x, w = torch.ones(16, K, device=comm.device), torch.ones(N, K, device=comm.device)
            call_without_rank_1(comm, lambda: op(x, w))

        if 2 in counts():
            with self.assertRaises(tandem.Timeout) as caught:
                run(2, body)
            self.assertEqual((caught.exception.rank, caught.exception.peer), (0, 1))

    def test_a_second_thread_is_refused(self):
        def body(comm):
            x = torch.ones(4, device=comm.device)
            if comm.rank:
                time.sleep(1)
                tandem.all_reduce(comm, x)
                return
            seen = []

            def other():
                time.sleep(0.3)
                try:
                    comm.barrier()
                except tandem.InvalidArgument as error:
                    seen.append(str(error))

            thread = threading.Thread(target=other)
            thread.start()
            tandem.all_reduce(comm, x)
            thread.join()
            if comm._shares_gpu:  # otherwise the call has returned by then
                self.assertIn("inside a call of another thread", seen[0])

        if 2 in counts():
            run(2, body)


if __name__ == "__main__":
    unittest.main()
