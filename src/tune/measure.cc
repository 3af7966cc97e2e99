#include "tune/measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "core/system/process/clock.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

/// Quantile by linear interpolation between the two nearest of `sorted`, which is not empty.
double quantile(const std::vector<double>& sorted, double share) {
  const double at = share * double(sorted.size() - 1);
  const size_t below = size_t(at), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - double(below)) * (sorted[above] - sorted[below]);
}

}  // namespace

TimedRun timed(Communicator& comm, std::function<void()> call) {
  return [&comm, call = std::move(call)] {
    comm.barrier("measure");
    const auto begin = Clock::now();
    call();
    return seconds_since(begin);
  };
}

std::vector<std::vector<double>> measure(Communicator& comm,
                                         std::span<const std::function<void()>> variants,
                                         const MeasureOptions& options) {
  std::vector<TimedRun> with_time;
  for (const auto& variant : variants) with_time.push_back(timed(comm, variant));
  return measure(comm, std::span<const TimedRun>(with_time), options);
}

std::vector<std::vector<double>> measure(Communicator& comm, std::span<const TimedRun> variants,
                                         const MeasureOptions& options) {
  std::vector<std::vector<double>> samples(variants.size());
  std::vector<double> round(variants.size());
  for (const auto& variant : variants) variant();
  std::vector<size_t> order(variants.size());
  std::iota(order.begin(), order.end(), 0);
  double spent = 0;
  for (int r = 0; r < options.max_rounds; ++r) {
    if (r >= options.min_rounds && spent > options.seconds) break;
    for (size_t i = order.size(); i > 1; --i) {
      const auto word = philox(options.seed, uint64_t(r), i)[0];
      std::swap(order[i - 1], order[word % i]);
    }
    for (const size_t v : order) round[v] = variants[v]();
    max_over_ranks(comm, round);
    for (size_t v = 0; v < variants.size(); ++v) {
      samples[v].push_back(round[v]);
      spent += round[v];
    }
  }
  return samples;
}

void max_over_ranks(Communicator& comm, std::span<double> values) {
  for (const auto& blob : comm.exchange(std::as_bytes(values), "measure")) {
    for (size_t i = 0; i < values.size(); ++i) {
      double other;
      std::memcpy(&other, blob.data() + i * sizeof other, sizeof other);
      values[i] = std::max(values[i], other);
    }
  }
}

double max_over_ranks(Communicator& comm, double value) {
  max_over_ranks(comm, std::span(&value, 1));
  return value;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return quantile(values, 0.5);
}

double relative_spread(std::vector<double> values) {
  if (values.size() < 2) return 0;
  std::sort(values.begin(), values.end());
  const double middle = quantile(values, 0.5);
  return middle > 0 ? (quantile(values, 0.75) - quantile(values, 0.25)) / middle : 0;
}

}  // namespace tandem
