"""Ranks of a test program: processes forked when everything is imported, with a gloo group."""
import importlib.util
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path

OLDEST_TORCH = (2, 8)


def require(framework):
    """Exits with CTest's skip code and a line, if PyTorch or the framework is missing."""
    def skip(why):
        print(f"skipped: {why}: make test-torch fetches it", flush=True)
        sys.exit(77)

    torch = importlib.util.find_spec("torch")
    if torch is None:
        skip("PyTorch is not installed")
    version = Path(torch.origin).with_name("version.py").read_text()
    found = tuple(map(int, re.search(r"__version__ = ['\"](\d+)\.(\d+)", version).groups()))
    if found < OLDEST_TORCH:
        skip("PyTorch {}.{} is older than {}.{}".format(*found, *OLDEST_TORCH))
    if framework and importlib.util.find_spec(framework) is None:
        skip(f"{framework} is not installed")


def _run_rank(rank, size, store):
    import torch
    import torch.distributed as dist

    import tandem.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if rank:
        sys.stderr = open(os.devnull, "w")
    program = unittest.main(module="__main__", exit=False, verbosity=2)
    for _, text in program.result.errors + program.result.failures if rank else ():
        print(f"rank {rank} of {size}:\n{text}", file=sys.__stderr__, flush=True)
    tandem.torch.disable()
    dist.destroy_process_group()
    return 0 if program.result.wasSuccessful() else 1


def _run_world(size):
    """Exit codes of that many ranks."""
    with tempfile.TemporaryDirectory(prefix="tandem-frameworks-") as folder:
        children = []
        for rank in range(size):
            children.append(os.fork())
            if children[-1] == 0:
                code = 1
                try:
                    code = _run_rank(rank, size, Path(folder, "store"))
                finally:
                    sys.stdout.flush()
                    os._exit(code)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_tests(sizes=(2, 4)):
    """Runs the program's tests on worlds of these sizes, and exits."""
    # Imported by `enable`; here once instead of by every rank.
    import torch._inductor.config
    import torch.distributed._symmetric_memory

    sys.exit(any(any(_run_world(size)) for size in sizes))
