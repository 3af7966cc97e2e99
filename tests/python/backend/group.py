"""Process group of backend "tandem" for tests under launch.sh (tests/comm/processes)."""
import os
import tempfile

import torch
import torch.distributed as dist

import tandem.torch

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with open(f"/proc/{os.getppid()}/stat") as file:  # the launcher's, whose number another one may have had
    STARTED = file.read().rsplit(")", 1)[1].split()[19]
FOLDER = os.path.join(os.environ.get("TANDEM_CACHE_DIR", tempfile.gettempdir()),
                      f"backend-{os.environ['TORCHELASTIC_RUN_ID']}-{STARTED}")


def start(backend="tandem", **options):
    """Initializes the default group over a file."""
    os.makedirs(FOLDER, exist_ok=True)
    dist.init_process_group(backend, init_method=f"file://{FOLDER}/store", rank=RANK, world_size=SIZE, **options)


def values(rank, shape, dtype, seed=0):
    """Inputs of `rank`, which every rank can compute. Small integers, so that sums are exact in all dtypes."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -4
    found = torch.randint(low, 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(found.double(), found.double().flip(-1) if found.dim() else found.double()).to(dtype)
    return found.to(dtype)


def spread(x):
    """The same values with gaps in memory."""
    gaps = torch.empty(*x.shape, 3, dtype=x.dtype)
    gaps[..., 1] = x
    return gaps[..., 1]
