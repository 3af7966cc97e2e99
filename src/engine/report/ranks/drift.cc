#include "engine/report/ranks/drift.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "core/median.h"

namespace tandem::report {
namespace {

constexpr double kMinDrift = .03;  // of the step
constexpr double kExplains = .4;   // share of the change

/// Times of a rank in some rows: means, and how much its work varies from row
/// to row.
struct DriftTimes {
  double step_ms = 0, work_ms = 0;
  double spread = 0;  ///< median distance of the work from its median, over that
  PhaseTimes phases{};
};

DriftTimes drift_times(std::span<const RankRow> rows, size_t rank) {
  DriftTimes times;
  std::vector<double> row_work;
  const double share = 1 / double(rows.size());
  for (const RankRow& row : rows) {
    const RankFrame& frame = row.frames[rank];
    double work = 0;
    times.step_ms += share * frame.step_ms;
    for (size_t i = 0; i < kPhases; ++i) {
      times.phases[i] += share * frame.phases[i];
      if (is_work(Phase(i))) work += frame.phases[i];
    }
    times.work_ms += share * work;
    row_work.push_back(work);
  }
  const double median = upper_median(row_work);
  std::vector<double> distances;
  for (const double work : row_work) distances.push_back(std::abs(work - median));
  if (median > 0) times.spread = upper_median(std::move(distances)) / median;
  return times;
}

/// Changes between two parts of a run.
class Change {
 public:
  Change(std::span<const RankHistory> ranks, std::span<const RankRow> before,
         std::span<const RankRow> after)
      : ranks_(ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      before_.push_back(drift_times(before, rank));
      after_.push_back(drift_times(after, rank));
    }
  }

  double step_before() const {
    return mean([](const DriftTimes& times) { return times.step_ms; }, before_);
  }
  double step_ms() const {
    return change([](const DriftTimes& times) { return times.step_ms; });
  }

  /// ": backward +4.1 ms, …"
  std::string explain() const {
    const double total = step_ms();
    const size_t slow = rank_of_work(total);
    if (work_of(slow) / total >= kExplains) return explain_work(slow, total);
    const double other = change([](const DriftTimes& times) {
      double ms = times.step_ms;
      for (const double phase : times.phases) ms -= phase;
      return ms;
    });
    if (other / total >= kExplains) {
      return fmt::format(
          "time in no phase {:+.2f} ms: launches of work take "
          "longer, or come apart",
          other);
    }
    const auto [phase, ms] = largest_wait();
    return fmt::format("{} {:+.2f} ms, and no rank's work: {}", name_of(phase), ms,
                       phase == Phase::step_wait ? "ranks start their work apart"
                                                 : "links, or ranks that start apart");
  }

 private:
  template <class Value>
  double mean(const Value& value, const std::vector<DriftTimes>& all) const {
    double sum = 0;
    for (const DriftTimes& times : all) sum += value(times);
    return sum / double(all.size());
  }
  template <class Value>
  double change(const Value& value) const {
    return mean(value, after_) - mean(value, before_);
  }
  double work_of(size_t rank) const { return after_[rank].work_ms - before_[rank].work_ms; }

  /// Rank whose work has changed most in the direction of the step: others wait
  /// for it.
  size_t rank_of_work(double total) const {
    size_t found = 0;
    for (size_t rank = 1; rank < ranks_.size(); ++rank) {
      if (work_of(rank) * total > work_of(found) * total) found = rank;
    }
    return found;
  }

  std::pair<Phase, double> largest_wait() const {
    std::pair<Phase, double> found{Phase::step_wait, 0};
    for (size_t i = 0; i < kPhases; ++i) {
      if (is_work(Phase(i))) continue;
      const double ms = change([i](const DriftTimes& times) { return times.phases[i]; });
      if (std::abs(ms) > std::abs(found.second)) found = {Phase(i), ms};
    }
    return found;
  }

