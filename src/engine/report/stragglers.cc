#include "engine/report/stragglers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "engine/report/rank_rows.h"

namespace tandem::report {
namespace {

constexpr size_t kMaxRows = 4000;  // of a long run: each is then the mean of several frames

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + ptrdiff_t(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

/// Times of a phase, by row, and the median of the ranks.
struct PhaseTable {
  std::vector<std::vector<double>> times;  // by row and rank
  std::vector<double> usual;

  PhaseTable(std::span<const RankRow> rows, size_t phase) {
    for (const RankRow& row : rows) {
      std::vector<double> of_row;
      for (const RankFrame& frame : row.frames) of_row.push_back(frame.phases[phase]);
      usual.push_back(median_of(of_row));
      times.push_back(std::move(of_row));
    }
  }
  /// Median of the rank's peers. A slow rank moves that of a few ranks.
  double usual_of_peers(size_t row, size_t rank) const {
    constexpr size_t kFew = 4;
    if (times[row].size() > kFew) return usual[row];
    std::vector<double> peers = times[row];
    peers.erase(peers.begin() + ptrdiff_t(rank));
    return median_of(std::move(peers));
  }
};

/// Excess of a rank in one phase of `window` rows; nullopt if noise can explain it.
std::optional<Straggler> judge_window(const PhaseTable& table, std::span<const RankRow> rows,
                                      size_t begin, size_t window, size_t rank,
                                      const StragglerOptions& options) {
  std::vector<double> ratios, excess_ms, step_ms;
  for (size_t i = begin; i < begin + window; ++i) {
    const double local = table.times[i][rank], usual = table.usual_of_peers(i, rank);
    if (usual > 0) ratios.push_back(local / usual);
    excess_ms.push_back(local - usual);
    step_ms.push_back(rows[i].frames[rank].step_ms);
  }
  if (ratios.size() * 2 < window) return {};
  const double middle = median_of(ratios);
  if (middle - 1 < options.min_excess) return {};
  std::vector<double> distances;
  for (const double ratio : ratios) distances.push_back(std::abs(ratio - middle));
  // Standard error of a median: 1.2533 sigma / sqrt(n), sigma = 1.4826 median distance.
  const double error =
      1.2533 * 1.4826 * median_of(std::move(distances)) / std::sqrt(double(ratios.size()));
  constexpr double kErrors = 5;
  const double share = median_of(std::move(excess_ms)) / median_of(std::move(step_ms));
  if (middle - 1 < kErrors * error || share < options.min_share) return {};
  Straggler found;
  found.from_step = rows[begin].first;
  found.to_step = rows[begin + window - 1].last;
  found.excess = middle - 1;
  found.share_of_step = share;
  return found;
}

void add_window(std::vector<Straggler>& all, const Straggler& found) {
  const auto same = std::ranges::find_if(all, [&](const Straggler& other) {
    return other.rank == found.rank && other.phase == found.phase;
  });

  if (same == all.end()) {
    all.push_back(found);
    return;
  }
  same->to_step = found.to_step;
  if (found.share_of_step > same->share_of_step) {
    same->share_of_step = found.share_of_step;
    same->excess = found.excess;
  }
}

}  // namespace

std::vector<Straggler> find_stragglers(std::span<const RankHistory> ranks,
                                       const StragglerOptions& options) {
  std::map<int, std::vector<const RankHistory*>> stages;
  for (const RankHistory& history : ranks) stages[history.position.pp].push_back(&history);
  std::vector<Straggler> found;
  for (const auto& [pp, stage] : stages) {
    if (stage.size() < 2) continue;
    const std::vector<RankRow> rows = align(stage, kMaxRows);
    const size_t window = std::min(size_t(options.window), rows.size());
    if (window < 8) continue;
    for (size_t phase = 0; phase < kPhases; ++phase) {
      if (!is_work(Phase(phase))) continue;
      const PhaseTable table(rows, phase);
      for (size_t begin = 0; begin + window <= rows.size(); begin += window / 2) {
        for (size_t rank = 0; rank < stage.size(); ++rank) {
          auto straggler = judge_window(table, rows, begin, window, rank, options);
          if (!straggler) continue;
          straggler->rank = stage[rank]->position.rank;
          straggler->phase = Phase(phase);
          add_window(found, *straggler);
        }
      }
    }
  }
  std::ranges::stable_sort(found, std::greater<>(), &Straggler::share_of_step);
  return found;
}

std::string describe(const Straggler& straggler, const RankPosition& position) {
  return fmt::format(
      "rank {} (tp {}, dp {}, pp {}, host {}): {} takes {:.1f} % longer than on its peers, {:.1f} "
      "% of the step, steps {} to {}",
      straggler.rank, position.tp, position.dp, position.pp, position.host,
      name_of(straggler.phase), 100 * straggler.excess, 100 * straggler.share_of_step,
      straggler.from_step, straggler.to_step);
}

}  // namespace tandem::report
