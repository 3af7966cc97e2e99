"""PyTorch's parallel training on backend "tandem": a step equals that of one process."""
import copy
import os
import unittest

from group import FOLDER, RANK, SIZE, dist, start, torch

import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 12, 4  # rows of a rank


def setUpModule():
    start()


def tearDownModule():
    dist.destroy_process_group()


def make_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))


def make_batch(step=0):
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(ROWS * SIZE, WIDTH, generator=generator)


def local_rows(x, rank=RANK):
    return x[ROWS * rank:ROWS * (rank + 1)]


def loss_of(model, x):
    return model(x).square().mean()


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


class Training(unittest.TestCase):
    def close(self, got, want):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    def steps_equal_one_process(self, wrap, rows=local_rows, steps=3):
        reference = make_model()
        model = wrap(copy.deepcopy(reference))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (reference, model)]
        for step in range(steps):
            batch = make_batch(step)
            for each, optimizer, x in ((reference, optimizers[0], batch), (model, optimizers[1], rows(batch))):
                optimizer.zero_grad()
                loss_of(each, x).backward()
                optimizer.step()
        for got, want in zip(model.parameters(), reference.parameters()):
            self.close(whole(got.detach()), want.detach())
        return model

    def test_ddp(self):
        self.steps_equal_one_process(DistributedDataParallel)

    def test_ddp_gradients(self):
        reference = make_model()
        model = DistributedDataParallel(copy.deepcopy(reference), bucket_cap_mb=0.001)  # several buckets
        loss_of(reference, make_batch()).backward()
        loss_of(model, local_rows(make_batch())).backward()
        for got, want in zip(model.parameters(), reference.parameters()):
            self.close(got.grad, want.grad)
        # The control: local gradients differ.
        alone = make_model()
        loss_of(alone, local_rows(make_batch())).backward()
        with self.assertRaises(AssertionError):
            self.close(alone[0].weight.grad, reference[0].weight.grad)

    def test_fsdp(self):
        def wrap(model):
            mesh = init_device_mesh("cpu", (SIZE,))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        model = self.steps_equal_one_process(wrap)
        self.assertLess(model[0].weight.to_local().numel(), model[0].weight.numel())

    @unittest.skipUnless(SIZE == 4, "4 ranks")
    def test_mesh_of_two_dimensions(self):
        """FSDP over two groups of two tensor-parallel ranks."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def wrap(model):
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return fully_shard(model, mesh=mesh["dp"])

        def rows(batch):
            return batch.chunk(2)[mesh["dp"].get_local_rank()]

        self.steps_equal_one_process(wrap, rows)

    @unittest.skipUnless(SIZE == 4, "4 ranks")
    def test_replicated_shards(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.steps_equal_one_process(lambda model: fully_shard(model, mesh=mesh))

    def test_tensors_change_placement(self):
        mesh = init_device_mesh("cpu", (SIZE,))
        x = torch.arange(SIZE * SIZE * 6.0).view(SIZE * 2, SIZE * 3)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        self.close(columns.to_local(), x.chunk(SIZE, 1)[RANK])
        self.close(columns.redistribute(mesh, [Replicate()]).to_local(), x)
        self.close((rows @ distribute_tensor(x.t(), mesh, [Replicate()])).full_tensor(), x @ x.t())

    def test_checkpoint(self):
        folder = os.path.join(FOLDER, "checkpoint")

        def wrap(model):
            return fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))

        model = self.steps_equal_one_process(wrap, steps=1)
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
        other = wrap(make_model())
        with self.assertRaises(AssertionError):  # the control: weights before the step
            self.close(whole(other[0].weight.detach()), whole(model[0].weight.detach()))
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        for got, want in zip(other.parameters(), model.parameters()):
            self.close(whole(got.detach()), whole(want.detach()))

    def functional_calls(self, compiler):
        group = dist.group.WORLD

        def calls(x):
            total = functional.all_reduce(x * 2, "sum", group)
            rows = functional.all_gather_tensor(x + 1, 0, group)
            shard = functional.reduce_scatter_tensor(rows, "sum", 0, group)
            swapped = functional.all_to_all_single(rows, None, None, group)
            return total.sin(), shard * 3, swapped.relu()

        inputs = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)) for r in range(SIZE)]
        total, shard, swapped = torch.compile(calls, backend=compiler, fullgraph=True)(inputs[RANK])
        rows = torch.cat(inputs) + 1
        self.close(total, (2 * sum(inputs)).sin())
        self.close(shard, 3 * SIZE * rows[3 * RANK:3 * RANK + 3])
        self.close(swapped, torch.cat([rows[3 * RANK:3 * RANK + 3]] * SIZE).relu())

    def test_functional_calls_in_a_compiled_graph(self):
        self.functional_calls("aot_eager")

    @unittest.skipUnless(os.environ.get("TANDEM_TEST_LONG"), "TANDEM_TEST_LONG=1: compiles C++")
    def test_functional_calls_in_compiled_code(self):
        self.functional_calls("inductor")


if __name__ == "__main__":
    unittest.main()
