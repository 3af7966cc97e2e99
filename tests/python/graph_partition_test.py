"""examples/python/graph_partition.py with a program in the place of gpmetis, and with METIS where it is installed."""
import os
import shutil
import stat
import sys
import tempfile
import unittest

import numpy

EXAMPLES = os.path.join(os.path.dirname(__file__), "../../examples/python")
sys.path.insert(0, EXAMPLES)
import graph_partition  # noqa: E402

# Checks the file's format, and divides the nodes by their order.
STUB = """#!{python}
import sys
path, parts = sys.argv[1], int(sys.argv[2])
lines = open(path).read().split("\\n")
nodes, edges = map(int, lines[0].split())
rows = [list(map(int, line.split())) for line in lines[1:-1]]
assert len(rows) == nodes and sum(map(len, rows)) == 2 * edges, (nodes, edges)
for node, row in enumerate(rows, 1):
    assert len(set(row)) == len(row) and node not in row
    assert all(node in rows[other - 1] for other in row)
open(f"{{path}}.part.{{parts}}", "w").write("".join(f"{{node * parts // nodes}}\\n" for node in range(nodes)))
"""


def make_rings(count, size):
    """Rings of nodes with one edge from each ring to the next, with a loop and an edge given twice."""
    edges = [(ring * size + i, ring * size + (i + 1) % size) for ring in range(count) for i in range(size)]
    edges += [(ring * size, ring * size + size) for ring in range(count - 1)] + [(3, 3), (1, 0)]
    return count * size, numpy.array(edges).T


def count_cut(owner, edges):
    return int((owner[edges[0]] != owner[edges[1]]).sum())


class GraphPartitionTest(unittest.TestCase):
    def with_path(self, path):
        before = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", before)
        os.environ["PATH"] = path

    def without_pymetis(self):
        modules = sys.modules
        before = modules.get("pymetis", self)
        modules["pymetis"] = None  # its import fails
        self.addCleanup(lambda: modules.pop("pymetis") if before is self else modules.update(pymetis=before))

    def test_format_of_gpmetis(self):
        self.without_pymetis()
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "gpmetis")
            with open(program, "w") as file:
                file.write(STUB.format(python=sys.executable))
            os.chmod(program, os.stat(program).st_mode | stat.S_IXUSR)
            self.with_path(folder)
            nodes, edges = make_rings(3, 10)
            # A node without edges has an empty line.
            owner = graph_partition.partition(nodes + 1, edges, 3)
        self.assertEqual(owner.tolist(), [node * 3 // 31 for node in range(31)])

    def test_program_that_fails_is_reported(self):
        self.without_pymetis()
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "gpmetis")
            with open(program, "w") as file:
                file.write("#!/bin/sh\necho no memory\nexit 3\n")
            os.chmod(program, os.stat(program).st_mode | stat.S_IXUSR)
            self.with_path(folder)
            with self.assertRaisesRegex(RuntimeError, "gpmetis ended with 3: no memory"):
                graph_partition.partition(*make_rings(2, 5), 2)

    def test_without_metis_the_error_names_the_package(self):
        self.without_pymetis()
        self.with_path("/nowhere")
        with self.assertRaisesRegex(graph_partition.NoMetis, "pymetis.*gpmetis.*package metis"):
            graph_partition.partition(*make_rings(2, 5), 2)

    def test_one_part_needs_no_metis(self):
        self.without_pymetis()
        self.with_path("/nowhere")
        self.assertEqual(graph_partition.partition(*make_rings(2, 5), 1).tolist(), [0] * 10)

    def check_metis(self):
        nodes, edges = make_rings(4, 50)
        owner = graph_partition.partition(nodes, edges, 4)
        self.assertEqual(sorted(set(owner)), [0, 1, 2, 3])
        self.assertLessEqual(count_cut(owner, edges), 8)
        self.assertGreater(count_cut(numpy.arange(nodes) % 4, edges), 100)

    @unittest.skipUnless(shutil.which("gpmetis"), "gpmetis is not installed")
    def test_gpmetis(self):
        self.without_pymetis()
        self.check_metis()

    def test_pymetis(self):
        try:
            import pymetis  # noqa: F401
        except ImportError:
            self.skipTest("pymetis is not installed")
        self.check_metis()


if __name__ == "__main__":
    unittest.main()
