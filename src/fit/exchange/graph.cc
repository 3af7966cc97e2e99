#include "fit/exchange/graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>

#include "core/system/files.h"
#include "core/system/lines.h"
#include "core/system/printable.h"
#include "fit/draws.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

using Edges = std::set<std::pair<int, int>>;

void add_edge(Edges& edges, int a, int b) {
  edges.emplace(std::min(a, b), std::max(a, b));
}

Graph to_graph(const Edges& edges, int clients) {
  Graph graph{std::vector<std::vector<int>>(size_t(clients))};
  for (const auto& [a, b] : edges) {
    graph.neighbours[size_t(a)].push_back(b);
    graph.neighbours[size_t(b)].push_back(a);
  }
  for (auto& list : graph.neighbours) std::sort(list.begin(), list.end());
  return graph;
}

/// A client that no path from client 0 reaches, if there is one.
std::optional<int> find_unreached(const Graph& graph) {
  std::vector<bool> reached(size_t(graph.size()), false);
  std::vector<int> next{0};
  reached[0] = true;
  while (!next.empty()) {
    const int client = next.back();
    next.pop_back();
    for (const int to : graph.neighbours[size_t(client)]) {
      if (reached[size_t(to)]) continue;
      reached[size_t(to)] = true;
      next.push_back(to);
    }
  }
  const auto missing = std::find(reached.begin(), reached.end(), false);
  if (missing == reached.end()) return std::nullopt;
  return int(missing - reached.begin());
}

Edges make_ring(int clients) {
  Edges edges;
  for (int i = 0; i < clients && clients > 1; ++i) add_edge(edges, i, (i + 1) % clients);
  return edges;
}

Edges make_torus(int clients) {
  int height = int(std::sqrt(double(clients)));
  while (height > 1 && clients % height != 0) --height;
  const int width = clients / height;
  if (height < 3) {
    throw InvalidArgument(fmt::format(
        "--graph torus: {} clients: expected a product of two numbers of at least 3", clients));
  }
  Edges edges;
  for (int i = 0; i < clients; ++i) {
    const int row = i / width, column = i % width;
    add_edge(edges, i, row * width + (column + 1) % width);
    add_edge(edges, i, (row + 1) % height * width + column);
  }
  return edges;
}

/// Pairs the ends of all edges at random until they form a connected graph without loops and double
/// edges. For four ends a client that takes some dozens of trials.
Edges make_random4(int clients, uint64_t seed) {
  constexpr int kDegree = 4;
  if (clients <= kDegree) {
    throw InvalidArgument(fmt::format("--graph random4: {} clients: expected at least 5", clients));
  }
  std::vector<int> ends;
  for (int i = 0; i < clients * kDegree; ++i) ends.push_back(i / kDegree);
  for (int64_t trial = 0;; ++trial) {
    Draws draws(seed, "fit graph", trial);
    draws.shuffle(ends);
    Edges edges;
    bool is_simple = true;
    for (size_t i = 0; i < ends.size() && is_simple; i += 2) {
      is_simple = ends[i] != ends[i + 1];
      add_edge(edges, ends[i], ends[i + 1]);
      is_simple = is_simple && edges.size() == i / 2 + 1;
    }
    if (is_simple && !find_unreached(to_graph(edges, clients))) return edges;
  }
}

/// Number of a client; -1 if `word` is none.
int parse_client(std::string_view word, int clients) {
  int client = -1;
  const auto [end, code] = std::from_chars(word.data(), word.data() + word.size(), client);
  const bool is_whole = code == std::errc() && end == word.data() + word.size();
  return is_whole && client >= 0 && client < clients ? client : -1;
}

Edges read_edges(const std::string& path, int clients) {
  Edges edges;
  int64_t number = 0;
  for (const std::string_view line : Lines(read_file(path))) {
    ++number;
    const std::vector<std::string> words = words_of(line.substr(0, line.find('#')));
    if (words.empty()) continue;
    const bool is_pair = words.size() == 2;
    const int a = is_pair ? parse_client(words[0], clients) : -1;
    const int b = is_pair ? parse_client(words[1], clients) : -1;
    if (a < 0 || b < 0 || a == b) {
      throw InvalidArgument(fmt::format("{}:{}: \"{}\": expected two different clients of 0 to {}",
                                        single_line(path), number, printable(line, 40),
                                        clients - 1));
    }
    add_edge(edges, a, b);
  }
  return edges;
}

}  // namespace

int Graph::max_degree() const {
  size_t degree = 0;
  for (const auto& list : neighbours) degree = std::max(degree, list.size());
  return int(degree);
}

double Graph::weight(int a, int b) const {
  return 1.0 / double(1 + std::max(neighbours[size_t(a)].size(), neighbours[size_t(b)].size()));
}

Graph make_graph(const std::string& name, int clients, uint64_t seed) {
  const Edges edges = name == "ring"      ? make_ring(clients)
                      : name == "torus"   ? make_torus(clients)
                      : name == "random4" ? make_random4(clients, seed)
                                          : read_edges(name, clients);
  Graph graph = to_graph(edges, clients);
  if (const auto unreached = find_unreached(graph)) {
    throw InvalidArgument(fmt::format(
        "--graph {}: no path from client 0 to client {}: expected a connected graph of {} clients",
        single_line(name), *unreached, clients));
  }
  return graph;
}

Graph choose_graph(const FitOptions& options) {
  return make_graph(options.graph.value_or("ring"), options.clients, options.seed);
}

}  // namespace tandem::fit
