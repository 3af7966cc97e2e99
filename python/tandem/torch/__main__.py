"""python -m tandem.torch [--codec WIRE] [--strict] PROGRAM [ARGUMENTS …]

Runs a Python program, a file or a module, with `tandem.torch.enable()` called before
it, and prints the report of rank 0 at its end.
"""
import argparse
import atexit
import importlib.util
import os
import runpy
import sys

from .._errors import Error
from . import enable
from ._graphs import FUSED
from ._receipts import NO_CALL, print_report, report


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.torch", usage="%(prog)s [--codec WIRE] [--strict] PROGRAM [ARGUMENT ...]",
        description="Runs a program whose fused PyTorch operators are tandem's, and reports what ran.")
    parser.add_argument("--codec", metavar="WIRE", help="wire format of rows and partial sums, such as int8")
    parser.add_argument("--strict", action="store_true", help="fail at a call that would not overlap, or a compiled graph that leaves a gather or scatter next to "
                             "its product, and say why")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, even if there is a file of that name")
    parser.add_argument("program", metavar="PROGRAM", help="file or module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    is_module = options.module or not os.path.exists(options.program)
    if is_module and importlib.util.find_spec(options.program.split(".")[0]) is None:
        parser.error(f"PROGRAM: {options.program}: expected a file or a module")
    if options.strict:
        os.environ["TANDEM_STRICT"] = "1"  # for tandem's layers
    try:
        enable(codec=options.codec, strict=options.strict)
    except Error as error:
        parser.error(str(error))
    atexit.register(print_report, int(os.environ.get("RANK", "0")))
    sys.argv = [options.program, *options.arguments]
    if is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
        runpy.run_path(options.program, run_name="__main__")
    if options.strict and not any(row["ran"] != FUSED for row in report()):
        sys.exit(f"tandem.torch: {NO_CALL}: expected at least one, as --strict requests")


if __name__ == "__main__":
    main()
