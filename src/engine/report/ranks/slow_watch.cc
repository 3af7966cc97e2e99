#include "engine/report/ranks/slow_watch.h"

#include <algorithm>

namespace tandem::report {
namespace {

constexpr StragglerOptions kSlowForLong{.window = 50, .min_excess = .05, .min_share = .02};

}  // namespace

SlowWatch::SlowWatch(std::string folder) : ranks_(std::move(folder), size_t(kSlowForLong.window)) {}

std::vector<SlowRank> SlowWatch::check() {
  if (!ranks_.refresh()) return {};
  const std::vector<RankHistory> histories = ranks_.histories();
  std::map<std::pair<int, Phase>, int> now;
  std::vector<SlowRank> found;
  for (const Straggler& straggler : find_stragglers(histories, kSlowForLong)) {
    const std::pair key{straggler.rank, straggler.phase};
    const int checks = now[key] = (slow_.contains(key) ? slow_[key] : 0) + 1;
    if (checks != kChecks) continue;
    const auto history = std::ranges::find_if(
        histories, [&](const RankHistory& each) { return each.position.rank == straggler.rank; });
    found.push_back({straggler, history->position});
  }
  slow_ = std::move(now);
  return found;
}

}  // namespace tandem::report
