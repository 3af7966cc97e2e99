"""Creates tensors in the framework of the caller's tensors. Imports no framework that the caller
has not imported."""
import sys
from typing import Any, Optional, Tuple

from ._errors import InvalidArgument


def _is_instance(x: Any, module: str, name: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name, ()))


def _is_on_gpu(x: Any) -> bool:
    """True if the JAX array x is on a GPU."""
    return all(device.platform != "cpu" for device in x.devices())


class Fresh:
    """New JAX array on a GPU that no other code has seen. Only such an array may be written, as JAX
    arrays are immutable. JAX owns its memory."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        """Exports in the first DLPack version, which has no read-only flag."""
        return self.array.block_until_ready().__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def empty(x: Any, shape: Tuple[int, ...], dtype: Optional[str], zeros: bool = True) -> Any:
    """New tensor like x of that shape, or of dtype 'f32' or 'u8', of PyTorch also 'bf16' or 'f16':
    then of zeros, if asked for. None if x has no framework. Raises InvalidArgument for a dtype that
    x's framework lacks."""
    if _is_instance(x, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if dtype:
            other = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "u8": torch.uint8}[dtype]
            return (torch.zeros if zeros else torch.empty)(shape, dtype=other, device=x.device)
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if dtype in ("bf16", "f16"):
        raise InvalidArgument(f"x: {type(x).__name__} for a result in {dtype}: expected a tensor of PyTorch, or out")
    if _is_instance(x, "cupy", "ndarray"):
        cupy = sys.modules["cupy"]
        with x.device:
            return cupy.zeros(shape, {"f32": "f4", "u8": "u1"}[dtype]) if dtype else cupy.empty(shape, x.dtype)
    if _is_instance(x, "jax", "Array") and _is_on_gpu(x):
        numbers = sys.modules["jax"].numpy
        other = {"f32": "float32", "u8": "uint8"}[dtype] if dtype else x.dtype
        return Fresh(numbers.zeros(shape, other, device=next(iter(x.devices()))))
    if _is_instance(x, "numpy", "ndarray") or _is_instance(x, "jax", "Array"):
        numpy = sys.modules["numpy"]
        return numpy.zeros(shape, {"f32": "f4", "u8": "u1"}[dtype]) if dtype else numpy.empty(shape, x.dtype)
    return None


def finish(x: Any, result: Any) -> Any:
    """Converts a result of `empty` or `writable` to the framework of x."""
    if isinstance(result, Fresh):
        return result.array
    if _is_instance(x, "jax", "Array"):
        return sys.modules["jax"].numpy.asarray(result)
    return result


def writable(x: Any) -> Any:
    """x, or a writable copy if its framework's arrays are immutable. Raises InvalidArgument if x
    has no memory."""
    if _is_instance(x, "jax", "Array"):
        if _is_instance(x, "jax.core", "Tracer"):
            raise InvalidArgument("x: a tracer of jax.jit, jax.grad or jax.vmap: expected an array, as outside of "
                                  "them or in jax.pure_callback")
        if x.is_deleted():
            raise InvalidArgument("x: an array of JAX that was deleted: expected one with memory")
        if _is_on_gpu(x):
            return Fresh(sys.modules["jax"].numpy.array(x, copy=True))
        return sys.modules["numpy"].array(x)
    return x


def enter(device: int, stream: int, sets_stream: bool, threads: bool) -> None:
    """Sets up the thread of a GPU rank: makes the GPU and, with `own`, the rank's stream current in
    the imported frameworks. If several ranks are threads, each runs its backward passes on its own
    thread: PyTorch has one backward thread per GPU, where one rank's pass would wait for the next
    rank's, queued after it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(device)
        if threads:
            torch.autograd.set_multithreading_enabled(False)
        if sets_stream:
            torch.cuda.set_stream(torch.cuda.ExternalStream(stream, device=device))
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.Device(device).use()
        if sets_stream:
            cupy.cuda.ExternalStream(stream, device).use()
