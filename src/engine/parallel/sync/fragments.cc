#include "engine/parallel/sync/fragments.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace tandem {

std::vector<int> assign_fragments(std::span<const Parameter> list, int64_t fragments) {
  std::vector<int64_t> sizes;
  for (const Parameter& p : list) {
    sizes.push_back(
        std::accumulate(p.shape.begin(), p.shape.end(), int64_t{1}, std::multiplies<>()));
  }
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<int> all;
  int64_t before = 0;
  for (const int64_t size : sizes) {
    all.push_back(int(double(2 * before + size) / double(2 * total) * double(fragments)));
    before += size;
  }
  return all;
}

std::optional<int> fragment_due(const SyncConfig& config, int64_t step) {
  const int64_t fragments = config.num_fragments(), period = config.period();
  for (int64_t p = 0; step > 0 && p < fragments; ++p) {
    if (step % period == p * period / fragments) return int(p);
  }
  return std::nullopt;
}

std::optional<SentFragment> fragment_in_flight(const SyncConfig& config, int64_t step) {
  for (int64_t sent = step; sent > step - config.delay; --sent) {
    if (const auto fragment = fragment_due(config, sent)) return SentFragment{*fragment, sent};
  }
  return std::nullopt;
}

}  // namespace tandem
