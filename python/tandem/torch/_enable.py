"""Registration of tandem's kernels for PyTorch's fused operators."""
import os
import warnings
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from .. import _core
from .._core import Wire
from .._errors import Unsupported
from . import _graphs, _receipts
from ._backend import OLDEST, is_new_enough

OPERATORS = {
    "fused_all_gather_matmul":
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
    "fused_all_gather_scaled_matmul":
        "(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim, str group_name, "
        "Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum) -> "
        "(Tensor, Tensor[])",
    "fused_matmul_reduce_scatter":
        "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
    "fused_scaled_matmul_reduce_scatter":
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op, int orig_scatter_dim, int "
        "scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape, Tensor? bias=None, Tensor? "
        "result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
}

_kernels: Optional[Any] = None  # torch.library.Library with tandem's kernels, while enabled
_options: Dict[Optional[str], Any] = {}  # by group name; None: of all others
_torch_forms: Dict[str, Dict[str, Callable[..., Any]]] = {}  # by dispatch key and operator, once enabled
_undo: List[Callable[[], None]] = []


def _require_torch() -> Any:
    """PyTorch's module of the operators. Raises Unsupported if this PyTorch has others."""
    version = torch.__version__
    if not is_new_enough():
        raise Unsupported(f"enable: PyTorch {version}: expected {OLDEST[0]}.{OLDEST[1]} or newer, which has "
                          "torch.ops.symm_mem's fused operators")
    import torch.distributed._symmetric_memory as symm_mem

    for name, expected in OPERATORS.items():
        operator = getattr(torch.ops.symm_mem, name, None)
        found = str(operator.default._schema).split(name, 1)[1] if operator else "none"
        if found != expected:
            raise Unsupported(f"enable: PyTorch {version} has {name}{found}: expected {expected}")
    return symm_mem


def _options_of(group_name: Optional[str]) -> Any:
    return _options.get(group_name, _options.get(None))


def _torch_form(symm_mem: Any, name: str, device: str) -> Callable[..., Any]:
    """PyTorch's form of an operator, a function of the operator's arguments: its kernel where the
    group has symmetric memory, else its decomposition into a collective and a product."""
    fallback: Callable[..., Any] = getattr(symm_mem, f"_{name}_fallback")
    if device != "CUDA":
        return fallback
    kernel: Callable[..., Any] = getattr(symm_mem, f"_{name}")
    is_enabled = symm_mem.is_symm_mem_enabled_for_group
    at = [part.split()[-1] for part in OPERATORS[name].split(") ->")[0].replace(" *,", "").split(", ")].index("group_name")

    def form(*arguments: Any, **options: Any) -> Any:
        return (kernel if is_enabled(arguments[at]) else fallback)(*arguments, **options)

    return form


def _kernels_for(device: str, symm_mem: Any) -> Dict[str, Callable[..., Any]]:
    """Kernels of a dispatch key."""
    from . import _fused, _scaled

    torchs = _torch_forms[device] = {name: _torch_form(symm_mem, name, device) for name in OPERATORS}

    def all_gather_matmul(A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *,
                          return_A: bool = True) -> Any:
        options = _options_of(group_name)
        torch_form = partial(torchs["fused_all_gather_matmul"], A, Bs, gather_dim, group_name, return_A=return_A)
        if options is None:
            return torch_form()
        return _fused.run(_fused.AllGatherMatmul(options, torch_form, A, Bs, gather_dim, group_name, return_A))

    def matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Any:
        options = _options_of(group_name)
        torch_form = partial(torchs["fused_matmul_reduce_scatter"], A, B, reduce_op, scatter_dim, group_name)
        if options is None:
            return torch_form()
        return _fused.run(_fused.MatmulReduceScatter(options, torch_form, A, B, reduce_op, scatter_dim, group_name))

    def scaled(name: str, call: Any, group_at: int) -> Callable[..., Any]:
        def kernel(*arguments: Any, **options_of_call: Any) -> Any:
            options = _options_of(arguments[group_at])
            torch_form = _scaled.torch_form_of(torchs[name], arguments, options_of_call)
            if options is None:
                return torch_form()
            return _fused.run(call(options, torch_form, *arguments, **options_of_call))

        return kernel

    gather, scatter = _scaled.AllGatherScaledMatmul, _scaled.ScaledMatmulReduceScatter
    return {"fused_all_gather_matmul": all_gather_matmul, "fused_matmul_reduce_scatter": matmul_reduce_scatter,
            gather.op: scaled(gather.op, gather, 5), scatter.op: scaled(scatter.op, scatter, 7)}


