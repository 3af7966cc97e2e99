#include "engine/report/ranks/stragglers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "core/median.h"
#include "engine/report/ranks/rank_rows.h"

namespace tandem::report {
namespace {

constexpr size_t kMaxRows = 4000;  // of a long run: each is then the mean of several frames

constexpr size_t kMaxWarmUp = 10;  // first rows of a run, at most a tenth of them

/// Rows in which a stage has work of a phase, after the warm-up.
struct PhaseTable {
  std::vector<size_t> rows;                // of the stage's
  std::vector<std::vector<double>> times;  // by row and rank
  std::vector<double> usual;               // median of the ranks

  PhaseTable(std::span<const RankRow> all, Phase phase) {
    const size_t warm_up = all.front().first == 1 ? std::min(kMaxWarmUp, all.size() / 10) : 0;
    for (size_t i = warm_up; i < all.size(); ++i) {
      std::vector<double> of_row;
      for (const RankFrame& frame : all[i].frames) of_row.push_back(frame.phases[size_t(phase)]);
      rows.push_back(i);
      usual.push_back(interpolated_median(of_row));
      times.push_back(std::move(of_row));
    }
    if (phase == Phase::checkpoint) keep_checkpoints();
  }

  /// Rows without one have a time of about 0 on every rank.
  void keep_checkpoints() {
    constexpr double kShare = .1;
    const double bound = usual.empty() ? 0 : kShare * std::ranges::max(usual);
    size_t count = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (usual[i] < bound || usual[i] == 0) continue;
      rows[count] = rows[i], usual[count] = usual[i];
      std::swap(times[count++], times[i]);
    }
    rows.resize(count), usual.resize(count), times.resize(count);
  }

  /// Median of the rank's peers. A slow rank moves that of a few ranks.
  double usual_of_peers(size_t row, size_t rank) const {
    constexpr size_t kFew = 4;
    if (times[row].size() > kFew) return usual[row];
    std::vector<double> peers = times[row];
    peers.erase(peers.begin() + ptrdiff_t(rank));
    return interpolated_median(std::move(peers));
  }

