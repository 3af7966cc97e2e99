"""Runs a test's body on 1 to 4 GPU ranks, each on its own GPU if there are enough, otherwise
sharing the first. TANDEM_TEST_RANKS="1 2" sets the counts; TANDEM_TEST_SHARE=1 shares the first in
any case; TANDEM_TEST_SIDE_STREAMS=1 uses another current stream. With TANDEM_TEST_DEVICE=cpu bodies
that need no GPU run on CPU ranks, which tests the tests."""
import importlib
import os
import time
import unittest

import torch

import tandem
from tandem import _core

DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "cuda")
SIDE_STREAMS = os.environ.get("TANDEM_TEST_SIDE_STREAMS") == "1"
SHARE = os.environ.get("TANDEM_TEST_SHARE") == "1"
on_gpu = unittest.skipIf(DEVICE == "cpu", "needs a GPU")


def module(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


cupy = module("cupy") if DEVICE == "cuda" else None


def counts():
    return [int(n) for n in os.environ.get("TANDEM_TEST_RANKS", "1 2 3 4").split()]


def run(ranks, body, **options):
    options.setdefault("deadline", 20)
    if DEVICE == "cpu":
        return tandem.run(ranks, body, **options)
    local = _core._gpu_count() >= ranks and not (SHARE and ranks > 1)
    return tandem.run(ranks, on_side_streams(body) if SIDE_STREAMS else body, device="cuda",
                      ranks_per_gpu=1 if local else ranks, **options)


def on_side_streams(body):
    """Makes a stream of the framework current, in place of the one set by tandem.run."""
    def wrapped(comm):
        with torch.cuda.stream(torch.cuda.Stream()):
            if not cupy:
                return body(comm)
            with cupy.cuda.Stream(non_blocking=True):
                return body(comm)

    return wrapped


def captured(comm, calls):
    """Returns (graph, result of calls()). Like torch.cuda.graph, but for ranks that are threads:
    each captures on its own stream and checks only its own calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    comm.synchronize()
    torch.cuda.current_stream().synchronize()
    comm.barrier("before the capture")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        result = calls()
        graph.capture_end()
    comm.barrier("all have captured")
    return graph, result


def on_ranks(body, ranks=None, **options):
    for n in ranks or counts():
        run(n, body, **options)


def dtypes():
    return (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)


def values(comm, shape, seed, dtype):
    """Values in [-1, 1], equal on every rank; on the rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-1, 1, generator=generator).to(dtype).to(comm.device)


def rows_of(matrix, comm):
    begin, count = tandem.shard_of(len(matrix), comm.size, comm.rank)
    return matrix[begin:begin + count].contiguous()


def assert_product(got, x, weight, bias=None, ranks=1):
    """Asserts got = x @ weight.T + bias within rounding; for a sum over ranks x and weight are
    those of all ranks, concatenated."""
    x, weight = x.double(), weight.double()
    want, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    # The result is rounded; with several ranks partial sums are rounded before they are added.
    step = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    rounded = (want.abs() if ranks == 1 else size) * step
    over = (got.double() - want).abs() - (rounded + size * 2.0**-13 + 1e-5)
    assert float(over.max()) <= 0, f"{got.dtype} {tuple(got.shape)}: {float(over.max())} beyond the bound"


def steps(module, x, backend):
    """Results, x gradients and parameter gradients of two steps of a module, eager and then
    compiled."""
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend=backend)):
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            local = x.clone().requires_grad_()
            y = call(local)
            y.float().pow(2).sum().backward()
        results.append([y.detach(), local.grad, *(p.grad for p in module.parameters())])
    return results


def call_without_rank_1(comm, call):
    """call() on both ranks, then on rank 0 only: raises the error that this ends with."""
    call()
    comm.synchronize()
    comm.barrier()
    if comm.rank:
        return time.sleep(4)
    comm.deadline = 0.5
    call()
    comm.synchronize()
