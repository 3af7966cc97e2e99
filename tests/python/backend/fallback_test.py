"""Backend "tandem" without a C++ compiler: calls and DDP of the process group in Python."""
import os
import tempfile
import unittest
from unittest import mock

import calls_test
import training_test
from group import RANK, dist, start, tandem, torch

from tandem.torch import _backend, _compile

SERVED = {
    calls_test.Reductions: ["all_reduce", "sums_in_rank_order", "average", "average_of_integers_is_rounded_to_zero", "reduce",
                            "reduce_scatter", "reduce_scatter_of_uneven_shards"],
    calls_test.Gathers: ["all_gather", "all_gather_of_uneven_tensors", "broadcast", "gather_and_scatter", "objects"],
    calls_test.AllToAll: ["equal_shards", "splits"],
    calls_test.Messages: ["short_messages_leave_before_they_are_received"],
    calls_test.Groups: ["subgroups", "works"],
    training_test.Training: ["ddp", "ddp_gradients"],
}


def setUpModule():
    os.environ["CXX"] = "no-such-compiler"
    with unittest.TestCase().assertWarnsRegex(
            UserWarning, "C\\+\\+ compiler no-such-compiler: not found: .*it serves torch.distributed's calls and DDP, but not"):
        start()


def tearDownModule():
    dist.destroy_process_group()


class Fallback(unittest.TestCase):
    def test_python_serves(self):
        self.assertEqual(type(dist.group.WORLD).__name__, "PythonGroup")
        self.assertIsNone(_backend.compiled())

    def test_codec(self):
        group = dist.new_group(pg_options=tandem.torch.GroupOptions(codec="int8"))
        x = torch.randn(4096, generator=torch.Generator().manual_seed(RANK))
        before = tandem.torch.bytes_sent(group)
        dist.all_reduce(x, group=group)
        sent = tandem.torch.bytes_sent(group) - before
        self.assertGreater(sent, 0)
        self.assertLess(sent, 2 * (group.size() - 1) * 4096)

    def test_failed_compilation_names_its_log(self):
        with tempfile.TemporaryDirectory() as folder, \
                mock.patch.dict(os.environ, {"CXX": "false", "TANDEM_CACHE_DIR": folder}):
            with self.assertRaisesRegex(tandem.IoError, r"false: exit status 1 .*: see .*\.log") as caught:
                _compile.load()
            log = str(caught.exception).split("see ")[1]
            with open(log) as file:
                self.assertIn("backend.cc", file.read())
            self.assertFalse([name for name in os.listdir(os.path.dirname(log)) if name.endswith(".so")])


def load_tests(loader, tests, pattern):
    suite = loader.loadTestsFromTestCase(Fallback)
    for case, names in SERVED.items():
        # A subclass here, so that this module's setup serves it.
        local = type(case.__name__, (case,), {"__module__": __name__})
        suite.addTests(local(f"test_{name}") for name in names)
    return suite


if __name__ == "__main__":
    unittest.main()
