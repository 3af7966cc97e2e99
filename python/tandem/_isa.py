"""Which build of tandem._core is imported: a wheel has one for each level of x86-64, this takes the highest
that the processor has, or what TANDEM_ISA says. A package that was built in place has only one."""
import importlib
import importlib.util
import os
import pathlib
import sys
from typing import Dict, List, Set

from ._errors import InvalidArgument, Unsupported

# What a level has beyond the one before it, as Linux names it.
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
    """The levels of this processor, the highest last."""
    levels: List[str] = []
    flags = processor_flags()
    for level, needed in LEVELS.items():
        if not needed <= flags:
            break
        levels.append(level)
    return levels


def choose() -> str:
    """A level that is in this package. Raises InvalidArgument for a TANDEM_ISA that is not, or that
    this processor has not."""
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
    """tandem._core of the chosen level."""
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
