"""Compiles the torch.distributed backend (c10d/) for the installed PyTorch, once for each version."""
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
from typing import Any, List

import torch

from .._errors import IoError, Unsupported

FOLDER = pathlib.Path(__file__).parent / "c10d"


def cache_folder() -> pathlib.Path:
    """TANDEM_CACHE_DIR, or tandem's folder in the user's cache; its subfolder `torch`."""
    named = os.environ.get("TANDEM_CACHE_DIR")
    if named:
        return pathlib.Path(named) / "torch"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache) / "tandem" / "torch"


def _flags() -> List[str]:
    root = pathlib.Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
             f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # by which extensions share classes
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            flags.append(f'-DPYBIND11_{name}="{value}"')
    flags += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
              f"-I{sysconfig.get_paths()['include']}"]
    return flags + [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def _compile(compiler: List[str], name: str, library: pathlib.Path) -> None:
    made = library.with_suffix(".new")
    options, libraries = _flags()[:-4], _flags()[-4:]
    command = [*compiler, *options, f"-DTORCH_EXTENSION_NAME={name}", str(FOLDER / "backend.cc"), "-o", str(made),
               *libraries]
    print(f"tandem.torch: compiling the backend for PyTorch {torch.__version__}, once (about a minute)",
          file=sys.stderr, flush=True)
    log = library.with_suffix(".log")
    with open(log, "w") as output:
        print(shlex.join(command), file=output, flush=True)
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status != 0:
        raise IoError(f"{compiler[0]}: exit status {status} at c10d/backend.cc: expected 0: see {log}")
    os.replace(made, library)


def load() -> Any:
    """The compiled module; compiles it if the cache has none. Raises Unsupported without a C++
    compiler (CXX, or c++), IoError naming the log if compilation fails."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        raise Unsupported(f"C++ compiler {' '.join(compiler) or 'CXX'}: not found: expected one, or its name in CXX")
    digest = hashlib.sha256(" ".join([torch.__version__, sys.version, *compiler, *_flags()]).encode())
    for file in sorted(FOLDER.iterdir()):
        digest.update(file.read_bytes())
    name = f"tandem_c10d_{digest.hexdigest()[:16]}"
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"{name}.so"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process that has it
            if not library.exists():
                _compile(compiler, name, library)
    except OSError as error:
        raise IoError(f"{folder}: {error.strerror}: expected a folder to compile in (TANDEM_CACHE_DIR)") from None
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
