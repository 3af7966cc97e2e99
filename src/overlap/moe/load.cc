#include "overlap/moe/load.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tandem/random.h"

namespace tandem {
namespace {

/// Shares of the experts in all rows.
std::vector<double> shares_of(const schedule::MoeGrid& grid, const MoeLoad& load) {
  std::vector<double> shares(size_t(grid.experts));
  const int hot = grid.experts / grid.ep, others = grid.experts - hot;
  const double maximum = std::min(1.0, load.imbalance / grid.ep);
  for (int e = 0; e < grid.experts; ++e) {
    shares[size_t(e)] = load.imbalance == 0 ? 1.0 / (e + 1)
                        : e < hot           ? maximum / hot
                                            : (1 - maximum) / std::max(1, others) + 1e-12;
  }
  return shares;
}

}  // namespace

std::vector<int32_t> chosen_experts(const schedule::MoeGrid& grid, int top_k, const MoeLoad& load,
                                    int64_t first, int64_t rows) {
  std::vector<int32_t> chosen;
  chosen.reserve(size_t(rows * top_k));
  const std::vector<double> shares = shares_of(grid, load);
  std::vector<std::pair<double, int32_t>> keys(shares.size());
  for (int64_t row = first; row < first + rows; ++row) {
    // The smallest of exponential variables: sampling without replacement by the shares.
    for (size_t e = 0; e < keys.size(); ++e) {
      const double u = 1 - double(uniform(load.seed, uint64_t(row) + 7, e));
      keys[e] = {-std::log(u) / shares[e], int32_t(e)};
    }
    std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end());
    for (int i = 0; i < top_k; ++i) chosen.push_back(keys[size_t(i)].second);
  }
  return chosen;
}

}  // namespace tandem
