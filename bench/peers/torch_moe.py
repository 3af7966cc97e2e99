#!/usr/bin/env python3
"""torch_moe.py FILE MODEL:TOKENS...: a PyTorch Mixture-of-Experts layer, its experts spread over
all ranks, on the cases of `tandem bench moe --model MODEL --tokens TOKENS --ep RANKS`, for
torchrun. FILE receives a list of results.

Rows are sent to their experts by NCCL's all-to-all and sorted there; torch's grouped GEMM computes
both GEMMs, with SwiGLU between them; results return by all-to-all and are summed by weight. Row
counts are known in advance: this saves torch the copy to the host that a real layer waits for.
Routing is uniform; timing starts at the expert ids. Measured as in torch_tp.py. "both" is a forward and a backward
pass by autograd, with bf16 gradients of the weights."""
import datetime
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F

import torch_tp

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools"))
import moe_predict  # noqa: E402

# Experts, top-k, hidden features, features within an expert.
MODELS = {model: (*sizes, moe_predict.FFN[model]) for model, sizes in moe_predict.MODELS.items()}


class Layer:
    def __init__(self, model, tokens):
        self.experts, self.top_k, self.hidden, ffn = MODELS[model]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        local, local_experts = tokens // ranks, self.experts // ranks
        self.x = torch_tp.uniform(local, self.hidden)
        self.w_in = torch_tp.uniform(local_experts, self.hidden, 2 * ffn) * 0.02
        self.w_out = torch_tp.uniform(local_experts, ffn, self.hidden) * 0.02
        weights, chosen = torch.topk(F.softmax(torch.randn(local, self.experts, device="cuda"), -1), self.top_k)
        self.weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)
        self.dout = torch_tp.uniform(local, self.hidden)
        self.chosen = chosen.flatten()
        order = torch.argsort(self.chosen, stable=True)
        self.token, self.back = order // self.top_k, torch.argsort(order)
        counts = torch.bincount(self.chosen, minlength=self.experts)
        everywhere = torch.empty(ranks, self.experts, device="cuda", dtype=counts.dtype)
        dist.all_gather_into_tensor(everywhere, counts)
        here = everywhere[:, rank * local_experts:(rank + 1) * local_experts]
        self.sent, self.received = counts.view(ranks, local_experts).sum(1).tolist(), here.sum(1).tolist()
        expert = torch.cat([torch.repeat_interleave(torch.arange(local_experts, device="cuda"), row) for row in here])
        self.by_expert = torch.argsort(expert, stable=True)
        self.by_source = torch.argsort(self.by_expert)
        self.ends = torch.cumsum(here.sum(0), 0).to(torch.int32)
        self.arrived = torch.empty(sum(self.received), self.hidden, device="cuda", dtype=torch.bfloat16)
        self.returned = torch.empty(local * self.top_k, self.hidden, device="cuda", dtype=torch.bfloat16)

    def dispatch(self):
        dist.all_to_all_single(self.arrived, self.x[self.token], self.received, self.sent)
        return self.arrived[self.by_expert]

    def products(self, rows):
        gate, up = torch._grouped_mm(rows, self.w_in, offs=self.ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.w_out, offs=self.ends)

    def combine(self, rows):
        dist.all_to_all_single(self.returned, rows[self.by_source], self.sent, self.received)
        return (self.returned[self.back].view(-1, self.top_k, self.hidden) * self.weights[..., None]).sum(1)

    def whole(self):
        return self.combine(self.products(self.dispatch()))

    def both(self):
        """Gradients of x, w_in, w_out and the routing weights."""
        leaves = [t.detach().requires_grad_() for t in (self.x, self.w_in, self.w_out, self.weights)]
        x, w_in, w_out, weights = leaves
        exchange = collectives.all_to_all_single_autograd
        rows = exchange(x[self.token], self.received, self.sent, dist.group.WORLD)[self.by_expert]
        gate, up = torch._grouped_mm(rows, w_in, offs=self.ends).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, w_out, offs=self.ends)
        rows = exchange(rows[self.by_source], self.sent, self.received, dist.group.WORLD)
        out = (rows[self.back].view(-1, self.top_k, self.hidden) * weights[..., None]).sum(1)
        return torch.autograd.grad(out, leaves, self.dout)

    def error(self):
        """Error of some rows' results and gradients against f64; their experts' weights are on other ranks."""
        rank, ranks, rows = dist.get_rank(), dist.get_world_size(), 4
        local_experts, found = self.experts // ranks, (self.whole()[:rows], self.both()[0][:rows])
        worst = 0.0
        for source in range(ranks):
            x, dout = self.x[:rows].clone(), self.dout[:rows].clone()
            chosen, weights = self.chosen.view(-1, self.top_k)[:rows].clone(), self.weights[:rows].clone()
            for tensor in (x, dout, chosen, weights):
                dist.broadcast(tensor, source)
            exact = torch.zeros(2, rows, self.hidden, device="cuda", dtype=torch.float64)
            for row in range(rows):
                for i, expert in enumerate(chosen[row].tolist()):
                    if expert // local_experts == rank:
                        leaf, weight = x[row].double().requires_grad_(), weights[row, i].double()
                        gate, up = (leaf @ self.w_in[expert % local_experts].double()).chunk(2)
                        shard = (F.silu(gate) * up) @ self.w_out[expert % local_experts].double()
                        exact[0, row] += weight * shard.detach()
                        exact[1, row] += weight * torch.autograd.grad(shard, leaf, dout[row].double())[0]
            dist.all_reduce(exact)
            if source == rank:
                worst = max(torch_tp.error(*pair) for pair in zip(found, exact))
        return torch_tp.slowest([worst])[0]


def run(timer, model, tokens):
    layer = Layer(model, tokens)
    worst = layer.error()
    if not worst < 3e-2:
        sys.exit(f"{model}: {tokens} tokens: error {worst:.3g}")
    sorted_rows = layer.dispatch()
    results = layer.products(sorted_rows)
    inner = torch_tp.uniform(sorted_rows.shape[0], layer.w_out.shape[1])
    us = timer.medians({
        "dispatch": layer.dispatch, "compute": lambda: layer.products(sorted_rows),
        "gemm1": lambda: torch._grouped_mm(sorted_rows, layer.w_in, offs=layer.ends),
        "gemm2": lambda: torch._grouped_mm(inner, layer.w_out, offs=layer.ends),
        "combine": lambda: layer.combine(results), "total": layer.whole, "both": layer.both})
    ranks = dist.get_world_size()
    experts, top_k, hidden, ffn = MODELS[model]
    return {"op": "moe", "peer": f"torch {torch.__version__}", "ranks": ranks, "model": model, "experts": experts,
            "top_k": top_k, "hidden": hidden, "ffn": ffn, "ep": ranks, "tp": 1, "tokens": tokens,
            "rows_of_rank_0": sum(layer.received), "dtype": "bf16", "error": worst,
            "time_us": {name: round(t, 1) for name, t in us.items()}, **torch_tp.about("torch_moe.py")}


def main():
    path, cases = sys.argv[1], [case.split(":") for case in sys.argv[2:]]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])),
                            timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(1 + dist.get_rank())
    timer, results = torch_tp.Timer(), []
    for model, tokens in cases:
        results.append(run(timer, model, int(tokens)))
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(model, tokens, results[-1]["time_us"], flush=True)
        torch_tp.keep(path, results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
