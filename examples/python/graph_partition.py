"""Divides the nodes of a graph into parts of equal size with few edges between them, by METIS: by
pymetis, or by the program gpmetis (Debian's package metis). For graph_sage.py --partition metis.
"""
import os
import shutil
import subprocess
import tempfile

import numpy


class NoMetis(Exception):
    pass


def adjacency(nodes, edges):
    """Neighbours of each node, one node after the other, and the position of each node's first."""
    pairs = numpy.concatenate([edges, edges[::-1]], 1)
    pairs = numpy.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
    starts = numpy.concatenate([[0], numpy.cumsum(numpy.bincount(pairs[0], minlength=nodes))])
    return starts, pairs[1]


def write_graph(path, starts, neighbours):
    """METIS's format: numbers of nodes and edges, then a line with the neighbours of each node, from 1."""
    with open(path, "w") as file:
        file.write(f"{len(starts) - 1} {len(neighbours) // 2}\n")
        for begin, end in zip(starts, starts[1:]):
            file.write(" ".join(map(str, neighbours[begin:end] + 1)) + "\n")


def read_parts(path, nodes):
    owner = numpy.loadtxt(path, dtype=int, ndmin=1)
    if len(owner) != nodes:
        raise ValueError(f"{path}: {len(owner)} parts for {nodes} nodes")
    return owner


def run_gpmetis(starts, neighbours, parts):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "graph")
        write_graph(path, starts, neighbours)
        done = subprocess.run(["gpmetis", path, str(parts)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"gpmetis ended with {done.returncode}: {done.stdout}{done.stderr}")
        return read_parts(f"{path}.part.{parts}", len(starts) - 1)


def partition(nodes, edges, parts):
    """Part of each node. edges: [2, n], each once; the same on every machine with the same METIS."""
    starts, neighbours = adjacency(nodes, edges)
    if parts == 1:
        return numpy.zeros(nodes, int)
    try:
        import pymetis
    except ImportError:
        if not shutil.which("gpmetis"):
            raise NoMetis("found neither pymetis nor the program gpmetis (Debian's package metis)") from None
        return run_gpmetis(starts, neighbours, parts)
    rows = [row.tolist() for row in numpy.split(neighbours, starts[1:-1])]
    return numpy.array(pymetis.part_graph(parts, adjacency=rows)[1])
