"""Writes the dependency graph of this machine's Debian packages, for graph_sage.py:

    python3 examples/python/package_graph.py graph.npz

Nodes are the packages with the most dependencies, edges their Depends, Pre-Depends and Recommends in
both directions, labels their sections, features the words of names and descriptions (idf, projected at
random). Everything is read from `apt-cache dumpavail`, so it differs slightly between releases.
"""
import argparse
import collections
import re
import subprocess

import numpy

FIELDS = "Depends", "Pre-Depends", "Recommends"


def read_packages():
    text = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    packages = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", stanza, re.M))
        if "Package" in fields and "Section" in fields:
            packages.setdefault(fields["Package"], fields)
    return packages


def edges_of(packages):
    """Pairs of packages, each once."""
    edges = set()
    for name, fields in packages.items():
        for dependency in re.split("[,|]", ",".join(fields.get(field, "") for field in FIELDS)):
            other = re.match(r"\s*([a-z0-9][a-z0-9+.-]*)", dependency)
            if other and other[1] in packages and other[1] != name:
                edges.add(tuple(sorted((name, other[1]))))
    return edges


def features_of(packages, names, width, generator):
    """[nodes, width], elements of mean square 1."""
    words = [set(re.findall("[a-z][a-z+]+", f"{name} {packages[name].get('Description', '').lower()}"))
             for name in names]
    count = collections.Counter(word for of_node in words for word in of_node)
    used = sorted(word for word, nodes in count.items() if nodes >= 3)
    index = {word: i for i, word in enumerate(used)}
    idf = numpy.log(len(names) / numpy.array([count[word] for word in used]))
    projected = generator.standard_normal((len(used), width)) * idf[:, None]
    rows = numpy.zeros((len(names), width))
    for row, of_node in zip(rows, words):
        row += projected[[index[word] for word in sorted(of_node) if word in index]].sum(0)
    scale = width ** 0.5 / numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return (rows * scale).astype("f4")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--nodes", type=int, default=16000)
    parser.add_argument("--features", type=int, default=128)
    options = parser.parse_args()
    packages = read_packages()
    edges = edges_of(packages)
    degree = collections.Counter(name for edge in edges for name in edge)
    names = sorted(sorted(packages), key=lambda name: -degree[name])[:options.nodes]
    index = {name: i for i, name in enumerate(names)}
    pairs = sorted((index[a], index[b]) for a, b in edges if a in index and b in index)
    sections = [packages[name]["Section"].split("/")[-1] for name in names]
    kinds = sorted(set(sections))
    labels = numpy.array([kinds.index(section) for section in sections])
    features = features_of(packages, names, options.features, numpy.random.default_rng(1))
    numpy.savez_compressed(options.out, features=features, labels=labels, edges=numpy.array(pairs).T)
    print(f"{options.out}: {len(names)} packages, {len(pairs)} edges, {len(kinds)} sections")


if __name__ == "__main__":
    main()
