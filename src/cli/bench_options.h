// The command line of `tandem bench`, from words to what is to be run.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "overlap/bench.h"
#include "tandem/communicator.h"

namespace tandem::cli {

struct BenchOptions {
  BenchRequest request;
  std::vector<int64_t> m;  ///< none: 1024
  std::optional<int64_t> n, k;
  std::vector<std::string> shapes;
  std::string dtype = "f32", scaling, link, link_label, json, transport, timeline;
  int ranks = 0;
};

/// Declares the options on `command`; parsing then fills `options`, which must live as long.
void declare(CLI::App& command, BenchOptions& options);

struct BenchJob {
  std::vector<BenchRequest> requests;  ///< one per value of --m or --shapes
  WorldOptions world;
};
/// Throws InvalidArgument for what cannot be run, before anything is allocated.
BenchJob job_of(const BenchOptions& options);

}  // namespace tandem::cli
