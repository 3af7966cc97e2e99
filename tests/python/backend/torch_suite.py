"""torch_suite.py RANKS [TEST...]: DistributedTest, PyTorch's suite of its own backends, on backend "tandem" and CPU
ranks. Takes the installed PyTorch's text and puts tandem in gloo's place. Fails if a test fails that KNOWN lacks, if
one in KNOWN passes, and if fewer tests ran than EXPECTED. TEST: only tests of these names, without the latter check."""
import importlib.util
import multiprocessing
import os
import pathlib
import sys
import tempfile
import types
import unittest

SUITE = "torch.testing._internal.distributed.distributed_test"
GLOO_ONLY = "PyTorch refuses monitored_barrier for backends other than gloo"
KNOWN = {
    "test_ddp_logging_data_cpu": "looks for a key that DDP writes only for gloo and nccl",
    "test_monitored_barrier_gloo": GLOO_ONLY,
    "test_monitored_barrier_gloo_rank_0_timeout": GLOO_ONLY,
    "test_monitored_barrier_gloo_subgroup": GLOO_ONLY,
}
EXPECTED = 95  # tests that run; others need GPUs
if int(sys.argv[1]) > 2:
    EXPECTED = 120
    KNOWN |= {
        "test_monitored_barrier_failure_order": GLOO_ONLY,
        "test_monitored_barrier_wait_all_ranks": GLOO_ONLY,
    }
# In the suite's text: tests of gloo, and those of all_to_all, which it skips without MPI.
CHANGES = {"dist.Backend.GLOO": '"tandem"', '"gloo"': '"tandem"', 'BACKEND != "mpi"': 'BACKEND == "mpi"'}


def load_suite(ranks):
    """The suite's module, under its name, which pickled objects have."""
    from torch.testing._internal import common_distributed as common
    for backends in common.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("tandem")
    for feature in ("ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add("tandem")
    # Tests that would be skipped in each of the processes started for them.
    common.skip_if_no_gpu = unittest.skip("needs GPUs")
    common.skip_if_lt_x_gpu = lambda count, **_: unittest.skip(f"needs {count} GPUs")
    if ranks > 2:  # their groups have ranks 1 and 2
        common.skip_if_small_worldsize = lambda test: test
    origin = importlib.util.find_spec(SUITE).origin
    text = pathlib.Path(origin).read_text()
    for was, now in CHANGES.items():
        if was not in text:
            raise SystemExit(f"{origin}: no {was}: expected PyTorch's suite of its backends")
        text = text.replace(was, now)
    module = sys.modules[SUITE] = types.ModuleType(SUITE)
    module.__file__ = origin
    exec(compile(text, origin, "exec"), module.__dict__)
    return module


def make_tests(suite, names):
    class Tandem(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    found = unittest.defaultTestLoader.getTestCaseNames(Tandem)
    return unittest.TestSuite(Tandem(name) for name in found if not names or name in names)


def check(result, names, ranks):
    """Prints differences from KNOWN; returns whether there are none."""
    skipped = {test._testMethodName for test, _ in result.skipped}
    failed = {test._testMethodName for test, _ in result.failures + result.errors}
    known = {name for name in KNOWN if not names or name in names}
    ran = result.testsRun - len(skipped)
    for name in sorted(failed - known):
        print(f"{name} fails")
    for name in sorted(known - failed):
        print(f"{name} {'is skipped' if name in skipped else 'passes'}: expected to fail: {KNOWN[name]}")
    enough = ran >= (len(names) or EXPECTED)
    if not enough:
        print(f"{ran} tests ran: expected {len(names) or EXPECTED}")
    print(f"{ran - len(failed)} of {ran} tests pass on {ranks} ranks, {len(failed & known)} are known to fail, "
          f"{len(skipped)} are skipped")
    return failed == known and enough


def main():
    ranks, names = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(BACKEND="tandem", WORLD_SIZE=str(ranks), TEMP_DIR=folder, PYTORCH_PRINT_REPRO_ON_FAILURE="0")
        import torch.distributed as dist

        import tandem.torch
        from tandem.torch import _backend
        assert dist.is_backend_available("tandem") and _backend.compiled() is not None
        result = unittest.TextTestRunner(verbosity=2).run(make_tests(load_suite(ranks), names))
    sys.stderr.flush()
    sys.exit(not check(result, names, ranks))


if __name__ == "__main__":
    main()
