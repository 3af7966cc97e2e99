// Routings with a given imbalance, to test and measure on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/moe.h"

namespace tandem {

struct MoeLoad {
  /// Load of the EP rank with most over the mean, as expected: with 1 every expert is as likely as
  /// any other, ep puts on one rank what its experts can take. 0: Zipf's law over the experts.
  double imbalance = 1;
  uint64_t seed = 1;
};

/// [rows, top_k] experts, different ones in each row, for rows [first, first + rows) of all.
std::vector<int32_t> chosen_experts(const schedule::MoeGrid& grid, int top_k, const MoeLoad& load,
                                    int64_t first, int64_t rows);

}  // namespace tandem