  /// Work of the rank by phase, those of a tenth of it or more, over that
  /// before.
  struct Ratios {
    double lowest = INFINITY, highest = -INFINITY;
    size_t phase = 0;  ///< that has changed most, in ms
  };
  Ratios ratios_of(size_t rank) const {
    Ratios ratios;
    double largest = 0;
    for (size_t i = 0; i < kPhases; ++i) {
      const double before = before_[rank].phases[i], after = after_[rank].phases[i];
      if (!is_work(Phase(i))) continue;
      if (std::abs(after - before) > largest) largest = std::abs(after - before), ratios.phase = i;
      if (before < .1 * before_[rank].work_ms) continue;
      ratios.lowest = std::min(ratios.lowest, after / before);
      ratios.highest = std::max(ratios.highest, after / before);
    }
    return ratios;
  }

  /// Ranks whose work has changed at least half as much as the rank's, by host.
  std::map<std::string, std::pair<int, int>> changed_hosts(size_t slow) const {
    std::map<std::string, std::pair<int, int>> hosts;  // changed ranks, all ranks
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      auto& [changed, all] = hosts[ranks_[rank].position.host];
      changed += work_of(rank) / work_of(slow) > .5;
      ++all;
    }
    return hosts;
  }

  std::string explain_work(size_t slow, double total) const {
    const Ratios ratios = ratios_of(slow);
    const double ms = after_[slow].phases[ratios.phase] - before_[slow].phases[ratios.phase];
    std::string text = fmt::format("{} {:+.2f} ms", name_of(Phase(ratios.phase)), ms);
    int changed = 0, hosts_changed = 0;
    std::string host;
    const auto hosts = changed_hosts(slow);
    for (const auto& [name, ranks] : hosts) {
      changed += ranks.first;
      if (ranks.first == 0) continue;
      ++hosts_changed, host = name;
    }
    const bool is_all = changed == int(ranks_.size());
    if (changed == 1 && ranks_.size() > 1) {
      text += fmt::format(" on rank {}", ranks_[slow].position.rank);
    } else if (!is_all && hosts_changed == 1) {
      text += fmt::format(" on host {}", host);
    }
    // One factor in every phase, but for a third of the change.
    const double spread = ratios.highest - ratios.lowest,
                 factor = std::abs(after_[slow].work_ms / before_[slow].work_ms - 1);
    if (spread > factor / 3 + .01) return text;
    text += fmt::format(", all work alike by {:+.1f} to {:+.1f} %", 100 * (ratios.lowest - 1),
                        100 * (ratios.highest - 1));
    const double before = before_[slow].spread, after = after_[slow].spread;
    if (total > 0 && after > 2 * before && after > .01) {
      return text + fmt::format(
                        " and more uneven ({:.1f} %, {:.1f} before): "
                        "other programs share "
                        "the processors",
                        100 * after, 100 * before);
    }
    return text + fmt::format(": as of a {} clock", total > 0 ? "lower" : "higher");
  }

  std::span<const RankHistory> ranks_;
  std::vector<DriftTimes> before_, after_;
};

}  // namespace

std::string describe_drift(std::span<const RankHistory> ranks, std::span<const RankRow> rows) {
  const size_t skipped = rows.size() / 10, quarter = rows.size() / 4;
  if (quarter < 2) return "too few steps to see drift";
  const Change change(ranks, rows.subspan(skipped, quarter), rows.last(quarter));
  const double ms = change.step_ms(), share = ms / change.step_before();
  if (std::abs(share) < kMinDrift) {
    return fmt::format("steady: the last quarter of the steps took {:+.1f} %", 100 * share);
  }
  return fmt::format(
      "drift: the last quarter of the steps took {:+.1f} %, "
      "{:+.2f} ms (MFU {:+.1f} %): {}",
      100 * share, ms, 100 * (1 / (1 + share) - 1), change.explain());
}

}  // namespace tandem::report
