"""PyTorch's fused operators with scaled fp8 operands, on tandem's e4m3 operators.

Values are codes times scales: one scale a tensor, or one per row of A and per column of B. The two
products of PyTorch that differ from tandem's in what they mean are refused: a bias of a
reduce-scatter, which PyTorch adds on every rank, and results that are fp8 themselves.
"""
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _api
from .._core import AgGemm, GemmRs
from .._errors import InvalidArgument
from . import _fused
from ._fused import Made, Options, Refused
from ._groups import Group

TENSOR, ROW = "tensor", "row"
RESULTS = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


def torch_form_of(kernel: Callable[..., Any], arguments: Sequence[Any], options: Any) -> Callable[[], Any]:
    """PyTorch's form of a call. It may run several times, and changes its list output_shape."""

    def form() -> Any:
        return kernel(*(list(each) if isinstance(each, list) else each for each in arguments), **options)

    return form


SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}  # c10::ScalarType


def _dtype_of(scalar_type: Any) -> Any:
    """The dispatcher passes lists of dtypes as numbers."""
    return SCALAR_TYPES.get(scalar_type, scalar_type)


def _aligned(scale: Tensor) -> Tensor:
    """Contiguous and, for GPUs, at a multiple of 16 bytes."""
    scale = scale.contiguous()
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()


def _require_codes(a: Tensor, bs: Sequence[Tensor], out_dtypes: Sequence[Optional[torch.dtype]],
                   result_scales: Sequence[Optional[Tensor]]) -> None:
    _fused._require_product(a, bs, (torch.float8_e4m3fn,))
    if any(scale is not None for scale in result_scales):
        raise Refused("a result_scale")
    for dtype in out_dtypes:
        if dtype not in RESULTS[a.device.type]:
            raise Refused(f"out_dtype {dtype}: expected {', '.join(map(str, RESULTS[a.device.type]))}")


def _refusal_of_weights(scaling: str, a: Tensor, bs: Sequence[Tensor], scales: Sequence[Tensor],
                        biases: Sequence[Optional[Tensor]], dtypes: Sequence[Optional[torch.dtype]]) -> str:
    """Reason this rank cannot run the product; empty if it can."""
    for b, scale, bias, dtype in zip(bs, scales, biases, dtypes):
        n = b.shape[1]
        if scale.dtype != torch.float32:
            return f"B_scale is {scale.dtype}: expected torch.float32"
        by_row = scale.dim() == 2 and scale.shape[0] == 1 and scale.numel() == n
        if not (by_row if scaling == ROW else scale.numel() == 1):
            expected = f"[1, {n}], as A has a scale per row" if scaling == ROW else "one element, as A has one"
            return f"B_scale {list(scale.shape)}: expected {expected}"
        if bias is not None and (bias.dtype != dtype or list(bias.shape) != [n]):
            return f"bias is {bias.dtype} {list(bias.shape)}: expected {dtype} [{n}]"
        for name, tensor in (("B_scale", scale), ("bias", bias)):
            if tensor is not None and tensor.device != a.device:
                return f"{name} is on {tensor.device} and A on {a.device}"
    return _fused._refusal_of_sizes(a, bs)


def _facts(scaling: str, b: Tensor, dtype: Optional[torch.dtype], bias: Optional[Tensor]) -> str:
    """Must be equal on all ranks."""
    return f"e4m3 with a scale per {scaling} to {dtype}{'' if bias is None else ' with a bias'}"


