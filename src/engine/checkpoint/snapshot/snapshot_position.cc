#include "engine/checkpoint/snapshot/snapshot_position.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace tandem {

std::optional<SnapshotPosition> newest_common(std::span<const FoundGeneration> all, int ranks) {
  using StepOfStart = std::pair<int64_t, uint64_t>;
  std::map<StepOfStart, std::map<int, FoundGeneration>> by_step;
  const auto preference = [](const FoundGeneration& g) {
    return std::tuple(g.holder != g.owner, g.holder, g.index);
  };
  for (const FoundGeneration& found : all) {
    if (found.owner < 0 || found.owner >= ranks) continue;
    auto& by_owner = by_step[{found.step, found.start}];
    const auto [at, is_first] = by_owner.try_emplace(found.owner, found);
    if (!is_first && preference(found) < preference(at->second)) at->second = found;
  }
  for (auto at = by_step.rbegin(); at != by_step.rend(); ++at) {
    if (int(at->second.size()) < ranks) continue;
    SnapshotPosition position{at->first.first, at->first.second, {}};
    for (const auto& [owner, source] : at->second) position.sources.push_back(source);
    return position;
  }
  return {};
}

}  // namespace tandem
