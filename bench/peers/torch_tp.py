#!/usr/bin/env python3
"""torch_tp.py OP FILE MxNxK...: PyTorch on the cases of `tandem bench OP --shapes MxNxK...`, for
torchrun. OP: ag_gemm, gemm_rs, gemm_ar or all_reduce. FILE receives a list of results.

Algorithms: `eager` is NCCL and torch.matmul in sequence; `async_tp` is torch.compile's
implementation of tensor parallelism (torch.ops.symm_mem.fused_*); for sums over all ranks,
`one_shot` and `two_shot` of its symmetric memory; all in a CUDA graph. Measured as in `tandem
bench`: L2 cache flushed, an idle gap before each call that hides its enqueueing, ranks aligned on
the device, algorithms in random order, time of the slowest rank, medians."""
import datetime
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

ROUNDS, WARM = 15, 3
CLOCK_HZ = 1.98e9


def slowest(values):
    times = torch.tensor(values, device="cuda", dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


class Timer:
    """Times individual calls."""

    def __init__(self):
        self.flushed = torch.zeros(64 << 20, device="cuda")
        self.aligned = torch.zeros(1, device="cuda")

    def once(self, call, idle_us):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.sum()  # by reading: written lines would be written back during the call
        torch.cuda._sleep(int(min(max(idle_us, 300), 20000) * 1e-6 * CLOCK_HZ))
        dist.all_reduce(self.aligned)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def medians(self, ways):
        """{name: us} of {name: call}; the calls have the same order on every rank."""
        draw, names = random.Random(1), list(ways)
        last = dict.fromkeys(names, 1000.0)
        times = {name: [] for name in names}
        for repeat in range(WARM + ROUNDS):
            draw.shuffle(names)
            for name in names:
                last[name] = self.once(ways[name], 2.5 * last[name])
                if repeat >= WARM:
                    times[name].append(last[name])
        return {name: sorted(slowest(times[name]))[ROUNDS // 2] for name in ways}


def graphed(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def error(out, exact):
    """Largest error relative to the largest exact value."""
    return ((out.double() - exact).abs().max() / exact.abs().max()).item()


def uniform(*shape):
    return torch.rand(*shape, device="cuda", dtype=torch.bfloat16) * 2 - 1


def gathering(m, n, k, group):
    world = dist.get_world_size()
    x, weight = uniform(m // world, k), uniform(n // world, k)
    whole = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)

    def eager():
        dist.all_gather_into_tensor(whole, x)
        return whole @ weight.t()

    def async_tp():
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group)[1][0]

    eager()
    exact = whole[:64].double() @ weight.double().t()
    return {"gemm": lambda: whole @ weight.t()}, {"eager": eager, "async_tp": async_tp}, exact


def scattering(m, n, k, group):
    world = dist.get_world_size()
    x, weight = uniform(m, k // world), uniform(n, k // world)
    out = torch.empty(m // world, n, device="cuda", dtype=torch.bfloat16)

    def eager():
        dist.reduce_scatter_tensor(out, x @ weight.t())
        return out

    def async_tp():
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)

    rows = m // world
    partial = torch.stack([x[r * rows:r * rows + min(rows, 64)].double() @ weight.double().t()
                           for r in range(world)])
    dist.all_reduce(partial)
    return ({"gemm": lambda: x @ weight.t()}, {"eager": eager, "async_tp": async_tp},
            partial[dist.get_rank()])


def reducing(m, n, k, group):
    world = dist.get_world_size()
    x, weight = uniform(m, k // world), uniform(n, k // world)
    shared = symmetric.empty(m, n, device="cuda", dtype=torch.bfloat16)
    symmetric.rendezvous(shared, group=group)

    def eager():
        out = x @ weight.t()
        dist.all_reduce(out)
        return out

    def one_shot():
        torch.matmul(x, weight.t(), out=shared)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)

    def two_shot():
        torch.matmul(x, weight.t(), out=shared)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

    exact = x[:64].double() @ weight.double().t()
    dist.all_reduce(exact)
    return ({"gemm": lambda: x @ weight.t()},
            {"eager": eager, "one_shot": one_shot, "two_shot": two_shot}, exact)


def summing(m, n, _, group):
    data = uniform(m, n)
    shared = symmetric.empty(m, n, device="cuda", dtype=torch.bfloat16)
    symmetric.rendezvous(shared, group=group)
    out = torch.empty_like(data)

    def eager():
        out.copy_(data)
        dist.all_reduce(out)
        return out

    def one_shot():
        shared.copy_(data)
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)

    def two_shot():
        shared.copy_(data)
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

    exact = data.double()
    dist.all_reduce(exact)
    return {}, {"eager": eager, "one_shot": one_shot, "two_shot": two_shot}, exact


CASES = {"ag_gemm": gathering, "gemm_rs": scattering, "gemm_ar": reducing, "all_reduce": summing}


def about(script):
    """Fields common to all results: repeats, hardware, versions and date."""
    return {"repeats": ROUNDS, "hardware": f"{dist.get_world_size()}x {torch.cuda.get_device_name()}",
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda,
                         "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
            "command": " ".join([script, *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%FT%TZ")}


def commit():
    """Commit of tandem: TANDEM_COMMIT, or the checkout's."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return os.environ.get("TANDEM_COMMIT", "")[:12] or found.stdout.strip()


def keep(path, results):
    """Writes rank 0's list of results so far."""
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


def run(timer, op, m, n, k):
    group = dist.group.WORLD.group_name
    alone, ways, exact = CASES[op](m, n, k, group)
    in_graph = op in ("gemm_ar", "all_reduce")
    right, missing = {}, {}
    for name, call in ways.items():
        try:
            worst = slowest([error(call()[:exact.shape[0]], exact)])[0]
            if not worst < 2e-2:
                raise RuntimeError(f"error {worst:.3g}")
            right[name] = graphed(call) if in_graph else call
        except Exception as why:  # an algorithm that this version lacks is omitted, by name
            missing[name] = str(why).splitlines()[0][:200]
    if in_graph:
        alone = {name: graphed(call) for name, call in alone.items()}
    times = timer.medians({**alone, **right})
    return {"op": op, "peer": f"torch {torch.__version__}", "ranks": dist.get_world_size(), "m": m,
            "n": n, "k": k, "dtype": "bf16", "time_us": {w: round(t, 2) for w, t in times.items()},
            "missing": missing, **about("torch_tp.py")}


def main():
    op, path, shapes = sys.argv[1], sys.argv[2], sys.argv[3:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])),
                            timeout=datetime.timedelta(seconds=60))
    if hasattr(symmetric, "enable_symm_mem_for_group"):
        symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    torch.manual_seed(1 + dist.get_rank())
    timer, results = Timer(), []
    for shape in shapes:
        results.append(run(timer, op, *map(int, shape.split("x"))))
        if dist.get_rank() == 0:
            print(op, shape, results[-1]["time_us"], results[-1]["missing"] or "", flush=True)
        keep(path, results)
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
