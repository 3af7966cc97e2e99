"""PyTorch programs on tandem's operators.

`enable()` gives PyTorch's fused operators (torch.ops.symm_mem, which TorchTitan, torch.compile and
vLLM call) tandem's kernels, on CPU and GPU ranks; `report()` returns what ran. `python -m
tandem.torch PROGRAM …` runs a program so without a change to it.

`torch.distributed.init_process_group("tandem")`: torch.distributed's CPU and CUDA tensors on
tandem's collectives.

Layers: tensor-parallel linears and mixtures of experts with gradients. Rows of x are tokens: [...,
features] is treated as [tokens, features]. With sequence parallelism (the default) each rank holds
the tokens of shard_of(tokens, size, rank) outside the layers and all tokens inside; without, every
rank holds all of them. Layers are collective: all ranks construct and call them in the same order,
in the forward and in the backward pass.
"""
from ._attention import CrossAttention, context_attention, cross_attention
from ._layers import (
    ColumnParallelLinear,
    Moe,
    RowParallelLinear,
    call,
    gather_rows,
    mark_sequence_parallel,
    moe,
    sum_sequence_parallel_gradients,
)
from ._backend import GroupOptions, bytes_sent
from ._enable import disable, enable
from ._receipts import report

__all__ = ["ColumnParallelLinear", "CrossAttention", "GroupOptions", "Moe", "RowParallelLinear", "bytes_sent", "call",
           "context_attention", "cross_attention", "disable", "enable", "gather_rows", "mark_sequence_parallel", "moe",
           "report", "sum_sequence_parallel_gradients"]
