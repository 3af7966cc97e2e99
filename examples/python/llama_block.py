"""A Llama of Hugging Face's transformers whose linear layers are replaced by ones split over the
ranks, checked against the original: output, and the gradient of its input. Random weights, no
downloads.

    python3 examples/python/llama_block.py                  # two ranks, threads of this process
    mpirun -n 4 python3 examples/python/llama_block.py      # four, processes
"""
import copy
import os
import sys

import torch
from transformers import LlamaConfig, LlamaModel

import tandem
from tandem.torch import ColumnParallelLinear, RowParallelLinear

BATCH, LENGTH, HEADS = 2, 10, 8


def split(comm, model):
    """Splits heads and the MLP's width over the ranks; every rank has all tokens."""
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for block, columns, row in ((attention, ("q_proj", "k_proj", "v_proj"), "o_proj"),
                                    (mlp, ("gate_proj", "up_proj"), "down_proj")):
            for name in columns:
                setattr(block, name, ColumnParallelLinear.from_linear(
                    comm, getattr(block, name), sequence_parallel=False))
            setattr(block, row, RowParallelLinear.from_linear(
                comm, getattr(block, row), sequence_parallel=False))
        attention.num_heads //= comm.size
        attention.num_key_value_heads //= comm.size
        attention.hidden_size //= comm.size  # input width of o_proj
    return model


def run(model, x, dout):
    x = x.clone().requires_grad_()
    out = model(inputs_embeds=x).last_hidden_state
    out.backward(dout)
    return out.detach(), x.grad


def main():
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, attn_implementation="eager"))
    x, dout = torch.randn(2, BATCH, LENGTH, 64)
    expected = run(copy.deepcopy(model), x, dout)

    def body(comm):
        got = run(split(comm, copy.deepcopy(model)), x, dout)
        errors = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(got, expected)])
        output, gradient = tandem.all_reduce(comm, errors, "max").tolist()
        if comm.rank == 0:
            print(f"{comm.size} ranks, largest relative difference: output {output:.1e}, gradient {gradient:.1e}")
        return max(output, gradient) < 1e-4

    return 0 if all(tandem.run(int(os.environ.get("OMPI_COMM_WORLD_SIZE", "2")), body)) else 1


if __name__ == "__main__":
    sys.exit(main())
