"""tandem.vllm_plugin against the interfaces of vLLM (a test double), on CPU ranks."""
import os
import sys
import time
import tomllib
import unittest
import unittest.mock
from pathlib import Path

import group

group.require(None)
sys.path.insert(0, str(Path(__file__).with_name("vllm_double")))

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators import cuda_communicator
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_general_plugins

import tandem
import tandem.torch
from tandem import vllm_plugin

FEATURES = 48
STOCK = cuda_communicator.CudaCommunicator.all_reduce
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def load(**variables):
    """Starts a process of vLLM with these environment variables, as far as plugins see it."""
    entry_points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][DEFAULT_PLUGINS_GROUP]
    with unittest.mock.patch.dict(os.environ, variables):
        load_general_plugins(entry_points)


def communicator(name="tp:0"):
    world = dist.group.WORLD
    return cuda_communicator.CudaCommunicator(world, torch.device("cpu"), world, name)


def of_rank(rank, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def summed(*shape, dtype=torch.float32):
    return sum(of_rank(rank, *shape, dtype=dtype).double() for rank in range(dist.get_world_size()))


def rows_of(op=vllm_plugin.OP):
    return [row for row in tandem.torch.report() if row["op"] == op]


class Plugin(unittest.TestCase):
    def tearDown(self):
        vllm_plugin.unregister()
        tandem.torch.disable()
        self.assertIs(cuda_communicator.CudaCommunicator.all_reduce, STOCK)

    def sum_matches(self, tp, *shape, dtype=torch.float32, bound=1e-6):
        x = of_rank(dist.get_rank(), *shape, dtype=dtype)
        before = x.clone()
        out = tp.all_reduce(x)
        self.assertTrue(torch.equal(x, before), "the sum is out of place")
        self.assertEqual((out.shape, out.dtype), (x.shape, x.dtype))
        expected = summed(*shape, dtype=dtype)
        self.assertLessEqual(float((out.double() - expected).abs().max()), bound * float(expected.abs().max()))

    def test_it_is_off_unless_named(self):
        with unittest.mock.patch.dict(os.environ):
            os.environ.pop("VLLM_PLUGINS", None)
            load()
            self.assertIs(cuda_communicator.CudaCommunicator.all_reduce, STOCK)
        vllm_plugin.register()
        for plugins in ("", "other", "tandem2,other"):
            load(VLLM_PLUGINS=plugins)
            self.assertIs(cuda_communicator.CudaCommunicator.all_reduce, STOCK)
        self.assertIsNone(tandem.torch._enable._kernels)

    def test_sums_match(self):
        load(VLLM_PLUGINS="other,tandem")
        load(VLLM_PLUGINS="other,tandem")
        tp = communicator()
        for shape in ((1, FEATURES), (7, FEATURES), (33, FEATURES), (34, FEATURES), (2, 3, FEATURES), (FEATURES,)):
            self.sum_matches(tp, *shape)
        self.sum_matches(tp, 9, FEATURES, dtype=torch.bfloat16, bound=1e-2)
        self.assertEqual(tp.stock_calls, 0)
        rows = rows_of()
        self.assertEqual(sum(row["calls"] for row in rows), 7)
        shared = [row for row in rows if row["shape"] == f"up to 36 rows of {FEATURES}"]
        self.assertEqual([row["calls"] for row in shared], [2], "33 and 34 rows share an operator")

    def test_padding_is_below_an_eighth(self):
        for rows in range(1, 5000):
            padded = vllm_plugin.padded_rows(rows)
            self.assertGreaterEqual(padded, rows)
            self.assertLess(padded - rows, max(1, rows / 8))
        self.assertLessEqual(len({vllm_plugin.padded_rows(rows) for rows in range(1, 8193)}), 100)

    def test_sums_are_compressed_on_demand(self):
        load(VLLM_PLUGINS="tandem", TANDEM_VLLM_CODEC="int8")
        tp = communicator()
        self.sum_matches(tp, 16, FEATURES, bound=3e-2)
        x = of_rank(dist.get_rank(), 16, FEATURES)
        self.assertGreater(float((tp.all_reduce(x).double() - summed(16, FEATURES)).abs().max()), 1e-4)
        self.assertEqual(tp.stock_calls, 0)

    def test_other_sums_are_vllms(self):
        load(VLLM_PLUGINS="tandem")
        tp = communicator()
        counts = torch.full((4, 2), dist.get_rank() + 1)
        self.assertEqual(tp.all_reduce(counts).tolist(),
                         (counts * 0 + sum(range(1, dist.get_world_size() + 1))).tolist())
        self.assertEqual([(row["ran"], row["why"]) for row in rows_of()], [("torch", "x is torch.int64")])
        self.assertEqual(tp.stock_calls, 1)
        ep = communicator("ep:0")
        self.sum_matches(ep, 3, FEATURES)
        self.assertEqual(ep.stock_calls, 1)

    def test_the_faster_sum_runs(self):
        def slow(self, input_):
            time.sleep(0.1)
            return STOCK(self, input_)

        def quick(self, input_):
            return input_.clone()

        for stock, ran in ((slow, "serial"), (quick, "torch")):
            for codec in ("", "int8"):
                cuda_communicator.CudaCommunicator.all_reduce = stock
                load(VLLM_PLUGINS="tandem", TANDEM_VLLM_CODEC=codec, TANDEM_TUNE="1")
                tp = communicator()
                with unittest.mock.patch.dict(os.environ, TANDEM_TUNE="1"):
                    tp.all_reduce(of_rank(dist.get_rank(), 4, FEATURES))
                self.assertEqual([row["ran"] for row in rows_of()], [ran])
                self.assertGreaterEqual(rows_of()[0]["speedup"], 1)
                vllm_plugin.unregister()
                tandem.torch.disable()
                cuda_communicator.CudaCommunicator.all_reduce = STOCK

    def test_other_interfaces_and_codecs_are_refused(self):
        with unittest.mock.patch.object(cuda_communicator.CudaCommunicator, "all_reduce", lambda self, x, op: x):
            with self.assertRaisesRegex(tandem.Unsupported, r"takes \['self', 'x', 'op'\]: expected \['self', 'input_'"):
                load(VLLM_PLUGINS="tandem")
        with self.assertRaisesRegex(tandem.InvalidArgument, "TANDEM_VLLM_CODEC: codec 'int9': expected one of"):
            load(VLLM_PLUGINS="tandem", TANDEM_VLLM_CODEC="int9")

    def test_fused_operators_follow_the_reduction_they_are_given(self):
        """Called as vLLM's collective_fusion.py (commit 0248dcdf) does, which asks for the mean."""
        load(VLLM_PLUGINS="tandem")
        ranks, name = dist.get_world_size(), dist.group.WORLD.group_name
        x = of_rank(dist.get_rank(), 4 * ranks, 8)
        weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        whole = summed(4 * ranks, 8) @ weight.double()
        for reduction, expected in (("sum", whole), ("avg", whole / ranks)):
            out = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, reduction, scatter_dim=0, group_name=name)
            torch.testing.assert_close(out.double(), expected.chunk(ranks)[dist.get_rank()], rtol=1e-5, atol=1e-5)
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], gather_dim=0, group_name=name)
        rows = torch.cat([of_rank(rank, 4 * ranks, 8) for rank in range(ranks)])
        self.assertTrue(torch.equal(gathered, rows))
        torch.testing.assert_close(products[0], rows @ weight, rtol=1e-5, atol=1e-5)
        for op in ("fused_matmul_reduce_scatter", "fused_all_gather_matmul"):
            self.assertNotIn("torch", [row["ran"] for row in rows_of(op)])


if __name__ == "__main__":
    group.run_tests()
