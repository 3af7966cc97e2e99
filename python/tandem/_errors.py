"""Exceptions of tandem. Every message is one line with the object, its value and the expected
value."""


class Error(Exception):
    """Base class of all exceptions raised by tandem."""


class InvalidArgument(Error, ValueError):
    """Invalid shape, dtype, device, stride, rank or option; a closed world; a dead tensor."""


class Mismatch(InvalidArgument):
    """Ranks called one collective with different arguments. Raised on every rank."""


class IoError(Error):
    """The system denied memory or a file."""


class Unsupported(Error):
    """The request is not supported by this build or this machine."""


class Timeout(Error, TimeoutError):
    """A wait passed its deadline.

    op: the operation that waited; rank: the waiting rank; peer: the rank waited for (-1: no
    specific one); tile: the tile waited for (-1: none); epoch: the epoch waited for.
    """

    op: str = ""
    rank: int = -1
    peer: int = -1
    tile: int = -1
    epoch: int = 0


class Aborted(Error):
    """Another rank failed or timed out; origin is that rank (-1: unknown)."""

    origin: int = -1


class DeviceError(Error):
    """A call of CUDA, cuBLASLt or NCCL failed."""
