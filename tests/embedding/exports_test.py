#!/usr/bin/env python3
"""exports_test.py HEADERS LIBRARY: the library exports only symbols named in the public headers, among
them the main classes and functions."""
import pathlib
import re
import subprocess
import sys

headers, library = sys.argv[1:]
declared, internal = set(), set()
for header in pathlib.Path(headers).glob("*.h"):
    text = re.sub(r"//.*", "", header.read_text())
    declared |= set(re.findall(r"\w+", text))
    internal |= set(re.findall(r"^class (\w+);", text, flags=re.M))
listing = subprocess.run(["nm", "-D", "-C", "--defined-only", library], check=True,
                         capture_output=True, text=True).stdout
exported = set()
status = 0
for line in listing.splitlines():
    symbol = line.split(" ", 2)[2]
    name = re.match(r"(?:(?:vtable|VTT|typeinfo|typeinfo name) for )?tandem::(\w+)", symbol)
    if not name or name[1] not in declared - internal:
        print(f"{library} exports {symbol}: expected the public headers' names only")
        status = 1
    else:
        exported.add(name[1])
for name in ("AgGemm", "GemmRs", "GemmAr", "AgWgrad", "Tensor", "Memory", "Error", "Timeout",
             "run_world", "run_gpus", "all_gather", "quantize_rows", "normal"):
    if name not in exported:
        print(f"{library} does not export tandem::{name}")
        status = 1
sys.exit(status)