def _key_of_scaled(b: Tensor, *others: Any) -> Tuple[Any, ...]:
    """others: tensors, of which shape and dtype count, and dtypes."""
    rest = ((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each for each in others)
    return (tuple(b.shape), b.dtype, *rest)


def _by_columns(b: Tensor) -> Tensor:
    """B as the transpose of a contiguous [N, K], which it usually is."""
    return b if b.t().is_contiguous() else b.t().contiguous().t()


def _product(a: Tensor, b: Tensor, a_scale: Optional[Tensor], b_scale: Tensor, bias: Optional[Tensor],
             dtype: Optional[torch.dtype], fast: bool) -> Tensor:
    """PyTorch's product of one rank; on the CPU, where its kernel has no scales by row before 2.15, of the values."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, a_scale, b_scale, bias, None, dtype, fast)
    out = torch.mm(a.float(), b.float()) * a_scale * b_scale
    return (out if bias is None else out + bias).to(dtype)


class AllGatherScaledMatmul(_fused.Gathering):
    """(A gathered along gather_dim, [(A * A_scale) @ (B * B_scale) + bias for each B])."""

    op = "fused_all_gather_scaled_matmul"

    def __init__(self, options: Options, torch_form: Callable[[], Any], a: Tensor, bs: Sequence[Tensor],
                 a_scale: Tensor, b_scales: Sequence[Tensor], gather_dim: int, group_name: str,
                 biases: Sequence[Optional[Tensor]], result_scales: Sequence[Optional[Tensor]],
                 out_dtypes: Sequence[Any], use_fast_accum: Sequence[bool]) -> None:
        super().__init__(options, group_name, torch_form)
        self.tensor, self.bs, self.a_scale, self.b_scales, self.dim = a, bs, a_scale, b_scales, gather_dim
        self.biases, self.result_scales, self.fast = biases, result_scales, use_fast_accum
        self.out_dtypes = [_dtype_of(each) for each in out_dtypes]

    def key(self) -> Tuple[Any, ...]:
        a, each = self.tensor, zip(self.bs, self.b_scales, self.biases, self.result_scales, self.out_dtypes, self.fast)
        return (_fused._key_of(a), a.device, self.dim, _fused._key_of(self.a_scale), *(_key_of_scaled(*one) for one in each))

    def require(self) -> None:
        lists = (self.b_scales, self.biases, self.result_scales, self.out_dtypes, self.fast)
        if not self.bs or any(len(each) != len(self.bs) for each in lists):
            raise Refused(f"{len(self.bs)} B with {' + '.join(str(len(each)) for each in lists)} options")
        _fused._require_dim("gather_dim", self.dim, self.tensor)
        _require_codes(self.tensor, self.bs, self.out_dtypes, self.result_scales)

    def scale_rows(self, size: int) -> Optional[int]:
        """Rows of A that A_scale has a scale for: this rank's (1), those of all ranks (size), or
        None for one scale, in the order that PyTorch's kernels test them. Raises Refused."""
        a, scale = self.tensor, self.a_scale
        leading = list(a.shape[:-1])
        is_column = scale.dim() > 0 and scale.shape[-1] == 1
        if is_column and list(scale.shape[:-1]) == leading:
            return 1
        if scale.numel() == 1:
            return None
        leading[self.dim] *= size
        if is_column and list(scale.shape[:-1]) == leading:
            return size
        raise Refused(f"A_scale {list(scale.shape)} of A {list(a.shape)}: expected one element or one per row")

    def scaling(self, size: int) -> str:
        return TENSOR if self.scale_rows(size) is None else ROW

    def local_facts(self) -> Tuple[str, str]:
        first = self.first()
        try:
            scaling = self.scaling(_fused._group_named(self.group_name).size())
        except Refused as refused:
            return str(refused), ""
        if self.a_scale.dtype != torch.float32 or self.a_scale.device != self.tensor.device:
            return f"A_scale is {self.a_scale.dtype} on {self.a_scale.device}: expected torch.float32 beside A", ""
        return (_refusal_of_weights(scaling, self.tensor, self.bs, self.b_scales, self.biases, self.out_dtypes),
                f"{_facts(scaling, self.bs[first], self.out_dtypes[first], self.biases[first])}, B {first} first, "
                f"A_scale of {self.scale_rows(_fused._group_named(self.group_name).size())} x A's rows")

    def local_scale(self, group: Group) -> Tensor:
        """Scales of this rank's rows, or the one."""
        rows = self.scale_rows(group.size)
        if rows is None:
            return self.a_scale
        scales = _fused._rows(self.a_scale, self.dim)
        return scales if rows == 1 else scales.chunk(group.size)[group.comm.rank]

    def whole_scale(self, group: Group) -> Tensor:
        """Scales of the gathered rows, or the one; collective if they are divided among ranks."""
        rows = self.scale_rows(group.size)
        if rows is None:
            return self.a_scale
        scales = _fused._rows(self.a_scale, self.dim)
        return _api.all_gather(group.comm, _aligned(scales)) if rows == 1 else scales.contiguous()

    def make(self, group: Group) -> Made:
        a, first = self.tensor, self.first()
        k, n = self.bs[first].shape
        with group.lock:
            op = AgGemm(group.comm, a.numel() // k * group.size, n, k, a.dtype, bias=self.biases[first] is not None,
                        codec=self.options.codec, out_dtype=self.out_dtypes[first], scaling=self.scaling(group.size),
                        keep_gathered=True)

        def ours(call: "AllGatherScaledMatmul") -> Tuple[Tensor, List[Tensor]]:
            x, bs = call.tensor, call.bs
            with torch.no_grad(), group.lock:
                rows = _fused._rows(x, call.dim)
                bias = call.biases[first]
                product = op(rows, _by_columns(bs[first]).t(), bias=None if bias is None else bias.contiguous(), x_scale=_aligned(call.local_scale(group)),
                             weight_scale=_aligned(call.b_scales[first]))
                whole = op.gathered(rows)
                scale = call.whole_scale(group) if len(bs) > 1 else None
            products = [product if i == first else _product(whole, _by_columns(bs[i]), scale, call.b_scales[i], call.biases[i],
                                                            call.out_dtypes[i], call.fast[i]) for i in range(len(bs))]
            length = x.shape[call.dim] * group.size
            return (_fused._unflatten(whole, x, call.dim, length),
                    [_fused._unflatten(each, x, call.dim, length) for each in products])

        return Made(ours, [op.receipt])


class ScaledMatmulReduceScatter(_fused.Scattering):
    """This rank's part along orig_scatter_dim of the sum, or mean, over ranks of (A * A_scale) @
    (B * B_scale), viewed as output_shape. scatter_dim_after_maybe_reshape is the same dimension
    of A, of which PyTorch's kernel begins."""

    op = "fused_scaled_matmul_reduce_scatter"

    def __init__(self, options: Options, torch_form: Callable[[], Any], a: Tensor, b: Tensor, a_scale: Tensor,
                 b_scale: Tensor, reduce_op: str, orig_scatter_dim: int, scatter_dim_after_maybe_reshape: int,
                 group_name: str, output_shape: Optional[Sequence[int]], bias: Optional[Tensor] = None,
                 result_scale: Optional[Tensor] = None, out_dtype: Any = None, use_fast_accum: bool = False) -> None:
        super().__init__(options, group_name, torch_form)
        self.tensor, self.b, self.a_scale, self.b_scale, self.reduce_op = a, b, a_scale, b_scale, reduce_op
        self.dim, self.dim_of_a = orig_scatter_dim, scatter_dim_after_maybe_reshape
        self.output_shape = None if output_shape is None else tuple(output_shape)
        self.bias, self.result_scale, self.out_dtype, self.fast = bias, result_scale, _dtype_of(out_dtype), use_fast_accum

    def key(self) -> Tuple[Any, ...]:
        return (_fused._key_of(self.tensor), self.tensor.device, self.dim, self.dim_of_a, self.reduce_op, self.output_shape,
                _fused._key_of(self.a_scale), *_key_of_scaled(self.b, self.b_scale, self.bias, self.result_scale,
                                                             self.out_dtype, self.fast))

    def check(self, size: int) -> None:
        shape, dim = self.output_shape, self.dim
        if shape and 0 <= dim < len(shape) and shape[dim] % size:
            raise InvalidArgument(f"{self.op}: {shape[dim]} entries along orig_scatter_dim {dim}: expected a multiple "
                                  f"of the group's {size} ranks")

    def require(self) -> None:
        if self.reduce_op not in ("sum", "avg"):
            raise Refused(f"reduce_op {self.reduce_op}")
        if self.bias is not None:
            raise Refused("a bias, which PyTorch adds on every rank")
        _require_codes(self.tensor, [self.b], [self.out_dtype], [self.result_scale])
        shape, k = self.output_shape, self.tensor.shape[-1]
        if self.tensor.dim() < 2 or not shape or len(shape) < 2 or _rows_of(shape) * k != self.tensor.numel():
            raise Refused(f"output_shape {shape} of A {list(self.tensor.shape)}")
        if not 0 <= self.dim < len(shape) - 1:
            raise Refused(f"orig_scatter_dim {self.dim} of output_shape {list(shape)}: expected one of rows")

    def scaling(self) -> str:
        """Raises Refused."""
        if self.a_scale.numel() == 1:
            return TENSOR
        if list(self.a_scale.shape) == [*self.tensor.shape[:-1], 1]:
            return ROW
        raise Refused(f"A_scale {list(self.a_scale.shape)} of A {list(self.tensor.shape)}: expected one element or one "
                      "per row")

    def local_facts(self) -> Tuple[str, str]:
        try:
            scaling = self.scaling()
        except Refused as refused:
            return str(refused), ""
        if self.a_scale.dtype != torch.float32 or self.a_scale.device != self.tensor.device:
            return f"A_scale is {self.a_scale.dtype} on {self.a_scale.device}: expected torch.float32 beside A", ""
        return (_refusal_of_weights(scaling, self.tensor, [self.b], [self.b_scale], [None], [self.out_dtype]),
                _facts(scaling, self.b, self.out_dtype, None))

    def viewed(self, tensor: Tensor) -> Tensor:
        """A, or its scales by row, with the leading dimensions of the result."""
        assert self.output_shape is not None
        return tensor.reshape(*self.output_shape[:-1], tensor.shape[-1])

    def make(self, group: Group) -> Made:
        a, scaling = self.tensor, self.scaling()
        k, n = self.b.shape
        with group.lock:
            op = GemmRs(group.comm, a.numel() // k, n, k, a.dtype, codec=self.options.codec, out_dtype=self.out_dtype,
                        scaling=scaling)

        def ours(call: "ScaledMatmulReduceScatter") -> Tensor:
            x, dim = call.viewed(call.tensor), call.dim
            scale = _fused._rows(call.viewed(call.a_scale), dim) if scaling == ROW else call.a_scale
            with torch.no_grad(), group.lock:
                out = op(_fused._rows(x, dim), _by_columns(call.b).t(), x_scale=_aligned(scale), weight_scale=_aligned(call.b_scale))
            if call.reduce_op == "avg":
                out = out.div_(group.size)
            return _fused._unflatten(out, x, dim, x.shape[dim] // group.size).contiguous()

        return Made(ours, [op.receipt])


def _rows_of(output_shape: Sequence[int]) -> int:
    rows = 1
    for size in output_shape[:-1]:
        rows *= size
    return rows
