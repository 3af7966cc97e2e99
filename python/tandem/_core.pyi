from enum import Enum
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar, Union, overload

__version__: str
__isa__: str

# Any tensor of NumPy, PyTorch, CuPy or JAX, or another object with DLPack or a buffer.
Array = TypeVar("Array")

class DType(Enum):
    f32 = 0
    bf16 = 1
    f16 = 2
    i32 = 3
    u8 = 4
    e4m3 = 5

DTypeLike = Union[DType, str, Any]

class Wire:
    def __init__(self, text: str) -> None: ...
    @property
    def group(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...
    @property
    def error_bound(self) -> float: ...
    def bytes(self, elements: int, dtype: DTypeLike = "f32") -> int: ...
    def bits_per_element(self, dtype: DTypeLike = "f32") -> float: ...
    def encode(self, x: Array, out: Optional[Array] = None) -> Array: ...
    def decode(self, message: Any, out: Array) -> Array: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

CodecLike = Union[Wire, str, None]

class Comm:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def transport(self) -> str: ...
    @property
    def link(self) -> str: ...
    deadline: float
    @property
    def bytes_sent(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def stream(self) -> Optional[int]: ...
    @property
    def _shares_gpu(self) -> bool: ...
    def synchronize(self) -> None: ...
    def _of_rank_0(self, number: int) -> int: ...
    def _exchange(self, local: bytes) -> Sequence[bytes]: ...
    def barrier(self, what: str = "barrier") -> None: ...
    def split(self, color: int, key: Optional[int] = None) -> Comm: ...
    def abort(self, reason: str) -> None: ...
    @staticmethod
    def _at(address: int) -> Optional[Comm]: ...

class _Operator:
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def comm(self) -> Comm: ...
    @property
    def strategy(self) -> str: ...
    @property
    def receipt(self) -> Dict[str, Any]: ...
    @property
    def _operands(self) -> Sequence[Tuple[str, int, int]]: ...
    @staticmethod
    def _at(address: int) -> Optional[Any]: ...
    def _repeat(self, x: Any, weight: Any, out: Any, count: int) -> float: ...

class AgGemm(_Operator):
    def __init__(
        self,
        comm: Comm,
        m: int,
        n: int,
        k: int,
        dtype: DTypeLike = "f32",
        *,
        bias: bool = False,
        weight_kn: bool = False,
        strategy: str = "automatic",
        chunks: int = 0,
        codec: CodecLike = None,
        allow_uncompressed: bool = False,
        strict: bool = False,
        out_dtype: Optional[DTypeLike] = None,
        scaling: str = "tensor",
        keep_gathered: bool = False,
    ) -> None: ...
    def __call__(
        self,
        x: Array,
        weight: Any,
        out: Optional[Array] = None,
        bias: Optional[Any] = None,
        *,
        x_scale: Optional[Any] = None,
        weight_scale: Optional[Any] = None,
    ) -> Array: ...
    def gathered(self, like: Array, out: Optional[Array] = None, *, local: bool = True) -> Array: ...

class GemmRs(_Operator):
    def __init__(
        self,
        comm: Comm,
        m: int,
        n: int,
        k: int,
        dtype: DTypeLike = "f32",
        *,
        bias: bool = False,
        weight_kn: bool = False,
        strategy: str = "automatic",
        chunks: int = 0,
        codec: CodecLike = None,
        allow_uncompressed: bool = False,
        strict: bool = False,
        out_dtype: Optional[DTypeLike] = None,
        scaling: str = "tensor",
    ) -> None: ...
    def __call__(
        self,
        x: Array,
        weight: Any,
        out: Optional[Array] = None,
        bias: Optional[Any] = None,
        *,
        x_scale: Optional[Any] = None,
        weight_scale: Optional[Any] = None,
    ) -> Array: ...

class GemmAr(_Operator):
    def __init__(
        self,
        comm: Comm,
        m: int,
        n: int,
        k: int,
        dtype: DTypeLike = "f32",
        *,
        bias: bool = False,
        weight_kn: bool = False,
        strategy: str = "automatic",
        chunks: int = 0,
        codec: CodecLike = None,
        allow_uncompressed: bool = False,
        strict: bool = False,
        out_dtype: Optional[DTypeLike] = None,
        scaling: str = "tensor",
        add_norm: bool = False,
    ) -> None: ...
    @overload
    def __call__(
        self,
        x: Array,
        weight: Any,
        out: Optional[Array] = None,
        bias: Optional[Any] = None,
        *,
        x_scale: Optional[Any] = None,
        weight_scale: Optional[Any] = None,
    ) -> Array: ...
    @overload
    def __call__(
        self,
        x: Array,
        weight: Any,
        out: Optional[Array] = None,
        bias: Optional[Any] = None,
        *,
        x_scale: Optional[Any] = None,
        weight_scale: Optional[Any] = None,
        residual: Any,
        gain: Any,
        hidden: Optional[Array] = None,
        eps: float = 1e-5,
    ) -> Tuple[Array, Array]: ...

class AgWgrad(_Operator):
    def __init__(
        self,
        comm: Comm,
        m: int,
        n: int,
        k: int,
        dtype: DTypeLike = "f32",
        *,
        bias: bool = False,
        weight_kn: bool = False,
        strategy: str = "automatic",
        chunks: int = 0,
        codec: CodecLike = None,
        allow_uncompressed: bool = False,
        strict: bool = False,
    ) -> None: ...
    def __call__(self, x: Array, dy: Any, out: Optional[Array] = None) -> Array: ...

class MoeBatch:
    @property
    def bytes(self) -> int: ...
    @property
    def rows_of_experts(self) -> list[int]: ...

class MoeLayer:
    def __init__(
        self,
        comm: Comm,
        tokens: int,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int = 1,
        tp: int = 1,
        dtype: DTypeLike = "f32",
        *,
        strategy: str = "automatic",
        chunks: int = 0,
        codec: CodecLike = None,
        combine_codec: CodecLike = None,
        allow_uncompressed: bool = False,
        backward: bool = False,
        save: str = "sorted",
        strict: bool = False,
    ) -> None: ...
    @property
    def comm(self) -> Comm: ...
    @property
    def tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def dispatch_strategy(self) -> str: ...
    @property
    def combine_strategy(self) -> str: ...
    @property
    def receipts(self) -> List[Dict[str, Any]]: ...
    def dropped_routings(self) -> int: ...
    @staticmethod
    def _at(address: int) -> Optional[MoeLayer]: ...
    def forward(
        self,
        x: Array,
        experts: Any,
        weights: Any,
        w_in: Any,
        w_out: Any,
        out: Optional[Array] = None,
    ) -> Tuple[Array, MoeBatch]: ...
    def backward(
        self,
        batch: MoeBatch,
        dout: Array,
        w_in: Any,
        w_out: Any,
        dw_in: Optional[Array] = None,
        dw_out: Optional[Array] = None,
        dx: Optional[Array] = None,
        dweights: Optional[Array] = None,
    ) -> Tuple[Array, Array, Array, Array]: ...

_Chunks = Tuple[Tuple[int, int], Tuple[int, int]]

class ContextAttention:
    def __init__(
        self,
        comm: Comm,
        seq: int,
        heads: int,
        head_dim: int,
        dtype: DTypeLike = "f32",
        *,
        kv_heads: int = 0,
        keys: int = 0,
        batch: int = 1,
        causal: bool = True,
        window: int = 0,
        rope_theta: float = 0.0,
        contiguous: bool = False,
        strategy: str = "automatic",
        form: str = "",
        backward: bool = True,
        strict: bool = False,
    ) -> None: ...
    @property
    def comm(self) -> Comm: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def forward_form(self) -> str: ...
    @property
    def backward_form(self) -> str: ...
    @property
    def forward_bytes(self) -> int: ...
    @property
    def backward_bytes(self) -> int: ...
    @property
    def receipts(self) -> List[Dict[str, Any]]: ...
    @property
    def seq(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def query_chunks(self) -> _Chunks: ...
    @property
    def key_chunks(self) -> _Chunks: ...
    def forward(
        self,
        q: Array,
        k: Any,
        v: Any,
        document_starts: Optional[Any] = None,
        out: Optional[Array] = None,
        log_sums: Optional[Array] = None,
    ) -> Tuple[Array, Array]: ...
    def backward(
        self,
        q: Array,
        k: Any,
        v: Any,
        out: Any,
        log_sums: Any,
        dout: Any,
        document_starts: Optional[Any] = None,
        dq: Optional[Array] = None,
        dk: Optional[Array] = None,
        dv: Optional[Array] = None,
    ) -> Tuple[Array, Array, Array]: ...

class CrossAttentionBatch:
    @property
    def bytes(self) -> int: ...

class CrossAttention:
    def __init__(
        self,
        comm: Comm,
        text: int,
        visual: int,
        hidden: int,
        features: int,
        heads: int,
        head_dim: int,
        dtype: DTypeLike = "f32",
        *,
        kv_heads: int = 0,
        batch: int = 1,
        gate: bool = False,
        strategy: str = "automatic",
        form: str = "",
        backward: bool = True,
        strict: bool = False,
    ) -> None: ...
    @property
    def comm(self) -> Comm: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def forward_form(self) -> str: ...
    @property
    def backward_form(self) -> str: ...
    @property
    def forward_bytes(self) -> int: ...
    @property
    def backward_bytes(self) -> int: ...
    @property
    def receipts(self) -> List[Dict[str, Any]]: ...
    @property
    def text(self) -> int: ...
    @property
    def visual(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def gate(self) -> bool: ...
    def forward(
        self,
        x: Array,
        visual: Any,
        w_q: Any,
        w_k: Any,
        w_v: Any,
        w_out: Any,
        gate: Optional[Any] = None,
        out: Optional[Array] = None,
    ) -> Tuple[Array, CrossAttentionBatch]: ...
    def backward(
        self,
        batch: CrossAttentionBatch,
        dout: Array,
        x: Any,
        visual: Any,
        w_q: Any,
        w_k: Any,
        w_v: Any,
        w_out: Any,
        gate: Optional[Any] = None,
        *,
        visual_gradient: bool = True,
    ) -> Tuple[Array, Optional[Array], Array, Array, Array, Array, Optional[Array]]: ...

class _Collective:
    @property
    def comm(self) -> Comm: ...
    @property
    def shape(self) -> Tuple[int, ...]: ...
    @property
    def result_shape(self) -> Tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...

class AllReduce(_Collective):
    def __init__(
        self,
        comm: Comm,
        shape: Sequence[int],
        dtype: DTypeLike = "f32",
        *,
        op: str = "sum",
        codec: CodecLike = None,
    ) -> None: ...
    def __call__(self, x: Array, residual: Any = None) -> Array: ...

class AllGather(_Collective):
    def __init__(
        self,
        comm: Comm,
        shape: Sequence[int],
        dtype: DTypeLike = "f32",
        *,
        codec: CodecLike = None,
    ) -> None: ...
    def __call__(self, x: Array, out: Optional[Array] = None) -> Array: ...

class ReduceScatter(_Collective):
    def __init__(
        self,
        comm: Comm,
        shape: Sequence[int],
        dtype: DTypeLike = "f32",
        *,
        op: str = "sum",
        codec: CodecLike = None,
    ) -> None: ...
    def __call__(
        self, x: Array, out: Optional[Array] = None, *, residual: Any = None
    ) -> Array: ...

class AllToAll(_Collective):
    def __init__(
        self,
        comm: Comm,
        shape: Sequence[int],
        dtype: DTypeLike = "f32",
        send_counts: Optional[Sequence[int]] = None,
        *,
        codec: CodecLike = None,
    ) -> None: ...
    @property
    def recv_counts(self) -> list[int]: ...
    def __call__(self, x: Array, out: Optional[Array] = None) -> Array: ...

def all_gather(
    comm: Comm, x: Array, out: Optional[Array] = None, *, codec: CodecLike = None
) -> Array: ...
def reduce_scatter(
    comm: Comm,
    x: Array,
    op: str = "sum",
    out: Optional[Array] = None,
    *,
    codec: CodecLike = None,
    residual: Any = None,
) -> Array: ...
def all_to_all(
    comm: Comm,
    x: Array,
    send_counts: Optional[Sequence[int]] = None,
    recv_counts: Optional[Sequence[int]] = None,
    out: Optional[Array] = None,
    *,
    codec: CodecLike = None,
) -> Array: ...
def send(comm: Comm, x: Any, peer: int) -> None: ...
def recv(comm: Comm, x: Array, peer: int) -> Array: ...
def context_chunks(
    positions: int, ranks: int, rank: int, contiguous: bool = False
) -> _Chunks: ...
def receipts() -> List[Dict[str, Any]]: ...
def shard_of(total: int, world: int, rank: int) -> Tuple[int, int]: ...
def _backend_table() -> Any: ...
def _address(x: Any) -> int: ...
def _all_reduce(
    comm: Comm, x: Array, op: str, codec: CodecLike = None, residual: Any = None
) -> Array: ...
def _broadcast(comm: Comm, x: Array, root: int) -> Array: ...

class _World:
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def closed(self) -> bool: ...
    def comm(self, rank: Optional[int] = None) -> Comm: ...
    def abort(self, reason: str, rank: Optional[int] = None) -> None: ...
    def close(self) -> None: ...

def _threads(
    ranks: int, link: Optional[str] = None, deadline: Optional[float] = None
) -> _World: ...
def _launched(deadline: Optional[float] = None) -> _World: ...
def _adopted(communicator: int, deadline: Optional[float] = None) -> _World: ...
def _connected(rank: int, size: int, gather: Callable[[bytes], bytes], stream: Optional[int] = None,
               deadline: Optional[float] = None) -> _World: ...
def _on_gpus(
    ranks: int, ranks_per_gpu: int, link: Optional[str], deadline: Optional[float], body: Callable[[Comm], None]
) -> None: ...
def _gpu_count() -> int: ...
def _gpu_environment() -> Sequence[Tuple[str, str]]: ...
def _is_launched() -> bool: ...
def _share_processors(ranks: int) -> None: ...
def _kernel_threads() -> int: ...
def _set_kernel_threads(threads: int) -> None: ...
