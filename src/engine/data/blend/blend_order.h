// Order in which a blend takes its samples from several sources.
//
// Sample i is of the source in whose interval the fractional part of i times the golden ratio lies;
// the intervals have the sources' weights as their lengths. So every stretch of samples has close
// to its share of each source, and how many of the first n samples are of a source is computed in
// O(log n), without a table: the order has no state but the number of the next sample.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

/// Source of a blend: its share of the samples, and the samples of its epoch.
struct SampledSource {
  double weight = 1;
  int64_t windows = 0;
  bool operator==(const SampledSource&) const = default;
};

class BlendOrder {
 public:
  /// `weights`: above 0, of any sum.
  explicit BlendOrder(std::span<const double> weights);
  /// Source of `sample`, below 2^56.
  size_t source(int64_t sample) const;
  /// Number of samples of `source` before `sample`.
  int64_t count(size_t source, int64_t sample) const;

 private:
  std::vector<uint64_t> bounds_;  ///< begin of each source's interval, then the end of the last
};

}  // namespace tandem
