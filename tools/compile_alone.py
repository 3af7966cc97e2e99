#!/usr/bin/env python3
"""compile_alone.py FOLDER: checks that every source file of the library and the program compiles
separately, as in `cmake --preset cpu` and in projects that add this one as a folder. `make` and the
tests compile sources in groups, where one may depend on another's includes. With nvcc, the host code
of the CUDA build and of its tests is checked, too. Runs only the compiler's front end, which takes
four minutes of two processors, five with CUDA's."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

source = os.path.realpath(f"{os.path.dirname(__file__)}/..")
folder = sys.argv[1]
compiler = shutil.which(os.environ.get("CXX", "c++"))
cuda = "ON" if shutil.which("nvcc") else "OFF"
subprocess.run(["cmake", "-S", source, "-B", folder, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={compiler}",
                f"-DTANDEM_CUDA={cuda}", f"-DTANDEM_TESTS={cuda}", "-DTANDEM_UNITY=OFF", "-DTANDEM_BENCH=OFF",
                "--log-level=WARNING"], check=True, stdout=subprocess.DEVNULL)
commands = json.load(open(f"{folder}/compile_commands.json"))
checked = re.compile(re.escape(source) + r"/(src/|tests/gpu/|tests/[\w/]+/cuda/).*[.]cc$")
sources = list({c["file"]: c for c in reversed(commands) if checked.match(c["file"])}.values())
if len(sources) < 100:
    sys.exit(f"{len(sources)} source files in {folder}/compile_commands.json: expected at least 100")
graph = subprocess.run(["ninja", "-C", folder, "-t", "targets", "all"], check=True, capture_output=True, text=True)
precompiled = [line.split(":")[0] for line in graph.stdout.splitlines() if ".gch:" in line or ".pch:" in line]
if precompiled:
    subprocess.run(["ninja", "-C", folder, *precompiled], check=True, stdout=subprocess.DEVNULL)


def compile_alone(command):
    words = shlex.split(command["command"])
    words = words[words.index(compiler):]  # without ccache, which is useless here
    for flag in "-o", "-MF", "-MT":
        if flag in words:
            at = words.index(flag)
            del words[at:at + 2]
    words = [w for w in words if w != "-MD"]
    done = subprocess.run([*words, "-fsyntax-only"], cwd=command["directory"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"{os.path.relpath(command['file'], source)}:\n{done.stderr}"


with ThreadPoolExecutor(os.cpu_count()) as pool:
    failed = [message for message in pool.map(compile_alone, sources) if message]
print("\n".join(failed) or f"{len(sources)} source files compile by themselves; CUDA: {cuda}")
sys.exit(bool(failed))
