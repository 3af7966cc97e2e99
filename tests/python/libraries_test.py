"""Import of a build with CUDA if its libraries are not the system's."""
import glob
import importlib
import pathlib
import shutil
import sys
import tempfile
import unittest
from unittest import mock

from tandem import _libraries


def misses(*libraries):
    """Import that fails for each library with the loader's message, until it is loaded."""
    left = list(libraries)

    def load():
        if left:
            raise ImportError(f"{left.pop(0)}: cannot open shared object file: No such file or directory")

    return load


class Libraries(unittest.TestCase):
    def setUp(self):
        """Package folder with a small library in place of CUDA's."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        sys.path.insert(0, folder.name)
        self.addCleanup(sys.path.remove, folder.name)
        importlib.invalidate_caches()

    def install(self, where):
        file = self.root / "nvidia" / where
        file.parent.mkdir(parents=True)
        shutil.copy(next(iter(glob.glob("/lib/*/libutil.so.1") + glob.glob("/lib64/libutil.so.1"))), file)
        importlib.invalidate_caches()

    def test_the_packages_of_pytorch(self):
        self.install("cu13/lib/libcublasLt.so.13")
        self.install("nccl/lib/libnccl.so.2")
        _libraries.load(misses("libcublasLt.so.13", "libnccl.so.2"))
        with open("/proc/self/maps") as maps:
            self.assertIn(str(self.root), maps.read())

    def test_none(self):
        with mock.patch.object(_libraries, "find", return_value=None), \
                self.assertRaisesRegex(ImportError, "needs libnccl.so.2: pip install nvidia-nccl-cu13"):
            _libraries.load(misses("libnccl.so.2"))

    def test_what_is_not_cudas(self):
        with self.assertRaisesRegex(ImportError, "^libother.so.1: cannot"):
            _libraries.load(misses("libother.so.1"))
        _libraries.load(misses())


if __name__ == "__main__":
    unittest.main()
