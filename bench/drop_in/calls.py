#!/usr/bin/env python3
"""calls.py FILE [--fp8] [MODEL…]: PyTorch's fused operators of a layer (torch.ops.symm_mem) with
PyTorch's kernels and with tandem's, for torchrun on GPUs. MODEL: llama-8b or llama-70b. FILE
receives a list of results. --fp8: the scaled operators instead, of e4m3 with scales by row.

Forms: `eager` is NCCL and torch.mm in sequence; `torch` is PyTorch's kernel; `tandem` is what
tandem.torch.enable() runs, PyTorch's kernel included where it is faster, and `ours` always
tandem's. time_us is measured as by bench/peers/torch_tp.py (host time hidden, L2 cache flushed,
slowest rank, medians); called_us is the time of a call when the GPU is idle, host time included;
host_us is what a call costs the host. Every form is checked against a product in f64."""
import datetime
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch_tp import Timer, about, commit, error, keep, slowest, uniform

import tandem.torch

MODELS = {"llama-8b": {"hidden": 4096, "qkv": 6144, "ffn": 14336}, "llama-70b": {"hidden": 8192, "qkv": 10240, "ffn": 28672}}
TOKENS = [16, 64, 256, 1024, 2048, 4096, 8192, 16384]
CALLS = 20


def cases(model, fp8):
    """name, operator, n over all ranks, k: forward products; of bf16 also those of backward passes."""
    h, qkv, ffn = MODELS[model].values()
    yield "qkv", "gather", [qkv], h
    yield "gate_up", "gather", [ffn, ffn], h
    yield "out", "scatter", h, h
    yield "down", "scatter", h, ffn
    if fp8:
        return
    yield "qkv dx", "scatter_kn", h, qkv
    yield "down dx", "gather_kn", [ffn], h


