// Benchmark results as JSON, as CSV, and as a table for the terminal.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "bench/bench.h"
#include "tandem/communicator.h"

namespace tandem {

/// Rounds to a multiple of 1 / `scale`.
inline double round_to(double value, double scale) {
  return std::round(value * scale) / scale;
}

/// World that a benchmark ran on.
struct BenchWorld {
  const Communicator& comm;
  std::string link;
  bool on_gpus() const { return comm.on_gpu(); }
};

/// Whether the operator is only its GEMM, measured against a bare GEMM call.
bool is_product(const BenchRequest& request, const BenchResult& result, const BenchWorld& world);

/// Name, group, text and bits an element of `dtype` of a wire format; null without one.
nlohmann::ordered_json codec_json(const Wire& wire, DType dtype);

/// Hardware, versions, commit, command and date: the end of every result.
nlohmann::ordered_json origin_json(const Communicator& comm);

/// Stable format, used by docs and scripts.
nlohmann::ordered_json to_json(const BenchRequest& request, const BenchResult& result,
                               const BenchWorld& world);

/// One line; with `header`, preceded by the column names. Missing values are empty.
std::string to_csv(const BenchRequest& request, const BenchResult& result, const BenchWorld& world,
                   bool header);

/// Table of at most 100 columns.
class BenchTable {
 public:
  BenchTable(std::span<const BenchRequest> requests, const BenchWorld& world);
  /// With `explain`, includes a description of every column.
  std::string header(const BenchResult& first, bool explain) const;
  std::string row(const BenchRequest& request, const BenchResult& result) const;

 private:
  std::string product_row(const BenchRequest& request, const BenchResult& result) const;
  std::string collective_row(const BenchRequest& request, const BenchResult& result) const;
  const BenchRequest& first_;
  const BenchWorld& world_;
  bool collective_;
  size_t shape_width_ = 0;
};

}  // namespace tandem
