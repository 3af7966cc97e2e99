#!/usr/bin/env python3
"""megatron_gpt.py FILE (stock|tandem|no_collectives) [--layers N] [--seq S] [--batch B]: passes of a GPT under
Megatron-Core's local layer spec with tensor and sequence parallelism, for torchrun, stock or after
tandem.megatron.enable(). FILE is appended to: one run for each, since stock's overlap requires
CUDA_DEVICE_MAX_CONNECTIONS=1 and tandem's 32. The loss and the norms of gradients stand beside the
time for comparison. no_collectives: stock, whose gathers and scatters of rows are left out once the
loss is known, the time of a pass that hides them all."""
import argparse
import datetime
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
FORM = sys.argv[2] if len(sys.argv) > 2 else ""
import torch

if FORM == "tandem":
    import tandem.torch

    tandem.torch.enable()
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig
from torch_tp import about, commit, slowest

STEPS, VOCABULARY = 15, 8192


class Norm(torch.nn.RMSNorm):
    """RMSNorm of this rank's rows, where Megatron-Core uses Apex's."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True


def make_model(options):
    for module in (backends, gpt_layer_specs):
        module.LNImpl = module.WrappedTorchNorm = Norm
    transformer_block.LayerNormImpl = Norm
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=options.layers, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, normalization="RMSNorm", gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False)
    if FORM == "tandem":
        import tandem.megatron

        tandem.megatron.enable()
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, options.seq, position_embedding_type="rope")
    return model.cuda().bfloat16()


class Done:
    def wait(self):
        pass


def leave_out_collectives():
    """From now on the rows of other ranks are what the memory holds."""
    def nothing(output, *_, **__):
        return Done()

    for module in (layers, mappings):
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            if hasattr(module, name):
                setattr(module, name, nothing)
    dist.all_gather_into_tensor = dist.reduce_scatter_tensor = nothing


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("form", choices=["stock", "tandem", "no_collectives"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=datetime.timedelta(seconds=60))
    parallel_state.initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    model = make_model(options)
    tokens = torch.randint(0, VOCABULARY, (options.batch, options.seq), device="cuda")
    dist.broadcast(tokens, 0)
    positions = torch.arange(options.seq, device="cuda").expand(options.batch, -1)
    mask = torch.ones(1, 1, options.seq, options.seq, device="cuda").triu(1).bool()

    def passes():
        model.zero_grad(set_to_none=True)
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        return loss

    loss = passes().item()
    norms = [p.grad.float().norm().item() for p in model.parameters() if p.grad is not None]
    if FORM == "no_collectives":
        leave_out_collectives()
    times = []
    for repeat in range(4 + STEPS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        passes()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 4:
            times.append(begin.elapsed_time(end) * 1e3)
    step = statistics.median(slowest(times))
    result = {"op": "passes", "framework": "megatron-core", "form": FORM, "layers": options.layers, "seq": options.seq,
              "batch": options.batch, "tp": dist.get_world_size(), "dtype": "bf16", "time_us": {"step": round(step, 1)}, "loss": loss,
              "gradient_norms": norms, "commit": commit(), **about("bench/drop_in/megatron_gpt.py")}
    if FORM == "tandem":
        result["receipts"] = tandem.torch.report()
    if dist.get_rank() == 0:
        print(FORM, step, loss, sum(norms), flush=True)
        path = Path(options.file)
        before = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*before, result], indent=1) + "\n")
    dist.barrier()
    if FORM == "tandem":
        tandem.torch.disable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
