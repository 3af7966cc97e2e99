// Graphs of clients for methods without a server.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fit/options.h"

namespace tandem::fit {

struct Graph {
  std::vector<std::vector<int>> neighbours;  ///< by client, increasing

  int size() const { return int(neighbours.size()); }
  int max_degree() const;
  /// Weight of the edge between `a` and `b` (Metropolis): 1 / (1 + larger degree), so that the
  /// weights are symmetric and those of a client sum to less than 1.
  double weight(int a, int b) const;
};

/// Graph of `clients` by name:
///   ring      neighbours in file order
///   torus     the grid closest to a square, closed in both directions, each side at least 3
///   random4   random edges, 4 of each client, by `seed`
///   FILE      two client numbers a line, from 0; `#` begins a comment
/// Throws InvalidArgument if there is no such graph of this size, and, for a file, with its line:
/// an edge that is no pair of clients, a loop, or a graph in several components; IoError for a file
/// that cannot be read.
Graph make_graph(const std::string& name, int clients, uint64_t seed);

/// Graph of --graph, or a ring.
Graph choose_graph(const FitOptions& options);

}  // namespace tandem::fit
