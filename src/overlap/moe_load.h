// Routings with a given imbalance, to test and measure on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/moe.h"

namespace tandem {

struct MoeLoad {
  /// Load of the EP rank with most over the mean of all: 1 is exactly even, ep puts on one rank
  /// what its experts can take. 0: Zipf's law over the experts instead.
  double imbalance = 1;
  uint64_t seed = 1;
};

/// [rows, top_k] experts, different ones in each row, for rows [first, first + rows) of all.
std::vector<int32_t> chosen_experts(const schedule::MoeGrid& grid, int top_k, const MoeLoad& load,
                                    int64_t first, int64_t rows);

/// Load of the rank with most over the mean: what `counts`, by expert, amount to.
double imbalance_of(const schedule::MoeGrid& grid, const std::vector<int64_t>& counts);

}  // namespace tandem
