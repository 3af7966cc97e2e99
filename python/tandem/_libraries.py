"""Loads the CUDA libraries that a build with CUDA links and tandem's wheels do not contain: the
system's, or those of the packages that PyTorch's wheels depend on."""
import ctypes
import importlib.util
import pathlib
import re
from typing import Callable, Dict, Optional, Tuple

# Keyed by the name that the loader looks for: the package, and its folders under
# site-packages/nvidia.
PACKAGES: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "libcublasLt.so.13": ("nvidia-cublas", ("cu13/lib", "cublas/lib")),
    "libnccl.so.2": ("nvidia-nccl-cu13", ("nccl/lib",)),
}


def find(library: str) -> Optional[pathlib.Path]:
    """Path of that file in an installed package."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in PACKAGES[library][1]:
            file = pathlib.Path(root, folder, library)
            if file.is_file():
                return file
    return None


def load(load_core: Callable[[], None]) -> None:
    """Calls load_core with the missing libraries loaded before. Raises ImportError naming the
    package to install."""
    for _ in PACKAGES:
        try:
            return load_core()
        except ImportError as error:
            missing = re.match(r"(lib[\w.-]+): cannot open shared object file", str(error))
            if not missing or missing[1] not in PACKAGES:
                raise
            file = find(missing[1])
            if file is None:
                raise ImportError(f"tandem is built with CUDA and needs {missing[1]}: "
                                  f"pip install {PACKAGES[missing[1]][0]}, or name its folder in LD_LIBRARY_PATH"
                                  ) from error
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    load_core()
