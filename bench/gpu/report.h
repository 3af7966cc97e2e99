// One benchmark result, and the one form it is written in.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "overlap/cuda/measure.h"

namespace tandem::gpu {

struct Result {
  std::string op;
  int ranks = 1;
  std::string link;
  int64_t m = 0, n = 0, k = 0;  ///< whole
  std::string dtype;
  int64_t bytes = 0;  ///< that leave each rank
  bool graph = false;
  std::string detail;  ///< what the tuner chose within a way
  Timing gemm, wire;   ///< alone
  std::map<std::string, Timing> serial, overlapped;
  double max_rel = 0, of_bound = 0;
  bool finite = true, bitwise_equal_runs = true;

  bool correct() const { return finite && bitwise_equal_runs && of_bound <= 1; }
};

nlohmann::json to_json(const Result& result, const std::string& command);
/// One line for the terminal.
std::string describe(const Result& result);

}  // namespace tandem::gpu