  /// Log of the time over the peers' in each row; NaN in rows without their work or the rank's.
  std::vector<double> excesses(size_t rank) const {
    std::vector<double> found;
    for (size_t i = 0; i < rows.size(); ++i) {
      const double peers = usual_of_peers(i, rank);
      const double local = times[i][rank];
      found.push_back(peers > 0 && local > 0 ? std::log(local / peers) : NAN);
    }
    return found;
  }
};

/// Value that a normal variable exceeds with this probability (Abramowitz and Stegun 26.2.23).
double normal_quantile(double probability) {
  const double t = std::sqrt(-2 * std::log(probability));
  return t - (2.515517 + t * (.802853 + t * .010328)) /
                 (1 + t * (1.432788 + t * (.189269 + t * .001308)));
}

/// Quantile of Student's distribution (Abramowitz and Stegun 26.7.5).
double student_quantile(double probability, double freedom) {
  const double z = normal_quantile(probability), z2 = z * z;
  return z *
         (1 + (z2 + 1) / (4 * freedom) + (5 * z2 * z2 + 16 * z2 + 3) / (96 * freedom * freedom) +
          (3 * z2 * z2 * z2 + 19 * z2 * z2 + 17 * z2 - 15) / (384 * freedom * freedom * freedom));
}

/// Variance of a median of correlated values over that of independent ones: of their signs, which
/// outliers do not move, with Bartlett's weights.
double inflation_of(std::span<const double> values, double median) {
  constexpr size_t kLags = 3;
  double inflation = 1;
  for (size_t lag = 1; lag <= kLags && lag < values.size(); ++lag) {
    double same = 0;
    for (size_t i = lag; i < values.size(); ++i) {
      same += (values[i] > median) == (values[i - lag] > median) ? 1 : -1;
    }
    inflation += 2 * (1 - double(lag) / (kLags + 1)) * same / double(values.size());
  }
  return std::max(1.0, inflation);
}

/// Mean of the middle half of values.
struct MiddleMean {
  double mean = 0, error = 0;  ///< standard error
  double freedom = 0;
};
MiddleMean middle_mean(std::span<const double> values) {
  std::vector<double> sorted(values.begin(), values.end());
  std::ranges::sort(sorted);
  const size_t cut = sorted.size() / 4, middle_count = sorted.size() - 2 * cut;
  MiddleMean middle{.freedom = double(middle_count) - 1};
  for (size_t i = cut; i < cut + middle_count; ++i) middle.mean += sorted[i] / double(middle_count);
  // Winsorized variance (Tukey and McLaughlin 1963).
  double winsorized = 0, squares = 0;
  const auto clamped = [&](double value) {
    return std::clamp(value, sorted[cut], sorted[cut + middle_count - 1]);
  };
  for (const double value : sorted) winsorized += clamped(value) / double(sorted.size());
  for (const double value : sorted) squares += std::pow(clamped(value) - winsorized, 2);
  middle.error = std::sqrt(squares / (double(middle_count) * middle.freedom) *
                           inflation_of(values, sorted[sorted.size() / 2]));
  return middle;
}

/// Begins of windows of `length` in `rows`, each half of one after the other, and of the last one.
std::vector<size_t> window_begins(size_t rows, size_t length) {
  std::vector<size_t> begins;
  for (size_t begin = 0; begin + length < rows; begin += length / 2) begins.push_back(begin);
  begins.push_back(rows - length);
  return begins;
}

/// Lengths of windows: the shortest, twice that and so on.
std::vector<size_t> window_lengths(size_t rows, size_t shortest) {
  std::vector<size_t> lengths{std::min(shortest, rows)};
  while (2 * lengths.back() <= rows) lengths.push_back(2 * lengths.back());
  return lengths;
}

/// Rows [begin, end) in which a rank is slow by about `excess`: those whose excesses over half of
/// it have the largest sum (a CUSUM in both directions).
std::pair<size_t, size_t> slow_rows(std::span<const double> excesses, double excess) {
  std::pair<size_t, size_t> found{0, 0};
  double sum = 0, largest = 0;
  size_t begin = 0;
  for (size_t i = 0; i < excesses.size(); ++i) {
    if (!std::isnan(excesses[i])) {
      sum += std::clamp(excesses[i] - excess / 2, -2 * excess, 2 * excess);
    }
    if (sum <= 0) sum = 0, begin = i + 1;
    if (sum > largest) largest = sum, found = {begin, i + 1};
  }
  return found;
}

struct SlowWindow {
  size_t begin = 0, end = 0;
  double excess = 0;  ///< mean of the middle half; 0: no window
};

/// Window of `length` with the largest excess that noise cannot explain.
SlowWindow judge_windows(std::span<const double> excesses, size_t length, double min_excess,
                         double probability) {
  std::vector<MiddleMean> windows;
  std::vector<size_t> begins;
  std::vector<double> errors;
  for (const size_t begin : window_begins(excesses.size(), length)) {
    std::vector<double> values;
    for (const double excess : excesses.subspan(begin, length)) {
      if (!std::isnan(excess)) values.push_back(excess);
    }
    if (values.size() * 2 < length) continue;
    windows.push_back(middle_mean(values));
    errors.push_back(windows.back().error);
    begins.push_back(begin);
  }
  if (errors.empty()) return {};
  // The error of a window is uncertain, so that of the others counts as much.
  const auto usual = errors.begin() + ptrdiff_t((errors.size() - 1) / 2);
  std::ranges::nth_element(errors, usual);
  SlowWindow slow;
  for (size_t i = 0; i < windows.size(); ++i) {
    const MiddleMean& window = windows[i];
    const double error = std::max(window.error, *usual);
    const double freedom = window.freedom * (windows.size() < 3 ? 1 : 2);
    if (window.mean >= std::max(min_excess, student_quantile(probability, freedom) * error) &&
        window.mean > slow.excess) {
      slow = {begins[i], begins[i] + length, window.mean};
    }
  }
  return slow;
}

/// Whether a window may have a mean of at least `min_excess`.
bool may_exceed(std::span<const double> excesses, size_t length, double min_excess) {
  for (const size_t begin : window_begins(excesses.size(), length)) {
    std::vector<double> values;
    for (const double excess : excesses.subspan(begin, length)) {
      if (!std::isnan(excess)) values.push_back(excess);
    }
    if (!values.empty() && interpolated_median(std::move(values)) >= min_excess / 2) return true;
  }
  return false;
}

/// The rank in this phase, if it is slow in one of the windows.
std::optional<Straggler> judge_rank(const PhaseTable& table, std::span<const RankRow> rows,
                                    size_t rank, const StragglerOptions& options,
                                    double probability) {
  const std::vector<double> excesses = table.excesses(rank);
  const std::span<const double> all(excesses);
  const double min_excess = std::log1p(options.min_excess);
  SlowWindow slow;
  for (const size_t length : window_lengths(all.size(), size_t(options.window))) {
    if (!may_exceed(all, length, min_excess)) continue;
    const SlowWindow of_length = judge_windows(all, length, min_excess, probability);
    if (of_length.excess > slow.excess) slow = of_length;
  }
  if (slow.excess == 0) return {};
  std::vector<double> excess_ms;
  double step_ms = 0;
  for (size_t i = slow.begin; i < slow.end; ++i) {
    excess_ms.push_back(table.times[i][rank] - table.usual_of_peers(i, rank));
  }
  for (size_t row = table.rows[slow.begin]; row <= table.rows[slow.end - 1]; ++row) {
    step_ms += rows[row].frames[rank].step_ms;
  }
  Straggler found;
  found.excess = std::expm1(slow.excess);
  found.share_of_step =
      interpolated_median(std::move(excess_ms)) * double(slow.end - slow.begin) / step_ms;
  if (found.share_of_step < options.min_share) return {};
  const auto [begin, end] = slow_rows(all, slow.excess);
  found.from_step = rows[table.rows[std::min(begin, slow.begin)]].first;
  found.to_step = rows[table.rows[std::max(end, slow.end) - 1]].last;
  return found;
}

/// Windows of all ranks and phases of work.
double count_windows(size_t ranks, size_t rows, const StragglerOptions& options) {
  constexpr double kWorkPhases = 6;
  double windows = 0;
  for (const size_t length : window_lengths(rows, size_t(options.window))) {
    windows += double(window_begins(rows, length).size());
  }
  return windows * double(ranks) * kWorkPhases;
}

}  // namespace

