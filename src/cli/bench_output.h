// A benchmark's result as JSON, as a line of CSV, and as rows of a table for the terminal.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "bench/bench.h"
#include "tandem/communicator.h"

namespace tandem::cli {

/// Where a benchmark ran.
struct BenchPlace {
  const Communicator& comm;
  std::string link;
  bool on_gpus() const { return comm.on_gpu(); }
};

/// The operator is its product, and is measured against a bare call of it.
bool is_product(const BenchRequest& request, const BenchResult& result, const BenchPlace& place);

/// The form that docs and scripts rely on.
nlohmann::ordered_json to_json(const BenchRequest& request, const BenchResult& result,
                               const BenchPlace& place);

/// One line; with `header`, the columns' names before it. What there is not is left empty.
std::string to_csv(const BenchRequest& request, const BenchResult& result, const BenchPlace& place,
                   bool header);

/// At most 100 columns wide, whatever is timed.
class BenchTable {
 public:
  BenchTable(std::span<const BenchRequest> requests, const BenchPlace& place);
  /// With `explain`, what every column is.
  std::string header(const BenchResult& first, bool explain) const;
  std::string row(const BenchRequest& request, const BenchResult& result) const;

 private:
  std::string product_row(const BenchRequest& request, const BenchResult& result) const;
  std::string plain_row(const BenchRequest& request, const BenchResult& result) const;
  const BenchRequest& first_;
  const BenchPlace& place_;
  bool plain_;
  size_t shape_width_ = 0;
};

}  // namespace tandem::cli