def _register(symm_mem: Any) -> Any:
    kernels = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*may also be overridden")
        for device in ("CPU", "CUDA"):
            for name, kernel in _kernels_for(device, symm_mem).items():
                kernels.impl(name, kernel, device, allow_override=True)
    return kernels


def _mm_with_dtype(A: Tensor, B: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(A.to(out_dtype), B.to(out_dtype))


def set_gpu_environment() -> None:
    """Sets variables that CUDA and NCCL read once, while they have not: those of CUDA only if it has
    not started. The user's are kept."""
    for name, value in _core._gpu_environment():
        if name.startswith("NCCL_") or not torch.cuda.is_initialized():
            os.environ[name] = value


def _complete_cpu() -> None:
    """Adds the CPU kernel of torch.mm(…, out_dtype=…), which callers of the operators use, where
    PyTorch has none."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", _mm_with_dtype, "CPU")
    _undo.append(library._destroy)


def _is_strict(group_name: Optional[str]) -> bool:
    options = _options_of(group_name)
    return options is not None and _receipts.is_strict(options.strict)


def _fuse_in_compiled_programs(symm_mem: Any) -> None:
    """Makes torch.compile put the operators into its graphs (its asynchronous tensor parallelism),
    for groups without symmetric memory too."""
    import torch._inductor.config as config

    before, is_enabled = config._micro_pipeline_tp, symm_mem.is_symm_mem_enabled_for_group
    config._micro_pipeline_tp = True
    symm_mem.is_symm_mem_enabled_for_group = lambda name: _options_of(name) is not None or is_enabled(name)

    def undo() -> None:
        config._micro_pipeline_tp = before
        symm_mem.is_symm_mem_enabled_for_group = is_enabled

    _undo.append(undo)
    _undo.append(_graphs.install(_graphs.Groups(
        symm_mem.is_symm_mem_enabled_for_group, _is_strict,
        lambda: sorted((str(name), _is_strict(name)) for name in _options))))


def enable(group: Any = None, *, codec: Any = None, strict: bool = False, compare: bool = True) -> None:
    """Runs PyTorch's fused operators on tandem: torch.ops.symm_mem.fused_all_gather_matmul,
    fused_matmul_reduce_scatter and their scaled forms, which TorchTitan's dist_gemm and vLLM call
    and torch.compile writes into graphs, for CPU and GPU tensors. Call it before the program
    compiles its model. Values keep their dtype; tandem's operators sum over ranks in rank order.

    group: a ProcessGroup, or its name, that these options are for; None: all groups without
    options. codec: wire format of rows and partial sums. strict: a call that would not overlap
    raises Unsupported, which says why, and torch.compile fails, quoting it, for a graph with a gather
    or scatter next to a product that it leaves alone, unless its passes were replaced since;
    TANDEM_STRICT=1 sets it for all, and for tandem's layers.

    At the first call of a shape, which is collective over the group, tandem's operators are made
    and compared with PyTorch's kernel: the faster one runs, unless `compare` is False or
    TANDEM_TUNE=0. What tandem cannot run, PyTorch's kernel does; `report` lists every case with its
    reason. The choice may differ between two runs, and with it the order of sums.

    Sets variables that CUDA and NCCL read once, for the whole program: NCCL_NVLS_ENABLE=0 and others
    (docs/guide/frameworks.md), unless the user has.

    Raises Unsupported for a PyTorch without these operators or with other ones, InvalidArgument for
    a group that is none.
    """
    global _kernels
    symm_mem = _require_torch()
    from . import _fused, _groups

    name = None if group is None else _groups.name_of(group)
    wire = codec if codec is None or isinstance(codec, Wire) else Wire(codec)
    options = _fused.Options(wire, strict, compare and _fused.may_measure())
    if _kernels is None:
        set_gpu_environment()
        _kernels = _register(symm_mem)
        _complete_cpu()
        _fuse_in_compiled_programs(symm_mem)
    _options[name] = options


def disable() -> None:
    """Ends `enable`: PyTorch's kernels run again, and the report is empty. Collective: closes the
    groups' connections."""
    global _kernels
    if _kernels is None:
        return
    from . import _fused, _groups

    _kernels._destroy()
    _kernels = None
    while _undo:
        _undo.pop()()
    _options.clear()
    _fused.clear_plans()
    _receipts.clear()
    _groups.close_all()