std::vector<Straggler> find_stragglers(std::span<const RankHistory> ranks,
                                       const StragglerOptions& options) {
  constexpr size_t kMinRows = 8;
  std::map<int, std::vector<const RankHistory*>> stages;
  for (const RankHistory& history : ranks) stages[history.position.pp].push_back(&history);
  std::vector<Straggler> found;
  for (const auto& [pp, stage] : stages) {
    if (stage.size() < 2) continue;
    const std::vector<RankRow> rows = align(stage, kMaxRows);
    if (rows.size() < kMinRows) continue;
    const double probability =
        options.false_alarms / count_windows(ranks.size(), rows.size(), options);
    for (size_t phase = 0; phase < kPhases; ++phase) {
      if (!is_work(Phase(phase))) continue;
      const PhaseTable table(rows, Phase(phase));
      if (table.rows.size() < kMinRows) continue;
      for (size_t rank = 0; rank < stage.size(); ++rank) {
        auto straggler = judge_rank(table, rows, rank, options, probability);
        if (!straggler) continue;
        straggler->rank = stage[rank]->position.rank;
        straggler->phase = Phase(phase);
        found.push_back(*straggler);
      }
    }
  }
  std::ranges::stable_sort(found, std::greater<>(), &Straggler::share_of_step);
  return found;
}

std::string describe(const Straggler& straggler, const RankPosition& position) {
  return fmt::format(
      "rank {} ({}): {} takes {:.1f} % longer than on its peers, {:.1f} % of the step, steps {} to "
      "{}",
      straggler.rank, describe(position), name_of(straggler.phase), 100 * straggler.excess,
      100 * straggler.share_of_step, straggler.from_step, straggler.to_step);
}

}  // namespace tandem::report
