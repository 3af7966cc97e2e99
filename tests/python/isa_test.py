"""Package with a build for each x86-64 level: imports the highest that the processor supports, or
the one in TANDEM_ISA. The builds are copies of the one under test."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import tandem
from tandem import _core, _isa

PACKAGE = pathlib.Path(tandem.__file__).parent
V3 = set.union(*(_isa.LEVELS[level] for level in ("x86-64-v2", "x86-64-v3")))
V4 = V3 | _isa.LEVELS["x86-64-v4"]


class Levels(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.package = pathlib.Path(self.folder.name, "tandem")
        self.package.mkdir()
        for file in PACKAGE.glob("*.py"):
            shutil.copy(file, self.package)
        for level in _isa.LEVELS:
            into = self.package / "_isa_levels" / level
            into.mkdir(parents=True)
            os.symlink(_core.__file__, into / pathlib.Path(_core.__file__).name)

    def imported(self, isa, program="import tandem; print(tandem._core.__file__, tandem.run(2, lambda c: c.rank))"):
        environment = {**os.environ, "TANDEM_ISA": isa, "PYTHONPATH": self.folder.name}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    def test_each_that_the_processor_has(self):
        for level in _isa.runnable():
            done = self.imported(level)
            self.assertIn(f"/_isa_levels/{level}/", done.stdout, done.stderr)
            self.assertIn("[0, 1]", done.stdout)

    def test_its_name(self):
        """An in-place build targets this machine; its compiler flags tell the highest level."""
        self.assertIn(tandem.__isa__, ("x86-64", *_isa.runnable()))
        self.assertEqual(tandem.__isa__, _core.__isa__)

    def test_the_highest(self):
        self.assertIn(f"/_isa_levels/{_isa.runnable()[-1]}/", self.imported("").stdout)

    def test_others_are_refused(self):
        self.assertIn("TANDEM_ISA=x86-64-v9: expected one of this package's: x86-64-v2, x86-64-v3",
                      self.imported("x86-64-v9").stderr)

    def test_flags(self):
        def choose(flags, **environment):
            with mock.patch.object(_isa, "FOLDER", self.package / "_isa_levels"), \
                    mock.patch.object(_isa, "processor_flags", lambda: flags), \
                    mock.patch.dict(os.environ, {"TANDEM_ISA": "", **environment}):
                return _isa.choose()

        self.assertEqual([choose(flags) for flags in (set(), {"avx2"}, V3, V4)],
                         ["x86-64-v2", "x86-64-v2", "x86-64-v3", "x86-64-v4"])
        self.assertEqual(choose(V4, TANDEM_ISA="x86-64-v3"), "x86-64-v3")
        with self.assertRaisesRegex(tandem.InvalidArgument, "this processor has not.*expected x86-64-v2$"):
            choose(set(), TANDEM_ISA="x86-64-v3")
        for level in ("x86-64-v2", "x86-64-v3"):
            shutil.rmtree(self.package / "_isa_levels" / level)
        with self.assertRaisesRegex(tandem.Unsupported, "built for x86-64-v4"):
            choose(V3)


if __name__ == "__main__":
    unittest.main()
