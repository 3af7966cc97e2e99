"""Selects the build of tandem._core to import: a wheel has one per x86-64 level, and the highest
that the processor supports is used, or the one in TANDEM_ISA. A package built in place has only
one."""
import importlib
import importlib.util
import os
import pathlib
import sys
from typing import Dict, List, Set

from ._errors import InvalidArgument, Unsupported

# CPU flags that each level adds to the one before, as named by Linux.
LEVELS: Dict[str, Set[str]] = {
    "x86-64-v2": set(),
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
FOLDER = pathlib.Path(__file__).parent / "_isa_levels"


def processor_flags() -> Set[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return set()


def runnable() -> List[str]:
    """Levels supported by this processor, in ascending order."""
    levels: List[str] = []
    flags = processor_flags()
    for level, needed in LEVELS.items():
        if not needed <= flags:
            break
        levels.append(level)
    return levels


def choose() -> str:
    """Selects a level of this package. Raises InvalidArgument for a TANDEM_ISA that the package
    does not contain or the processor does not support."""
    there = [level for level in LEVELS if (FOLDER / level).is_dir()]
    asked = os.environ.get("TANDEM_ISA", "")
    able = [level for level in there if level in runnable()]
    if not able:
        raise Unsupported(f"this package is built for {', '.join(there)}: this processor has none of them")
    if not asked:
        return able[-1]
    if asked not in there:
        raise InvalidArgument(f"TANDEM_ISA={asked}: expected one of this package's: {', '.join(there)}")
    if asked not in able:
        raise InvalidArgument(
            f"TANDEM_ISA={asked}: this processor has not all that it needs: expected {', '.join(able)}")
    return asked


def load() -> None:
    """Imports tandem._core of the selected level."""
    name = f"{__package__}._core"
    if not FOLDER.is_dir():
        importlib.import_module(name)
        return
    file = next((FOLDER / choose()).glob("_core.*.so"))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    setattr(sys.modules[__package__], "_core", module)  # as an import statement does
