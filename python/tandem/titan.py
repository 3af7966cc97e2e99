"""TorchTitan's dist_gemm linears on tandem: `enable()`, or `python -m tandem.titan [--keep-gathered] torchtitan.train …`.

`tandem.torch.enable` already gives their operators tandem's kernels. This module replaces two of their
autograd functions, whose backward pass gathers x a second time along its features: AllGatherLinear and
AllGatherLinearMulti keep x as it is, this rank's rows, and AgWgrad gathers them under the weight
gradient's GEMM, or with keep_gathered all of them. LinearReduceScatter gathers once for both gradients and stays TorchTitan's. Requires
TorchTitan 0.3.
"""
from .torch._titan import AllGatherLinear, AllGatherLinearMulti, disable, enable

__all__ = ["AllGatherLinear", "AllGatherLinearMulti", "disable", "enable"]

if __name__ == "__main__":
    import sys

    from .torch.__main__ import main

    keep = sys.argv[1:2] == ["--keep-gathered"]
    if keep:
        del sys.argv[1]
    enable(keep_gathered=keep)
    main()
