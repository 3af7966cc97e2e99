"""The types that the package says it has: checked by mypy, and against what is there."""
import ast
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import tandem
from tandem import _core

PACKAGE = pathlib.Path(tandem.__file__).parent
PROGRAM = """
from typing import Any
import tandem

def body(comm: tandem.Comm, x: bytearray, weight: Any) -> bytearray:
    op = tandem.AgGemm(comm, 8, 4, 4, "f32", bias=True)
    return tandem.all_reduce(comm, op(x, weight, bias=weight))

results: list[int] = tandem.run(2, lambda comm: comm.rank, deadline=3)
tandem.run("2", lambda comm: comm.rank)
tandem.AgGemm(None, 1, 1, 1)
"""


class Types(unittest.TestCase):
    def test_the_stub_has_the_names_that_are_there(self):
        tree = ast.parse((PACKAGE / "_core.pyi").read_text())
        stubs = {node.name: node for node in tree.body
                 if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        own = {name for name in dir(_core) if not name.startswith("__")}
        self.assertEqual(own - stubs.keys(), set())
        self.assertEqual(stubs.keys() - own, {"_Operator", "_Product"})
        for name in own:
            members = {node.name for node in ast.walk(stubs[name])
                       if isinstance(node, ast.FunctionDef)}
            self.assertEqual([m for m in members if m != name and not hasattr(
                getattr(_core, name), m)], [])

    @unittest.skipUnless(shutil.which("mypy"), "mypy is not installed")
    def test_mypy(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(PROGRAM)
            said = subprocess.run(
                ["mypy", "--strict", "--no-incremental", str(PACKAGE / "__init__.py"), str(program)],
                capture_output=True, text=True, cwd=PACKAGE.parent).stdout
        self.assertEqual(said.count("error:"), 2, said)
        self.assertIn('incompatible type "str"; expected "int"', said)
        self.assertIn('incompatible type "None"; expected "Comm"', said)


if __name__ == "__main__":
    unittest.main()
