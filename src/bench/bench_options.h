// Command line of `tandem bench`, converted to requests.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "tandem/communicator.h"

namespace tandem {

struct BenchOptions {
  BenchRequest request;
  std::vector<int64_t> m;  ///< empty: 1024
  std::optional<int64_t> n, k, layers;
  std::vector<std::string> shapes;
  std::string bytes;
  std::string dtype, scaling, codec = "none", link, link_label, json, csv, transport, timeline;
  int ranks = 0, ranks_per_gpu = 1;
  bool explain = false;
};

/// Declares the options on `command`; parsing then fills `options`, which must outlive it.
void declare(CLI::App& command, BenchOptions& options);

/// Parses "16K:256M:x4" to byte counts; the default factor is 4. Throws InvalidArgument.
std::vector<int64_t> parse_sizes(const std::string& text);

struct BenchPlan {
  std::vector<BenchRequest> requests;  ///< one per value of --m, --shapes or --bytes
  WorldOptions world;
};
/// Throws InvalidArgument for requests that cannot run, before any allocation.
BenchPlan make_plan(const BenchOptions& options);

}  // namespace tandem
