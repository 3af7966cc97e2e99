"""Long-lived worlds of GPU ranks, and operators created and destroyed on them."""
import gc
import random
import unittest

import torch

import tandem
from gpu_ranks import DEVICE, on_gpu, on_ranks, run, values

N, K = 64, 128


class Worlds(unittest.TestCase):
    def test_a_world_is_used_again(self):
        where = {} if DEVICE == "cpu" else {"device": "cuda", "ranks_per_gpu": 2}
        with tandem.World(2, deadline=20, **where) as world:
            made = world.run(lambda comm: tandem.GemmAr(comm, 16, N, K))

            def body(comm):
                x, w = torch.ones(16, K, device=comm.device), torch.ones(N, K, device=comm.device)
                return made[comm.rank](x, w)

            for _ in range(3):
                for out in world.run(body):
                    self.assertEqual(float(out.min()), 2 * K)

    def test_init(self):
        with tandem.init(device=DEVICE) as world:
            comm = world.comm()
            x = torch.ones(4, device=comm.device)
            self.assertIs(tandem.all_reduce(comm, x), x)
            self.assertEqual(float(x.sum()), 4)

    def test_parts_of_a_world(self):
        def body(comm):
            group = comm.split(comm.rank % 2)
            self.assertEqual(group.device, comm.device)
            x = values(comm, (32,), comm.rank, torch.float32)
            want = sum(values(comm, (32,), r, torch.float32) for r in range(comm.rank % 2, comm.size, 2))
            torch.testing.assert_close(tandem.all_reduce(group, x), want)
            group.synchronize()

        on_ranks(body)


class Lifetime(unittest.TestCase):
    def test_operators_go_in_any_order(self):
        def body(comm):
            shape, local = random.Random(1), random.Random(comm.rank)  # equal on all ranks; different on each
            x, w = torch.ones(64, K, device=comm.device), torch.ones(N, K, device=comm.device)
            alive, free = {}, []
            for step in range(60):
                m = 8 * shape.randint(1, 8)
                op = tandem.GemmAr(comm, m, N, K)
                if shape.random() < 0.5:
                    self.assertEqual(float(op(x[:m], w).min()), comm.size * K)
                alive[step] = op
                del op
                while len(alive) > 6:
                    alive.pop(local.choice(list(alive)))
                if step % 10 == 0:
                    gc.collect()
                    comm.synchronize()
                    if DEVICE == "cuda":
                        free.append(torch.cuda.mem_get_info()[0])
            if free:
                self.assertLess(free[2] - free[-1], 64 << 20, free)

        on_ranks(body, [1, 2])

    @on_gpu
    def test_what_another_thread_collects(self):
        """Operators in reference cycles are freed by whichever thread collects garbage."""
        def body(comm):
            x, w = torch.ones(16, K, device=comm.device), torch.ones(N, K, device=comm.device)
            for _ in range(20):
                op = tandem.GemmAr(comm, 16, N, K)
                cycle = [op]
                cycle.append(cycle)
                out = op(x, w)
                del op, cycle
                if comm.rank == 0:
                    gc.collect()
            self.assertEqual(float(out.min()), comm.size * K)

        run(2, body)


if __name__ == "__main__":
    unittest.main()
