// Routings with a given imbalance, for tests and measurements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/moe.h"

namespace tandem {

struct MoeLoad {
  /// Expected max load of an EP rank over the mean: with 1 all experts are equally likely; ep puts
  /// as much on one rank as its experts can take. 0: Zipf's law over the experts.
  double imbalance = 1;
  uint64_t seed = 1;
};

/// [rows, top_k] expert ids, distinct within each row, for rows [first, first + rows) of all.
std::vector<int32_t> chosen_experts(const schedule::MoeGrid& grid, int top_k, const MoeLoad& load,
                                    int64_t first, int64_t rows);

}  // namespace tandem
