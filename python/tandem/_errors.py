"""What tandem raises. Every message is one line that names the thing, its value and what was
expected."""


class Error(Exception):
    """Base of everything that tandem raises."""


class InvalidArgument(Error, ValueError):
    """A wrong shape, dtype, device, stride, rank or option; a closed world; a dead tensor."""


class Mismatch(InvalidArgument):
    """Ranks called one collective with different arguments. Raised on every rank."""


class IoError(Error):
    """Memory or a file that the system does not give."""


class Unsupported(Error):
    """What was asked for is not in this build, or not possible on this machine."""


class Timeout(Error, TimeoutError):
    """A wait passed its deadline.

    op: what waited; rank: who waited; peer: the rank waited for (-1: none in particular);
    tile: the tile waited for (-1: none); epoch: the epoch awaited.
    """

    op: str = ""
    rank: int = -1
    peer: int = -1
    tile: int = -1
    epoch: int = 0


class Aborted(Error):
    """Another rank failed or gave up; origin is that rank (-1: unknown)."""

    origin: int = -1


class DeviceError(Error):
    """A call of CUDA, cuBLASLt or NCCL that failed."""
