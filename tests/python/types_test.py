"""Type stubs of the package: checked by mypy, and against the actual package."""
import ast
import pathlib
import re
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
        local = {name for name in dir(_core) if not name.startswith("__")}
        self.assertEqual(local - stubs.keys(), set())
        self.assertEqual(stubs.keys() - local, {"_Collective"})
        for name in local:
            members = {node.name for node in ast.walk(stubs[name])
                       if isinstance(node, ast.FunctionDef)}
            self.assertEqual([m for m in members if m != name and not hasattr(
                getattr(_core, name), m)], [])

    @unittest.skipUnless(shutil.which("mypy"), "mypy is not installed")
    def test_mypy_of_the_torch_layers(self):
        """Checks against tandem's own types; PyTorch's, which take a minute to read, are
        skipped."""
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder, "mypy.ini")
            config.write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = True\n")
            said = subprocess.run(
                ["mypy", "--strict", "--allow-subclassing-any", "--allow-untyped-decorators",
                 "--no-warn-return-any", "--no-incremental", "--config-file", str(config),
                 str(PACKAGE / "torch/__init__.py")], capture_output=True, text=True, cwd=PACKAGE.parent)
        self.assertEqual(said.returncode, 0, said.stdout + said.stderr)

    def test_the_stub_has_the_arguments_that_are_there(self):
        """Names, order and defaults of arguments. stubtest cannot inspect nanobind's functions."""
        def stub(node):
            named = [(a.arg, None) for a in node.args.args if a.arg != "self"]
            for i, default in enumerate(reversed(node.args.defaults), 1):
                named[-i] = (named[-i][0], ast.literal_eval(default))
            only = [(a.arg, None if d is None else ast.literal_eval(d))
                    for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults)]
            return named, only

        def local(function):
            signature, _, defaults = function.__nb_signature__[0]
            text = re.sub(r"\\(\d+)", lambda m: repr((defaults or ())[int(m[1])]), signature)
            return stub(ast.parse(text + ": ...").body[0])

        tree = ast.parse((PACKAGE / "_core.pyi").read_text())
        checked = 0
        for node in tree.body:
            there = getattr(_core, node.name, None) if hasattr(node, "name") else None
            members = [(node, there)] if isinstance(node, ast.FunctionDef) else [
                (member, getattr(there, member.name)) for member in getattr(node, "body", ())
                if there and isinstance(member, ast.FunctionDef)]
            for member, function in members:
                overloads = [each for each, _ in members if each.name == member.name]
                public = member.name in ("__init__", "__call__") or not member.name.startswith("_")
                if hasattr(function, "__nb_signature__") and member is overloads[-1] and public:
                    self.assertEqual(stub(member), local(function), f"{node.name}.{member.name}")
                    checked += 1
        self.assertGreater(checked, 20)

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
