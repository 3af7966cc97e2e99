// The command line of `tandem bench`, from words to what is to be run.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "tandem/communicator.h"

namespace tandem::cli {

struct BenchOptions {
  BenchRequest request;
  std::vector<int64_t> m;  ///< none: 1024
  std::optional<int64_t> n, k, layers;
  std::vector<std::string> shapes;
  std::string bytes;
  std::string dtype, scaling, codec = "none", link, link_label, json, csv, transport, timeline;
  int ranks = 0, ranks_per_gpu = 1;
  bool explain = false;
};

/// Declares the options on `command`; parsing then fills `options`, which must live as long.
void declare(CLI::App& command, BenchOptions& options);

/// "16K:256M:x4", powers of 4 where no factor is given, as counts of bytes. Throws InvalidArgument.
std::vector<int64_t> parse_sizes(const std::string& text);

struct BenchJob {
  std::vector<BenchRequest> requests;  ///< one per value of --m, --shapes or --bytes
  WorldOptions world;
};
/// Throws InvalidArgument for what cannot be run, before anything is allocated.
BenchJob job_of(const BenchOptions& options);

}  // namespace tandem::cli