def gathering(m, widths, k, group, is_kn):
    world = dist.get_world_size()
    x = uniform(m // world, k)
    weights = [uniform(k, n // world) if is_kn else uniform(n // world, k).t() for n in widths]
    whole = torch.empty(m, k, device="cuda", dtype=x.dtype)

    def eager():
        dist.all_gather_into_tensor(whole, x)
        return whole, [torch.mm(whole, w) for w in weights]

    eager()
    exact = [(whole[-32:].double() @ w.double()) for w in weights]

    def wrong(result):
        gathered, outs = result
        return max([error(gathered[-32:], whole[-32:].double())] + [error(o[-32:], e) for o, e in zip(outs, exact)])

    def call(kernel):
        return lambda name=group: kernel(x, weights, 0, name)

    return eager, call(symm_mem._fused_all_gather_matmul), call(torch.ops.symm_mem.fused_all_gather_matmul), wrong


def scattering(m, n, k, group, is_kn):
    world = dist.get_world_size()
    x, weight = uniform(m, k // world), uniform(k // world, n) if is_kn else uniform(n, k // world).t()
    out = torch.empty(m // world, n, device="cuda", dtype=x.dtype)

    def eager():
        dist.reduce_scatter_tensor(out, torch.mm(x, weight))
        return out

    rows = m // world
    count = min(rows, 32)
    partial = torch.stack([x[r * rows:r * rows + count].double() @ weight.double() for r in range(world)])
    dist.all_reduce(partial)
    exact = partial[dist.get_rank()]

    def call(kernel):
        return lambda name=group: kernel(x, weight, "sum", 0, name)

    return (eager, call(symm_mem._fused_matmul_reduce_scatter), call(torch.ops.symm_mem.fused_matmul_reduce_scatter),
            lambda result: error(result[:count], exact))


def quantized(values):
    """e4m3 codes of the rows and their scales [rows, 1]."""
    scale = values.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


def decoded(codes, scale):
    return codes.double() * scale.double()


def gathering_fp8(m, widths, k, group):
    world, bf16 = dist.get_world_size(), torch.bfloat16
    x, scale = quantized(uniform(m // world, k))
    stored = [quantized(uniform(n // world, k)) for n in widths]
    weights, scales = [w.t() for w, _ in stored], [s.t().contiguous() for _, s in stored]
    whole, whole_scale = torch.empty(m, k, device="cuda", dtype=x.dtype), torch.empty(m, 1, device="cuda")

    def eager():
        dist.all_gather_into_tensor(whole.view(torch.uint8), x.view(torch.uint8))
        dist.all_gather_into_tensor(whole_scale, scale)
        return whole, [torch._scaled_mm(whole, w, whole_scale, s, out_dtype=bf16) for w, s in zip(weights, scales)]

    eager()
    exact = [decoded(whole[-32:], whole_scale[-32:]) @ decoded(w, s) for w, s in zip(weights, scales)]
    codes = whole[-32:].double()

    def wrong(result):
        gathered, outs = result
        return max([error(gathered[-32:], codes)] + [error(o[-32:], e) for o, e in zip(outs, exact)])

    def call(kernel):
        count = len(weights)
        return lambda name=group: kernel(x, weights, scale, scales, 0, name, [None] * count, [None] * count, [bf16] * count,
                                         [False] * count)

    name = "fused_all_gather_scaled_matmul"
    return eager, call(getattr(symm_mem, f"_{name}")), call(getattr(torch.ops.symm_mem, name)), wrong


def scattering_fp8(m, n, k, group):
    world, bf16 = dist.get_world_size(), torch.bfloat16
    x, scale = quantized(uniform(m, k // world))
    stored, weight_scale = quantized(uniform(n, k // world))
    weight, weight_scale = stored.t(), weight_scale.t().contiguous()
    out = torch.empty(m // world, n, device="cuda", dtype=bf16)

    def eager():
        dist.reduce_scatter_tensor(out, torch._scaled_mm(x, weight, scale, weight_scale, out_dtype=bf16))
        return out

    rows = m // world
    count = min(rows, 32)
    of_weight = decoded(weight, weight_scale)
    partial = torch.stack([decoded(x[at:at + count], scale[at:at + count]) @ of_weight for at in range(0, m, rows)])
    dist.all_reduce(partial)
    exact = partial[dist.get_rank()]

    def call(kernel):
        # PyTorch's kernel changes the list of the result's shape.
        return lambda name=group: kernel(x, weight, scale, weight_scale, "sum", 0, 0, name, [m, n], out_dtype=bf16)

    name = "fused_scaled_matmul_reduce_scatter"
    return (eager, call(getattr(symm_mem, f"_{name}")), call(getattr(torch.ops.symm_mem, name)),
            lambda result: error(result[:count], exact))


def medians(forms, once, rounds=15):
    draw, names = random.Random(2), list(forms)
    times = {name: [] for name in names}
    for repeat in range(3 + rounds):
        draw.shuffle(names)
        for name in names:
            us = once(forms[name])
            if repeat >= 3:
                times[name].append(us)
    return {name: statistics.median(slowest(us)) for name, us in times.items()}


def called_us(call):
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def host_us(call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    us = (time.perf_counter() - begin) * 1e6 / CALLS
    torch.cuda.synchronize()
    return us


def measure(timer, model, name, op, n, k, m, groups, fp8):
    if fp8:
        made = (scattering_fp8 if op == "scatter" else gathering_fp8)(m, n, k, groups[0])
    else:
        made = (scattering if "scatter" in op else gathering)(m, n, k, groups[0], op.endswith("_kn"))
    eager, torchs, fused, wrong = made
    forms = {"eager": eager, "torch": torchs, "tandem": fused, "ours": lambda: fused(groups[1])}
    worst, refused = {}, {}
    for form, call in list(forms.items()):
        try:
            got = call()
        except RuntimeError as said:  # PyTorch's kernel, of a shape or scaling: on all ranks
            if form != "torch":
                raise
            refused[form] = str(said).split("\n")[0]
            del forms[form]
            continue
        worst[form] = slowest([wrong(got)])[0]
    assert max(worst.values()) < 2e-2, worst
    small = m <= 1024
    result = {"op": op, "model": model, "product": name, "ranks": dist.get_world_size(), "m": m, "n": n, "k": k,
              "dtype": "e4m3, a scale per row" if fp8 else "bf16", "time_us": timer.medians(forms),
              "called_us": medians(forms, called_us), "host_us": medians(forms, host_us, 5) if small else None,
              "error": worst, "refused": refused, "commit": commit(), **about("bench/drop_in/calls.py")}
    for field in ("time_us", "called_us", "host_us"):
        if result[field]:
            result[field] = {form: round(us, 2) for form, us in result[field].items()}
    return result


def main():
    fp8 = "--fp8" in sys.argv
    path, *models = [each for each in sys.argv[1:] if each != "--fp8"]
    models = models or list(MODELS)
    local = int(os.environ["LOCAL_RANK"])
    tandem.torch.enable()  # before CUDA starts, as it sets variables that CUDA reads once
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=datetime.timedelta(seconds=60))
    always = dist.new_group(device_id=torch.device("cuda", local))
    tandem.torch.enable(always, compare=False)
    groups = dist.group.WORLD.group_name, always.group_name
    torch.manual_seed(1 + dist.get_rank())
    timer, results = Timer(), []
    for model in models:
        for name, op, n, k in cases(model, fp8):
            for m in TOKENS:
                results.append(measure(timer, model, name, op, n, k, m, groups, fp8))
                if dist.get_rank() == 0:
                    print(model, name, m, results[-1]["time_us"], results[-1]["called_us"], flush=True)
                keep(path, results)
    if dist.get_rank() == 0:
        results.append({"receipts": tandem.torch.report()})
    keep(path, results)
    dist.barrier()
    tandem.torch.disable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
